//! `optimize`: the whole way from a model to a package.

use std::path::{Path, PathBuf};
use std::time::Instant;

use autokernel_core::task::Task;
use autokernel_core::verdict::Interval;
use autokernel_store::{RunStatus, Store};
use serde_json::json;

use crate::certificate::{certificate, read_certificate};
use crate::error::EngineError;
use crate::event::{EVENT_SCHEMA, Event, Observer};
use crate::gate::{Entry, Gate, gate};
use crate::harvest::{Field, Harvest};
use crate::interrupt::stop_if_asked;
use crate::options::OptimizeOptions;
use crate::package::{Winner, assemble, check_place};
use crate::report::{CandidateCounts, Cost, ModelReport, OptimizeReport, Seconds};
use crate::session::{Capture, Oracle, PythonChoice, Tools, open_to_children, scratch};
use crate::tasks::{Ranked, rank};

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
    // Minutes of work should not end at a folder that can't be written.
    check_place(&options.out)?;
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
    let choice = choice.or(options.python.as_ref());
    let tools = Tools::find(&choice, Some(options.threads), observer)?;
    go(&tools, &options, store, &row.id, observer)
}

/// Assembles and measures what a run's regions came to, without searching any further: for winners
/// that agents found after the run had ended.
pub(crate) fn finish(
    choice: &PythonChoice,
    store: &mut Store,
    run: &str,
    options: OptimizeOptions,
    observer: &mut dyn Observer,
) -> Result<OptimizeReport, EngineError> {
    let tools = Tools::find(choice, Some(options.threads), observer)?;
    go(&tools, &OptimizeOptions { budget_s: 0, ..options }, store, run, observer)
}

fn go(
    tools: &Tools,
    options: &OptimizeOptions,
    store: &mut Store,
    run: &str,
    observer: &mut dyn Observer,
) -> Result<OptimizeReport, EngineError> {
    let _mine = RunLock::take(store, run)?;
    let scratch = scratch()?;
    store.set_status(run, RunStatus::Running, None)?;
    let work = Work { tools, options, name: run, scratch: scratch.path(), start: Instant::now() };
    let result = work.all(store, observer);
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
pub(crate) struct RunLock(#[expect(dead_code, reason = "closing the file releases the lock")] std::fs::File);

/// Whether a process works on this run now.
pub fn is_running(store: &Store, run: &str) -> bool {
    matches!(RunLock::take(store, run), Err(EngineError::Busy { .. }))
}

impl RunLock {
    pub(crate) fn take(store: &Store, run: &str) -> Result<Self, EngineError> {
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

/// The model's name and four digits that no other run has.
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
struct Work<'a> {
    tools: &'a Tools,
    options: &'a OptimizeOptions,
    name: &'a str,
    scratch: &'a Path,
    start: Instant,
}

impl Work<'_> {
    fn all(&self, store: &mut Store, observer: &mut dyn Observer) -> Result<OptimizeReport, EngineError> {
        let mut recorder = Recorder { store, run: self.name, next: observer };
        recorder.observe(&Event::Stage {
            what: format!("run {}: loading {}", self.name, self.options.model.spec),
        });
        let mut oracle = Oracle::start(self.tools, &self.options.model, self.options.seed, self.scratch)?;
        let capture = oracle.capture(self.tools)?;
        let capture_s = self.start.elapsed().as_secs_f64();
        let ranked = rank(&mut oracle, self.tools, &capture)?;
        let resumable = self.record(store, &ranked)?;

        let mut recorder = Recorder { store, run: self.name, next: observer };
        recorder.observe(&Event::ModelLoaded {
            name: oracle.model.name.clone(),
            graphs: capture.graphs.len(),
            breaks: capture.breaks.len(),
            nodes: capture.graphs.iter().map(|graph| graph.nodes.len()).sum(),
            eager_us: ranked.eager_us,
        });
        recorder.observe(&Event::Ranked { regions: ranked.tasks.len(), winnable: ranked.winnable });
        let field = Field {
            tools: self.tools,
            store,
            run: self.name,
            scratch: self.scratch,
            start: self.start,
            budget: self.options.budget(),
            resumable,
        };
        let harvest = field.harvest(&mut oracle, &ranked.tasks, &mut recorder)?;
        stop_if_asked(self.name)?;
        let gate = self.gate(&mut oracle, &harvest, &mut recorder)?;
        stop_if_asked(self.name)?;
        let package = self.package(&ranked, &harvest, &gate)?;
        let report = self.report(&oracle, capture, capture_s, &ranked, harvest, gate, &package);
        let three = |interval: Interval| [interval.value, interval.low, interval.high];
        recorder.observe(&Event::Finished {
            chosen: report.model.chosen.clone().unwrap_or_default(),
            vs_eager: report.model.speedup.map(|speedup| three(speedup.vs_eager)),
            vs_best_plain: report.model.speedup.map(|speedup| three(speedup.vs_best_plain)),
            package: report.package.clone(),
        });
        Ok(report)
    }

    /// Records tasks and facts. Whether what an earlier life of the run found still holds: a verdict
    /// of another machine, compiler or torch says nothing about this one.
    fn record(&self, store: &mut Store, ranked: &Ranked) -> Result<bool, EngineError> {
        let body = |task: &Task| Ok((task.region.id.0.clone(), serde_json::to_value(task)?));
        let bodies: Result<Vec<_>, serde_json::Error> = ranked.tasks.iter().map(body).collect();
        store.put_tasks(self.name, &bodies?)?;
        let device = self.tools.device_report();
        let standing = json!({
            "device": device.name, "cores": device.cores, "threads": device.threads, "versions": self.tools.versions(),
        });
        let before = store.run(self.name)?.facts;
        let facts = json!({ "standing": standing, "device": device, "eager_us": ranked.eager_us, "left": ranked.left });
        store.set_facts(self.name, &facts)?;
        Ok(before.is_none_or(|facts| facts.get("standing") == Some(&standing)))
    }

    fn gate(
        &self,
        oracle: &mut Oracle,
        harvest: &Harvest,
        observer: &mut dyn Observer,
    ) -> Result<Gate, EngineError> {
        let folder = tempfile::Builder::new().prefix("whole-").tempdir_in(self.scratch)?;
        open_to_children(folder.path())?;
        let package = folder.path().join("package");
        if !harvest.winners.is_empty() {
            let torch = &self.tools.interpreter.torch;
            assemble(&package, "ours+eager", torch, &self.tools.device.features, &harvest.winners, &[])?;
        }
        let entry = Entry {
            model: &self.options.model,
            seed: self.options.seed,
            package: (!harvest.winners.is_empty()).then_some(package.as_path()),
            artefacts: harvest.winners.iter().map(|winner| winner.artefact.id.clone()).collect(),
        };
        gate(oracle, self.tools, &entry, self.scratch, observer)
    }

    fn package(&self, ranked: &Ranked, harvest: &Harvest, gate: &Gate) -> Result<PathBuf, EngineError> {
        let ours = gate.chosen.starts_with("ours");
        let winners: &[Winner] = if ours { &harvest.winners } else { &[] };
        let proof = certificate(self.name, self.options, self.tools, ranked, &harvest.regions, gate)?;
        let extra = [("certificate.json", proof)];
        // A life of this run that ended between the package and its row left the package.
        if read_certificate(&self.options.out).is_ok_and(|found| found.run == self.name) {
            fs_err::remove_dir_all(&self.options.out)?;
        }
        let torch = &self.tools.interpreter.torch;
        assemble(&self.options.out, &gate.chosen, torch, &self.tools.device.features, winners, &extra)
    }

    #[expect(clippy::too_many_arguments, reason = "the one place where everything comes together")]
    fn report(
        &self,
        oracle: &Oracle,
        capture: Capture,
        capture_s: f64,
        ranked: &Ranked,
        harvest: Harvest,
        gate: Gate,
        package: &Path,
    ) -> OptimizeReport {
        let total = self.start.elapsed().as_secs_f64();
        let per_hour = harvest.counts.built as f64 / total * 3600.0;
        OptimizeReport {
            schema: "autokernel.optimize/1".to_owned(),
            run: self.name.to_owned(),
            device: self.tools.device_report(),
            versions: self.tools.versions(),
            model: ModelReport {
                name: oracle.model.name.clone(),
                graphs: capture.graphs.len(),
                breaks: capture.breaks,
                forms: gate.forms,
                chosen: Some(gate.chosen),
                winnable: ranked.winnable,
                speedup: gate.speedup,
            },
            regions: harvest.regions,
            candidates: CandidateCounts { per_hour, ..harvest.counts },
            seconds: Seconds { total, capture: capture_s, first_accepted: harvest.first_accepted },
            stopped: harvest.stopped.to_owned(),
            cost: Cost::default(),
            package: Some(package.display().to_string()),
        }
    }
}
