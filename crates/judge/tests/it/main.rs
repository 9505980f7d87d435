//! The judge against real compilers and real children: honest kernels are accepted, each kind of
//! wrong one is turned away at the stage that is there for it.
//!
//! The program is its own child (`__worker ROLE`), so it has a `main` instead of libtest's.
#![expect(clippy::unwrap_used, reason = "a test, though the compiler is not told so")]

mod kernels;
mod panel;
mod python;
mod task;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use autokernel_core::kernel_file::KernelFile;
use autokernel_core::plan::Device;
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_judge::{Judge, JudgedTask, ScreenOutcome, Screened};
use autokernel_worker::runner::RunnerConfig;
use autokernel_worker::toolchain::{BuildLimits, Toolchain};

use kernels::{HONEST, WRONG, kernel};

/// Without the bytes of the artefact.
fn brief(outcome: &ScreenOutcome) -> String {
    match outcome {
        ScreenOutcome::Rejected(verdict) => format!("{verdict:?}"),
        ScreenOutcome::Ranked(s) => format!("{} us, {} calls, {:?}", s.us, s.calls, s.samples),
    }
}

struct World {
    judge: Judge,
    task: JudgedTask,
}

impl World {
    fn new() -> Self {
        let output = Command::new("c++").arg("-print-file-name=libgomp.so.1").output().unwrap();
        let gomp = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()).canonicalize().unwrap();
        let judge = Judge {
            toolchain: Toolchain::detect().unwrap(),
            runner: RunnerConfig { gomp, threads: 2, timeout: Duration::from_secs(20) },
            device: Device { sms: 0, shared: 0, cores: 2 },
            build: BuildLimits::default(),
        };
        Self { judge, task: task::rms_norm() }
    }

    fn screen(&self, text: &str) -> ScreenOutcome {
        let file = KernelFile::parse(text).unwrap();
        self.judge.screen(&self.task, &file, &file.default_params()).unwrap()
    }

    fn ranked(&self, text: &str) -> Screened {
        match self.screen(text) {
            ScreenOutcome::Ranked(screened) => *screened,
            ScreenOutcome::Rejected(verdict) => panic!("rejected: {verdict:?}"),
        }
    }

    fn rejected(&self, name: &str, text: &str) -> (Stage, String) {
        match self.screen(text) {
            ScreenOutcome::Rejected(Verdict::Rejected { stage, reason }) => (stage, reason),
            other => panic!("{name} was not rejected: {}", brief(&other)),
        }
    }
}

fn honest_kernels_are_ranked(world: &World) {
    for (name, body) in HONEST {
        let screened = world.ranked(&kernel(body));
        assert!(screened.us > 0.0 && screened.samples.len() >= 3, "{name}");
        assert_eq!(screened.checked.families.len(), world.task.truth.all().len());
        let worst = screened.checked.worst[0];
        assert!(worst.ratio > 0.0 && worst.ratio < 4.0, "{name}: {worst:?}");
    }
    // Tests run beside other tests, whose load is many times larger than the kernels.
    let us = |name: &str| {
        let body = HONEST.iter().find(|(n, _)| *n == name).unwrap().1;
        world.ranked(&kernel(body)).us
    };
    assert!((0..8).any(|_| us("repeated") > 2.0 * us("plain")), "twelve times the work takes longer");
}

fn wrong_kernels_are_rejected_where_they_should_be(world: &World) {
    for (name, stage, body) in WRONG {
        let (at, reason) = world.rejected(name, &kernel(body));
        assert_eq!(at, *stage, "{name}: {reason}");
        assert!(!reason.is_empty() && reason.len() < 10_000, "{name}: {reason}");
        assert!(!reason.contains("/tmp/"), "{name}: no paths for agents: {reason}");
    }
}

fn parse_and_admission_come_first(world: &World) {
    let guarded = kernel("").replacen("language", "guard = [\"in0.size(1) % 64 == 0\"]\nlanguage", 1);
    let (stage, reason) = world.rejected("guard", &guarded);
    assert!(stage == Stage::Parse && reason.contains("in0.size(1) % 64"), "{stage:?} {reason}");
    let triton = "\"\"\"autokernel 1\nlanguage = \"triton\"\n[[launch]]\nentry = \"k\"\ngrid = [\"1\"]\nargs = [\"in0\", \"in1\", \"out0\"]\n\"\"\"\n";
    assert_eq!(world.rejected("triton", triton).0, Stage::Parse);
}

fn a_time_that_nothing_can_beat_goes_to_audit(world: &World) {
    let mut task = task::rms_norm();
    task.floor_us = Some(1e9);
    let file = KernelFile::parse(&kernel(HONEST[0].1)).unwrap();
    let outcome = world.judge.screen(&task, &file, &file.default_params()).unwrap();
    assert!(
        matches!(outcome, ScreenOutcome::Rejected(Verdict::Rejected { stage: Stage::Audit, .. })),
        "{}",
        brief(&outcome)
    );
}

fn reasons_say_where_but_not_what(world: &World) {
    let body = WRONG.iter().find(|(name, ..)| *name == "last element dropped").unwrap().2;
    let (_, reason) = world.rejected("last element dropped", &kernel(body));
    assert!(
        reason.contains("output 0 on inputs") && reason.contains("first bad element in rows"),
        "{reason}"
    );
}

type Test = (&'static str, fn(&World));

const TESTS: &[Test] = &[
    ("honest_kernels_are_ranked", honest_kernels_are_ranked),
    ("wrong_kernels_are_rejected_where_they_should_be", wrong_kernels_are_rejected_where_they_should_be),
    ("parse_and_admission_come_first", parse_and_admission_come_first),
    ("a_time_that_nothing_can_beat_goes_to_audit", a_time_that_nothing_can_beat_goes_to_audit),
    ("reasons_say_where_but_not_what", reasons_say_where_but_not_what),
    ("honest_kernels_pass_and_mutants_do_not", |_| panel::honest_kernels_pass_and_mutants_do_not()),
    ("a_model_is_compared_with_its_stand_ins", |_| python::a_model_is_compared_with_its_stand_ins()),
];

#[expect(clippy::print_stdout, reason = "a test program")]
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|arg| arg == "__worker") {
        return autokernel_worker::child_main(&args);
    }
    if args.iter().any(|arg| arg == "--list") {
        for (name, _) in TESTS {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    let filter = args.iter().skip(1).find(|arg| !arg.starts_with("--"));
    let world = World::new();
    // A failed assertion ends the program with its message, which is all that is wanted of it.
    for (name, test) in
        TESTS.iter().filter(|(name, _)| filter.is_none_or(|filter| name.contains(filter.as_str())))
    {
        let start = Instant::now();
        test(&world);
        println!("test {name} ... ok ({:.1} s)", start.elapsed().as_secs_f64());
    }
    ExitCode::SUCCESS
}
