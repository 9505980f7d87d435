//! Wiping what calls left below the stack pointer.

use std::ffi::c_void;
use std::os::unix::fs::FileExt;

/// Bytes next to the stack pointer that are overwritten with zeros. They are in use all the time; what
/// lies below is given back to the system, and is zeros when it is touched again.
const NEAR: usize = 64 << 10;
/// The least page size.
const PAGE: usize = 4096;
/// Bytes below the stack pointer that a function may use without moving it (x86-64).
const RED_ZONE: usize = 128;

/// Where the mapping begins that this thread's stack lies in, by the system's own list. The main
/// thread's grows with use, so that this is the deepest place that was ever touched.
pub(super) fn floor(maps: &std::fs::File) -> Result<usize, String> {
    let here = std::ptr::from_ref(&maps).addr();
    let (mut chunk, mut line, mut at) = ([0; 4096], Vec::with_capacity(256), 0);
    loop {
        let length = maps.read_at(&mut chunk, at).map_err(|e| format!("cannot read the memory map: {e}"))?;
        if length == 0 {
            return Err("this thread's stack is not in the memory map".to_owned());
        }
        at += length as u64;
        for byte in &chunk[..length] {
            if *byte != b'\n' {
                line.push(*byte);
                continue;
            }
            if let Some((start, end)) = range(&line)
                && (start..end).contains(&here)
            {
                return Ok(start);
            }
            line.clear();
        }
    }
}

/// The addresses at the head of a line of the memory map.
fn range(line: &[u8]) -> Option<(usize, usize)> {
    let text = std::str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?;
    let (start, end) = text.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

/// Wipes this thread's stack from `floor` up to this function's own frame.
#[inline(never)]
pub(super) fn wipe(floor: usize) -> Result<(), String> {
    let top = stack_pointer().saturating_sub(RED_ZONE);
    let near = top.saturating_sub(NEAR).max(floor).next_multiple_of(PAGE).min(top);
    if floor < near {
        // SAFETY: the range lies in this thread's stack, below everything that is alive in it.
        let given_back = unsafe {
            rustix::mm::madvise(floor as *mut c_void, near - floor, rustix::mm::Advice::LinuxDontNeed)
        };
        given_back.map_err(|e| format!("cannot clear a stack: {e}"))?;
    }
    // Calls from here on would write below, so it comes last.
    zero(near, stack_pointer().saturating_sub(RED_ZONE));
    Ok(())
}

#[cfg(target_arch = "x86_64")]
#[expect(clippy::inline_always, reason = "a frame of its own would lie in what is overwritten")]
#[inline(always)]
fn stack_pointer() -> usize {
    let value: usize;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mov {}, rsp", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Overwrites `start..end`, which lies below the stack pointer; a function that wrote it by calling
/// others would overwrite its own frames.
#[cfg(target_arch = "x86_64")]
#[expect(clippy::inline_always, reason = "a frame of its own would lie in what is overwritten")]
#[inline(always)]
fn zero(start: usize, end: usize) {
    // SAFETY: the range is this thread's own stack below its red zone, in which nothing is alive.
    unsafe {
        std::arch::asm!(
            "rep stosb", inout("rdi") start => _, inout("rcx") end.saturating_sub(start) => _, in("al") 0_u8,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(target_arch = "aarch64")]
#[expect(clippy::inline_always, reason = "a frame of its own would lie in what is overwritten")]
#[inline(always)]
fn stack_pointer() -> usize {
    let value: usize;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mov {}, sp", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "aarch64")]
#[expect(clippy::inline_always, reason = "a frame of its own would lie in what is overwritten")]
#[inline(always)]
fn zero(start: usize, end: usize) {
    // SAFETY: the range is this thread's own stack below its stack pointer, in which nothing is alive.
    unsafe {
        std::arch::asm!(
            "2: cmp {at}, {end}", "b.hs 3f", "strb wzr, [{at}], #1", "b 2b", "3:",
            at = inout(reg) start => _, end = in(reg) end, options(nostack)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leaves a mark in `depth` bytes of stack and says where the deepest one is.
    #[inline(never)]
    fn leave_marks(depth: usize) -> usize {
        let mut deep = [0x5a_u8; 1024];
        std::hint::black_box(&mut deep);
        if depth > deep.len() { leave_marks(depth - deep.len()) } else { deep.as_ptr().addr() }
    }

    #[inline(never)]
    fn marks(from: usize, to: usize) -> usize {
        // SAFETY: addresses of this thread's own stack, which stays mapped.
        (from..to).filter(|at| unsafe { (*at as *const u8).read_volatile() } == 0x5a).count()
    }

    fn in_this_thread() {
        let maps = std::fs::File::open("/proc/self/maps").unwrap();
        for depth in [2 << 10, 40 << 10, 300 << 10] {
            let deepest = leave_marks(depth);
            // Calls since then have used a little at the top.
            let end = std::ptr::from_ref(&deepest).addr() - 1024;
            assert!(marks(deepest, end) > depth / 2, "{depth}: there is something to wipe");
            wipe(floor(&maps).unwrap()).unwrap();
            assert_eq!(marks(deepest, end), 0, "{depth}");
        }
    }

    #[test]
    fn nothing_is_left_below_the_frame() {
        in_this_thread();
        std::thread::spawn(in_this_thread).join().unwrap();
    }
}
