//! The search agent: regions become loops, loops become kernels.

use autokernel_core::kernel_file::KernelFile;
use autokernel_core::plan::Device;
use autokernel_core::region::Region;

pub mod affine;
mod emit_cpp;
pub mod loops;
mod lower;
pub mod op;
pub mod partition;
pub mod schedule;
pub mod search;

pub use lower::{Unsupported, lower};

/// Kernel files for a region, best guess first; each is one structural idea with parameters.
pub fn propose(region: &Region, device: &Device) -> Result<Vec<KernelFile>, Unsupported> {
    let program = lower(region)?;
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
