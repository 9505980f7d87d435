//! Evidence from disk, decided again offline: whoever can write a store can write anything there.

use std::collections::BTreeMap;

use anyhow::Result;
use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::stats::Schedule;
use autokernel_core::verdict::Verdict;
use autokernel_judge::decide::{decide, next_pairs};
use autokernel_judge::evidence::{EVIDENCE_SCHEMA, Evidence, Facts, Preliminary, Process, Round};
use autokernel_judge::metrics::Metrics;
use autokernel_judge::round::Protocol;
use autokernel_judge::secret::Seed;
use autokernel_judge::{Life, Record};
use serde_json::{Value, json};

use super::{Target, mutated, rule};
use crate::mutate::{EDGES, Random};

/// Parsing and deciding.
pub(super) const REPLAY: Target = Target { name: "replay", seeds, make, check };

const WORDS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "1e308",
    "-0.0",
    "5e-324",
    "1e999",
    "NaN",
    "null",
    "true",
    "\"ours\"",
    "\"eager\"",
];

fn seeds() -> Result<Vec<Vec<u8>>> {
    let mut seeds = vec![];
    for (pairs, speedup) in [(6, 1.2), (10, 0.8), (16, 1.005), (3, 1.0)] {
        let evidence = evidence(pairs, speedup)?;
        seeds.push(serde_json::to_vec(&evidence)?);
        seeds.push(Record::new(evidence)?.print().into_bytes());
    }
    Ok(seeds)
}

fn evidence(pairs: usize, speedup: f64) -> Result<Evidence> {
    let process = |name: &str, us: f64, checked| Process {
        contestant: name.into(),
        us: vec![us, us * 1.001, us * 0.999],
        checked,
        digests: vec!["00".repeat(32); checked],
    };
    let seed: Seed = "00".repeat(32).parse()?;
    let round = |i: usize| Round {
        processes: vec![
            process("eager", 100.0 + (i % 3) as f64 / 10.0, 0),
            process("ours", 100.0 / speedup, 3),
        ],
        started: vec![1, 0],
        turns: vec![vec![0, 1]; 3],
        life: Life::of_region(seed, 6, 2, 3, true).with_calls(50, 6),
        contention: None,
    };
    Ok(Evidence {
        schema: EVIDENCE_SCHEMA.into(),
        facts: Facts { subject: "0123".into(), environment: BTreeMap::new(), ..Facts::default() },
        seed,
        protocol: Protocol::default(),
        schedule: Schedule::confirm(),
        contract: Contract { limits: vec![Limits::for_dtype(Dtype::F32, 1)], deterministic: true },
        baselines: vec![Preliminary { name: "eager".into(), us: Some(100.0) }],
        baseline: "eager".into(),
        candidate: "ours".into(),
        family: 1,
        discarded: vec![],
        rounds: (0..pairs).map(round).collect(),
        worst: vec![Metrics { ratio: 1.0, element: 2.0, centred: 1e-7 }],
        failure: None,
    })
}

fn make(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    if random.below(4) == 0 {
        return mutated(seeds, WORDS, random);
    }
    let Ok(mut value) = serde_json::from_slice::<Value>(random.pick::<Vec<u8>>(seeds)) else { return vec![] };
    for _ in 0..=random.below(6) {
        bend(&mut value, random);
    }
    value.to_string().into_bytes()
}

/// Changes one leaf, or drops or doubles an element of a list, somewhere below.
fn bend(value: &mut Value, random: &mut Random) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            let at = random.below(map.len());
            if let Some((_, inner)) = map.iter_mut().nth(at) {
                bend(inner, random);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            let at = random.below(list.len());
            match random.below(8) {
                0 => drop(list.remove(at)),
                1 => list.push(list[at].clone()),
                2 => list.clear(),
                _ => bend(&mut list[at], random),
            }
        }
        leaf => {
            const FLOATS: [f64; 9] = [0.0, -0.0, 1.0, -1.0, 1e-308, 5e-324, 1e308, f64::MAX, 0.1];
            *leaf = match random.below(5) {
                0 => json!(random.pick(&EDGES)),
                1 => json!(*random.pick(&EDGES) as i64),
                2 => Value::Null,
                3 => json!(["", "ours", "eager", "timed", "autokernel.evidence/1"][random.below(5)]),
                _ => json!(random.pick(&FLOATS)),
            };
        }
    }
}

fn check(input: &[u8]) -> Result<bool, String> {
    if let Ok(record) = Record::parse(input) {
        // Untouched where it counts, for the digest holds.
        let decided = record.replay().map_err(|error| error.to_string())?;
        rule(decided == record.decided, "a record whose digest holds decides as it says")?;
        return Ok(true);
    }
    let Ok(evidence) = serde_json::from_slice::<Evidence>(input) else { return Ok(false) };
    let _ = next_pairs(&evidence);
    let Ok(decided) = decide(&evidence) else { return Ok(false) };
    let kept = Record::new(evidence.clone()).map_err(|error| error.to_string())?.print();
    let read = Record::parse(kept.as_bytes()).map_err(|error| format!("broken rule: {error}"))?;
    let again = read.replay().map_err(|error| error.to_string())?;
    rule(decided == again && read.evidence == evidence, "what is stored is read and decided the same")?;
    if let Verdict::Faster { speedup } = &decided.verdict {
        rule(evidence.failure.is_none(), "a candidate that is out is not faster")?;
        rule(speedup.low > 1.0 && speedup.low <= speedup.value, "faster means an interval above 1")?;
        rule(speedup.value <= speedup.high, "an interval is in order")?;
        rule(evidence.rounds.iter().all(|round| round.processes[1].checked > 0), "faster was checked")?;
        rule(decided.pairs > 1, "one pair decides nothing")?;
    }
    Ok(true)
}
