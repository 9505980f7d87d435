//! The machine as it measures itself: cores, name, copy rates by footprint, rate of multiplication.
//!
//! Measured in a child (`autokernel __worker device`), since the parent measures nothing itself.

use std::io;
use std::process::Stdio;
use std::time::{Duration, Instant};

use autokernel_core::task::{CopyRate, Rates};
use serde::{Deserialize, Serialize};

use crate::child;
use crate::sandbox::SandboxError;

mod multiply;
mod together;

/// What is known of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFacts {
    /// The processor's name, as the kernel gives it.
    pub name: String,
    /// Cores that this process may use. Two of them may share one physical core.
    pub cores: usize,
    /// Copy rates with all cores, smallest footprint first.
    pub copy: Vec<CopyRate>,
    /// Additions and multiplications of f32 a microsecond with all cores (= MFLOP/s): what registers alone allow.
    pub flops_per_us: f64,
    /// Processor features, as the kernel names them.
    pub features: Vec<String>,
    /// How many times as long one thread takes when one runs on every other core too. About 1 where
    /// each has a core of its own; 1.4 to 2 where two of them are one physical core, which a guest
    /// is not told. `None` on one core, and where the machine was never calm enough to find out.
    #[serde(default)]
    pub together: Option<f64>,
}

/// Why the machine could not be measured.
#[derive(Debug, thiserror::Error)]
#[error("failed to measure the machine: {reason}")]
pub struct DeviceError {
    /// What happened.
    pub reason: String,
}

/// Footprints (bytes read plus written) at which copying is measured: in L2, in L3, around it, beyond it.
const FOOTPRINTS: [u64; 5] = [512 << 10, 2 << 20, 8 << 20, 32 << 20, 128 << 20];

/// Time given to each footprint.
const SLICE: Duration = Duration::from_millis(60);

impl DeviceFacts {
    /// What reach is computed from.
    pub fn rates(&self) -> Rates<'_> {
        Rates { copy: &self.copy, flops_per_us: self.flops_per_us }
    }

    /// Measures in a child; less than a second.
    pub fn measure() -> Result<Self, DeviceError> {
        let fail = |reason: String| DeviceError { reason };
        let output = child::role_command("device")
            .stdin(Stdio::null())
            .output()
            .map_err(|error| fail(error.to_string()))?;
        if !output.status.success() {
            return Err(fail(format!("the measuring child ended with {}", output.status)));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| fail(error.to_string()))
    }
}

/// The child's half: measures and prints one JSON object on stdout.
pub(crate) fn print_facts() -> Result<(), SandboxError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let copy = FOOTPRINTS
        .iter()
        .map(|bytes| CopyRate { footprint: *bytes, bytes_per_us: copy_rate(*bytes, cores) })
        .collect();
    let flops_per_us = multiply::rate(cores);
    let (name, features) = processor();
    let together = together::slowdown(cores);
    let facts = DeviceFacts { name, cores, copy, flops_per_us, features, together };
    serde_json::to_writer(io::stdout().lock(), &facts)
        .map_err(|e| SandboxError::new("print what was measured", &e))
}

/// Best of repeated passes, each core copying its own part; the first pass only touches the pages.
fn copy_rate(footprint: u64, cores: usize) -> f64 {
    let words = (footprint / 2 / 8) as usize / cores;
    let barrier = std::sync::Barrier::new(cores);
    let passes: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores)
            .map(|_| {
                scope.spawn(|| {
                    let from = vec![1_u64; words];
                    let mut to = vec![0_u64; words];
                    to.copy_from_slice(&from);
                    barrier.wait();
                    let begin = Instant::now();
                    let mut seconds = vec![];
                    while begin.elapsed() < SLICE || seconds.len() < 3 {
                        let start = Instant::now();
                        to.copy_from_slice(std::hint::black_box(&from));
                        std::hint::black_box(&mut to);
                        seconds.push(start.elapsed().as_secs_f64());
                    }
                    seconds
                })
            })
            .collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    let bytes = (words * 16) as f64;
    passes
        .iter()
        .map(|seconds| {
            let mut sorted = seconds.clone();
            sorted.sort_by(f64::total_cmp);
            // The median: the rate that code gets, not the luckiest pass.
            bytes / (sorted[sorted.len() / 2] * 1e6)
        })
        .sum()
}

fn processor() -> (String, Vec<String>) {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |names: &[&str]| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(key, _)| names.contains(&key.trim()))
            .map(|(_, value)| value.trim().to_owned())
    };
    let features = field(&["flags", "Features"]).unwrap_or_default();
    (
        field(&["model name", "Processor"]).unwrap_or_else(|| "unknown processor".to_owned()),
        features.split_whitespace().map(str::to_owned).collect(),
    )
}
