//! The regions of a run, one after the other: hunt, verdict, winner.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::stats::{Schedule, median};
use autokernel_core::task::Task;
use autokernel_core::verdict::Verdict;
use autokernel_judge::{Decided, Evidence, Judge, JudgedTask, ScreenOutcome};
use autokernel_store::{CandidateId, Store, TaskRow};
use serde::{Deserialize, Serialize};

use crate::error::{EngineError, full_message};
use crate::event::{Event, Observer};
use crate::hunt::{Finalist, Ground, Hunt, SEARCH_AGENT, hunt};
use crate::interrupt::stop_if_asked;
use crate::package::Winner;
use crate::report::{Baseline, CandidateCounts, RegionReport};
use crate::session::{Oracle, Tools, open_to_children};
use crate::trial::{Baselines, Places, Terms, Tried, judge, rebuild, stage, verdict, winner_of};

/// A region at which less than this share of the model's time can be won is left alone.
const LEAST_SHARE: f64 = 0.004;

/// When less than this share of the model's time can be won in all regions that wait, the search ends.
const ENOUGH: f64 = 0.02;

/// Shortest time given to one region, so that a late one still gets a fair look.
const LEAST_SLICE: Duration = Duration::from_secs(20);

/// A kernel within this factor of its reach has nothing left to win.
const AT_REACH: f64 = 1.05;

/// Candidates of a region that may come before the judge for a verdict, fastest in the screen first,
/// until one is faster. Each of them is held to the level of this many.
const FINALISTS: usize = 3;

/// How a region ended; stored with its task, so that a resumed run does not decide it again.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Outcome {
    report: RegionReport,
    winner: Option<KeptWinner>,
}

/// What it takes to have a winner again.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptWinner {
    source: String,
    params: Params,
    /// Hash of the artefact that was checked and measured.
    artefact: String,
}

impl KeptWinner {
    fn of(winner: &Winner) -> Self {
        let artefact = winner.artefact.id.clone();
        Self { source: winner.file.source.clone(), params: winner.params.clone(), artefact }
    }
}

/// What the regions came to.
#[derive(Default)]
pub(crate) struct Harvest {
    pub(crate) regions: Vec<RegionReport>,
    pub(crate) winners: Vec<Winner>,
    pub(crate) counts: CandidateCounts,
    /// Seconds from the start of the run.
    pub(crate) first_accepted: Option<f64>,
    /// `reach`, `budget` or `plateau`.
    pub(crate) stopped: &'static str,
}

/// Where the regions are worked on.
pub(crate) struct Field<'a> {
    pub(crate) tools: &'a Tools,
    pub(crate) store: &'a Store,
    pub(crate) run: &'a str,
    pub(crate) scratch: &'a Path,
    pub(crate) start: Instant,
    pub(crate) budget: Duration,
    /// Whether what an earlier life of the run found still holds.
    pub(crate) resumable: bool,
}

impl Field<'_> {
    /// Works through the tasks in their order until all are decided or the budget is spent.
    pub(crate) fn harvest(
        &self,
        oracle: &mut Oracle,
        tasks: &[Task],
        observer: &mut dyn Observer,
    ) -> Result<Harvest, EngineError> {
        let judge = judge(self.tools);
        let mut baselines = Baselines::new();
        let mut harvest = Harvest { stopped: "plateau", ..Harvest::default() };
        let outcomes = self.outcomes()?;
        // A budget is time for the search; capture and profile are not taken out of it.
        let end = Instant::now() + self.budget;
        let mut waiting: f64 = tasks.iter().map(Task::winnable_share).sum();
        for task in tasks {
            stop_if_asked(self.run)?;
            let share = task.winnable_share();
            let known = outcomes.get(&task.region.id.0);
            if let Some(outcome) = known
                && take_known(&judge, task, outcome, &mut harvest)?
            {
                // Decided before.
            } else if share < LEAST_SHARE {
                let reason =
                    format!("less than {:.1} % of the model's time can be won here", LEAST_SHARE * 100.0);
                harvest.regions.push(untried(task, &reason));
            } else if waiting < ENOUGH {
                if harvest.stopped == "plateau" {
                    harvest.stopped = "reach";
                }
                let reason =
                    format!("less than {:.0} % of the model's time is left to be won", ENOUGH * 100.0);
                harvest.regions.push(untried(task, &reason));
            } else if Instant::now() >= end {
                harvest.stopped = "budget";
                harvest.regions.push(untried(task, "the budget was spent"));
            } else {
                let left = end.saturating_duration_since(Instant::now());
                let part = left.mul_f64((share / waiting.max(1e-9)).clamp(0.0, 1.0));
                let deadline = Instant::now() + part.max(LEAST_SLICE.min(left));
                let ground = Ground {
                    judge: &judge,
                    store: self.store,
                    run: self.run,
                    agent: SEARCH_AGENT,
                    deadline,
                    resumable: self.resumable,
                };
                let done = self.region(oracle, &ground, task, &mut baselines, &mut harvest, observer);
                self.survive(task, done, &mut harvest, observer)?;
            }
            waiting -= share;
        }
        let at_reach = |row: &RegionReport| row.best_us.is_some_and(|us| us <= row.reach_us * AT_REACH);
        if harvest.stopped == "plateau" && harvest.regions.iter().all(at_reach) {
            harvest.stopped = "reach";
        }
        Ok(harvest)
    }

    /// What goes wrong with one region must not take the others with it, nor stand in the way of every
    /// later life of the run: the region is left alone, and why is said. What would hit the next region
    /// as well ends the run.
    fn survive(
        &self,
        task: &Task,
        done: Result<(), EngineError>,
        harvest: &mut Harvest,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let reason = match done {
            Ok(()) => return Ok(()),
            Err(error @ (EngineError::Model { .. } | EngineError::Peer(_) | EngineError::Evidence(_))) => {
                error
            }
            Err(EngineError::Judge(error)) if error.concerns_one_task() => EngineError::Judge(error),
            Err(error) => return Err(error),
        };
        let reason = format!("could not be judged: {}", full_message(&reason));
        observer.observe(&Event::Note { what: format!("region {}: {reason}", task.region.id) });
        self.decide(task, untried(task, &reason), None, harvest)
    }

    fn outcomes(&self) -> Result<HashMap<String, Outcome>, EngineError> {
        if !self.resumable {
            return Ok(HashMap::new());
        }
        let known = |row: TaskRow| outcome_of(&row).map(|outcome| (row.region, outcome));
        Ok(self.store.tasks(self.run)?.into_iter().filter_map(known).collect())
    }

    fn region(
        &self,
        oracle: &mut Oracle,
        ground: &Ground<'_>,
        task: &Task,
        baselines: &mut Baselines,
        harvest: &mut Harvest,
        observer: &mut dyn Observer,
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
        let examined = |report| RegionReport { controls: judged.controls.clone(), ..report };
        let mut found = Hunt::default();
        let searched = hunt(ground, task, &judged, &mut found, observer);
        count(&mut harvest.counts, &found);
        searched?;
        if found.stopped == "budget" {
            harvest.stopped = "budget";
        }
        if found.finalists.is_empty() {
            let report = match found.unsupported {
                Some(reason) => untried(task, &reason),
                None if found.built == 0 => untried(task, "the budget was spent"),
                None => {
                    let none = untried(task, "no candidate passed the judge");
                    RegionReport { verdict: "rejected".to_owned(), ..none }
                }
            };
            return self.decide(task, examined(report), None, harvest);
        }
        let missing = baselines.prepare(self.tools, task, self.scratch, observer);
        let bench = Bench { judged: &judged, baselines, folder: folder.path(), missing: &missing };
        let (report, winner) = self.finals(ground, task, &bench, found.finalists, harvest, observer)?;
        if winner.is_some() && harvest.first_accepted.is_none() {
            harvest.first_accepted = Some(self.start.elapsed().as_secs_f64());
        }
        self.decide(task, examined(report), winner, harvest)
    }

    /// The verdicts on the finalists: the next one gets its turn when one is rejected or left open.
    /// One that is not faster ends it, since the others were slower in the screen.
    fn finals(
        &self,
        ground: &Ground<'_>,
        task: &Task,
        bench: &Bench<'_>,
        finalists: Vec<Finalist>,
        harvest: &mut Harvest,
        observer: &mut dyn Observer,
    ) -> Result<(RegionReport, Option<Winner>), EngineError> {
        let family = finalists.len().min(FINALISTS);
        let mut told: Option<RegionReport> = None;
        for finalist in finalists.into_iter().take(FINALISTS) {
            stop_if_asked(self.run)?;
            let ended = self.last_word(ground, task, bench, finalist, family, harvest, observer)?;
            if ended.winner.is_some() {
                return Ok((ended.report, ended.winner));
            }
            told = Some(spokesman(told, ended.report));
            if ended.last {
                break;
            }
        }
        Ok((told.unwrap_or_else(|| untried(task, "no candidate passed the judge")), None))
    }

    /// The verdict on one finalist.
    #[expect(clippy::too_many_arguments, reason = "what a verdict needs, and where it is told")]
    fn last_word(
        &self,
        ground: &Ground<'_>,
        task: &Task,
        bench: &Bench<'_>,
        finalist: Finalist,
        family: usize,
        harvest: &mut Harvest,
        observer: &mut dyn Observer,
    ) -> Result<Ended, EngineError> {
        let Finalist { file, params, candidate, checked, .. } = finalist;
        let screened = match checked {
            Some(screened) => screened,
            // Screened in an earlier life of the run: what goes on from here is checked in this one.
            None => match ground.judge.screen(bench.judged, &file, &params)? {
                ScreenOutcome::Ranked(screened) => screened,
                ScreenOutcome::Rejected(rejected) => {
                    let report = judged_report(task, candidate, &rejected, None);
                    return Ok(Ended { report, winner: None, last: false });
                }
            },
        };
        harvest.counts.judged += 1;
        let winner = winner_of(&task.region, &file, &params, &screened, self.tools.threads);
        let places = Places { task: bench.folder, scratch: self.scratch };
        let terms = Terms { schedule: Schedule::search(), family, observer: &mut *observer };
        let tried =
            verdict(self.tools, bench.judged, bench.baselines, &winner, &screened.checked, &places, terms)?;
        let verdict = &tried.decided.verdict;
        self.store.record_verdict(
            candidate,
            &serde_json::to_value(verdict)?,
            &serde_json::to_value(&tried)?,
        )?;
        observer.observe(&verdict_event(task, &tried));
        let mut report = judged_report(task, candidate, verdict, Some(&tried));
        if !bench.missing.is_empty() {
            report.reason = format!("{}; without the baseline {}", report.reason, bench.missing.join(", "));
        }
        // A win against less than everything that PyTorch offers is no win.
        let faster = matches!(verdict, Verdict::Faster { .. }) && bench.missing.is_empty();
        Ok(Ended { last: ends_the_line(&tried.decided), report, winner: faster.then_some(winner) })
    }

    fn decide(
        &self,
        task: &Task,
        report: RegionReport,
        winner: Option<Winner>,
        harvest: &mut Harvest,
    ) -> Result<(), EngineError> {
        let kept = winner.as_ref().map(KeptWinner::of);
        let outcome = Outcome { report: report.clone(), winner: kept };
        self.store.set_outcome(self.run, &task.region.id.0, &serde_json::to_value(&outcome)?)?;
        harvest.regions.push(report);
        harvest.winners.extend(winner);
        Ok(())
    }
}

/// What the finalists of a region are judged with.
struct Bench<'a> {
    judged: &'a JudgedTask,
    baselines: &'a Baselines,
    folder: &'a Path,
    /// Baselines that can't be had.
    missing: &'a [&'static str],
}

/// How the verdict on a finalist came out.
struct Ended {
    report: RegionReport,
    winner: Option<Winner>,
    /// Whether no other finalist is to be tried.
    last: bool,
}

/// What a region came to so far, as its task's row says.
pub(crate) fn reported(row: &TaskRow) -> Option<RegionReport> {
    outcome_of(row).map(|outcome| outcome.report)
}

fn outcome_of(row: &TaskRow) -> Option<Outcome> {
    serde_json::from_value(row.outcome.clone()?).ok()
}

/// Whether a verdict puts its kernel before the region's winner, if there is one. Both stand against
/// the same baseline, so their speedups can be compared; the lower ends are, since a lucky figure is no gain.
pub(crate) fn is_better(
    store: &Store,
    run: &str,
    task: &Task,
    verdict: &Verdict,
) -> Result<bool, EngineError> {
    let Verdict::Faster { speedup } = verdict else { return Ok(false) };
    let known = outcome_of(&store.task(run, &task.region.id.0)?).filter(|outcome| outcome.winner.is_some());
    Ok(known.and_then(|outcome| outcome.report.speedup).is_none_or(|best| speedup.low > best.low))
}

/// Makes a kernel the winner of its region.
pub(crate) fn adopt(
    store: &Store,
    run: &str,
    task: &Task,
    candidate: CandidateId,
    tried: &Tried,
    winner: &Winner,
) -> Result<(), EngineError> {
    let report = judged_report(task, candidate, &tried.decided.verdict, Some(tried));
    let outcome = Outcome { report, winner: Some(KeptWinner::of(winner)) };
    Ok(store.set_outcome(run, &task.region.id.0, &serde_json::to_value(&outcome)?)?)
}

/// Whether the finalists behind one with this verdict have nothing to win. Screens of finalists differ by
/// a few percent: what was too close to the baseline to be decided, after most of a minute, will be again.
fn ends_the_line(decided: &Decided) -> bool {
    !matches!(decided.verdict, Verdict::Rejected { .. })
}

/// The report that speaks for a region whose finalists all failed: on the first that was not
/// rejected, which is the fastest that is right.
fn spokesman(known: Option<RegionReport>, next: RegionReport) -> RegionReport {
    match known {
        Some(known) if known.verdict != "rejected" || next.verdict == "rejected" => known,
        _ => next,
    }
}

/// Takes over a region that an earlier life of the run decided. `false` when its winner can't be had
/// again byte for byte (another compiler, say): then it is worked on anew.
fn take_known(
    judge: &Judge,
    task: &Task,
    outcome: &Outcome,
    harvest: &mut Harvest,
) -> Result<bool, EngineError> {
    if let Some(kept) = &outcome.winner {
        let file = KernelFile::parse(&kept.source)?;
        let Some(winner) = rebuild(judge, &task.region, &file, &kept.params, &kept.artefact) else {
            return Ok(false);
        };
        harvest.winners.push(winner);
    }
    harvest.regions.push(outcome.report.clone());
    Ok(true)
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
        controls: None,
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
    if let Verdict::Rejected { stage, reason } = verdict {
        report.reason = format!("{}: {reason}", stage.name());
    }
    if let Some(tried) = tried {
        if report.reason.is_empty() {
            report.reason = pairs_of(&tried.decided);
        }
        let evidence = &tried.evidence;
        if let Some(us) = median_us(evidence, &evidence.baseline) {
            report.baseline = Baseline { name: evidence.baseline.clone(), us };
        }
        report.best_us = median_us(evidence, &evidence.candidate);
    }
    report
}

/// What a verdict rests on, and why it is open where it is.
fn pairs_of(decided: &Decided) -> String {
    match (&decided.reason, decided.unfit) {
        (Some(reason), _) => format!("{} pairs of processes; {reason}", decided.pairs),
        (None, true) => format!("{} pairs of processes; the machine was noisy", decided.pairs),
        (None, false) => format!("{} pairs of processes", decided.pairs),
    }
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

#[cfg(test)]
mod tests {
    use autokernel_core::region::{REGION_SCHEMA, Region, RegionId};
    use autokernel_core::task::Rates;
    use autokernel_core::verdict::{Interval, Stage};

    use super::*;

    #[test]
    fn the_next_finalist_gets_its_turn_when_one_is_rejected() {
        let speedup = Interval { value: 1.0, low: 0.9, high: 1.1 };
        let ends = |verdict, unfit| {
            ends_the_line(&Decided { verdict, pairs: 10, reportable: true, noise: 0.0, unfit, reason: None })
        };
        assert!(!ends(Verdict::Rejected { stage: Stage::Timed, reason: String::new() }, false));
        assert!(ends(Verdict::Ambiguous { speedup }, false) && ends(Verdict::Ambiguous { speedup }, true));
        for verdict in [Verdict::Same { speedup }, Verdict::Slower { speedup }, Verdict::Faster { speedup }] {
            assert!(ends(verdict, false));
        }
    }

    #[test]
    fn the_fastest_that_is_right_speaks_for_a_region() {
        let region = Region {
            schema: REGION_SCHEMA.to_owned(),
            id: RegionId(String::new()),
            inputs: vec![],
            nodes: vec![],
            outputs: vec![],
        };
        let task = Task::new(region, vec![], 10.0, 100.0, Rates { copy: &[], flops_per_us: 0.0 });
        let report = |verdict: &str, candidate| RegionReport {
            verdict: verdict.to_owned(),
            candidate: Some(candidate),
            ..untried(&task, "")
        };
        let told = |verdicts: &[&str]| {
            let mut told = None;
            for (candidate, verdict) in verdicts.iter().enumerate() {
                told = Some(spokesman(told, report(verdict, candidate as i64)));
            }
            told.unwrap().candidate.unwrap()
        };
        assert_eq!(told(&["rejected", "rejected"]), 0);
        assert_eq!(told(&["rejected", "ambiguous", "slower"]), 1);
        assert_eq!(told(&["ambiguous", "rejected"]), 0);
    }
}
