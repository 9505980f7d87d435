//! Screening: how fast is the bare kernel, for ranking candidates among each other. Never reported.
//!
//! Timing happens in the runner that just passed the checks. Every timed batch looks the same from
//! inside: scratch is poisoned, and sets and output slots pair up anew in every cycle, so a slot never
//! holds the result that the next call would write. After each batch slots chosen only then are
//! compared with the bits that were verified, after a secret one and the last all of them.
//!
//! What a slot held before its last call is gone, so a kernel that times itself could still skip
//! calls inside a batch. The verdict keeps and checks every output; a screen only ranks.

use std::time::{Duration, Instant};

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::Plan;
use autokernel_core::stats::{median, relative_spread};
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_worker::memory::Pattern;
use autokernel_worker::toolchain::Artefact;

use crate::correctness::{Checked, Judge, JudgedTask, Stop, Verified};
use crate::error::JudgeError;
use crate::lock::{Contention, LOCK_PATIENCE, MachineLock, Watch};
use crate::metrics::Comparer;
use crate::secret::Stream;

/// A timed batch lasts at least this long: a round trip of the pipe is a thousandth of it.
const BATCH: Duration = Duration::from_millis(5);

/// Timed batches; fewer when they are long.
const ROUNDS: usize = 9;

/// Fewest timed batches.
const FEWEST_ROUNDS: usize = 3;

/// Time after which no further batch starts.
const BUDGET: Duration = Duration::from_millis(400);

/// Slots that are compared after an ordinary timed batch.
const SPOT_CHECKS: usize = 2;

/// A batch as long as this is long enough on any machine.
const LONG_BATCH: Duration = Duration::from_millis(60);

/// Calls of one batch, at most: they travel in one message.
const MOST_CALLS: usize = 4096;

/// A candidate that is correct, with its rank.
#[derive(Clone, Debug)]
pub struct Screened {
    /// Median time of one call, microseconds.
    pub us: f64,
    /// Relative spread over the timed batches.
    pub spread: f64,
    /// Microseconds a call of every timed batch, in order.
    pub samples: Vec<f64>,
    /// Calls of one batch.
    pub calls: usize,
    /// What was timed.
    pub artefact: Artefact,
    /// How it is launched.
    pub plan: Plan,
    /// How it was checked.
    pub checked: Checked,
    /// What else the machine did, where it could be seen.
    pub contention: Option<Contention>,
}

/// What a screen says.
#[derive(Clone, Debug)]
pub enum ScreenOutcome {
    /// Always [`Verdict::Rejected`].
    Rejected(Verdict),
    /// Correct, and this fast.
    Ranked(Box<Screened>),
}

impl Judge {
    /// Builds, checks and times one candidate.
    pub fn screen(
        &self,
        task: &JudgedTask,
        file: &KernelFile,
        params: &Params,
    ) -> Result<ScreenOutcome, JudgeError> {
        match self.verify(task, file, params).and_then(|verified| time(task, verified)) {
            Ok(screened) => Ok(ScreenOutcome::Ranked(Box::new(screened))),
            Err(stop) => stop.verdict().map(ScreenOutcome::Rejected),
        }
    }
}

fn time(task: &JudgedTask, mut verified: Verified<'_>) -> Result<Screened, Stop> {
    let _alone = MachineLock::measure(LOCK_PATIENCE)?;
    let watch = Watch::start(&[verified.session.pid()]);
    let mut slots = Slots::new(task.truth.sets().len());
    let calls = batch_size(&mut verified, &mut slots)?;
    let samples = series(task, &mut verified, &mut slots, calls)?;
    let us = median(&samples).unwrap_or(f64::NAN);
    if let Some(floor) = task.floor_us.filter(|floor| us < *floor) {
        let reason = format!("{us:.2} us a call lies below {floor:.2} us, which nothing can beat");
        return Err(Stop::Rejected(Stage::Audit, reason));
    }
    let Verified { artefact, plan, checked, .. } = verified;
    let spread = relative_spread(&samples).unwrap_or(0.0);
    Ok(Screened { us, spread, samples, calls, artefact, plan, checked, contention: watch.finish() })
}

/// Calls of a timed batch, found untimed. The first estimate comes from cold calls, and on a busy
/// machine a batch may be mostly waiting for its turn: a batch of four times the calls then takes
/// much less than four times as long, and tells more.
fn batch_size(verified: &mut Verified<'_>, slots: &mut Slots) -> Result<usize, Stop> {
    let mut calls = calls_for(verified.estimate_us);
    let mut wall = verified.session.batch(&slots.cycle(&mut verified.stream, calls))?.wall;
    while wall < LONG_BATCH && calls < MOST_CALLS {
        let more = (4 * calls).min(MOST_CALLS);
        let longer = verified.session.batch(&slots.cycle(&mut verified.stream, more))?.wall;
        let proportional = 4 * longer >= 3 * wall * (more / calls) as u32;
        let call_us = micros(longer) / more as f64;
        calls = if proportional { calls.max(calls_for(call_us)).min(more) } else { more };
        if proportional {
            break;
        }
        wall = longer;
    }
    Ok(calls)
}

/// Timed batches of `calls` calls: microseconds a call of each.
fn series(
    task: &JudgedTask,
    verified: &mut Verified<'_>,
    slots: &mut Slots,
    calls: usize,
) -> Result<Vec<f64>, Stop> {
    let (start, mut samples) = (Instant::now(), vec![]);
    let secret = verified.stream.below(FEWEST_ROUNDS);
    let mut comparer = Comparer::new(&task.truth);
    loop {
        let next = samples.len() + 1;
        let last = next >= ROUNDS || (next >= FEWEST_ROUNDS && start.elapsed() > BUDGET);
        let full = last || samples.len() == secret;
        let poison = Pattern::Random(verified.stream.next_u64());
        verified.session.poison_scratch(poison)?;
        if slots.writers.len() < 2 {
            // A single set has a single slot, which would hold its own result.
            verified.session.poison(poison)?;
        }
        let order = slots.cycle(&mut verified.stream, calls);
        let batch =
            if full { verified.session.checked_batch(&order)? } else { verified.session.batch(&order)? };
        samples.push(micros(batch.wall) / calls as f64);
        let looked_at = if full { slots.writers.len() } else { SPOT_CHECKS };
        for slot in verified.stream.order(slots.writers.len()).into_iter().take(looked_at) {
            if let Some(set) = slots.writers[slot] {
                let known = &verified.digests[set];
                verified.session.compare_again((set, slot), known, &mut comparer, Stage::Timed)?;
            }
        }
        if last {
            return Ok(samples);
        }
    }
}

pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn calls_for(call_us: f64) -> usize {
    let wanted = BATCH.as_secs_f64() * 1e6 / call_us.max(1e-3);
    (wanted.ceil() as usize).clamp(1, MOST_CALLS)
}

/// Which set's outputs each slot holds.
struct Slots {
    writers: Vec<Option<usize>>,
    shift: usize,
}

impl Slots {
    fn new(sets: usize) -> Self {
        Self { writers: vec![None; sets], shift: 0 }
    }

    /// The next `count` calls: all sets in random order, then again, the pairing of sets and slots
    /// turned by one each time round.
    fn cycle(&mut self, stream: &mut Stream, count: usize) -> Vec<(usize, usize)> {
        let sets = self.writers.len();
        let mut calls = Vec::with_capacity(count + sets);
        while calls.len() < count {
            self.shift += 1;
            calls.extend(stream.order(sets).into_iter().map(|set| (set, (set + self.shift) % sets)));
        }
        calls.truncate(count);
        for (set, slot) in &calls {
            self.writers[*slot] = Some(*set);
        }
        calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Seed;

    #[test]
    fn a_slot_never_holds_what_comes_next() {
        let mut stream = Seed::from_os().unwrap().stream("t");
        let mut slots = Slots::new(5);
        let mut held = vec![None; 5];
        for count in [5, 12, 7, 30, 1, 5] {
            let calls = slots.cycle(&mut stream, count);
            assert_eq!(calls.len(), count);
            for (set, slot) in calls {
                assert_ne!(held[slot], Some(set));
                held[slot] = Some(set);
            }
            assert_eq!(held, slots.writers);
        }
    }

    #[test]
    fn batches_last_long_enough() {
        assert_eq!(calls_for(1.0), 4096);
        assert_eq!(calls_for(10.0), 500);
        assert_eq!(calls_for(1e6), 1);
        assert_eq!(calls_for(0.0), 4096);
    }
}
