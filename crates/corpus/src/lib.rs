//! The corpus: kernel files that are wrong or fake, each of which the judge must turn away at a named
//! stage, and honest ones that look suspicious, each of which it must let through.
//!
//! `fixtures/corpus.toml` says of every file what must become of it, and accounts for all 64 rows of the
//! catalogue of exploits ([`manifest`]). [`run`] puts them before the judge that `autokernel judge`
//! uses; [`report`] is what comes out. `cargo xtask corpus` runs it, and so does `cargo test`.

pub mod manifest;
pub mod report;
pub mod run;

pub use manifest::Manifest;
pub use report::Report;
pub use run::{Options, run};
