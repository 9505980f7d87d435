//! What a run of the corpus found, file by file and in sum.

use autokernel_core::verdict::Stage;
use serde::Serialize;

/// `autokernel.corpus-report/1`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `autokernel.corpus-report/1`.
    pub schema: &'static str,
    /// Seeds of the inputs, by task, in the order of the rounds.
    pub seeds: Vec<(String, u64)>,
    /// The files that were run, in the order of the manifest.
    pub files: Vec<FileReport>,
    /// Files that nothing here can run, and why.
    pub skipped: Vec<String>,
    /// In sum.
    pub totals: Totals,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// What became of one file under one seed.
#[derive(Clone, Debug, Serialize)]
pub struct FileReport {
    /// Its name without the ending.
    pub file: String,
    /// Whether it is an honest one.
    pub honest: bool,
    /// The task.
    pub task: String,
    /// Which round of seeds; the timing stages have none of their own.
    pub round: usize,
    /// The stages of which one must turn it away; empty for honest files and fakes of speed.
    pub expected: Vec<Stage>,
    /// `passed` where nothing was decided because the judge was not asked to go that far; else the verdict.
    pub got: String,
    /// The stage that turned it away.
    pub stage: Option<Stage>,
    /// Why.
    pub reason: String,
    /// What came of it.
    pub outcome: Outcome,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// What came of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// As it must be.
    Right,
    /// An exploit that the judge accepted.
    Accepted,
    /// An exploit that was turned away, elsewhere than it must be.
    Elsewhere,
    /// An honest kernel that the judge turned away.
    Rejected,
    /// Wrong, and known to be.
    Open,
    /// Called open in the manifest, and right.
    Closed,
}

/// Counts over all files and seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Exploits that were run.
    pub exploits: usize,
    /// Of these, accepted by the judge.
    pub exploits_accepted: usize,
    /// Of these, turned away at another stage.
    pub exploits_elsewhere: usize,
    /// Honest kernels that were run.
    pub honest: usize,
    /// Of these, turned away.
    pub honest_rejected: usize,
    /// Files that are known to be judged wrongly, and were.
    pub open: usize,
    /// Files that are called open and were judged rightly.
    pub closed: usize,
}

impl Totals {
    /// Counts the files.
    pub fn of(files: &[FileReport]) -> Self {
        let count = |test: &dyn Fn(&FileReport) -> bool| files.iter().filter(|file| test(file)).count();
        let with = |outcome| count(&|file| file.outcome == outcome);
        Self {
            exploits: count(&|file| !file.honest),
            exploits_accepted: with(Outcome::Accepted),
            exploits_elsewhere: with(Outcome::Elsewhere),
            honest: count(&|file| file.honest),
            honest_rejected: with(Outcome::Rejected),
            open: with(Outcome::Open),
            closed: with(Outcome::Closed),
        }
    }

    /// Whether everything that is not called open came out as it must.
    pub fn good(&self) -> bool {
        self.exploits_accepted + self.exploits_elsewhere + self.honest_rejected == 0
    }
}
