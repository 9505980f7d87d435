//! Kernels against an interpreter: what the search agent writes computes what the region says.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    clippy::print_stderr,
    clippy::format_push_string,
    reason = "helpers of tests"
)]

mod common;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, TensorMeta, Value};
use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::Device;
use autokernel_core::region::Region;
use autokernel_search::propose;
use common::interpreter::several;
use common::process::{check, compiler, normal, random_inputs};
use common::{Random, Sketch, ints, r};
use proptest::prelude::*;

const DEVICE: Device = Device { sms: 0, shared: 0, cores: 2 };

fn pick(file: &KernelFile, random: &mut Random) -> Params {
    file.params
        .iter()
        .map(|(name, values)| (name.clone(), values[random.next() as usize % values.len()]))
        .collect()
}

/// Every kernel file of a region, at its first guess and at one other point.
fn verify(region: &Region, seed: u64) {
    if !compiler() {
        return;
    }
    let mut random = Random(seed);
    for file in propose(region, &DEVICE).unwrap() {
        for params in [file.default_params(), pick(&file, &mut random)] {
            let inputs = random_inputs(region, &mut random, normal);
            check(region, &file, &params, &inputs, 2).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

fn keepdim(x: &str, dims: &[i64]) -> Vec<Arg<String>> {
    vec![r(x), ints(dims), Arg::Bool(true)]
}

#[test]
fn pointwise_operators_with_nan_and_infinities() {
    if !compiler() {
        return;
    }
    let shape = [3, 37];
    let f = |v: f64| Arg::Float(v);
    let unary = [
        "neg",
        "abs",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "square",
        "exp",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
        "erf",
        "silu",
        "gelu",
        "relu",
        "leaky_relu",
        "elu",
        "softplus",
    ];
    let mut sketch = Sketch::default();
    let (x, y) = (sketch.input(Dtype::F32, &shape), sketch.input(Dtype::F32, &[37]));
    let mut outputs: Vec<String> = unary
        .iter()
        .map(|name| sketch.call(&format!("aten.{name}.default"), vec![r(&x)], Dtype::F32, &shape))
        .collect();
    for name in ["maximum.default", "minimum.default", "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"]
    {
        outputs.push(sketch.call(&format!("aten.{name}"), vec![r(&x), r(&y)], Dtype::F32, &shape));
    }
    for exponent in [2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 2.5] {
        outputs.push(sketch.call("aten.pow.Tensor_Scalar", vec![r(&x), f(exponent)], Dtype::F32, &shape));
    }
    outputs.push(sketch.call("aten.clamp.default", vec![r(&x), f(-1.5), f(2.0)], Dtype::F32, &shape));
    outputs.push(sketch.call("aten.hardtanh.default", vec![r(&x), f(-1.0), f(1.0)], Dtype::F32, &shape));
    outputs.push(sketch.call("aten.rsub.Scalar", vec![r(&x), f(1.5)], Dtype::F32, &shape));
    let tanh = vec![("approximate".to_owned(), Arg::Str("tanh".to_owned()))];
    outputs.push(sketch.call_as(
        "aten.gelu.default",
        vec![r(&x)],
        tanh,
        Value::Tensor(TensorMeta::contiguous(Dtype::F32, &shape)),
    ));
    let above = sketch.call("aten.gt.Tensor", vec![r(&x), r(&y)], Dtype::Bool, &shape);
    let apart = sketch.call("aten.ne.Scalar", vec![r(&x), f(0.0)], Dtype::Bool, &shape);
    let both = sketch.call("aten.logical_and.default", vec![r(&above), r(&apart)], Dtype::Bool, &shape);
    let not = sketch.call("aten.logical_not.default", vec![r(&both)], Dtype::Bool, &shape);
    outputs.push(sketch.call("aten.where.self", vec![r(&not), r(&x), r(&y)], Dtype::F32, &shape));
    outputs.extend([above, not]);
    let region = sketch.region(&outputs);
    let mut random = Random(7);
    let special =
        [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, 1.0, -1.0, 3.5, -20.0, 15.0, 0.3, -0.7, 2.0];
    let inputs = random_inputs(&region, &mut random, |random, _| {
        let n = random.next() as usize;
        if n.is_multiple_of(3) { random.normal() } else { special[n % special.len()] }
    });
    for file in propose(&region, &DEVICE).unwrap() {
        check(&region, &file, &file.default_params(), &inputs, 2).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn reductions_that_depend_on_each_other() {
    for (shape, dtype) in
        [([5, 61], Dtype::F32), ([2, 8], Dtype::F64), ([7, 128], Dtype::Bf16), ([3, 100], Dtype::F16)]
    {
        let column = [shape[0], 1];
        let mut sketch = Sketch::default();
        let x = sketch.input(dtype, &shape);
        let mean = sketch.call("aten.mean.dim", keepdim(&x, &[-1]), dtype, &column);
        let centred = sketch.call("aten.sub.Tensor", vec![r(&x), r(&mean)], dtype, &shape);
        let absolute = sketch.call("aten.abs.default", vec![r(&centred)], dtype, &shape);
        let spread = sketch.call("aten.amax.default", keepdim(&absolute, &[-1]), dtype, &column);
        let scaled = sketch.call("aten.div.Tensor", vec![r(&centred), r(&spread)], dtype, &shape);
        let softmax = sketch.call(
            "aten._softmax.default",
            vec![r(&scaled), Arg::Int(-1), Arg::Bool(false)],
            dtype,
            &shape,
        );
        let flat = sketch.call("aten.logsumexp.default", vec![r(&scaled), ints(&[-1])], dtype, &[shape[0]]);
        verify(&sketch.region(&[scaled, softmax, flat]), 11);
    }
}

#[test]
fn normalisation_over_two_dimensions_with_three_results() {
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &[3, 5, 11]);
    let (weight, bias) = (sketch.input(Dtype::F32, &[5, 11]), sketch.input(Dtype::F32, &[5, 11]));
    let metas =
        [&[3, 5, 11][..], &[3, 1, 1], &[3, 1, 1]].map(|shape| TensorMeta::contiguous(Dtype::F32, shape));
    let args = vec![r(&x), ints(&[5, 11]), r(&weight), r(&bias), Arg::Float(1e-5)];
    let norm = sketch.call_as("aten.native_layer_norm.default", args, vec![], several(metas.to_vec()));
    let parts: Vec<String> = [0, 1, 2]
        .iter()
        .map(|n| {
            sketch.call(
                "getitem",
                vec![r(&norm), Arg::Int(*n)],
                Dtype::F32,
                &metas[*n as usize].shape.clone(),
            )
        })
        .collect();
    let bent = sketch.call("aten.gelu.default", vec![r(&parts[0])], Dtype::F32, &[3, 5, 11]);
    verify(&sketch.region(&[bent, parts[1].clone(), parts[2].clone()]), 3);
}

/// Statistics of each channel, on rows that are images.
#[test]
fn channels_of_images() {
    let shape = [2, 3, 4, 7];
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &shape);
    let parts: Vec<String> = (0..4).map(|_| sketch.input(Dtype::F32, &[3])).collect();
    let squared = sketch.call("aten.square.default", vec![r(&parts[3])], Dtype::F32, &[3]);
    let mut args = vec![r(&x), r(&parts[0]), r(&parts[1]), r(&parts[2]), r(&squared)];
    args.extend([Arg::Float(0.1), Arg::Float(1e-5)]);
    let meta = |shape: &[u64]| TensorMeta::contiguous(Dtype::F32, shape);
    let metas = several(vec![meta(&shape), meta(&[0]), meta(&[0])]);
    let norm = sketch.call_as("aten._native_batch_norm_legit_no_training.default", args, vec![], metas);
    let first = sketch.call("getitem", vec![r(&norm), Arg::Int(0)], Dtype::F32, &shape);
    let bent = sketch.call("aten.relu.default", vec![r(&first)], Dtype::F32, &shape);
    verify(&sketch.region(&[bent]), 17);
}

/// `q * cos + cat(-q2, q1) * sin` on a transposed `q`: two segments, strided rows, one kernel.
#[test]
fn rotation_of_a_transposed_tensor() {
    for half in [9, 16] {
        let (tokens, heads, width) = (5, 3, 2 * half);
        let shape = [1, heads, tokens, width];
        let strided = TensorMeta {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            stride: vec![heads * tokens * width, width, heads * width, 1],
        };
        let mut sketch = Sketch::default();
        let q = sketch.input_as(strided.clone());
        let (cos, sin) = (
            sketch.input(Dtype::F32, &[1, 1, tokens, width]),
            sketch.input(Dtype::F32, &[1, 1, tokens, width]),
        );
        let piece = TensorMeta::contiguous(Dtype::F32, &[1, heads, tokens, half]);
        let direct = sketch.call("aten.mul.Tensor", vec![r(&q), r(&cos)], Dtype::F32, &shape);
        let split = sketch.call_as(
            "aten.split.Tensor",
            vec![r(&q), Arg::Int(half as i64), Arg::Int(-1)],
            vec![],
            several(vec![piece.clone(), piece.clone()]),
        );
        let parts: Vec<String> = [0, 1]
            .iter()
            .map(|n| sketch.call("getitem", vec![r(&split), Arg::Int(*n)], Dtype::F32, &piece.shape))
            .collect();
        let neg = sketch.call("aten.neg.default", vec![r(&parts[1])], Dtype::F32, &piece.shape);
        let cat = sketch.call(
            "aten.cat.default",
            vec![Arg::List(vec![r(&neg), r(&parts[0])]), Arg::Int(-1)],
            Dtype::F32,
            &shape,
        );
        let crossed = sketch.call("aten.mul.Tensor", vec![r(&cat), r(&sin)], Dtype::F32, &shape);
        let sum =
            sketch.call_as("aten.add.Tensor", vec![r(&direct), r(&crossed)], vec![], Value::Tensor(strided));
        verify(&sketch.region(&[sum]), half);
    }
}

#[test]
fn several_outputs_and_views_between() {
    let mut sketch = Sketch::default();
    let (x, y) = (sketch.input(Dtype::F32, &[2, 6, 40]), sketch.input(Dtype::F32, &[2, 6, 40]));
    let mask = sketch.input(Dtype::Bool, &[2, 6, 1]);
    let sum = sketch.call("aten.add.Tensor", vec![r(&x), r(&y)], Dtype::F32, &[2, 6, 40]);
    let view = sketch.call("aten.view.default", vec![r(&sum), ints(&[12, 40])], Dtype::F32, &[12, 40]);
    let mean = sketch.call("aten.mean.dim", keepdim(&view, &[1]), Dtype::F32, &[12, 1]);
    let back = sketch.call("aten.view.default", vec![r(&mean), ints(&[2, 6, 1])], Dtype::F32, &[2, 6, 1]);
    let off = sketch.call("aten.sub.Tensor", vec![r(&sum), r(&back)], Dtype::F32, &[2, 6, 40]);
    let masked = sketch.call(
        "aten.masked_fill.Scalar",
        vec![r(&off), r(&mask), Arg::Float(-2.0)],
        Dtype::F32,
        &[2, 6, 40],
    );
    verify(&sketch.region(&[sum, masked, mean]), 5);
}

#[test]
fn explicit_casts_round_and_implicit_ones_do_not() {
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::Bf16, &[4, 50]);
    let wide = sketch.call("aten._to_copy.default", vec![r(&x)], Dtype::F32, &[4, 50]);
    let third = sketch.call("aten.mul.Tensor", vec![r(&wide), Arg::Float(1.0 / 3.0)], Dtype::F32, &[4, 50]);
    let narrow = sketch.call("aten._to_copy.default", vec![r(&third)], Dtype::Bf16, &[4, 50]);
    let again = sketch.call("aten._to_copy.default", vec![r(&narrow)], Dtype::F32, &[4, 50]);
    let lost = sketch.call("aten.sub.Tensor", vec![r(&third), r(&again)], Dtype::F32, &[4, 50]);
    let large = sketch.call("aten.mul.Tensor", vec![r(&lost), Arg::Float(10.0)], Dtype::F32, &[4, 50]);
    verify(&sketch.region(&[large]), 9);
}

/// A broadcast whose rows are computed again for each copy, and a dimension that a view cuts.
#[test]
fn repeated_heads_and_cut_dimensions() {
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &[2, 3, 24]);
    let scale = sketch.input(Dtype::F32, &[2, 9, 8]);
    let bent = sketch.call("aten.tanh.default", vec![r(&x)], Dtype::F32, &[2, 3, 24]);
    let cut = sketch.call("aten.view.default", vec![r(&bent), ints(&[2, 9, 8])], Dtype::F32, &[2, 9, 8]);
    let scaled = sketch.call("aten.mul.Tensor", vec![r(&cut), r(&scale)], Dtype::F32, &[2, 9, 8]);
    let lifted =
        sketch.call("aten.unsqueeze.default", vec![r(&scaled), Arg::Int(1)], Dtype::F32, &[2, 1, 9, 8]);
    let spread = TensorMeta { dtype: Dtype::F32, shape: vec![2, 4, 9, 8], stride: vec![72, 0, 8, 1] };
    let expanded = sketch.call_as(
        "aten.expand.default",
        vec![r(&lifted), ints(&[2, 4, 9, 8])],
        vec![],
        Value::Tensor(spread),
    );
    let copy = sketch.call("aten.clone.default", vec![r(&expanded)], Dtype::F32, &[2, 4, 9, 8]);
    verify(&sketch.region(&[copy]), 13);
}

/// An output of one element a row without any reduction, and rows that are summed in blocks.
#[test]
fn gates_of_rows_and_long_rows() {
    let mut sketch = Sketch::default();
    let (x, gate) = (sketch.input(Dtype::F32, &[6, 3, 20]), sketch.input(Dtype::F32, &[6, 3, 1]));
    let open = sketch.call("aten.sigmoid.default", vec![r(&gate)], Dtype::F32, &[6, 3, 1]);
    let gated = sketch.call("aten.mul.Tensor", vec![r(&x), r(&open)], Dtype::F32, &[6, 3, 20]);
    verify(&sketch.region(&[open, gated]), 31);

    let shape = [3, 20_011];
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &shape);
    let bent = sketch.call("aten.tanh.default", vec![r(&x)], Dtype::F32, &shape);
    let (mean, top) = (keepdim(&bent, &[-1]), keepdim(&bent, &[-1]));
    let mean = sketch.call("aten.mean.dim", mean, Dtype::F32, &[3, 1]);
    let top = sketch.call("aten.amax.default", top, Dtype::F32, &[3, 1]);
    verify(&sketch.region(&[mean, top]), 37);
}

#[test]
fn rarer_activations() {
    let shape = [5, 23];
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &shape);
    let names = ["hardswish", "hardsigmoid", "mish", "log2", "exp2"];
    let outputs: Vec<String> = names
        .iter()
        .map(|name| sketch.call(&format!("aten.{name}.default"), vec![r(&x)], Dtype::F32, &shape))
        .collect();
    verify(&sketch.region(&outputs), 29);
}

/// Large enough to be written around the caches, and by several threads; also as one flat loop.
#[test]
fn large_outputs_are_streamed() {
    for (flat, dtype, rows) in [(true, Dtype::F64, 2048), (false, Dtype::F32, 4096)] {
        let shape = [rows, 528];
        let mut sketch = Sketch::default();
        let (x, y) = (sketch.input(dtype, &shape), sketch.input(dtype, &[528]));
        let sum = sketch.call("aten.add.Tensor", vec![r(&x), r(if flat { &x } else { &y })], dtype, &shape);
        let bent = sketch.call("aten.tanh.default", vec![r(&sum)], dtype, &shape);
        let region = sketch.region(&[bent]);
        let file = propose(&region, &DEVICE).unwrap().remove(0);
        assert!(file.params.contains_key("STREAM") && file.params.contains_key("AHEAD"));
        let mut params = file.default_params();
        params.extend([("STREAM".to_owned(), 1), ("AHEAD".to_owned(), 512)]);
        if compiler() {
            let inputs = random_inputs(&region, &mut Random(21), normal);
            check(&region, &file, &params, &inputs, 3).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

/// PyTorch rounds a number to the type of the narrow tensor that it is compared with.
#[test]
fn numbers_are_rounded_before_comparing() {
    let shape = [4, 40];
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::Bf16, &shape);
    let same = sketch.call("aten.eq.Scalar", vec![r(&x), Arg::Float(0.1)], Dtype::Bool, &shape);
    let region = sketch.region(&[same]);
    let file = propose(&region, &DEVICE).unwrap().remove(0);
    assert!(file.source.contains("rounded<bf16>(0.1f)"), "{}", file.source);
}

#[derive(Clone, Copy, Debug)]
struct Step {
    kind: u8,
    a: u8,
    b: u8,
}

/// A region from random steps; everything stays of moderate size.
fn random_region(rows: u64, columns: u64, dtype: Dtype, steps: &[Step]) -> Region {
    let shape = [rows, columns];
    let mut sketch = Sketch::default();
    let (x, y) = (sketch.input(dtype, &shape), sketch.input(dtype, &[columns]));
    let mut full = vec![x.clone()];
    let mut other = vec![y, sketch.input(dtype, &[rows, 1])];
    for step in steps {
        let a = full[step.a as usize % full.len()].clone();
        let all: Vec<&String> = full.iter().chain(&other).collect();
        let b = all[step.b as usize % all.len()].clone();
        let column = [rows, 1];
        let unary = ["tanh", "sigmoid", "abs", "neg", "relu", "silu", "gelu", "sin", "erf", "cos"];
        match step.kind % 8 {
            0 | 1 => full.push(sketch.call(
                &format!("aten.{}.default", unary[step.b as usize % unary.len()]),
                vec![r(&a)],
                dtype,
                &shape,
            )),
            2 | 3 => {
                let op = ["add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default", "minimum.default"]
                    [step.a as usize % 5];
                let joined = sketch.call(&format!("aten.{op}"), vec![r(&a), r(&b)], dtype, &shape);
                full.push(sketch.call(
                    "aten.clamp.default",
                    vec![r(&joined), Arg::Float(-4.0), Arg::Float(4.0)],
                    dtype,
                    &shape,
                ));
            }
            4 => {
                let op = ["mean.dim", "amax.default", "amin.default"][step.b as usize % 3];
                other.push(sketch.call(&format!("aten.{op}"), keepdim(&a, &[-1]), dtype, &column));
            }
            5 => full.push(sketch.call(
                "aten._softmax.default",
                vec![r(&a), Arg::Int(1), Arg::Bool(false)],
                dtype,
                &shape,
            )),
            6 => {
                let at = i64::from(step.b) % (columns as i64 - 1) + 1;
                let (left, right) = ([rows, at as u64], [rows, columns - at as u64]);
                let end = Arg::Int(i64::MAX);
                let head = sketch.call(
                    "aten.slice.Tensor",
                    vec![r(&a), Arg::Int(1), Arg::Int(0), Arg::Int(at)],
                    dtype,
                    &left,
                );
                let tail = sketch.call(
                    "aten.slice.Tensor",
                    vec![r(&a), Arg::Int(1), Arg::Int(at), end],
                    dtype,
                    &right,
                );
                let neg = sketch.call("aten.neg.default", vec![r(&tail)], dtype, &right);
                full.push(sketch.call(
                    "aten.cat.default",
                    vec![Arg::List(vec![r(&neg), r(&head)]), Arg::Int(-1)],
                    dtype,
                    &shape,
                ));
            }
            _ => {
                let var =
                    vec![("correction".to_owned(), Arg::Int(0)), ("keepdim".to_owned(), Arg::Bool(true))];
                let meta = Value::Tensor(TensorMeta::contiguous(dtype, &column));
                let var = sketch.call_as("aten.var.correction", vec![r(&a), ints(&[1])], var, meta);
                let eps = sketch.call("aten.add.Tensor", vec![r(&var), Arg::Float(0.1)], dtype, &column);
                let root = sketch.call("aten.rsqrt.default", vec![r(&eps)], dtype, &column);
                full.push(sketch.call("aten.mul.Tensor", vec![r(&a), r(&root)], dtype, &shape));
            }
        }
    }
    // Nothing is left over: every value that nobody reads is an output.
    let mut read = std::collections::BTreeSet::new();
    sketch.nodes.iter().for_each(|node| {
        node.for_each_operand(&mut |name| {
            read.insert(name.clone());
        });
    });
    let calls = sketch.nodes.iter().filter(|node| node.kind == autokernel_core::graph::NodeKind::Call);
    let outputs: Vec<String> =
        calls.map(|node| node.name.clone()).filter(|name| !read.contains(name)).collect();
    sketch.region(&outputs)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_regions(
        rows in prop::sample::select(vec![1_u64, 2, 7, 13]),
        columns in prop::sample::select(vec![8_u64, 9, 16, 31, 61, 64, 97, 160]),
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::F32, Dtype::F64]),
        steps in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u8>()), 2..9),
        seed in any::<u64>(),
    ) {
        let steps: Vec<Step> = steps.into_iter().map(|(kind, a, b)| Step { kind, a, b }).collect();
        let region = random_region(rows, columns, dtype, &steps);
        let files = match propose(&region, &DEVICE) {
            Ok(files) => files,
            Err(error) => return Err(TestCaseError::fail(format!("{error}: {:?}", region.op_names()))),
        };
        if compiler() {
            let mut random = Random(seed);
            let file = &files[seed as usize % files.len()];
            let inputs = random_inputs(&region, &mut random, normal);
            let params = pick(file, &mut random);
            check(&region, file, &params, &inputs, 1 + seed as usize % 3).map_err(TestCaseError::fail)?;
        }
    }

    #[test]
    fn random_layouts(
        sizes in (prop::sample::select(vec![1_u64, 2, 5]), prop::sample::select(vec![1_u64, 3, 7]), prop::sample::select(vec![8_u64, 12, 33])),
        transposed in any::<bool>(),
        merged in any::<bool>(),
        repeat in 1_u64..4,
        normalised in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let region = layout_region(sizes, transposed, merged, repeat, normalised);
        let files = propose(&region, &DEVICE).map_err(|error| TestCaseError::fail(format!("{error}: {:?}", region.op_names())))?;
        if compiler() {
            let mut random = Random(seed);
            let inputs = random_inputs(&region, &mut random, normal);
            for file in &files {
                check(&region, file, &pick(file, &mut random), &inputs, 2).map_err(TestCaseError::fail)?;
            }
        }
    }
}

/// Permuted inputs and outputs, broadcasts in the middle, dimensions merged, cut and repeated.
fn layout_region(
    (a, b, c): (u64, u64, u64),
    transposed: bool,
    merged: bool,
    repeat: u64,
    normalised: bool,
) -> Region {
    let mut sketch = Sketch::default();
    let (x, middle) = (sketch.input(Dtype::F32, &[b, a, c]), sketch.input(Dtype::F32, &[1, b, 1]));
    let shape = [a, b, c];
    let swapped = TensorMeta { dtype: Dtype::F32, shape: shape.to_vec(), stride: vec![c, a * c, 1] };
    let x = sketch.call_as(
        "aten.transpose.int",
        vec![r(&x), Arg::Int(0), Arg::Int(1)],
        vec![],
        Value::Tensor(swapped.clone()),
    );
    let mut x = sketch.call("aten.mul.Tensor", vec![r(&x), r(&middle)], Dtype::F32, &shape);
    if normalised {
        let top = sketch.call("aten.amax.default", keepdim(&x, &[-1]), Dtype::F32, &[a, b, 1]);
        x = sketch.call("aten.sub.Tensor", vec![r(&x), r(&top)], Dtype::F32, &shape);
    }
    if merged {
        let view = sketch.call(
            "aten.view.default",
            vec![r(&x), ints(&[(a * b) as i64, c as i64])],
            Dtype::F32,
            &[a * b, c],
        );
        let bias = sketch.input(Dtype::F32, &[a * b, 1]);
        let sum = sketch.call("aten.add.Tensor", vec![r(&view), r(&bias)], Dtype::F32, &[a * b, c]);
        x = sketch.call(
            "aten.view.default",
            vec![r(&sum), ints(&[a as i64, b as i64, c as i64])],
            Dtype::F32,
            &shape,
        );
    }
    if repeat > 1 && !normalised {
        let lifted =
            sketch.call("aten.unsqueeze.default", vec![r(&x), Arg::Int(1)], Dtype::F32, &[a, 1, b, c]);
        let many = [a, repeat, b, c];
        let expanded = sketch.call(
            "aten.expand.default",
            vec![r(&lifted), ints(&many.map(|n| n as i64))],
            Dtype::F32,
            &many,
        );
        let out = sketch.call("aten.clone.default", vec![r(&expanded)], Dtype::F32, &many);
        return sketch.region(&[out]);
    }
    let meta = if transposed { swapped } else { TensorMeta::contiguous(Dtype::F32, &shape) };
    let out = sketch.call_as("aten.sigmoid.default", vec![r(&x)], vec![], Value::Tensor(meta));
    sketch.region(&[out])
}
