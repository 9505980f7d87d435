//! What a desk says, for a mind and for a program: results only, never data, seeds or right answers.

use std::collections::BTreeMap;
use std::fmt::Write;

use autokernel_agent::Answer;
use autokernel_core::kernel_file::Params;
use autokernel_core::task::Task;
use autokernel_core::verdict::{Interval, Stage, Verdict};
use autokernel_store::{Candidate, Store};
use serde::Serialize;

use crate::brief::screen_us;
use crate::error::EngineError;
use crate::harvest::reported;
use crate::hunt::{Hunt, describe};
use crate::report::OptimizeReport;
use crate::trial::Tried;

/// Lines of candidates in a history.
const LINES: usize = 24;

/// What came of a kernel file. `autokernel.judgement/1`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Judgement {
    schema: &'static str,
    run: String,
    region: String,
    /// `rejected`, `correct` (checked and screened, not compared), or a verdict.
    verdict: String,
    stage: Option<Stage>,
    reason: String,
    params: Params,
    /// Microseconds of the bare kernel in the screen; for ranking.
    screen_us: Option<f64>,
    reach_us: f64,
    /// PyTorch's own operators, from the profile.
    eager_us: f64,
    /// Bytes that any kernel has to move, over the screen's time.
    gb_per_s: Option<f64>,
    /// Worst metrics of each output against their limits.
    errors: Vec<String>,
    /// Best of PyTorch's own over this kernel, and which that was.
    speedup: Option<Interval>,
    baseline: Option<String>,
    /// Whether it is the region's winner now.
    pub(super) winner: bool,
    /// Why it was not compared.
    pub(super) unproven: Option<&'static str>,
    /// What the sweep saw, in a few lines.
    surface: String,
    points: u64,
    rejected_at: BTreeMap<String, u64>,
}

impl Judgement {
    pub(super) fn new(run: &str, task: &Task, hunt: &Hunt) -> Self {
        let mut judgement = Self {
            schema: "autokernel.judgement/1",
            run: run.to_owned(),
            region: task.region.id.0.clone(),
            verdict: "rejected".to_owned(),
            stage: None,
            reason: String::new(),
            params: Params::new(),
            screen_us: None,
            reach_us: task.reach_us,
            eager_us: task.eager_us,
            gb_per_s: None,
            errors: vec![],
            speedup: None,
            baseline: None,
            winner: false,
            unproven: None,
            surface: hunt.surface.clone(),
            points: hunt.built,
            rejected_at: hunt.rejected.iter().map(|(stage, count)| (stage.clone(), *count)).collect(),
        };
        if let Some(best) = hunt.finalists.first() {
            "correct".clone_into(&mut judgement.verdict);
            judgement.params = best.params.clone();
            judgement.screen_us = Some(best.us);
            judgement.gb_per_s = Some(task.region.bytes() as f64 / best.us / 1e3);
            if let Some(screened) = &best.checked {
                let each = screened.checked.worst.iter().zip(&task.contract.limits).enumerate();
                judgement.errors = each
                    .filter_map(|(index, (worst, limits))| {
                        let limits = limits.as_ref()?;
                        Some(format!(
                            "out{index}: rms ratio {:.2} of {}, worst element {:.1} of {}",
                            worst.ratio, limits.ratio, worst.element, limits.element
                        ))
                    })
                    .collect();
            }
        } else if let Some((stage, reason)) = &hunt.last_rejection {
            judgement.stage = Some(*stage);
            judgement.reason.clone_from(reason);
        }
        judgement
    }

    /// A file that could not even be read.
    pub(super) fn rejected(run: &str, task: &Task, verdict: Verdict) -> Self {
        let mut hunt = Hunt::default();
        if let Verdict::Rejected { stage, reason } = verdict {
            hunt.last_rejection = Some((stage, reason));
        }
        Self::new(run, task, &hunt)
    }

    /// Adds what the comparison said.
    pub(super) fn decided(&mut self, tried: &Tried, missing: &[&str]) {
        let verdict = &tried.decided.verdict;
        verdict.name().clone_into(&mut self.verdict);
        self.speedup = verdict.speedup();
        self.baseline = Some(tried.evidence.baseline.clone());
        self.reason = format!("{} pairs of processes", tried.decided.pairs);
        if let Some(why) = &tried.decided.reason {
            let _ = write!(self.reason, "; {why}");
        }
        if let Verdict::Rejected { stage, reason } = verdict {
            self.stage = Some(*stage);
            self.reason.clone_from(reason);
        }
        if !missing.is_empty() {
            let _ = write!(self.reason, "; without the baseline {}", missing.join(", "));
        }
    }

    pub(super) fn answer(&self) -> Answer {
        Answer::new(&self.text(), serde_json::to_value(self).unwrap_or_default())
    }

    fn text(&self) -> String {
        let mut text = self.verdict.to_uppercase();
        if let Some(stage) = self.stage {
            let _ = write!(text, " at {}", stage.name());
        }
        if let Some(speedup) = self.speedup {
            let against = self.baseline.as_deref().unwrap_or("PyTorch's best");
            let _ = write!(
                text,
                ": {:.2}x [{:.2}, {:.2}] against {against}",
                speedup.value, speedup.low, speedup.high
            );
        }
        if !self.reason.is_empty() {
            let _ = write!(text, "\n{}", self.reason);
        }
        if let (Some(us), Some(rate)) = (self.screen_us, self.gb_per_s) {
            let _ = write!(
                text,
                "\nscreen {us:.1} us ({rate:.1} GB/s of mandatory traffic); reach {:.1} us, eager {:.1} us; {}",
                self.reach_us,
                self.eager_us,
                describe(&self.params)
            );
        }
        for line in &self.errors {
            let _ = write!(text, "\n{line}");
        }
        if let Some(why) = self.unproven {
            let _ = write!(text, "\nnot compared with PyTorch: {why}");
        }
        if self.winner {
            text.push_str("\nThis is the region's winner now.");
        }
        if !self.surface.is_empty() {
            let _ = write!(text, "\n{}", self.surface);
        }
        text
    }
}

/// One region of a run, for `tasks`.
#[derive(Debug, Serialize)]
struct TaskLine {
    rank: usize,
    region: String,
    ops: Vec<String>,
    count: usize,
    share: f64,
    eager_us: f64,
    reach_us: f64,
    verdict: String,
    speedup: Option<Interval>,
    candidates: usize,
}

pub(super) fn tasks(store: &Store, run: &str) -> Result<Answer, EngineError> {
    let mut lines = vec![];
    for (rank, row) in store.tasks(run)?.into_iter().enumerate() {
        let task: Task = serde_json::from_value(row.body.clone())?;
        let known = reported(&row);
        lines.push(TaskLine {
            rank,
            region: task.region.id.0.clone(),
            ops: task.region.op_names(),
            count: task.occurrences.len(),
            share: task.share,
            eager_us: task.eager_us,
            reach_us: task.reach_us,
            verdict: known.as_ref().map_or_else(|| "open".to_owned(), |known| known.verdict.clone()),
            speedup: known.and_then(|known| known.speedup),
            candidates: store.candidates(run, &row.region)?.len(),
        });
    }
    let mut text = format!("run {run}: {} region(s)\n", lines.len());
    for line in &lines {
        let won = line
            .speedup
            .map_or_else(String::new, |s| format!(" {:.2}x [{:.2}, {:.2}]", s.value, s.low, s.high));
        let ops: String = line.ops.join(" ").chars().take(90).collect();
        let _ = writeln!(
            text,
            "{}  {}  {:.1} % of the model, {}x; eager {:.0} us, reach {:.0} us; {}{won}; {} candidate(s); {ops}",
            line.rank,
            line.region,
            line.share * 100.0,
            line.count,
            line.eager_us,
            line.reach_us,
            line.verdict,
            line.candidates
        );
    }
    let data = serde_json::json!({ "schema": "autokernel.tasks/1", "run": run, "tasks": lines });
    Ok(Answer::new(&text, data))
}

/// A candidate, for `history`.
#[derive(Debug, Serialize)]
struct Tried1 {
    candidate: i64,
    agent: String,
    note: String,
    params: Params,
    screen_us: Option<f64>,
    verdict: Option<Verdict>,
}

pub(super) fn history(store: &Store, run: &str, task: &Task) -> Result<Answer, EngineError> {
    let candidates = store.candidates(run, &task.region.id.0)?;
    let mut notes: BTreeMap<String, String> = BTreeMap::new();
    let mut rows = vec![];
    for candidate in &candidates {
        let note = match notes.get(&candidate.source.0) {
            Some(note) => note.clone(),
            None => note_of(store, candidate)?,
        };
        notes.insert(candidate.source.0.clone(), note.clone());
        rows.push(Tried1 {
            candidate: candidate.id.0,
            agent: candidate.agent.clone(),
            note,
            params: serde_json::from_value(candidate.params.clone())?,
            screen_us: screen_us(candidate),
            verdict: candidate.verdict.clone().map(serde_json::from_value).transpose()?,
        });
    }
    let mut text =
        format!("region {}: {} candidate(s), reach {:.1} us\n", task.region.id, rows.len(), task.reach_us);
    // The fastest of each idea first, then what was rejected and why, the latest first.
    let mut best: BTreeMap<&str, &Tried1> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.screen_us.is_some()) {
        let known = best.entry(&row.note).or_insert(row);
        if row.screen_us < known.screen_us {
            *known = row;
        }
    }
    let mut ideas: Vec<&Tried1> = best.into_values().collect();
    ideas.sort_by(|a, b| a.screen_us.unwrap_or(f64::MAX).total_cmp(&b.screen_us.unwrap_or(f64::MAX)));
    for row in ideas.iter().take(LINES / 2) {
        let verdict = row.verdict.as_ref().map_or("not compared", Verdict::name);
        let speedup = row
            .verdict
            .as_ref()
            .and_then(Verdict::speedup)
            .map_or_else(String::new, |s| format!(" {:.2}x", s.value));
        let _ = writeln!(
            text,
            "{:.1} us  {verdict}{speedup}  {} ({}; {})",
            row.screen_us.unwrap_or_default(),
            row.note,
            describe(&row.params),
            row.agent
        );
    }
    let fell = rows.iter().rev().filter_map(|row| match &row.verdict {
        Some(Verdict::Rejected { stage, reason }) => Some((row, stage, reason)),
        _ => None,
    });
    for (row, stage, reason) in fell.take(LINES / 2) {
        let reason: String = reason.lines().next().unwrap_or_default().chars().take(160).collect();
        let _ = writeln!(text, "rejected at {}: {reason}  ({}; {})", stage.name(), row.note, row.agent);
    }
    let data = serde_json::json!({
        "schema": "autokernel.history/1", "run": run, "region": task.region.id, "reach_us": task.reach_us, "candidates": rows,
    });
    Ok(Answer::new(&text, data))
}

fn note_of(store: &Store, candidate: &Candidate) -> Result<String, EngineError> {
    let source = String::from_utf8_lossy(&store.get_file(&candidate.source)?).into_owned();
    Ok(autokernel_core::kernel_file::KernelFile::parse(&source)
        .map_or_else(|_| "unreadable".to_owned(), |file| file.note))
}

pub(super) fn finished(report: &OptimizeReport) -> String {
    let mut text = format!("chosen form: {}", report.model.chosen.as_deref().unwrap_or("none"));
    if let Some(speedup) = &report.model.speedup {
        for (against, s) in [("eager", speedup.vs_eager), ("the best plain form", speedup.vs_best_plain)] {
            let _ = write!(text, "\n{:.2}x [{:.2}, {:.2}] over {against}", s.value, s.low, s.high);
        }
    }
    for form in &report.model.forms {
        let _ = write!(text, "\n{}: {:.0} us", form.form, form.us.median);
    }
    if let Some(package) = &report.package {
        let _ = write!(text, "\npackage: {package}");
    }
    text
}
