//! Many models through capture, partition and put-back: `cargo xtask zoo [FILE[:NAME] ...]`.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Files of models, when none is named.
const FILES: [&str; 2] = ["fixtures/models/hard.py", "fixtures/models/zoo.py"];

/// Runs the survey in the tests' Python; its table goes to stdout as JSON, a line a model to stderr.
pub(crate) fn run(root: &Path, models: &[String]) -> Result<()> {
    let cargo = || {
        let mut command = Command::new(env!("CARGO"));
        command.current_dir(root).stdin(Stdio::null());
        command
    };
    let built =
        cargo().args(["build", "--quiet", "--release", "--package", "autokernel-testbed"]).status()?;
    if !built.success() {
        bail!("the partition can't be built");
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), Into::into);
    let program = root.join(target).join("release/autokernel-testbed");
    let found = Command::new(&program).stderr(Stdio::inherit()).output()?;
    let python = String::from_utf8(found.stdout).context("the path of the tests' Python is no text")?;
    if !found.status.success() {
        bail!("no Python for the tests");
    }
    let mut survey = Command::new(python.trim());
    survey.args(["-B", "-W", "ignore", "python/tests/survey.py", "--partition"]).arg(&program);
    if models.is_empty() {
        survey.args(FILES);
    } else {
        survey.args(models);
    }
    let held = survey.current_dir(root).status()?;
    if held.success() { Ok(()) } else { bail!("not every model came back whole") }
}
