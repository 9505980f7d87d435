//! The iteration space of a region and how it is refined.

use autokernel_core::graph::TensorMeta;
use autokernel_core::region::Region;

use super::{Unsupported, composite, lookup};
use crate::affine::Affine;
use crate::op::{self, Class};

/// One iteration dimension.
#[derive(Clone, Debug)]
pub(super) struct Dim {
    pub(super) size: u64,
    /// Stride in the row-major order of the tensor that the space was made from.
    weight: i64,
    /// Stride in the row-major order of its kept dimensions, or of its reduced ones.
    group_weight: i64,
}

/// Kept dimensions, then the row's, each in the order of memory.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) dims: Vec<Dim>,
    pub(super) row_dims: usize,
    pub(super) segments: Vec<(u64, u64)>,
    reduces: bool,
    /// Variables behind the dimensions, for indices that are read.
    slots: usize,
    /// Whether the rows are still those of the tensor that the space was made from.
    pub(super) rows_in_order: bool,
}

impl Space {
    /// The space of a region: what its first reduction runs over, or else its largest output.
    pub(super) fn of(region: &Region) -> Result<Self, Unsupported> {
        let metas = region.output_metas();
        let largest = metas.iter().rev().max_by_key(|meta| meta.numel());
        let output = *largest.ok_or_else(|| Unsupported::new("region", "has no output"))?;
        let mut anchor = None;
        for node in &region.nodes {
            if matches!(op::class(&node.op), Some(Class::Reduction | Class::Composite | Class::Scan)) {
                anchor = Some(composite::reduced_shape(region, node)?);
                break;
            }
        }
        let mut space = match anchor {
            Some((meta, dims)) => Self::new(&meta, &meta, Some(&dims)),
            None => Self::new(output, output, None),
        }?;
        space.slots = lookup::slots(region);
        Ok(space)
    }

    /// Variables of an index over this space.
    pub(super) fn rank(&self) -> usize {
        self.dims.len() + self.slots
    }

    fn new(shape: &TensorMeta, layout: &TensorMeta, reduced: Option<&[usize]>) -> Result<Self, Unsupported> {
        if shape.numel() == 0 {
            return Err(Unsupported::new("region", "has no elements"));
        }
        let weights = crate::affine::row_major(&shape.shape);
        let is_reduced = |dim: usize| reduced.is_some_and(|dims| dims.contains(&dim));
        let mut order: Vec<usize> = (0..shape.shape.len()).filter(|dim| shape.shape[*dim] > 1).collect();
        order.sort_by_key(|dim| (is_reduced(*dim), std::cmp::Reverse(layout.stride[*dim])));
        // Without a reduction the row is the dimension that memory walks fastest.
        let fastest = order.last().copied();
        let in_row = |dim: usize| is_reduced(dim) || reduced.is_none() && fastest == Some(dim);
        let mut group_weights = vec![1; shape.shape.len()];
        let mut sums = [1_i64, 1];
        for dim in (0..shape.shape.len()).rev() {
            let sum = &mut sums[usize::from(in_row(dim))];
            group_weights[dim] = *sum;
            *sum *= shape.shape[dim] as i64;
        }
        let mut dims: Vec<Dim> = order
            .iter()
            .map(|dim| Dim {
                size: shape.shape[*dim],
                weight: weights[*dim],
                group_weight: group_weights[*dim],
            })
            .collect();
        let mut row_dims = order.iter().filter(|dim| in_row(**dim)).count();
        if row_dims == 0 {
            dims.push(Dim { size: 1, weight: 1, group_weight: 1 });
            row_dims = 1;
        }
        let mut space = Self {
            dims,
            row_dims,
            segments: vec![],
            reduces: reduced.is_some(),
            slots: 0,
            rows_in_order: true,
        };
        space.segments = vec![(0, space.row())];
        Ok(space)
    }

    /// Number of the first dimension of the row.
    pub(super) fn first_row(&self) -> usize {
        self.dims.len() - self.row_dims
    }

    /// Length of the row.
    pub(super) fn row(&self) -> u64 {
        self.dims[self.first_row()..].iter().map(|dim| dim.size).product()
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> u64 {
        self.dims[..self.first_row()].iter().map(|dim| dim.size).product()
    }

    /// Number of points.
    pub(super) fn total(&self) -> u64 {
        self.rows() * self.row()
    }

    /// The row-major position of a point in the tensor that the space was made from, or of its row among the rows.
    pub(super) fn position(&self, over_row: bool) -> Affine {
        let mut flat = Affine::constant(self.rank(), 0);
        let first_row = self.first_row();
        for (d, (dim, coefficient)) in self.dims.iter().zip(&mut flat.coefficients).enumerate() {
            if over_row {
                *coefficient = dim.weight;
            } else if d < first_row {
                *coefficient = dim.group_weight;
            }
        }
        flat
    }

    /// Strides of the row's dimensions in the row-major order of the reduced dimensions.
    pub(super) fn row_strides(&self) -> Vec<i64> {
        self.dims[self.first_row()..].iter().map(|dim| dim.group_weight).collect()
    }

    /// The values of the variables over the whole row.
    pub(super) fn whole(&self) -> Vec<(i64, i64)> {
        let dims = self.dims.iter().map(|dim| (0, dim.size as i64));
        dims.chain(std::iter::repeat_n((0, 1), self.slots)).collect()
    }

    /// The values of the variables in one segment.
    pub(super) fn domain(&self, segment: usize) -> Vec<(i64, i64)> {
        let mut domain = self.whole();
        if self.segments.len() > 1
            && let (Some(last), Some((start, end))) =
                (domain.get_mut(self.dims.len() - 1), self.segments.get(segment))
        {
            *last = (*start as i64, *end as i64);
        }
        domain
    }

    pub(super) fn split(&mut self, dim: usize, inner: u64) -> Result<(), Unsupported> {
        let in_row = dim >= self.first_row();
        if in_row && self.segments.len() > 1 {
            return Err(Unsupported::new("region", "both cuts the row and walks it in two dimensions"));
        }
        let old = self.dims[dim].clone();
        let scale = inner as i64;
        self.dims[dim] = Dim {
            size: old.size / inner,
            weight: old.weight * scale,
            group_weight: old.group_weight * scale,
        };
        self.dims.insert(dim + 1, Dim { size: inner, ..old });
        if in_row && self.reduces {
            self.row_dims += 1;
        } else if in_row {
            self.rows_in_order = false;
        }
        self.segments = vec![(0, self.row())];
        Ok(())
    }

    pub(super) fn cut_row(&mut self, at: u64) -> Result<(), Unsupported> {
        if self.row_dims != 1 {
            return Err(Unsupported::new("region", "cuts a row of more than one dimension"));
        }
        let found = self.segments.iter().position(|(start, end)| *start < at && at < *end);
        let segment = found.ok_or_else(|| Unsupported::new("region", "cuts the row outside of it"))?;
        let (start, end) = self.segments[segment];
        self.segments[segment] = (start, at);
        self.segments.insert(segment + 1, (at, end));
        Ok(())
    }
}
