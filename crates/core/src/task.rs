//! A task: what an agent is given. Region, contract, baselines, reach.

use serde::{Deserialize, Serialize};

use crate::contract::{Contract, Limits};
use crate::region::{Occurrence, Region};
use crate::work::{longest_reduction, product_flops};

/// The schema string of [`Task`].
pub const TASK_SCHEMA: &str = "autokernel.task/1";

/// The measured copy rate of the machine at one footprint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRate {
    /// Bytes read plus bytes written by one pass.
    pub footprint: u64,
    /// Those bytes over the time of one pass, in bytes a microsecond (= MB/s).
    pub bytes_per_us: f64,
}

/// Cost of calling a packaged kernel from Python, in microseconds: argument handling and output
/// allocation, measured on a 2-core x86-64 machine with torch 2.15.
pub const CALL_COST_US: f64 = 3.0;

/// Part of the machine's multiplication rate that good matrix products get: the rest goes into packing,
/// edges, and the first touch of each operand.
const PRODUCT_REACH: f64 = 0.9;

/// How fast a machine moves and multiplies, as measured.
#[derive(Clone, Copy, Debug)]
pub struct Rates<'a> {
    /// Copy rates, smallest footprint first.
    pub copy: &'a [CopyRate],
    /// Additions and multiplications of f32 a microsecond, all cores together (= MFLOP/s).
    pub flops_per_us: f64,
}

/// The time that good code gets: every byte once at the copy rate of that footprint, or its products at
/// nine tenths of the rate of multiplication where that takes longer, plus the call.
/// For ranking and for what can be won; never for a claim.
pub fn reach_us(bytes: u64, flops: u64, rates: Rates<'_>) -> f64 {
    let rate = rates
        .copy
        .iter()
        .min_by(|a, b| a.footprint.abs_diff(bytes).cmp(&b.footprint.abs_diff(bytes)))
        .map_or(10_000.0, |rate| rate.bytes_per_us);
    let multiplied =
        if rates.flops_per_us > 0.0 { flops as f64 / (rates.flops_per_us * PRODUCT_REACH) } else { 0.0 };
    multiplied.max(bytes as f64 / rate) + CALL_COST_US
}

/// A region with everything that an agent needs to work on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// `autokernel.task/1`.
    pub schema: String,
    /// The work.
    pub region: Region,
    /// Where it stands in the model.
    pub occurrences: Vec<Occurrence>,
    /// What "the same function" means.
    pub contract: Contract,
    /// Microseconds that PyTorch's own operators take for one occurrence, from the profile.
    pub eager_us: f64,
    /// Share of the model's eager time that all occurrences take together, 0 to 1.
    pub share: f64,
    /// What good code would take, in microseconds; see [`reach_us`].
    pub reach_us: f64,
}

impl Task {
    /// A task from a region, the profile of one occurrence, the model's time, and the machine's rates.
    pub fn new(
        region: Region,
        occurrences: Vec<Occurrence>,
        eager_us: f64,
        model_us: f64,
        rates: Rates<'_>,
    ) -> Self {
        let contract = Contract::for_region(&region);
        let reach_us = reach_us(region.bytes(), product_flops(&region), rates);
        let share = eager_us * occurrences.len() as f64 / model_us.max(1e-9);
        Self { schema: TASK_SCHEMA.to_owned(), region, occurrences, contract, eager_us, share, reach_us }
    }

    /// Share of the model's time that good code would save.
    pub fn winnable_share(&self) -> f64 {
        self.share * (1.0 - self.reach_us / self.eager_us.max(1e-9)).max(0.0)
    }
}

/// How much faster the model would be if every region took its reach: `1 / (1 - Σ share (1 - reach/baseline))`.
pub fn winnable<'a>(tasks: impl IntoIterator<Item = &'a Task>) -> f64 {
    let saved: f64 = tasks.into_iter().map(Task::winnable_share).sum();
    1.0 / (1.0 - saved.clamp(0.0, 0.99))
}

impl Contract {
    /// The contract that every region starts with: limits by output dtype, equal bits for equal inputs.
    pub fn for_region(region: &Region) -> Self {
        let reduced = longest_reduction(region);
        let limits =
            region.output_metas().iter().map(|meta| Limits::for_dtype(meta.dtype, reduced)).collect();
        Self { limits, deterministic: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::graph::{Arg, TensorMeta, Value};
    use crate::region::{Operand, REGION_SCHEMA, RegionId, RegionInput, RegionNode};

    fn row_mean() -> Region {
        let meta = TensorMeta::contiguous(Dtype::F32, &[64, 1024]);
        Region {
            schema: REGION_SCHEMA.to_owned(),
            id: RegionId("0".into()),
            inputs: vec![RegionInput { meta, constant: false }],
            nodes: vec![RegionNode {
                op: "aten.mean.dim".into(),
                args: vec![Arg::Ref(Operand::Input(0)), Arg::List(vec![Arg::Int(-1)]), Arg::Bool(true)],
                kwargs: vec![],
                value: Value::Tensor(TensorMeta::contiguous(Dtype::F32, &[64, 1])),
            }],
            outputs: vec![0],
        }
    }

    #[test]
    fn winnable_is_one_when_nothing_can_be_saved_and_grows_with_share() {
        let copy = [CopyRate { footprint: 1 << 20, bytes_per_us: 10_000.0 }];
        let rates = Rates { copy: &copy, flops_per_us: 100_000.0 };
        let task = |eager: f64| {
            Task::new(
                row_mean(),
                vec![Occurrence { graph: 0, nodes: vec![], inputs: vec![] }],
                eager,
                1000.0,
                rates,
            )
        };
        assert!((winnable(&[task(1.0)]) - 1.0).abs() < 1e-12, "reach above the baseline saves nothing");
        let (some, more) = (winnable(&[task(100.0)]), winnable(&[task(400.0)]));
        assert!(1.0 < some && some < more && more < 1.0 / (1.0 - 0.4) + 1e-9);
    }

    #[test]
    fn the_slower_of_moving_and_multiplying_bounds_the_reach() {
        let copy = [CopyRate { footprint: 1 << 20, bytes_per_us: 10_000.0 }];
        let rates = Rates { copy: &copy, flops_per_us: 100_000.0 };
        let reach = |bytes, flops| reach_us(bytes, flops, rates) - CALL_COST_US;
        assert!((reach(1_000_000, 0) - 100.0).abs() < 1e-9);
        assert!((reach(1_000_000, 9_000_000) - 100.0).abs() < 1e-9, "multiplied while it moves");
        assert!((reach(1_000_000, 90_000_000) - 1000.0).abs() < 1e-9);
    }
}
