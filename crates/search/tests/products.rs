//! Kernels of matrix products against an interpreter: sizes, layouts, types, what follows a product.

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
use autokernel_core::kernel_file::Params;
use autokernel_core::plan::Device;
use autokernel_core::region::Region;
use autokernel_search::propose;
use common::process::{check, compiler, normal, random_inputs};
use common::{Random, Sketch, r};

const DEVICE: Device = Device { sms: 0, shared: 0, cores: 4 };

/// The first guess on one thread and two other points on several.
fn verify(region: &Region, seed: u64) {
    if !compiler() {
        return;
    }
    let mut random = Random(seed);
    let file = propose(region, &DEVICE).unwrap().remove(0);
    let mut points = vec![(file.default_params(), 1)];
    for threads in [2, 3] {
        let pick = |(name, values): (&String, &Vec<i64>)| {
            (name.clone(), values[random.next() as usize % values.len()])
        };
        let mut params: Params = file.params.iter().map(pick).collect();
        // Small sizes must be parted as well.
        params.insert("GRAIN".to_owned(), *file.params["GRAIN"].iter().min().unwrap());
        points.push((params, threads));
    }
    for (params, threads) in points {
        let inputs = random_inputs(region, &mut random, normal);
        check(region, &file, &params, &inputs, threads).unwrap_or_else(|error| panic!("{error}"));
    }
}

fn linear(sketch: &mut Sketch, x: &str, w: &str, bias: Option<&str>) -> String {
    let dtype = sketch.meta(x).dtype;
    let mut shape = sketch.meta(x).shape.clone();
    *shape.last_mut().unwrap() = sketch.meta(w).shape[0];
    let args = [r(x), r(w)].into_iter().chain(bias.map(r)).collect();
    sketch.call("aten.linear.default", args, dtype, &shape)
}

fn one(dtype: Dtype, rows: &[u64], depth: u64, columns: u64, constant: bool, bias: bool) -> Region {
    let mut sketch = Sketch::default();
    let shape: Vec<u64> = rows.iter().copied().chain([depth]).collect();
    let x = sketch.input(dtype, &shape);
    let w = if constant {
        sketch.constant(dtype, &[columns, depth])
    } else {
        sketch.input(dtype, &[columns, depth])
    };
    let b = sketch.constant(dtype, &[columns]);
    let y = linear(&mut sketch, &x, &w, bias.then_some(&b));
    sketch.region(&[y])
}

#[test]
fn sizes_from_one_to_several_blocks() {
    let sizes: [(&[u64], u64, u64); 9] = [
        (&[1], 1, 8),
        (&[1], 300, 97),
        (&[2], 17, 32),
        (&[13], 64, 33),
        (&[14], 5, 64),
        (&[29], 31, 131),
        (&[2, 3, 7], 16, 41),
        (&[97], 101, 103),
        (&[128], 48, 96),
    ];
    for (seed, (rows, depth, columns)) in sizes.into_iter().enumerate() {
        let seed = seed as u64;
        verify(&one(Dtype::F32, rows, depth, columns, seed.is_multiple_of(2), seed.is_multiple_of(3)), seed);
    }
}

#[test]
fn element_types() {
    for (seed, dtype) in [Dtype::F64, Dtype::Bf16, Dtype::F16].into_iter().enumerate() {
        verify(&one(dtype, &[23], 37, 43, true, true), seed as u64);
        verify(&one(dtype, &[3], 29, 70, false, false), seed as u64);
    }
}

#[test]
fn matrices_lie_in_any_order() {
    // Both operands as they are, transposed by a view in the region, and given with odd strides.
    for (seed, transposed) in [[false, false], [true, false], [false, true], [true, true]].iter().enumerate()
    {
        let (rows, depth, columns) = (37, 29, 45);
        let mut sketch = Sketch::default();
        let mut matrix = |shape: [u64; 2], transposed: bool| {
            if !transposed {
                // A part of wider rows.
                let meta =
                    TensorMeta { dtype: Dtype::F32, shape: shape.to_vec(), stride: vec![shape[1] + 3, 1] };
                return sketch.input_as(meta);
            }
            let x = sketch.input(Dtype::F32, &[shape[1], shape[0]]);
            let meta = TensorMeta { dtype: Dtype::F32, shape: shape.to_vec(), stride: vec![1, shape[0]] };
            sketch.call_as("aten.t.default", vec![r(&x)], vec![], Value::Tensor(meta))
        };
        let a = matrix([rows, depth], transposed[0]);
        let b = matrix([depth, columns], transposed[1]);
        let y = sketch.call("aten.mm.default", vec![r(&a), r(&b)], Dtype::F32, &[rows, columns]);
        verify(&sketch.region(&[y]), seed as u64);
    }
}

#[test]
fn a_sum_with_factors() {
    for (seed, (beta, alpha)) in [(1.0, 1.0), (0.5, -2.0), (0.0, 3.0)].into_iter().enumerate() {
        for bias in [&[33_u64][..], &[19, 33], &[19, 1]] {
            let mut sketch = Sketch::default();
            let (bias, a, b) = (
                sketch.input(Dtype::F32, bias),
                sketch.input(Dtype::F32, &[19, 21]),
                sketch.input(Dtype::F32, &[21, 33]),
            );
            let factors =
                vec![("beta".to_owned(), Arg::Float(beta)), ("alpha".to_owned(), Arg::Float(alpha))];
            let value = Value::Tensor(TensorMeta::contiguous(Dtype::F32, &[19, 33]));
            let y = sketch.call_as("aten.addmm.default", vec![r(&bias), r(&a), r(&b)], factors, value);
            // What is added with a factor of zero is no input of the computation.
            verify(&sketch.region(&[y]), seed as u64);
        }
    }
}

#[test]
fn what_follows_sees_rows_columns_and_both() {
    let mut sketch = Sketch::default();
    let (rows, depth, columns) = (31, 26, 75);
    let shape = [1, rows, columns];
    let x = sketch.input(Dtype::F32, &[1, rows, depth]);
    let (w, b) = (sketch.constant(Dtype::F32, &[columns, depth]), sketch.constant(Dtype::F32, &[columns]));
    let (residual, scale) = (sketch.input(Dtype::F32, &shape), sketch.input(Dtype::F32, &[1, rows, 1]));
    let product = linear(&mut sketch, &x, &w, Some(&b));
    let bent = sketch.call("aten.gelu.default", vec![r(&product)], Dtype::F32, &shape);
    let scaled = sketch.call("aten.mul.Tensor", vec![r(&bent), r(&scale)], Dtype::F32, &shape);
    let sum = sketch.call("aten.add.Tensor", vec![r(&residual), r(&scaled)], Dtype::F32, &shape);
    let to = vec![("dtype".to_owned(), Arg::Dtype(Dtype::Bf16))];
    let half = sketch.call_as(
        "aten._to_copy.default",
        vec![r(&sum)],
        to,
        Value::Tensor(TensorMeta::contiguous(Dtype::Bf16, &shape)),
    );
    // The product itself, the sum and its rounding all leave.
    verify(&sketch.region(&[product, sum, half]), 3);
}

fn gate(constant: bool) -> Region {
    let mut sketch = Sketch::default();
    let (rows, depth, columns) = (41, 33, 77);
    let x = sketch.input(Dtype::F32, &[rows, depth]);
    let mut weight = || {
        if constant {
            sketch.constant(Dtype::F32, &[columns, depth])
        } else {
            sketch.input(Dtype::F32, &[columns, depth])
        }
    };
    let (wg, wu) = (weight(), weight());
    let (g, u) = (linear(&mut sketch, &x, &wg, None), linear(&mut sketch, &x, &wu, None));
    let opened = sketch.call("aten.silu.default", vec![r(&g)], Dtype::F32, &[rows, columns]);
    let y = sketch.call("aten.mul.Tensor", vec![r(&opened), r(&u)], Dtype::F32, &[rows, columns]);
    sketch.region(&[y])
}

#[test]
fn two_products_of_one_operand_meet() {
    verify(&gate(true), 5);
    verify(&gate(false), 6);
}

#[test]
fn what_no_kernel_can_do_is_refused_with_a_reason() {
    let refused = |build: &dyn Fn(&mut Sketch, &str, &str) -> String, reason: &str| {
        let mut sketch = Sketch::default();
        let (x, w) = (sketch.input(Dtype::F32, &[24, 16]), sketch.input(Dtype::F32, &[16, 16]));
        let y = build(&mut sketch, &x, &w);
        let error = propose(&sketch.region(&[y]), &DEVICE).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    };
    let shape = [24, 16];
    refused(
        &|sketch, x, w| {
            let y = linear(sketch, x, w, None);
            linear(sketch, &y, w, None)
        },
        "multiplies what the region computes",
    );
    refused(
        &|sketch, x, w| {
            let y = linear(sketch, x, w, None);
            sketch.call(
                "aten._softmax.default",
                vec![r(&y), Arg::Int(-1), Arg::Bool(false)],
                Dtype::F32,
                &shape,
            )
        },
        "stands before a reduction",
    );
    refused(
        &|sketch, x, w| {
            let y = linear(sketch, x, w, None);
            sketch.call("aten.gt.Scalar", vec![r(&y), Arg::Float(0.0)], Dtype::Bool, &shape)
        },
        "looks closely at what was computed",
    );
    refused(
        &|sketch, x, w| {
            let y = linear(sketch, x, w, None);
            let other = sketch.input(Dtype::F32, &[24, 16]);
            let z = linear(sketch, &other, w, None);
            sketch.call("aten.add.Tensor", vec![r(&y), r(&z)], Dtype::F32, &shape)
        },
        "stands beside a product of other matrices",
    );
    refused(
        &|sketch, x, w| {
            let y = linear(sketch, x, w, None);
            let flipped = Value::Tensor(TensorMeta::contiguous(Dtype::F32, &[16, 24]));
            let turned = sketch.call_as(
                "aten.transpose.int",
                vec![r(&y), Arg::Int(0), Arg::Int(1)],
                vec![],
                flipped.clone(),
            );
            sketch.call_as("aten.relu.default", vec![r(&turned)], vec![], flipped)
        },
        "against the grain",
    );
}
