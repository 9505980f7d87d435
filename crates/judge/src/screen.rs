//! Screening: how fast is the bare kernel, for ranking candidates among each other. Never reported.
//!
//! Timing happens in the runner that just passed the checks. Sets and output slots pair up anew in
//! every cycle, so a slot never holds the result that the next call would write; before a secret
//! round and the last one all slots are poisoned, and what these timed batches leave must be the
//! bits that were verified.

use std::time::{Duration, Instant};

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::Plan;
use autokernel_core::stats::{median, relative_spread};
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_worker::memory::Pattern;
use autokernel_worker::toolchain::Artefact;

use crate::correctness::{Checked, Judge, JudgedTask, LOCK_PATIENCE, Stop, Verified};
use crate::error::JudgeError;
use crate::lock::{Contention, MachineLock, Watch};
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
    pub fn screen(&self, task: &JudgedTask, file: &KernelFile, params: &Params) -> Result<ScreenOutcome, JudgeError> {
        match self.verify(task, file, params).and_then(|verified| time(task, verified)) {
            Ok(screened) => Ok(ScreenOutcome::Ranked(Box::new(screened))),
            Err(stop) => stop.verdict().map(ScreenOutcome::Rejected),
        }
    }
}

fn time(task: &JudgedTask, mut verified: Verified<'_>) -> Result<Screened, Stop> {
    let _alone = MachineLock::measure(LOCK_PATIENCE)?;
    let watch = Watch::start(&[verified.session.pid()]);
    let sets = task.truth.sets().len();
    let mut slots = Slots::new(sets);
    let mut calls = calls_for(verified.estimate_us);
    // The estimate comes from cold calls: one untimed batch warms up and corrects it.
    let warm = verified.session.batch(&slots.cycle(&mut verified.stream, calls))?;
    calls = calls_for(warm.wall.as_secs_f64() * 1e6 / calls as f64);

    let (start, mut samples) = (Instant::now(), vec![]);
    let secret = verified.stream.below(FEWEST_ROUNDS);
    loop {
        let last = samples.len() + 1 >= ROUNDS || (samples.len() + 1 >= FEWEST_ROUNDS && start.elapsed() > BUDGET);
        let checked = last || samples.len() == secret;
        if checked {
            let pattern = if last { Pattern::Random(verified.stream.next_u64()) } else { Pattern::Nan };
            verified.session.poison(pattern)?;
            slots.forget();
        }
        let order = slots.cycle(&mut verified.stream, calls);
        let batch =
            if checked { verified.session.checked_batch(&order)? } else { verified.session.batch(&order)? };
        samples.push(batch.wall.as_secs_f64() * 1e6 / calls as f64);
        if checked {
            check_timed(task, &verified, &slots)?;
        }
        if last {
            break;
        }
    }
    let us = median(&samples).unwrap_or(f64::NAN);
    if let Some(floor) = task.floor_us.filter(|floor| us < *floor) {
        let reason = format!("{us:.2} us a call lies below {floor:.2} us, which nothing can beat");
        return Err(Stop::Rejected(Stage::Audit, reason));
    }
    let Verified { artefact, plan, checked, .. } = verified;
    let spread = relative_spread(&samples).unwrap_or(0.0);
    Ok(Screened { us, spread, samples, calls, artefact, plan, checked, contention: watch.finish() })
}

fn calls_for(call_us: f64) -> usize {
    let wanted = BATCH.as_secs_f64() * 1e6 / call_us.max(1e-3);
    (wanted.ceil() as usize).clamp(1, MOST_CALLS)
}

fn check_timed(task: &JudgedTask, verified: &Verified<'_>, slots: &Slots) -> Result<(), Stop> {
    let mut comparer = Comparer::new(&task.truth);
    for (slot, writer) in slots.writers.iter().enumerate() {
        if let Some(set) = *writer {
            verified.session.compare_again((set, slot), &verified.digests[set], &mut comparer, Stage::Timed)?;
        }
    }
    Ok(())
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

    fn forget(&mut self) {
        self.writers.fill(None);
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
