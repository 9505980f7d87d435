//! The truth: what the outputs are, in fp64 on the already rounded inputs, and the scale that a
//! candidate's error is held against.
//!
//! The scale is the error of the trusted baseline or, where larger, the noise of the region: how far
//! the truth moves when every value in it is known to one rounding only. The baseline alone is one
//! throw of the dice. Where a row's mean happened to be rounded well its whole row is nearly exact, and
//! an honest kernel that rounded otherwise would look wrong; noise is what honest arithmetic is off
//! by on these inputs, whoever's luck it is (`python/autokernel/noise.py`). Lower precision stays
//! thousands of times above it.
//!
//! The tensors stay on disk where the oracle wrote them; here is only what is computed once for each
//! set and output. Where the truth itself is no finite number of the output's type (overflow, masked
//! rows), the baseline says what should stand there.
//!
//! Sets of special values (NaN, infinities, the largest and the smallest numbers) are checked like all
//! others and never timed. In them an element counts only where truth and baseline agree: where PyTorch
//! itself overflows on the way, there is no right answer that a kernel could be held to.

use std::io;
use std::path::{Path, PathBuf};

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;
use autokernel_core::stats::median;
use serde::{Deserialize, Serialize};

use crate::source::{Kind, Logical, Tensor, decode, overflow, tiny};

/// Elements handled at once: at most 512 KiB a tensor.
pub(crate) const CHUNK: u64 = 64 * 1024;

/// Rows shorter than this are taken together, so that one lucky element of the baseline does not
/// become the scale of its own row.
const SHORTEST_ROW: u64 = 32;

/// Outputs of at most this many elements are too small for a root mean square of one set to mean much.
pub const TINY_OUTPUT: u64 = 500;

/// A set of random inputs is left out where noise reaches this share of an output's size: there one
/// honest kernel may give a number where another divides zero by zero.
const ALL_NOISE: f64 = 1.0 / 16.0;

/// Floors of the scale where the truth was computed in the model's own types, in roundings of its
/// size: it is then rounded itself in every step, and no fp64 run says how far that took it.
/// With noise measured (the same model on inputs and weights one step away) the floor is that of a
/// few roundings; without, that of a long chain of them.
const OWN_FLOOR: f64 = 4.0;
const OWN_FLOOR_UNMEASURED: f64 = 64.0;

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
    /// How far each element of the truth moves under roundings, root mean square over some runs, in
    /// f64; empty where that was not measured.
    #[serde(default)]
    pub noise: Vec<TensorFile>,
    /// Whether nothing could be widened, so that the truth is the baseline's own outputs.
    #[serde(default)]
    pub own_types: bool,
}

/// A set that is not used, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unfit {
    /// How its inputs were made.
    pub family: String,
    /// Why nothing can be judged on it.
    pub reason: String,
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
    #[error("output {output} of set {set}: truth, baseline and noise have unequal shapes")]
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
    /// Root mean square of the noise; zero where it was not measured.
    pub(crate) noise: f64,
    /// What the candidate's root mean square error is divided by: the larger of `error` and `noise`
    /// with its floors.
    pub(crate) yardstick: f64,
    /// Elements of a row (short rows taken together).
    pub(crate) row: u64,
    /// The larger root mean square of baseline minus truth and of noise in each row.
    pub(crate) row_error: Vec<f64>,
    /// Whether elements must be looked at one by one: truth or baseline has some that are not finite in the
    /// output's type, or not all count.
    pub(crate) special: bool,
    /// Whether elements count only where truth and baseline agree.
    pub(crate) only_where_agreed: bool,
    /// Whether a result that is no number says nothing: the inputs are so large that the order of two products
    /// decides what overflows.
    pub(crate) may_overflow: bool,
}

impl Scale {
    /// What honest arithmetic is off by.
    pub(crate) fn honest(&self) -> f64 {
        self.error.max(self.noise)
    }
}

/// Whether the baseline is the truth of that element: of the same kind and, where finite, within `limit`
/// roundings and what no type can tell from zero.
pub(crate) fn agreed(truth: f64, baseline: f64, unit: f64, overflow: f64, limit: f64) -> bool {
    let kinds = (Kind::of(truth, overflow), Kind::of(baseline, overflow));
    kinds.0 == kinds.1
        && (kinds.0 != Kind::Finite
            || (baseline - truth).abs() <= limit * (unit * truth.abs() + f64::from(f32::MIN_POSITIVE)))
}

/// One output of one set.
#[derive(Clone, Debug)]
pub(crate) struct OutputTruth {
    pub(crate) truth: TensorFile,
    pub(crate) baseline: TensorFile,
    /// Noise of each element, where it was measured.
    pub(crate) noise: Option<TensorFile>,
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
    /// Those of special values last.
    sets: Vec<TruthSet>,
    /// How many are not of special values.
    timed: usize,
    unfit: Vec<Unfit>,
    own_types: bool,
}

impl Truth {
    /// Reads every truth, baseline and noise once. Sets of random inputs on which nothing can be judged
    /// are left out; [`Self::unfit`] says which. Recorded inputs and draws of a whole model stay.
    pub fn prepare(contract: Contract, raw: Vec<RawSet>) -> Result<Self, TruthError> {
        if raw.is_empty() {
            return Err(TruthError::Empty);
        }
        let mut sets = Vec::with_capacity(raw.len());
        let (mut unfit, mut own_types) = (vec![], false);
        for (index, set) in raw.into_iter().enumerate() {
            own_types |= set.own_types;
            let random =
                !set.inputs.is_empty() && !set.family.starts_with("captured") && !special(&set.family);
            let set = prepare_set(&contract, index, set)?;
            match set.all_noise().filter(|_| random) {
                Some(reason) => unfit.push(Unfit { family: set.family, reason }),
                None => sets.push(set),
            }
        }
        sets.sort_by_key(TruthSet::special);
        let timed = sets.iter().filter(|set| !set.special()).count();
        if timed == 0 {
            return Err(TruthError::Empty);
        }
        let mut truth = Self { contract, sets, timed, unfit, own_types };
        for output in 0..truth.contract.limits.len() {
            truth.set_yardsticks(output);
        }
        Ok(truth)
    }

    /// The contract that outputs are held against.
    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// The sets that may be timed, in the oracle's order.
    pub fn sets(&self) -> &[TruthSet] {
        &self.sets[..self.timed]
    }

    /// All sets that are checked: behind [`Self::sets`] those of special values. Denormals and NaN cost time
    /// that no model spends.
    pub fn all(&self) -> &[TruthSet] {
        &self.sets
    }

    /// Sets that were left out.
    pub fn unfit(&self) -> &[Unfit] {
        &self.unfit
    }

    /// Whether the truth is the baseline's own outputs, which says less than one in fp64.
    pub fn own_types(&self) -> bool {
        self.own_types
    }

    /// Outputs in which no set has enough signal over honest errors to tell right from
    /// wrong: a task with one of these is unfit.
    pub fn weak_outputs(&self) -> Vec<usize> {
        let strong = |output: &OutputTruth| {
            output.scale.as_ref().is_none_or(|s| {
                let signal = if output.meta.numel() == 1 { s.rms } else { s.std };
                signal > 0.0 && signal >= 30.0 * s.honest()
            })
        };
        (0..self.contract.limits.len())
            .filter(|i| !self.sets().iter().any(|set| strong(&set.outputs[*i])))
            .collect()
    }

    /// What ratios are measured in. A tiny output of one set may happen to be nearly exact in the
    /// baseline; there the typical relative error over all sets counts instead.
    fn set_yardsticks(&mut self, output: usize) {
        let own_types = self.own_types;
        let scales = |sets: &mut Vec<TruthSet>| -> Vec<f64> {
            sets.iter()
                .filter(|set| !set.special())
                .filter_map(|set| set.outputs[output].scale.as_ref())
                .filter(|s| s.rms > 0.0)
                .map(|s| s.honest() / s.rms)
                .collect()
        };
        let typical = median(&scales(&mut self.sets)).unwrap_or(0.0);
        for set in &mut self.sets {
            let OutputTruth { meta, scale, .. } = &mut set.outputs[output];
            let (Some(scale), Some(unit)) = (scale, meta.dtype.unit_roundoff()) else { continue };
            let pooled = if meta.numel() <= TINY_OUTPUT { typical * scale.rms } else { 0.0 };
            let roundings = match (own_types, scale.noise > 0.0) {
                (false, _) => 0.4,
                (true, true) => OWN_FLOOR,
                (true, false) => OWN_FLOOR_UNMEASURED,
            };
            let floor = roundings * unit * scale.rms;
            scale.yardstick = scale.honest().max(floor).max(pooled) + tiny(meta.dtype);
            // A row of the truth in own types is as exact as its largest rounding on the way.
            let row_floor = if own_types { pooled.max(floor) } else { pooled };
            if row_floor > 0.0 {
                scale.row_error.iter_mut().for_each(|error| *error = error.max(row_floor));
            }
        }
    }
}

/// The family of the largest numbers of each type.
const LARGE: &str = "special_large";

/// Whether a family is made of special values.
fn special(family: &str) -> bool {
    family.starts_with("special")
}

impl TruthSet {
    /// Whether it holds special values.
    fn special(&self) -> bool {
        special(&self.family)
    }

    /// Why nothing can be judged here, where that is so.
    fn all_noise(&self) -> Option<String> {
        self.outputs.iter().enumerate().find_map(|(i, output)| {
            let scale = output.scale.as_ref().filter(|s| s.noise > ALL_NOISE * s.rms)?;
            Some(format!(
                "roundings move output {i} by {:.1e} where it is {:.1e} in all, so that it is all noise",
                scale.noise, scale.rms
            ))
        })
    }
}

fn prepare_set(contract: &Contract, index: usize, set: RawSet) -> Result<TruthSet, TruthError> {
    let expected = contract.limits.len();
    let noises = if set.noise.is_empty() { expected } else { set.noise.len() };
    for (what, got) in [("truths", set.truth.len()), ("baselines", set.baseline.len()), ("noises", noises)] {
        if got != expected {
            return Err(TruthError::Count { set: index, family: set.family, what, got, expected });
        }
    }
    let mut outputs = Vec::with_capacity(expected);
    for (i, (truth, baseline)) in set.truth.into_iter().zip(set.baseline).enumerate() {
        let noise = set.noise.get(i);
        if truth.shape != baseline.shape || noise.is_some_and(|noise| noise.shape != truth.shape) {
            return Err(TruthError::Shape { set: index, output: i });
        }
        let meta = TensorMeta::contiguous(baseline.dtype, &baseline.shape);
        let limits = contract.limits[i].as_ref().filter(|_| meta.dtype.is_float());
        let agreement = |limits: &Limits| special(&set.family).then_some(limits.element);
        let scale = match limits {
            Some(limits) => Some(Scale {
                may_overflow: set.family == LARGE,
                ..measure(&truth, &baseline, noise, &meta, agreement(limits))?
            }),
            None => None,
        };
        outputs.push(OutputTruth { truth, baseline, noise: noise.cloned(), meta, scale });
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

fn measure(
    truth: &TensorFile,
    baseline: &TensorFile,
    noise: Option<&TensorFile>,
    meta: &TensorMeta,
    agreement: Option<f64>,
) -> Result<Scale, TruthError> {
    let mut scale = open(truth, |t| {
        open(baseline, |b| measure_opened((&t, truth.dtype), (&b, baseline.dtype), meta, agreement))
    })?;
    if let Some(noise) = noise {
        open(noise, |opened| add_noise(&mut scale, (&opened, noise.dtype), meta.numel()))?;
    }
    Ok(scale)
}

/// A sum of squares and how many they are.
#[derive(Clone, Copy, Default)]
struct Squares {
    sum: f64,
    count: u64,
}

impl Squares {
    fn add(&mut self, value: f64) {
        self.sum += value * value;
        self.count += 1;
    }

    fn rms(self) -> f64 {
        if self.count > 0 { (self.sum / self.count as f64).sqrt() } else { 0.0 }
    }

    fn all(rows: &[Self]) -> Self {
        rows.iter()
            .fold(Self::default(), |all, row| Self { sum: all.sum + row.sum, count: all.count + row.count })
    }
}

fn measure_opened(
    t: (&Opened<'_>, Dtype),
    b: (&Opened<'_>, Dtype),
    meta: &TensorMeta,
    agreement: Option<f64>,
) -> Result<Scale, TruthError> {
    let unit = meta.dtype.unit_roundoff().unwrap_or(0.0);
    let counts = |r, b, limit| agreement.is_none_or(|within| agreed(r, b, unit, limit, within));
    let (numel, row, limit) = (meta.numel(), row_length(&meta.shape), overflow(meta.dtype));
    let (mut bytes, mut r, mut v, mut finite) = (vec![], vec![], vec![], vec![]);
    let mut rows = vec![Squares::default(); numel.div_ceil(row) as usize];
    let (mut moments, mut size, mut special) = (Moments::default(), Squares::default(), agreement.is_some());
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
            if r.abs() < limit && b.abs() < limit && counts(*r, *b, limit) {
                finite.push(*r);
                size.add(*r);
                rows[((start + i as u64) / row) as usize].add(b - r);
            } else {
                special = true;
            }
        }
        moments.add(&finite);
        start += count as u64;
    }
    Ok(Scale {
        rms: size.rms(),
        std: moments.std(),
        error: Squares::all(&rows).rms(),
        noise: 0.0,
        yardstick: 0.0,
        row,
        row_error: rows.into_iter().map(Squares::rms).collect(),
        special,
        only_where_agreed: agreement.is_some(),
        may_overflow: false,
    })
}

/// Raises each row's scale to its noise. Where the truth is not finite, noise isn't either, and counts for
/// nothing.
fn add_noise(scale: &mut Scale, noise: (&Opened<'_>, Dtype), numel: u64) -> Result<(), TruthError> {
    let (mut bytes, mut values, mut start) = (vec![], vec![], 0);
    let mut rows = vec![Squares::default(); scale.row_error.len()];
    while start < numel {
        let count = CHUNK.min(numel - start) as usize;
        noise.0.read(start, count, &mut bytes)?;
        decode(noise.1, &bytes, &mut values);
        for (i, value) in values.iter().enumerate().filter(|(_, value)| value.is_finite()) {
            rows[((start + i as u64) / scale.row) as usize].add(*value);
        }
        start += count as u64;
    }
    scale.noise = Squares::all(&rows).rms();
    for (error, noise) in scale.row_error.iter_mut().zip(rows) {
        *error = error.max(noise.rms());
    }
    Ok(())
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
