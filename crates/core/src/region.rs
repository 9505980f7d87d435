//! A region: a connected part of a graph that one kernel file replaces.
//!
//! A region is self-contained data. Its nodes stand in a canonical order (depth first from the
//! outputs), its inputs are numbered by first use, so two layers with the same work give the same
//! text and the same [`RegionId`]. The same JSON is run by the oracle, widened for the truth,
//! compiled for the baseline, matched by the package, and read by every agent.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::graph::{Arg, Graph, Node, NodeKind, TensorMeta, Value};

/// The schema string of [`Region`].
pub const REGION_SCHEMA: &str = "autokernel.region/1";

/// The first 12 hexadecimal digits of the BLAKE3 hash of the canonical text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RegionId(pub String);

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What an argument of a region's node refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operand {
    /// An input of the region.
    Input(usize),
    /// An earlier node of the region.
    Node(usize),
}

/// An input of a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionInput {
    /// Shape, strides, element type.
    pub meta: TensorMeta,
    /// Whether it is a parameter or buffer in every place that the region stands in.
    pub constant: bool,
}

/// One call inside a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionNode {
    /// `aten.mul.Tensor`, or `getitem`.
    pub op: String,
    /// Positional arguments.
    pub args: Vec<Arg<Operand>>,
    /// Keyword arguments.
    pub kwargs: Vec<(String, Arg<Operand>)>,
    /// What it produces.
    pub value: Value,
}

/// A self-contained piece of work: inputs, calls, outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// `autokernel.region/1`.
    pub schema: String,
    /// Hash of the rest.
    pub id: RegionId,
    /// Inputs, in order of first use.
    pub inputs: Vec<RegionInput>,
    /// Calls, each reading only inputs and earlier calls.
    pub nodes: Vec<RegionNode>,
    /// Indices of the nodes whose results leave the region; each is one tensor.
    pub outputs: Vec<usize>,
}

/// Where a region stands in a graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Occurrence {
    /// Index of the graph.
    pub graph: usize,
    /// For each node of the region, the name of the graph's node.
    pub nodes: Vec<String>,
    /// For each input of the region, the name of the graph's node.
    pub inputs: Vec<String>,
}

/// Why a set of nodes is no region.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RegionError {
    #[error("no node named `{0}` in the graph")]
    Unknown(String),
    #[error("node `{0}` is not a call")]
    NotCall(String),
    #[error("input `{0}` is not a tensor")]
    InputNotTensor(String),
    #[error("output `{0}` is not a tensor")]
    OutputNotTensor(String),
    #[error("nothing that the region computes is used outside it")]
    NoOutput,
    #[error("a path leaves the region and comes back through `{0}`")]
    NotConvex(String),
}

impl Region {
    /// Cuts the region made of the nodes named in `members` out of `graph` (the one with index
    /// `graph_index`), in canonical order. The members must be convex: no path may leave and return.
    pub fn extract(
        graph: &Graph,
        graph_index: usize,
        members: &[String],
    ) -> Result<(Self, Occurrence), RegionError> {
        let by_name: HashMap<&str, &Node> =
            graph.nodes.iter().map(|node| (node.name.as_str(), node)).collect();
        let mut inside = HashMap::new();
        for name in members {
            let node = *by_name.get(name.as_str()).ok_or_else(|| RegionError::Unknown(name.clone()))?;
            if node.kind != NodeKind::Call {
                return Err(RegionError::NotCall(name.clone()));
            }
            inside.insert(name.as_str(), node);
        }
        check_convex(graph, &inside)?;

        // Outputs: members that anything outside reads, in graph order.
        let mut used_outside = std::collections::HashSet::new();
        for node in &graph.nodes {
            if !inside.contains_key(node.name.as_str()) {
                node.for_each_operand(&mut |name| {
                    used_outside.insert(name.as_str());
                });
            }
        }
        let roots: Vec<&Node> = graph
            .nodes
            .iter()
            .filter(|node| {
                inside.contains_key(node.name.as_str()) && used_outside.contains(node.name.as_str())
            })
            .collect();
        if roots.is_empty() {
            return Err(RegionError::NoOutput);
        }
        if let Some(node) = roots.iter().find(|node| node.value.tensor().is_none()) {
            return Err(RegionError::OutputNotTensor(node.name.clone()));
        }

        let mut walk = Walk {
            by_name: &by_name,
            inside: &inside,
            inputs: vec![],
            input_names: vec![],
            nodes: vec![],
            seen: HashMap::new(),
        };
        let mut outputs = Vec::with_capacity(roots.len());
        for root in roots {
            match walk.visit(&root.name)? {
                Operand::Node(index) => outputs.push(index),
                Operand::Input(_) => return Err(RegionError::NotCall(root.name.clone())),
            }
        }
        let Walk { inputs, input_names, nodes, .. } = walk;
        let (names, nodes): (Vec<String>, Vec<RegionNode>) = nodes.into_iter().unzip();
        let mut region =
            Self { schema: REGION_SCHEMA.to_owned(), id: RegionId(String::new()), inputs, nodes, outputs };
        region.id = region.hash();
        Ok((region, Occurrence { graph: graph_index, nodes: names, inputs: input_names }))
    }

    /// The hash over everything but the schema and the id itself.
    pub fn hash(&self) -> RegionId {
        // serde_json prints floats in shortest round-trip form, so equal numbers give equal text.
        let text = serde_json::json!([self.inputs, self.nodes, self.outputs]).to_string();
        RegionId(blake3::hash(text.as_bytes()).to_hex()[..12].to_owned())
    }

    /// Tensor metadata of the outputs, in order.
    pub fn output_metas(&self) -> Vec<&TensorMeta> {
        self.outputs.iter().filter_map(|index| self.nodes.get(*index)?.value.tensor()).collect()
    }

    /// Bytes that any kernel for it has to move: each input read once, each output written once.
    pub fn bytes(&self) -> u64 {
        self.inputs.iter().map(|input| input.meta.distinct_bytes()).sum::<u64>()
            + self.output_metas().iter().map(|meta| meta.bytes()).sum::<u64>()
    }

    /// Operator names without overloads and namespaces, in order: what a person sees of it.
    pub fn op_names(&self) -> Vec<String> {
        self.nodes
            .iter()
            .map(|node| node.op.split('.').nth(1).unwrap_or(&node.op).trim_start_matches('_').to_owned())
            .collect()
    }
}

fn check_convex(graph: &Graph, inside: &HashMap<&str, &Node>) -> Result<(), RegionError> {
    // Nodes outside that depend on a member; a member that reads one of them closes a cycle.
    let mut tainted = std::collections::HashSet::new();
    for node in &graph.nodes {
        let member = inside.contains_key(node.name.as_str());
        let mut reads_member = false;
        let mut through = None;
        node.for_each_operand(&mut |name| {
            reads_member |= inside.contains_key(name.as_str()) || tainted.contains(name.as_str());
            if tainted.contains(name.as_str()) {
                through = Some(name.clone());
            }
        });
        if member && let Some(name) = through {
            return Err(RegionError::NotConvex(name));
        }
        if !member && reads_member {
            tainted.insert(node.name.as_str());
        }
    }
    Ok(())
}

struct Walk<'a> {
    by_name: &'a HashMap<&'a str, &'a Node>,
    inside: &'a HashMap<&'a str, &'a Node>,
    inputs: Vec<RegionInput>,
    input_names: Vec<String>,
    nodes: Vec<(String, RegionNode)>,
    seen: HashMap<String, Operand>,
}

impl Walk<'_> {
    fn visit(&mut self, name: &str) -> Result<Operand, RegionError> {
        if let Some(operand) = self.seen.get(name) {
            return Ok(*operand);
        }
        let operand = if let Some(node) = self.inside.get(name).copied() {
            let args =
                node.args.iter().map(|arg| arg.try_map(&mut |r| self.visit(r))).collect::<Result<_, _>>()?;
            let kwargs = node
                .kwargs
                .iter()
                .map(|(key, arg)| Ok((key.clone(), arg.try_map(&mut |r| self.visit(r))?)))
                .collect::<Result<_, RegionError>>()?;
            let node = RegionNode { op: node.target.clone(), args, kwargs, value: node.value.clone() };
            self.nodes.push((name.to_owned(), node));
            Operand::Node(self.nodes.len() - 1)
        } else {
            let node = self.by_name.get(name).ok_or_else(|| RegionError::Unknown(name.to_owned()))?;
            let meta =
                node.value.tensor().ok_or_else(|| RegionError::InputNotTensor(name.to_owned()))?.clone();
            self.inputs.push(RegionInput { meta, constant: node.constant });
            self.input_names.push(name.to_owned());
            Operand::Input(self.inputs.len() - 1)
        };
        self.seen.insert(name.to_owned(), operand);
        Ok(operand)
    }
}
