//! Orders that a candidate can't foresee: drawn from the operating system after the artefact's hash
//! is fixed, logged in the evidence, never shown to an agent.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A 256-bit seed, hexadecimal on disk.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Seed([u8; 32]);

/// A text that is no seed.
#[derive(Debug, thiserror::Error)]
#[error("a seed is 64 hexadecimal digits")]
pub struct NotASeed;

impl Seed {
    /// A seed from the operating system.
    pub fn from_os() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The stream of numbers of this seed for one purpose.
    pub fn stream(&self, purpose: &str) -> Stream {
        Stream { reader: blake3::Hasher::new_keyed(&self.0).update(purpose.as_bytes()).finalize_xof() }
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Seed {
    type Err = NotASeed;

    fn from_str(text: &str) -> Result<Self, NotASeed> {
        Ok(Self(*blake3::Hash::from_hex(text).map_err(|_| NotASeed)?.as_bytes()))
    }
}

impl TryFrom<String> for Seed {
    type Error = NotASeed;

    fn try_from(text: String) -> Result<Self, NotASeed> {
        text.parse()
    }
}

impl From<Seed> for String {
    fn from(seed: Seed) -> Self {
        seed.to_string()
    }
}

/// Numbers from a keyed hash: unpredictable without the seed, repeatable with it.
#[derive(Debug)]
pub struct Stream {
    reader: blake3::OutputReader,
}

impl Stream {
    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.reader.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// A seed of its own for a part of the work.
    pub fn seed(&mut self) -> Seed {
        let mut bytes = [0; 32];
        self.reader.fill(&mut bytes);
        Seed(bytes)
    }

    /// A number below `bound`, which must not be zero. The bias of at most `bound / 2^64` is nothing.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % bound.max(1) as u64) as usize
    }

    /// `0..count` in random order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logged_seed_gives_the_same_orders() {
        let seed = Seed::from_os().unwrap();
        let again: Seed = serde_json::from_str(&serde_json::to_string(&seed).unwrap()).unwrap();
        assert_eq!(seed.stream("a").order(50), again.stream("a").order(50));
        assert_ne!(seed.stream("a").order(50), seed.stream("b").order(50));
        let mut sorted = seed.stream("a").order(50);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert!("xyz".parse::<Seed>().is_err());
    }
}
