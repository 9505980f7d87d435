//! Models as people have them.

use crate::journey::check_package;
use crate::program::{folder, json, model};

fn optimize(name: &str) {
    let home = folder(name);
    let package = home.join("package");
    let model = model(name);
    let out = package.display().to_string();
    let outcome = json(&home, &["optimize", &model, "--budget", "30s", "--out", &out]).expect(0);
    let report = outcome.json();
    assert!(!report["regions"].as_array().unwrap().is_empty(), "{}", outcome.told());
    let checked = check_package(&package, &model);
    assert_eq!(checked.json()["form"], report["model"]["chosen"], "{}", checked.told());
}

#[test]
fn gpt2_of_transformers() {
    optimize("gpt2");
}

#[test]
fn a_file_of_the_kernelbench_convention() {
    optimize("kernelbench_style");
}
