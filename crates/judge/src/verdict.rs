//! The verdict: a candidate against the best baseline, over pairs of fresh processes.
//!
//! Regions and whole models go the same way; only what is staged and which truth counts differ.

use std::collections::BTreeMap;

use autokernel_core::stats::{Schedule, median};

use crate::decide::next_pairs;
use crate::error::JudgeError;
use crate::evidence::{EVIDENCE_SCHEMA, Evidence, Facts, Failure, Preliminary, RACE_SCHEMA, Race};
use crate::patience::Patience;
use crate::round::{Contest, Contestant, Protocol, RoundStop, State, round};
use crate::secret::{Seed, Stream};

/// Rounds and timed batches of the short race that chooses the best baseline.
const CHOOSE_ROUNDS: usize = 2;
const CHOOSE_BATCHES: usize = 3;

/// Compares `candidate` with the fastest of `baselines`. The answer is evidence; what it says is
/// [`crate::decide::decide`]'s business. `family` counts the candidates in line for its place.
pub fn compare(
    contest: &Contest<'_>,
    baselines: &mut [Contestant],
    candidate: &mut Contestant,
    (schedule, family): (Schedule, usize),
    facts: Facts,
    patience: &mut Patience<'_>,
) -> Result<Evidence, JudgeError> {
    // Drawn now, when all packages are built and hashed.
    let seed = Seed::from_os()?;
    let (chosen, preliminary) = choose(contest, baselines, &mut seed.stream("choose"), patience)?;
    let baseline = &mut baselines[chosen];
    let mut evidence = Evidence {
        schema: EVIDENCE_SCHEMA.to_owned(),
        facts,
        seed,
        protocol: contest.protocol,
        schedule,
        contract: contest.truth.contract().clone(),
        baselines: preliminary,
        baseline: baseline.name.clone(),
        candidate: candidate.name.clone(),
        family,
        rounds: vec![],
        discarded: vec![],
        worst: vec![],
        failure: None,
    };
    let mut state = State::new(contest.truth, 2);
    let mut stream = seed.stream("compare");
    // A candidate is always checked, whatever its maker says.
    candidate.checked = true;
    while next_pairs(&evidence)?.is_some() {
        match round(contest, &mut [&mut *baseline, &mut *candidate], &mut state, &mut stream) {
            Ok(round) if patience.discards(round.contention) => {
                evidence.discarded.extend(round.contention);
            }
            Ok(round) => evidence.rounds.push(round),
            Err(RoundStop::Out { index: 1, failure }) => {
                evidence.failure = Some(failure);
                break;
            }
            Err(RoundStop::Out { failure, .. }) => {
                return Err(JudgeError::BadBaseline { name: failure.contestant, reason: failure.reason });
            }
            Err(RoundStop::Failed(error)) => return Err(error),
        }
    }
    evidence.worst = state.records[1].comparer.worst().to_vec();
    Ok(evidence)
}

/// The baseline with the lowest median over a short race, and what the race said of all.
fn choose(
    contest: &Contest<'_>,
    baselines: &mut [Contestant],
    stream: &mut Stream,
    patience: &mut Patience<'_>,
) -> Result<(usize, Vec<Preliminary>), JudgeError> {
    if let [only] = baselines {
        return Ok((0, vec![Preliminary { name: only.name.clone(), us: None }]));
    }
    let protocol = Protocol { batches: CHOOSE_BATCHES, ..contest.protocol };
    let short = Contest { protocol, ..contest.clone() };
    let (rounds, _, _) = run(&short, baselines, CHOOSE_ROUNDS, stream, patience)?;
    let time = |name: &str| {
        let processes = rounds.iter().flat_map(|round| &round.processes).filter(|p| p.contestant == name);
        median(&processes.filter_map(|p| median(&p.us)).collect::<Vec<_>>())
    };
    let preliminary: Vec<Preliminary> =
        baselines.iter().map(|b| Preliminary { name: b.name.clone(), us: time(&b.name) }).collect();
    let best = preliminary
        .iter()
        .enumerate()
        .filter_map(|(index, p)| Some((index, p.us?)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
        .ok_or(JudgeError::NoBaseline)?;
    Ok((best.0, preliminary))
}

/// Runs all contestants side by side for `rounds` rounds of fresh processes.
pub fn race(
    contest: &Contest<'_>,
    contestants: &mut [Contestant],
    rounds: usize,
    facts: Facts,
    patience: &mut Patience<'_>,
) -> Result<Race, JudgeError> {
    let seed = Seed::from_os()?;
    let (rounds, failures, worst) = run(contest, contestants, rounds, &mut seed.stream("race"), patience)?;
    Ok(Race {
        schema: RACE_SCHEMA.to_owned(),
        facts,
        seed,
        protocol: contest.protocol,
        contract: contest.truth.contract().clone(),
        failures,
        rounds,
        worst,
    })
}

type Ran = (Vec<crate::evidence::Round>, Vec<Failure>, BTreeMap<String, Vec<crate::metrics::Metrics>>);

/// A contestant that fails leaves the race, with its samples; the round is run again without it.
fn run(
    contest: &Contest<'_>,
    contestants: &mut [Contestant],
    rounds: usize,
    stream: &mut Stream,
    patience: &mut Patience<'_>,
) -> Result<Ran, JudgeError> {
    let mut racing: Vec<&mut Contestant> = contestants.iter_mut().collect();
    let mut state = State::new(contest.truth, racing.len());
    let (mut done, mut failures): (Vec<crate::evidence::Round>, Vec<Failure>) = (vec![], vec![]);
    while done.len() < rounds && !racing.is_empty() {
        match round(contest, &mut racing, &mut state, stream) {
            Ok(round) if patience.discards(round.contention) => {}
            Ok(round) => done.push(round),
            Err(RoundStop::Out { index, failure }) => {
                racing.remove(index);
                state.records.remove(index);
                for round in &mut done {
                    round.leave(index);
                }
                failures.push(failure);
            }
            Err(RoundStop::Failed(error)) => return Err(error),
        }
    }
    let worst = racing
        .iter()
        .zip(&state.records)
        .filter(|(contestant, _)| contestant.checked)
        .map(|(contestant, record)| (contestant.name.clone(), record.comparer.worst().to_vec()))
        .collect();
    Ok((done, failures, worst))
}
