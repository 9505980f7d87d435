//! Progress on stderr: one plain line an event, with the time since the start.

use std::io::Write;
use std::time::Instant;

use autokernel_engine::{Event, Observer};

/// Prints events as lines.
pub(crate) struct Lines {
    start: Instant,
    quiet: bool,
}

impl Lines {
    /// Starts the clock.
    pub(crate) fn new(quiet: bool) -> Self {
        Self { start: Instant::now(), quiet }
    }
}

impl Lines {
    /// Whether it prints nothing.
    pub(crate) const fn quiet(&self) -> bool {
        self.quiet
    }
}

impl Observer for Lines {
    fn observe(&mut self, event: &Event) {
        if self.quiet {
            return;
        }
        let seconds = self.start.elapsed().as_secs_f64();
        error(&format!("{seconds:6.1} s  {}", sentence(event)));
    }
}

/// Ctrl-C once: the run finishes its candidate, keeps everything and says how to go on. Twice: at once.
/// Where no handler can be set, Ctrl-C ends the program, and the run can be resumed all the same.
pub(crate) fn stop_on_signal() {
    let _ = ctrlc::set_handler(|| {
        if autokernel_engine::interrupt() {
            error("stopping after this candidate; once more to stop at once");
        } else {
            std::process::exit(i32::from(crate::exit::ExitCode::Interrupted as u8));
        }
    });
}

/// Writes a line to stderr; a closed stderr is no reason to stop.
pub(crate) fn error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

fn sentence(event: &Event) -> String {
    match event {
        Event::Stage { what } | Event::Note { what } => what.clone(),
        Event::ModelLoaded { name, graphs, breaks, nodes, eager_us } => {
            format!(
                "{name}: {graphs} graph(s), {breaks} break(s), {nodes} operations, eager {}",
                time(*eager_us)
            )
        }
        Event::Ranked { regions, winnable } => {
            format!("{regions} region(s) to work on; at most {winnable:.2}x can be won there")
        }
        Event::RegionStarted { region, ops, count, share, eager_us, reach_us } => format!(
            "region {region} ({}; {count}x, {:.1} % of the time): eager {}, reach {}",
            short_ops(ops),
            share * 100.0,
            time(*eager_us),
            time(*reach_us)
        ),
        Event::Screened { region, params, us, best_us } => {
            format!("region {region}: {} with {params} (best {})", time(*us), time(*best_us))
        }
        Event::Rejected { region, stage, reason } => {
            format!("region {region}: rejected at {stage}: {reason}")
        }
        Event::Verdict { region, verdict, baseline, speedup } => {
            let ratio = speedup
                .map(|[value, low, high]| format!(" {value:.2}x [{low:.2}, {high:.2}]"))
                .unwrap_or_default();
            format!("region {region}: {verdict}{ratio} against {baseline}")
        }
        Event::FormMeasured { form, us } => format!("whole model, {form}: {}", time(*us)),
        Event::Finished { chosen, vs_eager, .. } => {
            let ratio = vs_eager
                .map(|[value, low, high]| format!(", {value:.2}x [{low:.2}, {high:.2}] over eager"))
                .unwrap_or_default();
            format!("chosen: {chosen}{ratio}")
        }
    }
}

/// Microseconds for people.
pub(crate) fn time(us: f64) -> String {
    if us >= 10_000.0 {
        format!("{:.1} ms", us / 1000.0)
    } else if us >= 1000.0 {
        format!("{:.2} ms", us / 1000.0)
    } else {
        format!("{us:.0} us")
    }
}

/// The first few operators and how many more.
pub(crate) fn short_ops(ops: &[String]) -> String {
    const SHOWN: usize = 5;
    let head = ops.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(" ");
    if ops.len() > SHOWN { format!("{head} +{}", ops.len() - SHOWN) } else { head }
}
