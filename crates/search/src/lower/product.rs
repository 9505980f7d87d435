//! Matrix products seen from what is computed with their results.

use autokernel_core::graph::Arg;
use autokernel_core::region::RegionNode;

use super::{Lower, Stop, Unsupported, argument};
use crate::affine::{Affine, row_major};
use crate::loops::{Access, Binary, Id};

impl Lower<'_> {
    /// An element of a product, which the kernel around has at hand, with what the operator adds to it.
    pub(super) fn product(&mut self, node: &RegionNode, number: usize, index: &[Affine]) -> Result<Id, Stop> {
        let product = self.product_element(node, number, index)?;
        if node.op == "aten.addmm.default" {
            let (beta, alpha) = (scalar(node, "beta")?, scalar(node, "alpha")?);
            // A beta of zero ignores what would be added, infinities included.
            let scaled = self.scaled(product, alpha);
            return if beta == 0.0 { Ok(scaled) } else { self.added(node, 0, beta, scaled, index) };
        }
        match argument(node, 2, "bias") {
            Some(Arg::Ref(_)) => self.added(node, 2, 1.0, product, index),
            _ => Ok(product),
        }
    }

    fn product_element(&mut self, node: &RegionNode, number: usize, index: &[Affine]) -> Result<Id, Stop> {
        let meta =
            node.value.tensor().ok_or_else(|| Unsupported::new(&node.op, "returns no single tensor"))?;
        let known = self.products.iter().position(|known| *known == number);
        let product = known.unwrap_or_else(|| {
            self.products.push(number);
            self.products.len() - 1
        });
        let columns = meta.shape.last().copied().unwrap_or(1) as i64;
        let dims = self.space.dims.len();
        if index.iter().any(|part| part.coefficients[dims..].iter().any(|coefficient| *coefficient != 0)) {
            return Err(Unsupported::new(&node.op, "is read at indices that stand in a tensor").into());
        }
        let mut at = Affine::constant(self.rank(), 0);
        let last = index.len().saturating_sub(1);
        for (dim, (part, stride)) in index.iter().zip(row_major(&meta.shape)).enumerate() {
            // One element between rows that is not there: nothing may walk through them as one.
            let stride = if dim < last { stride / columns * (columns + 1) } else { stride };
            at.add_scaled(part, stride);
        }
        let tensor = self.region.inputs.len() + product;
        at.coefficients.truncate(self.space.dims.len());
        let guards = self.active.clone();
        Ok(self.load(Access { tensor, offset: at.offset, strides: at.coefficients, lookups: vec![], guards }))
    }

    fn added(
        &mut self,
        node: &RegionNode,
        position: usize,
        factor: f64,
        to: Id,
        index: &[Affine],
    ) -> Result<Id, Stop> {
        let Some(Arg::Ref(operand)) = argument(node, position, "bias") else {
            return Err(Unsupported::new(&node.op, "adds something that is no tensor").into());
        };
        let inner = self.broadcast(self.meta(*operand, &node.op)?, index);
        let term = self.number(*operand, &inner)?;
        let term = self.scaled(term, factor);
        Ok(self.binary(Binary::Add, to, term))
    }

    fn scaled(&mut self, x: Id, factor: f64) -> Id {
        if factor - 1.0 == 0.0 {
            return x;
        }
        let factor = self.constant(factor);
        self.binary(Binary::Mul, x, factor)
    }
}

fn scalar(node: &RegionNode, keyword: &str) -> Result<f64, Stop> {
    match node.kwargs.iter().find(|(key, _)| key == keyword).map(|(_, value)| value) {
        None | Some(Arg::None) => Ok(1.0),
        Some(Arg::Int(value)) => Ok(*value as f64),
        Some(Arg::Float(value)) => Ok(*value),
        Some(_) => Err(Unsupported::new(&node.op, format!("has a `{keyword}` that is no number")).into()),
    }
}
