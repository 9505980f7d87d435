//! The `autokernel` program: arguments in, one command, results out.
//!
//! Results go to stdout, progress to stderr. With `--format json` stdout holds exactly one JSON
//! document (docs/json.md). Exit codes are in [`exit::ExitCode`].

mod arguments;
mod commands;
mod exit;
mod progress;
mod tables;

use clap::Parser;

fn main() -> std::process::ExitCode {
    let raw: Vec<String> = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    // Children are this program again; they must come before anything that starts a thread.
    if raw.get(1).is_some_and(|word| word == "__worker") {
        return autokernel_worker::child_main(&raw[2..]);
    }
    let arguments = match arguments::Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return exit::unusable_arguments(&error, &raw),
    };
    let format = arguments.format;
    match commands::run(arguments) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(failure) => failure.report(format),
    }
}
