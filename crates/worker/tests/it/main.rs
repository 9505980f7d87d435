//! The worker crate against real compilers and real children.
#![expect(unsafe_code, reason = "the path of the child program is given by an environment variable")]
#![expect(clippy::unwrap_used, reason = "a test's way to fail and to tell")]

mod admit;
mod build;
mod confine;
mod run;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use autokernel_core::kernel_file::{KernelFile, Params};
use autokernel_core::plan::{Plan, PlannedArg, PlannedLaunch};
use autokernel_worker::runner::RunnerConfig;
use autokernel_worker::toolchain::{Artefact, BuildError, BuildLimits, Toolchain};

/// Points the crate at the child program of this test.
fn set_up() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        // SAFETY: every test calls this first, so nothing reads the environment before it is set.
        unsafe { std::env::set_var("AUTOKERNEL_EXE", env!("CARGO_BIN_EXE_autokernel-worker-child")) };
    });
}

fn toolchain() -> &'static Toolchain {
    static FOUND: OnceLock<Toolchain> = OnceLock::new();
    set_up();
    FOUND.get_or_init(|| Toolchain::detect().unwrap())
}

/// A kernel file around this source.
fn kernel_file(source: &str) -> KernelFile {
    let header = "/*@ autokernel 1\nlanguage = \"c++\"\n[[launch]]\nentry = \"k\"\nargs = [\"in0\", \"out0\", \"in0.numel\", \"threads\"]\n@*/\n";
    KernelFile::parse(&format!("{header}#include <cmath>\n#include <cstdint>\n#include <cstring>\n{source}"))
        .unwrap()
}

fn try_build(source: &str) -> Result<Artefact, BuildError> {
    toolchain().build(&kernel_file(source), &Params::new(), &BuildLimits::default())
}

fn build(source: &str) -> Artefact {
    try_build(source).unwrap()
}

/// The body of `k(const float* in, float* out, int64_t n, int64_t threads)`.
fn build_body(body: &str) -> Artefact {
    build(&format!(
        "extern \"C\" void k(const float* in, float* out, int64_t n, int64_t threads) {{ (void)in; (void)out; (void)n; (void)threads;\n{body}\n}}"
    ))
}

/// `k(in0, out0, n, threads)` and nothing else.
fn plan(n: i64) -> Plan {
    let args = vec![PlannedArg::Input(0), PlannedArg::Output(0), PlannedArg::Int(n), PlannedArg::Threads];
    let launch = PlannedLaunch {
        entry: "k".to_owned(),
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        cluster: None,
        cooperative: false,
        args,
    };
    Plan { scratch: vec![], prepare: vec![], launches: vec![launch] }
}

fn config() -> RunnerConfig {
    set_up();
    // Torch brings a libgomp of its own; a run over that one sets the variable.
    if let Some(gomp) = std::env::var_os("AUTOKERNEL_TEST_GOMP") {
        return RunnerConfig { gomp: gomp.into(), threads: 2, timeout: Duration::from_secs(20) };
    }
    let output = Command::new("c++").arg("-print-file-name=libgomp.so.1").output().unwrap();
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    RunnerConfig { gomp: path.canonicalize().unwrap(), threads: 2, timeout: Duration::from_secs(20) }
}
