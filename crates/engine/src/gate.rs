//! The gate: all forms of the whole model side by side, and the choice among them.
//!
//! Plain forms face the same contract as ours. The scale is the model's own error against fp64, or how
//! far roundings move its outputs, never a fixed tolerance. When nothing of ours helps, the best plain form is the answer.

use std::path::Path;

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::stats::{ALPHA, REPORTED_PAIRS};
use autokernel_core::verdict::{Interval, Verdict};
use autokernel_judge::{Contest, Facts, PATIENCE, Patience, Protocol, Race, RawSet, Staging, Truth, race};
use serde::Deserialize;
use serde_json::json;

use crate::contestants::{OUR_FORMS, PLAIN_FORMS, Prepared, Subject, environment, prepare};
use crate::error::{EngineError, model_error};
use crate::event::{Event, Observer};
use crate::options::ModelSpec;
use crate::report::{FormReport, Speedups, Spread};
use crate::session::{Oracle, Tools, beside};
use crate::trial::random_seed;

/// Input draws of the whole model that outputs are checked on; each once in the life of a process, and
/// no other draw twice.
const DRAWS: usize = 4;

/// Timed batches of one process, in turns with the other forms: enough that the median of a process
/// rides out the moments in which something else had the core.
const TURNS: usize = 4;
const PER_TURN: usize = 4;

/// Reductions of a whole model are not counted one by one; its outputs are held to the model's own
/// error, so that the centred cap only has to catch what is no noise at all.
const MODEL_REDUCTION: u64 = 1 << 20;

/// What came of the gate.
pub(crate) struct Gate {
    pub(crate) forms: Vec<FormReport>,
    pub(crate) chosen: String,
    pub(crate) speedup: Option<Speedups>,
    pub(crate) race: Race,
}

#[derive(Deserialize)]
struct ModelTruth {
    draws: Vec<RawSet>,
    widened: bool,
}

/// What the gate measures.
pub(crate) struct Entry<'a> {
    pub(crate) model: &'a ModelSpec,
    pub(crate) seed: u64,
    /// The package with the winners; `None` when there is none.
    pub(crate) package: Option<&'a Path>,
    /// Hashes of the artefacts in the package.
    pub(crate) artefacts: Vec<String>,
}

/// Races the forms and chooses.
pub(crate) fn gate(
    oracle: &mut Oracle,
    tools: &Tools,
    entry: &Entry<'_>,
    scratch: &Path,
    observer: &mut dyn Observer,
) -> Result<Gate, EngineError> {
    let folder = tempfile::Builder::new().prefix("gate-").tempdir_in(scratch)?;
    let (truth, draws) = model_truth(oracle, tools, folder.path(), observer)?;
    let (mut forms, prepared) = prepare_forms(tools, entry, scratch, observer)?;
    let mut contestants: Vec<_> =
        prepared.iter().map(|(name, form)| form.zygote.contestant(name, true)).collect();
    let contest = Contest {
        truth: &truth,
        staging: Staging::Draws(draws.clone()),
        protocol: Protocol { staged: 2, batches: TURNS, per_turn: PER_TURN, ..Protocol::default() },
    };
    let mut environment = environment(tools);
    // Which seeds the truth was computed for; the others follow from those of each round.
    environment.insert("draws".to_owned(), format!("{draws:?}"));
    let facts = Facts {
        subject: oracle.model.name.clone(),
        artefacts: entry.artefacts.clone(),
        environment,
        checked: None,
    };
    observer
        .observe(&Event::Stage { what: format!("measuring {} forms of the whole model", contestants.len()) });
    let mut say = |what: &str| observer.observe(&Event::Note { what: what.to_owned() });
    let mut patience = Patience::new(PATIENCE, &mut say);
    let race = race(&contest, &mut contestants, REPORTED_PAIRS, facts, &mut patience)?;
    if race.unfit() {
        let what = "the forms were measured on a busy machine; `autokernel bench` measures them again";
        observer.observe(&Event::Note { what: what.to_owned() });
    }
    for form in &mut forms {
        fill(form, &race);
        if form.correct {
            observer.observe(&Event::FormMeasured { form: form.form.clone(), us: form.us.median });
        }
    }
    let (chosen, speedup) = choose(&race);
    Ok(Gate { forms, chosen, speedup, race })
}

fn model_truth(
    oracle: &mut Oracle,
    tools: &Tools,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<(Truth, Vec<u64>), EngineError> {
    // From the system, like every seed of a measurement: a kernel file is written before they are known.
    let draws = (0..DRAWS).map(|_| random_seed()).collect::<Result<Vec<_>, _>>()?;
    let reply: ModelTruth = serde_json::from_value(oracle.ask(
        tools,
        "model_truth",
        json!({ "draws": draws, "dir": folder }),
    )?)?;
    if !reply.widened {
        let what = "the model does not run in 64-bit: forms are held against its own outputs, within what \
                    one-step changes of its inputs and weights do to them"
            .to_owned();
        observer.observe(&Event::Note { what });
    }
    let limits = reply
        .draws
        .first()
        .map(|set| &set.baseline)
        .into_iter()
        .flatten()
        .map(|tensor| Limits::for_dtype(tensor.dtype, MODEL_REDUCTION))
        .collect();
    // Order of sums may differ between two runs of a library product; bits need not be equal.
    let contract = Contract { limits, deterministic: false };
    let _beside = beside()?;
    Ok((Truth::prepare(contract, reply.draws).map_err(autokernel_judge::JudgeError::from)?, draws))
}

/// All forms for the report, and those that are ready to race.
type PreparedForms = (Vec<FormReport>, Vec<(String, Prepared)>);

fn prepare_forms(
    tools: &Tools,
    entry: &Entry<'_>,
    scratch: &Path,
    observer: &mut dyn Observer,
) -> Result<PreparedForms, EngineError> {
    let (mut forms, mut prepared) = (vec![], vec![]);
    let ours = entry.package.map(|package| OUR_FORMS.map(|form| (form, Some(package)))).into_iter().flatten();
    for (form, package) in PLAIN_FORMS.map(|form| (form, None)).into_iter().chain(ours) {
        observer.observe(&Event::Stage { what: format!("compiling the whole model: {form}") });
        let subject = match package {
            None => Subject::Plain { model: entry.model, seed: entry.seed, form },
            Some(package) => Subject::Ours { model: entry.model, seed: entry.seed, form, package },
        };
        let mut report = FormReport {
            form: form.to_owned(),
            us: Spread { median: 0.0, low: 0.0, high: 0.0 },
            correct: true,
            reason: None,
            compile_s: 0.0,
        };
        match prepare(tools, &subject, scratch) {
            Ok(ready) => {
                report.compile_s = ready.compile_s;
                if let Some(places) = &ready.places {
                    let found = places.values().filter(|count| **count > 0).count();
                    let what = format!(
                        "{form}: {found} of {} kernels in place, {} places in all",
                        places.len(),
                        places.values().sum::<usize>()
                    );
                    observer.observe(&Event::Note { what });
                }
                prepared.push((form.to_owned(), ready));
            }
            // The model itself must run; a form of it need not.
            Err(EngineError::Peer(error)) if form == PLAIN_FORMS[0] => {
                return Err(model_error(error, &tools.interpreter));
            }
            Err(error) if form == PLAIN_FORMS[0] => return Err(error),
            Err(error) => {
                observer.observe(&Event::Note { what: format!("{form} is out: {error}") });
                report.correct = false;
                report.reason = Some(error.to_string());
            }
        }
        forms.push(report);
    }
    Ok((forms, prepared))
}

fn fill(form: &mut FormReport, race: &Race) {
    if let Some(failure) = race.failures.iter().find(|failure| failure.contestant == form.form) {
        form.correct = false;
        form.reason = Some(failure.reason.clone());
    } else if let Some(us) = race.us(&form.form) {
        form.us = Spread { median: us.value, low: us.low, high: us.high };
    }
}

/// The fastest form. A form of ours must beat the best plain one beyond doubt; else that one is the answer.
pub(crate) fn choose(race: &Race) -> (String, Option<Speedups>) {
    let ranking = race.ranking();
    let is_ours = |form: &str| OUR_FORMS.contains(&form);
    let plain = ranking.iter().find(|form| !is_ours(form));
    let ours = ranking.iter().find(|form| is_ours(form));
    let fastest = match (plain, ours) {
        (Some(plain), Some(ours))
            if matches!(
                compare(race, plain, ours).map(Verdict::from_speedup),
                Some(Verdict::Faster { .. })
            ) =>
        {
            ours
        }
        (Some(plain), _) => plain,
        // Without a plain form beside it there is nothing that ours has beaten.
        (None, _) => return (PLAIN_FORMS[0].to_owned(), None),
    };
    // Between plain forms, too, what is not faster beyond doubt stays as the user wrote it.
    let eager = PLAIN_FORMS[0].to_owned();
    let chosen = match compare(race, &eager, fastest).map(Verdict::from_speedup) {
        Some(Verdict::Faster { .. }) | None => fastest.clone(),
        _ => eager.clone(),
    };
    let one = Interval { value: 1.0, low: 1.0, high: 1.0 };
    let ratio = |from: &String| if *from == chosen { Some(one) } else { compare(race, from, &chosen) };
    let speedup = ratio(&eager)
        .zip(plain.and_then(ratio))
        .map(|(vs_eager, vs_best_plain)| Speedups { vs_eager, vs_best_plain });
    (chosen, speedup)
}

/// Time of `from` over time of `to`, with its interval.
pub(crate) fn compare(race: &Race, from: &str, to: &str) -> Option<Interval> {
    let pairs = race.pairs(from, to);
    pairs.interval(pairs.differences().len(), ALPHA)
}

#[cfg(test)]
mod tests {
    use autokernel_judge::Life;
    use serde_json::json;

    use super::*;

    /// Ten rounds of the named forms; a form's time in round `i` is its own plus a wobble that
    /// differs from form to form.
    fn race_of(times: &[(&str, f64, f64)], failures: &[&str]) -> Race {
        let rounds: Vec<_> = (0..REPORTED_PAIRS)
            .map(|round| {
                let process = |(name, us, wobble): &(&str, f64, f64)| {
                    let sign = if round % 2 == 0 { 1.0 } else { -1.0 };
                    let us = us * (1.0 + sign * wobble);
                    json!({ "contestant": name, "us": [us, us, us], "checked": 0, "digests": [] })
                };
                json!({
                    "processes": times.iter().map(process).collect::<Vec<_>>(),
                    "started": [], "turns": [], "contention": null,
                    "life": Life::of_model("0".repeat(64).parse().unwrap(), 2, 16).with_calls(1, 4),
                })
            })
            .collect();
        let failures: Vec<_> = failures
            .iter()
            .map(|name| json!({ "contestant": name, "stage": "timed", "reason": "left the contract" }))
            .collect();
        serde_json::from_value(json!({
            "schema": "autokernel.race/2",
            "facts": { "subject": "m", "artefacts": [], "environment": {}, "checked": null },
            "seed": "0".repeat(64), "protocol": Protocol::default(),
            "contract": { "limits": [], "deterministic": false },
            "failures": failures, "rounds": rounds, "worst": {},
        }))
        .unwrap()
    }

    fn chosen(times: &[(&str, f64, f64)]) -> String {
        choose(&race_of(times, &[])).0
    }

    #[test]
    fn the_fastest_form_wins_when_it_is_faster_beyond_doubt() {
        let forms = [
            ("eager", 100.0, 0.0),
            ("compile", 90.0, 0.001),
            ("ours+eager", 95.0, 0.0),
            ("ours+inductor", 80.0, 0.002),
        ];
        let (form, speedup) = choose(&race_of(&forms, &[]));
        let speedup = speedup.unwrap();
        assert_eq!(form, "ours+inductor");
        assert!(
            (speedup.vs_eager.value - 1.25).abs() < 0.01
                && (speedup.vs_best_plain.value - 1.125).abs() < 0.01
        );
        assert!(speedup.vs_best_plain.low <= speedup.vs_best_plain.value);
    }

    #[test]
    fn a_doubtful_win_of_ours_is_no_win() {
        assert_eq!(
            chosen(&[("eager", 100.0, 0.0), ("compile", 90.0, 0.05), ("ours+inductor", 88.0, 0.0)]),
            "compile"
        );
    }

    #[test]
    fn nothing_helps_is_an_answer() {
        let (form, speedup) = choose(&race_of(
            &[("eager", 100.0, 0.0), ("compile", 101.0, 0.001), ("ours+eager", 102.0, 0.0)],
            &[],
        ));
        let one = Interval { value: 1.0, low: 1.0, high: 1.0 };
        assert_eq!((form.as_str(), speedup), ("eager", Some(Speedups { vs_eager: one, vs_best_plain: one })));
    }

    #[test]
    fn a_form_that_is_out_is_named_and_never_chosen() {
        let race = race_of(&[("eager", 100.0, 0.0), ("compile", 90.0, 0.0)], &["ours+eager"]);
        assert_eq!(choose(&race).0, "compile");
        let mut form = FormReport {
            form: "ours+eager".to_owned(),
            us: Spread { median: 0.0, low: 0.0, high: 0.0 },
            correct: true,
            reason: None,
            compile_s: 0.0,
        };
        fill(&mut form, &race);
        assert!(!form.correct && form.reason.as_deref() == Some("left the contract"));
    }
}
