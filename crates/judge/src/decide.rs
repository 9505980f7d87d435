//! Deciding: from evidence alone to a verdict, now or offline at any later time.
//!
//! A machine that is unfit decides nothing: rounds beside somebody else's work are measured again
//! while there is patience ([`crate::patience`]), and when it stays busy the verdict is `ambiguous`
//! with that as its reason, however clear the figures look. Noise above
//! [`autokernel_core::stats::UNFIT_NOISE`] leaves only large differences decided.

use std::fmt::Write;

use autokernel_core::stats::{ALPHA, Decision, Doubt, PairedSamples, REPORTED_PAIRS, UNFIT_NOISE};
use autokernel_core::verdict::{Stage, Verdict};
use serde::{Deserialize, Serialize};

use crate::evidence::{EVIDENCE_SCHEMA, Evidence, Round};
use crate::lock::Contention;

/// Evidence that nothing can be decided from.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum EvidenceError {
    #[error("evidence schema is `{0}`, expected `{EVIDENCE_SCHEMA}`")]
    Schema(String),
    #[error("round {round} does not hold `{baseline}` and `{candidate}` with usable times")]
    Round { round: usize, baseline: String, candidate: String },
    #[error("timed outputs of the candidate were not checked in round {0}")]
    Unchecked(usize),
    #[error("metrics of {got} outputs under a contract of {expected}")]
    Outputs { got: usize, expected: usize },
    #[error("{0} pairs are too few for any interval")]
    TooFew(usize),
    #[error("`{chosen}` is not the fastest baseline, `{faster}` is")]
    Baseline { chosen: String, faster: String },
}

/// A verdict with what a reader has to know beside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decided {
    /// The verdict.
    pub verdict: Verdict,
    /// Pairs that it rests on.
    pub pairs: usize,
    /// Whether the figure may be reported (enough pairs).
    pub reportable: bool,
    /// Robust relative spread of the pairs.
    pub noise: f64,
    /// The machine was too noisy or too busy for small differences.
    pub unfit: bool,
    /// Why the verdict is not another one, where it is ambiguous.
    pub reason: Option<String>,
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
    best_baseline(evidence)?;
    let samples = pairs(evidence)?;
    let measured = samples.differences().len();
    let (mut verdict, pairs, mut reason) = match samples.decide(&evidence.schedule, evidence.family) {
        Decision::Stop { verdict, pairs, doubt } => (verdict, pairs, doubt.map(why)),
        Decision::Continue { pairs } => {
            // Measured on until the next look at best: no figure of an unfinished comparison counts.
            let speedup = samples.interval(measured, ALPHA / 10.0).ok_or(EvidenceError::TooFew(measured))?;
            (Verdict::Ambiguous { speedup }, measured, Some(format!("the next look is at {pairs} pairs")))
        }
    };
    let noise = samples.noise().unwrap_or(0.0);
    let busy = busy(evidence);
    if let (Some(why), Some(speedup)) = (&busy, verdict.speedup()) {
        verdict = Verdict::Ambiguous { speedup };
        reason = Some(why.clone());
    }
    Ok(Decided {
        verdict,
        pairs,
        reportable: pairs >= REPORTED_PAIRS,
        noise,
        unfit: busy.is_some() || noise > UNFIT_NOISE,
        reason,
    })
}

/// Pairs of the next look while a comparison runs; `None` when measuring on would change nothing.
pub fn next_pairs(evidence: &Evidence) -> Result<Option<usize>, EvidenceError> {
    let first = evidence.schedule.looks().first().map_or(0, |look| look.pairs);
    if evidence.rounds.len() >= first && evidence.rounds.iter().any(Round::unfit) {
        return Ok(None);
    }
    match pairs(evidence)?.decide(&evidence.schedule, evidence.family) {
        Decision::Continue { pairs } => Ok(Some(pairs)),
        Decision::Stop { .. } => Ok(None),
    }
}

fn rejected(stage: Stage, reason: String) -> Decided {
    Decided {
        verdict: Verdict::Rejected { stage, reason },
        pairs: 0,
        reportable: false,
        noise: 0.0,
        unfit: false,
        reason: None,
    }
}

fn why(doubt: Doubt) -> String {
    match doubt {
        Doubt::Wide => "the interval holds both a difference that counts and none".to_owned(),
        Doubt::Unsure => "the interval is too close to none for a claim".to_owned(),
        Doubt::Noise(noise) => format!(
            "the machine is unfit: pairs of processes spread by {:.1} %, more than {:.0} %",
            noise * 100.0,
            UNFIT_NOISE * 100.0
        ),
    }
}

/// What to say of rounds that were kept although the machine was busy.
fn busy(evidence: &Evidence) -> Option<String> {
    let unfit: Vec<_> = evidence.rounds.iter().filter(|round| round.unfit()).collect();
    let worst = unfit.iter().filter_map(|round| round.contention).reduce(Contention::worst)?;
    let mut text =
        format!("the machine is unfit: in {} of {} rounds {worst}", unfit.len(), evidence.rounds.len());
    if !evidence.discarded.is_empty() {
        let _ = write!(text, "; {} more were thrown away", evidence.discarded.len());
    }
    Some(text)
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

/// A candidate stands against the best that PyTorch offers, not against one of it.
fn best_baseline(evidence: &Evidence) -> Result<(), EvidenceError> {
    let timed = || evidence.baselines.iter().filter_map(|baseline| Some((&baseline.name, baseline.us?)));
    let Some((_, own)) = timed().find(|(name, _)| **name == evidence.baseline) else { return Ok(()) };
    match timed().find(|(_, us)| *us < own) {
        Some((faster, _)) => {
            Err(EvidenceError::Baseline { chosen: evidence.baseline.clone(), faster: faster.clone() })
        }
        None => Ok(()),
    }
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
        // A kernel's outputs are all checked. Of a whole model's those whose truth is known.
        let all = round.life.sets.is_empty() || candidate.checked == candidate.us.len();
        if candidate.checked == 0 || candidate.digests.len() != candidate.checked || !all {
            return Err(EvidenceError::Unchecked(index));
        }
        if !samples.push(&baseline.us, &candidate.us) {
            return Err(wrong());
        }
    }
    Ok(samples)
}

#[cfg(test)]
pub(crate) mod tests;
