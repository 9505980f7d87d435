//! Developer tasks. `cargo xtask tidy` checks the house rules; the same rules run as a test.
//! `cargo xtask corpus` puts exploits and honest kernels before the judge, `cargo xtask fuzz` feeds
//! parsers with mutated input.
//! `cargo xtask calibrate` measures how often the judge is right on this machine (an hour or two).
//! `cargo xtask zoo` takes many models through capture, partition and put-back.

mod tidy;
mod zoo;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    let root = tidy::root()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("tidy") => tidy::run(&root),
        Some("zoo") => zoo::run(&root, &arguments[1..]),
        // Optimised as users get it: the judge's speed is among the figures.
        Some("calibrate") => {
            program(&root, &["--release", "--package", "autokernel-engine", "--example", "calibrate"])
                .context("a figure does not hold, or calibrating failed; see above")
        }
        Some(task @ ("corpus" | "fuzz")) => program(&root, &["--package", &format!("autokernel-{task}")])
            .with_context(|| format!("{task} found something, or failed; see above")),
        other => bail!("unknown task {other:?}; there are: tidy, corpus, fuzz, calibrate, zoo"),
    }
}

/// A program of the workspace, apart from this one so that `tidy` builds no judge. It is given the
/// arguments that follow the task.
fn program(root: &Path, which: &[&str]) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["run", "--quiet"])
        .args(which)
        .arg("--")
        .args(std::env::args_os().skip(2))
        .current_dir(root)
        .status()
        .context("failed to start cargo")?;
    if status.success() { Ok(()) } else { bail!("it ended with {status}") }
}
