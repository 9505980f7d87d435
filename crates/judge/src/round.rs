//! One round: a fresh process of every contestant, timed in turns, checked while frozen.
//!
//! Only one of the processes runs at a time; the others stand still, so that spinning worker threads
//! of one do not slow another. Every contestant of a round gets the same sets in the same order.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;
use autokernel_core::verdict::Stage;
use autokernel_worker::python::{Peer, PeerError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::JudgeError;
use crate::evidence::{Failure, Process, Round};
use crate::lock::{LOCK_PATIENCE, MachineLock, Watch};
use crate::metrics::{Comparer, Digest, digest};
use crate::secret::Stream;
use crate::source::{Source, Tensor};
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
    /// Sets staged in a process.
    pub staged: usize,
    /// A process warms up for at least this long.
    pub warm_ms: f64,
    /// Outputs of one batch are kept alive for checking: at most so many bytes.
    pub output_bytes: u64,
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
            calls: 2048,
        }
    }
}

/// An output in a child's memory, as its reply says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RemoteTensor {
    /// Where its first element lies.
    pub address: u64,
    /// Bytes from there that belong to it.
    pub bytes: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Size of each dimension.
    pub shape: Vec<u64>,
    /// Stride of each dimension in elements.
    pub stride: Vec<u64>,
}

/// A process that runs one contestant.
pub trait Child {
    /// Makes the inputs of its sets.
    fn stage(&mut self, body: Value, timeout: Duration) -> Result<(), PeerError>;
    /// Calls the subject on these staged sets, back to back, and says nothing but that it is done:
    /// the time from sending the request to the complete reply, on the parent's clock.
    fn batch(&mut self, calls: &[usize], timeout: Duration) -> Result<Duration, PeerError>;
    /// Where the outputs of the last batch lie, by call and output.
    fn outputs(&mut self, timeout: Duration) -> Result<Vec<Vec<RemoteTensor>>, PeerError>;
    /// Frees them, outside of the next batch's time.
    fn release(&mut self, timeout: Duration) -> Result<(), PeerError>;
    /// Stops every thread.
    fn freeze(&self) -> Result<(), PeerError>;
    /// Lets them go on.
    fn thaw(&self) -> Result<(), PeerError>;
    /// Reads its memory while it stands still.
    fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Its process id.
    fn pid(&self) -> i32;
}

/// A process that has everything loaded and compiled, has run nothing, and forks children.
pub trait Zygote {
    /// A fresh child. Dropping it ends it.
    fn fork(&mut self) -> Result<Box<dyn Child>, PeerError>;
}

impl Zygote for Peer {
    fn fork(&mut self) -> Result<Box<dyn Child>, PeerError> {
        Ok(Box::new(Peer::fork(self)?))
    }
}

impl Child for Peer {
    fn stage(&mut self, body: Value, timeout: Duration) -> Result<(), PeerError> {
        self.request("stage", body, timeout)?;
        // What is staged, user's code may have drawn; from here on a candidate's may run.
        self.confine(timeout)
    }

    fn batch(&mut self, calls: &[usize], timeout: Duration) -> Result<Duration, PeerError> {
        // Without addresses: describing many small results would take as long as making them.
        let body = json!({ "calls": calls, "addresses": false });
        self.request_timed("batch", body, timeout).map(|(_, wall)| wall)
    }

    fn outputs(&mut self, timeout: Duration) -> Result<Vec<Vec<RemoteTensor>>, PeerError> {
        let mut reply = self.request("outputs", json!({}), timeout)?;
        serde_json::from_value(reply["outputs"].take())
            .map_err(|e| PeerError::Protocol { what: e.to_string() })
    }

    fn release(&mut self, timeout: Duration) -> Result<(), PeerError> {
        self.request("release", json!({}), timeout).map(|_| ())
    }

    fn freeze(&self) -> Result<(), PeerError> {
        Peer::freeze(self)
    }

    fn thaw(&self) -> Result<(), PeerError> {
        Peer::thaw(self)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_memory(address, bytes)
    }

    fn pid(&self) -> i32 {
        Peer::pid(self)
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

/// What is staged for a set.
#[derive(Clone, Debug)]
pub enum Staging {
    /// The inputs of the truth's sets.
    Sets,
    /// The model's own inputs under these seeds, one for each set of the truth.
    Draws(Vec<u64>),
}

/// What all contestants run on.
#[derive(Clone, Debug)]
pub struct Contest<'a> {
    /// What the outputs have to be.
    pub truth: &'a Truth,
    /// What is staged.
    pub staging: Staging,
    /// How it is measured.
    pub protocol: Protocol,
}

impl Contest<'_> {
    fn stage_body(&self, chosen: &[usize]) -> Value {
        match &self.staging {
            Staging::Sets => {
                let sets: Vec<Value> =
                    chosen.iter().map(|set| json!({ "inputs": self.truth.sets()[*set].inputs })).collect();
                json!({ "sets": sets })
            }
            Staging::Draws(seeds) => {
                json!({ "draws": chosen.iter().map(|set| seeds[*set]).collect::<Vec<_>>() })
            }
        }
    }
}

/// What is known of one contestant across rounds.
pub(crate) struct Record<'a> {
    pub(crate) comparer: Comparer<'a>,
    /// Hashes of outputs that were verified in full, by set.
    verified: HashMap<usize, Vec<Digest>>,
}

/// Across rounds: records by contestant, and the calls of a batch.
pub(crate) struct State<'a> {
    pub(crate) records: Vec<Record<'a>>,
    calls: usize,
}

impl<'a> State<'a> {
    pub(crate) fn new(truth: &'a Truth, contestants: usize) -> Self {
        let record = || Record { comparer: Comparer::new(truth), verified: HashMap::new() };
        Self { records: (0..contestants).map(|_| record()).collect(), calls: 1 }
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
    name: String,
    us: Vec<f64>,
    checked: usize,
    call_us: f64,
    call_bytes: u64,
}

const STAGE_TIMEOUT: Duration = Duration::from_mins(2);

/// The first call of a child may compile: a graph behind a break, or everything where compiling ahead
/// would have left threads.
const FIRST_TIMEOUT: Duration = Duration::from_mins(20);

/// Runs one round. `contestants[i]` is `state.records[i]`.
pub(crate) fn round(
    contest: &Contest<'_>,
    contestants: &mut [&mut Contestant],
    state: &mut State<'_>,
    stream: &mut Stream,
) -> Result<Round, RoundStop> {
    let _alone = MachineLock::measure(LOCK_PATIENCE)?;
    let protocol = &contest.protocol;
    let mut sets = stream.order(contest.truth.sets().len());
    sets.truncate(protocol.staged.max(1));
    let started = stream.order(contestants.len());
    let mut running = start(contest, contestants, &sets, &started)?;
    // The same for everyone in a round. It only grows: a disturbed warm-up asks for too few.
    state.calls = state.calls.max(batch_size(protocol, &running));
    let calls = state.calls;

    let watch = Watch::start(&running.iter().map(|r| r.child.pid()).collect::<Vec<_>>());
    let secret = stream.below(protocol.batches);
    let mut turns = vec![];
    for batch in 0..protocol.batches {
        let check = batch == 0 || batch + 1 == protocol.batches || batch == secret;
        let order = sequence(stream, sets.len(), calls);
        let turn = stream.order(running.len());
        for index in &turn {
            let check = check && contestants[*index].checked;
            let outputs = timed(&mut running[*index], *index, &order, protocol.per_turn, check)?;
            if let Some(outputs) = outputs {
                let called: Vec<usize> = order.iter().map(|call| sets[*call]).collect();
                verify(&running[*index], *index, &outputs, &called, &mut state.records[*index])?;
                running[*index].checked += 1;
            }
        }
        turns.push(turn);
    }
    let contention = watch.finish();
    let processes =
        running.into_iter().map(|r| Process { contestant: r.name, us: r.us, checked: r.checked }).collect();
    Ok(Round { processes, started, turns, sets, calls, contention })
}

/// Starts, stages and warms up a child of every contestant; all are frozen afterwards.
fn start(
    contest: &Contest<'_>,
    contestants: &mut [&mut Contestant],
    sets: &[usize],
    started: &[usize],
) -> Result<Vec<Running>, RoundStop> {
    let body = contest.stage_body(sets);
    let mut running: Vec<Option<Running>> = contestants.iter().map(|_| None).collect();
    for index in started {
        let contestant = &mut *contestants[*index];
        let name = contestant.name.clone();
        let fail = |error| blame(*index, &name, error);
        let mut child = contestant.zygote.fork().map_err(fail)?;
        child.stage(body.clone(), STAGE_TIMEOUT).map_err(fail)?;
        let call_us = warm_up(child.as_mut(), sets.len(), &contest.protocol).map_err(fail)?;
        let outputs = child.outputs(STAGE_TIMEOUT).map_err(fail)?;
        let bytes = |call: &Vec<RemoteTensor>| call.iter().fold(0_u64, |sum, t| sum.saturating_add(t.bytes));
        let call_bytes = outputs.iter().map(bytes).max().unwrap_or(0);
        child.freeze().map_err(fail)?;
        running[*index] = Some(Running { child, name, us: vec![], checked: 0, call_us, call_bytes });
    }
    Ok(running.into_iter().flatten().collect())
}

/// Runs a child until it is warm; microseconds of its fastest call.
///
/// One call at a time first: a subject whose single call fills a batch needs no batches of several.
fn warm_up(child: &mut dyn Child, sets: usize, protocol: &Protocol) -> Result<f64, PeerError> {
    let all: Vec<usize> = (0..sets).collect();
    let (mut warm, mut call_us) = (0.0, f64::INFINITY);
    let mut run = |calls: &[usize], warm: &mut f64| -> Result<(), PeerError> {
        let timeout = if call_us.is_finite() { STAGE_TIMEOUT } else { FIRST_TIMEOUT };
        let wall = child.batch(calls, timeout)?.as_secs_f64();
        call_us = call_us.min(wall * 1e6 / calls.len() as f64);
        *warm += wall * 1e3;
        Ok(())
    };
    for set in all.iter().chain(&all) {
        run(std::slice::from_ref(set), &mut warm)?;
    }
    let long = warm >= protocol.batch_ms * 2.0 * sets as f64;
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
    let bytes = running.iter().map(|r| r.call_bytes).max().unwrap_or(0).max(1);
    let wanted = (protocol.batch_ms * 1e3 / fastest).ceil() as usize;
    let fitting = (protocol.output_bytes / bytes) as usize;
    wanted.min(fitting).clamp(1, protocol.calls)
}

/// Staged sets in random order, again and again, up to `count`.
fn sequence(stream: &mut Stream, sets: usize, count: usize) -> Vec<usize> {
    let mut calls = vec![];
    while calls.len() < count {
        calls.extend(stream.order(sets));
    }
    calls.truncate(count);
    calls
}

/// Times the batches of one turn and leaves the child frozen; says where the outputs of the last one
/// lie when they are wanted.
fn timed(
    running: &mut Running,
    index: usize,
    order: &[usize],
    per_turn: usize,
    wanted: bool,
) -> Result<Option<Vec<Vec<RemoteTensor>>>, RoundStop> {
    let name = running.name.clone();
    let fail = |error| blame(index, &name, error);
    let expected = Duration::from_secs_f64(50e-6 * running.call_us * order.len() as f64);
    let timeout = Duration::from_secs(10).max(expected);
    let child = &mut running.child;
    child.thaw().map_err(fail)?;
    child.release(timeout).map_err(fail)?;
    if order.len() >= 4 || per_turn > 1 {
        // Threads that were frozen wake up, perhaps all on one core, outside of what is timed. A turn
        // of a single short batch has them in it: there the call would cost as much as the batch.
        child.batch(&order[..1], timeout).map_err(fail)?;
        child.release(timeout).map_err(fail)?;
    }
    for batch in 0..per_turn.max(1) {
        if batch > 0 {
            child.release(timeout).map_err(fail)?;
        }
        let wall = child.batch(order, timeout).map_err(fail)?;
        running.us.push(wall.as_secs_f64() * 1e6 / order.len() as f64);
    }
    // Kernels are leaf code on the caller's thread pool, and the bridge is ours: between the reply
    // and the freeze nothing of the candidate runs.
    let outputs = if wanted { Some(child.outputs(timeout).map_err(fail)?) } else { None };
    child.freeze().map_err(fail)?;
    Ok(outputs)
}

/// The memory of a frozen child from an address on.
struct Remote<'a> {
    child: &'a dyn Child,
    tensor: &'a RemoteTensor,
}

impl Source for Remote<'_> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.tensor.bytes);
        let address = self.tensor.address.checked_add(offset).filter(|_| end.is_some());
        self.child.read(address.ok_or(io::ErrorKind::UnexpectedEof)?, buf)
    }
}

/// Checks all outputs of a timed batch. `called` names the set of each call.
fn verify(
    running: &Running,
    index: usize,
    replied: &[Vec<RemoteTensor>],
    called: &[usize],
    record: &mut Record<'_>,
) -> Result<(), RoundStop> {
    let out = |stage, reason| RoundStop::Out {
        index,
        failure: Failure { contestant: running.name.clone(), stage, reason },
    };
    let truth = record.comparer.truth();
    let outputs = truth.contract().limits.len();
    if replied.len() != called.len() || replied.iter().any(|call| call.len() != outputs) {
        return Err(out(Stage::Timed, "the batch did not return every output of every call".to_owned()));
    }
    for (set, tensors) in called.iter().zip(replied) {
        let mut digests = Vec::with_capacity(outputs);
        for (output, tensor) in tensors.iter().enumerate() {
            let meta = TensorMeta {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                stride: tensor.stride.clone(),
            };
            // The reply is the child's word: sizes are compared before anything is allocated for them.
            let expected = &truth.sets()[*set].outputs[output].meta;
            let same = meta.dtype == expected.dtype
                && meta.shape == expected.shape
                && meta.stride.len() == meta.shape.len();
            if !same || !fits(&meta, tensor.bytes) {
                return Err(out(
                    Stage::Timed,
                    format!("output {output} has another element type, shape or layout"),
                ));
            }
            let source = Remote { child: running.child.as_ref(), tensor };
            let candidate = Tensor { source: &source, meta: &meta };
            let known = record.verified.get(set).map(|digests| digests[output]);
            if known.is_some() && digest(candidate).ok() == known {
                continue;
            }
            let comparison = match record.comparer.compare(*set, output, candidate) {
                Err(crate::truth::TruthError::Candidate(e)) => {
                    return Err(out(Stage::Timed, format!("output {output} can't be read: {e}")));
                }
                other => other?,
            };
            if let Some(fault) = comparison.fault {
                return Err(out(Stage::Timed, fault.to_string()));
            }
            if known.is_some() && truth.contract().deterministic {
                return Err(out(
                    Stage::Determinism,
                    format!("output {output}: equal inputs gave unequal bits"),
                ));
            }
            digests.push(comparison.digest);
        }
        if digests.len() == outputs {
            record.verified.insert(*set, digests);
        }
    }
    Ok(())
}

/// Whether the strides stay inside `bytes`, in arithmetic that can't wrap, and storage is not
/// absurdly larger than the tensor.
fn fits(meta: &TensorMeta, bytes: u64) -> bool {
    if meta.numel() == 0 {
        return true;
    }
    let reach = meta
        .shape
        .iter()
        .zip(&meta.stride)
        .try_fold(1_u64, |sum, (n, s)| sum.checked_add((n - 1).checked_mul(*s)?))
        .and_then(|extent| extent.checked_mul(meta.dtype.size()));
    reach.is_some_and(|reach| reach <= bytes && reach <= meta.bytes().saturating_mul(8))
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
mod tests;
