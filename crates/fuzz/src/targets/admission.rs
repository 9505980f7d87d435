//! ELF admission: real artefacts with a few bytes changed. Whatever is admitted must, read once more and
//! otherwise, import nothing that is not on the list, need no library and run nothing at load.

use std::sync::OnceLock;

use anyhow::{Context, Result};
use autokernel_core::kernel_file::KernelFile;
use autokernel_worker::admission::admit;
use autokernel_worker::fuzz::importable;
use autokernel_worker::toolchain::{BuildLimits, Toolchain};
use object::LittleEndian as LE;
use object::elf;
use object::pod;
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _, Sym as _};

use super::{Target, mutated, rule};
use crate::mutate::{EDGES, Random};

/// The admission of artefacts.
pub(super) const ADMISSION: Target = Target { name: "admission", seeds, make, check };

const WORDS: &[&str] = &["system", "dlopen", "printf", "expf", "memcpy", "GOMP_parallel", "k\0"];

/// Honest ones with and without imports, and one that imports what it may not.
const SOURCES: [&str; 3] = [
    "extern \"C\" void k(const float* in, float* out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = in[i] * 2; }",
    "static float (*const table[])(float) = {std::exp, std::tanh};\nextern \"C\" void k(const float* in, float* out, int64_t n) {\n#pragma omp parallel for\nfor (int64_t i = 0; i < n; i++) out[i] = table[i & 1](in[i]); }",
    "extern \"C\" int system(const char*);\nextern \"C\" void k(const float* in, float* out, int64_t n) { std::memcpy(out, in, size_t(n)); out[0] = float(system(\"true\")); }",
];

fn seeds() -> Result<Vec<Vec<u8>>> {
    static BUILT: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    if let Some(built) = BUILT.get() {
        return Ok(built.clone());
    }
    let toolchain = Toolchain::detect()?;
    let mut built = vec![];
    for source in SOURCES {
        let text = format!(
            "/*@ autokernel 1\nlanguage = \"c++\"\n[[launch]]\nentry = \"k\"\nargs = [\"in0\", \"out0\", \"in0.numel\"]\n@*/\n#include <cmath>\n#include <cstdint>\n#include <cstring>\n{source}\n"
        );
        let file = KernelFile::parse(&text)?;
        built.push(toolchain.build(&file, &file.default_params(), &BuildLimits::default())?.bytes);
    }
    admit(&built[0], &["k"]).context("the honest artefact is refused")?;
    Ok(BUILT.get_or_init(|| built).clone())
}

fn make(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    if random.below(4) == 0 {
        return mutated(seeds, WORDS, random);
    }
    let mut bytes = random.pick(seeds).clone();
    let places = places(&bytes);
    for _ in 0..=random.below(3) {
        // Mostly where headers, tables and names stand, in whole fields.
        let (start, length) = *random.pick(&places);
        let width = 1 << random.below(4);
        let at = start + random.below(length / width) * width;
        let Some(field) = bytes.get_mut(at..at + width) else { continue };
        match random.below(4) {
            0 => field.copy_from_slice(&random.pick(&EDGES).to_le_bytes()[..width]),
            1 => field[0] ^= 1 << random.below(8),
            2 => field[0] = field[0].wrapping_add(8),
            _ => field.copy_from_slice(&random.number().to_le_bytes()[..width]),
        }
    }
    bytes
}

/// File header, program headers, section headers, and the tables that the dynamic section names.
fn places(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut places = vec![(0, 64)];
    let Some(elf) = Elf::new(bytes) else { return places };
    places.push((elf.header.e_phoff(LE) as usize, elf.segments.len() * 56));
    places.push((elf.header.e_shoff(LE) as usize, usize::from(elf.header.e_shnum(LE)) * 64));
    for segment in elf.segments.iter().filter(|s| s.p_type(LE) == elf::PT_DYNAMIC) {
        places.push((segment.p_offset(LE) as usize, segment.p_filesz(LE) as usize));
    }
    for (address, size) in [
        (elf.entry(elf::DT_SYMTAB), Some(24 * 12)),
        (elf.entry(elf::DT_STRTAB), elf.entry(elf::DT_STRSZ)),
        (elf.entry(elf::DT_RELA), elf.entry(elf::DT_RELASZ)),
        (elf.entry(elf::DT_JMPREL), elf.entry(elf::DT_PLTRELSZ)),
    ] {
        if let (Some(address), Some(size)) = (address, size) {
            // The first segment of a shared object begins at 0 in the file and in memory.
            places.push((address as usize, size as usize));
        }
    }
    places.retain(|(start, length)| *length >= 8 && start + length <= bytes.len());
    places
}

fn check(input: &[u8]) -> Result<bool, String> {
    if admit(input, &["k"]).is_err() {
        return Ok(false);
    }
    // Aligned, as the loader's pages are.
    let mut words = vec![0_u64; input.len().div_ceil(8)];
    pod::bytes_of_slice_mut(&mut words)[..input.len()].copy_from_slice(input);
    let bytes = &pod::bytes_of_slice(&words)[..input.len()];
    let elf = Elf::new(bytes).ok_or("broken rule: what is admitted can be read")?;
    for tag in [
        elf::DT_NEEDED,
        elf::DT_INIT,
        elf::DT_FINI,
        elf::DT_INIT_ARRAY,
        elf::DT_FINI_ARRAY,
        elf::DT_RPATH,
        elf::DT_RUNPATH,
    ] {
        rule(elf.entry(tag).is_none(), "nothing is needed and nothing runs at load")?;
    }
    for (table, size) in [(elf::DT_RELA, elf::DT_RELASZ), (elf::DT_JMPREL, elf::DT_PLTRELSZ)] {
        let (Some(table), Some(size)) = (elf.entry(table), elf.entry(size)) else { continue };
        for at in (0..size / 24).map(|n| table + n * 24) {
            let Some(relocation) = elf.read::<elf::Rela64<LE>>(at) else { continue };
            let index = u64::from(relocation.r_sym(LE, false));
            if index == 0 {
                continue;
            }
            let symbol = elf.entry(elf::DT_SYMTAB).and_then(|t| elf.read::<elf::Sym64<LE>>(t + index * 24));
            let symbol = symbol.ok_or("broken rule: a relocation's symbol can be read")?;
            if symbol.st_shndx(LE) == elf::SHN_UNDEF {
                let name = elf.name(u64::from(symbol.st_name(LE)));
                rule(importable(&name), &format!("`{name}` is imported and not on the list"))?;
            }
        }
    }
    Ok(true)
}

/// A second, simple reader, which sees memory as the loader makes it: of segments that overlap, the
/// last one counts.
struct Elf<'a> {
    bytes: &'a [u8],
    header: &'a elf::FileHeader64<LE>,
    segments: &'a [elf::ProgramHeader64<LE>],
}

impl<'a> Elf<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let header = elf::FileHeader64::<LE>::parse(bytes).ok()?;
        Some(Self { bytes, header, segments: header.program_headers(LE, bytes).ok()? })
    }

    fn entry(&self, tag: elf::DynamicTag) -> Option<u64> {
        let segment = self.segments.iter().rfind(|segment| segment.p_type(LE) == elf::PT_DYNAMIC)?;
        let entries = (0..segment.p_memsz(LE) / 16)
            .map_while(|n| self.read::<elf::Dyn64<LE>>(segment.p_vaddr(LE).checked_add(n * 16)?));
        let mut entries = entries.take_while(|entry| entry.d_tag(LE) != elf::DT_NULL);
        entries.find(|entry| entry.d_tag(LE) == tag).map(|entry| entry.d_val(LE))
    }

    fn read<T: pod::Pod>(&self, address: u64) -> Option<&'a T> {
        let inside = |segment: &&elf::ProgramHeader64<LE>| {
            let start = segment.p_vaddr(LE);
            segment.p_type(LE) == elf::PT_LOAD && start <= address && address - start < segment.p_filesz(LE)
        };
        let segment = self.segments.iter().rfind(inside)?;
        let at = segment.p_offset(LE).checked_add(address - segment.p_vaddr(LE))?;
        Some(pod::from_bytes(self.bytes.get(usize::try_from(at).ok()?..)?).ok()?.0)
    }

    fn name(&self, offset: u64) -> String {
        let start = self.entry(elf::DT_STRTAB).unwrap_or(0) + offset;
        let bytes: Vec<u8> = (start..start + 4096)
            .map_while(|at| self.read::<u8>(at).copied())
            .take_while(|b| *b != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
