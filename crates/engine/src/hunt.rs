//! The search on one region: the search agent proposes, the judge screens, the store remembers.

use std::collections::HashMap;
use std::time::Instant;

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::task::Task;
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_judge::{Judge, JudgedTask, ScreenOutcome, Screened};
use autokernel_search::propose;
use autokernel_search::search::{Outcome, Search};
use autokernel_store::{CandidateId, NewCandidate, Store};
use serde_json::{Value, json};

use crate::brief::screen_us;
use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::interrupt::stop_if_asked;

/// The name under which the search agent's candidates are stored.
pub(crate) const SEARCH_AGENT: &str = "search";

/// What a hunt has to stand on.
pub(crate) struct Ground<'a> {
    /// The judge.
    pub(crate) judge: &'a Judge,
    /// The store.
    pub(crate) store: &'a Store,
    /// The run.
    pub(crate) run: &'a str,
    /// Under which name candidates are stored.
    pub(crate) agent: &'a str,
    /// When the time for this region is over.
    pub(crate) deadline: Instant,
    /// Whether screens of an earlier life of the run still hold.
    pub(crate) resumable: bool,
}

/// A correct candidate with its rank.
#[derive(Clone, Debug)]
pub(crate) struct Finalist {
    pub(crate) file: KernelFile,
    pub(crate) params: Params,
    pub(crate) us: f64,
    pub(crate) candidate: CandidateId,
    /// What was built and checked; `None` for one that an earlier life of the run screened.
    pub(crate) checked: Option<Box<Screened>>,
}

/// What came of a hunt.
#[derive(Debug, Default)]
pub(crate) struct Hunt {
    /// Fastest first.
    pub(crate) finalists: Vec<Finalist>,
    /// Built here, not found in the store.
    pub(crate) built: u64,
    pub(crate) screened: u64,
    pub(crate) rejected: HashMap<String, u64>,
    /// Why the last one was rejected.
    pub(crate) last_rejection: Option<(Stage, String)>,
    /// What the search over parameters saw, in a few lines; empty when there was nothing to search.
    pub(crate) surface: String,
    /// Why it ended: `plateau` or `budget`.
    pub(crate) stopped: &'static str,
    /// Why there are no kernel files at all.
    pub(crate) unsupported: Option<String>,
}

/// What an earlier life of the run knows of a candidate.
struct Known {
    candidate: CandidateId,
    outcome: Outcome,
}

/// Searches one region until the search agent has nothing more to ask or the time is over. What was
/// done is in `hunt` also when it ends with an error: candidates that are in the store are counted.
pub(crate) fn hunt(
    ground: &Ground<'_>,
    task: &Task,
    judged: &JudgedTask,
    hunt: &mut Hunt,
    observer: &mut dyn Observer,
) -> Result<(), EngineError> {
    hunt.stopped = "plateau";
    let files = match propose(&task.region, &ground.judge.device) {
        Ok(files) => files,
        Err(unsupported) => {
            hunt.unsupported = Some(unsupported.to_string());
            return Ok(());
        }
    };
    hunt.surface = sweep(ground, task, judged, files, hunt, observer)?;
    Ok(())
}

/// Screens one point of one kernel file.
pub(crate) fn one(
    ground: &Ground<'_>,
    task: &Task,
    judged: &JudgedTask,
    file: KernelFile,
    params: Params,
    hunt: &mut Hunt,
    observer: &mut dyn Observer,
) -> Result<(), EngineError> {
    let screened = ground.judge.screen(judged, &file, &params)?;
    first(ground, task, (file, params), screened, hunt, observer)?;
    Ok(())
}

/// Searches the parameters of `files` until the search has nothing more to ask or the time is over;
/// what it saw, in a few lines.
pub(crate) fn sweep(
    ground: &Ground<'_>,
    task: &Task,
    judged: &JudgedTask,
    files: Vec<KernelFile>,
    hunt: &mut Hunt,
    observer: &mut dyn Observer,
) -> Result<String, EngineError> {
    let known = known(ground, task)?;
    let mut search = Search::new(files);
    while let Some(trial) = search.next() {
        stop_if_asked(ground.run)?;
        let Some(file) = search.files().get(trial.file).cloned() else { break };
        let key = (blake3::hash(file.source.as_bytes()).to_hex().to_string(), trial.params.clone());
        let outcome = if let Some(known) = known.get(&key) {
            hunt.recall(known, &file, &trial.params)
        } else if Instant::now() >= ground.deadline && hunt.built > 0 {
            // One is always tried: staging, which a busy machine makes long, must not eat all of it.
            hunt.stopped = "budget";
            break;
        } else {
            let screened = ground.judge.screen(judged, &file, &trial.params)?;
            match hunt.finalists.iter().position(|f| f.params == trial.params && f.file == file) {
                Some(at) => again(ground, task, at, screened, hunt, observer)?,
                None => first(ground, task, (file, trial.params.clone()), screened, hunt, observer)?,
            }
        };
        search.report(trial, outcome);
    }
    hunt.finalists.sort_by(|a, b| a.us.total_cmp(&b.us));
    Ok(search.surface())
}

impl Hunt {
    /// Takes over what an earlier life of the run found.
    fn recall(&mut self, known: &Known, file: &KernelFile, params: &Params) -> Outcome {
        let listed = self.finalists.iter().any(|f| f.candidate == known.candidate);
        if let Outcome::Time(us) = known.outcome
            && !listed
        {
            let (file, params) = (file.clone(), params.clone());
            self.finalists.push(Finalist { file, params, us, candidate: known.candidate, checked: None });
        }
        known.outcome
    }

    fn reject(&mut self, region: &str, verdict: Verdict, observer: &mut dyn Observer) {
        if let Verdict::Rejected { stage, reason } = verdict {
            *self.rejected.entry(stage.name().to_owned()).or_default() += 1;
            self.last_rejection = Some((stage, reason.clone()));
            let (region, stage) = (region.to_owned(), stage.name().to_owned());
            observer.observe(&Event::Rejected { region, stage, reason });
        }
    }

    fn announce(&self, region: &str, params: &Params, us: f64, observer: &mut dyn Observer) {
        let best_us = self.finalists.iter().map(|f| f.us).fold(us, f64::min);
        let (region, params) = (region.to_owned(), describe(params));
        observer.observe(&Event::Screened { region, params, us, best_us });
    }
}

/// What the store keeps of a screen.
fn screen_row(ranked: &Screened) -> Value {
    json!({ "us": ranked.us, "spread": ranked.spread, "samples": ranked.samples, "checked": ranked.checked })
}

/// A candidate that was not seen before: it gets a row, whatever came of it.
fn first(
    ground: &Ground<'_>,
    task: &Task,
    (file, params): (KernelFile, Params),
    screened: ScreenOutcome,
    hunt: &mut Hunt,
    observer: &mut dyn Observer,
) -> Result<Outcome, EngineError> {
    let region = task.region.id.0.as_str();
    hunt.built += 1;
    let mut new = NewCandidate {
        run: ground.run,
        region,
        agent: ground.agent,
        source: &file.source,
        params: serde_json::to_value(&params)?,
        artefact: None,
        screen: None,
        verdict: None,
    };
    match screened {
        ScreenOutcome::Ranked(ranked) => {
            hunt.screened += 1;
            new.artefact = Some(&ranked.artefact.id);
            new.screen = Some(screen_row(&ranked));
            let candidate = ground.store.record_candidate(&new)?;
            hunt.announce(region, &params, ranked.us, observer);
            let us = ranked.us;
            hunt.finalists.push(Finalist { file, params, us, candidate, checked: Some(ranked) });
            Ok(Outcome::Time(us))
        }
        ScreenOutcome::Rejected(verdict) => {
            new.verdict = Some(serde_json::to_value(&verdict)?);
            ground.store.record_candidate(&new)?;
            hunt.reject(region, verdict, observer);
            Ok(Outcome::Failed)
        }
    }
}

/// A finalist that is screened once more, because a screen is noisy: it keeps its row and its better
/// time. One that fails this time is no finalist any more.
fn again(
    ground: &Ground<'_>,
    task: &Task,
    at: usize,
    screened: ScreenOutcome,
    hunt: &mut Hunt,
    observer: &mut dyn Observer,
) -> Result<Outcome, EngineError> {
    let region = task.region.id.0.as_str();
    match screened {
        ScreenOutcome::Ranked(ranked) => {
            hunt.announce(region, &hunt.finalists[at].params, ranked.us, observer);
            let (us, finalist) = (ranked.us, &mut hunt.finalists[at]);
            if us < finalist.us {
                ground.store.record_screen(finalist.candidate, &screen_row(&ranked))?;
                finalist.us = us;
                finalist.checked = Some(ranked);
            }
            Ok(Outcome::Time(us))
        }
        ScreenOutcome::Rejected(verdict) => {
            let finalist = hunt.finalists.remove(at);
            ground.store.record_rejection(finalist.candidate, &serde_json::to_value(&verdict)?)?;
            hunt.screened -= 1;
            hunt.reject(region, verdict, observer);
            Ok(Outcome::Failed)
        }
    }
}

/// `U=4 STREAM=1`.
pub(crate) fn describe(params: &Params) -> String {
    if params.is_empty() {
        return "no parameters".to_owned();
    }
    params.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

fn known(ground: &Ground<'_>, task: &Task) -> Result<HashMap<(String, Params), Known>, EngineError> {
    let mut known = HashMap::new();
    if !ground.resumable {
        return Ok(known);
    }
    for candidate in ground.store.candidates(ground.run, &task.region.id.0)? {
        let outcome = match (screen_us(&candidate), &candidate.verdict) {
            (_, Some(verdict)) if is_rejection(verdict) => Outcome::Failed,
            (Some(us), _) => Outcome::Time(us),
            _ => continue,
        };
        let params: Params = serde_json::from_value(candidate.params)?;
        known.insert((candidate.source.0, params), Known { candidate: candidate.id, outcome });
    }
    Ok(known)
}

fn is_rejection(verdict: &Value) -> bool {
    verdict.get("verdict").and_then(Value::as_str) == Some("rejected")
}
