//! What is fuzzed: how input is made from seeds, and what must hold for it.

use anyhow::Result;

use crate::mutate::Random;

mod admission;
mod header;
mod replay;
mod wire;

/// One thing that reads what nobody trusts.
pub struct Target {
    /// Its name on the command line.
    pub name: &'static str,
    /// Real input to start from; never empty.
    pub seeds: fn() -> Result<Vec<Vec<u8>>>,
    /// An input.
    pub make: fn(&[Vec<u8>], &mut Random) -> Vec<u8>,
    /// Whether the input was taken for good; a rule that it breaks is an error. Panics count, too.
    pub check: fn(&[u8]) -> Result<bool, String>,
}

/// All targets.
pub const TARGETS: [&Target; 5] =
    [&header::HEADER, &header::PLAN, &wire::WIRE, &replay::REPLAY, &admission::ADMISSION];

/// A target by its name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}

/// A mutated seed, text or not.
fn mutated(seeds: &[Vec<u8>], words: &[&str], random: &mut Random) -> Vec<u8> {
    let mut bytes = random.pick(seeds).clone();
    crate::mutate::mutate(&mut bytes, words, random);
    bytes
}

/// Turns a condition into a broken rule.
fn rule(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("broken rule: {what}")) }
}
