//! Statistics of comparisons: what may be said about two sets of times.
//!
//! The unit is a *pair of fresh processes*, one of the baseline and one of the candidate, never a
//! single timing: what differs between processes (layout, page placement, thread placement) is the
//! larger part of the noise, and thousands of timings of one process do not average it away. A
//! process counts with the median of its log times, a pair with the difference, and the interval is
//! Student's t over the differences.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::verdict::{Interval, Verdict};

/// The two-sided error that a whole comparison may make, over all its looks.
pub const ALPHA: f64 = 0.05;

/// Pairs that a figure needs before it may be reported.
pub const REPORTED_PAIRS: usize = 10;

/// A machine whose pairs spread by more than this is unfit to decide small differences.
pub const UNFIT_NOISE: f64 = 0.02;

/// One look at the data: after how many pairs, with how much of [`ALPHA`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Look {
    /// Pairs measured by then.
    pub pairs: usize,
    /// Two-sided alpha spent at this look.
    pub alpha: f64,
}

/// When to look. The spent alphas add up to at most [`ALPHA`], so by Bonferroni's inequality the
/// intervals of all looks hold together with at least 95 %, whatever the dependence between looks;
/// an exact group-sequential boundary would win a few percent of power and need that dependence.
/// The split rises as O'Brien and Fleming's does: an early stop needs the strongest evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Look>", into = "Vec<Look>")]
pub struct Schedule(Vec<Look>);

/// Why a list of looks is no schedule.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ScheduleError {
    #[error("a schedule needs at least one look")]
    Empty,
    #[error("looks must have rising pairs, at least 2, and an alpha above 0")]
    Order,
    #[error("looks spend alpha {0}, more than {ALPHA}")]
    Overspent(f64),
}

impl Schedule {
    /// For a decision that nobody quotes: looks at 6, 10 and 16 pairs.
    pub fn confirm() -> Self {
        Self(vec![
            Look { pairs: 6, alpha: 0.01 },
            Look { pairs: 10, alpha: 0.015 },
            Look { pairs: 16, alpha: 0.025 },
        ])
    }

    /// For a figure that is reported: no look before [`REPORTED_PAIRS`].
    pub fn report() -> Self {
        Self(vec![Look { pairs: REPORTED_PAIRS, alpha: 0.025 }, Look { pairs: 16, alpha: 0.025 }])
    }

    /// The looks, in order.
    pub fn looks(&self) -> &[Look] {
        &self.0
    }

    /// Pairs of the last look.
    pub fn most(&self) -> usize {
        self.0.last().map_or(0, |look| look.pairs)
    }
}

impl TryFrom<Vec<Look>> for Schedule {
    type Error = ScheduleError;

    fn try_from(looks: Vec<Look>) -> Result<Self, ScheduleError> {
        if looks.is_empty() {
            return Err(ScheduleError::Empty);
        }
        let rising = looks.windows(2).all(|w| w[0].pairs < w[1].pairs);
        if !rising || looks.iter().any(|look| look.pairs < 2 || look.alpha.is_nan() || look.alpha <= 0.0) {
            return Err(ScheduleError::Order);
        }
        let spent: f64 = looks.iter().map(|look| look.alpha).sum();
        if spent > ALPHA * (1.0 + 1e-9) {
            return Err(ScheduleError::Overspent(spent));
        }
        Ok(Self(looks))
    }
}

impl From<Schedule> for Vec<Look> {
    fn from(schedule: Schedule) -> Self {
        schedule.0
    }
}

/// What to do after the pairs measured so far.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Measure on, up to this many pairs in all.
    Continue {
        /// Pairs of the next look.
        pairs: usize,
    },
    /// Decided, or out of looks.
    Stop {
        /// The verdict of the look that decided.
        verdict: Verdict,
        /// Pairs that it rests on.
        pairs: usize,
    },
}

/// Differences of log times, one a pair of fresh processes, in the order of measurement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairedSamples {
    differences: Vec<f64>,
}

impl PairedSamples {
    /// No pairs yet.
    pub const fn new() -> Self {
        Self { differences: Vec::new() }
    }

    /// Adds the pair of two processes given the times of each; false when a side has no usable time.
    pub fn push(&mut self, baseline: &[f64], candidate: &[f64]) -> bool {
        let (Some(b), Some(c)) = (log_median(baseline), log_median(candidate)) else { return false };
        self.differences.push(b - c);
        true
    }

    /// `log(baseline) - log(candidate)` of each pair.
    pub fn differences(&self) -> &[f64] {
        &self.differences
    }

    /// The speedup with its `1 - alpha` interval over the first `pairs` pairs; needs two.
    pub fn interval(&self, pairs: usize, alpha: f64) -> Option<Interval> {
        let (mean, error, freedom) = mean_and_error(self.differences.get(..pairs)?)?;
        let half = if error > 0.0 { student_quantile(1.0 - alpha / 2.0, freedom)? * error } else { 0.0 };
        Some(Interval { value: mean.exp(), low: (mean - half).exp(), high: (mean + half).exp() })
    }

    /// Replays the looks in order: the first one that decides gives the verdict, and pairs measured
    /// after it count for nothing, so a verdict can't be fished for by measuring on.
    pub fn decide(&self, schedule: &Schedule) -> Decision {
        let mut last = None;
        for look in schedule.looks() {
            let Some(interval) = self.interval(look.pairs, look.alpha) else {
                return Decision::Continue { pairs: look.pairs };
            };
            let verdict = Verdict::from_speedup(interval);
            let decided = !matches!(verdict, Verdict::Ambiguous { .. });
            last = Some(Decision::Stop { verdict, pairs: look.pairs });
            if decided {
                break;
            }
        }
        // A schedule has at least one look, so `last` is always there.
        last.unwrap_or(Decision::Continue { pairs: 0 })
    }

    /// Two-sided p-value of "no difference", valid for a comparison that was looked at several
    /// times: each look's p-value is scaled by the share of alpha that the look may spend.
    pub fn p_value(&self, schedule: &Schedule) -> f64 {
        let p = |look: &Look| {
            let (mean, error, freedom) = mean_and_error(self.differences.get(..look.pairs)?)?;
            let raw = if error > 0.0 { two_sided_p(mean / error, freedom)? } else { f64::from(mean == 0.0) };
            Some(raw * ALPHA / look.alpha)
        };
        schedule.looks().iter().filter_map(p).fold(1.0, f64::min)
    }

    /// Robust relative spread of the pairs: what the machine adds to a comparison.
    pub fn noise(&self) -> Option<f64> {
        Some(MAD_TO_SIGMA * mad(&self.differences)?)
    }
}

/// Mean, standard error and degrees of freedom; `None` below two values or with a non-finite one.
fn mean_and_error(values: &[f64]) -> Option<(f64, f64, f64)> {
    let n = values.len() as f64;
    if values.len() < 2 || values.iter().any(|v| !v.is_finite()) {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    Some((mean, (variance / n).sqrt(), n - 1.0))
}

fn student_quantile(p: f64, freedom: f64) -> Option<f64> {
    Some(StudentsT::new(0.0, 1.0, freedom).ok()?.inverse_cdf(p))
}

fn two_sided_p(t: f64, freedom: f64) -> Option<f64> {
    Some(2.0 * StudentsT::new(0.0, 1.0, freedom).ok()?.cdf(-t.abs()))
}

/// Holm's adjusted p-values, in the order given: finalist `i` stands at level `alpha` over the whole
/// family when its value is at most `alpha`.
pub fn holm(p_values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|a, b| p_values[*a].total_cmp(&p_values[*b]));
    let mut adjusted = vec![1.0; p_values.len()];
    let mut running = 0.0_f64;
    for (rank, index) in order.into_iter().enumerate() {
        running = running.max(p_values[index] * (p_values.len() - rank) as f64).min(1.0);
        adjusted[index] = running;
    }
    adjusted
}

/// Scales a median absolute deviation to the standard deviation of a normal distribution.
const MAD_TO_SIGMA: f64 = 1.482_602_218_505_602;

/// The median; `None` without values or with a NaN.
pub fn median(values: &[f64]) -> Option<f64> {
    if values.is_empty() || values.iter().any(|v| v.is_nan()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    Some(if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    })
}

/// Median of the absolute deviations from the median.
pub fn mad(values: &[f64]) -> Option<f64> {
    let middle = median(values)?;
    median(&values.iter().map(|v| (v - middle).abs()).collect::<Vec<_>>())
}

/// Robust standard deviation over the median: the noise of one set of times.
pub fn relative_spread(times: &[f64]) -> Option<f64> {
    let middle = median(times).filter(|m| *m > 0.0)?;
    Some(MAD_TO_SIGMA * mad(times)? / middle)
}

/// Geometric mean of times with its 95 % interval: how long one form takes over fresh processes.
pub fn time_interval(times: &[f64]) -> Option<Interval> {
    if times.iter().any(|t| t.is_nan() || *t <= 0.0) {
        return None;
    }
    let logs: Vec<f64> = times.iter().map(|t| t.ln()).collect();
    let (mean, error, freedom) = mean_and_error(&logs)?;
    let half = if error > 0.0 { student_quantile(1.0 - ALPHA / 2.0, freedom)? * error } else { 0.0 };
    Some(Interval { value: mean.exp(), low: (mean - half).exp(), high: (mean + half).exp() })
}

/// Median of the log times; `None` when a time is not above zero.
pub fn log_median(times: &[f64]) -> Option<f64> {
    if times.iter().any(|t| t.is_nan() || *t <= 0.0 || t.is_infinite()) {
        return None;
    }
    median(&times.iter().map(|t| t.ln()).collect::<Vec<_>>())
}

/// The geometric mean; `None` without values or when one is not above zero.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() || values.iter().any(|v| v.is_nan() || *v <= 0.0) {
        return None;
    }
    Some((values.iter().map(|v| v.ln()).sum::<f64>() / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// SplitMix64 with a normal deviate: seeded, so that a failure is repeatable.
    struct Noise(u64);

    impl Noise {
        fn uniform(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
            radius * (std::f64::consts::TAU * self.uniform()).cos()
        }
    }

    /// One comparison: `speedup` planted, each process with its own level, the machine drifting by
    /// 10 % over the comparison, one batch in ten disturbed by up to half.
    fn compare(noise: &mut Noise, speedup: f64, process_sigma: f64) -> Verdict {
        let schedule = Schedule::confirm();
        let mut samples = PairedSamples::new();
        let mut clock = 0.0;
        loop {
            match samples.decide(&schedule) {
                Decision::Stop { verdict, .. } => return verdict,
                Decision::Continue { .. } => {
                    let levels =
                        [noise.normal() * process_sigma, noise.normal() * process_sigma - speedup.ln()];
                    let mut times = [vec![], vec![]];
                    for _ in 0..5 {
                        let first = usize::from(noise.uniform() < 0.5);
                        for side in [first, 1 - first] {
                            let outlier = if noise.uniform() < 0.1 { 0.5 * noise.uniform() } else { 0.0 };
                            clock += 0.1 / 160.0;
                            times[side].push((levels[side] + clock + 0.01 * noise.normal() + outlier).exp());
                        }
                    }
                    assert!(samples.push(&times[0], &times[1]));
                }
            }
        }
    }

    #[test]
    fn equal_contestants_are_seldom_told_apart() {
        let mut noise = Noise(7);
        for sigma in [0.002, 0.01, 0.05] {
            let wrong = (0..1500)
                .filter(|_| {
                    matches!(compare(&mut noise, 1.0, sigma), Verdict::Faster { .. } | Verdict::Slower { .. })
                })
                .count();
            assert!(wrong as f64 / 1500.0 <= ALPHA, "{wrong} of 1500 at sigma {sigma}");
        }
    }

    #[test]
    fn a_planted_effect_is_found() {
        let mut noise = Noise(11);
        let faster =
            (0..500).filter(|_| matches!(compare(&mut noise, 1.05, 0.01), Verdict::Faster { .. })).count();
        assert!(faster >= 490, "{faster} of 500");
        let slower = (0..500)
            .filter(|_| matches!(compare(&mut noise, 1.0 / 1.05, 0.01), Verdict::Slower { .. }))
            .count();
        assert!(slower >= 490, "{slower} of 500");
    }

    #[test]
    fn quantiles_match_tables() {
        for (p, freedom, expected) in
            [(0.995, 5.0, 4.0321), (0.9925, 9.0, 2.9982), (0.9875, 15.0, 2.4899), (0.975, 1.0, 12.7062)]
        {
            let t = student_quantile(p, freedom).unwrap();
            assert!((t - expected).abs() < 2e-4, "t({p}, {freedom}) = {t}");
            assert!((two_sided_p(t, freedom).unwrap() - 2.0 * (1.0 - p)).abs() < 1e-6);
        }
    }

    #[test]
    fn looks_are_replayed_in_order() {
        let mut samples = PairedSamples::new();
        let schedule = Schedule::confirm();
        for i in 0..5 {
            assert_eq!(samples.decide(&schedule), Decision::Continue { pairs: 6 }, "after {i} pairs");
            samples.push(&[1.2 + 0.001 * f64::from(i)], &[1.0]);
        }
        samples.push(&[1.2], &[1.0]);
        let early = samples.decide(&schedule);
        assert!(matches!(early, Decision::Stop { verdict: Verdict::Faster { .. }, pairs: 6 }));
        samples.push(&[0.1], &[1.0]);
        assert_eq!(samples.decide(&schedule), early, "later pairs do not reopen a decision");
        assert_eq!(samples.decide(&Schedule::report()), Decision::Continue { pairs: 10 });
    }

    #[test]
    fn schedules_are_checked() {
        for schedule in [Schedule::confirm(), Schedule::report()] {
            let text = serde_json::to_string(&schedule).unwrap();
            assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
        }
        assert!(Schedule::try_from(vec![]).is_err());
        assert!(Schedule::try_from(vec![Look { pairs: 6, alpha: 0.06 }]).is_err());
        assert!(
            Schedule::try_from(vec![Look { pairs: 6, alpha: 0.01 }, Look { pairs: 6, alpha: 0.01 }]).is_err()
        );
    }

    #[test]
    fn unusable_times_make_no_pair() {
        let mut samples = PairedSamples::new();
        assert!(!samples.push(&[], &[1.0]));
        assert!(!samples.push(&[0.0], &[1.0]));
        assert!(!samples.push(&[f64::NAN], &[1.0]));
        assert!(samples.differences().is_empty());
    }

    #[test]
    fn holm_steps_down() {
        let adjusted = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (got, expected) in adjusted.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((got - expected).abs() < 1e-12, "{adjusted:?}");
        }
    }

    #[test]
    fn summaries() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert_eq!(mad(&[1.0, 2.0, 3.0, 100.0, 2.5]), Some(0.5));
        assert!((geometric_mean(&[2.0, 8.0]).unwrap() - 4.0).abs() < 1e-12);
        let interval = time_interval(&[9.0, 10.0, 11.0, 10.0]).unwrap();
        assert!(interval.low < 9.3 && interval.high > 10.7 && (interval.value - 10.0).abs() < 0.1);
        assert!(relative_spread(&[100.0, 101.0, 99.0, 100.0]).unwrap() < UNFIT_NOISE);
    }

    proptest! {
        #[test]
        fn intervals_hold_their_estimate_and_mirror(values in prop::collection::vec(0.5_f64..2.0, 2..20), alpha in 0.001_f64..0.2) {
            let (mut there, mut back) = (PairedSamples::new(), PairedSamples::new());
            for v in &values {
                there.push(&[*v], &[1.0]);
                back.push(&[1.0], &[*v]);
            }
            let a = there.interval(values.len(), alpha).unwrap();
            let b = back.interval(values.len(), alpha).unwrap();
            prop_assert!(a.low <= a.value && a.value <= a.high);
            prop_assert!((a.value * b.value - 1.0).abs() < 1e-9);
            prop_assert!((a.low * b.high - 1.0).abs() < 1e-6);
            let wider = there.interval(values.len(), alpha / 2.0).unwrap();
            prop_assert!(wider.low <= a.low + 1e-12 && wider.high >= a.high - 1e-12);
        }

        #[test]
        fn the_unit_of_time_does_not_matter(values in prop::collection::vec((1.0_f64..2.0, 1.0_f64..2.0), 16), unit in 1e-6_f64..1e6) {
            let (mut one, mut other) = (PairedSamples::new(), PairedSamples::new());
            for (b, c) in &values {
                one.push(&[*b], &[*c]);
                other.push(&[b * unit], &[c * unit]);
            }
            for (x, y) in one.differences().iter().zip(other.differences()) {
                prop_assert!((x - y).abs() < 1e-9);
            }
        }

        #[test]
        fn holm_keeps_order_and_never_lowers(p in prop::collection::vec(0.0_f64..1.0, 1..12)) {
            let adjusted = holm(&p);
            for i in 0..p.len() {
                prop_assert!(adjusted[i] >= p[i] && adjusted[i] <= 1.0);
                for j in 0..p.len() {
                    prop_assert!(p[i] > p[j] || adjusted[i] <= adjusted[j] + 1e-12);
                }
            }
        }
    }
}
