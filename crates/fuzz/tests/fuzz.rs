//! Every target for a second: it runs, finds nothing, and takes some of what it is given, so that its
//! rules are looked at. CI runs each for 15 seconds besides (`cargo xtask fuzz`).
//!
//! The program is its own builder (`__worker launch`), so it has a `main` instead of libtest's.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use autokernel_fuzz::{TARGETS, drive};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|word| word == "__worker") {
        return autokernel_worker::child_main(&args[2..]);
    }
    let mut out = std::io::stdout();
    let asked = args[1..].iter().find(|arg| !arg.starts_with('-'));
    for target in
        TARGETS.iter().filter(|target| asked.is_none_or(|asked| target.name.contains(asked.as_str())))
    {
        if args.iter().any(|arg| arg == "--list") {
            let _ = writeln!(out, "{}: test", target.name);
            continue;
        }
        let seed = getrandom::u64().unwrap_or(1);
        match drive(target, seed, Duration::from_secs(1)) {
            Ok(outcome) if outcome.failure.is_none() && outcome.taken > 0 => {
                let _ = writeln!(out, "test {} ... ok ({} inputs)", target.name, outcome.tried);
            }
            other => {
                let _ = writeln!(out, "test {} ... FAILED under seed {seed}\n{other:?}", target.name);
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
