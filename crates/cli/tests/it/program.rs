//! Starting the program in a home of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

/// Longest life of one command; a test that hangs must say so.
const LIMIT: Duration = Duration::from_mins(15);

/// How a command ended.
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// The one document on stdout.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}\n{}", self.told()))
    }

    /// Everything that it printed, for messages.
    pub(crate) fn told(&self) -> String {
        format!("exit code {:?}\nstdout:\n{}\nstderr:\n{}", self.code, self.stdout, self.stderr)
    }

    /// It must have ended with `code`.
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.told());
        self
    }
}

/// An empty folder for one test, in the target folder. It is left there to be looked at.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// A file of `fixtures/`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    let path = autokernel_testbed::workspace().join("fixtures").join(name);
    assert!(path.exists(), "{}", path.display());
    path
}

/// The path of a model of `fixtures/models/` as an argument.
pub(crate) fn model(name: &str) -> String {
    fixture(&format!("models/{name}.py")).display().to_string()
}

/// The program with its data in `home`, away from the user's; compiled baselines are shared.
pub(crate) fn program(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_autokernel"));
    command
        .env("AUTOKERNEL_HOME", home)
        .env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"))
        .stdin(Stdio::null())
        .current_dir(home);
    for name in ["AUTOKERNEL_PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX"] {
        command.env_remove(name);
    }
    command
}

/// The program with the tests' Python named in the environment.
pub(crate) fn program_with_python(home: &Path) -> Command {
    let mut command = program(home);
    command.env("AUTOKERNEL_PYTHON", autokernel_testbed::interpreter().path);
    command
}

/// Runs a command to its end.
pub(crate) fn run(command: Command) -> Outcome {
    let shown = format!("{command:?}");
    let output = assert_cmd::Command::from_std(command).timeout(LIMIT).output();
    let output = output.unwrap_or_else(|error| panic!("{shown}: {error}"));
    Outcome {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// The program with the tests' Python and `--format json`.
pub(crate) fn json(home: &Path, arguments: &[&str]) -> Outcome {
    let mut command = program_with_python(home);
    command.args(arguments).args(["--format", "json"]);
    run(command)
}
