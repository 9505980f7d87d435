//! The calls of a timed batch once more, in a fresh and confined process that has never seen another
//! batch: what a kernel computes there is what it computed when it was found correct, and what the
//! timed calls must have given, bit for bit.

use std::time::Duration;

use autokernel_core::graph::TensorMeta;
use autokernel_core::plan::Plan;
use autokernel_core::region::Region;
use autokernel_worker::memory::{Arena, BufferSpec};
use autokernel_worker::runner::{Call, Runner, RunnerConfig, RunnerError};
use autokernel_worker::toolchain::Artefact;

use crate::content::Content;
use crate::correctness::ALIGN;
use crate::error::JudgeError;
use crate::life::Life;
use crate::source::ArenaBuffer;

/// Runs calls in a new process.
pub trait Rerun: std::fmt::Debug {
    /// Bytes of each scratch buffer that a call needs.
    fn scratch(&self) -> Vec<u64>;
    /// Starts a process that nothing has run in, runs the calls in it, once each, and ends it.
    fn run(
        &self,
        calls: &[Call],
        inputs: &Arena,
        outputs: &Arena,
        timeout: Duration,
    ) -> Result<(), RunnerError>;
}

/// The real one.
#[derive(Clone, Debug)]
pub struct FreshRunner {
    /// How runners are started.
    pub config: RunnerConfig,
    /// What is packaged.
    pub artefact: Artefact,
    /// How it is launched.
    pub plan: Plan,
}

impl Rerun for FreshRunner {
    fn scratch(&self) -> Vec<u64> {
        self.plan.scratch.iter().map(|s| s.numel * s.dtype.size()).collect()
    }

    fn run(
        &self,
        calls: &[Call],
        inputs: &Arena,
        outputs: &Arena,
        timeout: Duration,
    ) -> Result<(), RunnerError> {
        let mut runner = Runner::spawn(&self.config)?;
        runner.load(&self.artefact, &self.plan, inputs, outputs)?;
        // It stands still afterwards, and dies with its handle.
        runner.batch(calls, timeout).map(|_| ())
    }
}

/// Outputs of the calls of one batch, computed again.
#[derive(Debug)]
pub(crate) struct Again<'a> {
    rerun: &'a dyn Rerun,
    metas: Vec<TensorMeta>,
    arena: Arena,
    scratch: Vec<usize>,
    /// The slot of outputs of each call.
    places: Vec<usize>,
    poison: Vec<u8>,
}

/// Bytes that are poisoned at once.
const PIECE: usize = 256 << 10;

impl<'a> Again<'a> {
    /// Room for the outputs of a batch.
    pub(crate) fn new(rerun: &'a dyn Rerun, region: &Region, life: &Life) -> Result<Self, JudgeError> {
        let metas: Vec<TensorMeta> = region.output_metas().into_iter().cloned().collect();
        let slot: Vec<u64> = metas.iter().map(|meta| meta.extent() * meta.dtype.size()).collect();
        let mut bytes: Vec<u64> = (0..life.calls).flat_map(|_| slot.clone()).collect();
        let first = bytes.len();
        bytes.extend(rerun.scratch());
        let specs: Vec<BufferSpec> =
            bytes.iter().map(|bytes| BufferSpec { bytes: *bytes, align: ALIGN }).collect();
        let mut poison = vec![0; PIECE];
        let mut stream = life.seed.stream("poison");
        poison.chunks_mut(8).for_each(|bytes| bytes.copy_from_slice(&stream.next_u64().to_le_bytes()));
        let arena = Arena::packed("again", &specs)?;
        Ok(Self { rerun, metas, arena, scratch: (first..specs.len()).collect(), places: vec![], poison })
    }

    /// Computes the calls of a batch again, in another order and into other places.
    pub(crate) fn run(
        &mut self,
        content: &Content<'_>,
        life: &Life,
        batch: usize,
        timeout: Duration,
    ) -> Result<Result<(), RunnerError>, JudgeError> {
        self.poison()?;
        let (order, other) = (life.order(batch), life.other_order(batch));
        // The call at `other[i]` comes i-th and writes to place i; the places differ from batch to batch.
        let outputs = self.metas.len();
        let calls: Vec<Call> = other
            .iter()
            .enumerate()
            .map(|(place, call)| Call {
                inputs: content.buffers(order[*call]),
                outputs: (place * outputs..(place + 1) * outputs).collect(),
                scratch: self.scratch.clone(),
            })
            .collect();
        self.places = vec![0; other.len()];
        other.iter().enumerate().for_each(|(place, call)| self.places[*call] = place);
        match self.rerun.run(&calls, content.arena(), &self.arena, timeout) {
            Err(
                error @ (RunnerError::Spawn { .. } | RunnerError::Sandbox { .. } | RunnerError::Io { .. }),
            ) => Err(JudgeError::Runner(error)),
            ran => Ok(ran),
        }
    }

    /// An output of a call, counted as in [`Life::order`].
    pub(crate) fn output(&self, call: usize, output: usize) -> (ArenaBuffer<'_>, &TensorMeta) {
        let buffer = self.places[call] * self.metas.len() + output;
        (ArenaBuffer { arena: &self.arena, buffer }, &self.metas[output])
    }

    /// What is never written must not look like the result that is never written elsewhere.
    fn poison(&self) -> Result<(), JudgeError> {
        for (buffer, span) in self.arena.spans().iter().enumerate() {
            for from in (0..span.bytes).step_by(PIECE) {
                let count = (span.bytes - from).min(PIECE as u64) as usize;
                self.arena.write(buffer, from, &self.poison[..count])?;
            }
        }
        Ok(())
    }
}
