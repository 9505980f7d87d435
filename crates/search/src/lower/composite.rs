//! Operators that reduce, and those that ATen keeps whole but that are reductions and pointwise work.

use autokernel_core::graph::{Arg, TensorMeta};
use autokernel_core::region::{Operand, Region, RegionNode};

use super::views::{argument, int, ints, source};
use super::{Lower, Stop, Unsupported, along_row, check_numbers, dimension, exact};
use crate::affine::{Affine, flatten};
use crate::loops::{Binary, Compare, Expr, Folding, Id, Logic, Reduction, Scan, Unary};

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
        "native_group_norm" => (1..rank).collect(),
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

/// What an operator reduces as the iteration space sees it: with groups of channels as a dimension of their own.
pub(super) fn reduced_shape(
    region: &Region,
    node: &RegionNode,
) -> Result<(TensorMeta, Vec<usize>), Unsupported> {
    let (operand, dims) = reduced_dims(region, node)?;
    let meta = match operand {
        Operand::Input(input) => Some(&region.inputs[input].meta),
        Operand::Node(number) => region.nodes[number].value.tensor(),
    };
    let meta = meta.ok_or_else(|| Unsupported::new(&node.op, "reads something that is no tensor"))?;
    let Some(groups) = groups(node)? else { return Ok((meta.clone(), dims)) };
    let (&[batch, channels, ..], &[outer, step, ..]) = (meta.shape.as_slice(), meta.stride.as_slice()) else {
        return Err(Unsupported::new(&node.op, "has no channels"));
    };
    if groups == 0 || channels % groups != 0 {
        return Err(Unsupported::new(&node.op, "has groups of different sizes"));
    }
    let each = channels / groups;
    let mut split = TensorMeta {
        dtype: meta.dtype,
        shape: vec![batch, groups, each],
        stride: vec![outer, step * each, step],
    };
    split.shape.extend(&meta.shape[2..]);
    split.stride.extend(&meta.stride[2..]);
    let dims = (2..split.shape.len()).collect();
    Ok((split, dims))
}

/// The number of groups of channels, for the operator that has them.
fn groups(node: &RegionNode) -> Result<Option<u64>, Unsupported> {
    if !node.op.starts_with("aten.native_group_norm.") {
        return Ok(None);
    }
    match node.args.get(6) {
        Some(Arg::Int(groups)) => Ok(Some(*groups as u64)),
        _ => Err(Unsupported::new(&node.op, "has an unknown number of groups")),
    }
}

/// A tensor that is read along the row.
struct Row {
    operand: Operand,
    /// As [`reduced_shape`] gives it.
    meta: TensorMeta,
    dims: Vec<usize>,
    /// Index in that shape, with anything in the reduced dimensions.
    index: Vec<Affine>,
    length: f64,
    /// Whether dimensions 1 and 2 of that shape are one dimension of the tensor.
    grouped: bool,
}

impl Row {
    /// The index in the tensor's own shape.
    fn own(&self, mut index: Vec<Affine>) -> Vec<Affine> {
        if self.grouped {
            let group = index.remove(1);
            index[1].add_scaled(&group, self.meta.shape[2] as i64);
        }
        index
    }
}

impl Lower<'_> {
    fn row(&self, node: &RegionNode, full: Vec<Affine>) -> Result<Row, Stop> {
        let (operand, _) = reduced_dims(self.region, node)?;
        let (meta, dims) = reduced_shape(self.region, node)?;
        let length = dims.iter().map(|dim| meta.shape[*dim]).product::<u64>() as f64;
        Ok(Row { operand, meta, dims, index: full, length, grouped: groups(node)?.is_some() })
    }

    fn reduce_row(
        &mut self,
        node: &RegionNode,
        row: &Row,
        kind: Reduction,
        map: &mut dyn FnMut(&mut Self, Id) -> Id,
    ) -> Result<Id, Stop> {
        self.reduce(kind, &mut |lower| {
            let index = along_row(lower, &row.index, &row.meta, &row.dims, &node.op)?;
            let x = lower.number(row.operand, &row.own(index))?;
            Ok(map(lower, x))
        })
    }

    fn mean(&mut self, node: &RegionNode, row: &Row) -> Result<Id, Stop> {
        let sum = self.reduce_row(node, row, Reduction::Sum, &mut |_, x| x)?;
        let length = self.constant(row.length);
        Ok(self.binary(Binary::Div, sum, length))
    }

    /// Mean and variance in two passes, which keeps the digits that one pass over squares loses.
    fn moments(&mut self, node: &RegionNode, row: &Row, correction: f64) -> Result<(Id, Id), Stop> {
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
        let name = node.op.split('.').nth(1).unwrap_or(&node.op);
        if matches!(name, "argmax" | "argmin") {
            return self.place_of_extreme(node, name == "argmax", index);
        }
        check_numbers(node)?;
        if let Some(total) = self.total_of_rows(node)? {
            return Ok(total);
        }
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

    /// `cumsum` and `cumprod`, where a place is asked for that is the place of the row.
    pub(super) fn scan(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        check_numbers(node)?;
        let kind = if node.op.starts_with("aten.cumprod.") { Folding::Product } else { Folding::Sum };
        let row = self.row(node, index.to_vec())?;
        let walked = |lower: &mut Self| {
            let mut moved = index.to_vec();
            for dim in &row.dims {
                moved[*dim] = Affine::constant(lower.rank(), 0);
            }
            along_row(lower, &moved, &row.meta, &row.dims, &node.op)
        };
        if walked(self)? != index {
            return Err(Unsupported::new(&node.op, "is read in another order than it adds up").into());
        }
        let x = self.number(row.operand, index)?;
        let scan = Scan { kind, body: x };
        let next = self.scans.len();
        let number = self.scans.iter().position(|known| *known == scan).unwrap_or(next);
        if number == next {
            self.scans.push(scan);
        }
        Ok(self.arena.add(Expr::Scan(number), true))
    }

    /// The first place of the largest or smallest element; a NaN counts as both.
    fn place_of_extreme(&mut self, node: &RegionNode, largest: bool, index: &[Affine]) -> Result<Id, Stop> {
        let row = self.row(node, self.with_reduced(node, index)?)?;
        if !exact::is_exact(self.region, row.operand) {
            return Err(Unsupported::new(&node.op, exact::TIPPED).into());
        }
        if exact::is_wide_integer(row.meta.dtype)
            || row.length >= if self.wide() { 2e15 } else { 16_777_216.0 }
        {
            return Err(Unsupported::new(&node.op, "counts further than its numbers do").into());
        }
        let kind = if largest { Reduction::Max } else { Reduction::Min };
        let extreme = self.reduce_row(node, &row, kind, &mut |_, x| x)?;
        let nowhere = self.constant(f64::INFINITY);
        self.reduce(Reduction::Min, &mut |lower| {
            let moved = along_row(lower, &row.index, &row.meta, &row.dims, &node.op)?;
            let sizes: Vec<u64> = row.dims.iter().map(|dim| row.meta.shape[*dim]).collect();
            let parts: Vec<Affine> = row.dims.iter().map(|dim| moved[*dim].clone()).collect();
            let place = lower.place_number(&flatten(&parts, &sizes, lower.rank()));
            let x = lower.number(row.operand, &row.own(moved))?;
            let same = lower.arena.add(Expr::Compare(Compare::Eq, x, extreme), false);
            let nan = lower.arena.add(Expr::Compare(Compare::Ne, x, x), false);
            let here = lower.logic(Logic::Or, same, nan);
            Ok(lower.arena.add(Expr::Select(here, place, nowhere), false))
        })
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

    fn norm(&mut self, node: &RegionNode, row: &Row) -> Result<Id, Stop> {
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
    fn exponentials(&mut self, node: &RegionNode, row: &Row, finite: bool) -> Result<(Id, Id), Stop> {
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

    fn log_sum_exp(&mut self, node: &RegionNode, row: &Row) -> Result<Id, Stop> {
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
            "native_group_norm" => self.normalised_groups(node, result, index),
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

impl Lower<'_> {
    /// The same over groups of channels, with a weight and a bias for each channel.
    fn normalised_groups(&mut self, node: &RegionNode, result: usize, index: &[Affine]) -> Result<Id, Stop> {
        let (shape, _) = reduced_shape(self.region, node)?;
        let mut full = index.to_vec();
        if result == 0 {
            let pair = TensorMeta::contiguous(shape.dtype, &shape.shape[1..3]);
            full.splice(1..2, self.reshape(&index[1], &pair, &node.op)?);
        } else {
            full.resize(shape.shape.len(), Affine::constant(self.rank(), 0));
        }
        let row = self.row(node, full)?;
        let (mean, variance) = self.moments(node, &row, 0.0)?;
        let Some(Arg::Float(eps)) = node.args.get(7) else {
            return Err(Unsupported::new(&node.op, "has an unknown `eps`").into());
        };
        let eps = self.constant(*eps);
        let raised = self.binary(Binary::Add, variance, eps);
        let scale = self.unary(Unary::Rsqrt, raised);
        match result {
            0 => {}
            1 => return Ok(self.sound_mean(mean, variance)),
            _ => return Ok(scale),
        }
        let x = self.number(row.operand, index)?;
        let centred = self.binary(Binary::Sub, x, mean);
        let mut value = self.binary(Binary::Mul, centred, scale);
        for (position, op) in [(1, Binary::Mul), (2, Binary::Add)] {
            if let Some(Arg::Ref(operand)) = node.args.get(position) {
                let factor = self.number(*operand, &index[1..2])?;
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
