//! Operators that reduce, and those that ATen keeps whole but that are reductions and pointwise work.

use autokernel_core::graph::{Arg, TensorMeta};
use autokernel_core::region::{Operand, Region, RegionNode};

use super::views::{argument, int, ints, source};
use super::{Lower, Stop, Unsupported, along_row, check_numbers, dimension};
use crate::affine::Affine;
use crate::loops::{Binary, Compare, Expr, Id, Reduction, Unary};

/// What an operator reduces, and over which dimensions.
pub(super) fn reduced_dims(region: &Region, node: &RegionNode) -> Result<(Operand, Vec<usize>), Unsupported> {
    let operand = source(node)?;
    let meta = match operand {
        Operand::Input(input) => Some(&region.inputs[input].meta),
        Operand::Node(number) => region.nodes[number].value.tensor(),
    };
    let rank =
        meta.ok_or_else(|| Unsupported::new(&node.op, "reads something that is no tensor"))?.shape.len();
    let name = node.op.split('.').nth(1).unwrap_or(&node.op);
    let unwrap = |result: Result<Vec<usize>, Stop>| {
        result.map_err(|stop| match stop {
            Stop::Unsupported(unsupported) => unsupported,
            _ => Unsupported::new(&node.op, "has unknown dimensions"),
        })
    };
    let dims = match name {
        "_softmax" | "_log_softmax" => {
            unwrap(int(node, 1, "dim", -1).and_then(|dim| Ok(vec![dimension(dim, rank, &node.op)?])))?
        }
        "native_layer_norm" => {
            let count = match argument(node, 1, "normalized_shape") {
                Some(Arg::List(sizes)) => sizes.len(),
                _ => return Err(Unsupported::new(&node.op, "has an unknown `normalized_shape`")),
            };
            (rank.saturating_sub(count)..rank).collect()
        }
        _ => {
            let position = if name == "linalg_vector_norm" { 2 } else { 1 };
            let whole = node.op.ends_with(".default") && matches!(name, "sum" | "mean");
            let listed = if whole { Ok(None) } else { ints(node, position, "dim") };
            unwrap(listed.and_then(|dims| match dims {
                Some(dims) if !dims.is_empty() => {
                    dims.into_iter().map(|dim| dimension(dim, rank, &node.op)).collect()
                }
                _ => Ok((0..rank).collect()),
            }))?
        }
    };
    let mut dims = dims;
    dims.sort_unstable();
    dims.dedup();
    Ok((operand, dims))
}

/// A tensor that is read along the row.
struct Row<'m> {
    operand: Operand,
    meta: &'m TensorMeta,
    dims: Vec<usize>,
    /// Index with anything in the reduced dimensions.
    index: Vec<Affine>,
    length: f64,
}

impl<'r> Lower<'r> {
    fn row(&self, node: &RegionNode, full: Vec<Affine>) -> Result<Row<'r>, Stop> {
        let (operand, dims) = reduced_dims(self.region, node)?;
        let meta = self.meta(operand, &node.op)?;
        let length = dims.iter().map(|dim| meta.shape[*dim]).product::<u64>() as f64;
        Ok(Row { operand, meta, dims, index: full, length })
    }

    fn reduce_row(
        &mut self,
        node: &RegionNode,
        row: &Row<'_>,
        kind: Reduction,
        map: &mut dyn FnMut(&mut Self, Id) -> Id,
    ) -> Result<Id, Stop> {
        self.reduce(kind, &mut |lower| {
            let index = along_row(lower, &row.index, row.meta, &row.dims, &node.op)?;
            let x = lower.number(row.operand, &index)?;
            Ok(map(lower, x))
        })
    }

    fn mean(&mut self, node: &RegionNode, row: &Row<'_>) -> Result<Id, Stop> {
        let sum = self.reduce_row(node, row, Reduction::Sum, &mut |_, x| x)?;
        let length = self.constant(row.length);
        Ok(self.binary(Binary::Div, sum, length))
    }

    /// Mean and variance in two passes, which keeps the digits that one pass over squares loses.
    fn moments(&mut self, node: &RegionNode, row: &Row<'_>, correction: f64) -> Result<(Id, Id), Stop> {
        let mean = self.mean(node, row)?;
        let squares = self.reduce_row(node, row, Reduction::Sum, &mut |lower, x| {
            let centred = lower.binary(Binary::Sub, x, mean);
            lower.binary(Binary::Mul, centred, centred)
        })?;
        let count = self.constant((row.length - correction).max(0.0));
        Ok((mean, self.binary(Binary::Div, squares, count)))
    }

    /// PyTorch finds mean and variance in one pass, in which an infinite element spoils both.
    fn sound_mean(&mut self, mean: Id, variance: Id) -> Id {
        let sound = self.arena.add(Expr::Compare(Compare::Eq, variance, variance), false);
        self.arena.add(Expr::Select(sound, mean, variance), false)
    }

    pub(super) fn reduction(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        check_numbers(node)?;
        let name = node.op.split('.').nth(1).unwrap_or(&node.op);
        let row = self.row(node, self.with_reduced(node, index)?)?;
        match name {
            "sum" => self.reduce_row(node, &row, Reduction::Sum, &mut |_, x| x),
            "mean" => self.mean(node, &row),
            "amax" => self.reduce_row(node, &row, Reduction::Max, &mut |_, x| x),
            "amin" => self.reduce_row(node, &row, Reduction::Min, &mut |_, x| x),
            "var" | "std" => {
                let (_, variance) = self.moments(node, &row, correction(node)?)?;
                Ok(if name == "std" { self.unary(Unary::Sqrt, variance) } else { variance })
            }
            "linalg_vector_norm" => self.norm(node, &row),
            "logsumexp" => self.log_sum_exp(node, &row),
            _ => Err(Unsupported::new(&node.op, "has no meaning in the operator table").into()),
        }
    }

    /// The index of a reduced tensor's operand: zeros stand in the reduced dimensions.
    fn with_reduced(&self, node: &RegionNode, index: &[Affine]) -> Result<Vec<Affine>, Stop> {
        let (operand, dims) = reduced_dims(self.region, node)?;
        let rank = self.meta(operand, &node.op)?.shape.len();
        if index.len() == rank {
            return Ok(index.to_vec());
        }
        let mut full = index.to_vec();
        for dim in dims {
            full.insert(dim.min(full.len()), Affine::constant(self.rank(), 0));
        }
        Ok(full)
    }

    fn norm(&mut self, node: &RegionNode, row: &Row<'_>) -> Result<Id, Stop> {
        let order = match argument(node, 1, "ord") {
            None | Some(Arg::None) => 2.0,
            Some(Arg::Int(value)) => *value as f64,
            Some(Arg::Float(value)) => *value,
            Some(_) => return Err(Unsupported::new(&node.op, "has an unknown order").into()),
        };
        let absolute = &mut |lower: &mut Self, x| lower.unary(Unary::Abs, x);
        if order - 2.0 == 0.0 {
            let squares =
                self.reduce_row(node, row, Reduction::Sum, &mut |lower, x| lower.binary(Binary::Mul, x, x))?;
            Ok(self.unary(Unary::Sqrt, squares))
        } else if order - 1.0 == 0.0 {
            self.reduce_row(node, row, Reduction::Sum, absolute)
        } else if order == f64::INFINITY {
            self.reduce_row(node, row, Reduction::Max, absolute)
        } else {
            Err(Unsupported::new(&node.op, format!("has order {order}")).into())
        }
    }

    /// The largest element, and the sum of exponentials below it. An infinite largest element counts
    /// as zero where `finite` asks for it, as PyTorch's `logsumexp` does.
    fn exponentials(&mut self, node: &RegionNode, row: &Row<'_>, finite: bool) -> Result<(Id, Id), Stop> {
        let mut largest = self.reduce_row(node, row, Reduction::Max, &mut |_, x| x)?;
        if finite {
            let (size, infinity) = (self.unary(Unary::Abs, largest), self.constant(f64::INFINITY));
            let (infinite, zero) =
                (self.arena.add(Expr::Compare(Compare::Eq, size, infinity), false), self.constant(0.0));
            largest = self.arena.add(Expr::Select(infinite, zero, largest), false);
        }
        let sum = self.reduce_row(node, row, Reduction::Sum, &mut |lower, x| {
            let below = lower.binary(Binary::Sub, x, largest);
            lower.unary(Unary::Exp, below)
        })?;
        Ok((largest, sum))
    }

    fn log_sum_exp(&mut self, node: &RegionNode, row: &Row<'_>) -> Result<Id, Stop> {
        let (largest, sum) = self.exponentials(node, row, true)?;
        let log = self.unary(Unary::Log, sum);
        Ok(self.binary(Binary::Add, log, largest))
    }

    pub(super) fn composite(
        &mut self,
        node: &RegionNode,
        result: usize,
        index: &[Affine],
    ) -> Result<Id, Stop> {
        let name = node.op.split('.').nth(1).unwrap_or(&node.op);
        match name {
            "_softmax" | "_log_softmax" => {
                let row = self.row(node, index.to_vec())?;
                let (largest, sum) = self.exponentials(node, &row, false)?;
                let x = self.number(row.operand, index)?;
                let below = self.binary(Binary::Sub, x, largest);
                if name == "_softmax" {
                    let exp = self.unary(Unary::Exp, below);
                    return Ok(self.binary(Binary::Div, exp, sum));
                }
                let log = self.unary(Unary::Log, sum);
                Ok(self.binary(Binary::Sub, below, log))
            }
            "var_mean" => {
                let row = self.row(node, self.with_reduced(node, index)?)?;
                let (mean, variance) = self.moments(node, &row, correction(node)?)?;
                if result == 0 {
                    return Ok(variance);
                }
                Ok(self.sound_mean(mean, variance))
            }
            "native_layer_norm" => self.normalised(node, result, index),
            _ => Err(Unsupported::new(&node.op, "has no meaning in the operator table").into()),
        }
    }

    /// `(x - mean) / sqrt(variance + eps) * weight + bias` with statistics that are given for each channel.
    pub(super) fn channelwise(
        &mut self,
        node: &RegionNode,
        result: usize,
        index: &[Affine],
    ) -> Result<Id, Stop> {
        if result != 0 {
            return Err(Unsupported::new(&node.op, "is asked for statistics").into());
        }
        let channel = index.get(1..2).ok_or_else(|| Unsupported::new(&node.op, "has no channels"))?;
        let mut values = vec![];
        for position in 1..5 {
            values.push(match node.args.get(position) {
                Some(Arg::Ref(operand)) => Some(self.number(*operand, channel)?),
                _ => None,
            });
        }
        let (Some(Arg::Float(eps)), [weight, bias, Some(mean), Some(variance)]) =
            (node.args.get(6), values.as_slice())
        else {
            return Err(Unsupported::new(&node.op, "has unknown arguments").into());
        };
        let eps = self.constant(*eps);
        let raised = self.binary(Binary::Add, *variance, eps);
        let mut scale = self.unary(Unary::Rsqrt, raised);
        if let Some(weight) = weight {
            scale = self.binary(Binary::Mul, scale, *weight);
        }
        let x = self.number(source(node)?, index)?;
        let centred = self.binary(Binary::Sub, x, *mean);
        let scaled = self.binary(Binary::Mul, centred, scale);
        Ok(match bias {
            Some(bias) => self.binary(Binary::Add, scaled, *bias),
            None => scaled,
        })
    }

    /// Normalised rows, scaled and shifted; results one and two are the mean and `1 / sqrt(variance + eps)`.
    fn normalised(&mut self, node: &RegionNode, result: usize, index: &[Affine]) -> Result<Id, Stop> {
        let row = self.row(node, index.to_vec())?;
        let (mean, variance) = self.moments(node, &row, 0.0)?;
        if result == 1 {
            return Ok(self.sound_mean(mean, variance));
        }
        let eps = match argument(node, 4, "eps") {
            Some(Arg::Float(value)) => *value,
            _ => return Err(Unsupported::new(&node.op, "has an unknown `eps`").into()),
        };
        let eps = self.constant(eps);
        let raised = self.binary(Binary::Add, variance, eps);
        let scale = self.unary(Unary::Rsqrt, raised);
        if result == 2 {
            return Ok(scale);
        }
        let x = self.number(row.operand, index)?;
        let centred = self.binary(Binary::Sub, x, mean);
        let mut value = self.binary(Binary::Mul, centred, scale);
        for (position, op) in [(2, Binary::Mul), (3, Binary::Add)] {
            if let Some(Arg::Ref(operand)) = node.args.get(position) {
                let meta = self.meta(*operand, &node.op)?;
                let inner = self.broadcast(meta, index);
                let factor = self.number(*operand, &inner)?;
                value = self.binary(op, value, factor);
            }
        }
        Ok(value)
    }
}

fn correction(node: &RegionNode) -> Result<f64, Stop> {
    match node.kwargs.iter().find(|(key, _)| key == "correction").map(|(_, value)| value) {
        None | Some(Arg::None) => Ok(1.0),
        Some(Arg::Int(value)) => Ok(*value as f64),
        Some(Arg::Float(value)) => Ok(*value),
        Some(_) => Err(Unsupported::new(&node.op, "has an unknown `correction`").into()),
    }
}
