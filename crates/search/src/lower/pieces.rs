//! Tensors that are put together from pieces: concatenations, padding, and what wraps around or turns back.
//!
//! Along the row a border cuts the row into segments, each with its own expressions. Across rows a border
//! is a [`Guard`]: a condition that is the same all along a row, so it costs a branch a row and nothing an element.

use autokernel_core::graph::{Arg, TensorMeta};
use autokernel_core::region::RegionNode;

use super::views::{int, ints, source};
use super::{Lower, Stop, Unsupported, dimension};
use crate::affine::Affine;
use crate::loops::{Expr, Guard, Id, Logic};

/// How an index lies to a range of values.
enum Lies {
    Inside,
    Outside,
    /// Inside where the guard holds.
    Partly(usize),
}

impl Lower<'_> {
    /// How `along` lies to `0..size`. Asks for a cut of the row where that changes along it.
    fn lies(&mut self, along: &Affine, size: u64, op: &str) -> Result<Lies, Stop> {
        let (low, high) = along.range(&self.domain);
        let end = size as i64;
        if low >= 0 && high < end {
            return Ok(Lies::Inside);
        }
        if high < 0 || low >= end {
            return Ok(Lies::Outside);
        }
        let dims = self.space.dims.len();
        if along.coefficients[dims..].iter().any(|coefficient| *coefficient != 0) {
            return Err(Unsupported::new(op, "joins pieces along an index that is read").into());
        }
        if !self.uses_row(along) {
            let mut moving = (0..dims).filter(|dim| along.coefficients[*dim] != 0);
            if let (Some(dim), None) = (moving.next(), moving.next()) {
                let (first, last) = values_inside(along.offset, along.coefficients[dim], size);
                if first.max(self.domain[dim].0) >= last.min(self.domain[dim].1) {
                    return Ok(Lies::Outside);
                }
            }
            let guard = Guard { offset: along.offset, strides: along.coefficients[..dims].to_vec(), size };
            let next = self.guards.len();
            let number = self.guards.iter().position(|known| *known == guard).unwrap_or(next);
            if number == next {
                self.guards.push(guard);
            }
            return Ok(Lies::Partly(number));
        }
        let row = dims - 1;
        if along.coefficients[..row].iter().any(|coefficient| *coefficient != 0) {
            return Err(Unsupported::new(op, "joins pieces across rows and along them at once").into());
        }
        let (start, stop) = self.domain[row];
        let (first, last) = values_inside(along.offset, along.coefficients[row], size);
        if first.max(start) >= last.min(stop) {
            return Ok(Lies::Outside);
        }
        // Of a range that reaches beyond the segment on one side, the other border is inside of it.
        let cut = if start < first { first } else { last };
        Err(Stop::SplitRow(cut as u64))
    }

    /// A value that exists where each index lies within its size: the value, with the condition if it is one.
    /// `None` where it exists nowhere in this segment.
    pub(super) fn inside(
        &mut self,
        parts: &[(Affine, u64)],
        op: &str,
        body: &mut dyn FnMut(&mut Self) -> Result<Id, Stop>,
    ) -> Result<Option<(Option<Id>, Id)>, Stop> {
        let mut guards = vec![];
        for (along, size) in parts {
            match self.lies(along, *size, op)? {
                Lies::Inside => {}
                Lies::Outside => return Ok(None),
                Lies::Partly(guard) => guards.push(guard),
            }
        }
        let (active, domain) = (self.active.clone(), self.domain.clone());
        let mut mask = None;
        for guard in guards {
            self.narrow(guard);
            if let Err(at) = self.active.binary_search(&guard) {
                self.active.insert(at, guard);
            }
            let holds = self.arena.add(Expr::Within(guard), false);
            mask = Some(match mask {
                Some(mask) => self.logic(Logic::And, mask, holds),
                None => holds,
            });
        }
        let value = body(self);
        self.active = active;
        let first = self.space.dims.len();
        self.domain[..first].copy_from_slice(&domain[..first]);
        Ok(Some((mask, value?)))
    }

    /// Where a guard looks at one variable, that variable takes fewer values behind it.
    fn narrow(&mut self, guard: usize) {
        let guard = &self.guards[guard];
        let mut moving = guard.strides.iter().enumerate().filter(|(_, stride)| **stride != 0);
        if let (Some((dim, stride)), None) = (moving.next(), moving.next()) {
            let (first, end) = values_inside(guard.offset, *stride, guard.size);
            let domain = &mut self.domain[dim];
            *domain = (domain.0.max(first), domain.1.min(end));
        }
    }

    pub(super) fn concat(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let op = node.op.as_str();
        let Some(Arg::List(pieces)) = node.args.first() else {
            return Err(Unsupported::new(op, "reads no list").into());
        };
        let stacks = op.starts_with("aten.stack.");
        let dim = dimension(int(node, 1, "dim", 0)?, index.len(), op)?;
        let mut start = 0;
        let mut found: Vec<(Option<Id>, Id)> = vec![];
        for piece in pieces {
            let Arg::Ref(operand) = piece else {
                return Err(Unsupported::new(op, "reads something that is no tensor").into());
            };
            let meta = self.meta(*operand, op)?;
            if meta.shape.len() + usize::from(stacks) != index.len() {
                return Err(Unsupported::new(op, "joins tensors of different ranks").into());
            }
            let size = if stacks { 1 } else { meta.shape[dim] };
            let along = index[dim].shifted(-start);
            start += size as i64;
            let mut moved = index.to_vec();
            if stacks {
                moved.remove(dim);
            } else {
                moved[dim] = along.clone();
            }
            found.extend(self.inside(&[(along, size)], op, &mut |lower| lower.number(*operand, &moved))?);
        }
        let (_, mut value) = found.pop().ok_or_else(|| Unsupported::new(op, "is read outside its pieces"))?;
        for (mask, piece) in found.into_iter().rev() {
            value = match mask {
                Some(mask) => self.arena.add(Expr::Select(mask, piece, value), false),
                None => piece,
            };
        }
        Ok(self.typed(node, value))
    }

    /// A number as what `node` returns.
    pub(super) fn typed(&mut self, node: &RegionNode, value: Id) -> Id {
        let truth = node.value.tensor().is_some_and(|meta| meta.dtype == autokernel_core::dtype::Dtype::Bool);
        if truth { self.as_truth(value) } else { value }
    }

    /// Operators that place elements by other than a view's rules.
    pub(super) fn placed(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let operand = source(node)?;
        let inner = self.meta(operand, &node.op)?;
        let name = node.op.split('.').nth(1).unwrap_or(&node.op);
        match name {
            "flip" => {
                let mut moved = index.to_vec();
                for dim in ints(node, 1, "dims")?.unwrap_or_default() {
                    let dim = dimension(dim, index.len(), &node.op)?;
                    let mut turned = Affine::constant(self.rank(), inner.shape[dim] as i64 - 1);
                    turned.add_scaled(&index[dim], -1);
                    moved[dim] = turned;
                }
                self.pull(operand, 0, &moved)
            }
            "roll" => self.rolled(node, inner, index),
            "repeat" => self.repeated(node, inner, index),
            "constant_pad_nd" => self.padded(node, inner, index),
            _ => Err(Unsupported::new(&node.op, "has no meaning in the operator table").into()),
        }
    }

    fn rolled(&mut self, node: &RegionNode, inner: &TensorMeta, index: &[Affine]) -> Result<Id, Stop> {
        let shifts = ints(node, 1, "shifts")?.unwrap_or_default();
        let dims = ints(node, 2, "dims")?.unwrap_or_default();
        if shifts.len() != dims.len() {
            return Err(Unsupported::new(&node.op, "rolls all dimensions as one").into());
        }
        let mut moves = vec![];
        for (shift, dim) in shifts.into_iter().zip(dims) {
            let dim = dimension(dim, index.len(), &node.op)?;
            moves.push((dim, shift.rem_euclid(inner.shape[dim] as i64)));
        }
        let value = self.rolled_from(node, inner, index, &moves)?;
        Ok(self.typed(node, value))
    }

    /// One dimension after another: what was moved out at the end is found at the beginning.
    fn rolled_from(
        &mut self,
        node: &RegionNode,
        inner: &TensorMeta,
        index: &[Affine],
        moves: &[(usize, i64)],
    ) -> Result<Id, Stop> {
        let Some(((dim, shift), rest)) = moves.split_first() else {
            return self.number(source(node)?, index);
        };
        let size = inner.shape[*dim];
        let mut both = vec![];
        for start in [-shift, size as i64 - shift] {
            let along = index[*dim].shifted(start);
            let mut moved = index.to_vec();
            moved[*dim] = along.clone();
            let body = &mut |lower: &mut Self| lower.rolled_from(node, inner, &moved, rest);
            both.extend(self.inside(&[(along, size)], &node.op, body)?);
        }
        Ok(match both.as_slice() {
            [(Some(mask), first), (_, second)] => self.arena.add(Expr::Select(*mask, *first, *second), false),
            [(_, value), ..] => *value,
            [] => return Err(Unsupported::new(&node.op, "is read outside its pieces").into()),
        })
    }

    /// Copies one behind the other are the same elements: the index starts again.
    fn repeated(&mut self, node: &RegionNode, inner: &TensorMeta, index: &[Affine]) -> Result<Id, Stop> {
        let op = node.op.as_str();
        let new = index.len().saturating_sub(inner.shape.len());
        let mut moved = vec![];
        for (along, size) in index[new..].iter().zip(&inner.shape) {
            let (_, high) = along.range(&self.domain);
            if *size == 1 {
                moved.push(Affine::constant(self.rank(), 0));
            } else if high < *size as i64 {
                moved.push(along.clone());
            } else {
                // As a view of one dimension as two, of which the inner one counts.
                let copies = (high as u64).div_euclid(*size) + 1;
                let pair = TensorMeta::contiguous(inner.dtype, &[copies, *size]);
                moved.push(self.reshape(along, &pair, op)?.remove(1));
            }
        }
        self.pull(source(node)?, 0, &moved)
    }

    fn padded(&mut self, node: &RegionNode, inner: &TensorMeta, index: &[Affine]) -> Result<Id, Stop> {
        let pads = ints(node, 1, "pad")?.unwrap_or_default();
        let value = match super::views::argument(node, 2, "value") {
            None | Some(Arg::None) => 0.0,
            Some(Arg::Int(value)) => *value as f64,
            Some(Arg::Float(value)) => *value,
            Some(Arg::Bool(value)) => f64::from(u8::from(*value)),
            Some(_) => return Err(Unsupported::new(&node.op, "has an unknown `value`").into()),
        };
        let mut moved = index.to_vec();
        let mut parts = vec![];
        // Pairs for the last dimension first.
        for (pair, dim) in pads.chunks(2).zip((0..index.len()).rev()) {
            moved[dim] = index[dim].shifted(-pair[0]);
            parts.push((moved[dim].clone(), inner.shape[dim]));
        }
        let operand = source(node)?;
        let found = self.inside(&parts, &node.op, &mut |lower| lower.number(operand, &moved))?;
        let outside = self.rounded_constant(node, value);
        let value = match found {
            None => outside,
            Some((None, value)) => value,
            Some((Some(mask), value)) => self.arena.add(Expr::Select(mask, value, outside), false),
        };
        Ok(self.typed(node, value))
    }

    /// A number as an element of what `node` returns.
    fn rounded_constant(&mut self, node: &RegionNode, value: f64) -> Id {
        use autokernel_core::dtype::Dtype;
        let id = self.constant(value);
        match node.value.tensor().map(|meta| meta.dtype) {
            Some(dtype @ (Dtype::Bf16 | Dtype::F16)) if value != 0.0 && value.is_finite() => {
                self.unary(crate::loops::Unary::RoundTo(dtype), id)
            }
            _ => id,
        }
    }
}

/// The values `v` with `0 <= offset + step * v < size`, as a half-open range; `step` is not zero.
fn values_inside(offset: i64, step: i64, size: u64) -> (i64, i64) {
    let size = size as i64;
    if step > 0 {
        let up = |x: i64| (x + step - 1).div_euclid(step);
        (up(-offset), up(size - offset))
    } else {
        ((offset - size).div_euclid(-step) + 1, offset.div_euclid(-step) + 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_values_inside_are_those_that_counting_finds(step in -4_i64..5, offset in -30_i64..30, size in 1_u64..15) {
            prop_assume!(step != 0);
            let (first, end) = values_inside(offset, step, size);
            for v in -80..80 {
                let inside = (0..size as i64).contains(&(offset + step * v));
                prop_assert_eq!(inside, first <= v && v < end, "{}", v);
            }
        }
    }
}
