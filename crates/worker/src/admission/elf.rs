//! Reads an artefact the way the dynamic loader does, and checks it rule by rule.

use std::collections::HashSet;

use object::LittleEndian as LE;
use object::elf;
use object::pod;
use object::read::elf::{
    Dyn as _, FileHeader as _, ProgramHeader as _, Rela as _, SectionHeader as _, Sym as _,
};

use super::code::{self, Flaw, Stretch};
use super::{AdmissionError, imports};

type Header = elf::FileHeader64<LE>;
type Segment = elf::ProgramHeader64<LE>;
type Symbol = elf::Sym64<LE>;
type Relocation = elf::Rela64<LE>;

/// The least page size; a larger one only makes the read-only part end later.
const PAGE: u64 = 4096;
/// Flags of `DT_FLAGS` that mean symbolic binding and binding at load.
const HARMLESS_FLAGS: u64 = 0x2 | 0x8;
/// The flag of `DT_FLAGS` for relocations in code.
const DF_TEXTREL: u64 = 0x4;
/// The flag of `DT_FLAGS_1` that means binding at load.
const DF_1_NOW: u64 = 0x1;

#[cfg(target_arch = "x86_64")]
const MACHINE: elf::Machine = elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: elf::Machine = elf::EM_AARCH64;

/// Relocation types: 64-bit address, GOT entry, PLT slot, own address.
#[cfg(target_arch = "x86_64")]
const RELOCATIONS: [u32; 4] = [1, 6, 7, 8];
#[cfg(target_arch = "aarch64")]
const RELOCATIONS: [u32; 4] = [257, 1025, 1026, 1027];
/// A relocation that calls a resolver.
#[cfg(target_arch = "x86_64")]
const IRELATIVE: u32 = 37;
#[cfg(target_arch = "aarch64")]
const IRELATIVE: u32 = 1032;

/// An address range.
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    end: u64,
}

impl Range {
    fn new(start: u64, bytes: u64) -> Result<Self, AdmissionError> {
        let end =
            start.checked_add(bytes).ok_or(AdmissionError::Malformed("an address range wraps around"))?;
        Ok(Self { start, end })
    }

    fn contains(self, inner: Self) -> bool {
        self.start <= inner.start && inner.end <= self.end
    }

    fn meets(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// The parts of the dynamic section that say where things are.
#[derive(Default)]
struct Tables {
    symbols: u64,
    strings: u64,
    string_bytes: u64,
    relocations: (u64, u64),
    slots: (u64, u64),
}

/// An artefact, opened.
pub(super) struct Artefact<'a> {
    bytes: &'a [u8],
    header: &'a Header,
    segments: &'a [Segment],
}

impl<'a> Artefact<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, AdmissionError> {
        let header = Header::parse(bytes).map_err(|_| AdmissionError::Malformed("no 64-bit ELF header"))?;
        if header.is_big_endian() || header.e_type(LE) != elf::ET_DYN {
            return Err(AdmissionError::NotSharedObject);
        }
        if header.e_machine(LE) != MACHINE {
            return Err(AdmissionError::OtherMachine);
        }
        let segments =
            header.program_headers(LE, bytes).map_err(|_| AdmissionError::Malformed("program headers"))?;
        Ok(Self { bytes, header, segments })
    }

    pub(super) fn check(&self, entries: &[&str]) -> Result<(), AdmissionError> {
        self.check_layout()?;
        let tables = self.dynamic()?;
        let symbols = self.symbols(&tables)?;
        let strings = self.at(tables.strings, tables.string_bytes)?;
        // Before the segments, because a name explains more than a segment does.
        self.check_symbols(symbols, strings, entries)?;
        let read_only = self.check_segments()?;
        let mut entries = self.check_relocations(&tables, symbols.len(), read_only)?;
        let function = |s: &&Symbol| s.st_type() == elf::STT_FUNC && s.st_shndx(LE) != elf::SHN_UNDEF;
        entries.extend(symbols.iter().filter(function).map(|symbol| symbol.st_value(LE)));
        self.check_code(&entries, read_only)
    }

    /// Segments that every loader puts in the same places: in order, none on a page of another, each at
    /// the place in the file that its address asks for. Otherwise memory is not what is read here.
    fn check_layout(&self) -> Result<(), AdmissionError> {
        let mut free = 0;
        for segment in self.loads() {
            let range = Range::new(segment.p_vaddr(LE), segment.p_memsz(LE))?;
            let congruent = segment.p_offset(LE) % PAGE == range.start % PAGE;
            if range.start - range.start % PAGE < free
                || !congruent
                || segment.p_filesz(LE) > segment.p_memsz(LE)
            {
                return Err(AdmissionError::Malformed("segments lie over each other or out of place"));
            }
            free = range
                .end
                .checked_next_multiple_of(PAGE)
                .ok_or(AdmissionError::Malformed("an address range wraps around"))?;
        }
        Ok(())
    }

    /// The dynamic section's entries: what the loader would act on.
    fn dynamic(&self) -> Result<Tables, AdmissionError> {
        let mut dynamic = self.segments.iter().filter(|segment| segment.p_type(LE) == elf::PT_DYNAMIC);
        let found = dynamic.next().ok_or(AdmissionError::Malformed("no dynamic section"))?;
        if dynamic.next().is_some() {
            return Err(AdmissionError::Malformed("two dynamic sections"));
        }
        // By its address, as the loader finds it; its place in the file is said twice and may differ.
        let entries: &[elf::Dyn64<LE>] =
            pod::slice_from_all_bytes(self.at(found.p_vaddr(LE), found.p_memsz(LE))?)
                .map_err(|()| AdmissionError::Malformed("the dynamic section"))?;
        let mut tables = Tables::default();
        let mut seen = HashSet::new();
        for entry in entries {
            let (tag, value) = (entry.d_tag(LE), entry.d_val(LE));
            // Of two entries of a kind loaders take one or the other.
            if tag != elf::DT_NULL && !seen.insert(tag.0) {
                return Err(AdmissionError::Malformed("the dynamic section says something twice"));
            }
            match tag {
                elf::DT_NULL => break,
                elf::DT_SYMTAB => tables.symbols = value,
                elf::DT_STRTAB => tables.strings = value,
                elf::DT_STRSZ => tables.string_bytes = value,
                elf::DT_RELA => tables.relocations.0 = value,
                elf::DT_RELASZ => tables.relocations.1 = value,
                elf::DT_JMPREL => tables.slots.0 = value,
                elf::DT_PLTRELSZ => tables.slots.1 = value,
                other => harmless(other, value)?,
            }
        }
        Ok(tables)
    }

    fn symbols(&self, tables: &Tables) -> Result<&'a [Symbol], AdmissionError> {
        // The dynamic section does not say how many symbols there are; the section header does, if it
        // speaks of the same table.
        let sections = self
            .header
            .section_headers(LE, self.bytes)
            .map_err(|_| AdmissionError::Malformed("section headers"))?;
        let section = sections
            .iter()
            .find(|section| section.sh_type(LE) == elf::SHT_DYNSYM)
            .filter(|section| section.sh_addr(LE) == tables.symbols)
            .ok_or(AdmissionError::Malformed("no table of dynamic symbols"))?;
        let bytes = self.at(tables.symbols, section.sh_size(LE))?;
        pod::slice_from_all_bytes(bytes)
            .map_err(|()| AdmissionError::Malformed("the table of dynamic symbols"))
    }

    fn check_symbols(
        &self,
        symbols: &[Symbol],
        strings: &[u8],
        entries: &[&str],
    ) -> Result<(), AdmissionError> {
        let mut missing: Vec<&str> = entries.to_vec();
        for symbol in symbols.iter().skip(1) {
            let name = text(strings, symbol.st_name(LE))?;
            match symbol.st_type() {
                elf::STT_GNU_IFUNC => return Err(AdmissionError::Ifunc(name)),
                elf::STT_TLS => return Err(AdmissionError::ThreadLocal),
                elf::STT_NOTYPE | elf::STT_OBJECT | elf::STT_FUNC | elf::STT_SECTION | elf::STT_FILE => {}
                other => return Err(AdmissionError::Symbol(format!("type {}", other.0))),
            }
            if !matches!(symbol.st_bind(), elf::STB_LOCAL | elf::STB_GLOBAL | elf::STB_WEAK) {
                return Err(AdmissionError::Symbol(format!("binding {} of `{name}`", symbol.st_bind().0)));
            }
            if symbol.st_shndx(LE) == elf::SHN_UNDEF {
                if !imports::allowed(&name) {
                    return Err(AdmissionError::Import(name));
                }
            } else if symbol.st_type() == elf::STT_FUNC && self.is_code(symbol.st_value(LE)) {
                missing.retain(|entry| *entry != name);
            }
        }
        missing.first().map_or(Ok(()), |entry| Err(AdmissionError::NoEntry((*entry).to_owned())))
    }

    /// Program headers; gives the range that is made read-only after relocation.
    fn check_segments(&self) -> Result<Range, AdmissionError> {
        let mut read_only = Range { start: 0, end: 0 };
        let mut stack = false;
        for segment in self.segments {
            let flags = segment.p_flags(LE);
            match segment.p_type(LE) {
                elf::PT_LOAD
                | elf::PT_DYNAMIC
                | elf::PT_NOTE
                | elf::PT_GNU_EH_FRAME
                | elf::PT_GNU_PROPERTY
                | elf::PT_PHDR
                | elf::PT_NULL => {}
                elf::PT_TLS => return Err(AdmissionError::ThreadLocal),
                elf::PT_GNU_STACK if flags.contains(elf::PF_X) => {
                    return Err(AdmissionError::ExecutableStack);
                }
                elf::PT_GNU_STACK => stack = true,
                elf::PT_GNU_RELRO => read_only = Range::new(segment.p_vaddr(LE), segment.p_memsz(LE))?,
                other => return Err(AdmissionError::Segment(other.0)),
            }
        }
        if !stack {
            // Without that header the loader makes the stack executable.
            return Err(AdmissionError::ExecutableStack);
        }
        // The loader protects whole pages only.
        read_only.end -= read_only.end % PAGE;
        for segment in self.loads() {
            let flags = segment.p_flags(LE);
            if flags.contains(elf::PF_W) {
                if flags.contains(elf::PF_X) {
                    return Err(AdmissionError::WritableCode);
                }
                let range = Range::new(segment.p_vaddr(LE), segment.p_memsz(LE))?;
                if range.start < range.end && !read_only.contains(range) {
                    return Err(AdmissionError::WritableData);
                }
            }
        }
        Ok(read_only)
    }

    /// Relocations; gives the addresses in code that data will point to.
    fn check_relocations(
        &self,
        tables: &Tables,
        symbols: usize,
        read_only: Range,
    ) -> Result<Vec<u64>, AdmissionError> {
        let dynamic = self.segments.iter().find(|segment| segment.p_type(LE) == elf::PT_DYNAMIC);
        let dynamic =
            dynamic.map(|segment| Range::new(segment.p_vaddr(LE), segment.p_memsz(LE))).transpose()?;
        let mut pointed = vec![];
        for (address, bytes) in [tables.relocations, tables.slots] {
            let list: &[Relocation] = pod::slice_from_all_bytes(self.at(address, bytes)?)
                .map_err(|()| AdmissionError::Malformed("relocations"))?;
            for relocation in list {
                let kind = relocation.r_type(LE, false).0;
                if kind == IRELATIVE {
                    return Err(AdmissionError::Ifunc("a local function".to_owned()));
                }
                if !RELOCATIONS.contains(&kind) {
                    return Err(AdmissionError::Relocation(kind));
                }
                if relocation.r_sym(LE, false) as usize >= symbols.max(1) {
                    return Err(AdmissionError::Malformed("a relocation names no symbol"));
                }
                let target = Range::new(relocation.r_offset(LE), 8)?;
                // The loader is reading the dynamic section while it relocates.
                if !read_only.contains(target) || dynamic.is_some_and(|dynamic| dynamic.meets(target)) {
                    return Err(AdmissionError::RelocationTarget);
                }
                // Without a symbol the addend is the address.
                let to = relocation.r_addend(LE).cast_unsigned();
                if relocation.r_sym(LE, false) == 0 && self.is_code(to) {
                    pointed.push(to);
                }
            }
        }
        Ok(pointed)
    }

    /// Every instruction, and that there is nothing else where code lies.
    fn check_code(&self, entries: &[u64], read_only: Range) -> Result<(), AdmissionError> {
        let mut stretches = self.code_sections()?;
        stretches.sort_by_key(|stretch| stretch.address);
        if cfg!(target_arch = "x86_64") {
            self.check_gaps(&stretches)?;
        }
        let slot = |address| Range::new(address, 8).is_ok_and(|slot| read_only.contains(slot));
        code::check(&stretches, entries, &slot).map_err(|flaw| match flaw {
            Flaw::Unreadable(at) => AdmissionError::Unreadable(at),
            Flaw::Forbidden(at, kind) => AdmissionError::Instruction(at, kind),
            Flaw::Stray(at) => AdmissionError::Branch(at),
        })
    }

    /// The sections that hold code. Their headers are only believed as to where instructions start: what
    /// they leave out is looked at in [`Artefact::check_gaps`].
    fn code_sections(&self) -> Result<Vec<Stretch<'a>>, AdmissionError> {
        let sections = self
            .header
            .section_headers(LE, self.bytes)
            .map_err(|_| AdmissionError::Malformed("section headers"))?;
        let mut stretches = vec![];
        for section in sections {
            let (address, size) = (section.sh_addr(LE), section.sh_size(LE));
            if section.sh_flags(LE).contains(elf::SHF_EXECINSTR) && size > 0 {
                let bytes = self.at(address, size)?;
                stretches.push(Stretch { address, bytes });
            }
        }
        Ok(stretches)
    }

    /// Between sections executable memory holds padding only. The linker is told to keep code and data in
    /// segments of their own.
    fn check_gaps(&self, stretches: &[Stretch<'_>]) -> Result<(), AdmissionError> {
        const PADDING: [u8; 3] = [0x00, 0x90, 0xcc];
        for segment in self.loads().filter(|segment| segment.p_flags(LE).contains(elf::PF_X)) {
            let whole = Range::new(segment.p_vaddr(LE), segment.p_filesz(LE))?;
            let mut at = whole.start;
            let end = Stretch { address: whole.end, bytes: &[] };
            for stretch in
                stretches.iter().filter(|s| (whole.start..whole.end).contains(&s.address)).chain([&end])
            {
                let gap = stretch
                    .address
                    .checked_sub(at)
                    .ok_or(AdmissionError::Malformed("sections of code overlap"))?;
                if let Some(index) = self.at(at, gap)?.iter().position(|byte| !PADDING.contains(byte)) {
                    return Err(AdmissionError::Unreadable(at + index as u64));
                }
                at = stretch.address + stretch.bytes.len() as u64;
            }
        }
        Ok(())
    }

    fn loads(&self) -> impl Iterator<Item = &'a Segment> {
        self.segments.iter().filter(|segment| segment.p_type(LE) == elf::PT_LOAD)
    }

    fn is_code(&self, address: u64) -> bool {
        self.loads().any(|segment| {
            segment.p_flags(LE).contains(elf::PF_X)
                && Range::new(segment.p_vaddr(LE), segment.p_filesz(LE))
                    .is_ok_and(|range| range.start <= address && address < range.end)
        })
    }

    /// File bytes at an address.
    fn at(&self, address: u64, bytes: u64) -> Result<&'a [u8], AdmissionError> {
        if bytes == 0 {
            return Ok(&[]);
        }
        self.loads()
            .find_map(|segment| segment.data_range(LE, self.bytes, address, bytes).ok().flatten())
            .ok_or(AdmissionError::Malformed("a table lies outside the file"))
    }
}

/// Refuses every entry of the dynamic section that is not known to be harmless.
fn harmless(tag: elf::DynamicTag, value: u64) -> Result<(), AdmissionError> {
    let constructor = |what| Err(AdmissionError::Constructor(what));
    match tag {
        elf::DT_NEEDED => Err(AdmissionError::Needed),
        elf::DT_INIT => constructor("DT_INIT"),
        elf::DT_FINI => constructor("DT_FINI"),
        elf::DT_INIT_ARRAY | elf::DT_INIT_ARRAYSZ => constructor("DT_INIT_ARRAY"),
        elf::DT_FINI_ARRAY | elf::DT_FINI_ARRAYSZ => constructor("DT_FINI_ARRAY"),
        elf::DT_PREINIT_ARRAY | elf::DT_PREINIT_ARRAYSZ => constructor("DT_PREINIT_ARRAY"),
        elf::DT_TEXTREL => Err(AdmissionError::TextRelocation),
        elf::DT_FLAGS if value & DF_TEXTREL != 0 => Err(AdmissionError::TextRelocation),
        elf::DT_FLAGS if value & !HARMLESS_FLAGS == 0 => Ok(()),
        elf::DT_FLAGS_1 if value & !DF_1_NOW == 0 => Ok(()),
        elf::DT_HASH
        | elf::DT_GNU_HASH
        | elf::DT_SYMENT
        | elf::DT_RELAENT
        | elf::DT_RELACOUNT
        | elf::DT_PLTREL
        | elf::DT_PLTGOT
        | elf::DT_BIND_NOW
        | elf::DT_SYMBOLIC => Ok(()),
        elf::DT_RPATH => Err(AdmissionError::Dynamic("a search path (DT_RPATH)".to_owned())),
        elf::DT_RUNPATH => Err(AdmissionError::Dynamic("a search path (DT_RUNPATH)".to_owned())),
        elf::DT_AUDIT | elf::DT_DEPAUDIT => {
            Err(AdmissionError::Dynamic("an audit library (DT_AUDIT)".to_owned()))
        }
        elf::DT_FILTER | elf::DT_AUXILIARY => Err(AdmissionError::Dynamic("a filter library".to_owned())),
        other => Err(AdmissionError::Dynamic(format!("entry {:#x} = {value:#x}", other.0))),
    }
}

/// A name of the string table; what is not UTF-8 is shown with replacement characters.
fn text(strings: &[u8], offset: u32) -> Result<String, AdmissionError> {
    let rest =
        strings.get(offset as usize..).ok_or(AdmissionError::Malformed("a name lies outside its table"))?;
    let end =
        rest.iter().position(|byte| *byte == 0).ok_or(AdmissionError::Malformed("a name does not end"))?;
    Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
}
