//! From the profile to ranked tasks: which regions, what share of the time, what can be won.

use std::collections::{BTreeMap, HashMap, HashSet};

use autokernel_core::graph::{Graph, NodeKind};
use autokernel_core::task::{Task, winnable};
use autokernel_search::partition::partition;
use serde::Deserialize;
use serde_json::json;

use crate::error::EngineError;
use crate::report::LeftReport;
use crate::session::{Capture, Oracle, Tools};

/// How often each node is timed for the profile.
const REPEATS: u32 = 15;

/// What the oracle measured.
#[derive(Clone, Debug, Deserialize)]
struct Profile {
    total_us: f64,
    graphs: Vec<GraphProfile>,
}

#[derive(Clone, Debug, Deserialize)]
struct GraphProfile {
    nodes: HashMap<String, f64>,
}

/// The ranked work of a model.
pub(crate) struct Ranked {
    /// Most time to be won first.
    pub(crate) tasks: Vec<Task>,
    /// Median time of the model under eager PyTorch, in microseconds.
    pub(crate) eager_us: f64,
    /// How much faster the model would be if every region took its reach.
    pub(crate) winnable: f64,
    /// What stays as it is, largest share first.
    pub(crate) left: Vec<LeftReport>,
}

/// Profiles the captured graphs and ranks their regions by time that can be won.
pub(crate) fn rank(oracle: &mut Oracle, tools: &Tools, capture: &Capture) -> Result<Ranked, EngineError> {
    let reply = oracle.ask(tools, "profile", json!({ "repeats": REPEATS }))?;
    let profile: Profile = serde_json::from_value(reply)?;
    let time = |graph: usize, node: &String| {
        profile.graphs.get(graph).and_then(|g| g.nodes.get(node)).copied().unwrap_or(0.0)
    };

    let partition = partition(&capture.graphs);
    let mut inside: HashSet<(usize, &String)> = HashSet::new();
    for (_, occurrences) in &partition.regions {
        inside.extend(
            occurrences.iter().flat_map(|found| found.nodes.iter().map(move |node| (found.graph, node))),
        );
    }
    let left = left_alone(&capture.graphs, &inside, &partition.left, &time, profile.total_us);

    let mut tasks: Vec<Task> = partition
        .regions
        .iter()
        .map(|(region, occurrences)| {
            let total: f64 = occurrences
                .iter()
                .map(|found| found.nodes.iter().map(|node| time(found.graph, node)).sum::<f64>())
                .sum();
            let each = total / occurrences.len().max(1) as f64;
            Task::new(region.clone(), occurrences.clone(), each, profile.total_us, tools.device.rates())
        })
        .collect();
    tasks.sort_by(|a, b| {
        b.winnable_share().total_cmp(&a.winnable_share()).then_with(|| a.region.id.cmp(&b.region.id))
    });
    let winnable = winnable(&tasks);
    Ok(Ranked { tasks, eager_us: profile.total_us, winnable, left })
}

/// The calls outside every region, summed by operator.
fn left_alone(
    graphs: &[Graph],
    inside: &HashSet<(usize, &String)>,
    reasons: &[(String, String)],
    time: &impl Fn(usize, &String) -> f64,
    total_us: f64,
) -> Vec<LeftReport> {
    let reasons: HashMap<&str, &str> =
        reasons.iter().map(|(op, reason)| (op.as_str(), reason.as_str())).collect();
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    for (index, graph) in graphs.iter().enumerate() {
        for node in graph
            .nodes
            .iter()
            .filter(|node| node.kind == NodeKind::Call && !inside.contains(&(index, &node.name)))
        {
            *sums.entry(&node.target).or_default() += time(index, &node.name);
        }
    }
    let mut left: Vec<LeftReport> = sums
        .into_iter()
        .map(|(op, us)| LeftReport {
            op: op.to_owned(),
            share: us / total_us.max(1e-9),
            reason: reasons.get(op).copied().unwrap_or("too little to win").to_owned(),
        })
        .collect();
    left.sort_by(|a, b| b.share.total_cmp(&a.share));
    left
}
