//! One run of `optimize` and everything that a user does with it afterwards.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::program::{Outcome, fixture, folder, json, model, program, run};
use crate::shape::shape;

/// A finished run.
pub(crate) struct Journey {
    pub(crate) home: PathBuf,
    pub(crate) package: PathBuf,
    outcome: Outcome,
    pub(crate) report: Value,
}

/// The run that all tests share; the first one makes it.
pub(crate) fn journey() -> &'static Journey {
    static JOURNEY: OnceLock<Journey> = OnceLock::new();
    JOURNEY.get_or_init(|| {
        let home = folder("journey");
        let package = home.join("fast_norm");
        let out = package.display().to_string();
        let outcome = json(&home, &["optimize", &model("tiny_norm"), "--budget", "30s", "--out", &out]);
        let outcome = outcome.expect(0);
        Journey { report: outcome.json(), home, package, outcome }
    })
}

/// What somebody does with a package, in a Python that has torch and nothing of ours.
pub(crate) fn check_package(package: &Path, model: &str) -> Outcome {
    let mut command = Command::new(autokernel_testbed::interpreter().path);
    command.arg("-B").arg(fixture("check_package.py")).arg(package).arg(model);
    command.env_remove("PYTHONPATH").env_remove("AUTOKERNEL_DISABLE").current_dir("/");
    run(command).expect(0)
}

#[test]
fn the_document_has_every_field() {
    let journey = journey();
    insta::assert_json_snapshot!("optimize_document", shape(&journey.report));
    assert_eq!(journey.report["schema"], "autokernel.optimize/1");
    assert_eq!(journey.report["package"], journey.package.display().to_string());
    let forms = journey.report["model"]["forms"].as_array().unwrap();
    let plain = |name: &str| forms.iter().any(|form| form["form"] == name && form["correct"] == true);
    assert!(plain("eager") && plain("compile"), "{forms:?}");
    if let Some(speedup) = journey.report["model"]["speedup"].as_object() {
        for against in ["vs_eager", "vs_best_plain"] {
            let of = |end: &str| speedup[against][end].as_f64().unwrap();
            assert!(of("low") <= of("value") && of("value") <= of("high"), "{speedup:?}");
        }
    }
}

#[test]
fn every_field_is_in_the_documentation() {
    let text = std::fs::read_to_string(autokernel_testbed::workspace().join("docs/json.md")).unwrap();
    for name in journey().report.as_object().unwrap().keys().filter(|name| *name != "schema") {
        assert!(text.contains(&format!("`{name}")), "docs/json.md lacks `{name}`");
    }
}

#[test]
fn progress_goes_to_stderr() {
    let told = &journey().outcome.stderr;
    for words in ["loading", "region(s) to work on", "whole model, eager", "chosen: "] {
        assert!(told.contains(words), "{told}");
    }
}

#[test]
fn the_package_does_what_the_model_does() {
    let journey = journey();
    let outcome = check_package(&journey.package, &model("tiny_norm"));
    let told = outcome.json();
    assert_eq!(told["disabled"], true, "{}", outcome.told());
    let chosen = journey.report["model"]["chosen"].as_str().unwrap();
    assert_eq!(told["form"], chosen);
    if chosen.starts_with("ours") {
        assert!(told["places"].as_u64() >= Some(1), "{}", outcome.told());
    }
}

#[test]
fn bench_measures_every_claim_again() {
    let journey = journey();
    let package = journey.package.display().to_string();
    let outcome = json(&journey.home, &["bench", &package]);
    // Whether a claim holds is this machine's business just now; the two answers have their codes.
    let report = outcome.json();
    let claims = report["claims"].as_array().unwrap();
    let hold = claims.iter().all(|claim| claim["holds"] == true);
    assert_eq!(outcome.code, Some(if hold { 0 } else { 8 }), "{}", outcome.told());
    assert_eq!(report["schema"], "autokernel.bench/1");
    assert_eq!(claims.is_empty(), journey.report["model"]["speedup"].is_null(), "{}", outcome.told());
    insta::assert_json_snapshot!("bench_document", shape(&report));
}

#[test]
fn runs_lists_it() {
    let journey = journey();
    let report = json(&journey.home, &["runs"]).expect(0).json();
    let runs = report["runs"].as_array().unwrap();
    let run = runs.iter().find(|run| run["run"] == journey.report["run"]).unwrap();
    assert_eq!(run["status"], "finished");
    assert_eq!(run["package"], journey.report["package"]);
    insta::assert_json_snapshot!("runs_document", shape(&report));
}

#[test]
fn a_finished_run_is_told_again() {
    let journey = journey();
    let run = journey.report["run"].as_str().unwrap();
    assert_eq!(json(&journey.home, &["resume", run]).expect(0).json(), journey.report);
}

/// The brief of the run's first region.
pub(crate) fn brief() -> Value {
    let journey = journey();
    json(&journey.home, &["brief", journey.report["run"].as_str().unwrap(), "0"]).expect(0).json()
}

#[test]
fn a_brief_has_what_an_agent_needs() {
    let brief = brief();
    let text = brief["text"].as_str().unwrap();
    for part in [
        "```python\ndef region(in0, in1):",
        "## Contract",
        "out0: rms(c-r)",
        "## The kernel file",
        "/*@ autokernel 1",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(text.contains("## The best so far"), "{text}");
    assert_eq!(brief["task"]["region"]["id"], journey().report["regions"][0]["id"]);
}

#[test]
fn the_best_kernel_passes_the_judge_again() {
    let journey = journey();
    let brief = brief();
    let best = brief["text"].as_str().unwrap().split_once("## The best so far").unwrap().1;
    let source = best.split_once("```c++\n").unwrap().1.rsplit_once("```").unwrap().0;
    let file = journey.home.join("best.cpp");
    std::fs::write(&file, source).unwrap();
    let run = journey.report["run"].as_str().unwrap();
    let outcome = json(&journey.home, &["judge", run, "0", &file.display().to_string()]);
    let report = outcome.json();
    let verdict = report["verdict"].as_str().unwrap();
    assert!(["faster", "same", "slower", "ambiguous"].contains(&verdict), "{}", outcome.told());
    assert_eq!(outcome.code, Some(if verdict == "faster" { 0 } else { 8 }), "{}", outcome.told());
    assert!(!report["screened"].as_array().unwrap().is_empty(), "{}", outcome.told());
}

/// The stored verdict of the run's first region, as a text.
fn stored_verdict() -> String {
    let mut folders = vec![journey().home.join("files")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = std::fs::read_to_string(&path)
                && text.contains("\"autokernel.verdict/1\"")
            {
                return text;
            }
        }
    }
    panic!("the run left no verdict behind");
}

#[test]
fn a_verdict_is_decided_again_without_python() {
    let journey = journey();
    let name = journey.report["run"].as_str().unwrap();
    let mut command = program(&journey.home);
    command.args(["judge", "--replay", &format!("{name}/0"), "--format", "json"]).env("PATH", "/nowhere");
    let report = run(command).expect(0).json();
    assert_eq!(report["schema"], "autokernel.replay/1");
    assert_eq!(report["agrees"], true);
    assert_eq!(report["decided"], report["stored"]);
    assert!(report["environment"]["sandbox"].as_str().unwrap().contains("landlock"), "{report}");
}

#[test]
fn damaged_evidence_is_told_as_such() {
    let journey = journey();
    let (text, file) = (stored_verdict(), journey.home.join("verdict.json"));
    let path = file.display().to_string();
    for (damaged, word) in [
        (text.replacen("\"noise\":", "\"noise\":1", 1), "was changed"),
        (text[..text.len() / 3].to_owned(), "ends too early"),
        ("{}".to_owned(), "no stored verdict"),
    ] {
        std::fs::write(&file, damaged).unwrap();
        let outcome = json(&journey.home, &["judge", "--replay", &path]).expect(7);
        let error = outcome.json();
        assert_eq!(error["kind"], "evidence", "{}", outcome.told());
        assert!(error["message"].as_str().unwrap().contains(word), "{}", outcome.told());
    }
    std::fs::write(&file, text).unwrap();
    json(&journey.home, &["judge", "--replay", &path]).expect(0);
    assert_eq!(
        json(&journey.home, &["judge", "--replay", "nothing"]).expect(2).json()["kind"],
        "no_evidence"
    );
}
