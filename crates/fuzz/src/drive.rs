//! Runs one target for a while; catches panics, broken rules and hangs, and keeps what caused them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use crate::mutate::Random;
use crate::targets::Target;

/// The longest that any input may take, on a machine that does something else beside it.
const LIMIT: Duration = Duration::from_secs(10);

/// What a run found.
#[derive(Debug)]
pub struct Outcome {
    /// Inputs that were tried.
    pub tried: u64,
    /// Inputs that the target took for good: a target that refuses everything tests little.
    pub taken: u64,
    /// What went wrong, if anything; the run ends there.
    pub failure: Option<Failure>,
}

/// An input that went wrong.
#[derive(Debug)]
pub struct Failure {
    /// The panic's message, the broken rule, or that it hung.
    pub what: String,
    /// Where the input was written.
    pub input: PathBuf,
}

/// Feeds a target with mutated input for `time`, everything following from `seed`.
pub fn drive(target: &'static Target, seed: u64, time: Duration) -> Result<Outcome> {
    let seeds = (target.seeds)().with_context(|| format!("seeds of {}", target.name))?;
    let (send, receive) = channel();
    let current = Arc::new(Mutex::new(vec![]));
    let seen = Arc::clone(&current);
    // On a thread of its own, because a hang cannot be caught, only outlived.
    std::thread::Builder::new().name(target.name.to_owned()).stack_size(8 << 20).spawn(move || {
        let mut random = Random::new(seed);
        let start = Instant::now();
        let (mut tried, mut taken) = (0, 0);
        while start.elapsed() < time {
            let input = (target.make)(&seeds, &mut random);
            if let Ok(mut seen) = seen.lock() {
                seen.clone_from(&input);
            }
            tried += 1;
            match once(target, &input) {
                Ok(good) => taken += u64::from(good),
                Err(what) => return drop(send.send(Message::Done(tried, taken, Some(what)))),
            }
            if send.send(Message::Alive).is_err() {
                return;
            }
        }
        drop(send.send(Message::Done(tried, taken, None)));
    })?;
    let (tried, taken, what) = loop {
        match receive.recv_timeout(LIMIT) {
            Ok(Message::Alive) => {}
            Ok(Message::Done(tried, taken, what)) => break (tried, taken, what),
            Err(RecvTimeoutError::Timeout) => break (0, 0, Some(format!("hung for {} s", LIMIT.as_secs()))),
            Err(RecvTimeoutError::Disconnected) => break (0, 0, Some("its thread has ended".to_owned())),
        }
    };
    let Some(what) = what else { return Ok(Outcome { tried, taken, failure: None }) };
    let bytes = current.lock().map_err(|_| anyhow!("the thread died with its input"))?.clone();
    let input = keep(target, &bytes)?;
    Ok(Outcome { tried, taken, failure: Some(Failure { what, input }) })
}

/// Runs a kept input again.
pub fn again(target: &Target, input: &[u8]) -> Result<bool, String> {
    once(target, input)
}

enum Message {
    Alive,
    Done(u64, u64, Option<String>),
}

fn once(target: &Target, input: &[u8]) -> Result<bool, String> {
    catch_unwind(AssertUnwindSafe(|| (target.check)(input))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

/// Writes a failing input to the temporary folder, named by its hash.
fn keep(target: &Target, bytes: &[u8]) -> Result<PathBuf> {
    let folder = std::env::temp_dir().join("autokernel-fuzz");
    fs_err::create_dir_all(&folder)?;
    let hash = blake3::hash(bytes).to_hex();
    let path = folder.join(format!("{}-{}", target.name, &hash[..16]));
    fs_err::write(&path, bytes)?;
    Ok(path)
}
