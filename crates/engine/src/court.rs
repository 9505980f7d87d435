//! One model's regions before the judge: a region is staged once, and then any number of kernel files
//! can be put before it. `judge` brings one file; the corpus of exploits brings many.

use std::path::{Path, PathBuf};

use autokernel_core::kernel_file::{KernelFile, KernelFileError, Params};
use autokernel_core::plan::check_region;
use autokernel_core::stats::Schedule;
use autokernel_core::task::Task;
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_judge::{Judge, JudgedTask, ScreenOutcome, Screened};
use autokernel_search::partition::partition;

use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::options::ModelSpec;
use crate::session::{Capture, Oracle, Tools, scratch};
use crate::trial::{Baselines, Places, Terms, Tried, judge, random_seed, stage_under, verdict, winner_of};

/// Parameter points that are screened at most before the verdict of the fastest.
const MOST_POINTS: usize = 24;

/// What a region takes in [`Court::tasks`], in microseconds. The judge scales its watchdog with it.
const NOMINAL_US: f64 = 1000.0;

/// A captured model whose regions can be staged.
pub struct Court<'a> {
    tools: &'a Tools,
    oracle: Oracle,
    capture: Capture,
    scratch: tempfile::TempDir,
}

/// One region with the inputs of one seed. It holds the court: the oracle is asked nothing meanwhile.
pub struct Sitting<'a> {
    tools: &'a Tools,
    task: Task,
    judge: Judge,
    judged: JudgedTask,
    scratch: &'a Path,
    folder: PathBuf,
}

/// A point of a kernel file that was screened: ranked, or rejected.
pub type Point = (Params, Result<Box<Screened>, Verdict>);

/// Reads a kernel file and holds it against a region; what is wrong with it is a verdict.
pub fn read_file(source: &str, task: &Task) -> Result<KernelFile, Verdict> {
    let rejected = |reason: String| Verdict::Rejected { stage: Stage::Parse, reason };
    let file = KernelFile::parse(source).map_err(|error: KernelFileError| rejected(error.to_string()))?;
    check_region(&file, &task.region).map_err(|error| rejected(error.to_string()))?;
    Ok(file)
}

impl<'a> Court<'a> {
    /// Loads and captures the model.
    pub fn open(
        tools: &'a Tools,
        model: &ModelSpec,
        seed: u64,
        observer: &mut dyn Observer,
    ) -> Result<Self, EngineError> {
        let scratch = scratch()?;
        observer.observe(&Event::Stage { what: format!("loading {}", model.spec) });
        let mut oracle = Oracle::start(tools, model, seed, scratch.path())?;
        let capture = oracle.capture(tools)?;
        Ok(Self { tools, oracle, capture, scratch })
    }

    /// The model's tasks in the order of its graph, each with [`NOMINAL_US`] as PyTorch's time: nothing is
    /// measured, so these can be judged by and not ranked by.
    pub fn tasks(&self) -> Vec<Task> {
        let tasks = partition(&self.capture.graphs).regions.into_iter().map(|(region, occurrences)| {
            Task::new(region, occurrences, NOMINAL_US, NOMINAL_US, self.tools.device.rates())
        });
        tasks.collect()
    }

    /// A fresh seed of the operating system's. It is drawn apart from [`Court::stage`] to be logged.
    pub fn seed() -> Result<u64, EngineError> {
        random_seed()
    }

    /// Inputs and truth for a task. No kernel file may have a say in the seed, or see it.
    pub fn stage(
        &mut self,
        task: &Task,
        seed: u64,
        observer: &mut dyn Observer,
    ) -> Result<Sitting<'_>, EngineError> {
        let folder = tempfile::Builder::new().prefix("task-").tempdir_in(self.scratch.path())?.keep();
        crate::session::open_to_children(&folder)?;
        let judged = stage_under(seed, &mut self.oracle, self.tools, task, &folder, observer)?;
        let (tools, scratch) = (self.tools, self.scratch.path());
        Ok(Sitting { tools, task: task.clone(), judge: judge(tools), judged, scratch, folder })
    }
}

impl Sitting<'_> {
    /// The task.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// Builds one point and checks its outputs; nothing is timed.
    pub fn check(&self, file: &KernelFile, params: &Params) -> Result<Result<(), Verdict>, EngineError> {
        Ok(self.judge.check(&self.judged, file, params)?.map(|_| ()))
    }

    /// Screens the points of a file, in the file's order.
    pub fn screen(
        &self,
        file: &KernelFile,
        mut seen: impl FnMut(&Params, Result<&Screened, &Verdict>),
    ) -> Result<Vec<Point>, EngineError> {
        let mut points = vec![];
        for params in file.points().take(MOST_POINTS) {
            let outcome = match self.judge.screen(&self.judged, file, &params)? {
                ScreenOutcome::Ranked(ranked) => Ok(ranked),
                ScreenOutcome::Rejected(verdict) => Err(verdict),
            };
            seen(&params, outcome.as_deref());
            points.push((params, outcome));
        }
        Ok(points)
    }

    /// The verdict of a screened point against the best baseline, and which baselines can't be had.
    pub(crate) fn verdict(
        &self,
        baselines: &mut Baselines,
        (file, params): (&KernelFile, &Params),
        checked: &Screened,
        observer: &mut dyn Observer,
    ) -> Result<(Tried, Vec<&'static str>), EngineError> {
        let missing = baselines.prepare(self.tools, &self.task, self.scratch, observer);
        let winner = winner_of(&self.task.region, file, params, checked, self.tools.threads);
        let places = Places { task: &self.folder, scratch: self.scratch };
        let terms = Terms { schedule: Schedule::confirm(), family: 1, observer };
        let tried = verdict(self.tools, &self.judged, baselines, &winner, &checked.checked, &places, terms)?;
        Ok((tried, missing))
    }

    /// The verdict of the fastest of these points, or the last rejection.
    pub fn decide(
        &self,
        file: &KernelFile,
        points: &[Point],
        observer: &mut dyn Observer,
    ) -> Result<Verdict, EngineError> {
        match fastest(points) {
            Some((params, screened)) => {
                let mut baselines = Baselines::new();
                Ok(self.verdict(&mut baselines, (file, params), screened, observer)?.0.decided.verdict)
            }
            None => Ok(refused(points)),
        }
    }
}

/// The fastest point in the screen.
pub(crate) fn fastest(points: &[Point]) -> Option<(&Params, &Screened)> {
    points
        .iter()
        .filter_map(|(params, outcome)| Some((params, &**outcome.as_ref().ok()?)))
        .min_by(|a, b| a.1.us.total_cmp(&b.1.us))
}

/// The last rejection of points of which none is ranked.
pub(crate) fn refused(points: &[Point]) -> Verdict {
    points.iter().rev().find_map(|(_, outcome)| outcome.as_ref().err().cloned()).unwrap_or_else(|| {
        Verdict::Rejected { stage: Stage::Parse, reason: "the file has no parameter point".to_owned() }
    })
}
