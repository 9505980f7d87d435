//! The metrics on honest, cheap and wrong outputs.

use std::path::Path;

use autokernel_core::contract::Contract;
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;

use super::*;
use crate::truth::{RawSet, TensorFile};

/// Seeded normal-like numbers (sum of uniforms), zero mean, unit variance.
fn noise(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f64>() - 6.0).collect()
}

fn write(dir: &Path, name: &str, dtype: Dtype, shape: &[u64], bytes: &[u8]) -> TensorFile {
    let file = dir.join(name);
    fs_err::write(&file, bytes).unwrap();
    let meta = TensorMeta::contiguous(dtype, shape);
    TensorFile { file, dtype, shape: meta.shape, stride: meta.stride }
}

fn f64s(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn f32s(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect()
}

fn bf16(value: f64) -> f64 {
    f64::from(f32::from_bits(((value as f32).to_bits() + 0x8000) & 0xffff_0000))
}

/// A truth of one f32 output over several sets; the baseline is the truth rounded.
fn truth(dir: &Path, shape: &[u64], sets: &[Vec<f64>]) -> Truth {
    let limits = Limits::for_dtype(Dtype::F32, 1024);
    let raw = sets
        .iter()
        .enumerate()
        .map(|(i, values)| RawSet {
            family: format!("family{i}"),
            inputs: vec![],
            truth: vec![write(dir, &format!("r{i}"), Dtype::F64, shape, &f64s(values))],
            baseline: vec![write(dir, &format!("b{i}"), Dtype::F32, shape, &f32s(values))],
            noise: vec![],
            own_types: false,
        })
        .collect();
    Truth::prepare(Contract { limits: vec![limits], deterministic: true }, raw).unwrap()
}

fn check(truth: &Truth, set: usize, bytes: &[u8]) -> Comparison {
    let set_truth = &truth.sets()[set];
    let meta = set_truth.outputs[0].meta.clone();
    Comparer::new(truth).compare(set, 0, Tensor { source: &bytes.to_vec(), meta: &meta }).unwrap()
}

fn metric(comparison: &Comparison) -> Option<Metric> {
    comparison.fault.as_ref().map(|fault| fault.metric)
}

#[test]
fn honest_outputs_pass_and_cheap_ones_fail() {
    let dir = tempfile::tempdir().unwrap();
    let values = noise(1, 300 * 1000);
    let truth = truth(dir.path(), &[300, 1000], std::slice::from_ref(&values));
    assert!(truth.weak_outputs().is_empty());

    let honest: Vec<f64> = values.iter().map(|v| v * (1.0 + 3e-8)).collect();
    let comparison = check(&truth, 0, &f32s(&honest));
    assert_eq!(metric(&comparison), None, "{:?}", comparison.fault);
    assert_eq!(
        comparison.digest,
        digest(Tensor { source: &f32s(&honest), meta: &TensorMeta::contiguous(Dtype::F32, &[300_000]) })
            .unwrap()
    );

    assert!(check(&truth, 0, &f32s(&vec![0.0; values.len()])).fault.is_some(), "zeros");
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    assert!(check(&truth, 0, &f32s(&vec![mean; values.len()])).fault.is_some(), "constant");
    let cheap: Vec<f64> = values.iter().map(|v| bf16(*v)).collect();
    assert!(check(&truth, 0, &f32s(&cheap)).fault.is_some(), "lower precision");
    let scaled: Vec<f64> = values.iter().map(|v| v * (1.0 + 1e-6)).collect();
    assert_eq!(metric(&check(&truth, 0, &f32s(&scaled))), Some(Metric::Ratio), "a small error everywhere");
}

#[test]
fn a_single_element_is_found_and_placed() {
    let dir = tempfile::tempdir().unwrap();
    let values = noise(2, 300 * 1000);
    let truth = truth(dir.path(), &[300, 1000], std::slice::from_ref(&values));
    let mut wrong = values.clone();
    wrong[299 * 1000 + 999] = 0.0;
    let fault = check(&truth, 0, &f32s(&wrong)).fault.unwrap();
    assert_eq!(fault.metric, Metric::Element);
    assert_eq!(fault.place.unwrap().rows, (266, 300));
    assert_eq!(fault.place.unwrap().columns, (875, 1000));

    wrong[5] = f64::NAN;
    let fault = check(&truth, 0, &f32s(&wrong)).fault.unwrap();
    assert_eq!((fault.metric, fault.place.unwrap().rows.0), (Metric::NonFinite, 0));
    assert!(serde_json::to_string(&fault).unwrap().contains("non_finite"));
}

#[test]
fn infinities_must_stand_where_the_truth_has_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut values = noise(3, 64 * 64);
    values[10] = f64::INFINITY;
    values[11] = f64::NAN;
    values[12] = 1e39;
    let truth = truth(dir.path(), &[64, 64], std::slice::from_ref(&values));
    assert!(check(&truth, 0, &f32s(&values)).fault.is_none());
    for (index, value) in [(10, f64::NEG_INFINITY), (10, 1.0), (11, 0.0), (12, 3e38), (13, f64::INFINITY)] {
        let mut wrong = values.clone();
        wrong[index] = value;
        assert_eq!(metric(&check(&truth, 0, &f32s(&wrong))), Some(Metric::NonFinite), "{index} {value}");
    }
}

#[test]
fn rows_have_their_own_scale() {
    let dir = tempfile::tempdir().unwrap();
    let mut values = noise(4, 64 * 256);
    values[..256].iter_mut().for_each(|v| *v *= 1e-6);
    let truth = truth(dir.path(), &[64, 256], std::slice::from_ref(&values));
    let mut wrong = values.clone();
    wrong[..256].iter_mut().for_each(|v| *v = bf16(*v));
    assert_eq!(
        metric(&check(&truth, 0, &f32s(&wrong))),
        Some(Metric::Element),
        "a small row is not hidden by large ones"
    );
}

#[test]
fn tiny_outputs_are_pooled() {
    let dir = tempfile::tempdir().unwrap();
    let sets: Vec<Vec<f64>> = (0..8).map(|i| vec![noise(10 + i, 1)[0]]).collect();
    let mut exact = sets.clone();
    // In one set the baseline happens to be exact.
    exact[0] = vec![1.0];
    let truth = truth(dir.path(), &[1], &exact);
    let meta = TensorMeta::contiguous(Dtype::F32, &[1]);
    let run = |error: f64| {
        let mut comparer = Comparer::new(&truth);
        (0..8).find_map(|set| {
            let bytes = f32s(&[exact[set][0] * (1.0 + error)]);
            comparer.compare(set, 0, Tensor { source: &bytes, meta: &meta }).unwrap().fault
        })
    };
    assert_eq!(run(1.5e-7), None);
    assert_eq!(run(1.2e-6).map(|fault| fault.metric), Some(Metric::Ratio));
    assert!(run(1e-3).is_some());
}

#[test]
fn exact_outputs_need_equal_bits() {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..100_i64).flat_map(i64::to_le_bytes).collect();
    let file = write(dir.path(), "i", Dtype::I64, &[10, 10], &bytes);
    let raw = RawSet {
        family: "f".into(),
        inputs: vec![],
        truth: vec![file.clone()],
        baseline: vec![file],
        noise: vec![],
        own_types: false,
    };
    let truth = Truth::prepare(Contract { limits: vec![None], deterministic: true }, vec![raw]).unwrap();
    assert!(check(&truth, 0, &bytes).fault.is_none());
    let mut wrong = bytes;
    wrong[8 * 57] ^= 1;
    let fault = check(&truth, 0, &wrong).fault.unwrap();
    assert_eq!((fault.metric, fault.place.unwrap().rows), (Metric::Bits, (4, 6)));
    let meta = TensorMeta::contiguous(Dtype::I32, &[10, 10]);
    let comparison = Comparer::new(&truth).compare(0, 0, Tensor { source: &wrong, meta: &meta }).unwrap();
    assert_eq!(metric(&comparison), Some(Metric::Shape));
}

#[test]
fn outputs_in_another_storage_order_are_read_by_their_strides() {
    let dir = tempfile::tempdir().unwrap();
    let values = noise(5, 40 * 50);
    let truth = truth(dir.path(), &[40, 50], std::slice::from_ref(&values));
    let transposed: Vec<f64> = (0..2000).map(|i| values[(i % 40) * 50 + i / 40]).collect();
    let meta = TensorMeta { dtype: Dtype::F32, shape: vec![40, 50], stride: vec![1, 40] };
    let bytes = f32s(&transposed);
    assert!(
        Comparer::new(&truth).compare(0, 0, Tensor { source: &bytes, meta: &meta }).unwrap().fault.is_none()
    );
}

#[test]
fn a_truth_without_signal_is_weak() {
    let dir = tempfile::tempdir().unwrap();
    let truth = truth(dir.path(), &[10, 100], &[vec![1.000_000_01; 1000]]);
    assert_eq!(truth.weak_outputs(), [0], "a constant output can't tell a kernel from a constant");
}

/// Rows of a centred output far from zero: what a rounding of the mean shifts, it shifts in a whole row.
struct Centred {
    truth: Truth,
    values: Vec<f64>,
}

const MEAN: f64 = 10.0;
const UNIT: f64 = 1.0 / 16_777_216.0;

impl Centred {
    /// The baseline's mean is exact in row 0, and off by its rounding in the others.
    fn new(dir: &Path, noise_known: bool) -> Self {
        let shape = [16, 256];
        let values: Vec<f64> = noise(6, 16 * 256).iter().map(|v| v * 0.01).collect();
        let lucky = values.iter().enumerate().map(|(i, v)| if i < 256 { *v } else { v + 0.5 * UNIT * MEAN });
        let baseline: Vec<f64> = lucky.collect();
        let spread = vec![0.6 * UNIT * MEAN; values.len()];
        let raw = RawSet {
            family: "low_variance".into(),
            inputs: vec![],
            truth: vec![write(dir, "r", Dtype::F64, &shape, &f64s(&values))],
            baseline: vec![write(dir, "b", Dtype::F32, &shape, &f32s(&baseline))],
            noise: if noise_known {
                vec![write(dir, "s", Dtype::F64, &shape, &f64s(&spread))]
            } else {
                vec![]
            },
            own_types: false,
        };
        let limits = Limits::for_dtype(Dtype::F32, 256);
        let contract = Contract { limits: vec![limits], deterministic: true };
        Self { truth: Truth::prepare(contract, vec![raw]).unwrap(), values }
    }

    fn check(&self, change: impl Fn(f64) -> f64) -> Comparison {
        check(&self.truth, 0, &f32s(&self.values.iter().map(|v| change(*v)).collect::<Vec<_>>()))
    }
}

#[test]
fn luck_of_the_baseline_is_no_scale() {
    let dir = tempfile::tempdir().unwrap();
    let honest = |v: f64| v - UNIT * MEAN;
    // By the baseline alone, a row in which it was lucky condemns whoever rounds its mean otherwise.
    let luck = Centred::new(dir.path(), false);
    assert_eq!(metric(&luck.check(honest)), Some(Metric::Element));

    let known = Centred::new(dir.path(), true);
    let comparison = known.check(honest);
    assert_eq!(metric(&comparison), None, "{:?}", comparison.fault);
    assert!(comparison.metrics.element < 4.0 && comparison.metrics.ratio < 4.0, "{:?}", comparison.metrics);

    let cheap = |v: f64| bf16(v + MEAN) - MEAN;
    assert!(known.check(cheap).fault.is_some(), "inputs in lower precision");
    let tf32 = |v: f64| ((v + MEAN) * 1024.0 / 8.0).round() * 8.0 / 1024.0 - MEAN;
    assert!(known.check(tf32).fault.is_some(), "inputs with ten bits");
    assert!(known.check(|v| v - 100.0 * UNIT * MEAN).fault.is_some(), "a mean that is off by far");
    assert!(known.check(|_| 0.0).fault.is_some(), "a constant");
}

#[test]
fn a_set_that_is_all_noise_is_left_out_aloud() {
    let dir = tempfile::tempdir().unwrap();
    let values = noise(7, 1000);
    let file = |name: &str, dtype, bytes: &[u8]| write(dir.path(), name, dtype, &[10, 100], bytes);
    let raw = |family: &str, size: f64| {
        let spread: Vec<f64> = values.iter().map(|_| size).collect();
        RawSet {
            family: family.into(),
            inputs: vec![file("x", Dtype::F32, &f32s(&values))],
            truth: vec![file("r", Dtype::F64, &f64s(&values))],
            baseline: vec![file("b", Dtype::F32, &f32s(&values))],
            noise: vec![file(&format!("s{family}"), Dtype::F64, &f64s(&spread))],
            own_types: false,
        }
    };
    let contract = || Contract { limits: vec![Limits::for_dtype(Dtype::F32, 1)], deterministic: true };
    let sets = vec![raw("captured", 0.5), raw("normal", 1e-7), raw("constant_rows", 0.5)];
    let truth = Truth::prepare(contract(), sets).unwrap();
    let families = |truth: &Truth| truth.sets().iter().map(|set| set.family.clone()).collect::<Vec<_>>();
    assert_eq!(families(&truth), ["captured", "normal"], "what the model itself computes stays");
    assert_eq!(truth.unfit().iter().map(|u| u.family.as_str()).collect::<Vec<_>>(), ["constant_rows"]);
    assert!(Truth::prepare(contract(), vec![raw("constant_rows", 0.5)]).is_err(), "nothing is left");
}

#[test]
fn a_truth_in_own_types_is_as_exact_as_its_roundings() {
    let dir = tempfile::tempdir().unwrap();
    let values: Vec<f64> = noise(8, 64 * 64).iter().map(|v| f64::from(*v as f32)).collect();
    let prepare = |noise: Option<f64>| {
        let file = |name: &str, dtype, bytes: &[u8]| write(dir.path(), name, dtype, &[64, 64], bytes);
        let spread = noise.map(|size| file("s", Dtype::F64, &f64s(&vec![size; values.len()])));
        let raw = RawSet {
            family: String::new(),
            inputs: vec![],
            truth: vec![file("r", Dtype::F64, &f64s(&values))],
            baseline: vec![file("b", Dtype::F32, &f32s(&values))],
            noise: spread.into_iter().collect(),
            own_types: true,
        };
        let limits = Limits { centred: 1.0, ..Limits::for_dtype(Dtype::F32, 1).unwrap() };
        Truth::prepare(Contract { limits: vec![Some(limits)], deterministic: false }, vec![raw]).unwrap()
    };
    let off = |by: f64| f32s(&values.iter().map(|v| v + by).collect::<Vec<_>>());
    for (noise, good, bad) in [
        (None, 200.0, 1000.0),
        (Some(0.0), 200.0, 1000.0),
        (Some(UNIT), 20.0, 60.0),
        (Some(50.0 * UNIT), 200.0, 800.0),
    ] {
        let truth = prepare(noise);
        assert!(truth.own_types());
        assert!(check(&truth, 0, &off(good * UNIT)).fault.is_none(), "{noise:?}");
        assert!(check(&truth, 0, &off(bad * UNIT)).fault.is_some(), "{noise:?}");
    }
    let cheap: Vec<f64> = values.iter().map(|v| bf16(*v)).collect();
    assert!(check(&prepare(None), 0, &f32s(&cheap)).fault.is_some(), "lower precision");
}

/// A set of special values beside an ordinary one; `b` is the baseline where it differs from the truth.
fn special(dir: &Path, family: &str, values: &[f64], b: &[(usize, f64)]) -> Truth {
    let ordinary = noise(31, values.len());
    let set = |family: &str, values: &[f64], b: &[(usize, f64)]| {
        let mut own = values.to_vec();
        for (i, value) in b {
            own[*i] = *value;
        }
        RawSet {
            family: family.into(),
            inputs: vec![],
            truth: vec![write(dir, &format!("r{family}"), Dtype::F64, &[64, 64], &f64s(values))],
            baseline: vec![write(dir, &format!("b{family}"), Dtype::F32, &[64, 64], &f32s(&own))],
            noise: vec![],
            own_types: false,
        }
    };
    let limits = vec![Limits::for_dtype(Dtype::F32, 1)];
    // As the oracle never sends them: special values first.
    let sets = vec![set(family, values, b), set("normal", &ordinary, &[])];
    Truth::prepare(Contract { limits, deterministic: true }, sets).unwrap()
}

fn check_special(truth: &Truth, values: &[f64], changes: &[(usize, f64)]) -> Option<Metric> {
    let mut ours = values.to_vec();
    for (i, value) in changes {
        ours[*i] = *value;
    }
    let meta = TensorMeta::contiguous(Dtype::F32, &[64, 64]);
    let set = truth.sets().len();
    let bytes = f32s(&ours);
    metric(&Comparer::new(truth).compare(set, 0, Tensor { source: &bytes, meta: &meta }).unwrap())
}

#[test]
fn special_values_are_checked_and_never_timed() {
    let dir = tempfile::tempdir().unwrap();
    let mut values = noise(30, 64 * 64);
    values[5] = f64::NAN;
    values[6] = f64::INFINITY;
    let truth = special(dir.path(), "special", &values, &[(7, f64::NAN), (8, f64::INFINITY), (9, 0.0)]);
    let families =
        |sets: &[crate::truth::TruthSet]| sets.iter().map(|s| s.family.clone()).collect::<Vec<_>>();
    assert_eq!(families(truth.sets()), ["normal"]);
    assert_eq!(families(truth.all()), ["normal", "special"]);

    assert_eq!(check_special(&truth, &values, &[]), None);
    for wrong in [(5, 0.0), (5, f64::INFINITY), (6, f64::NEG_INFINITY), (6, 3e38), (10, f64::NAN)] {
        assert_eq!(check_special(&truth, &values, &[wrong]), Some(Metric::NonFinite), "{wrong:?}");
    }
    assert_eq!(check_special(&truth, &values, &[(11, values[11] + 1e-3)]), Some(Metric::Element));
    // Where PyTorch itself left the truth nothing is decided, and nothing else hides behind it.
    for undecided in [(7, 0.5), (7, f64::NAN), (8, 1.0), (9, 0.0), (9, f64::NAN), (9, 1e30)] {
        assert_eq!(check_special(&truth, &values, &[undecided]), None, "{undecided:?}");
    }
}

#[test]
fn the_order_of_products_decides_what_overflows() {
    let dir = tempfile::tempdir().unwrap();
    let mut values = noise(32, 64 * 64);
    values[5] = 3e38;
    values[6] = 1e39;
    let truth = special(dir.path(), "special_large", &values, &[]);
    for honest in [(5, 3e38), (5, f64::INFINITY), (6, f64::NAN), (7, f64::INFINITY)] {
        assert_eq!(check_special(&truth, &values, &[honest]), None, "{honest:?}");
    }
    for wrong in [(5, 1e38), (5, -3e38), (100, 0.0)] {
        assert_eq!(check_special(&truth, &values, &[wrong]), Some(Metric::Element), "{wrong:?}");
    }
    assert_eq!(check_special(&truth, &values, &[(6, 3e38)]), Some(Metric::NonFinite), "a clamp");
}

#[test]
fn displacement_is_in_units_of_honest_errors() {
    let dir = tempfile::tempdir().unwrap();
    let values = noise(33, 64 * 64);
    let truth = truth(dir.path(), &[64, 64], std::slice::from_ref(&values));
    let moved = |name: &str, change: &dyn Fn(f64) -> f64| {
        let form: Vec<f64> = values.iter().map(|v| change(*v)).collect();
        let file = write(dir.path(), name, Dtype::F64, &[64, 64], &f64s(&form));
        displacement(&truth.sets()[0].outputs[0], &file).unwrap().unwrap()
    };
    let none = moved("same", &|v| v);
    assert!(none.ratio == 0.0 && none.element == 0.0);
    let little = moved("little", &|v| v * (1.0 + 1e-9));
    assert!(little.ratio < 0.1 && little.element < 0.1, "{little:?}");
    let more = moved("more", &|v| v * (1.0 + UNIT));
    assert!(more.ratio > 1.0 && more.ratio < 4.0 && more.element > 0.5, "{more:?}");
    assert!(moved("lost", &|v| if v > 3.0 { f64::NAN } else { v }).ratio.is_infinite());
}
