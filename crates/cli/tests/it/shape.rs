//! The shape of a document: its keys and the types of their values.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Fields that may be null or missing, depending on what was measured.
const OPTIONAL: [&str; 7] =
    ["best_us", "candidate", "controls", "first_accepted", "reason", "speedup", "breaks"];
/// Maps whose keys are data.
const MAPS: [&str; 2] = ["copy_gb_per_s", "rejected"];

/// Keys and types; elements of a list are laid over each other.
pub(crate) fn shape(value: &Value) -> Value {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "string".into(),
        Value::Array(items) => json!([items.iter().map(shape).reduce(merged)]),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| {
                let shape = if OPTIONAL.contains(&name.as_str()) {
                    "optional".into()
                } else if MAPS.contains(&name.as_str()) {
                    "map".into()
                } else {
                    shape(value)
                };
                (name.clone(), shape)
            })
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect::<Map<_, _>>()
            .into(),
    }
}

fn merged(a: Value, b: Value) -> Value {
    match (a, b) {
        (Value::Object(mut a), Value::Object(b)) => {
            for (name, shape) in b {
                let both = match a.remove(&name) {
                    Some(old) => merged(old, shape),
                    None => shape,
                };
                a.insert(name, both);
            }
            a.into()
        }
        (a, b) if a == b => a,
        (a, b) => json!([a, b]),
    }
}

#[test]
fn elements_are_laid_over_each_other() {
    let value =
        json!({ "rows": [{ "a": 1 }, { "a": 2.5, "b": "x", "reason": null }], "rejected": { "run": 1 } });
    assert_eq!(
        shape(&value),
        json!({ "rows": [{ "a": "number", "b": "string", "reason": "optional" }], "rejected": "map" })
    );
}
