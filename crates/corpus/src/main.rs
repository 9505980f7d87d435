//! `cargo xtask corpus`: runs the corpus and prints what became of it.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use autokernel_corpus::{Manifest, Options, Report, run};
use clap::{Parser, ValueEnum};

/// Puts exploits and honest kernels before the judge.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask corpus")]
struct Arguments {
    /// Rounds of the correctness stages, each with inputs of another seed.
    #[arg(long, default_value_t = 2)]
    seeds: usize,
    /// Run only files whose names contain this; may be repeated.
    #[arg(long)]
    only: Vec<String>,
    /// Also the files that only the timing stages can catch, once, and the screen of all honest ones.
    #[arg(long)]
    timed: bool,
    /// The seed of the first round's inputs; those after it follow from it. Drawn by default.
    #[arg(long)]
    seed: Option<u64>,
    /// How the result is printed; progress goes to stderr.
    #[arg(long, value_enum, default_value = "json")]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Text,
    Json,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    // Runners and builders are this program again.
    if args.get(1).is_some_and(|word| word == "__worker") {
        return autokernel_worker::child_main(&args[2..]);
    }
    match corpus(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error:#}");
            ExitCode::from(2)
        }
    }
}

fn corpus(arguments: &Arguments) -> Result<bool> {
    let root = autokernel_testbed::workspace();
    let manifest = Manifest::read(root)?;
    let options = Options {
        rounds: arguments.seeds,
        only: arguments.only.clone(),
        timed: arguments.timed,
        seed: arguments.seed,
    };
    let report = run(root, &manifest, &options, &mut |line| {
        let _ = writeln!(std::io::stderr(), "{line}");
    })?;
    print(&report, arguments.format)?;
    Ok(report.totals.good())
}

fn print(report: &Report, format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match format {
        Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(report)?)?,
        Format::Text => writeln!(out, "{:#?}\n{:.0} s", report.totals, report.seconds)?,
    }
    Ok(())
}
