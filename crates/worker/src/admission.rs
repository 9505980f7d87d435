//! Which artefacts may be loaded: leaf code only, decided from the ELF file alone.
//!
//! A kernel computes; it starts nothing, keeps nothing and asks the system for nothing. So an
//! artefact may import from a fixed list only, and may not hold anything that runs when it is loaded
//! (constructors, IFUNC) or that lives between calls (writable or thread-local data). What is read
//! here is what the dynamic loader reads: program headers and the dynamic section. Then every instruction
//! is looked at: what asks the system, reads clocks or changes modes has no place in a kernel.

mod code;
mod elf;
mod imports;

pub use code::Forbidden;

/// Why an artefact is refused.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum AdmissionError {
    #[error("not a readable ELF file: {0}")]
    Malformed(&'static str),
    #[error("not a 64-bit little-endian shared object")]
    NotSharedObject,
    #[error("built for another machine than {}", std::env::consts::ARCH)]
    OtherMachine,
    #[error("`{0}` may not be imported (allowed: memcpy and its kin, libm, OpenMP loops)")]
    Import(String),
    #[error("the entry `{0}` is not exported as a function")]
    NoEntry(String),
    #[error("a library is needed (DT_NEEDED)")]
    Needed,
    #[error("something runs at load or unload ({0})")]
    Constructor(&'static str),
    #[error("the dynamic section asks for {0}")]
    Dynamic(String),
    #[error("there is writable data: a static or global variable that lives between calls")]
    WritableData,
    #[error("there is thread-local data")]
    ThreadLocal,
    #[error("`{0}` is chosen at load by a resolver (IFUNC)")]
    Ifunc(String),
    #[error("code would be changed at load (text relocations)")]
    TextRelocation,
    #[error("the stack would be executable")]
    ExecutableStack,
    #[error("a segment is writable and executable")]
    WritableCode,
    #[error("a program header of a kind ({0:#x}) that kernels do not have")]
    Segment(u32),
    #[error("a relocation of a kind ({0}) that kernels do not have")]
    Relocation(u32),
    #[error("a relocation outside the data that becomes read-only")]
    RelocationTarget,
    #[error("a symbol of a kind ({0}) that kernels do not have")]
    Symbol(String),
    #[error("an instruction (at {0:#x}) that {1}")]
    Instruction(u64, Forbidden),
    #[error("bytes that are no instruction (at {0:#x}) where code should be")]
    Unreadable(u64),
    #[error("a branch (at {0:#x}) that leads to no instruction of the kernel")]
    Branch(u64),
}

/// Checks an artefact whose plan calls `entries`.
pub fn admit(bytes: &[u8], entries: &[&str]) -> Result<(), AdmissionError> {
    // The parser looks at the bytes in place and wants them aligned.
    let mut words = vec![0_u64; bytes.len().div_ceil(8)];
    object::pod::bytes_of_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    elf::Artefact::read(&object::pod::bytes_of_slice(&words)[..bytes.len()])?.check(entries)
}

/// Whether a kernel may import this name.
pub fn importable(name: &str) -> bool {
    imports::allowed(name)
}
