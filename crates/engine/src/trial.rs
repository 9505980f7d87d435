//! One region before the judge: its inputs and truth from the oracle, its baselines, its verdict.

use std::path::{Path, PathBuf};
use std::time::Duration;

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::plan;
use autokernel_core::region::Region;
use autokernel_core::stats::Schedule;
use autokernel_core::task::{CopyRate, Task};
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_judge::{
    Contest, Contestant, Decided, Evidence, Facts, Judge, JudgedTask, Protocol, RawSet, Staging, compare,
    decide,
};
use autokernel_worker::admission::admit;
use autokernel_worker::runner::RunnerConfig;
use autokernel_worker::toolchain::{BuildError, BuildLimits};
use serde::Deserialize;
use serde_json::json;

use crate::contestants::{Shared, Subject, environment, prepare};
use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::package::{Winner, assemble};
use crate::session::{Oracle, Tools};

/// Most input sets of a task.
const SETS: usize = 10;

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

/// Asks the oracle for inputs and truth under a new seed and stages them. The folder must live as
/// long as the task is judged.
pub(crate) fn stage(
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
    let sets = (POOL_BYTES / each.max(1)).clamp(3, SETS as u64);
    let seed = random_seed()?;
    let body =
        json!({ "region": task.region, "occurrence": occurrence, "sets": sets, "seed": seed, "dir": folder });
    let reply: Sets = serde_json::from_value(oracle.ask(tools, "region_inputs", body)?)?;
    for dropped in reply.dropped {
        let what = format!(
            "region {}: inputs `{}` are not used: {}",
            task.region.id, dropped.family, dropped.reason
        );
        observer.observe(&Event::Note { what });
    }
    let floor = floor_us(task.region.bytes(), &tools.device.copy);
    let (region, contract) = (task.region.clone(), task.contract.clone());
    let judged = JudgedTask::stage(region, contract, reply.sets, task.eager_us, Some(floor))?;
    for unfit in judged.truth.unfit() {
        let what =
            format!("region {}: inputs `{}` are not used: {}", task.region.id, unfit.family, unfit.reason);
        observer.observe(&Event::Note { what });
    }
    Ok(judged)
}

/// Below this no kernel for the region can be honest: every byte at five times the best rate that
/// this machine showed at any footprint. Coarse on purpose; copy rates of single passes vary.
fn floor_us(bytes: u64, rates: &[CopyRate]) -> f64 {
    let best = rates.iter().map(|rate| rate.bytes_per_us).fold(0.0, f64::max);
    if best > 0.0 { bytes as f64 / (best * 5.0) } else { 0.0 }
}

fn random_seed() -> Result<u64, EngineError> {
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

    /// Prepares both for a region. One that can't be prepared is told and left out.
    pub(crate) fn prepare(
        &mut self,
        tools: &Tools,
        task: &Task,
        scratch: &Path,
        observer: &mut dyn Observer,
    ) {
        for (how, slot) in [("eager", &mut self.eager), ("inductor", &mut self.inductor)] {
            let subject = Subject::Baseline { region: &task.region, how };
            let ready = match slot.as_ref().filter(|zygote| zygote.alive()) {
                Some(zygote) => zygote.prepare(tools, &subject),
                None => prepare(tools, &subject, scratch).map(|prepared| *slot = Some(prepared.zygote)),
            };
            if let Err(error) = ready {
                observer.observe(&Event::Note {
                    what: format!("region {}: no baseline `{how}`: {error}", task.region.id),
                });
                *slot = None;
            }
        }
    }

    fn contestants(&self) -> Vec<Contestant> {
        let both = [("eager", &self.eager), ("inductor", &self.inductor)];
        both.into_iter().filter_map(|(name, zygote)| Some(zygote.as_ref()?.contestant(name, false))).collect()
    }
}

/// A verdict with its evidence and, when the kernel may be used, what goes into the package.
#[derive(Debug)]
pub(crate) struct Tried {
    pub(crate) decided: Decided,
    pub(crate) evidence: Evidence,
    pub(crate) winner: Winner,
}

/// Builds a candidate again, packages it alone, and compares the packaged operator with the best
/// baseline.
pub(crate) fn verdict(
    tools: &Tools,
    judge: &Judge,
    judged: &JudgedTask,
    baselines: &Baselines,
    file: &KernelFile,
    params: &Params,
    scratch: &Path,
) -> Result<Result<Tried, Verdict>, EngineError> {
    let winner = match make_winner(judge, &judged.region, file, params)? {
        Ok(winner) => winner,
        Err(rejected) => return Ok(Err(rejected)),
    };
    let folder = tempfile::Builder::new().prefix("verdict-").tempdir_in(scratch)?;
    let package = package_path(folder.path());
    assemble(
        &package,
        "ours+eager",
        &tools.interpreter.torch,
        &tools.device.features,
        std::slice::from_ref(&winner),
        &[],
    )?;
    let ids = vec![winner.artefact.id.clone()];
    let (evidence, decided) = compare_packaged(tools, judged, baselines, &package, ids, scratch)?;
    Ok(Ok(Tried { decided, evidence, winner }))
}

/// Compares the operator of a package with the best baseline, as PyTorch calls it.
pub(crate) fn compare_packaged(
    tools: &Tools,
    judged: &JudgedTask,
    baselines: &Baselines,
    package: &Path,
    artefacts: Vec<String>,
    scratch: &Path,
) -> Result<(Evidence, Decided), EngineError> {
    let prepared = prepare(tools, &Subject::Packaged { region: &judged.region, package }, scratch)?;
    let mut candidate = prepared.zygote.contestant("ours", true);
    let mut opponents = baselines.contestants();
    let contest = Contest { truth: &judged.truth, staging: Staging::Sets, protocol: Protocol::default() };
    let facts = Facts {
        subject: judged.region.id.0.clone(),
        artefacts,
        environment: environment(tools),
        checked: None,
    };
    let evidence = compare(&contest, &mut opponents, &mut candidate, Schedule::report(), facts)?;
    let decided = decide(&evidence)?;
    Ok((evidence, decided))
}

/// A package's folder must be a name that Python can import.
fn package_path(folder: &Path) -> PathBuf {
    folder.join("package")
}

/// Builds and admits a candidate; nothing is run.
pub(crate) fn make_winner(
    judge: &Judge,
    region: &Region,
    file: &KernelFile,
    params: &Params,
) -> Result<Result<Winner, Verdict>, EngineError> {
    let rejected = |stage, reason| Ok(Err(Verdict::Rejected { stage, reason }));
    let plan = match plan(file, region, params, &judge.device) {
        Ok(plan) => plan,
        Err(error) => return rejected(Stage::Parse, error.to_string()),
    };
    let artefact = match judge.toolchain.build(file, params, &judge.build) {
        Ok(artefact) => artefact,
        Err(error @ (BuildError::Compiler { .. } | BuildError::Timeout { .. })) => {
            return rejected(Stage::Build, error.to_string());
        }
        Err(error) => return Err(autokernel_judge::JudgeError::Builder(error).into()),
    };
    let entries: Vec<&str> = plan.launches.iter().map(|launch| launch.entry.as_str()).collect();
    if let Err(error) = admit(&artefact.bytes, &entries) {
        return rejected(Stage::Admission, error.to_string());
    }
    Ok(Ok(Winner { region: region.clone(), file: file.clone(), params: params.clone(), plan, artefact }))
}
