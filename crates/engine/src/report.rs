//! The documents that `--format json` prints. Documented in `docs/json.md`; every interval is 95 %,
//! times are in microseconds.

use std::collections::BTreeMap;

use autokernel_core::verdict::Interval;
use autokernel_judge::Controls;
use serde::{Deserialize, Serialize};

/// The machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceReport {
    /// `cpu`.
    pub kind: String,
    /// The processor's name.
    pub name: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Threads that were used.
    pub threads: usize,
    /// Measured copy rates: footprint in bytes to GB/s.
    pub copy_gb_per_s: BTreeMap<String, f64>,
    /// Whether candidates ran confined; `unsandboxed` marks every result made without.
    pub sandbox: String,
}

/// What was used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// This program.
    pub autokernel: String,
    /// The interpreter.
    pub python: String,
    /// PyTorch.
    pub torch: String,
    /// The compiler.
    pub compiler: String,
}

/// Median time of one form with its interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormReport {
    /// `eager`, `compile`, `ours+eager`, `ours+inductor`.
    pub form: String,
    /// Microseconds of one call of the model.
    pub us: Spread,
    /// Whether its outputs stay inside the contract; a form that leaves it is not eligible.
    pub correct: bool,
    /// Why it is not eligible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds to compile it.
    pub compile_s: f64,
}

/// A median with the ends of its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Spread {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// Where the model breaks into several graphs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Break {
    pub reason: String,
    pub file: Option<String>,
    pub line: Option<u64>,
}

/// Ratios of the chosen form.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speedups {
    /// Against the user's model as it is.
    pub vs_eager: Interval,
    /// Against the best form without our kernels; 1 when that form was chosen.
    pub vs_best_plain: Interval,
}

/// The model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct ModelReport {
    pub name: String,
    pub graphs: usize,
    pub breaks: Vec<Break>,
    pub forms: Vec<FormReport>,
    pub chosen: Option<String>,
    pub winnable: f64,
    pub speedup: Option<Speedups>,
}

/// A baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Baseline {
    pub name: String,
    pub us: f64,
}

/// One region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionReport {
    /// Canonical hash.
    pub id: String,
    /// Operators, in order.
    pub ops: Vec<String>,
    /// How often it stands in the model.
    pub count: usize,
    /// Share of the model's eager time, 0 to 1.
    pub share: f64,
    /// The best of what PyTorch offers for it, as called from Python; `profile` gives eager's time.
    pub baseline: Baseline,
    /// What good code would take.
    pub reach_us: f64,
    /// The best kernel, as called from Python.
    pub best_us: Option<f64>,
    /// Baseline over best.
    pub speedup: Option<Interval>,
    /// `faster`, `same`, `slower`, `ambiguous`, `rejected`, `untried`.
    pub verdict: String,
    /// Why, in a sentence.
    pub reason: String,
    /// Row number of the candidate in the store.
    pub candidate: Option<i64>,
    /// How many wrong forms of the region its inputs tell from it; `None` where nothing was judged.
    #[serde(default)]
    pub controls: Option<Controls>,
}

/// How many candidates went how far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CandidateCounts {
    pub built: u64,
    pub screened: u64,
    pub judged: u64,
    pub rejected: BTreeMap<String, u64>,
    pub per_hour: f64,
}

/// Where the time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Seconds {
    pub total: f64,
    pub capture: f64,
    pub first_accepted: Option<f64>,
}

/// What it cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Cost {
    pub tokens: u64,
    pub usd: f64,
}

/// `autokernel.optimize/1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct OptimizeReport {
    pub schema: String,
    pub run: String,
    pub device: DeviceReport,
    pub versions: Versions,
    pub model: ModelReport,
    pub regions: Vec<RegionReport>,
    pub candidates: CandidateCounts,
    pub seconds: Seconds,
    /// `reach`, `budget`, `plateau` or `interrupted`.
    pub stopped: String,
    pub cost: Cost,
    pub package: Option<String>,
}

/// `autokernel.profile/1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct ProfileReport {
    pub schema: String,
    pub device: DeviceReport,
    pub versions: Versions,
    pub model: ModelReport,
    pub eager_us: f64,
    pub regions: Vec<RegionReport>,
    /// Operators outside any region, with their share of the time and why they are left alone.
    pub left: Vec<LeftReport>,
    /// With `--check`: whether the model is the same with every region put back.
    pub put_back: Option<PutBackReport>,
}

/// Regions put back as their own operators, where a package would have its kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct PutBackReport {
    pub regions: usize,
    pub matched: usize,
    /// Regions of which a place was left as it was.
    pub missed: Vec<String>,
    /// Why a graph ran as Dynamo gave it, without replacements.
    pub fallbacks: Vec<String>,
    /// Outputs on two draws of inputs.
    pub same: bool,
    pub max_relative_error: f64,
    /// Gradients of all parameters; null where the model has none.
    pub same_gradients: Option<bool>,
}

impl PutBackReport {
    /// Whether the model came back whole, with every region in every place.
    pub fn holds(&self) -> bool {
        self.same && self.same_gradients != Some(false) && self.missed.is_empty() && self.fallbacks.is_empty()
    }
}

/// An operator that stays as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct LeftReport {
    pub op: String,
    pub share: f64,
    pub reason: String,
}
