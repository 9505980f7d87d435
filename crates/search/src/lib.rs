//! The search agent: regions become loops, loops become kernels.
//!
//! A small compiler in layers that know only the one below: [`op`] says what ATen operators mean,
//! [`mod@partition`] cuts graphs into regions, [`lower()`](fn@lower) turns a region into a [`loops::Program`]
//! (iteration space, scalar expressions, affine accesses), [`mod@schedule`] decides passes, buffers and
//! parameters, an emitter writes the text. [`mod@product`] does
//! the same around matrix products. [`mod@search`] then chooses the numbers by measurement. There is
//! no list of layers to recognise: whatever chain of operators the table knows becomes one kernel.

use autokernel_core::kernel_file::KernelFile;
use autokernel_core::plan::Device;
use autokernel_core::region::Region;

pub mod affine;
mod emit_cpp;
pub mod loops;
mod lower;
pub mod op;
pub mod partition;
pub mod product;
pub mod schedule;
pub mod search;

pub use lower::{Unsupported, lower};
pub use partition::{Partition, partition};
pub use search::{Outcome, Search, Trial};

/// Kernel files for a region, best guess first; each is one structural idea with parameters.
pub fn propose(region: &Region, device: &Device) -> Result<Vec<KernelFile>, Unsupported> {
    let program = lower(region)?;
    if !program.products.is_empty() {
        return product::propose(&program, region, device);
    }
    let ideas = schedule::schedules(&program, region, device);
    ideas
        .iter()
        .map(|idea| {
            let text = emit_cpp::emit(&program, idea, region);
            KernelFile::parse(&text)
                .map_err(|error| Unsupported::new("region", format!("gives no kernel file: {error}")))
        })
        .collect()
}
