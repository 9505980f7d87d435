//! The words of AutoKernel and the rules that need no I/O.
//!
//! Nothing here opens a file, starts a process or reads a clock. What crosses a process boundary or
//! reaches a disk is a serde type of this crate with a `schema` string or a version number.

pub mod contract;
pub mod dtype;
pub mod graph;
pub mod kernel_file;
pub mod plan;
pub mod readable;
pub mod region;
pub mod stats;
pub mod task;
pub mod verdict;
mod words;
pub mod work;
