//! The examination against an oracle that is played here.

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{TensorMeta, Value as GraphValue};
use autokernel_core::region::{REGION_SCHEMA, RegionId, RegionNode};

use super::*;
use crate::truth::RawSet;

const N: usize = 4096;

type Form = fn(f64) -> f64;

/// `f(x) = x`, on numbers around zero and on numbers above 100.
struct Oracle {
    dir: tempfile::TempDir,
    sets: Vec<(&'static str, Vec<f64>)>,
    asked: usize,
}

impl Oracle {
    fn new(families: &[(&'static str, f64)]) -> Self {
        let values = |offset: f64, seed: usize| {
            (0..N)
                .map(|i| f64::from(((i * 2_654_435_761 + seed) % 10_007) as f32 / 5000.0 - 1.0) + offset)
                .collect()
        };
        let sets =
            families.iter().enumerate().map(|(i, (name, offset))| (*name, values(*offset, i))).collect();
        Self { dir: tempfile::tempdir().unwrap(), sets, asked: 0 }
    }

    fn write(&self, name: &str, wide: bool, values: &[f64]) -> TensorFile {
        let file = self.dir.path().join(name);
        let bytes: Vec<u8> = if wide {
            values.iter().flat_map(|v| v.to_le_bytes()).collect()
        } else {
            values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect()
        };
        fs_err::write(&file, bytes).unwrap();
        let meta = TensorMeta::contiguous(if wide { Dtype::F64 } else { Dtype::F32 }, &[64, 64]);
        TensorFile { file, dtype: meta.dtype, shape: meta.shape, stride: meta.stride }
    }

    fn truth(&self) -> Truth {
        let set = |(i, (family, values)): (usize, &(&str, Vec<f64>))| RawSet {
            family: (*family).to_owned(),
            inputs: vec![self.write(&format!("x{i}"), false, values)],
            truth: vec![self.write(&format!("r{i}"), true, values)],
            baseline: vec![self.write(&format!("b{i}"), false, values)],
            noise: vec![],
            own_types: false,
        };
        let limits = vec![Limits::for_dtype(Dtype::F32, 1)];
        let sets = self.sets.iter().enumerate().map(set).collect();
        Truth::prepare(Contract { limits, deterministic: true }, sets).unwrap()
    }

    /// Wrong forms by name, and what they make of a value.
    fn mutants() -> Vec<(&'static str, Form)> {
        vec![
            ("zero", |_| 0.0),
            ("right below 50", |v| v.min(50.0)),
            ("an epsilon", |v| v + 1e-12),
            ("a clamp that never bites", |v| v.clamp(-1e6, 1e6)),
            ("a few roundings", |v| v * (1.0 + 1e-7)),
        ]
    }

    fn ask(&mut self, op: &'static str, body: &Value) -> Value {
        self.asked += 1;
        if op == "region_mutants" {
            let names: Vec<_> = Self::mutants().iter().map(|(name, _)| json!({ "name": name })).collect();
            return json!({ "mutants": names });
        }
        assert_eq!(op, "mutant_outputs");
        let read = body["inputs"][0]["file"].as_str().unwrap();
        let set: usize = read.rsplit('x').next().unwrap().parse().unwrap();
        let wide = body["wide"].as_bool().unwrap();
        let made = body["wanted"].as_array().unwrap().iter().map(|wanted| {
            let number = wanted.as_u64().unwrap() as usize;
            let values: Vec<f64> = self.sets[set].1.iter().map(|v| (Self::mutants()[number].1)(*v)).collect();
            let file = self.write(&format!("m{number}"), wide, &values);
            json!({ "mutant": number, "outputs": [file] })
        });
        json!({ "made": made.collect::<Vec<_>>() })
    }
}

fn region() -> Region {
    let value = GraphValue::Tensor(TensorMeta::contiguous(Dtype::F32, &[64, 64]));
    let node = RegionNode { op: "aten.clone.default".into(), args: vec![], kwargs: vec![], value };
    Region {
        schema: REGION_SCHEMA.to_owned(),
        id: RegionId("0".into()),
        inputs: vec![],
        nodes: vec![node],
        outputs: vec![0],
    }
}

fn examine(oracle: &mut Oracle) -> Controls {
    let (region, truth, folder) = (region(), oracle.truth(), oracle.dir.path().to_owned());
    let mut ask = |op: &'static str, body: Value| Ok::<_, JudgeError>(oracle.ask(op, &body));
    let mut examination = Examination::begin(&region, &folder, 1, &mut ask).unwrap();
    examination.run(&truth, &mut ask).unwrap();
    examination.result()
}

#[test]
fn what_no_input_shows_is_named_and_what_is_no_other_function_does_not_count() {
    let mut oracle = Oracle::new(&[("normal", 0.0), ("captured", 0.0)]);
    let found = examine(&mut oracle);
    assert_eq!((found.mutants, found.killed), (5, 1), "{found:?}");
    // On these inputs nothing tells them: the clamp and the epsilon, and what is right below 50.
    assert_eq!(found.equivalent, 3, "{found:?}");
    assert_eq!(found.survivors, ["a few roundings"], "another function, within the limits");
    assert!(!found.fit());
    let refused = found.sufficient().unwrap_err();
    assert!(refused.concerns_one_task() && refused.to_string().contains("a few roundings"), "{refused}");
    let left = fs_err::read_dir(oracle.dir.path()).unwrap();
    let names = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.filter(|name| name.starts_with('m')).count() == 0, "outputs are deleted as they are read");
}

#[test]
fn other_inputs_kill_what_passed_for_the_same_function() {
    let mut oracle = Oracle::new(&[("normal", 0.0), ("captured", 0.0)]);
    let (region, folder) = (region(), oracle.dir.path().to_owned());
    let first = oracle.truth();
    let mut examination = {
        let mut ask = |op: &'static str, body: Value| Ok::<_, JudgeError>(oracle.ask(op, &body));
        let mut examination = Examination::begin(&region, &folder, 1, &mut ask).unwrap();
        examination.run(&first, &mut ask).unwrap();
        examination
    };
    assert_eq!(examination.result().killed, 1);
    let asked = oracle.asked;
    oracle.sets.push(("offset", oracle.sets[0].1.iter().map(|v| v + 100.0).collect()));
    let more = oracle.truth();
    let mut ask = |op: &'static str, body: Value| Ok::<_, JudgeError>(oracle.ask(op, &body));
    examination.run(&more, &mut ask).unwrap();
    let found = examination.result();
    assert_eq!((found.killed, found.equivalent), (2, 2), "{found:?}");
    assert!(oracle.asked > asked);
}

#[test]
fn a_share_of_nothing_is_no_refusal() {
    let controls =
        |mutants, killed, equivalent| Controls { mutants, killed, equivalent, ..Controls::default() };
    assert!(controls(0, 0, 0).fit() && controls(3, 0, 3).fit());
    assert!(controls(100, 95, 0).fit() && !controls(100, 94, 0).fit() && controls(100, 94, 2).fit());
    let stored = serde_json::to_string(&controls(4, 3, 1)).unwrap();
    assert_eq!(stored, r#"{"mutants":4,"killed":3,"equivalent":1,"survivors":[],"added":[]}"#);
}
