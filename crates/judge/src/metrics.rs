//! Three metrics of a candidate's output against the truth, computed in one pass over both.
//!
//! * ratio: `rms(c - r) <= rho * max(rms(b - r), 0.4 u rms(r), rms(s))`; for tiny outputs over all sets
//!   together;
//! * element: `|c - r| <= E * (u |r| + max(rowrms(b - r), rowrms(s), s))`, for every element, without a
//!   quota;
//! * centred: `rms(c - r) <= cap * std(r)`, where honest errors stay well below the cap.
//!
//! `s` is the noise: how far roundings move the truth, whatever the baseline's luck was. An element counts
//! its own, too: a row whose scale is off by some roundings is off most in its largest element, and the
//! root mean square over a long row says little of that.
//!
//! Where the truth is not finite the candidate must agree with the truth or the baseline, sign
//! included. Exact outputs must have the baseline's bits.

use autokernel_core::contract::Limits;
use serde::{Deserialize, Serialize};

use crate::fault::{Fault, Metric, Place, capped};
use crate::source::{Kind, Logical, Tensor, decode, overflow, tiny};
use crate::truth::{CHUNK, OutputTruth, Scale, TINY_OUTPUT, TensorFile, Truth, TruthError, agreed, open};

/// The cap on the centred error applies where an honest one is at most this share of it.
const WELL_CONDITIONED: f64 = 0.25;

/// Tiny outputs are judged by ratio once so many sets stand behind it.
const POOLED_SETS: u64 = 4;

/// Hash of an output's elements in logical order.
pub type Digest = [u8; 32];

/// The worst metrics of one output, over the sets compared so far. All zero for exact outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Worst ratio of root mean square errors.
    #[serde(with = "crate::evidence::finite_or_null")]
    pub ratio: f64,
    /// Worst element score.
    #[serde(with = "crate::evidence::finite_or_null")]
    pub element: f64,
    /// Worst centred error, over well-conditioned sets.
    #[serde(with = "crate::evidence::finite_or_null")]
    pub centred: f64,
}

impl Metrics {
    /// The worse of both, metric by metric.
    #[must_use]
    pub fn worst(self, other: Self) -> Self {
        Self {
            ratio: self.ratio.max(other.ratio),
            element: self.element.max(other.element),
            centred: self.centred.max(other.centred),
        }
    }

    /// Whether every metric is within its limit.
    pub fn within(&self, limits: &Limits) -> bool {
        self.ratio <= limits.ratio && self.element <= limits.element && self.centred <= limits.centred
    }
}

/// What one comparison gave.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The metrics; up to the first fault, when there is one.
    pub metrics: Metrics,
    /// The first failed test.
    pub fault: Option<Fault>,
    /// Hash of the output; of its beginning, when there is a fault.
    pub digest: Digest,
}

/// Compares outputs with the truth and keeps the worst metrics of each output.
#[derive(Debug)]
pub struct Comparer<'a> {
    truth: &'a Truth,
    worst: Vec<Metrics>,
    /// For each tiny output: sum of squared ratios, number of sets.
    pools: Vec<(f64, u64)>,
}

impl<'a> Comparer<'a> {
    /// A comparer that has seen nothing yet.
    pub fn new(truth: &'a Truth) -> Self {
        let outputs = truth.contract().limits.len();
        Self { truth, worst: vec![Metrics::default(); outputs], pools: vec![(0.0, 0); outputs] }
    }

    /// The worst metrics of each output so far.
    pub fn worst(&self) -> &[Metrics] {
        &self.worst
    }

    /// The truth that is compared against.
    pub fn truth(&self) -> &'a Truth {
        self.truth
    }

    /// Compares one output of one set.
    pub fn compare(
        &mut self,
        set: usize,
        output: usize,
        candidate: Tensor<'_>,
    ) -> Result<Comparison, TruthError> {
        let truth_set = &self.truth.all()[set];
        let truth = &truth_set.outputs[output];
        let place = Subject { output, family: &truth_set.family, truth };
        if candidate.meta.dtype != truth.meta.dtype || candidate.meta.shape != truth.meta.shape {
            let fault = place.fault(Metric::Shape, 1.0, 0.0, None);
            return Ok(Comparison { metrics: Metrics::default(), fault: Some(fault), digest: [0; 32] });
        }
        let (Some(limits), Some(scale)) = (self.truth.contract().limits[output], &truth.scale) else {
            return compare_bits(&place, candidate);
        };
        let mut comparison = compare_numbers(&place, candidate, &limits, scale)?;
        if comparison.fault.is_none() {
            comparison.fault = self.pool(&place, &limits, &mut comparison.metrics);
        }
        self.worst[output] = self.worst[output].worst(comparison.metrics);
        Ok(comparison)
    }

    /// Replaces the ratio of a tiny output by that over all sets so far.
    fn pool(&mut self, subject: &Subject<'_>, limits: &Limits, metrics: &mut Metrics) -> Option<Fault> {
        if subject.truth.meta.numel() <= TINY_OUTPUT {
            let pool = &mut self.pools[subject.output];
            pool.0 += metrics.ratio.powi(2);
            pool.1 += 1;
            metrics.ratio = if pool.1 >= POOLED_SETS { (pool.0 / pool.1 as f64).sqrt() } else { 0.0 };
        }
        // Written so that a NaN fails.
        let fails = |value: f64, limit: f64| value.is_nan() || value > limit;
        if fails(metrics.ratio, limits.ratio) {
            Some(subject.fault(Metric::Ratio, metrics.ratio, limits.ratio, None))
        } else if fails(metrics.centred, limits.centred) {
            Some(subject.fault(Metric::Centred, metrics.centred, limits.centred, None))
        } else {
            None
        }
    }
}

/// Hash of an output, for comparisons with one that was verified in full.
pub fn digest(candidate: Tensor<'_>) -> Result<Digest, TruthError> {
    let logical = Logical::new(candidate).map_err(TruthError::Candidate)?;
    let (numel, mut start) = (candidate.meta.numel(), 0);
    let (mut hasher, mut bytes) = (blake3::Hasher::new(), vec![]);
    while start < numel {
        let count = CHUNK.min(numel - start);
        logical.read(start, count as usize, &mut bytes).map_err(TruthError::Candidate)?;
        hasher.update(&bytes);
        start += count;
    }
    Ok(*hasher.finalize().as_bytes())
}

/// How far an fp64 form of a function is from the truth, in the units of [`Metrics`]; infinite where
/// one of both is no number. `None` for exact outputs, which have no fp64 form.
pub(crate) fn displacement(output: &OutputTruth, form: &TensorFile) -> Result<Option<Metrics>, TruthError> {
    let Some(scale) = &output.scale else { return Ok(None) };
    let rule = Rule {
        unit: output.meta.dtype.unit_roundoff().unwrap_or(0.0),
        tiny: tiny(output.meta.dtype),
        overflow: overflow(output.meta.dtype),
        element: f64::INFINITY,
        scale,
    };
    let (mut sums, mut chunk, mut bytes) = (Sums::default(), Chunk::default(), vec![]);
    let (numel, mut start) = (output.meta.numel(), 0);
    open(&output.truth, |truths| {
        open(form, |forms| {
            open(output.noise.as_ref().unwrap_or(&output.truth), |noises| {
                while start < numel {
                    let count = CHUNK.min(numel - start) as usize;
                    truths.read(start, count, &mut bytes)?;
                    decode(output.truth.dtype, &bytes, &mut chunk.r);
                    forms.read(start, count, &mut bytes)?;
                    decode(form.dtype, &bytes, &mut chunk.c);
                    chunk.s.clear();
                    match &output.noise {
                        Some(noise) => {
                            noises.read(start, count, &mut bytes)?;
                            decode(noise.dtype, &bytes, &mut chunk.s);
                        }
                        None => chunk.s.resize(count, 0.0),
                    }
                    rule.chunk(start, &chunk, &mut sums);
                    start += count as u64;
                }
                Ok(())
            })
        })
    })?;
    if sums.bad > 0 {
        return Ok(Some(Metrics { ratio: f64::INFINITY, element: f64::INFINITY, centred: 0.0 }));
    }
    let rms = if sums.count > 0 { (sums.square / sums.count as f64).sqrt() } else { 0.0 };
    Ok(Some(Metrics { ratio: rms / scale.yardstick, element: sums.worst, centred: 0.0 }))
}

/// What is compared, for messages.
struct Subject<'a> {
    output: usize,
    family: &'a str,
    truth: &'a OutputTruth,
}

impl Subject<'_> {
    fn fault(&self, metric: Metric, value: f64, limit: f64, bad: Option<&Bad>) -> Fault {
        Fault {
            output: self.output,
            family: self.family.to_owned(),
            metric,
            value: capped(value),
            limit,
            place: bad.map(|bad| Place::of(bad.first, &self.truth.meta.shape)),
            share: bad.map(|bad| bad.count as f64 / bad.of.max(1) as f64),
        }
    }
}

/// Elements that failed on their own.
#[derive(Clone, Copy)]
struct Bad {
    first: u64,
    count: u64,
    of: u64,
}

fn compare_bits(subject: &Subject<'_>, candidate: Tensor<'_>) -> Result<Comparison, TruthError> {
    let logical = Logical::new(candidate).map_err(TruthError::Candidate)?;
    let (numel, size) = (candidate.meta.numel(), candidate.meta.dtype.size() as usize);
    let (mut hasher, mut ours, mut theirs) = (blake3::Hasher::new(), vec![], vec![]);
    let mut fault = None;
    open(&subject.truth.baseline, |baseline| {
        let mut start = 0;
        while start < numel && fault.is_none() {
            let count = CHUNK.min(numel - start);
            logical.read(start, count as usize, &mut ours).map_err(TruthError::Candidate)?;
            baseline.read(start, count as usize, &mut theirs)?;
            hasher.update(&ours);
            if ours != theirs {
                let unequal = |(_, (a, b)): &(usize, (&[u8], &[u8]))| a != b;
                let pairs = || ours.chunks(size).zip(theirs.chunks(size)).enumerate().filter(unequal);
                let first = pairs().next().map_or(0, |(i, _)| i as u64) + start;
                let bad = Bad { first, count: pairs().count() as u64, of: count };
                fault = Some(subject.fault(Metric::Bits, 1.0, 0.0, Some(&bad)));
            }
            start += count;
        }
        Ok(())
    })?;
    Ok(Comparison { metrics: Metrics::default(), fault, digest: *hasher.finalize().as_bytes() })
}

/// Sums over one output.
#[derive(Default)]
struct Sums {
    square: f64,
    count: u64,
    worst: f64,
    bad: u64,
    first_bad: Option<u64>,
    /// First element that is not finite where it should be, or the other way round.
    first_mask: Option<u64>,
}

impl Sums {
    fn bad(&self, of: u64) -> Option<(Metric, Bad)> {
        match (self.first_mask, self.first_bad) {
            (Some(first), _) => Some((Metric::NonFinite, Bad { first, count: self.bad, of })),
            (None, Some(first)) => Some((Metric::Element, Bad { first, count: self.bad, of })),
            (None, None) => None,
        }
    }
}

/// What the inner loops need to know about one output.
struct Rule<'a> {
    unit: f64,
    tiny: f64,
    overflow: f64,
    element: f64,
    scale: &'a Scale,
}

/// Elements of truth, baseline (where it matters), noise and candidate from one place on.
#[derive(Default)]
struct Chunk {
    r: Vec<f64>,
    b: Vec<f64>,
    s: Vec<f64>,
    c: Vec<f64>,
}

/// A run of a chunk within one row, and the least scale of its elements.
#[derive(Clone, Copy)]
struct Run<'a> {
    r: &'a [f64],
    /// `None` where it is as finite as the truth.
    b: Option<&'a [f64]>,
    s: &'a [f64],
    c: &'a [f64],
    slack: f64,
}

impl Chunk {
    fn run(&self, part: std::ops::Range<usize>, slack: f64) -> Run<'_> {
        Run {
            r: &self.r[part.clone()],
            b: self.b.get(part.clone()),
            s: &self.s[part.clone()],
            c: &self.c[part],
            slack,
        }
    }
}

/// The larger of both; `slack` where there is no noise because the truth is no number.
fn at_least(slack: f64, noise: f64) -> f64 {
    if noise > slack { noise } else { slack }
}

fn compare_numbers(
    subject: &Subject<'_>,
    candidate: Tensor<'_>,
    limits: &Limits,
    scale: &Scale,
) -> Result<Comparison, TruthError> {
    let OutputTruth { truth, baseline, noise, meta, .. } = subject.truth;
    let rule = Rule {
        unit: meta.dtype.unit_roundoff().unwrap_or(0.0),
        tiny: tiny(meta.dtype),
        overflow: overflow(meta.dtype),
        element: limits.element,
        scale,
    };
    let logical = Logical::new(candidate).map_err(TruthError::Candidate)?;
    let (mut hasher, mut bytes, mut chunk) = (blake3::Hasher::new(), vec![], Chunk::default());
    let (mut sums, numel, mut start) = (Sums::default(), meta.numel(), 0);
    // Noise that was not measured is not read.
    open(truth, |truths| {
        open(baseline, |baselines| {
            open(noise.as_ref().unwrap_or(truth), |noises| {
                while start < numel && sums.bad == 0 {
                    let count = CHUNK.min(numel - start) as usize;
                    truths.read(start, count, &mut bytes)?;
                    decode(truth.dtype, &bytes, &mut chunk.r);
                    if scale.special {
                        baselines.read(start, count, &mut bytes)?;
                        decode(baseline.dtype, &bytes, &mut chunk.b);
                    }
                    if let Some(noise) = noise {
                        noises.read(start, count, &mut bytes)?;
                        decode(noise.dtype, &bytes, &mut chunk.s);
                    } else {
                        chunk.s.resize(count, 0.0);
                    }
                    logical.read(start, count, &mut bytes).map_err(TruthError::Candidate)?;
                    hasher.update(&bytes);
                    decode(meta.dtype, &bytes, &mut chunk.c);
                    rule.chunk(start, &chunk, &mut sums);
                    start += count as u64;
                }
                Ok(())
            })
        })
    })?;
    let rms = if sums.count > 0 { (sums.square / sums.count as f64).sqrt() } else { 0.0 };
    let well = scale.std > 0.0 && scale.honest() <= WELL_CONDITIONED * limits.centred * scale.std;
    let metrics = Metrics {
        ratio: capped(rms / scale.yardstick),
        element: capped(sums.worst),
        centred: if well { capped(rms / scale.std) } else { 0.0 },
    };
    let fault = sums.bad(start).map(|(metric, bad)| {
        let limit = if metric == Metric::Element { limits.element } else { 0.0 };
        subject.fault(metric, sums.worst, limit, Some(&bad))
    });
    Ok(Comparison { metrics, fault, digest: *hasher.finalize().as_bytes() })
}

impl Rule<'_> {
    /// Adds elements `start..` to the sums, row by row.
    fn chunk(&self, start: u64, chunk: &Chunk, sums: &mut Sums) {
        let (count, mut from) = (chunk.r.len(), 0);
        while from < count {
            let at = start + from as u64;
            let row = at / self.scale.row;
            let to = count.min(from + ((row + 1) * self.scale.row - at) as usize);
            let run = chunk.run(from..to, self.scale.row_error[row as usize] + self.tiny);
            let (square, worst) = self.finite_run(run);
            // NaN and infinity in either operand make the sum of squares so, too.
            if square.is_finite() && worst <= self.element && !self.scale.special {
                sums.square += square;
                sums.count += (to - from) as u64;
                sums.worst = sums.worst.max(worst);
            } else {
                self.careful_run(at, run, sums);
            }
            from = to;
        }
    }

    /// Sum of squared errors and worst score of a run: no branch, so it vectorises.
    fn finite_run(&self, run: Run<'_>) -> (f64, f64) {
        let (mut square, mut worst) = ([0.0_f64; 8], [0.0_f64; 8]);
        let (r, s, c) = (run.r.as_chunks::<8>(), run.s.as_chunks::<8>(), run.c.as_chunks::<8>());
        for ((r, s), c) in r.0.iter().zip(s.0).zip(c.0) {
            for i in 0..8 {
                let error = (c[i] - r[i]).abs();
                square[i] += error * error;
                let score = error / (self.unit * r[i].abs() + at_least(run.slack, s[i]));
                worst[i] = if score > worst[i] { score } else { worst[i] };
            }
        }
        for ((r, s), c) in r.1.iter().zip(s.1).zip(c.1) {
            let error = (c - r).abs();
            square[0] += error * error;
            worst[0] = worst[0].max(error / (self.unit * r.abs() + at_least(run.slack, *s)));
        }
        (square.iter().sum(), worst.iter().fold(0.0, |a, b| a.max(*b)))
    }

    /// The same element by element, with masks and places.
    fn careful_run(&self, at: u64, run: Run<'_>, sums: &mut Sums) {
        for (i, (r, c)) in run.r.iter().zip(run.c).enumerate() {
            let at = at + i as u64;
            let b = run.b.map_or(*r, |b| b[i]);
            if self.scale.only_where_agreed && !agreed(*r, b, self.unit, self.overflow, self.element) {
                continue;
            }
            if self.scale.may_overflow && Kind::of(*c, self.overflow) != Kind::Finite {
                continue;
            }
            let kinds = [Kind::of(*r, self.overflow), Kind::of(b, self.overflow)];
            let kind = Kind::of(*c, self.overflow);
            let aim = if kinds[0] == Kind::Finite { *r } else { b };
            if kind != Kind::Finite || !kinds.contains(&Kind::Finite) {
                if !kinds.contains(&kind) {
                    sums.bad += 1;
                    sums.first_mask.get_or_insert(at);
                }
                continue;
            }
            let error = (c - aim).abs();
            let score = error / (self.unit * aim.abs() + at_least(run.slack, run.s[i]));
            sums.square += error * error;
            sums.count += 1;
            sums.worst = sums.worst.max(score);
            if score.is_nan() || score > self.element {
                sums.bad += 1;
                sums.first_bad.get_or_insert(at);
            }
        }
    }
}

#[cfg(test)]
mod tests;
