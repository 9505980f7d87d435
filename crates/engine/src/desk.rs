//! A seat at the desk of one run: what an agent asks is answered here, from the store and the judge.
//!
//! Nothing that an agent says reaches a verdict: it hands in a kernel file and parameter values, and the
//! judge decides. The model is loaded, and a region staged, when first needed; both are kept, so that the
//! second kernel of a region costs a build and a check.

mod tell;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use autokernel_agent::{Answer, Attempt, Desk, DeskError, Proof, playbook};
use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::check_region;
use autokernel_core::stats::Schedule;
use autokernel_core::task::Task;
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_judge::{Judge, JudgedTask};
use autokernel_store::Store;
use serde_json::json;

use crate::brief::{brief, screen_us};
use crate::error::EngineError;
use crate::event::Observer;
use crate::harvest::{adopt, is_better};
use crate::hunt::{Finalist, Ground, Hunt, sweep};
use crate::optimize::{RunLock, finish};
use crate::options::OptimizeOptions;
use crate::session::{Oracle, PythonChoice, Tools, open_to_children, scratch};
use crate::trial::{Baselines, Places, Terms, judge, stage, verdict, winner_of};

/// Staged regions that are kept: each holds its inputs and truth on disk and in memory.
const STAGED: usize = 2;

/// A kernel within this factor of the region's best screen is worth a verdict.
const NEAR_BEST: f64 = 1.05;

/// A seat at the desk of one run.
pub struct DeskSession {
    store: Store,
    run: String,
    agent: String,
    choice: PythonChoice,
    observer: Box<dyn Observer>,
    loaded: Option<Loaded>,
}

/// The model and the tools. In this order they are dropped: what lies in the folder before the folder.
struct Loaded {
    tools: Tools,
    judge: Judge,
    baselines: Baselines,
    staged: Vec<Staged>,
    oracle: Oracle,
    scratch: tempfile::TempDir,
}

struct Staged {
    task: Task,
    judged: JudgedTask,
    folder: tempfile::TempDir,
}

impl DeskSession {
    /// Takes a seat at the desk of `run` (its name, the beginning of it, or `last`) under a name that
    /// the store keeps beside each candidate.
    pub fn new(
        store: Store,
        run: &str,
        agent: &str,
        choice: PythonChoice,
        observer: Box<dyn Observer>,
    ) -> Result<Self, EngineError> {
        let run = store.run(run)?.id;
        Ok(Self { store, run, agent: agent.to_owned(), choice, observer, loaded: None })
    }

    /// [`Desk::finish`], with the package in another folder than the run's.
    pub fn finish_at(&mut self, out: Option<PathBuf>) -> Result<Answer, DeskError> {
        let options = self.options().map_err(told)?;
        // The gate measures whole models: what this seat holds in memory would be in its way.
        self.loaded = None;
        let choice = self.choice(&options);
        let options = OptimizeOptions { out: out.unwrap_or_else(|| options.out.clone()), ..options };
        let report =
            finish(&choice, &mut self.store, &self.run, options, self.observer.as_mut()).map_err(told)?;
        let data = serde_json::to_value(&report).map_err(|error| told(error.into()))?;
        Ok(Answer::new(&tell::finished(&report), data))
    }

    fn task(&self, region: &str) -> Result<Task, EngineError> {
        Ok(serde_json::from_value(self.store.task(&self.run, region)?.body)?)
    }

    fn options(&self) -> Result<OptimizeOptions, EngineError> {
        Ok(serde_json::from_value(self.store.run(&self.run)?.options)?)
    }

    fn choice(&self, options: &OptimizeOptions) -> PythonChoice {
        self.choice.or(options.python.as_ref())
    }

    /// Parses a file for a region; what can be said without loading a model is said here.
    fn read(&self, attempt: &Attempt) -> Result<(Task, Result<KernelFile, Verdict>), EngineError> {
        let task = self.task(&attempt.region)?;
        let rejected = |reason: String| Verdict::Rejected { stage: Stage::Parse, reason };
        let file = KernelFile::parse(&attempt.source).map_err(|error| rejected(error.to_string()));
        let file = file.and_then(|file| match check_region(&file, &task.region) {
            Ok(()) => Ok(file),
            Err(error) => Err(rejected(error.to_string())),
        });
        Ok((task, file))
    }

    fn best_screen(&self, task: &Task) -> Result<Option<f64>, EngineError> {
        let candidates = self.store.candidates(&self.run, &task.region.id.0)?;
        Ok(candidates.iter().filter_map(screen_us).min_by(f64::total_cmp))
    }

    /// Tries points of a file and compares the best point as `proof` says.
    fn try_files(
        &mut self,
        task: &Task,
        file: KernelFile,
        points: Points,
        proof: Proof,
    ) -> Result<tell::Judgement, EngineError> {
        let _mine = RunLock::take(&self.store, &self.run)?;
        let best_before = self.best_screen(task)?;
        let options = self.options()?;
        let choice = self.choice(&options);
        let Self { store, run, agent, observer, loaded, .. } = self;
        let observer = observer.as_mut();
        let Loaded { tools, judge, baselines, staged, oracle, scratch } =
            load(loaded, &options, &choice, observer)?;
        let Staged { judged, folder, .. } =
            staged_for(staged, task, oracle, tools, scratch.path(), observer)?;

        let seconds = match &points {
            Points::One(_) => Duration::ZERO,
            Points::Sweep(time) => *time,
        };
        let ground =
            Ground { judge, store, run, agent, deadline: Instant::now() + seconds, resumable: false };
        let mut hunt = Hunt::default();
        match points {
            Points::One(params) => {
                crate::hunt::one(&ground, task, judged, file, params, &mut hunt, observer)?;
            }
            Points::Sweep(_) => hunt.surface = sweep(&ground, task, judged, vec![file], &mut hunt, observer)?,
        }
        let mut judgement = tell::Judgement::new(run, task, &hunt);
        let Some(best) = hunt.finalists.into_iter().next() else { return Ok(judgement) };
        let Finalist { file, params, us, candidate, checked: Some(screened) } = best else {
            return Ok(judgement);
        };
        let promising = best_before.is_none_or(|known| us <= known * NEAR_BEST);
        if proof == Proof::Never || (proof == Proof::IfBest && !promising) {
            judgement.unproven =
                Some(if proof == Proof::Never { "not asked for" } else { "the region has faster ones" });
            return Ok(judgement);
        }
        let missing = baselines.prepare(tools, task, scratch.path(), observer);
        let winner = winner_of(&task.region, &file, &params, &screened, tools.threads);
        let places = Places { task: folder.path(), scratch: scratch.path() };
        let terms = Terms { schedule: Schedule::search(), family: 1, observer };
        let tried = verdict(tools, judged, baselines, &winner, &screened.checked, &places, terms)?;
        let (body, evidence) = (serde_json::to_value(&tried.decided.verdict)?, serde_json::to_value(&tried)?);
        store.record_verdict(candidate, &body, &evidence)?;
        judgement.decided(&tried, &missing);
        if missing.is_empty() && is_better(store, run, task, &tried.decided.verdict)? {
            adopt(store, run, task, candidate, &tried, &winner)?;
            judgement.winner = true;
        }
        Ok(judgement)
    }
}

/// Which points of a kernel file are tried.
enum Points {
    One(Params),
    Sweep(Duration),
}

/// The model, loaded once. An oracle that died takes everything with it: the next request starts anew.
fn load<'a>(
    slot: &'a mut Option<Loaded>,
    options: &OptimizeOptions,
    choice: &PythonChoice,
    observer: &mut dyn Observer,
) -> Result<&'a mut Loaded, EngineError> {
    let loaded = if let Some(loaded) = slot.take().filter(|loaded| loaded.oracle.peer.alive()) {
        loaded
    } else {
        let tools = Tools::find(choice, Some(options.threads), observer)?;
        let scratch = scratch()?;
        let mut oracle = Oracle::start(&tools, &options.model, options.seed, scratch.path())?;
        oracle.capture(&tools)?;
        let (judge, baselines) = (judge(&tools), Baselines::new());
        Loaded { tools, judge, baselines, staged: vec![], oracle, scratch }
    };
    Ok(slot.insert(loaded))
}

/// The staged region, which stands first afterwards; the one that was not used for longest goes.
fn staged_for<'a>(
    staged: &'a mut Vec<Staged>,
    task: &Task,
    oracle: &mut Oracle,
    tools: &Tools,
    scratch: &Path,
    observer: &mut dyn Observer,
) -> Result<&'a Staged, EngineError> {
    let known = staged.iter().position(|staged| staged.task.region.id == task.region.id);
    let first = if let Some(at) = known {
        staged.remove(at)
    } else {
        let folder = tempfile::Builder::new().prefix("task-").tempdir_in(scratch)?;
        open_to_children(folder.path())?;
        let judged = stage(oracle, tools, task, folder.path(), observer)?;
        Staged { task: task.clone(), judged, folder }
    };
    staged.insert(0, first);
    staged.truncate(STAGED);
    Ok(&staged[0])
}

/// Pages of the playbook that fit `query` best, a user's own among them.
pub fn playbook(query: &str) -> Answer {
    let pages = playbook::pages(own_playbook().as_deref());
    let found = playbook::find(&pages, query);
    let titles: Vec<&str> = pages.iter().map(|page| page.title.as_str()).collect();
    let text = if found.is_empty() {
        format!("Pages: {}. Ask for one by words of its title.", titles.join("; "))
    } else {
        found.iter().map(|page| page.text.as_str()).collect::<Vec<_>>().join("\n\n")
    };
    let shown: Vec<&str> = found.iter().map(|page| page.title.as_str()).collect();
    let body = json!({ "schema": "autokernel.playbook/1", "pages": titles, "shown": shown, "text": text });
    Answer::new(&text, body)
}

/// A folder of a user's own playbook pages.
fn own_playbook() -> Option<PathBuf> {
    std::env::var_os("AUTOKERNEL_PLAYBOOK").filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn told(error: EngineError) -> DeskError {
    DeskError::Failed(Box::new(error))
}

impl Desk for DeskSession {
    fn tasks(&mut self) -> Result<Answer, DeskError> {
        tell::tasks(&self.store, &self.run).map_err(told)
    }

    fn brief(&mut self, region: &str) -> Result<Answer, DeskError> {
        let brief = brief(&self.store, &self.run, region).map_err(told)?;
        let data = serde_json::to_value(&brief).map_err(|error| told(error.into()))?;
        Ok(Answer::new(&brief.text, data))
    }

    fn judge(&mut self, attempt: &Attempt) -> Result<Answer, DeskError> {
        let (task, file) = self.read(attempt).map_err(told)?;
        let file = match file {
            Ok(file) => file,
            Err(verdict) => return Ok(tell::Judgement::rejected(&self.run, &task, verdict).answer()),
        };
        let mut params = file.default_params();
        for (name, value) in &attempt.params {
            match file.params.get(name) {
                Some(values) if values.contains(value) => params.insert(name.clone(), *value),
                Some(values) => {
                    return Err(DeskError::Request(format!("{name} = {value} is not among {values:?}")));
                }
                None => return Err(DeskError::Request(format!("the kernel file has no parameter `{name}`"))),
            };
        }
        let judgement = self.try_files(&task, file, Points::One(params), attempt.proof);
        Ok(judgement.map_err(told)?.answer())
    }

    fn sweep(&mut self, attempt: &Attempt, seconds: u64) -> Result<Answer, DeskError> {
        let (task, file) = self.read(attempt).map_err(told)?;
        let file = match file {
            Ok(file) => file,
            Err(verdict) => return Ok(tell::Judgement::rejected(&self.run, &task, verdict).answer()),
        };
        let points = Points::Sweep(Duration::from_secs(seconds));
        Ok(self.try_files(&task, file, points, attempt.proof).map_err(told)?.answer())
    }

    fn history(&mut self, region: &str) -> Result<Answer, DeskError> {
        let task = self.task(region).map_err(told)?;
        tell::history(&self.store, &self.run, &task).map_err(told)
    }

    fn playbook(&mut self, query: &str) -> Result<Answer, DeskError> {
        Ok(playbook(query))
    }

    fn finish(&mut self) -> Result<Answer, DeskError> {
        self.finish_at(None)
    }
}
