//! Operators that only say where a value is found: views, splits, concatenations.

use autokernel_core::graph::{Arg, TensorMeta};
use autokernel_core::region::{Operand, RegionNode};

use super::{Lower, Stop, Unsupported, dimension, position};
use crate::affine::Affine;
use crate::loops::Id;

/// A positional or keyword argument.
pub(crate) fn argument<'n>(node: &'n RegionNode, position: usize, keyword: &str) -> Option<&'n Arg<Operand>> {
    node.args
        .get(position)
        .or_else(|| node.kwargs.iter().find(|(key, _)| key == keyword).map(|(_, value)| value))
}

pub(super) fn int(node: &RegionNode, position: usize, keyword: &str, default: i64) -> Result<i64, Stop> {
    match argument(node, position, keyword) {
        None | Some(Arg::None) => Ok(default),
        Some(Arg::Int(value)) => Ok(*value),
        Some(_) => Err(Unsupported::new(&node.op, format!("has an unknown `{keyword}`")).into()),
    }
}

pub(super) fn ints(node: &RegionNode, position: usize, keyword: &str) -> Result<Option<Vec<i64>>, Stop> {
    match argument(node, position, keyword) {
        None | Some(Arg::None) => Ok(None),
        Some(Arg::Int(value)) => Ok(Some(vec![*value])),
        Some(Arg::List(items)) => items
            .iter()
            .map(|item| match item {
                Arg::Int(value) => Ok(*value),
                _ => Err(Unsupported::new(&node.op, format!("has an unknown `{keyword}`")).into()),
            })
            .collect::<Result<_, _>>()
            .map(Some),
        Some(_) => Err(Unsupported::new(&node.op, format!("has an unknown `{keyword}`")).into()),
    }
}

/// The first argument, which must be a tensor.
pub(crate) fn source(node: &RegionNode) -> Result<Operand, Unsupported> {
    match node.args.first() {
        Some(Arg::Ref(operand)) => Ok(*operand),
        _ => Err(Unsupported::new(&node.op, "reads no tensor")),
    }
}

impl Lower<'_> {
    pub(super) fn view(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let operand = source(node)?;
        let inner = self.meta(operand, &node.op)?;
        let moved = self.viewed(node, inner, index)?;
        self.pull(operand, 0, &moved)
    }

    fn viewed(&self, node: &RegionNode, inner: &TensorMeta, index: &[Affine]) -> Result<Vec<Affine>, Stop> {
        let op = node.op.as_str();
        let rank = inner.shape.len();
        let name = op.split('.').nth(1).unwrap_or(op);
        Ok(match name {
            "alias" | "detach" | "clone" | "contiguous" => index.to_vec(),
            "t" | "transpose" => {
                let mut moved = index.to_vec();
                if rank >= 2 {
                    let (a, b) = (int(node, 1, "dim0", 0)?, int(node, 2, "dim1", 1)?);
                    moved.swap(dimension(a, rank, op)?, dimension(b, rank, op)?);
                }
                moved
            }
            "permute" => {
                let order = ints(node, 1, "dims")?.unwrap_or_default();
                let mut moved = index.to_vec();
                for (part, dim) in index.iter().zip(order) {
                    moved[dimension(dim, rank, op)?] = part.clone();
                }
                moved
            }
            "expand" => self.broadcast(inner, index),
            "slice" => {
                let dim = dimension(int(node, 1, "dim", 0)?, rank, op)?;
                let size = inner.shape[dim] as i64;
                let start = int(node, 2, "start", 0)?;
                let start = if start < 0 { start + size } else { start }.clamp(0, size);
                let mut moved = index.to_vec();
                moved[dim] = Affine::constant(self.rank(), start);
                moved[dim].add_scaled(&index[dim], int(node, 4, "step", 1)?);
                moved
            }
            "select" => {
                let dim = dimension(int(node, 1, "dim", 0)?, rank, op)?;
                let at = int(node, 2, "index", 0)?;
                let at = if at < 0 { at + inner.shape[dim] as i64 } else { at };
                let mut moved = index.to_vec();
                moved.insert(dim, Affine::constant(self.rank(), at));
                moved
            }
            // Everything else keeps the row-major order.
            _ => {
                let outer =
                    node.value.tensor().ok_or_else(|| Unsupported::new(op, "returns no single tensor"))?;
                self.reshape(&position(self, index, outer), inner, op)?
            }
        })
    }

    /// The index of a tensor that is broadcast to a larger shape.
    pub(super) fn broadcast(&self, inner: &TensorMeta, index: &[Affine]) -> Vec<Affine> {
        let skipped = index.len().saturating_sub(inner.shape.len());
        let parts = index[skipped..].iter().zip(&inner.shape);
        parts
            .map(|(part, size)| if *size == 1 { Affine::constant(self.rank(), 0) } else { part.clone() })
            .collect()
    }

    pub(super) fn split(&mut self, node: &RegionNode, result: usize, index: &[Affine]) -> Result<Id, Stop> {
        let operand = source(node)?;
        let inner = self.meta(operand, &node.op)?;
        let rank = inner.shape.len();
        let mut moved = index.to_vec();
        if node.op.starts_with("aten.unbind.") {
            let dim = dimension(int(node, 1, "dim", 0)?, rank, &node.op)?;
            moved.insert(dim, Affine::constant(self.rank(), result as i64));
        } else {
            let dim = dimension(int(node, 2, "dim", 0)?, rank, &node.op)?;
            let sizes = ints(node, 1, "split_size")?.unwrap_or_default();
            let start = match (argument(node, 1, "split_size"), sizes.as_slice()) {
                (Some(Arg::Int(size)), _) => size * result as i64,
                (_, sizes) => sizes.iter().take(result).sum(),
            };
            moved[dim] = index[dim].shifted(start);
        }
        self.pull(operand, 0, &moved)
    }
}
