//! Evidence: everything that a verdict rests on, from which [`crate::decide`] decides it again offline.

use std::collections::BTreeMap;

use autokernel_core::contract::Contract;
use autokernel_core::stats::{PairedSamples, Schedule, time_interval};
use autokernel_core::verdict::{Interval, Stage};
use serde::{Deserialize, Serialize};

use crate::correctness::Checked;
use crate::life::Life;
use crate::lock::Contention;
use crate::metrics::Metrics;
use crate::round::Protocol;
use crate::secret::Seed;

/// The schema string of [`Evidence`].
pub const EVIDENCE_SCHEMA: &str = "autokernel.evidence/3";

/// The schema string of [`Race`].
pub const RACE_SCHEMA: &str = "autokernel.race/2";

/// What the caller knows about a comparison.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Id of the region, or name of the model.
    pub subject: String,
    /// Hashes of what the candidate is made of.
    pub artefacts: Vec<String>,
    /// Device, versions, threads, grad mode and so on.
    pub environment: BTreeMap<String, String>,
    /// How the bare kernel was checked in the runner, for regions.
    pub checked: Option<Checked>,
}

/// One process of one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Its name.
    pub contestant: String,
    /// Microseconds a call of each timed batch, in order.
    pub us: Vec<f64>,
    /// Timed batches whose outputs were checked: all of a candidate kernel's; of a model's form those with
    /// a draw that the truth is known for.
    pub checked: usize,
    /// BLAKE3 of the outputs of each of them, in the order of the calls.
    pub digests: Vec<String>,
}

/// Fresh processes of all contestants, timed in turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// The processes, in the order of the contestants.
    pub processes: Vec<Process>,
    /// The order in which they were started.
    pub started: Vec<usize>,
    /// For each timed batch, the order in which the contestants ran it.
    pub turns: Vec<Vec<usize>>,
    /// What the processes were given: the seed of all inputs, and where they stand on the truth's sets.
    pub life: Life,
    /// What else the machine did, where it could be seen.
    pub contention: Option<Contention>,
}

impl Round {
    /// Whether somebody else's work may have disturbed it.
    pub fn unfit(&self) -> bool {
        self.contention.is_some_and(|contention| contention.unfit())
    }

    /// Takes a contestant that is out of everything, indices included.
    pub(crate) fn leave(&mut self, index: usize) {
        self.processes.remove(index);
        for order in std::iter::once(&mut self.started).chain(&mut self.turns) {
            order.retain(|i| *i != index);
            order.iter_mut().filter(|i| **i > index).for_each(|i| *i -= 1);
        }
    }
}

/// Why a contestant is out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// Its name.
    pub contestant: String,
    /// Where.
    pub stage: Stage,
    /// Why.
    pub reason: String,
}

/// A baseline and its time in the short round that chose among them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preliminary {
    /// Its name.
    pub name: String,
    /// Median over its processes, microseconds; `None` for one that is out.
    pub us: Option<f64>,
}

/// A comparison of a candidate with the best baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// `autokernel.evidence/3`.
    pub schema: String,
    /// What the caller knows.
    pub facts: Facts,
    /// Seed of all orders.
    pub seed: Seed,
    /// How it was measured.
    pub protocol: Protocol,
    /// When the samples were looked at.
    pub schedule: Schedule,
    /// The limits that outputs were held against.
    pub contract: Contract,
    /// All baselines.
    pub baselines: Vec<Preliminary>,
    /// The one that the candidate was compared with.
    pub baseline: String,
    /// The candidate.
    pub candidate: String,
    /// Candidates in line for the place of this one, itself included: the more of them, the stronger
    /// the evidence that one needs.
    pub family: usize,
    /// Rounds in order; in each, first the baseline, then the candidate.
    pub rounds: Vec<Round>,
    /// What the machine did in rounds that were thrown away and measured again.
    pub discarded: Vec<Contention>,
    /// Worst metrics of each output of the candidate, over all timed outputs that were checked in full.
    pub worst: Vec<Metrics>,
    /// Why the candidate is out, if it is.
    pub failure: Option<Failure>,
}

/// All forms of a model, or all finalists, side by side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Race {
    /// `autokernel.race/2`.
    pub schema: String,
    /// What the caller knows.
    pub facts: Facts,
    /// Seed of all orders.
    pub seed: Seed,
    /// How it was measured.
    pub protocol: Protocol,
    /// The limits that outputs were held against.
    pub contract: Contract,
    /// Who is out, and why: named, never silently dropped.
    pub failures: Vec<Failure>,
    /// Rounds in order, of those who stayed in until the end.
    pub rounds: Vec<Round>,
    /// Worst metrics of each output, by contestant that was checked.
    pub worst: BTreeMap<String, Vec<Metrics>>,
}

impl Race {
    /// Per-process medians of one contestant.
    pub fn medians(&self, name: &str) -> Vec<f64> {
        self.processes(name).filter_map(|process| autokernel_core::stats::median(&process.us)).collect()
    }

    /// Time of one call of one contestant with its 95 % interval, microseconds.
    pub fn us(&self, name: &str) -> Option<Interval> {
        time_interval(&self.medians(name))
    }

    /// The pairs of two contestants, round by round.
    pub fn pairs(&self, baseline: &str, candidate: &str) -> PairedSamples {
        let mut samples = PairedSamples::new();
        for (b, c) in self.processes(baseline).zip(self.processes(candidate)) {
            samples.push(&b.us, &c.us);
        }
        samples
    }

    /// Names of those who stayed in, fastest first.
    pub fn ranking(&self) -> Vec<String> {
        let names = self.rounds.first().map_or(&[][..], |round| &round.processes);
        let mut ranked: Vec<(String, f64)> = names
            .iter()
            .map(|process| &process.contestant)
            .filter_map(|name| Some((name.clone(), autokernel_core::stats::median(&self.medians(name))?)))
            .collect();
        ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
        ranked.into_iter().map(|(name, _)| name).collect()
    }

    /// Whether a round was measured beside somebody else's work, for want of a calmer moment.
    pub fn unfit(&self) -> bool {
        self.rounds.iter().any(Round::unfit)
    }

    fn processes<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Process> {
        self.rounds
            .iter()
            .flat_map(|round| &round.processes)
            .filter(move |process| process.contestant == name)
    }
}

/// Numbers that may be infinite or undefined, such as the error of an output that is not finite: JSON
/// has neither, so they are null there, and infinite afterwards. They only occur beside a failure.
pub(crate) mod finite_or_null {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(crate) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        value.is_finite().then_some(*value).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
    }
}
