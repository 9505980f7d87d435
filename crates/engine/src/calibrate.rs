//! Calibration: how often the judge is right, and how long it takes, on this machine.
//!
//! Comparisons whose answer is known go the judge's own way: packages, zygotes, pairs of fresh
//! processes, evidence, decision. Equal sides ("A/A") must not be told apart, also beside a load;
//! a planted difference must be found. Developers run it with `cargo xtask calibrate`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::stats::Schedule;
use autokernel_core::stats::median;
use autokernel_core::task::Task;
use autokernel_core::verdict::Verdict;
use autokernel_judge::{
    Contest, Facts, FreshRunner, Judge, JudgedTask, Patience, Protocol, Record, ScreenOutcome, Screened,
    Staging, compare,
};
use serde::Serialize;

use crate::contestants::{Shared, Subject, environment, prepare};
use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::options::ModelSpec;
use crate::package::assemble;
use crate::session::{Oracle, Tools, beside, open_to_children, scratch};
use crate::tasks::rank;
use crate::trial::{Baselines, INPUTS, Places, Terms, fresh_runner, judge, stage, verdict, winner_of};

/// The parameter of the kernel file by which work is planted: this many passes, of which 100 are the base.
const PARAMETER: &str = "PASSES";

/// Passes without anything planted.
const BASE: i64 = 100;

/// How often the durations of screens and rejections are taken.
const REPEATS: usize = 5;

/// What is calibrated, and how long.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CalibrateOptions {
    /// Comparisons of equal sides, once on the machine as it is and once beside a load.
    pub aa: usize,
    /// Comparisons of each planted difference.
    pub planted: usize,
    /// Longest wait of one comparison for a calm machine, seconds.
    pub patience_s: f64,
    /// Model of one region.
    pub model: PathBuf,
    /// Kernel file for it, with the parameter `PASSES`.
    pub kernel: PathBuf,
}

/// `autokernel.calibration/1`.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Calibration {
    pub schema: String,
    pub options: CalibrateOptions,
    pub environment: BTreeMap<String, String>,
    pub protocol: Protocol,
    pub series: Vec<Series>,
    pub seconds: Durations,
    /// Whether every figure that was asked for holds.
    pub holds: bool,
}

/// Comparisons of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// What was compared.
    pub name: String,
    /// How many were wanted.
    pub wanted: usize,
    /// How many verdicts of each kind there were.
    pub verdicts: BTreeMap<String, usize>,
    /// Each comparison, in order.
    pub comparisons: Vec<Comparison>,
    /// The figure that was asked for.
    pub asked: String,
    /// Whether it holds.
    pub holds: bool,
}

/// One comparison.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Comparison {
    pub verdict: String,
    pub reason: Option<String>,
    pub speedup: Option<f64>,
    pub pairs: usize,
    pub noise: f64,
    pub unfit: bool,
    pub discarded: usize,
    pub seconds: f64,
}

/// How long the judge takes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Durations {
    /// A screen with its build, its build alone, and a wrong kernel's rejection without its build.
    pub screen: Vec<f64>,
    /// See there.
    pub build: Vec<f64>,
    /// See there.
    pub reject: Vec<f64>,
    /// PyTorch's own forms, once a region.
    pub baselines: f64,
    /// Package, zygote, choice of the baseline, pairs.
    pub verdict: f64,
    /// What the kernel of that verdict takes in the screen, microseconds.
    pub kernel_us: f64,
    /// Whether a rejection takes less than a second in the median, each screen less than one, and
    /// the verdict less than thirty.
    pub holds: bool,
}

/// What one kind of comparison is expected to give.
struct Plan {
    name: &'static str,
    /// Passes of both sides.
    passes: (i64, i64),
    loaded: bool,
    asked: &'static str,
    holds: fn(&Series) -> bool,
}

impl Series {
    fn count(&self, verdicts: &[&str]) -> usize {
        verdicts.iter().filter_map(|name| self.verdicts.get(*name)).sum()
    }

    fn share(&self, verdict: &str, within_s: f64) -> f64 {
        let good = |c: &&Comparison| c.verdict == verdict && c.seconds <= within_s;
        self.comparisons.iter().filter(good).count() as f64 / self.wanted.max(1) as f64
    }
}

const PLANS: &[Plan] = &[
    Plan {
        name: "equal",
        passes: (100, 100),
        loaded: false,
        asked: "at least 80 % same",
        holds: |s| s.share("same", f64::INFINITY) >= 0.8,
    },
    Plan {
        name: "equal, beside a load",
        passes: (100, 100),
        loaded: true,
        asked: "at most 1 in 200 faster or slower",
        holds: |s| s.count(&["faster", "slower"]) <= (s.wanted / 200).max(1),
    },
    Plan {
        name: "3 % slower",
        passes: (100, 103),
        loaded: false,
        asked: "never same or faster",
        holds: |s| s.count(&["same", "faster"]) == 0,
    },
    Plan {
        name: "10 % slower",
        passes: (100, 110),
        loaded: false,
        asked: "always slower",
        holds: |s| s.count(&["slower"]) == s.wanted,
    },
    Plan {
        name: "5 % faster",
        passes: (105, 100),
        loaded: false,
        asked: "faster in 90 % within 30 s",
        holds: |s| s.share("faster", 30.0) >= 0.9,
    },
    Plan {
        name: "3 % faster",
        passes: (103, 100),
        loaded: false,
        asked: "faster in 80 % within 90 s",
        holds: |s| s.share("faster", 90.0) >= 0.8,
    },
];

/// Runs all comparisons. `seen` gets the document so far after each series.
pub fn calibrate(
    tools: &Tools,
    options: &CalibrateOptions,
    observer: &mut dyn Observer,
    seen: &mut dyn FnMut(&Calibration),
) -> Result<Calibration, EngineError> {
    let scratch = scratch()?;
    let ground = Ground::prepare(tools, options, scratch.path(), observer)?;
    let mut calibration = Calibration {
        schema: "autokernel.calibration/1".to_owned(),
        options: options.clone(),
        environment: environment(tools),
        protocol: Protocol::default(),
        series: vec![],
        seconds: ground.durations(observer)?,
        holds: false,
    };
    seen(&calibration);
    let mut sides = Sides { ground: &ground, ready: vec![] };
    for plan in PLANS {
        let wanted = if plan.passes.0 == plan.passes.1 { options.aa } else { options.planted };
        if wanted > 0 {
            calibration.series.push(sides.series(plan, wanted, options, observer)?);
            seen(&calibration);
        }
    }
    calibration.holds = calibration.seconds.holds && calibration.series.iter().all(|series| series.holds);
    seen(&calibration);
    Ok(calibration)
}

/// The region with its inputs and its kernel file.
struct Ground<'a> {
    tools: &'a Tools,
    scratch: &'a Path,
    folder: PathBuf,
    task: Task,
    judge: Judge,
    judged: JudgedTask,
    file: KernelFile,
}

impl<'a> Ground<'a> {
    fn prepare(
        tools: &'a Tools,
        options: &CalibrateOptions,
        scratch: &'a Path,
        observer: &mut dyn Observer,
    ) -> Result<Self, EngineError> {
        let file = KernelFile::parse(&fs_err::read_to_string(&options.kernel)?)?;
        let spec = ModelSpec::new(&options.model.display().to_string(), vec![]);
        let mut oracle = Oracle::start(tools, &spec, 0, scratch)?;
        let capture = oracle.capture(tools)?;
        let task = rank(&mut oracle, tools, &capture)?.tasks.into_iter().next();
        let task = task.ok_or_else(|| EngineError::Package("the model has no region".to_owned()))?;
        let folder = scratch.join("task");
        fs_err::create_dir(&folder)?;
        open_to_children(&folder)?;
        let judged = stage(&mut oracle, tools, &task, &folder, observer)?;
        Ok(Self { tools, scratch, folder, task, judge: judge(tools), judged, file })
    }

    fn screen(&self, file: &KernelFile, passes: i64) -> Result<Box<Screened>, EngineError> {
        match self.judge.screen(&self.judged, file, &params(passes))? {
            ScreenOutcome::Ranked(screened) => Ok(screened),
            ScreenOutcome::Rejected(verdict) => {
                Err(EngineError::Package(format!("the kernel file is not honest: {verdict:?}")))
            }
        }
    }

    fn durations(&self, observer: &mut dyn Observer) -> Result<Durations, EngineError> {
        observer
            .observe(&Event::Stage { what: "how long screens, rejections and a verdict take".to_owned() });
        let mut durations = Durations::default();
        let wrong = wrong(&self.file)?;
        for _ in 0..REPEATS {
            let (screened, seconds) = timed(|| self.screen(&self.file, BASE))?;
            durations.kernel_us = screened.us;
            durations.screen.push(seconds);
            let (built, build) = timed(|| {
                let _beside = beside()?;
                Ok(self.judge.toolchain.build(&wrong, &params(BASE), &self.judge.build))
            })?;
            built.map_err(|error| EngineError::Package(error.to_string()))?;
            durations.build.push(build);
            let (outcome, all) = timed(|| Ok(self.judge.check(&self.judged, &wrong, &params(BASE))?))?;
            if outcome.is_ok() {
                return Err(EngineError::Package("a wrong kernel was accepted".to_owned()));
            }
            durations.reject.push((all - build).max(0.0));
        }
        let mut baselines = Baselines::new();
        let (_, seconds) =
            timed(|| Ok(baselines.prepare(self.tools, &self.task, self.scratch, &mut *observer)))?;
        durations.baselines = seconds;
        let screened = self.screen(&self.file, BASE)?;
        let winner = winner_of(&self.task.region, &self.file, &params(BASE), &screened, self.tools.threads);
        let places = Places { task: &self.folder, scratch: self.scratch };
        let terms = Terms { schedule: Schedule::confirm(), family: 1, observer };
        let (_, seconds) = timed(|| {
            verdict(self.tools, &self.judged, &baselines, &winner, &screened.checked, &places, terms)
        })?;
        durations.verdict = seconds;
        durations.holds = median(&durations.reject).is_some_and(|s| s < 1.0)
            && durations.screen.iter().zip(&durations.build).all(|(screen, build)| screen - build < 1.0)
            && durations.verdict < 30.0;
        Ok(durations)
    }
}

/// One side of comparisons: its processes, and its kernel for computing timed calls again.
#[derive(Clone)]
struct Side {
    zygote: Shared,
    kernel: FreshRunner,
}

/// The sides of comparisons: one for each number of passes, and a second one for equal sides.
struct Sides<'a> {
    ground: &'a Ground<'a>,
    ready: Vec<(i64, bool, Side)>,
}

impl Sides<'_> {
    fn side(&mut self, passes: i64, second: bool) -> Result<Side, EngineError> {
        let known =
            self.ready.iter().find(|(p, s, side)| (*p, *s) == (passes, second) && side.zygote.alive());
        if let Some((.., side)) = known {
            return Ok(side.clone());
        }
        let ground = self.ground;
        let screened = ground.screen(&ground.file, passes)?;
        let tools = ground.tools;
        let winner = winner_of(&ground.task.region, &ground.file, &params(passes), &screened, tools.threads);
        let kernel = fresh_runner(tools, winner.artefact.clone(), winner.plan.clone(), winner.threads);
        let folder = tempfile::Builder::new().prefix("side-").tempdir_in(ground.scratch)?.keep();
        open_to_children(&folder)?;
        let package = folder.join("package");
        assemble(&package, "ours+eager", &tools.interpreter.torch, &tools.device.features, &[winner], &[])?;
        let inputs = ground.folder.join(INPUTS);
        let subject = Subject::Packaged { region: &ground.task.region, package: &package, inputs: &inputs };
        let zygote = prepare(tools, &subject, ground.scratch)?.zygote;
        let side = Side { zygote, kernel };
        self.ready.push((passes, second, side.clone()));
        Ok(side)
    }

    fn series(
        &mut self,
        plan: &Plan,
        wanted: usize,
        options: &CalibrateOptions,
        observer: &mut dyn Observer,
    ) -> Result<Series, EngineError> {
        observer.observe(&Event::Stage { what: format!("{}: {wanted} comparisons", plan.name) });
        let (baseline, candidate) = (self.side(plan.passes.0, false)?, self.side(plan.passes.1, true)?);
        let _load = if plan.loaded { Some(Load::start(&self.ground.tools.interpreter.path)?) } else { None };
        let mut series = Series {
            name: plan.name.to_owned(),
            wanted,
            verdicts: BTreeMap::new(),
            comparisons: vec![],
            asked: plan.asked.to_owned(),
            holds: false,
        };
        for number in 1..=wanted {
            crate::interrupt::stop_if_asked("calibrate")?;
            let patience = Duration::from_secs_f64(options.patience_s);
            let comparison = self.once(&baseline, &candidate, patience)?;
            let what = format!("{} {number} of {wanted}: {comparison}", plan.name);
            observer.observe(&Event::Note { what });
            *series.verdicts.entry(comparison.verdict.clone()).or_default() += 1;
            series.comparisons.push(comparison);
        }
        series.holds = (plan.holds)(&series);
        Ok(series)
    }

    fn once(&self, baseline: &Side, candidate: &Side, patience: Duration) -> Result<Comparison, EngineError> {
        let ground = self.ground;
        let staging = Staging::Slots { region: &ground.judged.region, rerun: &candidate.kernel };
        let contest = Contest { truth: &ground.judged.truth, staging, protocol: Protocol::default() };
        let facts = Facts { subject: ground.task.region.id.0.clone(), ..Facts::default() };
        let mut baselines = [baseline.zygote.contestant("baseline", false)];
        let mut candidate = candidate.zygote.contestant("ours", true);
        let start = Instant::now();
        let mut say = |_: &str| {};
        let mut patience = Patience::new(patience, &mut say);
        let evidence = compare(
            &contest,
            &mut baselines,
            &mut candidate,
            (Schedule::confirm(), 1),
            facts,
            &mut patience,
        )?;
        let record = Record::new(evidence)?;
        Ok(Comparison::of(&record, start.elapsed()))
    }
}

impl Comparison {
    fn of(record: &Record, took: Duration) -> Self {
        let decided = &record.decided;
        let reason = match &decided.verdict {
            Verdict::Rejected { reason, .. } => Some(reason.clone()),
            _ => decided.reason.clone(),
        };
        Self {
            verdict: decided.verdict.name().to_owned(),
            reason,
            speedup: decided.verdict.speedup().map(|interval| interval.value),
            pairs: decided.pairs,
            noise: decided.noise,
            unfit: decided.unfit,
            discarded: record.evidence.discarded.len(),
            seconds: took.as_secs_f64(),
        }
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} after {} pairs, {:.1} s", self.verdict, self.pairs, self.seconds)?;
        if let Some(speedup) = self.speedup {
            write!(f, ", {speedup:.4}x")?;
        }
        write!(f, ", noise {:.2} %", self.noise * 100.0)
    }
}

fn params(passes: i64) -> Params {
    Params::from([(PARAMETER.to_owned(), passes)])
}

/// The kernel file with its last row left out.
fn wrong(file: &KernelFile) -> Result<KernelFile, EngineError> {
    let text = file.source.replacen("i < rows", "i < rows - 1", 1);
    if text == file.source {
        return Err(EngineError::Package("the kernel file has no loop `i < rows` to make wrong".to_owned()));
    }
    Ok(KernelFile::parse(&text)?)
}

fn timed<T>(work: impl FnOnce() -> Result<T, EngineError>) -> Result<(T, f64), EngineError> {
    let start = Instant::now();
    let done = work()?;
    Ok((done, start.elapsed().as_secs_f64()))
}

/// A neighbour that works in bursts, as a browser or a build does. Ends when dropped.
struct Load(Child);

impl Load {
    fn start(python: &Path) -> Result<Self, EngineError> {
        // Bursts from 5 to 80 ms with pauses from 20 to 400: some rounds are hit, some are not.
        const BURSTS: &str = "import os, random, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.monotonic() + random.uniform(0.005, 0.08)
    while time.monotonic() < end: pass
    time.sleep(random.uniform(0.02, 0.4))";
        let mut command = Command::new(python);
        command.args(["-S", "-c", BURSTS]).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Self(command.spawn()?))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(verdicts: &[(&str, usize, f64)]) -> Series {
        let comparisons: Vec<Comparison> = verdicts
            .iter()
            .flat_map(|(verdict, count, seconds)| {
                let one = Comparison {
                    verdict: (*verdict).to_owned(),
                    reason: None,
                    speedup: None,
                    pairs: 10,
                    noise: 0.0,
                    unfit: false,
                    discarded: 0,
                    seconds: *seconds,
                };
                vec![one; *count]
            })
            .collect();
        let mut counts = BTreeMap::new();
        for comparison in &comparisons {
            *counts.entry(comparison.verdict.clone()).or_default() += 1;
        }
        Series {
            name: String::new(),
            wanted: comparisons.len(),
            verdicts: counts,
            comparisons,
            asked: String::new(),
            holds: false,
        }
    }

    #[test]
    fn the_figures_that_are_asked_for() {
        let holds = |name: &str, verdicts: &[(&str, usize, f64)]| {
            let plan = PLANS.iter().find(|plan| plan.name == name).unwrap();
            (plan.holds)(&series(verdicts))
        };
        assert!(holds("equal", &[("same", 160, 5.0), ("ambiguous", 40, 5.0)]));
        assert!(!holds("equal", &[("same", 159, 5.0), ("ambiguous", 41, 5.0)]));
        assert!(holds("equal, beside a load", &[("ambiguous", 199, 5.0), ("slower", 1, 5.0)]));
        assert!(!holds(
            "equal, beside a load",
            &[("ambiguous", 198, 5.0), ("slower", 1, 5.0), ("faster", 1, 5.0)]
        ));
        assert!(holds("3 % slower", &[("slower", 20, 5.0), ("ambiguous", 30, 5.0)]));
        assert!(!holds("3 % slower", &[("slower", 49, 5.0), ("same", 1, 5.0)]));
        assert!(!holds("10 % slower", &[("slower", 49, 5.0), ("ambiguous", 1, 5.0)]));
        assert!(holds("5 % faster", &[("faster", 45, 29.0), ("ambiguous", 5, 5.0)]));
        assert!(!holds("5 % faster", &[("faster", 45, 31.0), ("faster", 5, 5.0)]), "too late");
        assert!(holds("3 % faster", &[("faster", 40, 89.0), ("ambiguous", 10, 5.0)]));
    }

    #[test]
    fn the_fixtures_are_what_is_planted() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/calibrate");
        let file = KernelFile::parse(&fs_err::read_to_string(folder.join("kernel.cpp")).unwrap()).unwrap();
        for plan in PLANS {
            for passes in [plan.passes.0, plan.passes.1] {
                file.check_params(&params(passes)).unwrap();
            }
        }
        assert_ne!(wrong(&file).unwrap().source, file.source);
    }
}
