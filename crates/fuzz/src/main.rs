//! `cargo xtask fuzz`: runs one target or all of them, or one kept input again.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use autokernel_fuzz::{TARGETS, Target, again, drive, find};
use clap::Parser;

/// Feeds mutated input to everything that reads what nobody trusts.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask fuzz")]
struct Arguments {
    /// header, plan, wire, replay or admission; all by default.
    target: Option<String>,
    /// How long each target runs.
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// The seed of a run; drawn and printed by default.
    #[arg(long)]
    seed: Option<u64>,
    /// A kept input to run once; needs a target.
    #[arg(long, requires = "target")]
    input: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    // The builder is this program again.
    if args.get(1).is_some_and(|word| word == "__worker") {
        return autokernel_worker::child_main(&args[2..]);
    }
    match fuzz(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(&format!("{error:#}"));
            ExitCode::from(2)
        }
    }
}

fn fuzz(arguments: &Arguments) -> Result<bool> {
    let targets = match &arguments.target {
        None => TARGETS.to_vec(),
        Some(name) => {
            let known = TARGETS.map(|target| target.name).join(", ");
            vec![find(name).with_context(|| format!("no target `{name}`; there are {known}"))?]
        }
    };
    if let (Some(path), [target]) = (&arguments.input, &targets[..]) {
        let result = again(target, &fs_err::read(path)?);
        say(&format!("{}: {result:?}", target.name));
        return Ok(result.is_ok());
    }
    let mut good = true;
    for target in targets {
        good &= one(target, arguments)?;
    }
    Ok(good)
}

fn one(target: &'static Target, arguments: &Arguments) -> Result<bool> {
    let seed = match arguments.seed {
        Some(seed) => seed,
        None => getrandom::u64().map_err(std::io::Error::other)?,
    };
    say(&format!("{}: seed {seed}", target.name));
    let outcome = drive(target, seed, Duration::from_secs(arguments.seconds))?;
    if let Some(failure) = outcome.failure {
        let input = failure.input.display();
        say(&format!(
            "{}: {}\n  again: cargo xtask fuzz {} --input {input}",
            target.name, failure.what, target.name
        ));
        return Ok(false);
    }
    say(&format!("{}: {} inputs, {} of them taken", target.name, outcome.tried, outcome.taken));
    Ok(true)
}

fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
