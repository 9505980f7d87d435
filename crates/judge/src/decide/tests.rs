//! Deciding over made-up evidence, and evidence of any kind for the tests of records.

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::stats::{Look, Schedule};
use proptest::prelude::*;

use super::*;
use crate::evidence::{Facts, Failure, Preliminary, Process};
use crate::life::Life;
use crate::lock::Contention;
use crate::metrics::Metrics;
use crate::round::Protocol;

fn round(baseline_us: f64, candidate_us: f64) -> Round {
    let process = |name: &str, us: f64, checked| Process {
        contestant: name.into(),
        us: vec![us, us * 1.001, us * 0.999],
        checked,
        digests: vec!["00".repeat(32); checked],
    };
    Round {
        processes: vec![process("eager", baseline_us, 0), process("ours", candidate_us, 3)],
        started: vec![1, 0],
        turns: vec![vec![0, 1]; 3],
        life: Life::of_region("00".repeat(32).parse().unwrap(), 6, 2, 3, true).with_calls(50, 6),
        contention: Some(Contention { others: 0.01, ..Contention::CALM }),
    }
}

/// A comparison of so many calm rounds with little noise.
pub(crate) fn evidence(pairs: usize, speedup: f64) -> Evidence {
    let wobble = |i: usize| 1.0 + 0.002 * ((i * 7 % 5) as f64 - 2.0);
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
        family: 1,
        rounds: (0..pairs).map(|i| round(100.0 * wobble(i), 100.0 / speedup)).collect(),
        discarded: vec![],
        worst: vec![Metrics { ratio: 1.0, element: 2.0, centred: 1e-7 }],
        failure: None,
    }
}

/// Evidence as it may come out of any comparison, and some that can't.
pub(crate) fn any_evidence() -> impl Strategy<Value = Evidence> {
    let time = prop_oneof![20 => 1e-3_f64..1e7, 1 => Just(0.0), 1 => Just(f64::MAX)];
    let contention = prop::option::of(
        (0.0_f64..0.2, 0.0_f64..0.1, prop::option::of(0.0_f64..0.5))
            .prop_map(|(others, steal, waited)| Contention { others, steal, waited, ..Contention::CALM }),
    );
    let round = (prop::collection::vec((time.clone(), time), 1..6), 0_usize..4, contention).prop_map(
        |(times, checked, contention)| {
            let (baseline, candidate) = times.into_iter().unzip();
            let mut round = round(1.0, 1.0);
            (round.processes[0].us, round.processes[1].us) = (baseline, candidate);
            // All batches, but for one in four.
            let all = round.processes[1].us.len();
            round.processes[1].checked = if checked == 3 { all - 1 } else { all };
            round.processes[1].digests = vec!["00".repeat(32); round.processes[1].checked];
            round.contention = contention;
            round
        },
    );
    let metric = prop_oneof![8 => 0.0_f64..10.0, 1 => Just(f64::INFINITY)];
    let metrics = (metric.clone(), metric.clone(), metric).prop_map(|(ratio, element, centred)| Metrics {
        ratio,
        element,
        centred,
    });
    let schedule = prop_oneof![
        Just(Schedule::confirm()),
        (2_usize..40, 1e-6_f64..0.05).prop_map(|(pairs, alpha)| Schedule::try_from(vec![Look {
            pairs,
            alpha
        }])
        .unwrap()),
    ];
    let failure = prop::option::weighted(0.1, "\\PC*").prop_map(|reason| {
        reason.map(|reason| Failure { contestant: "ours".into(), stage: Stage::Run, reason })
    });
    let parts = (prop::collection::vec(round, 0..40), schedule, 0_usize..5, metrics, failure);
    parts.prop_map(|(rounds, schedule, family, metrics, failure)| Evidence {
        rounds,
        schedule,
        family,
        worst: vec![metrics],
        failure,
        ..evidence(0, 1.0)
    })
}

fn verdict(evidence: &Evidence) -> &'static str {
    decide(evidence).unwrap().verdict.name()
}

#[test]
fn the_looks_decide() {
    for (pairs, speedup, name) in [
        (10, 1.2, "faster"),
        (6, 0.8, "slower"),
        (6, 1.0, "same"),
        (32, 1.0095, "ambiguous"),
        (6, 1.2, "ambiguous"),
        (5, 0.8, "ambiguous"),
    ] {
        let evidence = evidence(pairs, speedup);
        let decided = decide(&evidence).unwrap();
        assert_eq!(decided.verdict.name(), name, "{pairs} pairs at {speedup}: {decided:?}");
        assert_eq!(decided.reason.is_some(), name == "ambiguous", "{decided:?}");
    }
    assert_eq!(next_pairs(&evidence(6, 0.8)).unwrap(), None);
    assert_eq!(next_pairs(&evidence(6, 1.2)).unwrap(), Some(10));
    assert_eq!(next_pairs(&evidence(4, 1.2)).unwrap(), Some(6));
}

#[test]
fn only_enough_pairs_are_reported() {
    assert!(!decide(&evidence(6, 0.8)).unwrap().reportable);
    let faster = decide(&evidence(32, 1.2)).unwrap();
    assert!(faster.reportable && faster.pairs == REPORTED_PAIRS, "{faster:?}");
}

#[test]
fn metrics_are_held_against_the_limits_again() {
    let mut forged = evidence(10, 1.2);
    forged.worst[0].ratio = 9.0;
    assert!(matches!(decide(&forged).unwrap().verdict, Verdict::Rejected { stage: Stage::Timed, .. }));
    forged.worst.clear();
    assert!(matches!(decide(&forged), Err(EvidenceError::Outputs { .. })));
}

#[test]
fn unchecked_or_malformed_rounds_decide_nothing() {
    let mut unchecked = evidence(10, 1.2);
    unchecked.rounds[3].processes[1].checked = 0;
    assert!(matches!(decide(&unchecked), Err(EvidenceError::Unchecked(3))));
    let mut once = evidence(10, 1.2);
    once.rounds[2].processes[1].checked = 1;
    once.rounds[2].processes[1].digests.truncate(1);
    assert!(matches!(decide(&once), Err(EvidenceError::Unchecked(2))), "every timed batch of a kernel");
    let mut swapped = evidence(10, 1.2);
    swapped.rounds[0].processes.swap(0, 1);
    assert!(matches!(decide(&swapped), Err(EvidenceError::Round { round: 0, .. })));
    let mut old = evidence(10, 1.2);
    old.schema = "autokernel.evidence/0".into();
    assert!(matches!(decide(&old), Err(EvidenceError::Schema(_))));
}

#[test]
fn the_best_baseline_is_the_opponent() {
    let mut easy = evidence(10, 1.2);
    easy.baselines.push(Preliminary { name: "inductor".into(), us: None });
    assert_eq!(verdict(&easy), "faster", "one that is out is no opponent");
    easy.baselines[1].us = Some(90.0);
    assert!(matches!(decide(&easy), Err(EvidenceError::Baseline { .. })));
}

#[test]
fn a_busy_machine_decides_nothing() {
    assert!(!decide(&evidence(10, 1.2)).unwrap().unfit);
    let mut busy = evidence(10, 2.0);
    busy.rounds[2].contention = Some(Contention { others: 0.2, ..Contention::CALM });
    let decided = decide(&busy).unwrap();
    assert!(decided.unfit && decided.verdict.name() == "ambiguous", "{decided:?}");
    assert!(decided.reason.as_ref().unwrap().contains("others used 20 %"), "{decided:?}");
    // Another twenty rounds would not mend it.
    busy.rounds.truncate(6);
    assert_eq!(next_pairs(&busy).unwrap(), None);
    busy.rounds.truncate(5);
    assert_eq!(next_pairs(&busy).unwrap(), Some(6), "so many that its figure has an interval");
}

#[test]
fn a_noisy_machine_decides_large_differences_only() {
    let noisy = |speedup| {
        let mut noisy = evidence(32, speedup);
        for (i, round) in noisy.rounds.iter_mut().enumerate() {
            round.processes[0].us.iter_mut().for_each(|us| *us *= 1.0 + 0.03 * ((i % 3) as f64 - 1.0));
        }
        decide(&noisy).unwrap()
    };
    let small = noisy(1.05);
    assert!(small.unfit && small.verdict.name() == "ambiguous", "{small:?}");
    assert!(small.reason.as_ref().unwrap().contains("unfit"), "{small:?}");
    let large = noisy(1.5);
    assert!(large.unfit && large.verdict.name() == "faster" && large.reason.is_none(), "{large:?}");
}
