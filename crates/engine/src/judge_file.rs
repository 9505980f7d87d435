//! `judge`: one kernel file before the same judge that the search agent faces.

use std::fmt::Write;

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::check_region;
use autokernel_core::task::Task;
use autokernel_core::verdict::{Interval, Stage, Verdict};
use autokernel_judge::{ScreenOutcome, Screened};
use autokernel_store::{NewCandidate, Store};
use serde::Serialize;
use serde_json::json;

use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::hunt::describe;
use crate::options::OptimizeOptions;
use crate::session::{Oracle, PythonChoice, Tools, scratch};
use crate::trial::{Baselines, Places, Terms, judge, stage, verdict, winner_of};

/// Parameter points that `judge` screens at most before the verdict of the fastest.
const MOST_POINTS: usize = 24;

/// `autokernel.judge/1`.
#[derive(Clone, Debug, Serialize)]
pub struct JudgeReport {
    /// `autokernel.judge/1`.
    pub schema: String,
    /// The run.
    pub run: String,
    /// The region.
    pub region: String,
    /// `faster`, `same`, `slower`, `ambiguous`, `rejected`.
    pub verdict: String,
    /// Where it was rejected.
    pub stage: Option<Stage>,
    /// Why, in words that help to mend it.
    pub reason: String,
    /// Best of PyTorch's own over this kernel.
    pub speedup: Option<Interval>,
    /// The baseline.
    pub baseline: Option<String>,
    /// Under which hash the store keeps the evidence; `judge --replay` takes it.
    pub evidence: Option<String>,
    /// The parameter values that were judged.
    pub params: Params,
    /// Microseconds in the screen by parameter values, fastest first; for ranking only.
    pub screened: Vec<(Params, f64)>,
    /// The same for a reader.
    pub text: String,
}

/// Judges a kernel file for one region of a run.
pub fn judge_file(
    choice: &PythonChoice,
    store: &mut Store,
    run: &str,
    region: &str,
    source: &str,
    observer: &mut dyn Observer,
) -> Result<JudgeReport, EngineError> {
    let row = store.run(run)?;
    let task: Task = serde_json::from_value(store.task(&row.id, region)?.body)?;
    let options: OptimizeOptions = serde_json::from_value(row.options)?;
    // What a reader of the file can see is said before a model is loaded.
    let report = |verdict: &Verdict| empty_report(&row.id, &task, verdict);
    let rejected = |stage, reason: String| Verdict::Rejected { stage, reason };
    let file = match KernelFile::parse(source) {
        Ok(file) => file,
        Err(error) => return Ok(report(&rejected(Stage::Parse, error.to_string()))),
    };
    if let Err(error) = check_region(&file, &task.region) {
        return Ok(report(&rejected(Stage::Parse, error.to_string())));
    }
    let choice = choice.or(options.python.as_ref());
    let tools = Tools::find(&choice, Some(options.threads), observer)?;
    let scratch = scratch()?;
    observer.observe(&Event::Stage { what: format!("loading {}", options.model.spec) });
    let mut oracle = Oracle::start(&tools, &options.model, options.seed, scratch.path())?;
    oracle.capture(&tools)?;
    let folder = scratch.path().join("task");
    fs_err::create_dir(&folder)?;
    let judged = stage(&mut oracle, &tools, &task, &folder, observer)?;
    let judge = judge(&tools);

    let mut screened: Vec<(Params, f64)> = vec![];
    let mut best: Option<(Params, Box<Screened>)> = None;
    let mut refused = None;
    for params in file.points().take(MOST_POINTS) {
        match judge.screen(&judged, &file, &params)? {
            ScreenOutcome::Ranked(ranked) => {
                let best_us = screened.iter().map(|(_, us)| *us).fold(ranked.us, f64::min);
                observer.observe(&Event::Screened {
                    region: task.region.id.0.clone(),
                    params: describe(&params),
                    us: ranked.us,
                    best_us,
                });
                screened.push((params.clone(), ranked.us));
                if best.as_ref().is_none_or(|(_, known)| ranked.us < known.us) {
                    best = Some((params, ranked));
                }
            }
            ScreenOutcome::Rejected(verdict) => {
                record(store, &row.id, &task, source, &params, &verdict, None)?;
                if let Verdict::Rejected { stage, reason } = &verdict {
                    observer.observe(&Event::Rejected {
                        region: task.region.id.0.clone(),
                        stage: stage.name().to_owned(),
                        reason: reason.clone(),
                    });
                }
                refused = Some(verdict);
            }
        }
    }
    screened.sort_by(|a, b| a.1.total_cmp(&b.1));
    let Some((params, checked)) = best else {
        return Ok(report(
            &refused.unwrap_or_else(|| rejected(Stage::Parse, "the file has no parameter point".to_owned())),
        ));
    };

    let mut baselines = Baselines::new();
    let missing = baselines.prepare(&tools, &task, scratch.path(), observer);
    let winner = winner_of(&task.region, &file, &params, &checked, tools.threads);
    let places = Places { task: &folder, scratch: scratch.path() };
    let terms = Terms { family: 1, observer };
    let tried = verdict(&tools, &judged, &baselines, &winner, &checked.checked, &places, terms)?;
    let decided = &tried.decided.verdict;
    let candidate = record(store, &row.id, &task, source, &params, decided, Some(&checked))?;
    let evidence =
        store.record_verdict(candidate, &serde_json::to_value(decided)?, &serde_json::to_value(&tried)?)?;
    let mut report = report(decided);
    report.evidence = Some(evidence.0);
    if let Some(reason) = &tried.decided.reason {
        report.reason.clone_from(reason);
    }
    if !missing.is_empty() {
        let so_far = if report.reason.is_empty() { String::new() } else { format!("{}; ", report.reason) };
        report.reason = format!("{so_far}without the baseline {}", missing.join(", "));
    }
    report.params = params;
    report.screened = screened;
    report.baseline = Some(tried.evidence.baseline);
    report.text = describe_report(&report);
    Ok(report)
}

fn record(
    store: &Store,
    run: &str,
    task: &Task,
    source: &str,
    params: &Params,
    verdict: &Verdict,
    screened: Option<&Screened>,
) -> Result<autokernel_store::CandidateId, EngineError> {
    Ok(store.record_candidate(&NewCandidate {
        run,
        region: &task.region.id.0,
        agent: "person",
        source,
        params: serde_json::to_value(params)?,
        artefact: screened.map(|screened| screened.artefact.id.as_str()),
        screen: screened.map(|screened| json!({ "us": screened.us, "checked": screened.checked })),
        verdict: Some(serde_json::to_value(verdict)?),
    })?)
}

fn empty_report(run: &str, task: &Task, verdict: &Verdict) -> JudgeReport {
    let (stage, reason) = match verdict {
        Verdict::Rejected { stage, reason } => (Some(*stage), reason.clone()),
        _ => (None, String::new()),
    };
    let mut report = JudgeReport {
        schema: "autokernel.judge/1".to_owned(),
        run: run.to_owned(),
        region: task.region.id.0.clone(),
        verdict: verdict.name().to_owned(),
        stage,
        reason,
        speedup: verdict.speedup(),
        baseline: None,
        evidence: None,
        params: Params::new(),
        screened: vec![],
        text: String::new(),
    };
    report.text = describe_report(&report);
    report
}

fn describe_report(report: &JudgeReport) -> String {
    let mut text = format!("region {}: {}", report.region, report.verdict);
    if let Some(stage) = report.stage {
        let _ = write!(text, " at {}: {}", stage.name(), report.reason);
    } else if !report.reason.is_empty() {
        let _ = write!(text, " ({})", report.reason);
    }
    if let Some(speedup) = report.speedup {
        let against = report.baseline.as_deref().unwrap_or("the baseline");
        let _ = write!(
            text,
            ", {:.2}x [{:.2}, {:.2}] against {against}",
            speedup.value, speedup.low, speedup.high
        );
    }
    for (params, us) in report.screened.iter().take(8) {
        let _ = write!(text, "\n  screen: {us:.1} us with {}", describe(params));
    }
    if let Some(evidence) = report.evidence.as_ref().and_then(|id| id.get(..12)) {
        let _ = write!(text, "\n  evidence: {evidence} (`autokernel judge --replay {evidence}`)");
    }
    text
}
