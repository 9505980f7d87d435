//! Do threads slow each other? Two processors of a virtual machine may be one physical core, and the
//! guest can't see it; then a second thread is worth little, and a neighbour costs half.
//!
//! Measured once for each start of the machine and kept in the user's cache; a machine that is too
//! busy at the time gives no answer and keeps none.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Passes of each kind; the fastest of each counts, which is the least disturbed.
const PASSES: usize = 12;

/// Steps of one pass: about a millisecond.
const STEPS: u64 = 250_000;

/// Share of its time that the probe may have waited for a processor.
const CALM: f64 = 0.02;

/// What is kept.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// The kernel's name for this start of the machine.
    boot: String,
    cores: usize,
    together: f64,
}

/// How many times as long a thread takes beside one on each other core.
pub(super) fn slowdown(cores: usize) -> Option<f64> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    slowdown_kept_in(cache().as_deref(), boot.trim(), cores, || probe(cores))
}

/// `measure` is asked only when nothing is kept for this start of the machine.
fn slowdown_kept_in(
    cache: Option<&Path>,
    boot: &str,
    cores: usize,
    measure: impl FnOnce() -> Option<f64>,
) -> Option<f64> {
    if cores < 2 {
        return None;
    }
    let file = cache.map(|cache| cache.join("threads-together.json"));
    let kept = file.as_ref().and_then(|file| {
        let kept: Kept = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
        (!boot.is_empty() && kept.boot == boot && kept.cores == cores).then_some(kept.together)
    });
    if kept.is_some() {
        return kept;
    }
    let together = measure()?;
    if let (Some(file), false) = (file, boot.is_empty()) {
        // A cache that can't be written costs a hundredth of a second each time.
        let _ = keep(&file, &Kept { boot: boot.to_owned(), cores, together });
    }
    Some(together)
}

fn keep(file: &Path, kept: &Kept) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // Another process may read at any time: complete or absent.
    let beside = file.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&beside, serde_json::to_vec(kept)?)?;
    std::fs::rename(beside, file)
}

fn cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("autokernel"))
}

/// Times the same work on one thread, then on all at once. `None` when somebody was in the way.
fn probe(cores: usize) -> Option<f64> {
    let before = waited();
    let start = Instant::now();
    let alone = (0..PASSES).map(|_| pass()).fold(f64::INFINITY, f64::min);
    let barrier = Barrier::new(cores);
    let slowest = (0..PASSES).map(|_| {
        let times: Vec<f64> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..cores)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        pass()
                    })
                })
                .collect();
            workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
        });
        times.into_iter().fold(0.0, f64::max)
    });
    let together = slowest.fold(f64::INFINITY, f64::min);
    let lost = (waited()? - before?) / start.elapsed().as_secs_f64();
    (lost < CALM && alone > 0.0).then_some(together / alone)
}

/// Multiplications and additions in eight independent chains, which keep a core's arithmetic busy:
/// what two threads on one core have to share. Seconds.
fn pass() -> f64 {
    let start = Instant::now();
    let mut chains = black_box([1.0_f64, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]);
    for _ in 0..STEPS {
        for chain in &mut chains {
            *chain = *chain * 0.999_999 + 1e-7;
        }
    }
    black_box(chains);
    start.elapsed().as_secs_f64()
}

/// Seconds that the first thread of this process waited for a processor.
fn waited() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/schedstat").ok()?;
    Some(text.split_whitespace().nth(1)?.parse::<f64>().ok()? * 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_measured_once_for_each_start_of_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("not there yet");
        let never = || -> Option<f64> { panic!("measured again") };
        assert_eq!(slowdown_kept_in(Some(&cache), "a", 2, || None), None);
        assert_eq!(slowdown_kept_in(Some(&cache), "a", 2, || Some(1.5)), Some(1.5));
        assert_eq!(slowdown_kept_in(Some(&cache), "a", 2, never), Some(1.5));
        assert_eq!(slowdown_kept_in(Some(&cache), "b", 2, || Some(1.25)), Some(1.25));
        assert_eq!(slowdown_kept_in(Some(&cache), "b", 4, || Some(1.125)), Some(1.125));
        std::fs::write(cache.join("threads-together.json"), "{").unwrap();
        assert_eq!(slowdown_kept_in(Some(&cache), "b", 4, || Some(2.0)), Some(2.0), "damage is no answer");
        assert_eq!(slowdown_kept_in(None, "b", 4, || Some(1.0)), Some(1.0));
        assert_eq!(slowdown_kept_in(Some(&cache), "b", 1, || Some(1.0)), None);
    }

    #[test]
    fn threads_never_help_each_other() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if let Some(together) = probe(cores) {
            assert!((0.8..50.0).contains(&together), "{together}");
        }
    }
}
