//! One machine, one measurement: a lock between all `autokernel` processes, and a look at what else
//! the machine did meanwhile.
//!
//! Whoever measures holds the lock alone. Work that would disturb a measurement (builds, staging,
//! checking) shares it, so work of several lanes goes on side by side but never beside a sample.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// More than this share of the machine used by others makes a sample unfit.
pub const UNFIT_BUSY: f64 = 0.10;

/// Why the lock could not be had.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LockError {
    #[error("cannot open the measurement lock {path}")]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot lock {path}")]
    Lock { path: PathBuf, source: io::Error },
    #[error("another measurement held the machine for {seconds} s")]
    Timeout { seconds: f64 },
}

/// Held while something runs; dropping it lets the next one go.
#[derive(Debug)]
pub struct MachineLock(#[expect(dead_code, reason = "closing the file releases the lock")] File);

impl MachineLock {
    /// Alone on the machine: for samples.
    pub fn measure(timeout: Duration) -> Result<Self, LockError> {
        acquire(&default_path(), timeout, true)
    }

    /// Beside other work, never beside a sample.
    pub fn work(timeout: Duration) -> Result<Self, LockError> {
        acquire(&default_path(), timeout, false)
    }
}

/// A place that all users and environments of the machine share: a lock in a user's own folder, or
/// wherever `$TMPDIR` points, would not keep two measurements apart.
fn default_path() -> PathBuf {
    let shared = Path::new("/tmp");
    let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    folder.join("autokernel-measure.lock")
}

fn open(path: &Path) -> io::Result<File> {
    // In a sticky folder the kernel may refuse O_CREAT on a file of someone else, and reading is
    // enough for flock. A link in the way is an attack or a mistake.
    let no_follow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    match OpenOptions::new().read(true).custom_flags(no_follow).open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .custom_flags(no_follow)
            .open(path),
        other => other,
    }
}

fn acquire(path: &Path, timeout: Duration, alone: bool) -> Result<MachineLock, LockError> {
    let file = open(path).map_err(|source| LockError::Open { path: path.to_owned(), source })?;
    let (start, mut pause) = (Instant::now(), Duration::from_micros(200));
    loop {
        let tried = if alone { file.try_lock() } else { file.try_lock_shared() };
        match tried {
            Ok(()) => return Ok(MachineLock(file)),
            Err(TryLockError::Error(source)) => {
                return Err(LockError::Lock { path: path.to_owned(), source });
            }
            Err(TryLockError::WouldBlock) if start.elapsed() > timeout => {
                return Err(LockError::Timeout { seconds: timeout.as_secs_f64() });
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}

/// What others did with the processors during a sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Share of all processor time that neither we nor our children used, nor was idle.
    pub others: f64,
    /// Share that the hypervisor gave to someone else.
    pub steal: f64,
}

impl Contention {
    /// Whether a sample under it may decide nothing.
    pub fn unfit(&self) -> bool {
        self.others + self.steal > UNFIT_BUSY
    }

    /// The worse of both.
    #[must_use]
    pub fn worst(self, other: Self) -> Self {
        if self.others + self.steal >= other.others + other.steal { self } else { other }
    }
}

/// Counts processor time from [`Watch::start`] to [`Watch::finish`].
#[derive(Debug)]
pub struct Watch {
    pids: Vec<i32>,
    before: Option<Ticks>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    steal: u64,
    total: u64,
    ours: u64,
}

impl Watch {
    /// Starts counting; `pids` are children that measure, alive until the end.
    pub fn start(pids: &[i32]) -> Self {
        Self { pids: pids.to_vec(), before: ticks(pids) }
    }

    /// The shares since the start; `None` for less than a fifth of a second on one processor, whose
    /// ticks say nothing.
    pub fn finish(self) -> Option<Contention> {
        let (before, after) = (self.before?, ticks(&self.pids)?);
        shares(before, after)
    }
}

fn shares(before: Ticks, after: Ticks) -> Option<Contention> {
    let total = after.total.checked_sub(before.total).filter(|t| *t >= 20)? as f64;
    let ours = after.ours.saturating_sub(before.ours);
    let others = after.busy.saturating_sub(before.busy).saturating_sub(ours) as f64;
    Some(Contention {
        others: others / total,
        steal: after.steal.saturating_sub(before.steal) as f64 / total,
    })
}

fn ticks(pids: &[i32]) -> Option<Ticks> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let (busy, steal, total) = machine_ticks(&stat)?;
    let process = |name: &str| process_ticks(&std::fs::read_to_string(format!("/proc/{name}/stat")).ok()?);
    let ours =
        process("self").unwrap_or(0) + pids.iter().filter_map(|pid| process(&pid.to_string())).sum::<u64>();
    Some(Ticks { busy, steal, total, ours })
}

/// Busy, stolen and all ticks from the first line of /proc/stat. Guest time is part of user time.
fn machine_ticks(stat: &str) -> Option<(u64, u64, u64)> {
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .take(8)
        .map_while(|f| f.parse().ok())
        .collect();
    let [user, nice, system, idle, iowait, irq, softirq, steal] = fields[..] else { return None };
    let busy = user + nice + system + irq + softirq;
    Some((busy, steal, busy + idle + iowait + steal))
}

/// User and system ticks of a process. Its name may hold anything, so fields count from the last parenthesis.
fn process_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_alone_and_work_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let soon = Duration::from_millis(20);
        let first = acquire(&path, soon, false).unwrap();
        let second = acquire(&path, soon, false).unwrap();
        assert!(matches!(acquire(&path, soon, true), Err(LockError::Timeout { .. })));
        drop((first, second));
        let alone = acquire(&path, soon, true).unwrap();
        assert!(acquire(&path, soon, false).is_err() && acquire(&path, soon, true).is_err());
        drop(alone);
        acquire(&path, soon, true).unwrap();
    }

    #[test]
    fn a_link_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), dir.path().join("lock")).unwrap();
        assert!(matches!(
            acquire(&dir.path().join("lock"), Duration::ZERO, true),
            Err(LockError::Open { .. })
        ));
    }

    #[test]
    fn ticks_are_parsed() {
        assert_eq!(machine_ticks("cpu  100 1 20 300 40 5 6 7 9 0\ncpu0 1"), Some((132, 7, 479)));
        assert_eq!(machine_ticks("cpu  1 2 3\n"), None);
        assert_eq!(process_ticks("42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 17 4 0 0 20"), Some(21));
        assert!(ticks(&[std::process::id() as i32]).is_some());
    }

    #[test]
    fn shares_of_others() {
        let before = Ticks { busy: 0, steal: 0, total: 0, ours: 0 };
        let busy = shares(before, Ticks { busy: 80, steal: 5, total: 100, ours: 50 }).unwrap();
        assert!((busy.others - 0.3).abs() < 1e-12 && (busy.steal - 0.05).abs() < 1e-12 && busy.unfit());
        assert!(!shares(before, Ticks { busy: 55, steal: 0, total: 100, ours: 50 }).unwrap().unfit());
        assert_eq!(shares(before, Ticks { busy: 1, steal: 0, total: 10, ours: 0 }), None);
    }
}
