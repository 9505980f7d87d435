//! The whole corpus before the judge: correctness stages under two seeds, timing stages once.
//!
//! The program is its own child (`__worker ROLE`), so it has a `main` instead of libtest's.

use std::io::Write;
use std::process::ExitCode;

use autokernel_corpus::{Manifest, Options, run};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|word| word == "__worker") {
        return autokernel_worker::child_main(&args[2..]);
    }
    let say = |line: &str| {
        let _ = writeln!(std::io::stderr(), "{line}");
    };
    let asked: Vec<&str> = args[1..].iter().map(String::as_str).filter(|arg| !arg.starts_with('-')).collect();
    if args.iter().any(|arg| arg == "--list") {
        let _ = writeln!(std::io::stdout(), "the_corpus_is_judged_rightly: test");
        return ExitCode::SUCCESS;
    }
    if !asked.iter().all(|word| "the_corpus_is_judged_rightly".contains(word)) {
        return ExitCode::SUCCESS;
    }
    match judged_rightly(&mut |line| say(line)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            say(&format!("the_corpus_is_judged_rightly ... FAILED\n{why}"));
            ExitCode::FAILURE
        }
    }
}

fn judged_rightly(say: &mut (dyn FnMut(&str) + Send)) -> Result<(), String> {
    let root = autokernel_testbed::workspace();
    let manifest = Manifest::read(root).map_err(|error| format!("{error:#}"))?;
    let options = Options { rounds: 2, only: vec![], timed: true, seed: None };
    let report = run(root, &manifest, &options, say).map_err(|error| format!("{error:#}"))?;
    say(&format!("{:?} in {:.0} s", report.totals, report.seconds));
    if report.totals.good() && report.totals.honest > 0 && report.totals.exploits > 0 {
        return Ok(());
    }
    let wrong = report.files.iter().filter(|file| format!("{:?}", file.outcome) != "Right");
    let lines: Vec<String> = wrong
        .map(|file| {
            format!(
                "{:?}: {} on {} (round {}): {} {}",
                file.outcome, file.file, file.task, file.round, file.got, file.reason
            )
        })
        .collect();
    Err(format!("{}\nseeds: {:?}", lines.join("\n"), report.seeds))
}
