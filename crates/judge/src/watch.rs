//! A look at what else the machine did while something was measured.
//!
//! What the kernel counts is read when a round begins and when it ends, while our children stand
//! still: nothing is polled beside a sample. The exact witness is the time that our own threads were
//! ready to run and did not get a processor; shares of the whole machine say whose fault that was.

use std::fmt;
use std::fs::read_to_string;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// More than this share of the machine used by others makes a sample unfit.
pub const UNFIT_BUSY: f64 = 0.10;

/// So does more than this share of their time that our threads had to wait for a processor,
pub const UNFIT_WAITED: f64 = 0.10;

/// when others used at least this share: with more threads than processors ours wait for each other.
const OTHERS_AT_WORK: f64 = 0.02;

/// The kernel books whole ticks, and to whoever runs when one ends: so many may be somebody else's.
const BOOKING_ERROR: u64 = 2;

/// Fewest ticks of all processors together that say anything.
const FEWEST_TICKS: u64 = 20;

/// What others did with the processors during a sample. Shares are of all processor time, 0 to 1;
/// what a kernel does not tell is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Share that neither we nor our children used, nor was idle.
    pub others: f64,
    /// Share that the hypervisor gave to someone else.
    pub steal: f64,
    /// Share that we and our children used.
    #[serde(default)]
    pub ours: f64,
    /// Share of the time in which our children's threads could have run that they had to wait.
    #[serde(default)]
    pub waited: Option<f64>,
    /// Share of the wall clock in which some task of the machine, ours or not, waited for a
    /// processor (the kernel's "pressure stall information").
    #[serde(default)]
    pub pressure: Option<f64>,
    /// Tasks of others that were ready to run while ours all stood still: the fewer of the counts
    /// before and after.
    #[serde(default)]
    pub queue: Option<u64>,
}

impl Contention {
    /// Nobody else was there.
    pub const CALM: Self =
        Self { others: 0.0, steal: 0.0, ours: 0.0, waited: None, pressure: None, queue: None };

    /// Whether a sample under it may decide nothing.
    pub fn unfit(&self) -> bool {
        let others = self.others + self.steal;
        // A kernel that does not count the waiting of a thread may count that of the machine.
        let waited = self.waited.or(self.pressure).unwrap_or(0.0);
        others > UNFIT_BUSY || (waited > UNFIT_WAITED && others > OTHERS_AT_WORK)
    }

    /// The worse of both.
    #[must_use]
    pub fn worst(self, other: Self) -> Self {
        let badness = |c: &Self| (c.others + c.steal).max(c.waited.unwrap_or(0.0));
        if badness(&self) >= badness(&other) { self } else { other }
    }
}

impl fmt::Display for Contention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| share * 100.0;
        write!(f, "others used {:.0} % of the processors", percent(self.others + self.steal))?;
        match self.waited {
            Some(waited) => write!(f, " and our threads waited {:.0} % of their time", percent(waited)),
            None => Ok(()),
        }
    }
}

/// Counts from [`Watch::start`] to [`Watch::finish`].
#[derive(Debug)]
pub struct Watch {
    pids: Vec<i32>,
    started: Instant,
    before: Option<Counts>,
}

/// What the kernel has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// Ticks of all processors.
    busy: u64,
    steal: u64,
    total: u64,
    /// Ticks of ours.
    ours: u64,
    /// Nanoseconds of our children's threads.
    ran: Option<u64>,
    waited: Option<u64>,
    /// Microseconds.
    stalled: Option<u64>,
    /// Now, without the reader.
    runnable: Option<u64>,
}

impl Watch {
    /// Starts counting; `pids` are children that measure, alive until the end and standing still now.
    pub fn start(pids: &[i32]) -> Self {
        Self { pids: pids.to_vec(), before: count(pids), started: Instant::now() }
    }

    /// The shares since the start; `None` for less than a fifth of a second on one processor, whose
    /// ticks say nothing.
    pub fn finish(self) -> Option<Contention> {
        let wall = self.started.elapsed().as_secs_f64();
        shares(self.before?, count(&self.pids)?, wall)
    }
}

fn shares(before: Counts, after: Counts, wall: f64) -> Option<Contention> {
    let total = after.total.checked_sub(before.total).filter(|total| *total >= FEWEST_TICKS)? as f64;
    let since = |of: fn(&Counts) -> u64| of(&after).saturating_sub(of(&before));
    let both = |of: fn(&Counts) -> Option<u64>| Some((of(&before)?, of(&after)?));
    let grown = |of: fn(&Counts) -> Option<u64>| both(of).map(|(b, a)| a.saturating_sub(b) as f64);
    let ours = since(|c| c.ours);
    let others = since(|c| c.busy).saturating_sub(ours).saturating_sub(BOOKING_ERROR) as f64;
    let waited = grown(|c| c.ran).zip(grown(|c| c.waited));
    Some(Contention {
        others: others / total,
        steal: since(|c| c.steal) as f64 / total,
        ours: ours as f64 / total,
        waited: waited.filter(|(ran, _)| *ran > 0.0).map(|(ran, waited)| waited / (ran + waited)),
        pressure: grown(|c| c.stalled).map(|stalled| (stalled / (wall * 1e6)).min(1.0)),
        queue: both(|c| c.runnable).map(|(b, a)| b.min(a)),
    })
}

fn count(pids: &[i32]) -> Option<Counts> {
    let stat = read_to_string("/proc/stat").ok()?;
    let (busy, steal, total) = machine_ticks(&stat)?;
    let text = |name: &str| read_to_string(format!("/proc/{name}/stat")).ok();
    let process = |name: &str| process_ticks(&text(name)?);
    // Runners that came and went in between are ours, too.
    let reaped = text("self").and_then(|stat| reaped_ticks(&stat)).unwrap_or(0);
    // Without the time of one of ours, it would pass for somebody else's.
    let children = pids.iter().map(|pid| process(&pid.to_string())).sum::<Option<u64>>()?;
    let ours = reaped + process("self").unwrap_or(0) + children;
    let scheduled = scheduled(pids);
    Some(Counts {
        busy,
        steal,
        total,
        ours,
        ran: scheduled.map(|(ran, _)| ran),
        waited: scheduled.map(|(_, waited)| waited),
        stalled: read_to_string("/proc/pressure/cpu").ok().and_then(|text| stalled(&text)),
        runnable: runnable(&stat).map(|tasks| tasks.saturating_sub(1)),
    })
}

/// Busy, stolen and all ticks from the first line of /proc/stat. Guest time is part of user time.
fn machine_ticks(stat: &str) -> Option<(u64, u64, u64)> {
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .take(8)
        .map_while(|f| f.parse().ok())
        .collect();
    let [user, nice, system, idle, iowait, irq, softirq, steal] = fields[..] else { return None };
    let busy = user + nice + system + irq + softirq;
    Some((busy, steal, busy + idle + iowait + steal))
}

/// Tasks that run or are ready to, from /proc/stat.
fn runnable(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("procs_running ")?.trim().parse().ok())
}

/// User and system ticks of the children that a process has waited for.
fn reaped_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(13);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// User and system ticks of a process. Its name may hold anything, so fields count from the last parenthesis.
fn process_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Nanoseconds that all threads of these processes ran, and that they waited for a processor while
/// they could have run. A stopped thread does neither. `None` where the kernel does not count it.
fn scheduled(pids: &[i32]) -> Option<(u64, u64)> {
    let mut sum = (0, 0);
    for pid in pids {
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
            // A thread may end between the two reads.
            let Ok(text) = read_to_string(task.ok()?.path().join("schedstat")) else { continue };
            let (ran, waited) = schedstat(&text)?;
            sum = (sum.0 + ran, sum.1 + waited);
        }
    }
    (sum.0 > 0).then_some(sum)
}

fn schedstat(text: &str) -> Option<(u64, u64)> {
    let mut fields = text.split_whitespace().map(str::parse);
    Some((fields.next()?.ok()?, fields.next()?.ok()?))
}

/// Microseconds in which some task waited, from /proc/pressure/cpu.
fn stalled(text: &str) -> Option<u64> {
    text.lines().find(|line| line.starts_with("some "))?.rsplit_once("total=")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_parsed() {
        let stat = "cpu  100 1 20 300 40 5 6 7 9 0\ncpu0 1\nctxt 9\nprocs_running 3\nprocs_blocked 0\n";
        assert_eq!(machine_ticks(stat), Some((132, 7, 479)));
        assert_eq!(machine_ticks("cpu  1 2 3\n"), None);
        assert_eq!(runnable(stat), Some(3));
        assert_eq!(runnable("cpu 1\n"), None);
        assert_eq!(reaped_ticks("42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 17 4 5 6 20"), Some(11));
        assert_eq!(process_ticks("42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 17 4 0 0 20"), Some(21));
        assert_eq!(schedstat("234815235 386215960 83\n"), Some((234_815_235, 386_215_960)));
        assert_eq!(schedstat("-\n"), None);
        let pressure = "some avg10=6.15 avg60=2.75 avg300=6.73 total=4165195163\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(stalled(pressure), Some(4_165_195_163));
        assert!(count(&[std::process::id() as i32]).is_some());
    }

    fn since_zero(after: Counts) -> Contention {
        let before = Counts { ran: Some(0), waited: Some(0), ..Counts::default() };
        shares(before, after, 1.0).unwrap()
    }

    #[test]
    fn shares_of_others() {
        let busy = since_zero(Counts { busy: 82, steal: 5, total: 100, ours: 50, ..Counts::default() });
        assert!((busy.others - 0.3).abs() < 1e-12 && (busy.steal - 0.05).abs() < 1e-12 && busy.unfit());
        assert!((busy.ours - 0.5).abs() < 1e-12);
        assert!(!since_zero(Counts { busy: 55, total: 100, ours: 50, ..Counts::default() }).unfit());
        let short = Counts { busy: 1, total: 10, ..Counts::default() };
        assert_eq!(shares(Counts::default(), short, 1.0), None);
    }

    #[test]
    fn threads_that_had_to_wait_make_a_sample_unfit_when_others_worked() {
        let counts = |busy, ran, waited| {
            since_zero(Counts {
                busy,
                total: 100,
                ours: 50,
                ran: Some(ran),
                waited: Some(waited),
                ..Counts::default()
            })
        };
        let preempted = counts(57, 800, 200);
        assert_eq!(preempted.waited, Some(0.2));
        assert!(preempted.unfit(), "{preempted}");
        assert!(!counts(57, 990, 10).unfit(), "others had room of their own");
        assert!(!counts(50, 500, 500).unfit(), "more threads than processors wait for each other");
        let told = Contention { waited: None, pressure: Some(0.3), others: 0.05, ..Contention::CALM };
        assert!(told.unfit(), "pressure stands in where waiting is not counted");
        assert_eq!(Contention::CALM.worst(preempted), preempted);
        assert!(preempted.to_string().contains("20 %"), "{preempted}");
    }

    #[test]
    fn work_of_somebody_else_is_seen() {
        // Somebody works for a while on every processor. Not a child of ours: what those used counts as ours
        // once they are buried. The pipe ends when the last of them does.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let watch = Watch::start(&[]);
        let spin = "(i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done) &".repeat(cores);
        std::process::Command::new("sh").args(["-c", &spin]).output().unwrap();
        let seen = watch.finish().unwrap();
        assert!(seen.unfit(), "{seen:?}");
    }
}
