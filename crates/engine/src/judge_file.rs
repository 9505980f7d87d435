//! `judge`: one kernel file before the same judge that the search agent faces.

use std::fmt::Write;

use autokernel_core::kernel_file::Params;
use autokernel_core::task::Task;
use autokernel_core::verdict::{Interval, Stage, Verdict};
use autokernel_judge::Screened;
use autokernel_store::{NewCandidate, Store};
use serde::Serialize;
use serde_json::json;

use crate::court::{Court, fastest, read_file, refused};
use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::hunt::describe;
use crate::options::OptimizeOptions;
use crate::session::{PythonChoice, Tools};
use crate::trial::Baselines;

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
    let file = match read_file(source, &task) {
        Ok(file) => file,
        Err(verdict) => return Ok(report(&verdict)),
    };
    let choice = choice.or(options.python.as_ref());
    let tools = Tools::find(&choice, Some(options.threads), observer)?;
    let mut court = Court::open(&tools, &options.model, options.seed, observer)?;
    let sitting = court.stage(&task, Court::seed()?, observer)?;

    let mut best_us = f64::INFINITY;
    let points = sitting.screen(&file, |params, outcome| {
        let region = task.region.id.0.clone();
        observer.observe(&match outcome {
            Ok(ranked) => {
                best_us = best_us.min(ranked.us);
                Event::Screened { region, params: describe(params), us: ranked.us, best_us }
            }
            Err(Verdict::Rejected { stage, reason }) => {
                Event::Rejected { region, stage: stage.name().to_owned(), reason: reason.clone() }
            }
            Err(_) => return,
        });
    })?;
    for (params, outcome) in &points {
        if let Err(verdict) = outcome {
            record(store, &row.id, &task, source, params, verdict, None)?;
        }
    }
    let mut screened: Vec<(Params, f64)> = points
        .iter()
        .filter_map(|(params, outcome)| Some((params.clone(), outcome.as_ref().ok()?.us)))
        .collect();
    screened.sort_by(|a, b| a.1.total_cmp(&b.1));
    let Some((params, checked)) = fastest(&points) else { return Ok(report(&refused(&points))) };

    let mut baselines = Baselines::new();
    let (tried, missing) = sitting.verdict(&mut baselines, (&file, params), checked, observer)?;
    let decided = &tried.decided.verdict;
    let candidate = record(store, &row.id, &task, source, params, decided, Some(checked))?;
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
    report.params = params.clone();
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
