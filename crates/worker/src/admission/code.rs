//! Looks at every instruction of an artefact.
//!
//! Compilers turn kernels into arithmetic, loads, stores and branches inside their own code. What asks the
//! system for something, reads clocks or the processor's description, changes how floating-point
//! operations work, or touches thread-local memory is refused where it stands in plain sight.
//!
//! The sweep is linear, from section to section, as compilers lay code out, and every direct branch must
//! lead to the start of an instruction of that sweep. An instruction hidden inside another one can still
//! be reached by a computed jump, whose target no reader of the file knows: compilers make such jumps for
//! `switch` and for pointers to functions, so they can't be refused. That is why this is the first wall
//! and the system-call filter the one that holds.

use std::fmt;

/// An instruction that no kernel needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forbidden {
    /// Asks the system: `syscall`, `int`, `svc` and their kin.
    SystemCall,
    /// Reads a clock or a performance counter.
    Clock,
    /// Reads what the processor is, or random numbers.
    Machine,
    /// Sets rounding, flushing or exceptions of floating-point operations, or restores saved state.
    Control,
    /// Reads or writes memory of the thread, or the register that points to it.
    ThreadLocal,
    /// Leaves for another mode, privilege or segment, or waits for hardware.
    Mode,
    /// Throws data out of caches, for everyone on the machine.
    Cache,
    /// Tries memory in a transaction.
    Transaction,
}

impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SystemCall => "asks the system for something",
            Self::Clock => "reads a clock or a counter",
            Self::Machine => "asks what the processor is, or for random numbers",
            Self::Control => "changes how floating-point operations work",
            Self::ThreadLocal => "touches thread-local memory",
            Self::Mode => "changes the processor's mode",
            Self::Cache => "empties caches",
            Self::Transaction => "tries memory in a transaction",
        })
    }
}

/// What is wrong with code, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// The bytes are no instruction.
    Unreadable(u64),
    /// An instruction that no kernel needs.
    Forbidden(u64, Forbidden),
    /// A branch that does not lead to an instruction of the artefact.
    Stray(u64),
}

/// One stretch of code: its first address and its bytes.
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a> {
    pub(super) address: u64,
    pub(super) bytes: &'a [u8],
}

/// Checks all code of an artefact for this machine. `entries` are addresses of functions, which have to
/// be starts of instructions too; `pointers` says whether an address holds a pointer that the loader
/// fills in and then protects.
#[cfg(target_arch = "x86_64")]
pub(super) fn check(
    code: &[Stretch<'_>],
    entries: &[u64],
    pointers: &dyn Fn(u64) -> bool,
) -> Result<(), Flaw> {
    x86::check(code, entries, pointers)
}

/// Checks all code of an artefact for this machine.
#[cfg(target_arch = "aarch64")]
pub(super) fn check(
    code: &[Stretch<'_>],
    _entries: &[u64],
    _pointers: &dyn Fn(u64) -> bool,
) -> Result<(), Flaw> {
    code.iter().try_for_each(|stretch| arm::check(*stretch))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

    use super::{Flaw, Forbidden, Stretch};
    use Register as R;

    /// Bits of the addresses that instructions start at.
    struct Starts<'a> {
        code: &'a [Stretch<'a>],
        bits: Vec<Vec<u64>>,
    }

    impl<'a> Starts<'a> {
        fn new(code: &'a [Stretch<'a>]) -> Self {
            Self { code, bits: code.iter().map(|s| vec![0; s.bytes.len().div_ceil(64)]).collect() }
        }

        fn mark(&mut self, stretch: usize, offset: usize) {
            self.bits[stretch][offset / 64] |= 1 << (offset % 64);
        }

        fn has(&self, address: u64) -> bool {
            self.code.iter().zip(&self.bits).any(|(stretch, bits)| {
                address
                    .checked_sub(stretch.address)
                    .filter(|offset| *offset < stretch.bytes.len() as u64)
                    .is_some_and(|offset| bits[offset as usize / 64] >> (offset % 64) & 1 == 1)
            })
        }
    }

    pub(super) fn check(
        code: &[Stretch<'_>],
        entries: &[u64],
        pointers: &dyn Fn(u64) -> bool,
    ) -> Result<(), Flaw> {
        let mut starts = Starts::new(code);
        // Where from and where to; an entry comes from outside.
        let mut branches: Vec<(u64, u64)> = entries.iter().map(|entry| (*entry, *entry)).collect();
        for (index, stretch) in code.iter().enumerate() {
            let mut decoder = Decoder::with_ip(64, stretch.bytes, stretch.address, DecoderOptions::NONE);
            let mut instruction = Instruction::default();
            while decoder.can_decode() {
                let offset = decoder.position();
                decoder.decode_out(&mut instruction);
                let at = instruction.ip();
                if instruction.is_invalid() {
                    return Err(Flaw::Unreadable(at));
                }
                if let Some(kind) = forbidden(&instruction) {
                    return Err(Flaw::Forbidden(at, kind));
                }
                starts.mark(index, offset);
                match target(&instruction) {
                    Target::Next => {}
                    Target::Direct(to) => branches.push((at, to)),
                    // Through a pointer of its own, such as an import: one that the loader fills in.
                    Target::Slot(slot) if pointers(slot) => {}
                    Target::Slot(_) => return Err(Flaw::Stray(at)),
                }
            }
        }
        branches.iter().find(|(_, to)| !starts.has(*to)).map_or(Ok(()), |(at, _)| Err(Flaw::Stray(*at)))
    }

    enum Target {
        /// The next instruction, or what a register or a table says.
        Next,
        Direct(u64),
        Slot(u64),
    }

    fn target(instruction: &Instruction) -> Target {
        match instruction.op0_kind() {
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                Target::Direct(instruction.near_branch_target())
            }
            OpKind::Memory
                if matches!(instruction.mnemonic(), Mnemonic::Call | Mnemonic::Jmp)
                    && instruction.is_ip_rel_memory_operand() =>
            {
                Target::Slot(instruction.ip_rel_memory_address())
            }
            _ => Target::Next,
        }
    }

    fn forbidden(instruction: &Instruction) -> Option<Forbidden> {
        if touches_segment(instruction) {
            return Some(Forbidden::ThreadLocal);
        }
        by_name(instruction.mnemonic())
    }

    /// An operand in the thread's own segment, or a segment register as operand.
    fn touches_segment(instruction: &Instruction) -> bool {
        let thread = |register| matches!(register, R::FS | R::GS);
        let segment = |register| matches!(register, R::ES | R::CS | R::SS | R::DS | R::FS | R::GS);
        let memory = (0..instruction.op_count()).any(|i| {
            matches!(
                instruction.op_kind(i),
                OpKind::Memory
                    | OpKind::MemorySegSI
                    | OpKind::MemorySegESI
                    | OpKind::MemorySegRSI
                    | OpKind::MemorySegDI
                    | OpKind::MemorySegEDI
                    | OpKind::MemorySegRDI
            )
        });
        // `nopw %cs:…` is how compilers pad; other segments mean nothing in this mode.
        (memory && thread(instruction.memory_segment()) && instruction.mnemonic() != Mnemonic::Nop)
            || (0..instruction.op_count())
                .any(|i| instruction.op_kind(i) == OpKind::Register && segment(instruction.op_register(i)))
    }

    use Mnemonic as M;

    /// Instructions by what is wrong with them. `fldcw` is not among them: compilers emit it to round
    /// `long double`; the word that it sets is compared after the calls instead.
    const NAMES: [(Forbidden, &[Mnemonic]); 8] = [
        (
            Forbidden::SystemCall,
            &[
                M::Syscall,
                M::Sysenter,
                M::Sysexit,
                M::Sysret,
                M::Sysexitq,
                M::Sysretq,
                M::Int,
                M::Int1,
                M::Into,
                M::Vmcall,
                M::Vmmcall,
                M::Vmgexit,
                M::Vmfunc,
                M::Tdcall,
                M::Seamcall,
                M::Enclu,
                M::Enclv,
                M::Encls,
            ],
        ),
        (Forbidden::Clock, &[M::Rdtsc, M::Rdtscp, M::Rdpmc, M::Rdpru]),
        (
            Forbidden::Machine,
            &[
                M::Cpuid,
                M::Xgetbv,
                M::Rdpid,
                M::Rdrand,
                M::Rdseed,
                M::Sgdt,
                M::Sidt,
                M::Sldt,
                M::Smsw,
                M::Str,
                M::Rdpkru,
                M::Rdsspd,
                M::Rdsspq,
            ],
        ),
        (
            Forbidden::Control,
            &[
                M::Ldmxcsr,
                M::Vldmxcsr,
                M::Fldenv,
                M::Frstor,
                M::Fxrstor,
                M::Fxrstor64,
                M::Xrstor,
                M::Xrstor64,
                M::Xrstors,
                M::Xrstors64,
                M::Xsetbv,
                M::Wrpkru,
                M::Fxsave,
                M::Fxsave64,
                M::Xsave,
                M::Xsave64,
                M::Xsavec,
                M::Xsavec64,
                M::Xsaveopt,
                M::Xsaveopt64,
                M::Xsaves,
                M::Xsaves64,
            ],
        ),
        (
            Forbidden::ThreadLocal,
            &[
                M::Rdfsbase,
                M::Rdgsbase,
                M::Wrfsbase,
                M::Wrgsbase,
                M::Swapgs,
                M::Lfs,
                M::Lgs,
                M::Lss,
                M::Lds,
                M::Les,
            ],
        ),
        (
            Forbidden::Mode,
            &[
                M::Iret,
                M::Iretd,
                M::Iretq,
                M::Retf,
                M::Monitor,
                M::Mwait,
                M::Monitorx,
                M::Mwaitx,
                M::Umonitor,
                M::Umwait,
                M::Tpause,
                M::Hlt,
                M::Cli,
                M::Sti,
                M::In,
                M::Out,
                M::Insb,
                M::Insw,
                M::Insd,
                M::Outsb,
                M::Outsw,
                M::Outsd,
                M::Uiret,
                M::Senduipi,
                M::Clui,
                M::Stui,
                M::Testui,
                M::Popf,
                M::Popfd,
                M::Popfq,
                M::Lar,
                M::Lsl,
                M::Verr,
                M::Verw,
                M::Incsspd,
                M::Incsspq,
                M::Rstorssp,
                M::Wrssd,
                M::Wrssq,
            ],
        ),
        (
            Forbidden::Cache,
            &[
                M::Clflush,
                M::Clflushopt,
                M::Clwb,
                M::Cldemote,
                M::Invd,
                M::Wbinvd,
                M::Wbnoinvd,
                M::Clzero,
                M::Invlpg,
            ],
        ),
        (Forbidden::Transaction, &[M::Xbegin, M::Xend, M::Xabort, M::Xtest]),
    ];

    fn by_name(mnemonic: Mnemonic) -> Option<Forbidden> {
        NAMES.iter().find(|(_, names)| names.contains(&mnemonic)).map(|(kind, _)| *kind)
    }
}

/// Instructions are words here, so that none can hide in another.
#[cfg(any(target_arch = "aarch64", test))]
mod arm {
    use super::{Flaw, Forbidden, Stretch};

    /// Mask, value, meaning. `mrs` and `msr` name their register in the word.
    const FORBIDDEN: [(u32, u32, Forbidden); 9] = [
        (0xffe0_001f, 0xd400_0001, Forbidden::SystemCall),
        (0xffe0_001f, 0xd400_0002, Forbidden::SystemCall),
        (0xffe0_001f, 0xd400_0003, Forbidden::SystemCall),
        // mrs of tpidr_el0 and tpidrro_el0, msr of tpidr_el0.
        (0xffff_ff80, 0xd53b_d000, Forbidden::ThreadLocal),
        (0xffff_ff80, 0xd51b_d000, Forbidden::ThreadLocal),
        // mrs of the timer's registers (cntvct_el0 and its kin) and of the performance counters.
        (0xffff_f000, 0xd53b_e000, Forbidden::Clock),
        (0xffff_f000, 0xd53b_9000, Forbidden::Clock),
        // msr of fpcr.
        (0xffff_ffe0, 0xd51b_4400, Forbidden::Control),
        // mrs of rndr and rndrrs.
        (0xffff_ff80, 0xd53b_2400, Forbidden::Machine),
    ];

    pub(super) fn check(stretch: Stretch<'_>) -> Result<(), Flaw> {
        let (words, rest) = stretch.bytes.as_chunks::<4>();
        for (index, word) in words.iter().enumerate() {
            let (at, word) = (stretch.address + 4 * index as u64, u32::from_le_bytes(*word));
            if let Some((.., kind)) = FORBIDDEN.iter().find(|(mask, value, _)| word & mask == *value) {
                return Err(Flaw::Forbidden(at, *kind));
            }
        }
        if stretch.address.is_multiple_of(4) && rest.is_empty() {
            Ok(())
        } else {
            Err(Flaw::Unreadable(stretch.address))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_other_architecture_are_told_apart() {
        let check = |word: u32| arm::check(Stretch { address: 0x1000, bytes: &word.to_le_bytes() });
        // svc #0, mrs x0 of tpidr_el0, mrs x1 of cntvct_el0, msr fpcr of x2.
        for (word, kind) in [
            (0xd400_0001, Forbidden::SystemCall),
            (0xd53b_d040, Forbidden::ThreadLocal),
            (0xd53b_e041, Forbidden::Clock),
            (0xd51b_4402, Forbidden::Control),
        ] {
            assert_eq!(check(word), Err(Flaw::Forbidden(0x1000, kind)), "{word:#x}");
        }
        // ret, nop, fadd v0.4s, mrs x0 of fpcr.
        for word in [0xd65f_03c0, 0xd503_201f, 0x4e22_d420, 0xd53b_4400] {
            assert_eq!(check(word), Ok(()), "{word:#x}");
        }
        assert!(arm::check(Stretch { address: 0, bytes: &[0; 6] }).is_err());
    }

    #[cfg(target_arch = "x86_64")]
    fn x86(bytes: &[u8]) -> Result<(), Flaw> {
        check(&[Stretch { address: 0x1000, bytes }], &[0x1000], &|slot| slot == 0x3000)
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn forbidden_instructions_are_named() {
        let cases: &[(&[u8], Forbidden)] = &[
            (&[0x0f, 0x05], Forbidden::SystemCall),
            (&[0x0f, 0x34], Forbidden::SystemCall),
            (&[0xcd, 0x80], Forbidden::SystemCall),
            (&[0x0f, 0x31], Forbidden::Clock),
            (&[0x0f, 0x01, 0xf9], Forbidden::Clock),
            (&[0x0f, 0xa2], Forbidden::Machine),
            (&[0x0f, 0x01, 0xd0], Forbidden::Machine),
            (&[0x0f, 0xc7, 0xf0], Forbidden::Machine),
            (&[0x0f, 0xae, 0x10], Forbidden::Control),
            (&[0xc5, 0xf8, 0xae, 0x10], Forbidden::Control),
            (&[0x0f, 0x01, 0xef], Forbidden::Control),
            (&[0x64, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0], Forbidden::ThreadLocal),
            (&[0x65, 0x8b, 0x07], Forbidden::ThreadLocal),
            (&[0xf3, 0x48, 0x0f, 0xae, 0xd0], Forbidden::ThreadLocal),
            (&[0x8e, 0xe0], Forbidden::ThreadLocal),
            (&[0x0f, 0xa1], Forbidden::ThreadLocal),
            (&[0x64, 0xa4], Forbidden::ThreadLocal),
            (&[0xcb], Forbidden::Mode),
            (&[0x0f, 0xae, 0x38], Forbidden::Cache),
            (&[0xc7, 0xf8, 0, 0, 0, 0], Forbidden::Transaction),
        ];
        for (bytes, kind) in cases {
            assert_eq!(x86(bytes), Err(Flaw::Forbidden(0x1000, *kind)), "{bytes:x?}");
        }
        assert_eq!(x86(&[0x90, 0x06]), Err(Flaw::Unreadable(0x1001)));
        assert_eq!(x86(&[0xe8, 0x00]), Err(Flaw::Unreadable(0x1000)), "cut short");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn branches_lead_to_instructions() {
        // jmp to itself; call to the next instruction; mov eax, imm with a syscall inside.
        assert_eq!(x86(&[0xeb, 0xfe]), Ok(()));
        assert_eq!(x86(&[0xe8, 0, 0, 0, 0, 0xc3]), Ok(()));
        assert_eq!(x86(&[0xb8, 0x0f, 0x05, 0xc3, 0x90, 0xc3]), Ok(()));
        assert_eq!(x86(&[0xb8, 0x0f, 0x05, 0xc3, 0x90, 0xeb, 0xfa]), Err(Flaw::Stray(0x1005)));
        assert_eq!(x86(&[0xe9, 0, 0x10, 0, 0]), Err(Flaw::Stray(0x1000)));
        assert_eq!(x86(&[0x74, 0x70]), Err(Flaw::Stray(0x1000)));
        // jmp through a slot at 0x3000, and at another place.
        assert_eq!(x86(&[0xff, 0x25, 0xfa, 0x1f, 0, 0]), Ok(()));
        assert_eq!(x86(&[0xff, 0x25, 0xfb, 0x1f, 0, 0]), Err(Flaw::Stray(0x1000)));
        assert_eq!(x86(&[0xff, 0xe0]), Ok(()), "a computed jump is for the system-call filter");
    }
}
