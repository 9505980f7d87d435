//! Puts the files of the corpus before the judge, task by task.
//!
//! The code path is the one of `autokernel judge`: a [`Court`] is opened on a task's model, inputs and
//! truth are staged under a random seed, and each file is parsed, built, admitted and run. Checks of
//! correctness go side by side on all cores; whatever is timed goes alone.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use autokernel_core::task::Task;
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_engine::{Court, ModelSpec, PythonChoice, Silent, Sitting, Tools, read_file};

use crate::manifest::{Depth, Manifest, exploit_file, task_file};
use crate::report::{FileReport, Outcome, Report, Totals};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounds of the correctness stages, each with inputs of another seed.
    pub rounds: usize,
    /// Only files whose names contain one of these; all where it is empty.
    pub only: Vec<String>,
    /// Also what only the timing stages can catch.
    pub timed: bool,
    /// The seed of the first round; the operating system's where it is `None`.
    pub seed: Option<u64>,
}

/// One file with what must become of it.
struct Trial {
    name: String,
    task: String,
    source: String,
    expected: Vec<Stage>,
    /// How far the judge has to go; honest files are screened, at most.
    depth: Depth,
    honest: bool,
    open: bool,
}

/// Runs the corpus of a workspace; `say` takes a line for every file.
pub fn run(
    root: &Path,
    manifest: &Manifest,
    options: &Options,
    say: &mut (dyn FnMut(&str) + Send),
) -> Result<Report> {
    let start = Instant::now();
    let (trials, skipped) = trials(root, manifest, &options.only)?;
    for line in &skipped {
        say(&format!("skipped: {line}"));
    }
    let interpreter = autokernel_testbed::prepare()?;
    let choice = PythonChoice { explicit: Some(interpreter.path), ..PythonChoice::default() };
    let tools = Tools::find(&choice, None, &mut Silent)?;
    let mut by_task: BTreeMap<&str, Vec<&Trial>> = BTreeMap::new();
    for trial in &trials {
        by_task.entry(&trial.task).or_default().push(trial);
    }
    let (mut seeds, mut files) = (vec![], vec![]);
    for (name, trials) in by_task {
        let model = ModelSpec::new(&task_file(root, name).display().to_string(), vec![]);
        let mut court =
            Court::open(&tools, &model, 0, &mut Silent).with_context(|| format!("task {name}"))?;
        let task = only_task(name, court.tasks())?;
        for round in 0..options.rounds.max(1) {
            let seed = match options.seed {
                // The bridge's generators take 63 bits.
                Some(first) => first.wrapping_add(round as u64) & (u64::MAX >> 1),
                None => Court::seed()?,
            };
            say(&format!("task {name}: inputs of seed {seed}"));
            seeds.push((name.to_owned(), seed));
            let sitting = court.stage(&task, seed, &mut Silent).with_context(|| format!("task {name}"))?;
            files.extend(round_of(&sitting, &trials, round, options.timed, say)?);
        }
    }
    let totals = Totals::of(&files);
    let seconds = start.elapsed().as_secs_f64();
    Ok(Report { schema: "autokernel.corpus-report/1", seeds, files, skipped, totals, seconds })
}

fn trials(root: &Path, manifest: &Manifest, only: &[String]) -> Result<(Vec<Trial>, Vec<String>)> {
    let wanted = |name: &str| only.is_empty() || only.iter().any(|part| name.contains(part.as_str()));
    let (mut trials, mut skipped) = (vec![], vec![]);
    for (name, exploit) in manifest.exploits.iter().filter(|(name, _)| wanted(name)) {
        if let Some(language) = exploit.language {
            skipped.push(format!("{name}: there is no judge for {} yet", language.name()));
            continue;
        }
        if let Some(arch) = exploit.arch.as_deref().filter(|arch| *arch != std::env::consts::ARCH) {
            skipped.push(format!("{name}: written for {arch}"));
            continue;
        }
        let path = root.join("fixtures/exploits").join(exploit_file(name, exploit));
        trials.push(Trial {
            name: name.clone(),
            task: exploit.task.clone(),
            source: fs_err::read_to_string(path)?,
            expected: exploit.stages.clone(),
            depth: exploit.depth,
            honest: false,
            open: exploit.open.is_some(),
        });
    }
    for (name, honest) in manifest.honest.iter().filter(|(name, _)| wanted(name)) {
        let path = root.join("fixtures/honest").join(format!("{name}.cpp"));
        trials.push(Trial {
            name: name.clone(),
            task: honest.task.clone(),
            source: fs_err::read_to_string(path)?,
            expected: vec![],
            depth: Depth::Screened,
            honest: true,
            open: honest.open.is_some(),
        });
    }
    ensure!(!trials.is_empty() || !skipped.is_empty(), "no file of the corpus has such a name");
    Ok((trials, skipped))
}

/// A task of the corpus is one region; a second one would be a surprise.
fn only_task(name: &str, tasks: Vec<Task>) -> Result<Task> {
    let count = tasks.len();
    match <[Task; 1]>::try_from(tasks) {
        Ok([task]) => Ok(task),
        Err(_) => Err(anyhow!("the model of task {name} has {count} regions; it must have one")),
    }
}

/// All files of a task under one seed.
fn round_of(
    sitting: &Sitting<'_>,
    trials: &[&Trial],
    round: usize,
    timed: bool,
    say: &mut (dyn FnMut(&str) + Send),
) -> Result<Vec<FileReport>> {
    let timed = timed && round == 0;
    let (mut quick, mut slow) = (vec![], vec![]);
    for trial in trials {
        if trial.depth == Depth::Checked || (trial.honest && !timed) {
            quick.push(*trial);
        } else if timed {
            slow.push(*trial);
        }
    }
    let say = Mutex::new(say);
    let next = AtomicUsize::new(0);
    let done = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8) {
            scope.spawn(|| {
                while let Some(trial) = quick.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = one(sitting, trial, Depth::Checked, round);
                    if let (Ok(report), Ok(mut say)) = (&report, say.lock()) {
                        say(&line(report));
                    }
                    if let Ok(mut done) = done.lock() {
                        done.push(report);
                    }
                }
            });
        }
    });
    let done = done.into_inner().map_err(|_| anyhow!("a thread of the corpus has panicked"))?;
    let say = say.into_inner().map_err(|_| anyhow!("a thread of the corpus has panicked"))?;
    let mut reports = done.into_iter().collect::<Result<Vec<_>>>()?;
    for trial in slow {
        let report = one(sitting, trial, trial.depth, round)?;
        say(&line(&report));
        reports.push(report);
    }
    reports.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(reports)
}

fn one(sitting: &Sitting<'_>, trial: &Trial, depth: Depth, round: usize) -> Result<FileReport> {
    let start = Instant::now();
    let verdict = judge(sitting, &trial.source, depth).with_context(|| trial.name.clone())?;
    let (stage, reason) = match &verdict {
        Some(Verdict::Rejected { stage, reason }) => (Some(*stage), reason.clone()),
        _ => (None, String::new()),
    };
    Ok(FileReport {
        file: trial.name.clone(),
        honest: trial.honest,
        task: trial.task.clone(),
        round,
        expected: trial.expected.clone(),
        got: verdict.as_ref().map_or("passed", Verdict::name).to_owned(),
        stage,
        reason,
        outcome: outcome(trial, verdict.as_ref()),
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// `None`: nothing is wrong with it as far as the judge was asked.
fn judge(sitting: &Sitting<'_>, source: &str, depth: Depth) -> Result<Option<Verdict>> {
    let file = match read_file(source, sitting.task()) {
        Ok(file) => file,
        Err(verdict) => return Ok(Some(verdict)),
    };
    if depth == Depth::Checked {
        for params in file.points() {
            if let Err(verdict) = sitting.check(&file, &params)? {
                return Ok(Some(verdict));
            }
        }
        return Ok(None);
    }
    let points = sitting.screen(&file, |_, _| {})?;
    let rejected = points.iter().find_map(|(_, outcome)| outcome.as_ref().err().cloned());
    match (rejected, depth) {
        (Some(verdict), _) => Ok(Some(verdict)),
        (None, Depth::Verdict) => Ok(Some(sitting.decide(&file, &points, &mut Silent)?)),
        (None, _) => Ok(None),
    }
}

fn outcome(trial: &Trial, verdict: Option<&Verdict>) -> Outcome {
    let stage = match verdict {
        Some(Verdict::Rejected { stage, .. }) => Some(*stage),
        _ => None,
    };
    let found = if trial.honest {
        if stage.is_none() { Outcome::Right } else { Outcome::Rejected }
    } else {
        let fake = trial.expected.is_empty();
        match stage {
            Some(stage) if trial.expected.contains(&stage) || fake => Outcome::Right,
            Some(_) => Outcome::Elsewhere,
            None if fake && !matches!(verdict, None | Some(Verdict::Faster { .. })) => Outcome::Right,
            None => Outcome::Accepted,
        }
    };
    match (found, trial.open) {
        (Outcome::Right, true) => Outcome::Closed,
        (Outcome::Accepted | Outcome::Rejected, true) => Outcome::Open,
        (found, _) => found,
    }
}

fn line(report: &FileReport) -> String {
    let mark = match report.outcome {
        Outcome::Right => "ok  ",
        Outcome::Open => "open",
        Outcome::Closed => "ok, though called open",
        Outcome::Accepted => "WRONG: an exploit was accepted",
        Outcome::Rejected => "WRONG: an honest kernel was rejected",
        Outcome::Elsewhere => "WRONG: caught elsewhere",
    };
    let stage = report.stage.map_or(String::new(), |stage| format!(" at {}", stage.name()));
    let why = report.reason.lines().next().unwrap_or_default();
    format!("{mark} {:5.1} s  {}: {}{stage} {why}", report.seconds, report.file, report.got)
}

#[cfg(test)]
mod tests {
    use super::*;
    use autokernel_core::verdict::Interval;

    #[test]
    fn outcomes() {
        let trial = |honest: bool, expected: &[Stage], open: bool| Trial {
            name: String::new(),
            task: String::new(),
            source: String::new(),
            expected: expected.to_vec(),
            depth: Depth::Checked,
            honest,
            open,
        };
        let rejected = |stage| Some(Verdict::Rejected { stage, reason: String::new() });
        let one = Interval { value: 1.0, low: 1.0, high: 1.0 };
        let (faster, same) = (Some(Verdict::Faster { speedup: one }), Some(Verdict::Same { speedup: one }));
        let exploit = trial(false, &[Stage::Run, Stage::Admission], false);
        let fake = trial(false, &[], false);
        for (trial, verdict, expected) in [
            (&trial(true, &[], false), None, Outcome::Right),
            (&trial(true, &[], false), rejected(Stage::Run), Outcome::Rejected),
            (&trial(true, &[], true), rejected(Stage::Run), Outcome::Open),
            (&exploit, rejected(Stage::Admission), Outcome::Right),
            (&exploit, rejected(Stage::Correctness), Outcome::Elsewhere),
            (&exploit, None, Outcome::Accepted),
            (&exploit, same.clone(), Outcome::Accepted),
            (&trial(false, &[Stage::Run], true), None, Outcome::Open),
            (&trial(false, &[Stage::Run], true), rejected(Stage::Run), Outcome::Closed),
            (&fake, faster, Outcome::Accepted),
            (&fake, same, Outcome::Right),
            (&fake, rejected(Stage::Timed), Outcome::Right),
            (&fake, None, Outcome::Accepted),
        ] {
            assert_eq!(outcome(trial, verdict.as_ref()), expected, "{:?} {verdict:?}", trial.expected);
        }
    }
}
