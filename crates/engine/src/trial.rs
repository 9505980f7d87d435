//! One region before the judge: its inputs and truth from the oracle, its baselines, its verdict.

use std::path::Path;
use std::time::Duration;

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::{Plan, plan};
use autokernel_core::region::Region;
use autokernel_core::stats::Schedule;
use autokernel_core::task::{CopyRate, Task};
use autokernel_judge::{
    Checked, Contest, Contestant, Controls, Examination, Facts, FreshRunner, Judge, JudgeError, JudgedTask,
    PATIENCE, Patience, Protocol, RawSet, Record, Screened, Staging, compare,
};
use autokernel_worker::runner::RunnerConfig;
use autokernel_worker::toolchain::{Artefact, BuildLimits};
use serde::Deserialize;
use serde_json::json;

use crate::contestants::{Shared, Subject, environment, prepare};
use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::package::{Winner, assemble};
use crate::session::{Oracle, Tools, beside};

/// The folder of a task's inputs, the only one of the task that a child with a candidate may read.
/// The bridge writes truth and baseline outputs beside it.
pub(crate) const INPUTS: &str = "inputs";

/// Most input sets of a task, beside those of special values: all families once for small regions.
const SETS: u64 = 17;

/// Input sets of a task whose tensors take more than [`LARGE_BYTES`].
const SETS_OF_LARGE: u64 = 8;

/// Bytes of a set, truth, baseline and noise included, from which on fewer sets have to do.
const LARGE_BYTES: u64 = 16 << 20;

/// Bytes that the input sets of one task may take on disk, truth, baseline and noise included.
const POOL_BYTES: u64 = 2 << 30;

/// Longest wait for a runner to say that it is confined.
const RUNNER_START: Duration = Duration::from_secs(20);

/// The judge for this machine.
pub(crate) fn judge(tools: &Tools) -> Judge {
    Judge {
        toolchain: tools.toolchain.clone(),
        runner: RunnerConfig {
            gomp: tools.interpreter.gomp.clone(),
            threads: tools.threads,
            timeout: RUNNER_START,
        },
        device: tools.plan_device(),
        build: BuildLimits::default(),
    }
}

#[derive(Deserialize)]
struct Sets {
    sets: Vec<RawSet>,
    #[serde(default)]
    dropped: Vec<Dropped>,
}

#[derive(Deserialize)]
struct Dropped {
    family: String,
    reason: String,
}

/// Stages a task on which kernels are about to be judged: its inputs must tell wrong forms of the region from it.
pub(crate) fn stage(
    oracle: &mut Oracle,
    tools: &Tools,
    task: &Task,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<JudgedTask, EngineError> {
    staged(random_seed()?, true, oracle, tools, task, folder, observer)
}

/// [`stage`] under a seed that was drawn before, so that it can be logged.
pub(crate) fn stage_under(
    seed: u64,
    oracle: &mut Oracle,
    tools: &Tools,
    task: &Task,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<JudgedTask, EngineError> {
    staged(seed, true, oracle, tools, task, folder, observer)
}

/// Stages a task whose controls were run when the claim was made that is now repeated.
pub(crate) fn stage_again(
    oracle: &mut Oracle,
    tools: &Tools,
    task: &Task,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<JudgedTask, EngineError> {
    staged(random_seed()?, false, oracle, tools, task, folder, observer)
}

/// Asks the oracle for inputs and truth under a seed and stages them. The folder must live as long as
/// the task is judged.
fn staged(
    seed: u64,
    examined: bool,
    oracle: &mut Oracle,
    tools: &Tools,
    task: &Task,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<JudgedTask, EngineError> {
    let occurrence = task
        .occurrences
        .first()
        .ok_or_else(|| EngineError::Package("a task without a place in the model".to_owned()))?;
    let each =
        task.region.bytes() + 3 * task.region.output_metas().iter().map(|meta| meta.numel() * 8).sum::<u64>();
    let most = if each > LARGE_BYTES { SETS_OF_LARGE } else { SETS };
    let sets = (POOL_BYTES / each.max(1)).clamp(3, most);
    let mut body =
        json!({ "region": task.region, "occurrence": occurrence, "sets": sets, "seed": seed, "dir": folder });
    let reply: Sets = serde_json::from_value(oracle.ask(tools, "region_inputs", body.clone())?)?;
    for dropped in reply.dropped {
        let what = format!(
            "region {}: inputs `{}` are not used: {}",
            task.region.id, dropped.family, dropped.reason
        );
        observer.observe(&Event::Note { what });
    }
    let written = task.region.output_metas().iter().map(|meta| meta.bytes()).sum();
    let floor = floor_us(written, &tools.device.copy);
    let of = |sets: Vec<RawSet>| {
        let (region, contract) = (task.region.clone(), task.contract.clone());
        JudgedTask::stage(region, contract, sets, task.eager_us, Some(floor))
    };
    let mut judged = of(reply.sets.clone())?;
    if examined {
        let ask = &mut |op: &'static str, body| oracle.ask(tools, op, body);
        let mut examination = Examination::begin(&task.region, &folder.join("mutants"), seed, ask)?;
        examination.run(&judged.truth, ask)?;
        let mut controls = examination.result();
        if !controls.fit() {
            // The usual families do not show what is wrong with some: perhaps the others do.
            body["other_than"] = reply.sets.iter().map(|set| set.family.as_str()).collect();
            let more: Sets = serde_json::from_value(ask("region_inputs", body)?)?;
            let added = more.sets.iter().map(|set| set.family.clone()).collect();
            judged = of(reply.sets.into_iter().chain(more.sets).collect())?;
            examination.run(&judged.truth, ask)?;
            controls = Controls { added, ..examination.result() };
        }
        judged.controls = Some(controls.sufficient()?);
    }
    for unfit in judged.truth.unfit() {
        let what =
            format!("region {}: inputs `{}` are not used: {}", task.region.id, unfit.family, unfit.reason);
        observer.observe(&Event::Note { what });
    }
    let outputs = judged.truth.weak_outputs();
    if outputs.is_empty() { Ok(judged) } else { Err(JudgeError::Weak { outputs }.into()) }
}

/// Below this no kernel for the region can be honest: every byte of the outputs at five times the best
/// rate that this machine showed at any footprint. Coarse on purpose: copy rates of single passes vary,
/// and of an input a region may read only a part.
fn floor_us(written: u64, rates: &[CopyRate]) -> f64 {
    let best = rates.iter().map(|rate| rate.bytes_per_us).fold(0.0, f64::max);
    if best > 0.0 { written as f64 / (best * 5.0) } else { 0.0 }
}

/// A seed of the operating system's for the oracle.
pub(crate) fn random_seed() -> Result<u64, EngineError> {
    // Python's generators take 63 bits everywhere.
    Ok(getrandom::u64().map_err(|error| EngineError::Io(std::io::Error::other(error)))? >> 1)
}

/// The baselines of regions. Their zygotes serve one region after the other.
pub(crate) struct Baselines {
    eager: Option<Shared>,
    inductor: Option<Shared>,
}

impl Baselines {
    /// Nothing is started yet.
    pub(crate) const fn new() -> Self {
        Self { eager: None, inductor: None }
    }

    /// Prepares both for a region; says which can't be had, since without it a verdict would rest on
    /// less than PyTorch offers.
    pub(crate) fn prepare(
        &mut self,
        tools: &Tools,
        task: &Task,
        scratch: &Path,
        observer: &mut dyn Observer,
    ) -> Vec<&'static str> {
        let mut missing = vec![];
        for (how, slot) in [("eager", &mut self.eager), ("inductor", &mut self.inductor)] {
            let subject = Subject::Baseline { region: &task.region, how };
            let again =
                slot.take().filter(|zygote| zygote.alive() && zygote.prepare(tools, &subject).is_ok());
            // A zygote that fails at its next subject may be worn out: a fresh one decides.
            let ready = match again {
                Some(zygote) => Ok(zygote),
                None => prepare(tools, &subject, scratch).map(|prepared| prepared.zygote),
            };
            match ready {
                Ok(zygote) => *slot = Some(zygote),
                Err(error) => {
                    missing.push(how);
                    let what = format!("region {}: no baseline `{how}`: {error}", task.region.id);
                    observer.observe(&Event::Note { what });
                }
            }
        }
        missing
    }

    fn contestants(&self) -> Vec<Contestant> {
        let both = [("eager", &self.eager), ("inductor", &self.inductor)];
        both.into_iter().filter_map(|(name, zygote)| Some(zygote.as_ref()?.contestant(name, false))).collect()
    }
}

/// A verdict with the evidence that it rests on, as it is stored.
pub(crate) type Tried = Record;

/// On which terms a candidate is compared.
pub(crate) struct Terms<'a> {
    /// When the pairs are looked at.
    pub(crate) schedule: Schedule,
    /// Candidates in line for its place, itself included.
    pub(crate) family: usize,
    /// Is told when the machine is too busy to measure.
    pub(crate) observer: &'a mut dyn Observer,
}

/// What is compared with the baselines: the operator of a package.
pub(crate) struct Entrant<'a> {
    pub(crate) package: &'a Path,
    /// The kernel in it, for computing the timed calls again.
    pub(crate) kernel: &'a FreshRunner,
    /// How the bare kernel was checked, where it was.
    pub(crate) checked: Option<Checked>,
}

/// Packages one kernel alone and compares the packaged operator with the best baseline. The artefact
/// is the very one that was checked in the runner.
pub(crate) fn verdict(
    tools: &Tools,
    judged: &JudgedTask,
    baselines: &Baselines,
    winner: &Winner,
    checked: &Checked,
    places: &Places<'_>,
    terms: Terms<'_>,
) -> Result<Tried, EngineError> {
    let folder = tempfile::Builder::new().prefix("verdict-").tempdir_in(places.scratch)?;
    // A package's folder must be a name that Python can import.
    let package = folder.path().join("package");
    let (torch, features) = (&tools.interpreter.torch, &tools.device.features);
    assemble(&package, "ours+eager", torch, features, std::slice::from_ref(winner), &[])?;
    let kernel = fresh_runner(tools, winner.artefact.clone(), winner.plan.clone(), winner.threads);
    let entrant = Entrant { package: &package, kernel: &kernel, checked: Some(checked.clone()) };
    compare_packaged(tools, judged, baselines, entrant, places, terms)
}

/// A kernel as it runs in a process of its own, with the threads that a package gives it.
pub(crate) fn fresh_runner(tools: &Tools, artefact: Artefact, plan: Plan, threads: usize) -> FreshRunner {
    let config = judge(tools).runner;
    FreshRunner { config: RunnerConfig { threads: threads.min(config.threads), ..config }, artefact, plan }
}

/// The folders of one task.
pub(crate) struct Places<'a> {
    /// Inputs, truth and baseline outputs of the task, as [`stage`] was told.
    pub(crate) task: &'a Path,
    /// Everything of the command.
    pub(crate) scratch: &'a Path,
}

/// Compares the operator of a package with the best baseline, as PyTorch calls it.
pub(crate) fn compare_packaged(
    tools: &Tools,
    judged: &JudgedTask,
    baselines: &Baselines,
    entrant: Entrant<'_>,
    places: &Places<'_>,
    terms: Terms<'_>,
) -> Result<Tried, EngineError> {
    let Entrant { package, kernel, checked } = entrant;
    let inputs = places.task.join(INPUTS);
    let subject = Subject::Packaged { region: &judged.region, package, inputs: &inputs };
    let prepared = prepare(tools, &subject, places.scratch)?;
    let mut candidate = prepared.zygote.contestant("ours", true);
    let mut opponents = baselines.contestants();
    let staging = Staging::Slots { region: &judged.region, rerun: kernel };
    let contest = Contest { truth: &judged.truth, staging, protocol: Protocol::default() };
    let environment = environment(tools);
    let artefacts = vec![kernel.artefact.id.clone()];
    let facts = Facts { subject: judged.region.id.0.clone(), artefacts, environment, checked };
    let Terms { schedule, family, observer } = terms;
    let mut say = |what: &str| observer.observe(&Event::Note { what: what.to_owned() });
    let mut patience = Patience::new(PATIENCE, &mut say);
    let evidence =
        compare(&contest, &mut opponents, &mut candidate, (schedule, family), facts, &mut patience)?;
    Ok(Record::new(evidence)?)
}

/// What a screened candidate brings into a package.
pub(crate) fn winner_of(
    region: &Region,
    file: &KernelFile,
    params: &Params,
    screened: &Screened,
    threads: usize,
) -> Winner {
    Winner {
        region: region.clone(),
        file: file.clone(),
        params: params.clone(),
        plan: screened.plan.clone(),
        artefact: screened.artefact.clone(),
        threads,
    }
}

/// Builds the winner of an earlier life of a run again. `None` unless the builder makes the very
/// bytes that were checked and measured then.
pub(crate) fn rebuild(
    judge: &Judge,
    region: &Region,
    file: &KernelFile,
    params: &Params,
    id: &str,
) -> Option<Winner> {
    let plan = plan(file, region, params, &judge.device).ok()?;
    let _beside = beside().ok()?;
    let artefact = judge.toolchain.build(file, params, &judge.build).ok().filter(|built| built.id == id)?;
    Some(Winner {
        region: region.clone(),
        file: file.clone(),
        params: params.clone(),
        plan,
        artefact,
        threads: judge.runner.threads,
    })
}
