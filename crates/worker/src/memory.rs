//! Arenas: sealed memory files that hold a candidate's inputs, outputs and scratch.
//!
//! The parent never maps them. It reads and writes with `pread` and `pwrite`, so its resident set
//! stays small and a frozen or dying child cannot disturb it. Every buffer stands between guard
//! zones full of NaN, at an offset that differs from arena to arena: a read past the end spoils
//! the result, and a write past the end is found by [`Arena::guards_intact`].

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

/// Bytes of guard zone on each side of a buffer, at least.
pub const GUARD: u64 = 64 * 1024;
/// Random start offsets are multiples of this: a cache line, and the strictest vector alignment.
const STEP: u64 = 64;
/// How much is written or compared at once.
const CHUNK: usize = 256 * 1024;

/// Size and alignment of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    /// Bytes that the buffer holds.
    pub bytes: u64,
    /// Alignment of its first byte; a power of two. Below 64 it is exact: so aligned, and not better.
    pub align: u64,
}

/// Where a buffer lies inside its arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// What [`Arena::poison`] fills a buffer with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Bytes that are a NaN in every float type, never the same twice in a row for long.
    Nan,
    /// Zeros.
    Zero,
    /// Pseudo-random bytes from this seed.
    Random(u64),
}

/// What can go wrong with an arena.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum MemoryError {
    #[error("cannot create the memory file `{name}`")]
    Create { name: String, source: io::Error },
    #[error("cannot {what} the memory file")]
    Io { what: &'static str, source: io::Error },
    #[error("an arena of these buffers does not fit the address space")]
    TooLarge,
    #[error("alignment {0} is not a power of two")]
    Alignment(u64),
    #[error("no buffer {0} in the arena")]
    NoBuffer(usize),
    #[error("{bytes} bytes at {offset} leave buffer {buffer}")]
    OutOfBuffer { buffer: usize, offset: u64, bytes: u64 },
    #[error("the arena is sealed read-only")]
    Sealed,
}

/// One memory file with buffers between guard zones.
#[derive(Debug)]
pub struct Arena {
    file: File,
    spans: Vec<Span>,
    size: u64,
    seed: u64,
    sealed: bool,
}

impl Arena {
    /// Makes the memory file and fills the guard zones. Buffers start out as zeros.
    pub fn create(name: &str, buffers: &[BufferSpec]) -> Result<Self, MemoryError> {
        Self::lay_out(name, buffers, GUARD)
    }

    /// The same without guard zones, for many small buffers whose kernel has shown elsewhere that it
    /// stays inside. It also looks to that kernel like ordinary memory, not like a test.
    pub fn packed(name: &str, buffers: &[BufferSpec]) -> Result<Self, MemoryError> {
        Self::lay_out(name, buffers, 0)
    }

    fn lay_out(name: &str, buffers: &[BufferSpec], guard: u64) -> Result<Self, MemoryError> {
        let seed = random_seed().map_err(|source| MemoryError::Create { name: name.to_owned(), source })?;
        let mut random = Random(seed);
        let mut spans = Vec::with_capacity(buffers.len());
        let mut at: u64 = 0;
        for buffer in buffers {
            let align = buffer.align.max(STEP);
            if !align.is_power_of_two() {
                return Err(MemoryError::Alignment(buffer.align));
            }
            // Up to one page of steps: enough to vary cache sets and page offsets between arenas.
            let steps = if guard == 0 { 1 } else { 64 };
            let shift = (random.next() % steps).checked_mul(align).ok_or(MemoryError::TooLarge)?;
            let offset = at
                .checked_add(guard)
                .and_then(|o| o.checked_next_multiple_of(align))
                .and_then(|o| o.checked_add(shift + buffer.align % align))
                .ok_or(MemoryError::TooLarge)?;
            spans.push(Span { offset, bytes: buffer.bytes });
            at = offset.checked_add(buffer.bytes).ok_or(MemoryError::TooLarge)?;
        }
        let size = at
            .checked_add(guard)
            // Never nothing: an empty file can't be mapped.
            .and_then(|s| s.max(1).checked_next_multiple_of(4096))
            .ok_or(MemoryError::TooLarge)?;
        if i64::try_from(size).is_err() {
            return Err(MemoryError::TooLarge);
        }
        let file = memory_file(name, false)
            .map_err(|source| MemoryError::Create { name: name.to_owned(), source })?;
        file.set_len(size).map_err(|source| MemoryError::Io { what: "size", source })?;
        // Without these seals a later truncation would turn a child's access into a bus error.
        seal(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let arena = Self { file, spans, size, seed, sealed: false };
        for (start, end) in arena.guard_zones() {
            arena.fill(start, end, Pattern::Nan)?;
        }
        Ok(arena)
    }

    /// Where the buffers lie.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Bytes of the whole memory file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Writes into a buffer.
    pub fn write(&self, buffer: usize, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        if self.sealed {
            return Err(MemoryError::Sealed);
        }
        let at = self.locate(buffer, offset, bytes.len() as u64)?;
        self.file.write_all_at(bytes, at).map_err(|source| MemoryError::Io { what: "write", source })
    }

    /// Reads from a buffer.
    pub fn read(&self, buffer: usize, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let at = self.locate(buffer, offset, bytes.len() as u64)?;
        self.file.read_exact_at(bytes, at).map_err(|source| MemoryError::Io { what: "read", source })
    }

    /// Forbids every further change, by anyone. For arenas that are written once and shared.
    pub fn seal_read_only(&mut self) -> Result<(), MemoryError> {
        seal(&self.file, SealFlags::WRITE | SealFlags::SEAL)?;
        self.sealed = true;
        Ok(())
    }

    /// Fills a whole buffer.
    pub fn poison(&self, buffer: usize, pattern: Pattern) -> Result<(), MemoryError> {
        if self.sealed {
            return Err(MemoryError::Sealed);
        }
        let span = self.spans.get(buffer).ok_or(MemoryError::NoBuffer(buffer))?;
        self.fill(span.offset, span.offset + span.bytes, pattern)
    }

    /// Whether every byte outside the buffers is as it was made.
    pub fn guards_intact(&self) -> Result<bool, MemoryError> {
        let (mut found, mut expected) = (vec![0; CHUNK], vec![0; CHUNK]);
        for (start, end) in self.guard_zones() {
            let mut at = start;
            while at < end {
                let len = (end - at).min(CHUNK as u64) as usize;
                nan_bytes(self.seed, at, &mut expected[..len]);
                self.file
                    .read_exact_at(&mut found[..len], at)
                    .map_err(|source| MemoryError::Io { what: "read", source })?;
                if found[..len] != expected[..len] {
                    return Ok(false);
                }
                at += len as u64;
            }
        }
        Ok(true)
    }

    /// Fills the guard zones again, after a candidate broke them.
    pub fn restore_guards(&self) -> Result<(), MemoryError> {
        if self.sealed {
            return Err(MemoryError::Sealed);
        }
        self.guard_zones().into_iter().try_for_each(|(start, end)| self.fill(start, end, Pattern::Nan))
    }

    /// A second descriptor on the same memory that can never be mapped writable.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        Ok(File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?.into())
    }

    /// The descriptor that can be mapped writable.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn locate(&self, buffer: usize, offset: u64, bytes: u64) -> Result<u64, MemoryError> {
        let span = self.spans.get(buffer).ok_or(MemoryError::NoBuffer(buffer))?;
        match offset.checked_add(bytes) {
            Some(end) if end <= span.bytes => Ok(span.offset + offset),
            _ => Err(MemoryError::OutOfBuffer { buffer, offset, bytes }),
        }
    }

    fn guard_zones(&self) -> Vec<(u64, u64)> {
        let mut zones = Vec::with_capacity(self.spans.len() + 1);
        let mut at = 0;
        for span in &self.spans {
            zones.push((at, span.offset));
            at = span.offset + span.bytes;
        }
        zones.push((at, self.size));
        zones
    }

    fn fill(&self, start: u64, end: u64, pattern: Pattern) -> Result<(), MemoryError> {
        let mut chunk = vec![0; (end - start).min(CHUNK as u64) as usize];
        let mut at = start;
        while at < end {
            let len = (end - at).min(CHUNK as u64) as usize;
            match pattern {
                Pattern::Zero => {}
                Pattern::Nan => nan_bytes(self.seed, at, &mut chunk[..len]),
                Pattern::Random(seed) => random_bytes(seed, at - start, &mut chunk[..len]),
            }
            self.file
                .write_all_at(&chunk[..len], at)
                .map_err(|source| MemoryError::Io { what: "write", source })?;
            at += len as u64;
        }
        Ok(())
    }
}

/// An anonymous memory file; `executable` asks for one that may be mapped executable where the
/// kernel tells the two apart.
pub(crate) fn memory_file(name: &str, executable: bool) -> io::Result<File> {
    let base = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let kind = if executable { MemfdFlags::EXEC } else { MemfdFlags::NOEXEC_SEAL };
    // Kernels before 6.3 know neither flag.
    match rustix::fs::memfd_create(name, base | kind) {
        Err(rustix::io::Errno::INVAL) => Ok(rustix::fs::memfd_create(name, base)?.into()),
        other => Ok(other?.into()),
    }
}

/// Seals a memory file.
pub(crate) fn seal(file: &File, seals: SealFlags) -> Result<(), MemoryError> {
    rustix::fs::fcntl_add_seals(file, seals).map_err(|e| MemoryError::Io { what: "seal", source: e.into() })
}

/// Eight bytes from the operating system.
pub(crate) fn random_seed() -> io::Result<u64> {
    let mut bytes = [0; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(u64::from_le_bytes(bytes))
}

/// The state-increment generator of Steele, Lea and Flood (2014); each word can be had directly.
struct Random(u64);

impl Random {
    fn at(seed: u64, index: u64) -> u64 {
        let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn next(&mut self) -> u64 {
        self.0 = Self::at(self.0, 0);
        self.0
    }
}

fn random_bytes(seed: u64, position: u64, bytes: &mut [u8]) {
    // A word at a time from the first whole one on.
    let ahead = (position.next_multiple_of(8) - position).min(bytes.len() as u64) as usize;
    let (head, rest) = bytes.split_at_mut(ahead);
    for (i, byte) in head.iter_mut().enumerate() {
        let at = position + i as u64;
        *byte = Random::at(seed, at / 8).to_le_bytes()[(at % 8) as usize];
    }
    let first = (position + ahead as u64) / 8;
    for (i, eight) in rest.chunks_mut(8).enumerate() {
        let word = Random::at(seed, first + i as u64).to_le_bytes();
        eight.copy_from_slice(&word[..eight.len()]);
    }
}

/// Every aligned 16-bit word lies in 7ff1..7fff or fff1..ffff: a NaN as bf16 and f16, and as the
/// upper half of f32 and f64. The choice among them is pseudo-random, so that a stray NaN written
/// by a candidate does not pass for the guard.
fn nan_bytes(seed: u64, position: u64, bytes: &mut [u8]) {
    let mut word = Random::at(seed, position / 8);
    for (i, byte) in bytes.iter_mut().enumerate() {
        let at = position + i as u64;
        if at.is_multiple_of(8) {
            word = Random::at(seed, at / 8);
        }
        let lane = (word >> ((at % 8) / 2 * 16)) as u16;
        *byte =
            if at.is_multiple_of(2) { 0xf1 + (lane % 15) as u8 } else { 0x7f | ((lane >> 8) as u8 & 0x80) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_keep_apart_and_aligned() {
        let specs = [
            BufferSpec { bytes: 4, align: 4 },
            BufferSpec { bytes: 1 << 20, align: 4096 },
            BufferSpec { bytes: 0, align: 64 },
        ];
        let arena = Arena::create("test", &specs).unwrap();
        let mut end = 0;
        for (span, spec) in arena.spans().iter().zip(specs) {
            assert!(span.offset >= end + GUARD);
            // Exact below a cache line: what is promised must be enough for a kernel.
            assert_eq!(span.offset % spec.align.max(64), spec.align % 64);
            end = span.offset + span.bytes;
        }
        assert!(arena.size() >= end + GUARD);
        assert!(arena.guards_intact().unwrap());
    }

    #[test]
    fn guards_are_nan_in_every_float_type() {
        let mut bytes = [0; 4096];
        nan_bytes(7, 0, &mut bytes);
        for quad in bytes.as_chunks::<8>().0 {
            assert!(f64::from_le_bytes(*quad).is_nan());
        }
        for quad in bytes.as_chunks::<4>().0 {
            assert!(f32::from_le_bytes(*quad).is_nan());
        }
        for pair in bytes.as_chunks::<2>().0 {
            let bits = u16::from_le_bytes(*pair);
            assert!(bits & 0x7f80 == 0x7f80 && bits & 0x7f != 0, "bf16");
            assert!(bits & 0x7c00 == 0x7c00 && bits & 0x3ff != 0, "f16");
        }
        assert!(bytes[..2] != bytes[2..4] || bytes[2..4] != bytes[4..6]);
    }

    #[test]
    fn a_single_broken_guard_byte_is_found() {
        let arena = Arena::create("test", &[BufferSpec { bytes: 100, align: 4 }]).unwrap();
        let end = arena.spans()[0].offset + 100;
        let mut byte = [0];
        arena.file.read_exact_at(&mut byte, end).unwrap();
        arena.file.write_all_at(&[byte[0] ^ 1], end).unwrap();
        assert!(!arena.guards_intact().unwrap());
        arena.restore_guards().unwrap();
        assert!(arena.guards_intact().unwrap());
    }

    #[test]
    fn random_bytes_depend_on_their_place_alone() {
        let mut whole = [0; 64];
        random_bytes(3, 8, &mut whole);
        for (start, end) in [(0, 64), (3, 5), (5, 29), (8, 17), (63, 64)] {
            let mut part = vec![0; end - start];
            random_bytes(3, 8 + start as u64, &mut part);
            assert_eq!(part, whole[start..end]);
        }
    }

    #[test]
    fn packed_buffers_keep_apart_without_guards() {
        let specs = [BufferSpec { bytes: 100, align: 4 }; 3];
        let arena = Arena::packed("test", &specs).unwrap();
        let offsets: Vec<u64> = arena.spans().iter().map(|span| span.offset).collect();
        // Aligned to 4 bytes and no better, as for every buffer that asks for less than a step.
        assert_eq!(offsets, [4, 132, 260]);
        assert_eq!(arena.size(), 4096);
        arena.write(2, 0, &[7; 100]).unwrap();
        let mut back = [0; 100];
        arena.read(1, 0, &mut back).unwrap();
        assert_eq!(back, [0; 100]);
    }

    #[test]
    fn access_stays_inside_the_buffer() {
        let mut arena = Arena::create("test", &[BufferSpec { bytes: 8, align: 8 }]).unwrap();
        arena.write(0, 4, &[1, 2, 3, 4]).unwrap();
        assert!(matches!(arena.write(0, 5, &[0; 4]), Err(MemoryError::OutOfBuffer { .. })));
        assert!(matches!(arena.read(0, u64::MAX, &mut [0; 4]), Err(MemoryError::OutOfBuffer { .. })));
        assert!(matches!(arena.write(1, 0, &[]), Err(MemoryError::NoBuffer(1))));
        let mut back = [0; 8];
        arena.read(0, 0, &mut back).unwrap();
        assert_eq!(back, [0, 0, 0, 0, 1, 2, 3, 4]);
        arena.poison(0, Pattern::Random(3)).unwrap();
        arena.seal_read_only().unwrap();
        assert!(matches!(arena.write(0, 0, &[1]), Err(MemoryError::Sealed)));
        assert!(arena.file.write_all_at(&[1], 0).is_err(), "the kernel refuses too");
    }

    #[test]
    fn the_read_only_descriptor_refuses_writes() {
        let arena = Arena::create("test", &[BufferSpec { bytes: 8, align: 8 }]).unwrap();
        let file = File::from(arena.read_only().unwrap());
        assert!(file.write_all_at(&[1], arena.spans()[0].offset).is_err());
    }
}
