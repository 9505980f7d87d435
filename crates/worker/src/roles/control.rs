//! What a thread's floating-point unit is told: rounding, flushing, exceptions.

/// Bits of MXCSR that record what happened, rather than say what shall.
#[cfg(target_arch = "x86_64")]
const FLAGS: u32 = 0x3f;

/// Rounding, flush-to-zero, denormals-are-zero and exception masks of this thread: MXCSR in the lower
/// half, the control word of the x87 unit in the upper one.
#[cfg(target_arch = "x86_64")]
pub(super) fn control() -> u64 {
    let (mut sse, mut x87): (u32, u16) = (0, 0);
    // SAFETY: stores two registers into local variables.
    unsafe {
        std::arch::asm!(
            "stmxcsr [{}]", "fnstcw [{}]", in(reg) &raw mut sse, in(reg) &raw mut x87,
            options(nostack, preserves_flags)
        );
    }
    u64::from(sse & !FLAGS) | u64::from(x87) << 32
}

/// Puts this thread's words back.
#[cfg(target_arch = "x86_64")]
pub(super) fn set_control(words: u64) {
    let (sse, x87) = (words as u32, (words >> 32) as u16);
    // SAFETY: the words came from `control` in a thread with the default environment.
    unsafe {
        std::arch::asm!(
            "ldmxcsr [{}]", "fldcw [{}]", in(reg) &raw const sse, in(reg) &raw const x87,
            options(nostack, preserves_flags)
        );
    }
}

/// The control register of this thread.
#[cfg(target_arch = "aarch64")]
pub(super) fn control() -> u64 {
    let word: u64;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
    word
}

/// Puts this thread's register back.
#[cfg(target_arch = "aarch64")]
pub(super) fn set_control(word: u64) {
    // SAFETY: `word` came from `control` in a thread with the default environment.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) word, options(nomem, nostack, preserves_flags)) };
}
