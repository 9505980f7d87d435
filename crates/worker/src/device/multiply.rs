//! How fast all cores multiply and add f32 together, from registers alone.
//!
//! Written in instructions, so that a debug build measures the machine and not itself.

use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Time given to it, and steps of a loop between two looks at the clock.
const SLICE: Duration = Duration::from_millis(60);
const STEPS: u64 = 20_000;

/// One loop of independent fused multiply-adds, and the additions and multiplications of each of its steps.
#[derive(Clone, Copy)]
struct Kernel {
    run: fn(u64),
    flops: u64,
}

/// Additions and multiplications a microsecond, the sum over the cores of their medians.
pub(super) fn rate(cores: usize) -> f64 {
    let Some(kernel) = kernel() else { return 0.0 };
    let barrier = Barrier::new(cores);
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(|| one_core(kernel, &barrier))).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    rates.iter().sum()
}

fn one_core(kernel: Kernel, barrier: &Barrier) -> f64 {
    barrier.wait();
    let begin = Instant::now();
    let mut seconds = vec![];
    while begin.elapsed() < SLICE || seconds.len() < 3 {
        let start = Instant::now();
        (kernel.run)(STEPS);
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    (STEPS * kernel.flops) as f64 / (seconds[seconds.len() / 2] * 1e6)
}

/// The widest loop that this processor runs; `None` where it has no fused multiply-add.
#[cfg(target_arch = "x86_64")]
fn kernel() -> Option<Kernel> {
    if std::arch::is_x86_feature_detected!("avx512f") {
        Some(Kernel { run: avx512, flops: 24 * 16 * 2 })
    } else if std::arch::is_x86_feature_detected!("fma") {
        Some(Kernel { run: fma, flops: 12 * 8 * 2 })
    } else {
        None
    }
}

#[cfg(target_arch = "aarch64")]
fn kernel() -> Option<Kernel> {
    Some(Kernel { run: neon, flops: 24 * 4 * 2 })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn kernel() -> Option<Kernel> {
    None
}

/// A loop that adds a product to each listed register; the factors start as zero, so nothing overflows.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_loop {
    ($name:ident, $zero:literal, $prefix:literal, $factor:literal, [$($register:literal)*]) => {
        fn $name(steps: u64) {
            // SAFETY: only called once the processor said that it has the instructions. Touches vector
            // registers and a counter, all declared; no memory.
            unsafe {
                std::arch::asm!(
                    concat!($zero, " ", $prefix, $factor, ", ", $prefix, $factor, ", ", $prefix, $factor),
                    $(concat!($zero, " ", $prefix, $register, ", ", $prefix, $register, ", ", $prefix, $register),)*
                    "2:",
                    $(concat!("vfmadd231ps ", $prefix, $register, ", ", $prefix, $factor, ", ", $prefix, $factor),)*
                    "dec {steps}",
                    "jnz 2b",
                    "vzeroupper",
                    steps = inout(reg) steps => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                    out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _, out("xmm16") _, out("xmm17") _,
                    out("xmm18") _, out("xmm19") _, out("xmm20") _, out("xmm21") _, out("xmm22") _, out("xmm23") _,
                    out("xmm24") _,
                    options(nomem, nostack)
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86_loop!(avx512, "vpxord", "zmm", "24",
    ["0" "1" "2" "3" "4" "5" "6" "7" "8" "9" "10" "11" "12" "13" "14" "15" "16" "17" "18" "19" "20" "21" "22" "23"]);
#[cfg(target_arch = "x86_64")]
x86_loop!(fma, "vxorps", "ymm", "12", ["0" "1" "2" "3" "4" "5" "6" "7" "8" "9" "10" "11"]);

#[cfg(target_arch = "aarch64")]
macro_rules! arm_loop {
    ($name:ident, [$($register:literal)*]) => {
        fn $name(steps: u64) {
            // SAFETY: every aarch64 processor has these instructions. Touches vector registers and a counter,
            // all declared; no memory.
            unsafe {
                std::arch::asm!(
                    "movi v24.4s, #0",
                    $(concat!("movi v", $register, ".4s, #0"),)*
                    "2:",
                    $(concat!("fmla v", $register, ".4s, v24.4s, v24.4s"),)*
                    "subs {steps}, {steps}, #1",
                    "b.ne 2b",
                    steps = inout(reg) steps => _,
                    out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _, out("v6") _,
                    out("v7") _, out("v8") _, out("v9") _, out("v10") _, out("v11") _, out("v12") _, out("v13") _,
                    out("v14") _, out("v15") _, out("v16") _, out("v17") _, out("v18") _, out("v19") _,
                    out("v20") _, out("v21") _, out("v22") _, out("v23") _, out("v24") _,
                    options(nomem, nostack)
                );
            }
        }
    };
}

#[cfg(target_arch = "aarch64")]
arm_loop!(neon,
    ["0" "1" "2" "3" "4" "5" "6" "7" "8" "9" "10" "11" "12" "13" "14" "15" "16" "17" "18" "19" "20" "21" "22" "23"]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_multiplies_faster_than_it_counts() {
        let Some(kernel) = kernel() else { return };
        let one = one_core(kernel, &Barrier::new(1));
        // Ten thousand a microsecond is one scalar multiply-add a cycle at 5 GHz; no machine has a thousand.
        assert!((10_000.0..5_000_000.0).contains(&one), "{one} a microsecond");
        assert!(rate(2) > one / 4.0);
    }
}
