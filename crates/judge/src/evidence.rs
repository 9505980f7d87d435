//! Evidence: everything that a verdict rests on, from which it can be decided again offline.

use std::collections::BTreeMap;

use autokernel_core::contract::Contract;
use autokernel_core::stats::{
    ALPHA, Decision, PairedSamples, REPORTED_PAIRS, Schedule, UNFIT_NOISE, time_interval,
};
use autokernel_core::verdict::{Interval, Stage, Verdict};
use serde::{Deserialize, Serialize};

use crate::correctness::Checked;
use crate::lock::Contention;
use crate::metrics::Metrics;
use crate::round::Protocol;
use crate::secret::Seed;

/// The schema string of [`Evidence`].
pub const EVIDENCE_SCHEMA: &str = "autokernel.evidence/1";

/// The schema string of [`Race`].
pub const RACE_SCHEMA: &str = "autokernel.race/1";

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
    /// Timed batches whose outputs were checked.
    pub checked: usize,
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
    /// The sets that were staged, in order.
    pub sets: Vec<usize>,
    /// Calls of one timed batch.
    pub calls: usize,
    /// What else the machine did, where it could be seen.
    pub contention: Option<Contention>,
}

impl Round {
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
    /// `autokernel.evidence/1`.
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
    /// Rounds in order; in each, first the baseline, then the candidate.
    pub rounds: Vec<Round>,
    /// Worst metrics of each output of the candidate, over all timed outputs that were checked in full.
    pub worst: Vec<Metrics>,
    /// Why the candidate is out, if it is.
    pub failure: Option<Failure>,
}

/// All forms of a model, or all finalists, side by side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Race {
    /// `autokernel.race/1`.
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

/// Evidence that nothing can be decided from.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum EvidenceError {
    #[error("evidence schema is `{0}`, expected `{EVIDENCE_SCHEMA}`")]
    Schema(String),
    #[error("round {round} does not hold `{baseline}` and `{candidate}` with usable times")]
    Round { round: usize, baseline: String, candidate: String },
    #[error("no timed output of the candidate was checked in round {0}")]
    Unchecked(usize),
    #[error("metrics of {got} outputs under a contract of {expected}")]
    Outputs { got: usize, expected: usize },
    #[error("{0} pairs are too few for any interval")]
    TooFew(usize),
}

/// A verdict with what a reader has to know beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    /// The verdict.
    pub verdict: Verdict,
    /// Pairs that it rests on.
    pub pairs: usize,
    /// Whether the figure may be reported (enough pairs).
    pub reportable: bool,
    /// Two-sided p-value over all looks, for Holm's procedure over finalists.
    pub p_value: f64,
    /// Robust relative spread of the pairs.
    pub noise: f64,
    /// The machine was too noisy or too busy for small differences.
    pub unfit: bool,
}

/// Decides from evidence alone.
pub fn decide(evidence: &Evidence) -> Result<Decided, EvidenceError> {
    if evidence.schema != EVIDENCE_SCHEMA {
        return Err(EvidenceError::Schema(evidence.schema.clone()));
    }
    if let Some(failure) = &evidence.failure {
        return Ok(rejected(failure.stage, failure.reason.clone()));
    }
    if let Some(reason) = broken_limit(evidence)? {
        return Ok(rejected(Stage::Timed, reason));
    }
    let samples = pairs(evidence)?;
    let measured = samples.differences().len();
    let (verdict, used) = match samples.decide(&evidence.schedule) {
        Decision::Stop { verdict, pairs } => (verdict, pairs),
        Decision::Continue { .. } => {
            // Measured on until the next look at best: no figure of an unfinished comparison counts.
            let speedup = samples.interval(measured, ALPHA / 10.0).ok_or(EvidenceError::TooFew(measured))?;
            (Verdict::Ambiguous { speedup }, measured)
        }
    };
    let noise = samples.noise().unwrap_or(0.0);
    let busy = evidence.rounds.iter().filter_map(|round| round.contention).any(|c| c.unfit());
    Ok(Decided {
        verdict,
        pairs: used,
        reportable: used >= REPORTED_PAIRS,
        p_value: samples.p_value(&evidence.schedule),
        noise,
        unfit: busy || noise > UNFIT_NOISE,
    })
}

/// What to do next while a comparison runs.
pub fn next_pairs(evidence: &Evidence) -> Result<Option<usize>, EvidenceError> {
    match pairs(evidence)?.decide(&evidence.schedule) {
        Decision::Continue { pairs } => Ok(Some(pairs)),
        Decision::Stop { .. } => Ok(None),
    }
}

fn rejected(stage: Stage, reason: String) -> Decided {
    Decided {
        verdict: Verdict::Rejected { stage, reason },
        pairs: 0,
        reportable: false,
        p_value: 1.0,
        noise: 0.0,
        unfit: false,
    }
}

/// The stored metrics against the stored limits, whatever the comparison said when it ran.
fn broken_limit(evidence: &Evidence) -> Result<Option<String>, EvidenceError> {
    let limits = &evidence.contract.limits;
    if evidence.worst.len() != limits.len() {
        return Err(EvidenceError::Outputs { got: evidence.worst.len(), expected: limits.len() });
    }
    let broken = evidence
        .worst
        .iter()
        .zip(limits)
        .position(|(metrics, limits)| limits.as_ref().is_some_and(|limits| !metrics.within(limits)));
    Ok(broken.map(|output| format!("output {output}: stored metrics leave the contract")))
}

fn pairs(evidence: &Evidence) -> Result<PairedSamples, EvidenceError> {
    let mut samples = PairedSamples::new();
    for (index, round) in evidence.rounds.iter().enumerate() {
        let wrong = || EvidenceError::Round {
            round: index,
            baseline: evidence.baseline.clone(),
            candidate: evidence.candidate.clone(),
        };
        let [baseline, candidate] = &round.processes[..] else { return Err(wrong()) };
        if baseline.contestant != evidence.baseline || candidate.contestant != evidence.candidate {
            return Err(wrong());
        }
        if candidate.checked == 0 {
            return Err(EvidenceError::Unchecked(index));
        }
        if !samples.push(&baseline.us, &candidate.us) {
            return Err(wrong());
        }
    }
    Ok(samples)
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

    fn processes<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Process> {
        self.rounds
            .iter()
            .flat_map(|round| &round.processes)
            .filter(move |process| process.contestant == name)
    }
}

#[cfg(test)]
mod tests {
    use autokernel_core::contract::Limits;
    use autokernel_core::dtype::Dtype;

    use super::*;

    fn evidence(pairs: usize, speedup: f64) -> Evidence {
        let rounds = (0..pairs)
            .map(|i| {
                let wobble = 1.0 + 0.002 * ((i * 7 % 5) as f64 - 2.0);
                let process = |name: &str, us: f64, checked| Process {
                    contestant: name.into(),
                    us: vec![us, us * 1.001, us * 0.999],
                    checked,
                };
                Round {
                    processes: vec![process("eager", 100.0 * wobble, 0), process("ours", 100.0 / speedup, 3)],
                    started: vec![1, 0],
                    turns: vec![vec![0, 1]; 3],
                    sets: vec![2, 0],
                    calls: 50,
                    contention: Some(Contention { others: 0.01, steal: 0.0 }),
                }
            })
            .collect();
        Evidence {
            schema: EVIDENCE_SCHEMA.into(),
            facts: Facts { subject: "0123".into(), ..Facts::default() },
            seed: "00".repeat(32).parse().unwrap(),
            protocol: Protocol::default(),
            schedule: Schedule::confirm(),
            contract: Contract { limits: vec![Limits::for_dtype(Dtype::F32, 1)], deterministic: true },
            baselines: vec![Preliminary { name: "eager".into(), us: Some(100.0) }],
            baseline: "eager".into(),
            candidate: "ours".into(),
            rounds,
            worst: vec![Metrics { ratio: 1.0, element: 2.0, centred: 1e-7 }],
            failure: None,
        }
    }

    #[test]
    fn stored_evidence_gives_the_same_verdict() {
        for (pairs, speedup, name) in [
            (6, 1.2, "faster"),
            (6, 0.8, "slower"),
            (6, 1.0, "same"),
            (16, 1.0095, "ambiguous"),
            (5, 1.2, "ambiguous"),
        ] {
            let evidence = evidence(pairs, speedup);
            let decided = decide(&evidence).unwrap();
            assert_eq!(decided.verdict.name(), name, "{pairs} pairs at {speedup}: {decided:?}");
            let stored = serde_json::to_string(&evidence).unwrap();
            let again: Evidence = serde_json::from_str(&stored).unwrap();
            assert_eq!(again, evidence);
            assert_eq!(decide(&again).unwrap(), decided);
        }
        assert_eq!(next_pairs(&evidence(6, 1.2)).unwrap(), None);
        assert_eq!(next_pairs(&evidence(4, 1.2)).unwrap(), Some(6));
    }

    #[test]
    fn only_enough_pairs_are_reported() {
        assert!(!decide(&evidence(6, 1.2)).unwrap().reportable);
        let mut quoted = evidence(10, 1.2);
        quoted.schedule = Schedule::report();
        assert!(decide(&quoted).unwrap().reportable);
    }

    #[test]
    fn metrics_are_held_against_the_limits_again() {
        let mut forged = evidence(6, 1.2);
        forged.worst[0].ratio = 9.0;
        assert!(matches!(decide(&forged).unwrap().verdict, Verdict::Rejected { stage: Stage::Timed, .. }));
        forged.worst.clear();
        assert!(matches!(decide(&forged), Err(EvidenceError::Outputs { .. })));
    }

    #[test]
    fn unchecked_or_malformed_rounds_decide_nothing() {
        let mut unchecked = evidence(6, 1.2);
        unchecked.rounds[3].processes[1].checked = 0;
        assert!(matches!(decide(&unchecked), Err(EvidenceError::Unchecked(3))));
        let mut swapped = evidence(6, 1.2);
        swapped.rounds[0].processes.swap(0, 1);
        assert!(matches!(decide(&swapped), Err(EvidenceError::Round { round: 0, .. })));
        let mut old = evidence(6, 1.2);
        old.schema = "autokernel.evidence/0".into();
        assert!(matches!(decide(&old), Err(EvidenceError::Schema(_))));
    }

    #[test]
    fn noise_and_company_make_a_machine_unfit() {
        assert!(!decide(&evidence(6, 1.2)).unwrap().unfit);
        let mut busy = evidence(6, 1.2);
        busy.rounds[2].contention = Some(Contention { others: 0.2, steal: 0.0 });
        assert!(decide(&busy).unwrap().unfit);
        let mut noisy = evidence(6, 1.2);
        for (i, round) in noisy.rounds.iter_mut().enumerate() {
            round.processes[0].us.iter_mut().for_each(|us| *us *= 1.0 + 0.03 * (i % 3) as f64);
        }
        assert!(decide(&noisy).unwrap().unfit);
    }
}
