//! Kernels at the edges: fewer rows than threads, and indices that lie outside.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    clippy::print_stderr,
    clippy::format_push_string,
    reason = "helpers of tests"
)]

mod common;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::Arg;
use autokernel_core::plan::Device;
use autokernel_search::propose;
use common::process::{check, compiler, normal, random_inputs};
use common::{Random, Sketch, ints, r};

const DEVICE: Device = Device { sms: 0, shared: 0, cores: 2 };

fn keepdim(x: &str, dims: &[i64]) -> Vec<Arg<String>> {
    vec![r(x), ints(dims), Arg::Bool(true)]
}

/// One long row is shared by threads: sums, an extreme that depends on them, pieces, results of both kinds.
#[test]
fn a_row_that_threads_share() {
    if !compiler() {
        return;
    }
    for (rows, columns, joined) in [(1, 100_003, false), (3, 70_001, false), (1, 90_000, true)] {
        let shape = [rows, columns];
        let mut sketch = Sketch::default();
        let mut x = sketch.input(Dtype::F32, &shape);
        if joined {
            let half = [rows, columns / 2];
            let (a, b) = (sketch.input(Dtype::F32, &half), sketch.input(Dtype::F32, &half));
            let a = sketch.call("aten.tanh.default", vec![r(&a)], Dtype::F32, &half);
            let cat = sketch.call(
                "aten.cat.default",
                vec![Arg::List(vec![r(&a), r(&b)]), Arg::Int(1)],
                Dtype::F32,
                &shape,
            );
            x = sketch.call("aten.mul.Tensor", vec![r(&x), r(&cat)], Dtype::F32, &shape);
        }
        let mean = sketch.call("aten.mean.dim", keepdim(&x, &[-1]), Dtype::F32, &[rows, 1]);
        let centred = sketch.call("aten.sub.Tensor", vec![r(&x), r(&mean)], Dtype::F32, &shape);
        let top = sketch.call("aten.amax.default", keepdim(&centred, &[-1]), Dtype::F32, &[rows, 1]);
        let scaled = sketch.call("aten.div.Tensor", vec![r(&centred), r(&top)], Dtype::F32, &shape);
        let region = sketch.region(&[scaled, mean]);
        let files = propose(&region, &DEVICE).unwrap();
        assert_eq!(files.iter().filter(|file| file.note.starts_with("threads share")).count(), 1);
        let mut random = Random(41);
        for file in files {
            let inputs = random_inputs(&region, &mut random, normal);
            // Alone, by two, and by more threads than there are cores.
            for threads in [1, 2, 5] {
                check(&region, &file, &file.default_params(), &inputs, threads)
                    .unwrap_or_else(|error| panic!("{error}"));
            }
        }
    }
}

/// PyTorch raises an error for an index outside of its dimension. A kernel cannot; it reads nothing there.
#[test]
fn indices_outside_read_nothing() {
    if !compiler() {
        return;
    }
    let mut sketch = Sketch::default();
    let (table, places) = (sketch.input(Dtype::F32, &[20, 24]), sketch.input(Dtype::I64, &[40]));
    let rows = sketch.call("aten.embedding.default", vec![r(&table), r(&places)], Dtype::F32, &[40, 24]);
    let along = sketch.input(Dtype::I32, &[40, 24]);
    let args = vec![r(&rows), Arg::Int(1), r(&along)];
    let picked = sketch.call("aten.gather.default", args, Dtype::F32, &[40, 24]);
    let region = sketch.region(&[rows, picked]);
    let index = |random: &mut Random, dtype| match dtype {
        Dtype::F32 => random.normal(),
        _ => [-1.0, 19.0, 20.0, 23.0, 24.0, 2e9, -2e9, 0.0, 7.0][random.next() as usize % 9],
    };
    let inputs = random_inputs(&region, &mut Random(43), index);
    for file in propose(&region, &DEVICE).unwrap() {
        check(&region, &file, &file.default_params(), &inputs, 2).unwrap_or_else(|error| panic!("{error}"));
    }
}
