//! The truth: what the outputs are, in fp64 on the already rounded inputs, and how far the trusted
//! baseline is from it, which is the scale that a candidate's error is held against.
//!
//! The tensors stay on disk where the oracle wrote them; here is only what is computed once for each
//! set and output. Where the truth itself is no finite number of the output's type (overflow, masked
//! rows), the baseline says what should stand there.

use std::io;
use std::path::{Path, PathBuf};

use autokernel_core::contract::Contract;
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;
use autokernel_core::stats::median;
use serde::{Deserialize, Serialize};

use crate::source::{Logical, Tensor, decode, overflow, tiny};

/// Elements handled at once: at most 512 KiB a tensor.
pub(crate) const CHUNK: u64 = 64 * 1024;

/// Rows shorter than this are taken together, so that one lucky element of the baseline does not
/// become the scale of its own row.
const SHORTEST_ROW: u64 = 32;

/// Outputs of at most this many elements are too small for a root mean square of one set to mean much.
pub const TINY_OUTPUT: u64 = 500;

/// A tensor on disk: raw bytes of the storage that its strides reach, as the bridge writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorFile {
    /// Absolute path.
    pub file: PathBuf,
    /// Element type.
    pub dtype: Dtype,
    /// Size of each dimension.
    pub shape: Vec<u64>,
    /// Stride of each dimension in elements.
    pub stride: Vec<u64>,
}

impl TensorFile {
    /// Shape, strides and element type.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta { dtype: self.dtype, shape: self.shape.clone(), stride: self.stride.clone() }
    }
}

/// One set as the oracle returns it; draws of a whole model have no inputs and no family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RawSet {
    /// How the inputs were made.
    #[serde(default)]
    pub family: String,
    /// The inputs.
    #[serde(default)]
    pub inputs: Vec<TensorFile>,
    /// The outputs in fp64 (in their own type where nothing could be widened).
    pub truth: Vec<TensorFile>,
    /// The outputs of the original operators in their own types.
    pub baseline: Vec<TensorFile>,
}

/// What can go wrong with a truth.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum TruthError {
    #[error("cannot read {path}")]
    Io { path: PathBuf, source: io::Error },
    #[error("cannot read the outputs of a candidate")]
    Candidate(#[source] io::Error),
    #[error("set {set} (`{family}`) has {got} {what}, expected {expected}")]
    Count { set: usize, family: String, what: &'static str, got: usize, expected: usize },
    #[error("output {output} of set {set}: truth and baseline have unequal shapes")]
    Shape { set: usize, output: usize },
    #[error("no sets of inputs")]
    Empty,
}

/// How large the truth of one output is, and how far the baseline is from it.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    /// Root mean square of the truth, over finite elements.
    pub(crate) rms: f64,
    /// Standard deviation of the truth.
    pub(crate) std: f64,
    /// Root mean square of baseline minus truth.
    pub(crate) error: f64,
    /// What the candidate's root mean square error is divided by: `error` with its floors.
    pub(crate) yardstick: f64,
    /// Elements of a row (short rows taken together).
    pub(crate) row: u64,
    /// Root mean square of baseline minus truth in each row.
    pub(crate) row_error: Vec<f64>,
    /// Whether truth or baseline has elements that are not finite in the output's type.
    pub(crate) special: bool,
}

/// One output of one set.
#[derive(Clone, Debug)]
pub(crate) struct OutputTruth {
    pub(crate) truth: TensorFile,
    pub(crate) baseline: TensorFile,
    /// Shape and type of the output, dense.
    pub(crate) meta: TensorMeta,
    /// `None` where bits must be equal to the baseline's.
    pub(crate) scale: Option<Scale>,
}

/// One set of inputs and what belongs to it.
#[derive(Clone, Debug)]
pub struct TruthSet {
    /// How the inputs were made.
    pub family: String,
    /// The inputs.
    pub inputs: Vec<TensorFile>,
    pub(crate) outputs: Vec<OutputTruth>,
}

/// All sets of a task or model, ready to compare against.
#[derive(Clone, Debug)]
pub struct Truth {
    contract: Contract,
    sets: Vec<TruthSet>,
}

impl Truth {
    /// Reads every truth and baseline once.
    pub fn prepare(contract: Contract, raw: Vec<RawSet>) -> Result<Self, TruthError> {
        if raw.is_empty() {
            return Err(TruthError::Empty);
        }
        let mut sets = Vec::with_capacity(raw.len());
        for (index, set) in raw.into_iter().enumerate() {
            sets.push(prepare_set(&contract, index, set)?);
        }
        let mut truth = Self { contract, sets };
        for output in 0..truth.contract.limits.len() {
            truth.set_yardsticks(output);
        }
        Ok(truth)
    }

    /// The contract that outputs are held against.
    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// The sets, in the oracle's order.
    pub fn sets(&self) -> &[TruthSet] {
        &self.sets
    }

    /// Outputs in which no set has enough signal over the baseline's own error to tell right from
    /// wrong: a task with one of these is unfit.
    pub fn weak_outputs(&self) -> Vec<usize> {
        let strong = |output: &OutputTruth| {
            output.scale.as_ref().is_none_or(|s| {
                let signal = if output.meta.numel() == 1 { s.rms } else { s.std };
                signal > 0.0 && signal >= 30.0 * s.error
            })
        };
        (0..self.contract.limits.len())
            .filter(|i| !self.sets.iter().any(|set| strong(&set.outputs[*i])))
            .collect()
    }

    /// What ratios are measured in. A tiny output of one set may happen to be nearly exact in the
    /// baseline; there the typical relative error over all sets counts instead.
    fn set_yardsticks(&mut self, output: usize) {
        let scales = |sets: &mut Vec<TruthSet>| -> Vec<f64> {
            sets.iter()
                .filter_map(|set| set.outputs[output].scale.as_ref())
                .filter(|s| s.rms > 0.0)
                .map(|s| s.error / s.rms)
                .collect()
        };
        let typical = median(&scales(&mut self.sets)).unwrap_or(0.0);
        for set in &mut self.sets {
            let OutputTruth { meta, scale, .. } = &mut set.outputs[output];
            let (Some(scale), Some(unit)) = (scale, meta.dtype.unit_roundoff()) else { continue };
            let pooled = if meta.numel() <= TINY_OUTPUT { typical * scale.rms } else { 0.0 };
            scale.yardstick = scale.error.max(0.4 * unit * scale.rms).max(pooled) + tiny(meta.dtype);
            if pooled > 0.0 {
                scale.row_error.iter_mut().for_each(|error| *error = error.max(pooled));
            }
        }
    }
}

fn prepare_set(contract: &Contract, index: usize, set: RawSet) -> Result<TruthSet, TruthError> {
    let expected = contract.limits.len();
    for (what, got) in [("truths", set.truth.len()), ("baselines", set.baseline.len())] {
        if got != expected {
            return Err(TruthError::Count { set: index, family: set.family, what, got, expected });
        }
    }
    let mut outputs = Vec::with_capacity(expected);
    for (i, (truth, baseline)) in set.truth.into_iter().zip(set.baseline).enumerate() {
        if truth.shape != baseline.shape {
            return Err(TruthError::Shape { set: index, output: i });
        }
        let meta = TensorMeta::contiguous(baseline.dtype, &baseline.shape);
        let scale = if contract.limits[i].is_some() && meta.dtype.is_float() {
            Some(measure(&truth, &baseline, &meta)?)
        } else {
            None
        };
        outputs.push(OutputTruth { truth, baseline, meta, scale });
    }
    Ok(TruthSet { family: set.family, inputs: set.inputs, outputs })
}

/// An open tensor file.
pub(crate) struct Opened<'a> {
    pub(crate) logical: Logical<'a>,
    path: &'a Path,
}

impl Opened<'_> {
    pub(crate) fn read(&self, start: u64, count: usize, bytes: &mut Vec<u8>) -> Result<(), TruthError> {
        self.logical
            .read(start, count, bytes)
            .map_err(|source| TruthError::Io { path: self.path.to_owned(), source })
    }
}

/// Opens a tensor file and hands it to `with`.
pub(crate) fn open<T>(
    tensor: &TensorFile,
    with: impl FnOnce(Opened<'_>) -> Result<T, TruthError>,
) -> Result<T, TruthError> {
    let failed = |source| TruthError::Io { path: tensor.file.clone(), source };
    let file = std::fs::File::open(&tensor.file).map_err(failed)?;
    let meta = tensor.meta();
    let logical = Logical::new(Tensor { source: &file, meta: &meta }).map_err(failed)?;
    with(Opened { logical, path: &tensor.file })
}

/// Elements of a row: the last dimensions, as many as it takes to reach [`SHORTEST_ROW`].
fn row_length(shape: &[u64]) -> u64 {
    let mut row = 1;
    for size in shape.iter().rev() {
        row *= size;
        if row >= SHORTEST_ROW {
            break;
        }
    }
    row.max(1)
}

/// Running mean and sum of squared deviations, merged chunk by chunk (Chan, Golub and LeVeque 1979).
#[derive(Default)]
struct Moments {
    count: f64,
    mean: f64,
    deviations: f64,
}

impl Moments {
    fn add(&mut self, values: &[f64]) {
        if values.is_empty() {
            return;
        }
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let deviations = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>();
        let (delta, total) = (mean - self.mean, self.count + count);
        self.deviations += deviations + delta * delta * self.count * count / total;
        self.mean += delta * count / total;
        self.count = total;
    }

    fn std(&self) -> f64 {
        if self.count > 0.0 { (self.deviations / self.count).sqrt() } else { 0.0 }
    }
}

fn measure(truth: &TensorFile, baseline: &TensorFile, meta: &TensorMeta) -> Result<Scale, TruthError> {
    open(truth, |t| open(baseline, |b| measure_opened((&t, truth.dtype), (&b, baseline.dtype), meta)))
}

fn measure_opened(
    t: (&Opened<'_>, Dtype),
    b: (&Opened<'_>, Dtype),
    meta: &TensorMeta,
) -> Result<Scale, TruthError> {
    let (numel, row, limit) = (meta.numel(), row_length(&meta.shape), overflow(meta.dtype));
    let (mut bytes, mut r, mut v, mut finite) = (vec![], vec![], vec![], vec![]);
    let mut rows = vec![(0.0_f64, 0_u64); numel.div_ceil(row) as usize];
    let (mut moments, mut square, mut special) = (Moments::default(), 0.0, false);
    let mut start = 0;
    while start < numel {
        let count = CHUNK.min(numel - start) as usize;
        t.0.read(start, count, &mut bytes)?;
        decode(t.1, &bytes, &mut r);
        b.0.read(start, count, &mut bytes)?;
        decode(b.1, &bytes, &mut v);
        finite.clear();
        for (i, (r, b)) in r.iter().zip(&v).enumerate() {
            // A NaN compares false, so this asks for finite numbers in the output's own type.
            if r.abs() < limit && b.abs() < limit {
                finite.push(*r);
                square += r * r;
                let sum = &mut rows[((start + i as u64) / row) as usize];
                sum.0 += (b - r).powi(2);
                sum.1 += 1;
            } else {
                special = true;
            }
        }
        moments.add(&finite);
        start += count as u64;
    }
    let rms = |sum: f64, count: f64| if count > 0.0 { (sum / count).sqrt() } else { 0.0 };
    let error: f64 = rows.iter().map(|(sum, _)| sum).sum();
    Ok(Scale {
        rms: rms(square, moments.count),
        std: moments.std(),
        error: rms(error, moments.count),
        yardstick: 0.0,
        row,
        row_error: rows.into_iter().map(|(sum, count)| rms(sum, count as f64)).collect(),
        special,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_rows_are_taken_together() {
        assert_eq!(row_length(&[4, 1024]), 1024);
        assert_eq!(row_length(&[64, 16, 1]), 1024);
        assert_eq!(row_length(&[3]), 3);
        assert_eq!(row_length(&[]), 1);
        assert_eq!(row_length(&[8, 0]), 1);
    }

    #[test]
    fn moments_merge() {
        let values: Vec<f64> = (0..1000).map(|i| 1e6 + f64::from(i % 7)).collect();
        let (mut whole, mut pieces) = (Moments::default(), Moments::default());
        whole.add(&values);
        values.chunks(37).for_each(|chunk| pieces.add(chunk));
        assert!((whole.std() - pieces.std()).abs() < 1e-9);
        assert!((whole.std() - 2.0).abs() < 0.01);
    }
}
