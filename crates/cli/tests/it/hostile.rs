//! Kernels that are wrong on purpose, before the judge of a finished run.

use crate::journey::journey;
use crate::program::{fixture, json};

/// Kernel file and the stage that is there for it.
const KERNELS: &[(&str, &str)] = &[
    ("constructor", "admission"),
    ("static_cache", "admission"),
    ("segfault", "run"),
    ("endless", "run"),
    ("system_call", "admission"),
    ("hidden_system_call", "run"),
    ("writes_input", "run"),
    ("past_the_end", "memory"),
    ("last_element", "correctness"),
];

#[test]
fn each_is_turned_away_where_it_should_be() {
    let journey = journey();
    let run = journey.report["run"].as_str().unwrap();
    for (name, stage) in KERNELS {
        let file = fixture(&format!("kernels/{name}.cpp")).display().to_string();
        let outcome = json(&journey.home, &["judge", run, "0", &file]).expect(8);
        let report = outcome.json();
        assert_eq!(report["verdict"], "rejected", "{name}: {}", outcome.told());
        assert_eq!(report["stage"], *stage, "{name}: {}", outcome.told());
        assert!(!report["reason"].as_str().unwrap().is_empty(), "{name}");
        assert!(report["speedup"].is_null(), "{name}");
    }
}

#[test]
fn what_is_no_kernel_file_is_told_without_loading_the_model() {
    let journey = journey();
    let run = journey.report["run"].as_str().unwrap();
    let file = fixture("models/tiny_norm.py").display().to_string();
    let outcome = json(&journey.home, &["judge", run, "0", &file]).expect(8);
    assert_eq!(outcome.json()["stage"], "parse", "{}", outcome.told());
    assert!(!outcome.stderr.contains("loading"), "{}", outcome.told());
}
