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

/// The two-sided error that the interval of a whole comparison may make, over all its looks.
pub const ALPHA: f64 = 0.05;

/// The share of [`ALPHA`] that a claim of a difference may use up: `faster` and `slower` must also
/// stand in an interval of `1 - 0.1 alpha`. An interval that misses the truth once in twenty is what
/// readers expect of a figure; a judge that errs once in twenty would let one useless candidate
/// through for every twenty that are tried. At the noise of a fit machine it costs no power: 3 % over
/// a spread of 2 % is eight standard errors after 32 pairs, and 3.6 are asked for.
pub const CLAIM: f64 = 0.1;

/// Pairs that a figure needs before it may be reported.
pub const REPORTED_PAIRS: usize = 10;

/// A machine whose pairs spread by more than this is unfit to decide small differences.
pub const UNFIT_NOISE: f64 = 0.02;

/// On a machine that is unfit by its noise a difference counts only from this many times the noise
/// on: such noise is no bell curve (calls snap to multiples of a scheduler's tick), and an interval
/// that believes in one may lie beside the truth.
pub const NOISY_EFFECT: f64 = 2.0;

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
    /// Looks at 6, 10, 16 and 32 pairs. At 6 only what nobody will quote can end it (`same`,
    /// `slower`): a figure that is reported has [`REPORTED_PAIRS`]. The last look is there for
    /// [`Verdict::Same`]: after 16 pairs the interval fits into ±1 % up to a spread of about 1 %,
    /// after 32 up to 1.6 %; a candidate that is clearly faster or slower never gets there.
    pub fn confirm() -> Self {
        Self(vec![
            Look { pairs: 6, alpha: 0.005 },
            Look { pairs: REPORTED_PAIRS, alpha: 0.01 },
            Look { pairs: 16, alpha: 0.015 },
            Look { pairs: 32, alpha: 0.02 },
        ])
    }

    /// [`Self::confirm`] without the last look: for a search, to which `same` is worth no more than
    /// `ambiguous` and a minute of measuring is.
    pub fn search() -> Self {
        Self(vec![
            Look { pairs: 6, alpha: 0.005 },
            Look { pairs: REPORTED_PAIRS, alpha: 0.015 },
            Look { pairs: 16, alpha: 0.03 },
        ])
    }

    /// The looks, in order.
    pub fn looks(&self) -> &[Look] {
        &self.0
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
        /// Why an ambiguous verdict is not another one.
        doubt: Option<Doubt>,
    },
}

/// What keeps an interval from being a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Doubt {
    /// It holds both a difference that counts and none.
    Wide,
    /// It holds a difference, which does not stand at the level of a claim.
    Unsure,
    /// The pairs spread by this much, too much for a difference as small as that.
    Noise(f64),
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
    ///
    /// `family` is the number of candidates that stand in line for one place, the first that is faster
    /// gets it, and no other is tried then. So of Holm's procedure only the first step is ever taken:
    /// each claim is made at its alpha over `family`.
    pub fn decide(&self, schedule: &Schedule, family: usize) -> Decision {
        let mut last = None;
        for look in schedule.looks() {
            let Some((verdict, doubt)) = self.look(look, family) else {
                return Decision::Continue { pairs: look.pairs };
            };
            let quoted = matches!(verdict, Verdict::Faster { .. }) && look.pairs < REPORTED_PAIRS;
            let decided = doubt.is_none() && !quoted;
            last = Some(Decision::Stop { verdict, pairs: look.pairs, doubt });
            if decided {
                break;
            }
        }
        // A schedule has at least one look, so `last` is always there.
        last.unwrap_or(Decision::Continue { pairs: 0 })
    }

    /// What one look says; `None` when its pairs are not there yet.
    fn look(&self, look: &Look, family: usize) -> Option<(Verdict, Option<Doubt>)> {
        let interval = self.interval(look.pairs, look.alpha)?;
        let claim = self.interval(look.pairs, look.alpha * CLAIM / family.max(1) as f64)?;
        let noise = MAD_TO_SIGMA * mad(self.differences.get(..look.pairs)?)?;
        let verdict = Verdict::from_speedup(interval);
        let stands = match verdict {
            Verdict::Faster { .. } => claim.low > 1.0,
            Verdict::Slower { .. } => claim.high < 1.0,
            _ => true,
        };
        let small = interval.value.ln().abs() < NOISY_EFFECT * noise;
        let doubt = match verdict {
            Verdict::Ambiguous { .. } if noise > UNFIT_NOISE => Some(Doubt::Noise(noise)),
            Verdict::Ambiguous { .. } => Some(Doubt::Wide),
            _ if noise > UNFIT_NOISE && small => Some(Doubt::Noise(noise)),
            _ if !stands => Some(Doubt::Unsure),
            _ => None,
        };
        Some(if doubt.is_some() {
            (Verdict::Ambiguous { speedup: interval }, doubt)
        } else {
            (verdict, None)
        })
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
            match samples.decide(&schedule, 1) {
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

    /// How often each verdict is given.
    fn verdicts(seed: u64, count: usize, speedup: f64, sigma: f64) -> [usize; 4] {
        let mut noise = Noise(seed);
        let mut counts = [0; 4];
        for _ in 0..count {
            let verdict = compare(&mut noise, speedup, sigma);
            let at = ["faster", "same", "slower", "ambiguous"].iter().position(|n| *n == verdict.name());
            counts[at.unwrap()] += 1;
        }
        counts
    }

    #[test]
    fn equal_contestants_are_almost_never_told_apart() {
        for sigma in [0.002, 0.01, 0.02, 0.05] {
            let [faster, _, slower, _] = verdicts(7, 1500, 1.0, sigma);
            // 0.5 % in all; one and a half percent of the runs would be far outside of chance.
            assert!(faster + slower <= 15, "{faster} and {slower} of 1500 at sigma {sigma}");
        }
        let [_, same, ..] = verdicts(8, 500, 1.0, 0.002);
        assert!(same >= 400, "{same} of 500 are seen to be the same on a calm machine");
    }

    #[test]
    fn a_planted_effect_is_found() {
        let [faster, ..] = verdicts(11, 500, 1.05, 0.01);
        assert!(faster >= 490, "{faster} of 500 at 5 %");
        let [faster, ..] = verdicts(12, 500, 1.03, 0.01);
        assert!(faster >= 450, "{faster} of 500 at 3 %");
        let [faster, same, slower, _] = verdicts(13, 500, 1.0 / 1.03, 0.01);
        assert_eq!((faster, same), (0, 0), "3 % slower is never good enough");
        assert!(slower >= 450, "{slower} of 500 at 3 % slower");
        let [.., slower, _] = verdicts(14, 500, 1.0 / 1.1, 0.015);
        assert_eq!(slower, 500, "10 % slower");
    }

    #[test]
    fn quantiles_match_tables() {
        for (p, freedom, expected) in
            [(0.995, 5.0, 4.0321), (0.9925, 9.0, 2.9982), (0.9875, 15.0, 2.4899), (0.975, 1.0, 12.7062)]
        {
            let t = student_quantile(p, freedom).unwrap();
            assert!((t - expected).abs() < 2e-4, "t({p}, {freedom}) = {t}");
        }
    }

    fn samples(values: &[f64]) -> PairedSamples {
        let mut samples = PairedSamples::new();
        for value in values {
            assert!(samples.push(&[*value], &[1.0]));
        }
        samples
    }

    #[test]
    fn looks_are_replayed_in_order() {
        let schedule = Schedule::confirm();
        let slower = |count: usize| (0..count).map(|i| 0.8 + 0.001 * i as f64).collect::<Vec<_>>();
        for count in 0..6 {
            let decision = samples(&slower(count)).decide(&schedule, 1);
            assert_eq!(decision, Decision::Continue { pairs: 6 }, "after {count} pairs");
        }
        let early = samples(&slower(6)).decide(&schedule, 1);
        assert!(matches!(early, Decision::Stop { verdict: Verdict::Slower { .. }, pairs: 6, doubt: None }));
        let mut more = slower(6);
        more.push(3.0);
        assert_eq!(samples(&more).decide(&schedule, 1), early, "later pairs do not reopen a decision");
    }

    #[test]
    fn a_figure_that_is_reported_has_enough_pairs() {
        let faster: Vec<f64> = (0..10).map(|i| 1.2 + 0.001 * f64::from(i)).collect();
        let schedule = Schedule::confirm();
        assert_eq!(samples(&faster[..6]).decide(&schedule, 1), Decision::Continue { pairs: 10 });
        assert!(matches!(
            samples(&faster).decide(&schedule, 1),
            Decision::Stop { verdict: Verdict::Faster { .. }, pairs: REPORTED_PAIRS, doubt: None }
        ));
    }

    #[test]
    fn small_differences_are_left_open_where_pairs_spread_too_much() {
        let one_look = Schedule::try_from(vec![Look { pairs: 32, alpha: 0.05 }]).unwrap();
        let spread = |middle: f64, sigma: f64| {
            let mut noise = Noise(3);
            samples(&(0..32).map(|_| middle * (1.0 + sigma * noise.normal())).collect::<Vec<_>>())
        };
        let doubt = |samples: PairedSamples| match samples.decide(&one_look, 1) {
            Decision::Stop { doubt, .. } => doubt,
            other @ Decision::Continue { .. } => panic!("{other:?}"),
        };
        assert!(matches!(doubt(spread(1.06, 0.04)), Some(Doubt::Noise(noise)) if noise > UNFIT_NOISE));
        assert_eq!(doubt(spread(1.06, 0.01)), None);
        assert_eq!(doubt(spread(1.5, 0.04)), None, "a large difference stands");
    }

    #[test]
    fn many_in_line_need_stronger_evidence() {
        let one_look = Schedule::try_from(vec![Look { pairs: 10, alpha: 0.05 }]).unwrap();
        let values: Vec<f64> = (0..10).map(|i| 1.02 + 0.011 * (f64::from(i % 5) - 2.0)).collect();
        let doubt = |family| match samples(&values).decide(&one_look, family) {
            Decision::Stop { doubt, .. } => doubt,
            other @ Decision::Continue { .. } => panic!("{other:?}"),
        };
        assert_eq!(doubt(1), None);
        assert_eq!(doubt(5), Some(Doubt::Unsure));
    }

    #[test]
    fn schedules_are_checked() {
        let schedule = Schedule::confirm();
        let text = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
        assert!(Schedule::try_from(schedule.looks().to_vec()).is_ok(), "it spends no more than it may");
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
    }
}
