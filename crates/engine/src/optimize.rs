//! `optimize`: the whole way from a model to a package.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use autokernel_core::stats::median;
use autokernel_core::task::Task;
use autokernel_core::verdict::{Interval, Verdict};
use autokernel_judge::{Evidence, Judge};
use autokernel_store::{CandidateId, RunStatus, Store};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::certificate::certificate;
use crate::error::EngineError;
use crate::event::{EVENT_SCHEMA, Event, Observer};
use crate::gate::{Entry, Gate, gate};
use crate::hunt::{Ground, Hunt, hunt};
use crate::options::OptimizeOptions;
use crate::package::{Winner, assemble};
use crate::report::{Baseline, CandidateCounts, Cost, ModelReport, OptimizeReport, RegionReport, Seconds};
use crate::session::{Capture, Oracle, PythonChoice, Tools};
use crate::tasks::{Ranked, rank};
use crate::trial::{Baselines, Tried, judge, stage, verdict};

/// Regions whose reach would make the model less than this much faster are left: the default stop rule.
const LEAST_SHARE: f64 = 0.004;

/// Shortest time given to one region, so that a late one still gets a fair look.
const LEAST_SLICE: Duration = Duration::from_secs(20);

/// How a region ended; stored with its task, so that a resumed run does not decide it again.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Outcome {
    report: RegionReport,
    /// Kernel file and parameters of the winner.
    winner: Option<(String, autokernel_core::kernel_file::Params)>,
}

/// Records every event of a run, and shows it.
struct Recorder<'a> {
    store: &'a Store,
    run: &'a str,
    next: &'a mut dyn Observer,
}

impl Observer for Recorder<'_> {
    fn observe(&mut self, event: &Event) {
        if let Ok(mut body) = serde_json::to_value(event) {
            body["schema"] = EVENT_SCHEMA.into();
            // Events are for views; the rows of candidates are what a run rests on.
            let _ = self.store.record_event(self.run, &body);
        }
        self.next.observe(event);
    }
}

/// Makes a model faster.
pub fn optimize(
    tools: &Tools,
    options: &OptimizeOptions,
    store: &mut Store,
    observer: &mut dyn Observer,
) -> Result<OptimizeReport, EngineError> {
    let run = run_name(options, store)?;
    let mut options = options.clone();
    if options.out.as_os_str().is_empty() {
        options.out = std::path::absolute(Path::new("packages").join(run.replace('-', "_")))?;
    }
    store.create_run(&run, &serde_json::to_value(&options)?)?;
    go(tools, &options, store, &run, observer)
}

/// Goes on with a run that was stopped or killed. A finished run is told as it ended.
pub fn resume(
    choice: &PythonChoice,
    store: &mut Store,
    wanted: &str,
    observer: &mut dyn Observer,
) -> Result<OptimizeReport, EngineError> {
    let row = store.run(wanted)?;
    let options: OptimizeOptions = serde_json::from_value(row.options)?;
    if let (RunStatus::Finished, Some(result)) = (row.status, row.result) {
        return Ok(serde_json::from_value(result)?);
    }
    let choice = PythonChoice {
        explicit: choice.explicit.clone().or_else(|| options.python.clone()),
        may_make: choice.may_make,
    };
    let tools = Tools::find(&choice, Some(options.threads), observer)?;
    go(&tools, &options, store, &row.id, observer)
}

fn go(
    tools: &Tools,
    options: &OptimizeOptions,
    store: &mut Store,
    run: &str,
    observer: &mut dyn Observer,
) -> Result<OptimizeReport, EngineError> {
    let _mine = RunLock::take(store, run)?;
    let scratch = tempfile::Builder::new().prefix("autokernel-").tempdir()?;
    open_to_children(scratch.path())?;
    let result =
        Run { tools, options, run, scratch: scratch.path(), start: Instant::now() }.all(store, observer);
    let status = match &result {
        Ok(_) => RunStatus::Finished,
        Err(EngineError::Interrupted { .. }) => RunStatus::Interrupted,
        Err(_) => RunStatus::Failed,
    };
    let body = result.as_ref().ok().map(serde_json::to_value).transpose()?;
    store.set_status(run, status, body.as_ref())?;
    result
}

/// One process works on a run at a time.
struct RunLock(#[expect(dead_code, reason = "closing the file releases the lock")] std::fs::File);

impl RunLock {
    fn take(store: &Store, run: &str) -> Result<Self, EngineError> {
        let folder = store.root().join("locks");
        fs_err::create_dir_all(&folder)?;
        let file = std::fs::File::create(folder.join(run))?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(std::fs::TryLockError::WouldBlock) => Err(EngineError::Busy { run: run.to_owned() }),
            Err(std::fs::TryLockError::Error(error)) => Err(error.into()),
        }
    }
}

/// Children of root run as another user and must be able to walk through the folder.
pub(crate) fn open_to_children(folder: &Path) -> Result<(), EngineError> {
    use std::os::unix::fs::PermissionsExt;
    fs_err::set_permissions(folder, std::fs::Permissions::from_mode(0o711))?;
    Ok(())
}

fn run_name(options: &OptimizeOptions, store: &Store) -> Result<String, EngineError> {
    loop {
        let number = getrandom::u32().map_err(|error| EngineError::Io(std::io::Error::other(error)))?;
        let name = format!("{}-{:04x}", options.model.stem(), number & 0xffff);
        if !store.runs()?.iter().any(|run| run.id == name) {
            return Ok(name);
        }
    }
}

/// A run on its way.
struct Run<'a> {
    tools: &'a Tools,
    options: &'a OptimizeOptions,
    run: &'a str,
    scratch: &'a Path,
    start: Instant,
}

/// What the regions came to.
#[derive(Default)]
struct Harvest {
    regions: Vec<RegionReport>,
    winners: Vec<Winner>,
    counts: CandidateCounts,
    first_accepted: Option<f64>,
    stopped: &'static str,
}

impl Run<'_> {
    fn all(&self, store: &mut Store, observer: &mut dyn Observer) -> Result<OptimizeReport, EngineError> {
        let mut oracle = self.capture_start(store, observer)?;
        let capture = oracle.capture(self.tools)?;
        let capture_s = self.start.elapsed().as_secs_f64();
        let ranked = self.rank(&mut oracle, &capture, store, observer)?;
        let harvest = self.regions(&mut oracle, &ranked, store, observer)?;
        let gate = self.gate(&mut oracle, &harvest, store, observer)?;
        let package = self.package(&ranked, &harvest, &gate)?;
        let mut report = self.report(&oracle, &capture, &ranked, harvest, &gate, package);
        report.seconds.capture = capture_s;
        report.seconds.total = self.start.elapsed().as_secs_f64();
        report.candidates.per_hour = report.candidates.built as f64 / report.seconds.total * 3600.0;
        let three = |interval: Interval| [interval.value, interval.low, interval.high];
        Recorder { store, run: self.run, next: observer }.observe(&Event::Finished {
            chosen: gate.chosen,
            vs_eager: report.model.speedup.map(|speedup| three(speedup.vs_eager)),
            vs_best_plain: report.model.speedup.map(|speedup| three(speedup.vs_best_plain)),
            package: report.package.clone(),
        });
        Ok(report)
    }

    fn capture_start(&self, store: &Store, observer: &mut dyn Observer) -> Result<Oracle, EngineError> {
        let mut recorder = Recorder { store, run: self.run, next: observer };
        recorder.observe(&Event::Stage {
            what: format!("run {}: loading {}", self.run, self.options.model.spec),
        });
        Oracle::start(self.tools, &self.options.model, self.options.seed, self.scratch)
    }

    fn rank(
        &self,
        oracle: &mut Oracle,
        capture: &Capture,
        store: &mut Store,
        observer: &mut dyn Observer,
    ) -> Result<Ranked, EngineError> {
        let ranked = rank(oracle, self.tools, capture)?;
        let bodies: Result<Vec<_>, serde_json::Error> = ranked
            .tasks
            .iter()
            .map(|task| Ok((task.region.id.0.clone(), serde_json::to_value(task)?)))
            .collect();
        store.put_tasks(self.run, &bodies?)?;
        store.set_facts(
            self.run,
            &json!({ "device": self.tools.device_report(), "versions": self.tools.versions(), "eager_us": ranked.eager_us, "left": ranked.left }),
        )?;
        let mut recorder = Recorder { store, run: self.run, next: observer };
        recorder.observe(&Event::ModelLoaded {
            name: oracle.model.name.clone(),
            graphs: capture.graphs.len(),
            breaks: capture.breaks.len(),
            nodes: capture.graphs.iter().map(|graph| graph.nodes.len()).sum(),
            eager_us: ranked.eager_us,
        });
        recorder.observe(&Event::Ranked { regions: ranked.tasks.len(), winnable: ranked.winnable });
        Ok(ranked)
    }

    fn regions(
        &self,
        oracle: &mut Oracle,
        ranked: &Ranked,
        store: &Store,
        observer: &mut dyn Observer,
    ) -> Result<Harvest, EngineError> {
        let judge = judge(self.tools);
        let mut baselines = Baselines::new();
        let mut harvest = Harvest { stopped: "plateau", ..Harvest::default() };
        let outcomes: HashMap<String, Outcome> = store
            .tasks(self.run)?
            .into_iter()
            .filter_map(|row| Some((row.region, serde_json::from_value(row.outcome?).ok()?)))
            .collect();
        let end = self.start + self.options.budget();
        let mut waiting: f64 = ranked.tasks.iter().map(Task::winnable_share).sum();
        for task in &ranked.tasks {
            let share = task.winnable_share();
            if let Some(outcome) = outcomes.get(&task.region.id.0) {
                self.take_known(&judge, task, outcome, &mut harvest)?;
            } else if share < LEAST_SHARE {
                harvest.regions.push(untried(task, "less than 0.4 % of the model's time can be won here"));
            } else if Instant::now() >= end {
                harvest.stopped = "budget";
                harvest.regions.push(untried(task, "the budget was spent"));
            } else {
                let left = end.saturating_duration_since(Instant::now());
                let slice =
                    left.mul_f64((share / waiting.max(1e-9)).clamp(0.0, 1.0)).max(LEAST_SLICE.min(left));
                let ground = Ground { judge: &judge, store, run: self.run, deadline: Instant::now() + slice };
                let mut recorder = Recorder { store, run: self.run, next: observer };
                self.region(oracle, &ground, task, &mut baselines, &mut harvest, &mut recorder)?;
            }
            waiting -= share;
        }
        if harvest.stopped == "plateau"
            && harvest
                .regions
                .iter()
                .all(|region| region.best_us.is_some_and(|us| us <= region.reach_us * 1.05))
        {
            harvest.stopped = "reach";
        }
        Ok(harvest)
    }

    /// A region that an earlier life of the run decided: its artefact is built again.
    fn take_known(
        &self,
        judge: &Judge,
        task: &Task,
        outcome: &Outcome,
        harvest: &mut Harvest,
    ) -> Result<(), EngineError> {
        if let Some((source, params)) = &outcome.winner {
            let file = autokernel_core::kernel_file::KernelFile::parse(source)?;
            if let Ok(winner) = crate::trial::make_winner(judge, &task.region, &file, params)? {
                harvest.winners.push(winner);
            }
        }
        harvest.regions.push(outcome.report.clone());
        Ok(())
    }

    fn region(
        &self,
        oracle: &mut Oracle,
        ground: &Ground<'_>,
        task: &Task,
        baselines: &mut Baselines,
        harvest: &mut Harvest,
        observer: &mut Recorder<'_>,
    ) -> Result<(), EngineError> {
        observer.observe(&Event::RegionStarted {
            region: task.region.id.0.clone(),
            ops: task.region.op_names(),
            count: task.occurrences.len(),
            share: task.share,
            eager_us: task.eager_us,
            reach_us: task.reach_us,
        });
        let folder = tempfile::Builder::new().prefix("task-").tempdir_in(self.scratch)?;
        open_to_children(folder.path())?;
        let judged = stage(oracle, self.tools, task, folder.path(), observer)?;
        let found = hunt(ground, task, &judged, observer)?;
        count(&mut harvest.counts, &found);
        if found.stopped == "budget" {
            harvest.stopped = "budget";
        }
        let Some(best) = found.finalists.first() else {
            let reason = found.unsupported.unwrap_or_else(|| "no candidate passed the judge".to_owned());
            return self.decide(
                ground.store,
                task,
                RegionReport { verdict: "rejected".to_owned(), ..untried(task, &reason) },
                None,
                harvest,
            );
        };
        baselines.prepare(self.tools, task, self.scratch, observer);
        harvest.counts.judged += 1;
        match verdict(self.tools, ground.judge, &judged, baselines, &best.file, &best.params, self.scratch)? {
            Err(rejected) => {
                let report = judged_report(task, best.candidate, &rejected, None);
                ground.store.record_verdict(
                    best.candidate,
                    &serde_json::to_value(&rejected)?,
                    &json!(null),
                )?;
                self.decide(ground.store, task, report, None, harvest)
            }
            Ok(tried) => {
                ground.store.record_verdict(
                    best.candidate,
                    &serde_json::to_value(&tried.decided.verdict)?,
                    &serde_json::to_value(&tried.evidence)?,
                )?;
                observer.observe(&verdict_event(task, &tried));
                let report = judged_report(task, best.candidate, &tried.decided.verdict, Some(&tried));
                let faster = matches!(tried.decided.verdict, Verdict::Faster { .. });
                if faster && harvest.first_accepted.is_none() {
                    harvest.first_accepted = Some(self.start.elapsed().as_secs_f64());
                }
                self.decide(ground.store, task, report, faster.then_some(tried.winner), harvest)
            }
        }
    }

    fn decide(
        &self,
        store: &Store,
        task: &Task,
        report: RegionReport,
        winner: Option<Winner>,
        harvest: &mut Harvest,
    ) -> Result<(), EngineError> {
        let kept = winner.as_ref().map(|winner| (winner.file.source.clone(), winner.params.clone()));
        let outcome = Outcome { report: report.clone(), winner: kept };
        store.set_outcome(self.run, &task.region.id.0, &serde_json::to_value(&outcome)?)?;
        harvest.regions.push(report);
        harvest.winners.extend(winner);
        Ok(())
    }

    fn gate(
        &self,
        oracle: &mut Oracle,
        harvest: &Harvest,
        store: &Store,
        observer: &mut dyn Observer,
    ) -> Result<Gate, EngineError> {
        let mut recorder = Recorder { store, run: self.run, next: observer };
        let folder = tempfile::Builder::new().prefix("whole-").tempdir_in(self.scratch)?;
        open_to_children(folder.path())?;
        let package = folder.path().join("package");
        let torch = &self.tools.interpreter.torch;
        if !harvest.winners.is_empty() {
            assemble(&package, "ours+eager", torch, &self.tools.device.features, &harvest.winners, &[])?;
        }
        let entry = Entry {
            model: &self.options.model,
            seed: self.options.seed,
            package: (!harvest.winners.is_empty()).then_some(package.as_path()),
            artefacts: harvest.winners.iter().map(|winner| winner.artefact.id.clone()).collect(),
        };
        gate(oracle, self.tools, &entry, self.scratch, &mut recorder)
    }

    fn package(&self, ranked: &Ranked, harvest: &Harvest, gate: &Gate) -> Result<PathBuf, EngineError> {
        let ours = gate.chosen.starts_with("ours");
        let winners: &[Winner] = if ours { &harvest.winners } else { &[] };
        let proof = certificate(self.run, self.options, self.tools, ranked, &harvest.regions, gate)?;
        let extra = [("certificate.json", proof)];
        assemble(
            &self.options.out,
            &gate.chosen,
            &self.tools.interpreter.torch,
            &self.tools.device.features,
            winners,
            &extra,
        )
    }

    fn report(
        &self,
        oracle: &Oracle,
        capture: &Capture,
        ranked: &Ranked,
        harvest: Harvest,
        gate: &Gate,
        package: PathBuf,
    ) -> OptimizeReport {
        OptimizeReport {
            schema: "autokernel.optimize/1".to_owned(),
            run: self.run.to_owned(),
            device: self.tools.device_report(),
            versions: self.tools.versions(),
            model: ModelReport {
                name: oracle.model.name.clone(),
                graphs: capture.graphs.len(),
                breaks: capture.breaks.clone(),
                forms: gate.forms.clone(),
                chosen: Some(gate.chosen.clone()),
                winnable: ranked.winnable,
                speedup: gate.speedup,
            },
            regions: harvest.regions,
            candidates: harvest.counts,
            seconds: Seconds { first_accepted: harvest.first_accepted, ..Seconds::default() },
            stopped: harvest.stopped.to_owned(),
            cost: Cost::default(),
            package: Some(package.display().to_string()),
        }
    }
}

fn count(counts: &mut CandidateCounts, found: &Hunt) {
    counts.built += found.built;
    counts.screened += found.screened;
    for (stage, number) in &found.rejected {
        *counts.rejected.entry(stage.clone()).or_default() += number;
    }
}

/// A region that nobody worked on.
pub(crate) fn untried(task: &Task, reason: &str) -> RegionReport {
    RegionReport {
        id: task.region.id.0.clone(),
        ops: task.region.op_names(),
        count: task.occurrences.len(),
        share: task.share,
        baseline: Baseline { name: "eager".to_owned(), us: task.eager_us },
        reach_us: task.reach_us,
        best_us: None,
        speedup: None,
        verdict: "untried".to_owned(),
        reason: reason.to_owned(),
        candidate: None,
    }
}

fn judged_report(
    task: &Task,
    candidate: CandidateId,
    verdict: &Verdict,
    tried: Option<&Tried>,
) -> RegionReport {
    let mut report = untried(task, "");
    verdict.name().clone_into(&mut report.verdict);
    report.candidate = Some(candidate.0);
    report.speedup = verdict.speedup();
    report.reason = match (verdict, tried) {
        (Verdict::Rejected { stage, reason }, _) => format!("{}: {reason}", stage.name()),
        (_, Some(tried)) if tried.decided.unfit => {
            format!("{} pairs of processes; the machine was noisy or busy", tried.decided.pairs)
        }
        (_, Some(tried)) => format!("{} pairs of processes", tried.decided.pairs),
        (_, None) => String::new(),
    };
    if let Some(tried) = tried {
        let evidence = &tried.evidence;
        if let Some(us) = median_us(evidence, &evidence.baseline) {
            report.baseline = Baseline { name: evidence.baseline.clone(), us };
        }
        report.best_us = median_us(evidence, &evidence.candidate);
    }
    report
}

/// Median over processes of one contestant's time a call.
fn median_us(evidence: &Evidence, name: &str) -> Option<f64> {
    let processes = evidence
        .rounds
        .iter()
        .flat_map(|round| &round.processes)
        .filter(|process| process.contestant == name);
    median(&processes.filter_map(|process| median(&process.us)).collect::<Vec<_>>())
}

fn verdict_event(task: &Task, tried: &Tried) -> Event {
    Event::Verdict {
        region: task.region.id.0.clone(),
        verdict: tried.decided.verdict.name().to_owned(),
        baseline: tried.evidence.baseline.clone(),
        speedup: tried
            .decided
            .verdict
            .speedup()
            .map(|interval| [interval.value, interval.low, interval.high]),
    }
}
