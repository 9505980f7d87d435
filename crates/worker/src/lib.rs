//! Child processes: start, confine, talk; the toolchain; the roles.
//!
//! The only crate with `unsafe`. The parent half (handles) and the child half (roles that the
//! program re-executes itself for) live side by side, one module a subject.
#![expect(unsafe_code, reason = "system calls, memory maps and calls into kernels end here")]

pub mod admission;
mod child;
pub mod device;
pub mod gpu;
pub mod memory;
pub mod python;
pub mod roles;
pub mod runner;
pub mod sandbox;
pub mod toolchain;
mod wire;

/// What crates/fuzz reaches into; nothing else may use it.
#[doc(hidden)]
pub mod fuzz {
    pub use crate::admission::importable;
    pub use crate::wire::read_bytes;
}

pub use roles::child_main;
