//! A task made without Python: a root-mean-square norm over rows, its truth in f64.

use std::path::Path;
use std::sync::OnceLock;

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, TensorMeta, Value};
use autokernel_core::region::{Operand, REGION_SCHEMA, Region, RegionId, RegionInput, RegionNode};
use autokernel_judge::JudgedTask;
use autokernel_judge::truth::{RawSet, TensorFile};

const ROWS: usize = 48;
const COLS: usize = 515;

fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u32 << 24) as f32
    };
    (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

fn write<const N: usize>(
    dir: &Path,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
    values: impl Iterator<Item = [u8; N]>,
) -> TensorFile {
    let file = dir.join(name);
    fs_err::write(&file, values.flatten().collect::<Vec<u8>>()).unwrap();
    let meta = TensorMeta::contiguous(dtype, &shape.iter().map(|n| *n as u64).collect::<Vec<_>>());
    TensorFile { file, dtype, shape: meta.shape, stride: meta.stride }
}

fn region() -> Region {
    let x = TensorMeta::contiguous(Dtype::F32, &[ROWS as u64, COLS as u64]);
    let w = TensorMeta::contiguous(Dtype::F32, &[COLS as u64]);
    let node = RegionNode {
        op: "test.rms_norm".into(),
        args: vec![Arg::Ref(Operand::Input(0)), Arg::Ref(Operand::Input(1))],
        kwargs: vec![],
        value: Value::Tensor(x.clone()),
    };
    let inputs = vec![RegionInput { meta: x, constant: false }, RegionInput { meta: w, constant: true }];
    Region {
        schema: REGION_SCHEMA.into(),
        id: RegionId("test".into()),
        inputs,
        nodes: vec![node],
        outputs: vec![0],
    }
}

/// Inputs of six families, with zero mean, with offset, of mixed and of small scale; then special values.
fn inputs() -> Vec<(&'static str, Vec<f32>)> {
    let count = ROWS * COLS;
    let map = |seed, f: &dyn Fn(usize, f32) -> f32| {
        noise(seed, count).into_iter().enumerate().map(|(i, v)| f(i, v)).collect()
    };
    vec![
        ("normal", map(1, &|_, v| v)),
        ("normal again", map(2, &|_, v| v)),
        ("uniform", map(3, &|_, v| v.abs())),
        ("wide rows", map(4, &|i, v| v * 10.0_f32.powi((i / COLS % 5) as i32 - 2))),
        ("small", map(5, &|_, v| v * 1e-3)),
        ("outlier", map(6, &|i, v| if i % 4001 == 7 { 1e3 } else { v })),
        ("special", map(7, &|i, v| if i % 4001 == 7 { [f32::NAN, f32::INFINITY][i / 4001 % 2] } else { v })),
    ]
}

pub(crate) fn rms_norm() -> JudgedTask {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| tempfile::tempdir().unwrap()).path();
    let weight: Vec<f32> = noise(99, COLS).iter().map(|v| 1.0 + 0.1 * v).collect();
    let w = write(dir, "w", Dtype::F32, &[COLS], weight.iter().map(|v| v.to_le_bytes()));
    let sets = inputs()
        .into_iter()
        .enumerate()
        .map(|(i, (family, x))| {
            let (mut truth, mut baseline) = (vec![], vec![]);
            for row in x.chunks(COLS) {
                let wide = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / COLS as f64;
                // Pairwise, as a library sums.
                let narrow =
                    row.chunks(16).map(|c| c.iter().map(|v| v * v).sum::<f32>()).sum::<f32>() / COLS as f32;
                let (wide, narrow) =
                    (1.0 / (wide + f64::from(1e-6_f32)).sqrt(), 1.0 / (narrow + 1e-6).sqrt());
                truth.extend(row.iter().zip(&weight).map(|(v, w)| f64::from(*v) * wide * f64::from(*w)));
                baseline.extend(row.iter().zip(&weight).map(|(v, w)| v * narrow * w));
            }
            RawSet {
                family: family.into(),
                inputs: vec![
                    write(
                        dir,
                        &format!("x{i}"),
                        Dtype::F32,
                        &[ROWS, COLS],
                        x.iter().map(|v| v.to_le_bytes()),
                    ),
                    w.clone(),
                ],
                truth: vec![write(
                    dir,
                    &format!("r{i}"),
                    Dtype::F64,
                    &[ROWS, COLS],
                    truth.iter().map(|v| v.to_le_bytes()),
                )],
                baseline: vec![write(
                    dir,
                    &format!("b{i}"),
                    Dtype::F32,
                    &[ROWS, COLS],
                    baseline.iter().map(|v: &f32| v.to_le_bytes()),
                )],
                noise: vec![],
                own_types: false,
            }
        })
        .collect();
    let contract = Contract { limits: vec![Limits::for_dtype(Dtype::F32, COLS as u64)], deterministic: true };
    let task = JudgedTask::stage(region(), contract, sets, 50.0, None).unwrap();
    assert!(task.truth.weak_outputs().is_empty());
    task
}
