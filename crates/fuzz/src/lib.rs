//! Mutated input for the parsers that read what an agent, a compiler or a hostile child wrote: they may
//! refuse, never panic, hang or let something through that breaks a rule.
//!
//! Mutation without coverage feedback, on stable Rust and without a dependency: `cargo fuzz` needs a
//! nightly compiler and libFuzzer, and what is read here is either text with a grammar, JSON or ELF, for
//! which mutations that know the form reach further in 15 seconds than blind ones with feedback. Each
//! target starts from real input ([`targets`]). An input that fails is written down and can be run
//! again; what was found becomes a unit test of the crate that was wrong.

pub mod drive;
pub mod mutate;
pub mod targets;

pub use drive::{Failure, Outcome, again, drive};
pub use targets::{TARGETS, Target, find};
