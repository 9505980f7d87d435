//! One round: a fresh process of every contestant, timed in turns, checked while frozen.
//!
//! Only one of the processes runs at a time; the others stand still, so that spinning worker threads
//! of one do not slow another. Every contestant of a round gets the same sets in the same order.

use std::os::fd::AsFd as _;
use std::time::Duration;

use autokernel_core::region::Region;
use autokernel_core::verdict::Stage;
use autokernel_worker::python::PeerError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use crate::child::{Child, RemoteTensor, Staged, Zygote};
use crate::content::Content;
use crate::error::JudgeError;
use crate::evidence::{Failure, Process, Round};
use crate::life::Life;
use crate::lock::{LOCK_PATIENCE, MachineLock, Watch};
use crate::rerun::{Again, Rerun};
use crate::secret::{Seed, Stream};
use crate::timed::{Record, Timed};
use crate::truth::Truth;

/// How rounds are measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// A timed batch of the fastest contestant lasts at least this long.
    pub batch_ms: f64,
    /// Turns of a process; it stands still between them.
    pub batches: usize,
    /// Timed batches of one turn.
    pub per_turn: usize,
    /// Sets that the inputs of a process are made of; for a model, draws to warm up with.
    pub staged: usize,
    /// A process warms up for at least this long.
    pub warm_ms: f64,
    /// Outputs of one batch are kept alive for checking: at most so many bytes.
    pub output_bytes: u64,
    /// Every call of a batch has inputs of its own: at most so many bytes.
    pub input_bytes: u64,
    /// Calls of one batch, at most.
    pub calls: usize,
}

impl Default for Protocol {
    fn default() -> Self {
        Self {
            batch_ms: 6.0,
            batches: 5,
            per_turn: 1,
            staged: 4,
            warm_ms: 20.0,
            output_bytes: 256 << 20,
            input_bytes: 256 << 20,
            calls: 2048,
        }
    }
}

/// Someone who runs.
pub struct Contestant {
    /// Its name: the baseline's, the candidate's, the form's.
    pub name: String,
    /// Where its processes come from.
    pub zygote: Box<dyn Zygote>,
    /// Whether its outputs are held against the truth. A region's baseline is the scale itself.
    pub checked: bool,
}

/// What the processes work on.
#[derive(Clone, Debug)]
pub enum Staging<'a> {
    /// Edits of the truth's sets, and the sets themselves.
    Slots {
        /// What is run.
        region: &'a Region,
        /// The candidate's kernel in a fresh process, which says what its outputs have to be.
        rerun: &'a dyn Rerun,
    },
    /// The model's own inputs under fresh seeds and under these, one for each set of the truth.
    Draws(Vec<u64>),
}

/// What all contestants run on.
#[derive(Clone, Debug)]
pub struct Contest<'a> {
    /// What the outputs have to be.
    pub truth: &'a Truth,
    /// What is staged.
    pub staging: Staging<'a>,
    /// How it is measured.
    pub protocol: Protocol,
}

impl Contest<'_> {
    /// Timed batches of a process.
    fn batches(&self) -> usize {
        self.protocol.batches * self.protocol.per_turn.max(1)
    }

    /// The life of the processes of one round.
    fn life(&self, seed: Seed) -> Life {
        let (sets, staged) = (self.truth.sets().len(), self.protocol.staged);
        match self.staging {
            Staging::Slots { region, .. } => {
                let constants = region.inputs.iter().any(|input| input.constant);
                Life::of_region(seed, sets, staged, self.batches(), constants)
            }
            Staging::Draws(_) => Life::of_model(seed, staged, self.batches()),
        }
    }
}

/// Across rounds: records by contestant, and the calls of a batch.
pub(crate) struct State<'a> {
    pub(crate) records: Vec<Record<'a>>,
    calls: usize,
}

impl<'a> State<'a> {
    pub(crate) fn new(truth: &'a Truth, contestants: usize) -> Self {
        Self { records: (0..contestants).map(|_| Record::new(truth)).collect(), calls: 1 }
    }
}

/// Why a round ended early: contestant `index` is out, or the judge can't go on.
pub(crate) enum RoundStop {
    Out { index: usize, failure: Failure },
    Failed(JudgeError),
}

impl<E: Into<JudgeError>> From<E> for RoundStop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

struct Running {
    child: Box<dyn Child>,
    /// Which contestant it is.
    index: usize,
    name: String,
    process: Process,
    /// Of its fastest call in the warm-up.
    call_us: f64,
    /// Outputs of one call, and its inputs where the child makes them.
    call_bytes: u64,
    staged: Staged,
    /// Whether its constant inputs are edited.
    edited: bool,
    /// A warm slot, called before a batch that is timed.
    wake: usize,
}

const STAGE_TIMEOUT: Duration = Duration::from_mins(2);

/// The first call of a child may compile: a graph behind a break, or everything where compiling ahead
/// would have left threads.
const FIRST_TIMEOUT: Duration = Duration::from_mins(20);

/// Drawing a model's inputs may take so many times as long as a batch; then batches have fewer calls.
const DRAW_SHARE: f64 = 10.0;

/// Runs one round. `contestants[i]` is `state.records[i]`.
pub(crate) fn round(
    contest: &Contest<'_>,
    contestants: &mut [&mut Contestant],
    state: &mut State<'_>,
    stream: &mut Stream,
) -> Result<Round, RoundStop> {
    let _alone = MachineLock::measure(LOCK_PATIENCE)?;
    let life = contest.life(stream.seed());
    let started = stream.order(contestants.len());
    let (mut running, most) = start(contest, contestants, &life, &started)?;
    // The same for everyone in a round. It only grows: a disturbed warm-up asks for too few.
    state.calls = state.calls.max(batch_size(&contest.protocol, &running).min(most));
    let life = life.with_calls(state.calls, contest.truth.sets().len());
    let mut feed = Feed::new(contest, &life)?;
    feed.stage(&mut running)?;

    let watch = Watch::start(&running.iter().map(|r| r.child.pid()).collect::<Vec<_>>());
    let mut turns = vec![];
    for turn in 0..contest.protocol.batches {
        let order = stream.order(running.len());
        for index in &order {
            let contestant = &mut running[*index];
            let checked = contestants[*index].checked;
            feed.turn(contestant, turn, checked, &mut state.records[*index])?;
        }
        turns.push(order);
    }
    let contention = watch.finish();
    let processes = running.into_iter().map(|r| r.process).collect();
    Ok(Round { processes, started, turns, life, contention })
}

/// Starts, stages and warms up a child of every contestant; all are frozen afterwards. Also says how many
/// calls of a batch can have inputs of their own.
fn start(
    contest: &Contest<'_>,
    contestants: &mut [&mut Contestant],
    life: &Life,
    started: &[usize],
) -> Result<(Vec<Running>, usize), RoundStop> {
    let mut content = match contest.staging {
        Staging::Slots { region, .. } => Some(Content::new(region, contest.truth, life, life.warm)?),
        Staging::Draws(_) => None,
    };
    if let Some(content) = &mut content {
        content.fill_warm()?;
    }
    let mut running: Vec<Option<Running>> = contestants.iter().map(|_| None).collect();
    for index in started {
        let contestant = &mut *contestants[*index];
        let name = contestant.name.clone();
        let fail = |error| blame(*index, &name, error);
        let mut child = contestant.zygote.fork().map_err(fail)?;
        let slots: Vec<usize> = (0..life.warm).collect();
        let mut staged = Staged::default();
        if let Some(content) = &content {
            child.stage(content.stage_body(), STAGE_TIMEOUT).map_err(fail)?;
            staged.bytes = content.slot_bytes();
            let file = content.share()?;
            for body in content.constants_body().into_iter().chain([content.refresh_body(&slots)]) {
                child.refresh(body, Some(file.as_fd()), STAGE_TIMEOUT).map_err(fail)?;
            }
        } else {
            let seeds: Vec<u64> = slots.iter().map(|slot| life.draw(None, *slot)).collect();
            staged = child.stage(json!({ "draws": seeds }), STAGE_TIMEOUT).map_err(fail)?;
        }
        let call_us = warm_up(child.as_mut(), slots.len(), &contest.protocol).map_err(fail)?;
        let outputs = child.outputs(STAGE_TIMEOUT).map_err(fail)?;
        let bytes = |call: &Vec<RemoteTensor>| call.iter().fold(0_u64, |sum, t| sum.saturating_add(t.bytes));
        let call_bytes = outputs.iter().map(bytes).max().unwrap_or(0);
        child.freeze().map_err(fail)?;
        let process = Process { contestant: name.clone(), us: vec![], checked: 0, digests: vec![] };
        let edited = life.edited_constants(0);
        let found =
            Running { child, index: *index, name, process, call_us, call_bytes, staged, edited, wake: 0 };
        running[*index] = Some(found);
    }
    let most = content.map_or(usize::MAX, |content| content.most_calls());
    Ok((running.into_iter().flatten().collect(), most))
}

/// Runs a child until it is warm; microseconds of its fastest call.
///
/// One call at a time first: a subject whose single call fills a batch needs no batches of several.
fn warm_up(child: &mut dyn Child, slots: usize, protocol: &Protocol) -> Result<f64, PeerError> {
    let all: Vec<usize> = (0..slots).collect();
    let (mut warm, mut call_us) = (0.0, f64::INFINITY);
    let mut run = |calls: &[usize], warm: &mut f64| -> Result<(), PeerError> {
        let timeout = if call_us.is_finite() { STAGE_TIMEOUT } else { FIRST_TIMEOUT };
        let wall = child.batch(calls, timeout)?.as_secs_f64();
        call_us = call_us.min(wall * 1e6 / calls.len() as f64);
        *warm += wall * 1e3;
        Ok(())
    };
    for slot in all.iter().chain(&all) {
        run(std::slice::from_ref(slot), &mut warm)?;
    }
    let long = warm >= protocol.batch_ms * 2.0 * slots as f64;
    let mut batches = 0;
    while !long && (batches < 2 || (warm < protocol.warm_ms && batches < 1000)) {
        run(&all, &mut warm)?;
        batches += 1;
    }
    Ok(call_us)
}

/// Calls of a batch, the same for everyone: long enough for the fastest, small enough for memory.
fn batch_size(protocol: &Protocol, running: &[Running]) -> usize {
    let fastest = running.iter().map(|r| r.call_us).fold(f64::INFINITY, f64::min).max(0.1);
    let most = |value: fn(&Running) -> u64| running.iter().map(value).max().unwrap_or(0).max(1);
    let wanted = (protocol.batch_ms * 1e3 / fastest).ceil() as usize;
    let outputs = (protocol.output_bytes / most(|r| r.call_bytes)) as usize;
    let inputs = (protocol.input_bytes / most(|r| r.staged.bytes)) as usize;
    let drawing = running.iter().map(|r| r.staged.seconds).fold(0.0, f64::max) * 1e3;
    let draws = if drawing > 0.0 { (DRAW_SHARE * protocol.batch_ms / drawing) as usize } else { usize::MAX };
    wanted.min(outputs).min(inputs).min(draws).clamp(1, protocol.calls)
}

/// Where the calls of one round get their inputs, and what their outputs are held against.
struct Feed<'f> {
    contest: &'f Contest<'f>,
    life: &'f Life,
    region: Option<(Content<'f>, Again<'f>)>,
}

impl<'f> Feed<'f> {
    fn new(contest: &'f Contest<'f>, life: &'f Life) -> Result<Self, JudgeError> {
        let region = match contest.staging {
            Staging::Slots { region, rerun } => {
                let content = Content::new(region, contest.truth, life, life.slots())?;
                Some((content, Again::new(rerun, region, life)?))
            }
            Staging::Draws(_) => None,
        };
        Ok(Self { contest, life, region })
    }

    /// Makes the slots of timed calls beside those of the warm-up.
    fn stage(&mut self, running: &mut [Running]) -> Result<(), RoundStop> {
        let body = if let Some((content, _)) = &self.region {
            content.stage_body()
        } else {
            let seeds: Vec<u64> = (0..self.life.slots()).map(|slot| self.life.draw(None, slot)).collect();
            json!({ "draws": seeds })
        };
        for contestant in running {
            let (index, name) = (contestant.index, contestant.name.clone());
            let fail = |error| blame(index, &name, error);
            contestant.child.thaw().map_err(fail)?;
            contestant.child.release(STAGE_TIMEOUT).map_err(fail)?;
            contestant.child.stage(body.clone(), STAGE_TIMEOUT).map_err(fail)?;
            contestant.child.freeze().map_err(fail)?;
        }
        Ok(())
    }

    /// Times the batches of one turn, checks what is to be checked, and leaves the child frozen.
    fn turn(
        &mut self,
        running: &mut Running,
        turn: usize,
        checked: bool,
        record: &mut Record<'_>,
    ) -> Result<(), RoundStop> {
        let per_turn = self.contest.protocol.per_turn.max(1);
        let mut frozen = true;
        for batch in turn * per_turn..(turn + 1) * per_turn {
            if let Some((content, _)) = &mut self.region {
                content.fill(batch)?;
            }
            let (name, index) = (running.name.clone(), running.index);
            self.prepare(running, batch, frozen).map_err(|error| match error {
                Trouble::Child(error) => blame(index, &name, error),
                Trouble::Ours(error) => RoundStop::Failed(error),
            })?;
            let fail = |error| blame(index, &name, error);
            let timeout = self.timeout(running);
            let wall = running.child.batch(&self.life.order(batch), timeout).map_err(fail)?;
            running.process.us.push(wall.as_secs_f64() * 1e6 / self.life.calls as f64);
            let check = checked && (self.region.is_some() || self.life.truths_of(batch).next().is_some());
            let last = batch + 1 == (turn + 1) * per_turn;
            // Kernels are leaf code on the caller's thread pool, and the bridge is ours: between the reply
            // and the freeze nothing of the candidate runs.
            let outputs = if check { Some(running.child.outputs(timeout).map_err(fail)?) } else { None };
            frozen = check || last;
            if frozen {
                running.child.freeze().map_err(fail)?;
            }
            if let Some(outputs) = outputs {
                self.check(running, batch, &outputs, record)?;
            }
        }
        Ok(())
    }

    /// Wakes a child and gives it what the batch is to run on, constant inputs first. What of the
    /// candidate's runs here has not seen anything of the batch.
    fn prepare(&self, running: &mut Running, batch: usize, frozen: bool) -> Result<(), Trouble> {
        let timeout = self.timeout(running);
        let child = &mut running.child;
        if frozen {
            child.thaw()?;
        }
        child.release(timeout)?;
        let edited = self.life.edited_constants(batch);
        let mut wake = vec![];
        if frozen && (self.life.calls >= 4 || self.contest.protocol.per_turn > 1) {
            // Threads that were frozen wake up, perhaps all on one core, outside of what is timed. A turn
            // of a single short batch has them in it: there the call would cost as much as the batch.
            wake.push(running.wake % self.life.warm);
            running.wake += 1;
        }
        if let Some((content, _)) = &self.region
            && edited != running.edited
            && let Some(body) = content.constants_body()
        {
            child.refresh(body, Some(content.share()?.as_fd()), timeout)?;
            // What is prepared from constant inputs is prepared again, for every group.
            wake = (0..self.life.warm).collect();
            running.edited = edited;
        }
        if !wake.is_empty() {
            child.batch(&wake, timeout)?;
            child.release(timeout)?;
        }
        let order = self.life.order(batch);
        match &self.region {
            Some((content, _)) => {
                child.refresh(content.refresh_body(&order), Some(content.share()?.as_fd()), timeout)?;
            }
            None => child.refresh(self.draws(batch, &order), None, timeout)?,
        }
        Ok(())
    }

    /// The request that draws a model's inputs anew.
    fn draws(&self, batch: usize, order: &[usize]) -> Value {
        let known = |slot: usize| match &self.contest.staging {
            Staging::Draws(seeds) => self.life.truth_at(batch, slot).map(|set| seeds[set]),
            Staging::Slots { .. } => None,
        };
        let seeds: Vec<u64> = order
            .iter()
            .map(|slot| known(*slot).unwrap_or_else(|| self.life.draw(Some(batch), *slot)))
            .collect();
        let plain: Vec<bool> = order.iter().map(|slot| known(*slot).is_some()).collect();
        json!({ "slots": order, "seeds": seeds, "plain": plain })
    }

    fn check(
        &mut self,
        running: &mut Running,
        batch: usize,
        outputs: &[Vec<RemoteTensor>],
        record: &mut Record<'_>,
    ) -> Result<(), RoundStop> {
        let timeout = self.timeout(running);
        let (index, name, life) = (running.index, running.name.as_str(), self.life);
        let timed = Timed { child: running.child.as_ref(), index, name, life, batch, outputs };
        let digest = match &mut self.region {
            Some((content, again)) => timed.check_all(content, again, record, timeout)?,
            None => timed.check_draws(record)?,
        };
        running.process.checked += 1;
        running.process.digests.push(blake3::Hash::from_bytes(digest).to_hex().to_string());
        Ok(())
    }

    /// The watchdog of a batch, and of what belongs to it.
    fn timeout(&self, running: &Running) -> Duration {
        let calls = self.life.calls.max(self.life.warm) as f64;
        let drawing = running.staged.seconds * calls;
        Duration::from_secs_f64(10.0_f64.max(50.0 * (running.call_us * 1e-6 * calls + drawing)))
    }
}

/// Whose fault it is that a batch could not be prepared.
enum Trouble {
    Child(PeerError),
    Ours(JudgeError),
}

impl From<PeerError> for Trouble {
    fn from(error: PeerError) -> Self {
        Self::Child(error)
    }
}

impl From<JudgeError> for Trouble {
    fn from(error: JudgeError) -> Self {
        Self::Ours(error)
    }
}

/// A contestant that dies, hangs or talks nonsense is out; a failed system call is ours.
fn blame(index: usize, name: &str, error: PeerError) -> RoundStop {
    if matches!(error, PeerError::Io { .. } | PeerError::Frozen) {
        return RoundStop::Failed(JudgeError::Contestant { name: name.to_owned(), source: Box::new(error) });
    }
    let reason: String = error.to_string().chars().take(500).collect();
    RoundStop::Out { index, failure: Failure { contestant: name.to_owned(), stage: Stage::Run, reason } }
}

#[cfg(test)]
mod slots_tests;
#[cfg(test)]
mod tests;
