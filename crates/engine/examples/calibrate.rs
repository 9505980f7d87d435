//! `cargo xtask calibrate`: how often the judge is right on this machine, and how long it takes.
//!
//! `--aa N`, `--planted N`: comparisons of equal sides and of each planted difference. `--patience S`:
//! longest wait of one comparison for a calm machine. `--out FILE`: where the document goes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use autokernel_engine::{CalibrateOptions, Calibration, Event, Observer, PythonChoice, Tools, calibrate};
use autokernel_testbed::{interpreter, workspace};

struct Lines;

impl Observer for Lines {
    #[expect(clippy::print_stderr, reason = "a developer's program")]
    fn observe(&mut self, event: &Event) {
        match event {
            Event::Stage { what } => eprintln!("{what}"),
            Event::Note { what } => eprintln!("  {what}"),
            _ => {}
        }
    }
}

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().collect();
    // Children are this program again; they must come before anything that starts a thread.
    if arguments.get(1).is_some_and(|word| word == "__worker") {
        return Ok(autokernel_worker::child_main(&arguments[2..]));
    }
    let (options, out) = read(&arguments[1..])?;
    let choice = PythonChoice { explicit: Some(interpreter().path), ..PythonChoice::default() };
    let tools = Tools::find(&choice, None, &mut Lines)?;
    let mut failed = None;
    let mut keep = |calibration: &Calibration| {
        // So far: a run that is stopped leaves what it found.
        let text = serde_json::to_string_pretty(calibration).unwrap_or_default();
        if let Err(error) = std::fs::write(&out, text + "\n") {
            failed = Some(error);
        }
    };
    let calibration = calibrate(&tools, &options, &mut Lines, &mut keep)?;
    if let Some(error) = failed {
        return Err(error).with_context(|| format!("failed to write {}", out.display()));
    }
    tell(&calibration);
    Ok(if calibration.holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[expect(clippy::print_stdout, reason = "a developer's program")]
fn tell(calibration: &Calibration) {
    let word = |holds| if holds { "holds" } else { "DOES NOT HOLD" };
    for series in &calibration.series {
        let counts: Vec<String> =
            series.verdicts.iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
        println!("{}: {} ({}: {})", series.name, counts.join(", "), series.asked, word(series.holds));
    }
    let seconds = &calibration.seconds;
    println!(
        "screens {:.2?} s of which builds {:.2?} s, rejections {:.2?} s, baselines {:.1} s, verdict {:.1} s of a kernel of {:.0} us: {}",
        seconds.screen,
        seconds.build,
        seconds.reject,
        seconds.baselines,
        seconds.verdict,
        seconds.kernel_us,
        word(seconds.holds)
    );
}

fn read(arguments: &[String]) -> Result<(CalibrateOptions, PathBuf)> {
    let fixtures = workspace().join("fixtures/calibrate");
    let mut options = CalibrateOptions {
        aa: 200,
        planted: 50,
        patience_s: 5.0,
        model: fixtures.join("model.py"),
        kernel: fixtures.join("kernel.cpp"),
    };
    let mut out = workspace().join("docs/results/calibration.json");
    let mut left = arguments.iter();
    while let Some(name) = left.next() {
        if name == "--quick" {
            (options.aa, options.planted) = (3, 2);
            continue;
        }
        let value = left.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--aa" => options.aa = value.parse()?,
            "--planted" => options.planted = value.parse()?,
            "--patience" => options.patience_s = value.parse()?,
            "--out" => out = PathBuf::from(value),
            other => bail!("unknown option {other}; there are --aa, --planted, --patience, --out, --quick"),
        }
    }
    if let Some(folder) = out.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok((options, out))
}
