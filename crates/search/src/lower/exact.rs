//! Which values of a region are still the numbers that came in.

use std::collections::BTreeSet;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, Value};
use autokernel_core::region::{Operand, Region, RegionNode};

use crate::op;

/// Why such an operator is refused on anything else.
pub(super) const TIPPED: &str = "looks closely at what was computed, which rounding may tip";

/// Whether f32 cannot hold all numbers of an integer type.
pub(super) fn is_wide_integer(dtype: Dtype) -> bool {
    !dtype.is_float() && dtype != Dtype::Bool && dtype.size() > 2
}

/// Whether nothing inside the region has rounded a value.
pub(super) fn is_exact(region: &Region, operand: Operand) -> bool {
    let (mut open, mut seen) = (vec![operand], BTreeSet::new());
    while let Some(operand) = open.pop() {
        let Operand::Node(number) = operand else { continue };
        let node = &region.nodes[number];
        // A truth value comes from a comparison that was allowed, or from outside.
        if !seen.insert(number) || dtype(node) == Some(Dtype::Bool) {
            continue;
        }
        if !op::keeps_numbers(&node.op) || !numbers_fit(node) {
            return false;
        }
        node.args
            .iter()
            .chain(node.kwargs.iter().map(|(_, arg)| arg))
            .for_each(|arg| arg.for_each_ref(&mut |operand| open.push(*operand)));
    }
    true
}

fn dtype(node: &RegionNode) -> Option<Dtype> {
    match &node.value {
        Value::Tensor(meta) => Some(meta.dtype),
        _ => None,
    }
}

/// Whether a narrow result holds the numbers that stand in the call, where they may become its values.
fn numbers_fit(node: &RegionNode) -> bool {
    let bits = match dtype(node) {
        Some(Dtype::Bf16) => 8,
        Some(Dtype::F16) => 11,
        _ => return true,
    };
    let fits = |value: f64| {
        let scaled = value / value.abs().log2().floor().exp2() * f64::from(1 << (bits - 1));
        value == 0.0
            || !value.is_finite()
            || scaled.fract() == 0.0 && value.abs() < 65_504.0 && value.abs() > 1e-4
    };
    node.args.iter().chain(node.kwargs.iter().map(|(_, arg)| arg)).all(|arg| match arg {
        Arg::Float(value) => fits(*value),
        Arg::Int(value) => fits(*value as f64),
        _ => true,
    })
}
