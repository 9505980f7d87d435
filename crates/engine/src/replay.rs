//! `judge --replay`: a stored verdict decided again from its evidence, without Python, compiler or clock.

use std::collections::BTreeMap;
use std::path::Path;

use autokernel_core::verdict::Verdict;
use autokernel_judge::{Decided, Record};
use autokernel_store::{FileId, Store, StoreError};
use serde::Serialize;

use crate::error::EngineError;

/// `autokernel.replay/1`.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayReport {
    /// `autokernel.replay/1`.
    pub schema: String,
    /// The region or model.
    pub subject: String,
    /// The baseline and the candidate.
    pub baseline: String,
    /// Its name.
    pub candidate: String,
    /// What was decided then.
    pub stored: Decided,
    /// What the evidence says now.
    pub decided: Decided,
    /// Whether both are the same in every figure.
    pub agrees: bool,
    /// Rounds that count, and rounds that were thrown away because the machine was busy.
    pub rounds: usize,
    /// See there.
    pub discarded: usize,
    /// Hashes of what the candidate was made of.
    pub artefacts: Vec<String>,
    /// Machine, versions, confinement.
    pub environment: BTreeMap<String, String>,
    /// Digest over decision and evidence.
    pub digest: String,
    /// The same for a reader.
    pub text: String,
}

/// Decides a stored verdict again. `wanted` is a file; or the hash of evidence in the store, or the
/// beginning of it; or `RUN/REGION`, for the newest verdict of that region.
pub fn replay(store: &Store, wanted: &str) -> Result<ReplayReport, EngineError> {
    let bytes = read(store, wanted)?;
    let record = Record::parse(&bytes)?;
    let decided = record.replay()?;
    let evidence = &record.evidence;
    let mut report = ReplayReport {
        schema: "autokernel.replay/1".to_owned(),
        subject: evidence.facts.subject.clone(),
        baseline: evidence.baseline.clone(),
        candidate: evidence.candidate.clone(),
        agrees: decided == record.decided,
        stored: record.decided.clone(),
        decided,
        rounds: evidence.rounds.len(),
        discarded: evidence.discarded.len(),
        artefacts: evidence.facts.artefacts.clone(),
        environment: evidence.facts.environment.clone(),
        digest: record.digest.clone(),
        text: String::new(),
    };
    report.text = describe(&report);
    Ok(report)
}

fn read(store: &Store, wanted: &str) -> Result<Vec<u8>, EngineError> {
    if Path::new(wanted).is_file() {
        return Ok(fs_err::read(wanted)?);
    }
    let id = match wanted.split_once('/') {
        Some((run, region)) => {
            let run = store.run(run)?;
            let task = store.task(&run.id, region)?;
            let mut newest = store.candidates(&run.id, &task.region)?.into_iter().rev();
            newest.find_map(|candidate| candidate.evidence)
        }
        None => store.find_evidence(wanted)?,
    };
    let missing = || StoreError::NoEvidence { wanted: wanted.to_owned() };
    let id: FileId = id.ok_or_else(missing)?;
    Ok(store.get_file(&id)?)
}

fn describe(report: &ReplayReport) -> String {
    let told = |decided: &Decided| {
        let name = decided.verdict.name();
        let figures = match (&decided.verdict, decided.verdict.speedup()) {
            (Verdict::Rejected { stage, reason }, _) => format!(" at {}: {reason}", stage.name()),
            (_, Some(speedup)) => format!(
                ", {:.3}x [{:.3}, {:.3}] over {} pairs of processes, noise {:.1} %",
                speedup.value,
                speedup.low,
                speedup.high,
                decided.pairs,
                decided.noise * 100.0
            ),
            (_, None) => String::new(),
        };
        let reason = decided.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        format!("{name}{figures}{reason}")
    };
    let head = format!("{} against {}, {}", report.candidate, report.baseline, report.subject);
    let end = if report.agrees {
        "The evidence says the same.".to_owned()
    } else {
        format!("The evidence says something else: {}.", told(&report.decided))
    };
    format!("{head}\nstored: {}\n{end}", told(&report.stored))
}

#[cfg(test)]
mod tests {
    use autokernel_judge::{Evidence, Life, RecordError};
    use autokernel_store::NewCandidate;
    use serde_json::{Value, json};

    use super::*;

    /// Evidence of ten calm pairs in which the candidate takes this many times as long.
    fn evidence(slower: f64) -> Evidence {
        let round = |i: usize| {
            let wobble = 1.0 + 0.001 * (i % 3) as f64;
            json!({
                "processes": [
                    { "contestant": "eager", "us": [100.0 * wobble, 100.1], "checked": 0, "digests": [] },
                    { "contestant": "ours", "us": [100.0 * slower, 100.2 * slower], "checked": 2, "digests": ["aa", "bb"] },
                ],
                "started": [0, 1], "turns": [[0, 1], [1, 0]], "contention": null,
                "life": Life::of_region("0".repeat(64).parse().unwrap(), 3, 2, 2, false).with_calls(9, 3),
            })
        };
        serde_json::from_value(json!({
            "schema": "autokernel.evidence/3",
            "facts": { "subject": "aaaa1111", "artefacts": ["ff"], "environment": { "sandbox": "landlock 6" }, "checked": null },
            "seed": "0".repeat(64), "protocol": autokernel_judge::Protocol::default(),
            "schedule": [{ "pairs": 6, "alpha": 0.01 }, { "pairs": 10, "alpha": 0.02 }],
            "contract": { "limits": [], "deterministic": true },
            "baselines": [{ "name": "eager", "us": null }], "baseline": "eager", "candidate": "ours",
            "family": 1, "rounds": (0..10).map(round).collect::<Vec<_>>(), "discarded": [],
            "worst": [], "failure": null,
        }))
        .unwrap()
    }

    /// A store with two verdicts on one region: the hashes of their evidence, in order.
    fn store_with(dir: &Path, records: &[Record]) -> (Store, Vec<String>) {
        let mut store = Store::open(dir).unwrap();
        store.create_run("model-1234", &json!({})).unwrap();
        store.put_tasks("model-1234", &[("aaaa1111".to_owned(), json!({}))]).unwrap();
        let keep = |record: &Record| {
            let new = NewCandidate {
                run: "model-1234",
                region: "aaaa1111",
                agent: "person",
                source: "x",
                params: Value::Null,
                artefact: None,
                screen: None,
                verdict: None,
            };
            let candidate = store.record_candidate(&new).unwrap();
            let verdict = serde_json::to_value(&record.decided.verdict).unwrap();
            store.record_verdict(candidate, &verdict, &serde_json::to_value(record).unwrap()).unwrap().0
        };
        let hashes = records.iter().map(keep).collect();
        (store, hashes)
    }

    #[test]
    fn a_verdict_is_found_by_file_hash_and_region() {
        let dir = tempfile::tempdir().unwrap();
        let records = [Record::new(evidence(0.8)).unwrap(), Record::new(evidence(1.2)).unwrap()];
        let (store, hashes) = store_with(&dir.path().join("store"), &records);
        let file = dir.path().join("verdict.json");
        fs_err::write(&file, records[0].print()).unwrap();
        for (wanted, name) in [
            (file.to_str().unwrap(), "faster"),
            (hashes[0].as_str(), "faster"),
            (&hashes[1][..8], "slower"),
            ("last/0", "slower"),
            ("model-12/aaaa", "slower"),
        ] {
            let report = replay(&store, wanted).unwrap();
            assert_eq!(report.decided.verdict.name(), name, "{wanted}");
            assert!(report.agrees && report.text.contains("says the same"), "{}", report.text);
            assert_eq!(report.environment["sandbox"], "landlock 6");
        }
        for wanted in ["nowhere", "last", "ffffff0000", &hashes[0][..5]] {
            let error = replay(&store, wanted).unwrap_err();
            assert!(matches!(error, EngineError::Store(StoreError::NoEvidence { .. })), "{wanted}: {error}");
        }
    }

    #[test]
    fn damage_and_forgery_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = store_with(&dir.path().join("store"), &[]);
        let record = Record::new(evidence(0.8)).unwrap();
        let replayed = |text: &str| {
            let file = dir.path().join("verdict.json");
            fs_err::write(&file, text).unwrap();
            replay(&store, file.to_str().unwrap())
        };
        let text = record.print();
        let half = replayed(&text[..text.len() / 2]).unwrap_err();
        assert!(matches!(half, EngineError::Record(RecordError::Truncated { .. })), "{half}");
        let changed = replayed(&text.replacen("100.1", "90.1", 1)).unwrap_err();
        assert!(matches!(changed, EngineError::Record(RecordError::Digest { .. })), "{changed}");
        // Who can compute the digest can still not make another verdict of the same evidence.
        let honest = Record::new(evidence(1.2)).unwrap();
        let forged = Record { decided: record.decided, ..honest };
        let sealed = forged.print().replace(&forged.digest, &digest_of(&forged));
        let report = replayed(&sealed).unwrap();
        assert!(!report.agrees && report.text.contains("something else: slower"), "{}", report.text);
    }

    /// The digest that the message of the error names.
    fn digest_of(record: &Record) -> String {
        match Record::parse(record.print().as_bytes()) {
            Err(RecordError::Digest { found, .. }) => found,
            other => panic!("{other:?}"),
        }
    }
}
