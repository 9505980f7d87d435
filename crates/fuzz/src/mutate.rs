//! Random numbers from a logged seed, and mutations of bytes.

/// A small generator (splitmix64, Steele, Lea and Flood 2014): the same seed gives the same run.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.number() % bound.max(1) as u64) as usize
    }

    /// One of these.
    ///
    /// # Panics
    /// When there is none.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Numbers at the edges of something.
pub const EDGES: [u64; 14] = [
    0,
    1,
    2,
    7,
    8,
    0x7f,
    0xff,
    0xfff,
    0x1000,
    0xffff_ffff,
    1 << 40,
    i64::MAX as u64,
    i64::MAX as u64 + 1,
    u64::MAX,
];

/// Changes a few places of `bytes`: bits, numbers at edges, pieces moved, doubled or cut out, words of
/// the dictionary put in.
pub fn mutate(bytes: &mut Vec<u8>, words: &[&str], random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        let most = 1 << random.below(8);
        let until = (at + 1 + random.below(most)).min(bytes.len());
        match random.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.number() as u8,
            2 if at < until => {
                bytes.drain(at..until);
            }
            3 if at < until => {
                let piece = bytes[at..until].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            4 => {
                let number = random.pick(&EDGES).to_le_bytes();
                let width = 1 << random.below(4);
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&number[..end - at]);
            }
            5 => {
                let number = (*random.pick(&EDGES) as i64).to_string();
                bytes.splice(at..at, number.into_bytes());
            }
            _ if !words.is_empty() => {
                bytes.splice(at..at, random.pick(words).bytes());
            }
            _ => {}
        }
    }
}
