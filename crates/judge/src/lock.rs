//! One machine, one measurement: a lock between all `autokernel` processes.
//!
//! Whoever measures holds the lock alone. Work that would disturb a measurement (builds, the user's
//! model, PyTorch's compiler, checking) shares it, so work of several lanes goes on side by side but
//! never beside a sample. It is the kernel's lock on an open file: a holder that is killed frees it.
//!
//! Everyone waits in front of a second lock for their turn at the first, so that work that follows on
//! work can't keep a measurement waiting: builds are batched between rounds.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use crate::watch::{Contention, Watch};

/// How long to wait for the other processes: longer than PyTorch's compiler takes for any one form.
pub const LOCK_PATIENCE: Duration = Duration::from_mins(30);

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

/// Held while something runs; dropping it lets the next one go. Who holds one must not ask for
/// another: the two would wait for each other.
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
    let end = Instant::now() + timeout;
    // Given back when the lock is had: who waits for it keeps those who came later behind them.
    let _turn = wait(&path.with_extension("turn"), timeout, end, true)?;
    wait(path, timeout, end, alone).map(MachineLock)
}

fn wait(path: &Path, timeout: Duration, end: Instant, alone: bool) -> Result<File, LockError> {
    let file = open(path).map_err(|source| LockError::Open { path: path.to_owned(), source })?;
    let mut pause = Duration::from_micros(200);
    loop {
        let tried = if alone { file.try_lock() } else { file.try_lock_shared() };
        match tried {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(source)) => {
                return Err(LockError::Lock { path: path.to_owned(), source });
            }
            Err(TryLockError::WouldBlock) if Instant::now() > end => {
                return Err(LockError::Timeout { seconds: timeout.as_secs_f64() });
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(5));
    }
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
    fn work_that_follows_on_work_keeps_no_measurement_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let long = Duration::from_secs(20);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Two lanes whose work overlaps: the lock is never free of it.
            for lane in 0..2 {
                let (path, stop) = (&path, &stop);
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(15 * lane));
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let _held = acquire(path, long, false).unwrap();
                        std::thread::sleep(Duration::from_millis(30));
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(60));
            let measured = acquire(&path, Duration::from_secs(10), true);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            measured.unwrap();
        });
    }

    /// Not a test: the child of the next one.
    #[test]
    #[ignore = "holds a lock until it is killed"]
    fn holder() {
        let Some(path) = std::env::var_os("AUTOKERNEL_TEST_LOCK") else { return };
        let _held = acquire(Path::new(&path), Duration::from_secs(10), true).unwrap();
        std::fs::write(Path::new(&path).with_extension("held"), "").unwrap();
        std::thread::sleep(Duration::from_mins(1));
    }

    #[test]
    fn a_killed_holder_frees_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "lock::tests::holder", "--ignored"])
            .env("AUTOKERNEL_TEST_LOCK", &path)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let held = path.with_extension("held");
        let start = Instant::now();
        while !held.exists() && start.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(held.exists() && acquire(&path, Duration::from_millis(50), false).is_err());
        child.kill().unwrap();
        child.wait().unwrap();
        acquire(&path, Duration::from_secs(5), true).unwrap();
    }
}
