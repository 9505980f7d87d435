//! Is a candidate correct: plan, build, admission, and two batches in a confined runner.
//!
//! Cheap tests first. One call on one set finds most broken kernels; then every set in a secret
//! order into poisoned outputs, every output checked against the truth; then all of it again over
//! another poison, which must give the same bits; then whatever shows that something is kept between
//! calls ([`crate::stale`]). Between a batch and its checks the child stands
//! still, so nothing can write late.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use autokernel_core::contract::Contract;
use autokernel_core::graph::TensorMeta;
use autokernel_core::kernel_file::{KernelFile, Language, Params};
use autokernel_core::plan::{Device, Plan, plan};
use autokernel_core::region::Region;
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_worker::admission::admit;
use autokernel_worker::memory::{Arena, BufferSpec, Pattern};
use autokernel_worker::runner::{Batch, Call, Runner, RunnerConfig, RunnerError};
use autokernel_worker::toolchain::{Artefact, BuildError, BuildLimits, Toolchain};
use serde::{Deserialize, Serialize};

use crate::controls::Controls;
use crate::error::JudgeError;
use crate::fault::Fault;
use crate::lock::{LOCK_PATIENCE, MachineLock};
use crate::metrics::{Comparer, Digest, Metrics, digest};
use crate::screen::micros;
use crate::secret::{Seed, Stream};
use crate::source::{ArenaBuffer, Tensor};
use crate::stale::stale;
use crate::truth::{RawSet, Truth};

/// Alignment of every buffer: torch's allocator gives 64 bytes on CPUs.
pub(crate) const ALIGN: u64 = 64;

/// The watchdog of one call: this, or fifty times the baseline, whichever is longer.
const CALL_SECONDS: f64 = 2.0;

/// A task as the judge needs it: its truth, and its inputs in sealed memory.
#[derive(Debug)]
pub struct JudgedTask {
    /// The region.
    pub region: Region,
    /// Truth, baseline's error, contract.
    pub truth: Truth,
    /// Time of one call of the baseline, microseconds; scales the watchdog.
    pub baseline_us: f64,
    /// Below this time per call a candidate goes to audit; see "limit" in the design.
    pub floor_us: Option<f64>,
    /// What its wrong forms came to, where they were tried.
    pub controls: Option<Controls>,
    inputs: Arena,
    buffers: Vec<Vec<usize>>,
}

impl JudgedTask {
    /// Reads the truth once and stages the inputs of all sets. Nobody can write to them afterwards,
    /// so one copy serves every candidate of the task.
    pub fn stage(
        region: Region,
        contract: Contract,
        sets: Vec<RawSet>,
        baseline_us: f64,
        floor_us: Option<f64>,
    ) -> Result<Self, JudgeError> {
        let _beside = MachineLock::work(LOCK_PATIENCE)?;
        let truth = Truth::prepare(contract, sets)?;
        let (inputs, buffers) = stage_inputs(&region, &truth)?;
        Ok(Self { region, truth, baseline_us, floor_us, controls: None, inputs, buffers })
    }

    pub(crate) fn timeout(&self, calls: usize) -> Duration {
        let call = (50e-6 * self.baseline_us).max(0.0);
        Duration::from_secs_f64(CALL_SECONDS.max(call) + call * calls.saturating_sub(1) as f64)
    }
}

/// One buffer for each distinct file: constant inputs are the same in most sets.
///
/// A package calls a kernel with tensors that begin anywhere (a slice of a larger one), so the inputs of sets that
/// are never timed stand at addresses that are aligned to their elements and, in turns, to little more. Outputs
/// are the package's own allocations and always aligned.
fn stage_inputs(region: &Region, truth: &Truth) -> Result<(Arena, Vec<Vec<usize>>), JudgeError> {
    let mut known: HashMap<&Path, usize> = HashMap::new();
    let (mut specs, mut files, mut buffers) = (vec![], vec![], vec![]);
    for (s, set) in truth.all().iter().enumerate() {
        if set.inputs.len() != region.inputs.len() {
            return Err(JudgeError::Inputs { set: s, got: set.inputs.len(), expected: region.inputs.len() });
        }
        let mut row = vec![];
        for (i, (tensor, input)) in set.inputs.iter().zip(&region.inputs).enumerate() {
            let meta = tensor.meta();
            if meta != input.meta {
                return Err(JudgeError::Layout { set: s, input: i });
            }
            row.push(*known.entry(&tensor.file).or_insert_with(|| {
                let align = if s < truth.sets().len() { ALIGN } else { meta.dtype.size() << (2 * (i % 2)) };
                specs.push(BufferSpec { bytes: meta.extent() * meta.dtype.size(), align });
                files.push(tensor.file.as_path());
                specs.len() - 1
            }));
        }
        buffers.push(row);
    }
    let mut arena = Arena::create("inputs", &specs)?;
    for (buffer, (path, spec)) in files.into_iter().zip(&specs).enumerate() {
        copy_in(&arena, buffer, path, spec.bytes)?;
    }
    arena.seal_read_only()?;
    Ok((arena, buffers))
}

pub(crate) fn copy_in(arena: &Arena, buffer: usize, path: &Path, expected: u64) -> Result<(), JudgeError> {
    let failed = |source| crate::truth::TruthError::Io { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(failed)?;
    let got = file.metadata().map_err(failed)?.len();
    if got != expected {
        return Err(JudgeError::Size { path: path.to_owned(), got, expected });
    }
    let (mut at, mut chunk) = (0, vec![0; (1 << 20).min(expected as usize)]);
    while at < expected {
        let count = (expected - at).min(chunk.len() as u64) as usize;
        file.read_exact(&mut chunk[..count]).map_err(failed)?;
        arena.write(buffer, at, &chunk[..count])?;
        at += count as u64;
    }
    Ok(())
}

/// What a machine needs to judge kernels for its CPU.
#[derive(Clone, Debug)]
pub struct Judge {
    /// The compiler.
    pub toolchain: Toolchain,
    /// How runners are started.
    pub runner: RunnerConfig,
    /// What expressions of kernel files may ask about.
    pub device: Device,
    /// Limits of one build.
    pub build: BuildLimits,
}

/// How a candidate was checked: goes into the evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checked {
    /// Hash of the artefact, fixed before the seed was drawn.
    pub artefact: String,
    /// Seed of all orders and poisons.
    pub seed: Seed,
    /// Families in the oracle's order.
    pub families: Vec<String>,
    /// Worst metrics of each output.
    pub worst: Vec<Metrics>,
    /// How well the sets tell wrong from right, where that was tried.
    #[serde(default)]
    pub controls: Option<Controls>,
}

/// Why the way ends here: the candidate's fault, or ours.
#[derive(Debug)]
pub(crate) enum Stop {
    Rejected(Stage, String),
    Failed(JudgeError),
}

impl<E: Into<JudgeError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Stop {
    /// A rejection is an answer, a failure an error.
    pub(crate) fn verdict(self) -> Result<Verdict, JudgeError> {
        match self {
            Self::Rejected(stage, reason) => Ok(Verdict::Rejected { stage, reason }),
            Self::Failed(error) => Err(error),
        }
    }

    fn wrong(stage: Stage, fault: &Fault) -> Self {
        Self::Rejected(stage, fault.to_string())
    }
}

/// A candidate that passed every check, still in its runner.
pub(crate) struct Verified<'a> {
    pub(crate) artefact: Artefact,
    pub(crate) plan: Plan,
    pub(crate) session: Session<'a>,
    pub(crate) checked: Checked,
    pub(crate) stream: Stream,
    /// Hash of each output of each set.
    pub(crate) digests: Vec<Vec<Digest>>,
    /// Time of one call in the last batch, microseconds.
    pub(crate) estimate_us: f64,
}

impl Judge {
    /// Builds a candidate and checks it on every set; nothing is timed.
    pub fn check(
        &self,
        task: &JudgedTask,
        file: &KernelFile,
        params: &Params,
    ) -> Result<Result<Checked, Verdict>, JudgeError> {
        match self.verify(task, file, params) {
            Ok(verified) => Ok(Ok(verified.checked)),
            Err(stop) => stop.verdict().map(Err),
        }
    }

    pub(crate) fn verify<'a>(
        &self,
        task: &'a JudgedTask,
        file: &KernelFile,
        params: &Params,
    ) -> Result<Verified<'a>, Stop> {
        let plan = self.plan(task, file, params)?;
        let _beside = MachineLock::work(LOCK_PATIENCE)?;
        let artefact = self.build(file, params)?;
        let launches = plan.prepare.iter().map(|step| &step.launch).chain(&plan.launches);
        let entries: Vec<&str> = launches.map(|launch| launch.entry.as_str()).collect();
        admit(&artefact.bytes, &entries).map_err(|e| Stop::Rejected(Stage::Admission, e.to_string()))?;
        // Drawn only now, so nothing in the artefact can depend on it.
        let seed = Seed::from_os()?;
        let mut stream = seed.stream(&artefact.id);
        let mut session = Session::start(self, task, &artefact, &plan)?;
        let sets = task.truth.all().len();
        let mut comparer = Comparer::new(&task.truth);

        session.poison(Pattern::Nan)?;
        let first = (stream.below(sets), stream.below(sets));
        session.checked_batch(&[first])?;
        session.compare(first, &mut Comparer::new(&task.truth), Stage::Correctness)?;

        session.poison(Pattern::Nan)?;
        let calls: Vec<_> = stream.order(sets).into_iter().zip(stream.order(sets)).collect();
        session.checked_batch(&calls)?;
        let mut digests = vec![vec![]; sets];
        for call in &calls {
            digests[call.0] = session.compare(*call, &mut comparer, Stage::Correctness)?;
        }

        session.poison(Pattern::Random(stream.next_u64()))?;
        let again: Vec<_> = stream.order(sets).into_iter().zip(stream.order(sets)).collect();
        let batch = session.checked_batch(&again)?;
        for call in &again {
            session.compare_again(*call, &digests[call.0], &mut comparer, Stage::Determinism)?;
        }
        stale(self, task, &artefact, &plan, &digests, &mut stream)?;
        let families = task.truth.all().iter().map(|set| set.family.clone()).collect();
        let checked = Checked {
            artefact: artefact.id.clone(),
            seed,
            families,
            worst: comparer.worst().to_vec(),
            controls: task.controls.clone(),
        };
        let estimate_us = micros(batch.wall) / sets as f64;
        Ok(Verified { artefact, plan, session, checked, stream, digests, estimate_us })
    }

    fn plan(&self, task: &JudgedTask, file: &KernelFile, params: &Params) -> Result<Plan, Stop> {
        let refused = |reason: String| Stop::Rejected(Stage::Parse, reason);
        if file.language != Language::Cpp {
            return Err(refused(format!("a kernel in {} can't run on this device", file.language.name())));
        }
        plan(file, &task.region, params, &self.device).map_err(|e| refused(e.to_string()))
    }

    fn build(&self, file: &KernelFile, params: &Params) -> Result<Artefact, Stop> {
        self.toolchain.build(file, params, &self.build).map_err(|error| match error {
            BuildError::Sandbox { .. } | BuildError::Io { .. } => Stop::Failed(JudgeError::Builder(error)),
            BuildError::Crashed { ref diagnostics, .. } => {
                Stop::Rejected(Stage::Build, format!("{error}\n{diagnostics}"))
            }
            other => Stop::Rejected(Stage::Build, other.to_string()),
        })
    }
}

/// One candidate's life in a runner. A call is a set of inputs and a slot of outputs.
pub(crate) struct Session<'a> {
    task: &'a JudgedTask,
    runner: Runner,
    arena: Arena,
    metas: Vec<TensorMeta>,
    scratch: Vec<usize>,
    buffers: usize,
}

impl<'a> Session<'a> {
    fn start(judge: &Judge, task: &'a JudgedTask, artefact: &Artefact, plan: &Plan) -> Result<Self, Stop> {
        let metas: Vec<TensorMeta> = task.region.output_metas().into_iter().cloned().collect();
        let sets = task.truth.all().len();
        let slot =
            metas.iter().map(|meta| BufferSpec { bytes: meta.extent() * meta.dtype.size(), align: ALIGN });
        let mut specs: Vec<BufferSpec> = (0..sets).flat_map(|_| slot.clone()).collect();
        let first = specs.len();
        specs.extend(
            plan.scratch.iter().map(|s| BufferSpec { bytes: s.numel * s.dtype.size(), align: ALIGN }),
        );
        let scratch = (first..specs.len()).collect();
        let arena = Arena::create("outputs", &specs)?;
        let mut runner = Runner::spawn(&judge.runner).map_err(|e| Stop::Failed(JudgeError::Runner(e)))?;
        runner.load(artefact, plan, &task.inputs, &arena).map_err(|e| blame(Stage::Load, e))?;
        Ok(Self { task, runner, arena, metas, scratch, buffers: specs.len() })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.runner.pid()
    }

    /// Overwrites outputs and scratch, so that nothing of an earlier call can pass for a result.
    pub(crate) fn poison(&self, pattern: Pattern) -> Result<(), Stop> {
        (0..self.buffers).try_for_each(|buffer| self.poison_one(buffer, pattern))
    }

    /// Overwrites scratch, so that no call can tell what happened before its batch.
    pub(crate) fn poison_scratch(&self, pattern: Pattern) -> Result<(), Stop> {
        self.scratch.iter().try_for_each(|buffer| self.poison_one(*buffer, pattern))
    }

    fn poison_one(&self, buffer: usize, pattern: Pattern) -> Result<(), Stop> {
        let pattern = match pattern {
            Pattern::Random(seed) => Pattern::Random(seed.wrapping_add(buffer as u64)),
            other => other,
        };
        Ok(self.arena.poison(buffer, pattern)?)
    }

    /// Runs the calls and looks at what a batch says of itself. The child is frozen afterwards.
    pub(crate) fn batch(&mut self, calls: &[(usize, usize)]) -> Result<Batch, Stop> {
        let calls: Vec<Call> = calls.iter().map(|(set, slot)| self.call(*set, *slot)).collect();
        let batch =
            self.runner.batch(&calls, self.task.timeout(calls.len())).map_err(|e| blame(Stage::Run, e))?;
        if !batch.mxcsr_ok {
            return Err(Stop::Rejected(
                Stage::Run,
                "the kernel changed the floating-point control word".to_owned(),
            ));
        }
        if !batch.threads_ok {
            return Err(Stop::Rejected(Stage::Run, "more threads live than the kernel was given".to_owned()));
        }
        Ok(batch)
    }

    /// A batch after which the guard zones are looked at, too.
    pub(crate) fn checked_batch(&mut self, calls: &[(usize, usize)]) -> Result<Batch, Stop> {
        let batch = self.batch(calls)?;
        if self.arena.guards_intact()? {
            return Ok(batch);
        }
        Err(Stop::Rejected(Stage::Memory, "the kernel wrote outside its outputs and scratch".to_owned()))
    }

    fn call(&self, set: usize, slot: usize) -> Call {
        let outputs = self.metas.len();
        Call {
            inputs: self.task.buffers[set].clone(),
            outputs: (slot * outputs..(slot + 1) * outputs).collect(),
            scratch: self.scratch.clone(),
        }
    }

    /// Compares every output of a call with the truth.
    pub(crate) fn compare(
        &self,
        call: (usize, usize),
        comparer: &mut Comparer<'_>,
        stage: Stage,
    ) -> Result<Vec<Digest>, Stop> {
        let (set, slot) = call;
        let mut digests = Vec::with_capacity(self.metas.len());
        for (output, meta) in self.metas.iter().enumerate() {
            let source = ArenaBuffer { arena: &self.arena, buffer: slot * self.metas.len() + output };
            let comparison = comparer.compare(set, output, Tensor { source: &source, meta })?;
            if let Some(fault) = comparison.fault {
                return Err(Stop::wrong(stage, &fault));
            }
            digests.push(comparison.digest);
        }
        Ok(digests)
    }

    /// Compares with outputs that were verified in full: bits where the contract wants them equal,
    /// the truth again where it doesn't.
    pub(crate) fn compare_again(
        &self,
        call: (usize, usize),
        verified: &[Digest],
        comparer: &mut Comparer<'_>,
        stage: Stage,
    ) -> Result<(), Stop> {
        if !self.task.truth.contract().deterministic {
            return self.compare(call, comparer, stage).map(|_| ());
        }
        let (set, slot) = call;
        for (output, meta) in self.metas.iter().enumerate() {
            let source = ArenaBuffer { arena: &self.arena, buffer: slot * self.metas.len() + output };
            if digest(Tensor { source: &source, meta })? != verified[output] {
                let family = &self.task.truth.all()[set].family;
                let reason = format!(
                    "output {output} on inputs `{family}`: equal inputs gave unequal bits \
                     (a race, or memory that is read before it is written)"
                );
                return Err(Stop::Rejected(stage, reason));
            }
        }
        Ok(())
    }
}

/// Whose fault an error of a running candidate is. It shares its process with our runner, so a broken
/// protocol is its doing; only a failed system call is ours.
pub(crate) fn blame(stage: Stage, error: RunnerError) -> Stop {
    match error {
        RunnerError::Spawn { .. } | RunnerError::Sandbox { .. } | RunnerError::Io { .. } => {
            Stop::Failed(JudgeError::Runner(error))
        }
        RunnerError::Crashed { signal: 11 | 7 } => Stop::Rejected(
            stage,
            format!("{error} (memory that is not the kernel's, or a write to an input)"),
        ),
        RunnerError::Crashed { signal: 31 } => {
            Stop::Rejected(stage, format!("{error} (a forbidden system call)"))
        }
        other => Stop::Rejected(stage, other.to_string()),
    }
}
