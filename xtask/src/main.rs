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
        Some("calibrate") => calibrate(&root),
        Some(task @ ("corpus" | "fuzz")) => program(&root, &format!("autokernel-{task}")),
        Some("zoo") => zoo::run(&root, &arguments[1..]),
        other => bail!("unknown task {other:?}; there are: tidy, corpus, fuzz, calibrate, zoo"),
    }
}

/// A program of the engine's own, optimised as users get it: the judge's speed is among the figures.
fn calibrate(root: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args([
            "run",
            "--quiet",
            "--release",
            "--package",
            "autokernel-engine",
            "--example",
            "calibrate",
            "--",
        ])
        .args(std::env::args_os().skip(2))
        .current_dir(root)
        .status()
        .context("failed to start cargo")?;
    if status.success() { Ok(()) } else { bail!("a figure does not hold, or calibrating failed; see above") }
}

/// A program of the workspace, apart from this one so that `tidy` builds no judge. It is given the
/// arguments that follow the task.
fn program(root: &Path, package: &str) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["run", "--quiet", "--package", package, "--"])
        .args(std::env::args_os().skip(2))
        .current_dir(root)
        .status()
        .context("failed to start cargo")?;
    if status.success() { Ok(()) } else { bail!("it found something, or failed; see above") }
}
