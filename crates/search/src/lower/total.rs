//! What all rows come to: sums over rows of something that is one number for each row.
//!
//! The rows are walked once, by several threads; each keeps its own sums in f64, which are added up at the end.

use autokernel_core::graph::{Arg, TensorMeta};
use autokernel_core::region::{Operand, RegionNode};

use super::composite::reduced_dims;
use super::views::{argument, int, source};
use super::{Lower, Stop, Unsupported, reshape};
use crate::affine::Affine;
use crate::loops::{Binary, Compare, Expr, Id, Store};

impl Lower<'_> {
    /// The store of a result of one element.
    pub(super) fn once(&mut self, number: usize, node: usize, meta: &TensorMeta) -> Result<Store, Stop> {
        let op = self.region.nodes[node].op.as_str();
        let index = vec![Affine::constant(self.rank(), 0); meta.shape.len()];
        let access = self.access(number, meta, &index);
        let value = self.number(Operand::Node(node), &index)?;
        let mut open = vec![value];
        while let Some(id) = open.pop() {
            match self.arena.get(id) {
                Expr::Load(_) | Expr::Within(_) | Expr::Position(_) | Expr::Reduce(_) | Expr::Scan(_) => {
                    return Err(Unsupported::new(op, "needs more than what all rows come to").into());
                }
                expr => crate::loops::for_each_operand(expr, |operand| open.push(operand)),
            }
        }
        Ok(Store::Once(access, value))
    }

    /// A sum or mean over everything of a tensor with one element for each row; `None` if it is no such thing.
    pub(super) fn total_of_rows(&mut self, node: &RegionNode) -> Result<Option<Id>, Stop> {
        let (operand, dims) = reduced_dims(self.region, node)?;
        let meta = self.meta(operand, &node.op)?;
        let divides = node.op.starts_with("aten.mean.");
        let sums = divides || node.op.starts_with("aten.sum.");
        let rows = self.space.rows();
        let all = dims.len() == meta.shape.len() && meta.numel() == rows;
        if !sums || !all || rows == self.space.row() || !self.space.rows_in_order || rows == 1 {
            return Ok(None);
        }
        let index = self.row_index(meta, &node.op)?;
        let value = self.number(operand, &index)?;
        let total = self.total(value, &node.op)?;
        if !divides {
            return Ok(Some(total));
        }
        let count = self.constant(rows as f64);
        Ok(Some(self.binary(Binary::Div, total, count)))
    }

    /// The index of this row in a tensor with one element for each.
    fn row_index(&self, meta: &TensorMeta, op: &str) -> Result<Vec<Affine>, Stop> {
        reshape(&self.space.position(false), meta, &self.space.whole(), op)
    }

    fn total(&mut self, value: Id, op: &str) -> Result<Id, Stop> {
        if self.arena.is_lane(value) {
            return Err(Unsupported::new(op, "does not fit the rows of the rest").into());
        }
        let next = self.totals.len();
        let number = self.totals.iter().position(|known| *known == value).unwrap_or(next);
        if number == next {
            self.totals.push(value);
        }
        Ok(self.arena.add(Expr::Total(number), false))
    }

    /// Minus what stands at each row's target, weighed by class; results are the loss and the sum of weights.
    pub(super) fn loss(&mut self, node: &RegionNode, result: usize, index: &[Affine]) -> Result<Id, Stop> {
        let op = node.op.as_str();
        let operand = source(node)?;
        let meta = self.meta(operand, op)?;
        let (&[rows, classes], Some(Arg::Ref(target))) = (meta.shape.as_slice(), node.args.get(1)) else {
            return Err(Unsupported::new(op, "has no rows").into());
        };
        if rows != self.space.rows() || !self.space.rows_in_order {
            return Err(Unsupported::new(op, "does not fit the rows of the rest").into());
        }
        let (kind, ignored) = (int(node, 3, "reduction", 1)?, int(node, 4, "ignore_index", -100)?);
        let row = if kind == 0 {
            index.to_vec()
        } else {
            self.row_index(&TensorMeta::contiguous(meta.dtype, &[rows]), op)?
        };
        // Small numbers are told from each other by any float.
        if ignored.unsigned_abs() >= 1 << 24 {
            return Err(Unsupported::new(op, "ignores an index that f32 cannot tell from others").into());
        }
        let (label, ignored) = (self.number(*target, &row)?, self.constant(ignored as f64));
        let counts = self.arena.add(Expr::Compare(Compare::Ne, label, ignored), false);
        let class = self.index_variable(*target, &row, classes, false, op)?;
        let (zero, mut weight) = (self.constant(0.0), self.constant(1.0));
        if let Some(Arg::Ref(weights)) = argument(node, 2, "weight") {
            weight = self.number(*weights, std::slice::from_ref(&class))?;
        }
        let weight = self.arena.add(Expr::Select(counts, weight, zero), false);
        let [first] = row.as_slice() else {
            return Err(Unsupported::new(op, "has no rows").into());
        };
        let x = self.number(operand, &[first.clone(), class])?;
        let weighed = self.binary(Binary::Mul, x, weight);
        let lost = self.unary(crate::loops::Unary::Neg, weighed);
        let lost = self.arena.add(Expr::Select(counts, lost, zero), false);
        if kind == 0 {
            return if result == 0 {
                Ok(lost)
            } else {
                Err(Unsupported::new(op, "is asked for weights").into())
            };
        }
        let weights = self.total(weight, op)?;
        if result == 1 {
            return Ok(weights);
        }
        let losses = self.total(lost, op)?;
        Ok(if kind == 1 { self.binary(Binary::Div, losses, weights) } else { losses })
    }
}
