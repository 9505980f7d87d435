//! Indices that are read: embeddings, gathers, tables.
//!
//! An index that stands in a tensor is no affine function of the place. It becomes one more variable of the
//! indices (see [`Lower::rank`]), with the size of the dimension that it is an index of as its domain; so views
//! and arithmetic behind it work as they always do. Reading stays inside: an index outside of its dimension,
//! for which PyTorch raises an error, reads nothing and gives NaN.

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::Arg;
use autokernel_core::region::{Operand, Region, RegionNode};

use super::views::{argument, int, source};
use super::{Lower, Stop, Unsupported, dimension};
use crate::affine::Affine;
use crate::loops::{Access, Expr, Id, Lookup, TABLES, Table};
use crate::op::{self, Class};

/// Different places at which one index tensor may be read in a region.
const PLACES: usize = 4;

/// Variables to keep free for the indices that a region reads.
pub(super) fn slots(region: &Region) -> usize {
    let reads = |node: &RegionNode| match op::class(&node.op) {
        Some(Class::Lookup | Class::Loss) => PLACES * node.args.len(),
        // Two dimensions with two neighbours each.
        Some(Class::Window) if node.op.contains("upsample") => PLACES * 4,
        _ => 0,
    };
    region.nodes.iter().map(reads).sum()
}

impl Lower<'_> {
    pub(super) fn wide(&self) -> bool {
        self.region.inputs.iter().any(|input| input.meta.dtype == Dtype::F64)
    }

    /// A variable that stands for the number found at an access.
    pub(super) fn variable(&mut self, at: Access, size: u64, wraps: bool, op: &str) -> Result<Affine, Stop> {
        let lane = self.moves_along_row(&at);
        let lookup = Lookup { at, size, wraps, lane };
        let next = self.lookups.len();
        let number = self.lookups.iter().position(|known| *known == lookup).unwrap_or(next);
        let slot = self.space.dims.len() + number;
        if slot >= self.rank() {
            return Err(Unsupported::new(op, "reads indices at too many places").into());
        }
        if number == next {
            self.lookups.push(lookup);
        }
        self.domain[slot] = (0, size as i64);
        let mut variable = Affine::constant(self.rank(), 0);
        variable.coefficients[slot] = 1;
        Ok(variable)
    }

    /// Reads a constant table at a place.
    pub(super) fn table(&mut self, table: Table, along: &Affine) -> Access {
        let next = self.tables.len();
        let number = self.tables.iter().position(|known| *known == table).unwrap_or(next);
        if number == next {
            self.tables.push(table);
        }
        let dims = self.space.dims.len();
        let lookups = along.coefficients[dims..].iter().copied().enumerate();
        Access {
            tensor: TABLES + number,
            offset: along.offset,
            strides: along.coefficients[..dims].to_vec(),
            lookups: lookups.filter(|(_, stride)| *stride != 0).collect(),
            guards: self.active.clone(),
        }
    }

    /// The element of an index tensor as a variable; it must come from outside as it is.
    pub(super) fn index_variable(
        &mut self,
        operand: Operand,
        index: &[Affine],
        size: u64,
        wraps: bool,
        op: &str,
    ) -> Result<Affine, Stop> {
        let meta = self.meta(operand, op)?;
        if !matches!(meta.dtype, Dtype::I64 | Dtype::I32) {
            return Err(Unsupported::new(op, format!("reads indices of type {}", meta.dtype.name())).into());
        }
        let id = self.pull(operand, 0, index)?;
        let Expr::Load(load) = self.arena.get(id) else {
            return Err(Unsupported::new(op, "reads indices that it has to compute").into());
        };
        self.variable(self.loads[load].clone(), size, wraps, op)
    }

    pub(super) fn looked_up(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Id, Stop> {
        let op = node.op.as_str();
        let operand = source(node)?;
        let inner = self.meta(operand, op)?;
        let other = |position: usize| match node.args.get(position) {
            Some(Arg::Ref(operand)) => Ok(*operand),
            _ => Err(Stop::from(Unsupported::new(op, "reads no indices"))),
        };
        let name = op.split('.').nth(1).unwrap_or(op);
        let moved = match name {
            "embedding" => {
                let (last, places) =
                    index.split_last().ok_or_else(|| Unsupported::new(op, "has no dimensions"))?;
                vec![self.index_variable(other(1)?, places, inner.shape[0], false, op)?, last.clone()]
            }
            "index_select" => {
                let dim = dimension(int(node, 1, "dim", 0)?, inner.shape.len(), op)?;
                let mut moved = index.to_vec();
                moved[dim] =
                    self.index_variable(other(2)?, &index[dim..=dim], inner.shape[dim], false, op)?;
                moved
            }
            "gather" => {
                let dim = dimension(int(node, 1, "dim", 0)?, inner.shape.len(), op)?;
                let mut moved = index.to_vec();
                moved[dim] = self.index_variable(other(2)?, index, inner.shape[dim], false, op)?;
                moved
            }
            "index" => self.indexed(node, index)?,
            _ => return Err(Unsupported::new(op, "has no meaning in the operator table").into()),
        };
        self.pull(operand, 0, &moved)
    }

    /// `x[:, a, b]`: index tensors are broadcast against each other; their dimensions stand where the first of
    /// them stood if they follow each other, else in front.
    fn indexed(&mut self, node: &RegionNode, index: &[Affine]) -> Result<Vec<Affine>, Stop> {
        let op = node.op.as_str();
        let inner = self.meta(source(node)?, op)?;
        let Some(Arg::List(items)) = argument(node, 1, "indices") else {
            return Err(Unsupported::new(op, "reads no indices").into());
        };
        let mut given = vec![];
        for (dim, item) in items.iter().enumerate() {
            match item {
                Arg::None => {}
                Arg::Ref(operand) => given.push((dim, *operand)),
                _ => return Err(Unsupported::new(op, "reads no indices").into()),
            }
        }
        let mut rank = 0;
        for (_, operand) in &given {
            rank = rank.max(self.meta(*operand, op)?.shape.len());
        }
        let first = given.first().map_or(0, |(dim, _)| *dim);
        let together = given.iter().zip(first..).all(|((dim, _), expected)| *dim == expected);
        let start = if together { first } else { 0 };
        if index.len() + given.len() != inner.shape.len() + rank {
            return Err(Unsupported::new(op, "reads masks as indices").into());
        }
        let places = index[start..start + rank].to_vec();
        let mut rest = index[..start].iter().chain(&index[start + rank..]).cloned();
        let mut moved = vec![];
        for dim in 0..inner.shape.len() {
            moved.push(match given.iter().find(|(place, _)| *place == dim) {
                Some((_, operand)) => {
                    let meta = self.meta(*operand, op)?;
                    let at = self.broadcast(meta, &places);
                    self.index_variable(*operand, &at, inner.shape[dim], true, op)?
                }
                None => rest.next().ok_or_else(|| Unsupported::new(op, "has too few dimensions"))?,
            });
        }
        Ok(moved)
    }
}
