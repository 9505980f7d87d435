//! Operators that look at a small window around a place: pooling and interpolation.
//!
//! A window is written out: one access for each of its places. What sticks out at a border is a piece that
//! is not there (see [`super::pieces`]).

use autokernel_core::graph::{Arg, TensorMeta};
use autokernel_core::region::RegionNode;

use super::views::{argument, ints, source};
use super::{Lower, Stop, Unsupported};
use crate::affine::Affine;
use crate::loops::{Binary, Expr, Id, Table};

/// Places of a window that are written out; more make a kernel that no compiler likes.
const MAX_WINDOW: i64 = 64;

/// A window along one dimension.
struct Along {
    /// Number of the dimension.
    dim: usize,
    size: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
}

/// What is done with a place of a window: its index, and the sizes that parts of it must lie within.
type Visit<'v, 'l> = &'v mut dyn FnMut(&mut Lower<'l>, &[Affine], &[(Affine, u64)]) -> Result<(), Stop>;

impl<'l> Lower<'l> {
    pub(super) fn window(&mut self, node: &RegionNode, result: usize, index: &[Affine]) -> Result<Id, Stop> {
        let name = node.op.split('.').nth(1).unwrap_or(&node.op);
        match name {
            "max_pool2d_with_indices" if result == 0 => self.largest_of_window(node, index),
            "max_pool2d_with_indices" => Err(Unsupported::new(&node.op, "is asked for places").into()),
            "avg_pool2d" => self.mean_of_window(node, index),
            "upsample_nearest2d" => self.nearest(node, index),
            "upsample_bilinear2d" => self.bilinear(node, index),
            _ => Err(Unsupported::new(&node.op, "has no meaning in the operator table").into()),
        }
    }

    /// Calls `visit` for each place of a window.
    fn each_place(
        &mut self,
        windows: &[Along],
        meta: &TensorMeta,
        index: &[Affine],
        visit: Visit<'_, 'l>,
    ) -> Result<(), Stop> {
        let places: i64 = windows.iter().map(|window| window.size).product();
        for place in 0..places {
            let mut rest = place;
            let mut moved = index.to_vec();
            let mut parts = vec![];
            for window in windows.iter().rev() {
                let step = rest % window.size;
                rest /= window.size;
                let mut at = Affine::constant(self.rank(), step * window.dilation - window.padding);
                at.add_scaled(&index[window.dim], window.stride);
                parts.push((at.clone(), meta.shape[window.dim]));
                moved[window.dim] = at;
            }
            visit(self, &moved, &parts)?;
        }
        Ok(())
    }

    fn largest_of_window(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let operand = source(node)?;
        let meta = self.meta(operand, &node.op)?;
        let windows = windows(node, index, true)?;
        let mut largest = None;
        self.each_place(&windows, meta, index, &mut |lower, moved, parts| {
            let found = lower.inside(parts, &node.op, &mut |lower| lower.number(operand, moved))?;
            let Some((mask, mut value)) = found else { return Ok(()) };
            if let Some(mask) = mask {
                let nothing = lower.constant(f64::NEG_INFINITY);
                value = lower.arena.add(Expr::Select(mask, value, nothing), false);
            }
            largest = Some(match largest {
                Some(before) => lower.binary(Binary::Max, before, value),
                None => value,
            });
            Ok(())
        })?;
        largest.ok_or_else(|| Unsupported::new(&node.op, "has windows of padding").into())
    }

    fn mean_of_window(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let operand = source(node)?;
        let meta = self.meta(operand, &node.op)?;
        let windows = windows(node, index, false)?;
        let counts_padding = !matches!(argument(node, 5, "count_include_pad"), Some(Arg::Bool(false)));
        let divisor = match argument(node, 6, "divisor_override") {
            None | Some(Arg::None) => None,
            Some(Arg::Int(value)) => Some(self.constant(*value as f64)),
            Some(_) => return Err(Unsupported::new(&node.op, "has an unknown divisor").into()),
        };
        let (zero, one) = (self.constant(0.0), self.constant(1.0));
        let mut sum = None;
        self.each_place(&windows, meta, index, &mut |lower, moved, parts| {
            let found = lower.inside(parts, &node.op, &mut |lower| lower.number(operand, moved))?;
            let Some((mask, mut value)) = found else { return Ok(()) };
            if let Some(mask) = mask {
                value = lower.arena.add(Expr::Select(mask, value, zero), false);
            }
            sum = Some(match sum {
                Some(before) => lower.binary(Binary::Add, before, value),
                None => value,
            });
            Ok(())
        })?;
        let sum = sum.ok_or_else(|| Unsupported::new(&node.op, "has windows of padding"))?;
        if let Some(divisor) = divisor {
            return Ok(self.binary(Binary::Div, sum, divisor));
        }
        // A window counts its places one dimension at a time: those of the tensor, or of the padded tensor.
        let (mut known, mut counted) = (1, None);
        for window in &windows {
            let padding = if counts_padding { window.padding } else { 0 };
            let size = meta.shape[window.dim] + 2 * padding as u64;
            let mut count: Option<Id> = None;
            let mut always = 0;
            for step in 0..window.size {
                let mut at = Affine::constant(self.rank(), step - window.padding + padding);
                at.add_scaled(&index[window.dim], window.stride);
                let Some((mask, _)) = self.inside(&[(at, size)], &node.op, &mut |_| Ok(one))? else {
                    continue;
                };
                let Some(mask) = mask else {
                    always += 1;
                    continue;
                };
                let there = self.arena.add(Expr::Select(mask, one, zero), false);
                count = Some(count.map_or(there, |count| self.binary(Binary::Add, count, there)));
            }
            if let Some(count) = count {
                let always = self.constant(f64::from(always));
                let all = self.binary(Binary::Add, count, always);
                counted = Some(counted.map_or(all, |counted| self.binary(Binary::Mul, counted, all)));
            } else {
                known *= always;
            }
        }
        let known = self.constant(f64::from(known));
        let count = counted.map_or(known, |counted| self.binary(Binary::Mul, counted, known));
        Ok(self.binary(Binary::Div, sum, count))
    }

    /// Sizes of the last `count` dimensions: of the operand, of the result, and the factor that is given for each.
    fn resampled(
        &self,
        node: &RegionNode,
        count: usize,
        factors: usize,
    ) -> Result<Vec<(u64, u64, Option<f64>)>, Stop> {
        let unknown = || Stop::from(Unsupported::new(&node.op, "has unknown sizes"));
        let inner = self.meta(source(node)?, &node.op)?;
        let outer = node.value.tensor().ok_or_else(unknown)?;
        // A list of them, or one argument each.
        let listed = match node.args.get(factors) {
            Some(Arg::List(items)) => items.as_slice(),
            _ => node.args.get(factors..).unwrap_or_default(),
        };
        let mut given: Vec<Option<f64>> = listed
            .iter()
            .map(|item| match item {
                Arg::Float(value) => Ok(Some(*value)),
                Arg::None => Ok(None),
                _ => Err(unknown()),
            })
            .collect::<Result<_, _>>()?;
        given.resize(count.max(given.len()), None);
        if given.len() > count && given[count..].iter().all(Option::is_none) {
            given.truncate(count);
        }
        let first = inner.shape.len().checked_sub(count).ok_or_else(unknown)?;
        if given.len() != count {
            return Err(unknown());
        }
        let sizes = inner.shape[first..].iter().zip(&outer.shape[first..]).zip(given);
        Ok(sizes.map(|((inner, outer), factor)| (*inner, *outer, factor)).collect())
    }

    /// The index that a table gives for each place along `along`, as a variable.
    fn by_table(&mut self, values: Vec<i64>, along: &Affine, size: u64, op: &str) -> Result<Affine, Stop> {
        let at = self.table(Table::Whole(values), along);
        self.variable(at, size, false, op)
    }

    /// PyTorch finds the source of each place in f32, whatever the element type of the image.
    fn nearest(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let sizes = self.resampled(node, 2, 2)?;
        let first = index.len() - 2;
        let mut moved = index.to_vec();
        for (part, (inner, outer, factor)) in moved[first..].iter_mut().zip(sizes) {
            if inner == outer {
                continue;
            }
            let scale = factor.map_or(inner as f32 / outer as f32, |factor| (1.0 / factor) as f32);
            let from = |at: u64| ((at as f32 * scale).floor() as i64).min(inner as i64 - 1);
            *part = self.by_table((0..outer).map(from).collect(), &part.clone(), inner, &node.op)?;
        }
        self.pull(source(node)?, 0, &moved)
    }

    /// Each place lies between two of the operand in each dimension, or on one of them.
    fn bilinear(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let aligned = matches!(node.args.get(2), Some(Arg::Bool(true)));
        let sizes = self.resampled(node, 2, 3)?;
        let first = index.len() - 2;
        // For each dimension the two indices, and the weight of the second.
        let mut ways: Vec<[(Affine, Id); 2]> = vec![];
        for (along, (inner, outer, factor)) in index[first..].iter().zip(sizes) {
            let scale = match (aligned, factor) {
                (true, _) => (inner as f64 - 1.0) / (outer as f64 - 1.0).max(1.0),
                (false, Some(factor)) => 1.0 / factor,
                (false, None) => inner as f64 / outer as f64,
            };
            // In f32, as PyTorch does for all types but f64.
            let from = |at: u64| -> f64 {
                if self.wide() {
                    if aligned { at as f64 * scale } else { ((at as f64 + 0.5) * scale - 0.5).max(0.0) }
                } else {
                    let scale = scale as f32;
                    f64::from(if aligned {
                        at as f32 * scale
                    } else {
                        ((at as f32 + 0.5) * scale - 0.5).max(0.0)
                    })
                }
            };
            let places: Vec<f64> = (0..outer).map(from).collect();
            let low: Vec<i64> = places.iter().map(|at| (*at as i64).min(inner as i64 - 1)).collect();
            let high = low.iter().map(|at| (at + 1).min(inner as i64 - 1)).collect();
            let weights =
                places.iter().zip(&low).map(|(at, low)| (at - *low as f64).clamp(0.0, 1.0)).collect();
            let (low, high) =
                (self.by_table(low, along, inner, &node.op)?, self.by_table(high, along, inner, &node.op)?);
            let at = self.table(Table::Numbers(weights), along);
            let weight = self.load(at);
            let one = self.constant(1.0);
            let other = self.binary(Binary::Sub, one, weight);
            ways.push([(low, other), (high, weight)]);
        }
        let operand = source(node)?;
        let mut sum = None;
        for (row, row_weight) in &ways[0] {
            let mut line = None;
            for (column, weight) in &ways[1] {
                let mut moved = index[..first].to_vec();
                moved.extend([row.clone(), column.clone()]);
                let x = self.number(operand, &moved)?;
                let term = self.binary(Binary::Mul, x, *weight);
                line = Some(line.map_or(term, |line| self.binary(Binary::Add, line, term)));
            }
            if let Some(line) = line {
                let term = self.binary(Binary::Mul, line, *row_weight);
                sum = Some(sum.map_or(term, |sum| self.binary(Binary::Add, sum, term)));
            }
        }
        sum.ok_or_else(|| Unsupported::new(&node.op, "has no dimensions").into())
    }
}

/// Sizes, strides and so on of a pooling operator, from the position of its first argument on.
fn windows(node: &RegionNode, index: &[Affine], dilated: bool) -> Result<Vec<Along>, Stop> {
    let count = 2;
    let get = |position: usize, keyword: &str, default: Option<&[i64]>| -> Result<Vec<i64>, Stop> {
        let given = ints(node, position, keyword)?.filter(|list| !list.is_empty());
        let list = given.or_else(|| default.map(<[i64]>::to_vec));
        let list = list.ok_or_else(|| Unsupported::new(&node.op, format!("has no `{keyword}`")))?;
        Ok(if list.len() == 1 { vec![list[0]; count] } else { list })
    };
    let size = get(1, "kernel_size", None)?;
    let stride = get(2, "stride", Some(&size))?;
    let padding = get(3, "padding", Some(&[0]))?;
    let dilation = if dilated { get(4, "dilation", Some(&[1]))? } else { vec![1; count] };
    if index.len() < count || size.iter().product::<i64>() > MAX_WINDOW {
        return Err(Unsupported::new(&node.op, "has a large window").into());
    }
    let first = index.len() - count;
    let along = |d: usize| Along {
        dim: first + d,
        size: size[d],
        stride: stride[d],
        padding: padding[d],
        dilation: dilation[d],
    };
    Ok((0..count).map(along).collect())
}
