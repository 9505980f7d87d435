//! Regions in f64, node by node over whole tensors, in the plainest way.

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, TensorMeta, Value};
use autokernel_core::region::{Operand, Region, RegionNode};

use super::rounded;

/// A dense row-major tensor.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f64>,
}

impl Dense {
    fn full(shape: &[usize], value: f64) -> Self {
        Self { shape: shape.to_vec(), data: vec![value; shape.iter().product()] }
    }

    fn each_index(shape: &[usize], mut visit: impl FnMut(&[usize])) {
        let mut index = vec![0; shape.len()];
        for _ in 0..shape.iter().product() {
            visit(&index);
            for d in (0..shape.len()).rev() {
                index[d] += 1;
                if index[d] < shape[d] {
                    break;
                }
                index[d] = 0;
            }
        }
    }

    fn at(&self, index: &[usize]) -> f64 {
        let skipped = index.len() - self.shape.len();
        let flat = index[skipped..]
            .iter()
            .zip(&self.shape)
            .fold(0, |flat, (i, n)| flat * n + if *n == 1 { 0 } else { *i });
        self.data[flat]
    }

    fn make(shape: &[usize], mut value: impl FnMut(&[usize]) -> f64) -> Self {
        let mut data = vec![];
        Self::each_index(shape, |index| data.push(value(index)));
        Self { shape: shape.to_vec(), data }
    }
}

/// Elements of a stored tensor in row-major order.
pub(crate) fn read(storage: &[f64], meta: &TensorMeta) -> Dense {
    let shape: Vec<usize> = meta.shape.iter().map(|n| *n as usize).collect();
    Dense::make(&shape, |index| {
        storage[index.iter().zip(&meta.stride).map(|(i, s)| i * *s as usize).sum::<usize>()]
    })
}

/// Outputs of a region.
pub(crate) fn run(region: &Region, inputs: &[Dense]) -> Vec<Dense> {
    let mut values: Vec<Vec<Dense>> = vec![];
    for node in &region.nodes {
        let value = evaluate(node, inputs, &values);
        values.push(value);
    }
    region.outputs.iter().map(|output| values[*output][0].clone()).collect()
}

struct Scope<'a> {
    node: &'a RegionNode,
    inputs: &'a [Dense],
    values: &'a [Vec<Dense>],
}

impl Scope<'_> {
    fn tensor(&self, operand: Operand) -> &Dense {
        match operand {
            Operand::Input(n) => &self.inputs[n],
            Operand::Node(n) => &self.values[n][0],
        }
    }

    fn dense(&self, position: usize) -> Dense {
        match &self.node.args[position] {
            Arg::Ref(operand) => self.tensor(*operand).clone(),
            Arg::Int(v) => Dense::full(&[], *v as f64),
            Arg::Float(v) => Dense::full(&[], *v),
            other => panic!("{other:?}"),
        }
    }

    fn number(&self, position: usize, keyword: &str, default: f64) -> f64 {
        let keyed = self.node.kwargs.iter().find(|(key, _)| key == keyword).map(|(_, value)| value);
        match self.node.args.get(position).or(keyed) {
            Some(Arg::Int(v)) => *v as f64,
            Some(Arg::Float(v)) => *v,
            Some(Arg::Bool(v)) => f64::from(u8::from(*v)),
            _ => default,
        }
    }

    fn list(&self, position: usize) -> Vec<i64> {
        match self.node.args.get(position) {
            Some(Arg::List(items)) => {
                items.iter().map(|item| if let Arg::Int(v) = item { *v } else { 0 }).collect()
            }
            Some(Arg::Int(v)) => vec![*v],
            _ => vec![],
        }
    }
}

fn axis(dim: i64, rank: usize) -> usize {
    if dim < 0 { (dim + rank as i64) as usize } else { dim as usize }
}

fn evaluate(node: &RegionNode, inputs: &[Dense], values: &[Vec<Dense>]) -> Vec<Dense> {
    let scope = Scope { node, inputs, values };
    let shape: Vec<usize> =
        node.value.tensor().map(|meta| meta.shape.iter().map(|n| *n as usize).collect()).unwrap_or_default();
    let name = node.op.split('.').nth(1).unwrap_or(&node.op);
    if let Some(result) = movement(&scope, name, &shape) {
        return result;
    }
    if let Some(result) = reduction(&scope, name, &shape) {
        return result;
    }
    if let Some(result) = product(&scope, name, &shape) {
        return vec![result];
    }
    if name == "_native_batch_norm_legit_no_training" {
        let x: Vec<Dense> = (0..5).map(|position| scope.dense(position)).collect();
        return vec![Dense::make(&x[0].shape, |index| {
            let at = |n: usize| x[n].data[index[1]];
            (x[0].at(index) - at(3)) / (at(4) + 1e-5).sqrt() * at(1) + at(2)
        })];
    }
    let dtype = node.value.tensor().unwrap().dtype;
    let count =
        node.args.iter().take_while(|arg| matches!(arg, Arg::Ref(_) | Arg::Int(_) | Arg::Float(_))).count();
    let operands: Vec<Dense> = (0..count).map(|position| scope.dense(position)).collect();
    vec![Dense::make(&shape, |index| {
        let x: Vec<f64> = operands.iter().map(|operand| operand.at(index)).collect();
        scalar(&scope, name, dtype, &x)
    })]
}

/// Matrix products, one sum after another.
fn product(scope: &Scope<'_>, name: &str, shape: &[usize]) -> Option<Dense> {
    let first = match name {
        "mm" | "linear" => 0,
        "addmm" => 1,
        _ => return None,
    };
    let (a, b) = (scope.dense(first), scope.dense(first + 1));
    let depth = a.shape[a.shape.len() - 1];
    let term = |row: &[usize], column: usize, k: usize| {
        let right = if name == "linear" { [column, k] } else { [k, column] };
        let left: Vec<usize> = row.iter().copied().chain([k]).collect();
        a.at(&left) * b.at(&right)
    };
    let (beta, alpha) = (scope.number(9, "beta", 1.0), scope.number(9, "alpha", 1.0));
    Some(Dense::make(shape, |index| {
        let (column, row) = index.split_last().unwrap();
        let sum: f64 = (0..depth).map(|k| term(row, *column, k)).sum();
        match (name, scope.node.args.get(2)) {
            ("addmm", _) => alpha * sum + beta * scope.dense(0).at(index),
            ("linear", Some(Arg::Ref(bias))) => sum + scope.tensor(*bias).at(&[*column]),
            _ => sum,
        }
    }))
}

fn movement(scope: &Scope<'_>, name: &str, shape: &[usize]) -> Option<Vec<Dense>> {
    Some(match name {
        "getitem" => {
            let (Arg::Ref(Operand::Node(from)), Arg::Int(which)) = (&scope.node.args[0], &scope.node.args[1])
            else {
                panic!()
            };
            vec![scope.values[*from][*which as usize].clone()]
        }
        "view" | "unsqueeze" | "alias" | "clone" | "squeeze" | "_unsafe_view" => {
            vec![Dense { shape: shape.to_vec(), data: scope.dense(0).data }]
        }
        "expand" => {
            let x = scope.dense(0);
            vec![Dense::make(shape, |index| x.at(index))]
        }
        "t" => {
            let x = scope.dense(0);
            vec![Dense::make(shape, |index| x.at(&[index[1], index[0]]))]
        }
        "transpose" => {
            let x = scope.dense(0);
            let (a, b) = (
                axis(scope.number(1, "", 0.0) as i64, shape.len()),
                axis(scope.number(2, "", 0.0) as i64, shape.len()),
            );
            vec![Dense::make(shape, |index| {
                let mut moved = index.to_vec();
                moved.swap(a, b);
                x.at(&moved)
            })]
        }
        "slice" => {
            let x = scope.dense(0);
            let (dim, start) =
                (axis(scope.number(1, "", 0.0) as i64, shape.len()), scope.number(2, "", 0.0) as usize);
            vec![Dense::make(shape, |index| {
                let mut moved = index.to_vec();
                moved[dim] += start;
                x.at(&moved)
            })]
        }
        "split" => {
            let x = scope.dense(0);
            let (size, dim) =
                (scope.number(1, "", 1.0) as usize, axis(scope.number(2, "", 0.0) as i64, x.shape.len()));
            (0..x.shape[dim].div_ceil(size))
                .map(|part| {
                    let mut shape = x.shape.clone();
                    shape[dim] = size.min(x.shape[dim] - part * size);
                    Dense::make(&shape, |index| {
                        let mut moved = index.to_vec();
                        moved[dim] += part * size;
                        x.at(&moved)
                    })
                })
                .collect()
        }
        // What lies outside of the dimension is nothing.
        "embedding" => {
            let (table, places) = (scope.dense(0), scope.dense(1));
            vec![Dense::make(shape, |index| {
                let (last, place) = index.split_last().unwrap();
                let row = places.at(place);
                let known = row >= 0.0 && row < table.shape[0] as f64;
                if known { table.at(&[row as usize, *last]) } else { f64::NAN }
            })]
        }
        "gather" => {
            let (x, places) = (scope.dense(0), scope.dense(2));
            let dim = axis(scope.number(1, "", 0.0) as i64, shape.len());
            vec![Dense::make(shape, |index| {
                let place = places.at(index);
                let mut moved = index.to_vec();
                moved[dim] = place as usize;
                if place >= 0.0 && place < x.shape[dim] as f64 { x.at(&moved) } else { f64::NAN }
            })]
        }
        "cat" => {
            let Arg::List(items) = &scope.node.args[0] else { panic!() };
            let pieces: Vec<&Dense> = items
                .iter()
                .map(|item| if let Arg::Ref(operand) = item { scope.tensor(*operand) } else { panic!() })
                .collect();
            let dim = axis(scope.number(1, "", 0.0) as i64, shape.len());
            vec![Dense::make(shape, |index| {
                let mut moved = index.to_vec();
                for piece in &pieces {
                    if moved[dim] < piece.shape[dim] {
                        return piece.at(&moved);
                    }
                    moved[dim] -= piece.shape[dim];
                }
                panic!("outside")
            })]
        }
        _ => return None,
    })
}

/// Applies `fold` to all elements that share a place in the kept dimensions.
fn over(x: &Dense, dims: &[usize], fold: impl Fn(&[f64]) -> f64) -> Dense {
    let kept: Vec<usize> =
        x.shape.iter().enumerate().map(|(d, n)| if dims.contains(&d) { 1 } else { *n }).collect();
    Dense::make(&kept, |index| {
        let mut row = vec![];
        Dense::each_index(&x.shape, |at| {
            if at.iter().enumerate().all(|(d, i)| dims.contains(&d) || *i == index[d]) {
                row.push(x.at(at));
            }
        });
        fold(&row)
    })
}

fn largest(row: &[f64]) -> f64 {
    row.iter()
        .copied()
        .fold(f64::NEG_INFINITY, |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) })
}

fn moments(row: &[f64], correction: f64) -> (f64, f64) {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    (mean, row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (row.len() as f64 - correction).max(0.0))
}

fn reduction(scope: &Scope<'_>, name: &str, shape: &[usize]) -> Option<Vec<Dense>> {
    if !matches!(
        name,
        "sum"
            | "mean"
            | "amax"
            | "amin"
            | "var"
            | "var_mean"
            | "linalg_vector_norm"
            | "logsumexp"
            | "_softmax"
            | "_log_softmax"
            | "native_layer_norm"
    ) {
        return None;
    }
    let x = scope.dense(0);
    let rank = x.shape.len();
    let position = if name == "linalg_vector_norm" { 2 } else { 1 };
    let mut dims: Vec<usize> = scope.list(position).iter().map(|dim| axis(*dim, rank)).collect();
    if name == "native_layer_norm" {
        dims = (rank - scope.list(1).len()..rank).collect();
    }
    let correction = scope.number(99, "correction", 1.0);
    let shaped = |result: Dense| vec![Dense { shape: shape.to_vec(), data: result.data }];
    Some(match name {
        "sum" => shaped(over(&x, &dims, |row| row.iter().sum())),
        "mean" => shaped(over(&x, &dims, |row| row.iter().sum::<f64>() / row.len() as f64)),
        "amax" => shaped(over(&x, &dims, largest)),
        "amin" => shaped(over(&x, &dims, |row| -largest(&row.iter().map(|x| -x).collect::<Vec<_>>()))),
        "var" => shaped(over(&x, &dims, |row| moments(row, correction).1)),
        "var_mean" => vec![
            over(&x, &dims, |row| moments(row, correction).1),
            over(&x, &dims, |row| moments(row, correction).0),
        ],
        "linalg_vector_norm" => shaped(over(&x, &dims, |row| row.iter().map(|x| x * x).sum::<f64>().sqrt())),
        "logsumexp" => shaped(over(&x, &dims, |row| {
            let top = largest(row);
            top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln()
        })),
        "_softmax" | "_log_softmax" => {
            let top = over(&x, &dims, largest);
            let sum = over(&x, &dims, |row| {
                let top = largest(row);
                row.iter().map(|x| (x - top).exp()).sum()
            });
            vec![Dense::make(&x.shape, |index| {
                let below = x.at(index) - top.at(index);
                if name == "_softmax" { below.exp() / sum.at(index) } else { below - sum.at(index).ln() }
            })]
        }
        _ => {
            let eps = scope.number(4, "eps", 0.0);
            let mean = over(&x, &dims, |row| moments(row, 0.0).0);
            let scale = over(&x, &dims, |row| 1.0 / (moments(row, 0.0).1 + eps).sqrt());
            let optional = |position: usize| {
                matches!(scope.node.args[position], Arg::Ref(_)).then(|| scope.dense(position))
            };
            let (weight, bias) = (optional(2), optional(3));
            let out = Dense::make(&x.shape, |index| {
                let y = (x.at(index) - mean.at(index)) * scale.at(index);
                y * weight.as_ref().map_or(1.0, |w| w.at(index)) + bias.as_ref().map_or(0.0, |b| b.at(index))
            });
            vec![out, mean, scale]
        }
    })
}

fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 5.9 {
        return x.signum();
    }
    // The series of all-positive terms: exp(-x²) Σ 2^n x^(2n+1) / (2n+1)!!
    let (mut term, mut sum) = (x, x);
    for n in 1..400 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

fn propagating(a: f64, b: f64, max: bool) -> f64 {
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else if max {
        a.max(b)
    } else {
        a.min(b)
    }
}

fn truth(value: bool) -> f64 {
    f64::from(u8::from(value))
}

fn scalar(scope: &Scope<'_>, name: &str, dtype: Dtype, x: &[f64]) -> f64 {
    let alpha = scope.number(99, "alpha", 1.0);
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    match name {
        "add" => x[0] + alpha * x[1],
        "sub" => x[0] - alpha * x[1],
        "rsub" => x[1] - alpha * x[0],
        "mul" => x[0] * x[1],
        "div" => x[0] / x[1],
        // PyTorch takes square roots here, which differ at negative infinity and negative zero.
        "pow" if x[1] == 0.5 => x[0].sqrt(),
        "pow" if x[1] == -0.5 => 1.0 / x[0].sqrt(),
        "pow" => x[0].powf(x[1]),
        "maximum" => propagating(x[0], x[1], true),
        "minimum" => propagating(x[0], x[1], false),
        "neg" => -x[0],
        "abs" => x[0].abs(),
        "sqrt" => x[0].sqrt(),
        "rsqrt" => 1.0 / x[0].sqrt(),
        "reciprocal" => 1.0 / x[0],
        "square" => x[0] * x[0],
        "exp" => x[0].exp(),
        "expm1" => x[0].exp_m1(),
        "log" => x[0].ln(),
        "log1p" => x[0].ln_1p(),
        "tanh" => x[0].tanh(),
        "sigmoid" => sigmoid(x[0]),
        "sin" => x[0].sin(),
        "cos" => x[0].cos(),
        "erf" => erf(x[0]),
        "silu" => x[0] / (1.0 + (-x[0]).exp()),
        "gelu" if matches!(scope.node.kwargs.first(), Some((_, Arg::Str(word))) if word == "tanh") => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x[0] + 0.044_715 * x[0].powi(3));
            0.5 * x[0] * (1.0 + inner.tanh())
        }
        "gelu" => 0.5 * x[0] * (1.0 + erf(x[0] / 2.0_f64.sqrt())),
        "hardswish" => x[0] * propagating(propagating(x[0] + 3.0, 0.0, true), 6.0, false) / 6.0,
        "hardsigmoid" => propagating(propagating(x[0] + 3.0, 0.0, true), 6.0, false) / 6.0,
        "mish" => x[0] * (if x[0] > 20.0 { x[0] } else { x[0].exp().ln_1p() }).tanh(),
        "log2" => x[0].log2(),
        "exp2" => x[0].exp2(),
        "isnan" => truth(x[0].is_nan()),
        "relu" => propagating(x[0], 0.0, true),
        "leaky_relu" => {
            if x[0] > 0.0 {
                x[0]
            } else {
                x[0] * x.get(1).copied().unwrap_or(0.01)
            }
        }
        "elu" => {
            if x[0] > 0.0 {
                x[0]
            } else {
                x[0].exp_m1()
            }
        }
        "softplus" => {
            if x[0] > 20.0 {
                x[0]
            } else {
                x[0].exp().ln_1p()
            }
        }
        "hardtanh" | "clamp" => propagating(propagating(x[0], x[1], true), x[2], false),
        "where" => {
            if x[0] == 0.0 {
                x[2]
            } else {
                x[1]
            }
        }
        "masked_fill" => {
            if x[1] == 0.0 {
                x[0]
            } else {
                x[2]
            }
        }
        "gt" => truth(x[0] > x[1]),
        "le" => truth(x[0] <= x[1]),
        "eq" => truth(x[0] == x[1]),
        "ne" => truth(x[0] != x[1]),
        "logical_not" => truth(x[0] == 0.0),
        "logical_and" => truth(x[0] != 0.0 && x[1] != 0.0),
        "_to_copy" => rounded(x[0], dtype),
        other => panic!("no meaning for {other}"),
    }
}

/// Metadata of a value, for tests that build tuples.
pub(crate) fn several(metas: Vec<TensorMeta>) -> Value {
    Value::Tuple(metas.into_iter().map(Some).collect())
}
