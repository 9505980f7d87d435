//! Hard cases, and some architectures as people bring them: in whole and back whole.
//! `cargo xtask zoo` takes all of the zoo; this is the part that CI has time for.
#![expect(clippy::expect_used, reason = "helpers of tests are not known as such")]

use std::process::Command;

/// One of each kind: decoder with a cache, experts, state space, encoder, convolution, detection.
const ARCHITECTURES: [&str; 6] = ["llama_with_cache", "mixtral", "mamba2", "bert", "convnextv2", "detr"];

fn survey(models: &[String]) {
    let root = autokernel_testbed::workspace();
    let output = Command::new(autokernel_testbed::interpreter().path)
        .args(["-B", "-W", "ignore", "python/tests/survey.py", "--partition"])
        .arg(env!("CARGO_BIN_EXE_autokernel-testbed"))
        .args(models)
        .current_dir(root)
        .output()
        .expect("the survey starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stdout));
    let table: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(table["schema"], "autokernel.zoo/1");
    let found = table["models"].as_array().expect("a list of models");
    assert!(found.len() >= models.len());
    let regions = found.iter().filter_map(|model| model["regions"].as_u64()).sum::<u64>();
    assert!(regions >= found.len() as u64 / 2, "hardly a region to put back: {told}");
}

#[test]
fn hard_cases_come_back_whole() {
    survey(&["fixtures/models/hard.py".to_owned()]);
}

#[test]
fn architectures_come_back_whole() {
    survey(&ARCHITECTURES.map(|name| format!("fixtures/models/zoo.py:{name}")));
}
