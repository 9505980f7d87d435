//! Matrix products with what is computed on their results.
//!
//! A region with products is lowered like any other: seen from its outputs a product is a tensor that
//! is at hand ([`Program::products`]). [`find`] says which matrices are multiplied, [`plan`] chooses how
//! the work is cut, and the emitter writes a kernel that multiplies a tile at a time, lets the
//! accumulators land in the first-level cache and there runs the rest of the region on them. Products
//! of one region share their left operand, so that a gate and what it opens meet in one tile.
//!
//! The right operand is read from strips that were packed before: once, in a prepare step, where it is
//! constant, else at the start of each call.

use autokernel_core::kernel_file::KernelFile;
use autokernel_core::plan::Device;
use autokernel_core::region::Region;

use crate::emit_cpp;
use crate::loops::Program;
use crate::lower::Unsupported;

mod find;
mod plan;

pub use find::{Matrix, Products, find};
pub(crate) use find::{flops, is_view};
pub use plan::{Plan, plan};

/// Kernel files for a region with products, best guess first.
pub(crate) fn propose(
    program: &Program,
    region: &Region,
    device: &Device,
) -> Result<Vec<KernelFile>, Unsupported> {
    let products = find(program, region)?;
    let plan = plan(program, &products, region, device);
    let text = emit_cpp::emit_products(program, &products, &plan, region);
    let file = KernelFile::parse(&text)
        .map_err(|error| Unsupported::new("region", format!("gives no kernel file: {error}")))?;
    Ok(vec![file])
}
