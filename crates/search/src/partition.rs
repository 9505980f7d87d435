//! From graphs to regions: legal, convex, connected parts that [`crate::propose`] can write and that
//! may win something.
//!
//! Every operator starts alone. In graph order each one is joined with the groups that it reads from,
//! as long as the union lowers and moves fewer bytes for little more arithmetic. Views on the way
//! between two members come along; views at the border stay outside, unless what they look at is an
//! input of the region anyway. Matrix products come last: each takes in what follows it, if that is
//! better off on its tiles.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use autokernel_core::graph::{GRAPH_SCHEMA, Graph, Node, NodeKind, TensorMeta, Value};
use autokernel_core::region::{Occurrence, Region, RegionId};

use crate::lower::{Unsupported, lower};
use crate::op::{self, Class};
use crate::product;
use crate::schedule::element_cost;

mod products;

/// Regions of a set of graphs.
#[derive(Debug, Default)]
pub struct Partition {
    /// Each different region with every place that it stands in, in graph order.
    pub regions: Vec<(Region, Vec<Occurrence>)>,
    /// Operators that stay as they are, and why; each pair once.
    pub left: Vec<(String, String)>,
}

/// Nodes in one region, and inputs and outputs of it; more make kernels that no compiler likes.
const MAX_NODES: usize = 160;
const MAX_TENSORS: usize = 32;
/// Additional operations that are worth moving one byte less.
const WORK_PER_BYTE: u64 = 6;
/// A rough machine for what cannot win anyway: bytes a microsecond from memory and, up to so many
/// bytes, from cache; microseconds of an ATen call; elements a microsecond of a transcendental function
/// in ATen; microseconds of a call of ours.
const MEMORY_BYTES_PER_US: f64 = 12_000.0;
const CACHE_BYTES_PER_US: f64 = 40_000.0;
const CACHE_BYTES: u64 = 1 << 20;
const ATEN_CALL_US: f64 = 1.0;
const DEAR_PER_US: f64 = 2_000.0;
const CALL_US: f64 = 2.4;
/// Additions and multiplications a microsecond of a library's product, and how much better a kernel with a
/// packed operand should do.
const FLOPS_PER_US: f64 = 150_000.0;
const PRODUCT_GAIN: f64 = 1.15;

/// Cuts graphs into regions.
pub fn partition(graphs: &[Graph]) -> Partition {
    let mut regions: Vec<(Region, Vec<Occurrence>)> = vec![];
    let mut known: HashMap<RegionId, usize> = HashMap::new();
    let mut left = vec![];
    for (number, graph) in graphs.iter().enumerate() {
        let cutter = Cutter::new(graph);
        for (region, mut occurrence) in cutter.cut(&mut left) {
            occurrence.graph = number;
            let next = regions.len();
            let at = *known.entry(region.id.clone()).or_insert(next);
            if at == next {
                regions.push((region, vec![occurrence]));
            } else {
                regions[at].1.push(occurrence);
            }
        }
    }
    let mut seen = BTreeSet::new();
    left.retain(|pair| seen.insert(pair.clone()));
    Partition { regions, left }
}

/// A set of nodes that is, or may become, a region.
#[derive(Clone, Debug)]
struct Group {
    members: BTreeSet<usize>,
    /// Bytes and operations of its kernel; `None` while it does not lower.
    cost: Option<(u64, u64)>,
    reason: String,
}

struct Cutter<'g> {
    graph: &'g Graph,
    by_name: HashMap<&'g str, usize>,
    operands: Vec<Vec<usize>>,
    users: Vec<Vec<usize>>,
    classes: Vec<Option<Class>>,
}

impl<'g> Cutter<'g> {
    fn new(graph: &'g Graph) -> Self {
        let by_name: HashMap<&str, usize> =
            graph.nodes.iter().enumerate().map(|(number, node)| (node.name.as_str(), number)).collect();
        let mut operands = vec![vec![]; graph.nodes.len()];
        let mut users = vec![vec![]; graph.nodes.len()];
        for (number, node) in graph.nodes.iter().enumerate() {
            node.for_each_operand(&mut |name| {
                if let Some(operand) = by_name.get(name.as_str())
                    && !operands[number].contains(operand)
                {
                    operands[number].push(*operand);
                    users[*operand].push(number);
                }
            });
        }
        let class = |node: &Node| (node.kind == NodeKind::Call).then(|| op::class(&node.target)).flatten();
        let classes = graph.nodes.iter().map(class).collect();
        Self { graph, by_name, operands, users, classes }
    }

    fn cut(&self, left: &mut Vec<(String, String)>) -> Vec<(Region, Occurrence)> {
        let mut groups: BTreeMap<usize, Group> = BTreeMap::new();
        let mut group_of: HashMap<usize, usize> = HashMap::new();
        for number in 0..self.graph.nodes.len() {
            if self.is_work(number) {
                self.start(number, &mut groups, &mut group_of);
                if !self.is_product(number) {
                    self.grow(number, &mut groups, &mut group_of);
                }
            } else if self.graph.nodes[number].kind == NodeKind::Call && self.classes[number].is_none() {
                left.push((
                    self.graph.nodes[number].target.clone(),
                    "is not in the operator table".to_owned(),
                ));
            }
        }
        self.join_products(&mut groups, &mut group_of);
        let mut found = vec![];
        for mut group in groups.into_values() {
            let reason = if group.cost.is_some() {
                self.finish(&mut group, &mut found)
            } else {
                Some(group.reason.clone())
            };
            if let Some(reason) = reason {
                let work = group.members.iter().filter(|number| self.is_work(**number));
                left.extend(work.map(|number| (self.graph.nodes[*number].target.clone(), reason.clone())));
            }
        }
        found
    }

    /// Whether a node does work that a region can take over.
    fn is_work(&self, number: usize) -> bool {
        self.classes[number].is_some_and(|class| !class.is_free())
    }

    /// A group of one operator, with the picks that belong to its several results.
    fn start(
        &self,
        number: usize,
        groups: &mut BTreeMap<usize, Group>,
        group_of: &mut HashMap<usize, usize>,
    ) {
        let mut members = BTreeSet::from([number]);
        if self.graph.nodes[number].value.tensor().is_none() {
            members
                .extend(self.users[number].iter().filter(|user| self.classes[**user] == Some(Class::Pick)));
        }
        if self.is_product(number) {
            self.take_views(number, &mut members);
        }
        for member in &members {
            group_of.insert(*member, number);
        }
        let group = match self.product_reason(number) {
            Some(reason) => Group { members, cost: None, reason },
            None => self.price(members),
        };
        groups.insert(number, group);
    }

    /// Joins the group of `number` with the groups that it reads from, one after another.
    fn grow(&self, number: usize, groups: &mut BTreeMap<usize, Group>, group_of: &mut HashMap<usize, usize>) {
        for (source, way) in self.sources(number, group_of) {
            let (Some(mine), Some(theirs)) = (group_of.get(&number).copied(), group_of.get(&source).copied())
            else {
                continue;
            };
            if mine == theirs || self.is_product(theirs) {
                continue;
            }
            let (Some(a), Some(b)) = (groups.get(&mine), groups.get(&theirs)) else { continue };
            let mut members: BTreeSet<usize> = a.members.union(&b.members).copied().collect();
            members.extend(way);
            if members.len() > MAX_NODES || !self.is_convex(&members) || self.stores_needlessly(&members) {
                continue;
            }
            let joined = self.price(members);
            if !pays(a, b, &joined) {
                continue;
            }
            for member in &joined.members {
                group_of.insert(*member, mine);
            }
            groups.remove(&theirs);
            groups.insert(mine, joined);
        }
    }

    /// Grouped nodes that `number` reads, directly or through free nodes, with those free nodes.
    fn sources(&self, number: usize, group_of: &HashMap<usize, usize>) -> Vec<(usize, Vec<usize>)> {
        let mut sources = vec![];
        let mut open: Vec<(usize, Vec<usize>)> =
            self.operands[number].iter().map(|operand| (*operand, vec![])).collect();
        while let Some((at, way)) = open.pop() {
            if group_of.contains_key(&at) {
                sources.push((at, way));
            } else if self.classes[at].is_some_and(Class::is_free) {
                for operand in &self.operands[at] {
                    let mut longer = way.clone();
                    longer.push(at);
                    open.push((*operand, longer));
                }
            }
        }
        // The nearest first: what was computed last is still in cache.
        sources.sort_by_key(|(source, _)| std::cmp::Reverse(*source));
        sources
    }

    fn is_convex(&self, members: &BTreeSet<usize>) -> bool {
        let (Some(first), Some(last)) = (members.first(), members.last()) else { return false };
        let mut outside: BTreeSet<usize> = BTreeSet::new();
        for number in *first..=*last {
            let member = members.contains(&number);
            if member && self.operands[number].iter().any(|operand| outside.contains(operand)) {
                return false;
            }
            let depends = self.operands[number]
                .iter()
                .any(|operand| members.contains(operand) || outside.contains(operand));
            if !member && depends {
                outside.insert(number);
            }
        }
        true
    }

    fn leaves(&self, members: &BTreeSet<usize>, number: usize) -> bool {
        self.users[number].iter().any(|user| !members.contains(user))
    }

    /// Whether a value and a view of it would both be written, or a tensor of one number.
    fn stores_needlessly(&self, members: &BTreeSet<usize>) -> bool {
        let fill =
            |number: &usize| self.classes[*number] == Some(Class::Fill) && self.leaves(members, *number);
        members.iter().any(fill)
            || members.iter().any(|number| {
                self.classes[*number]
                    .is_some_and(|class| matches!(class, Class::View | Class::Split | Class::Pick))
                    && self.leaves(members, *number)
                    && self.operands[*number].iter().any(|operand| {
                        members.contains(operand)
                            && self.graph.nodes[*operand].value.tensor().is_some()
                            && self.leaves(members, *operand)
                    })
            })
    }

    fn price(&self, members: BTreeSet<usize>) -> Group {
        let lowered = self.extract(&members).and_then(|(region, _)| {
            let program = lower(&region)?;
            if !program.products.is_empty() {
                product::find(&program, &region)?;
            }
            Ok((program, region))
        });
        match lowered {
            Ok((program, region)) if region.inputs.len() + region.outputs.len() <= MAX_TENSORS => {
                let work = program.points() * element_cost(&program);
                Group { members, cost: Some((region.bytes(), work)), reason: String::new() }
            }
            Ok(_) => Group { members, cost: None, reason: "has too many inputs and outputs".to_owned() },
            Err(unsupported) => Group { members, cost: None, reason: unsupported.to_string() },
        }
    }

    /// The region made of `members`, cut out of a graph of just them and what they read.
    fn extract(&self, members: &BTreeSet<usize>) -> Result<(Region, Occurrence), Unsupported> {
        let mut nodes: Vec<Node> = vec![];
        let outside: BTreeSet<usize> = members
            .iter()
            .flat_map(|number| &self.operands[*number])
            .filter(|number| !members.contains(number))
            .copied()
            .collect();
        for number in outside {
            let node = &self.graph.nodes[number];
            nodes.push(Node { kind: NodeKind::Placeholder, args: vec![], kwargs: vec![], ..node.clone() });
        }
        nodes.extend(members.iter().map(|number| self.graph.nodes[*number].clone()));
        let leaving = members.iter().filter(|number| self.leaves(members, **number));
        let args = leaving
            .map(|number| autokernel_core::graph::Arg::Ref(self.graph.nodes[*number].name.clone()))
            .collect();
        nodes.push(Node {
            name: "output of the region".to_owned(),
            kind: NodeKind::Output,
            target: "output".to_owned(),
            args,
            kwargs: vec![],
            value: Value::Other,
            constant: false,
        });
        let names: Vec<String> =
            members.iter().map(|number| self.graph.nodes[*number].name.clone()).collect();
        Region::extract(&Graph { schema: GRAPH_SCHEMA.to_owned(), nodes }, 0, &names)
            .map_err(|error| Unsupported::new("region", error.to_string()))
    }

    /// Takes in views of inputs, decides whether it can win, and keeps it or says why not.
    fn finish(&self, group: &mut Group, found: &mut Vec<(Region, Occurrence)>) -> Option<String> {
        self.absorb(group);
        let (region, occurrence) = match self.extract(&group.members) {
            Ok(pair) => pair,
            Err(unsupported) => return Some(unsupported.to_string()),
        };
        let work: Vec<usize> = group
            .members
            .iter()
            .copied()
            .filter(|number| self.is_work(*number) && self.classes[*number] != Some(Class::Fill))
            .collect();
        if let [only] = work.as_slice()
            && !matches!(
                self.classes[*only],
                Some(Class::Transcendental | Class::Composite | Class::Window | Class::Product)
            )
        {
            return Some("stands alone, and PyTorch runs it at the speed of memory".to_owned());
        }
        let plain: f64 = work.iter().map(|number| self.plain_us(*number)).sum();
        let multiplied: f64 = work.iter().map(|number| self.product_us(*number)).sum();
        let ours = CALL_US + move_us(region.bytes()) + multiplied / PRODUCT_GAIN;
        if plain - ours < 2.0 * CALL_US {
            return Some("is too small to win more than a call costs".to_owned());
        }
        found.push((region, occurrence));
        None
    }

    /// Views of something that is an input anyway come in: one input less, one call less.
    fn absorb(&self, group: &mut Group) {
        loop {
            let inputs: BTreeSet<usize> = group
                .members
                .iter()
                .flat_map(|number| &self.operands[*number])
                .filter(|number| !group.members.contains(number))
                .copied()
                .collect();
            let candidate = inputs.iter().copied().find(|input| {
                self.classes[*input].is_some_and(Class::is_free)
                    && !self.leaves(&group.members, *input)
                    && self.operands[*input].iter().all(|source| self.reachable(&inputs, *source))
            });
            let Some(view) = candidate else { return };
            let mut members = group.members.clone();
            let mut open = vec![view];
            while let Some(number) = open.pop() {
                if (!inputs.contains(&number) || number == view) && members.insert(number) {
                    open.extend(&self.operands[number]);
                    if self.graph.nodes[number].value.tensor().is_none() {
                        members.extend(&self.users[number]);
                    }
                }
            }
            let leaves_now = members.difference(&group.members).any(|number| self.leaves(&members, *number));
            if leaves_now {
                return;
            }
            let larger = self.price(members);
            if larger.cost.is_none() || !self.is_convex(&larger.members) {
                return;
            }
            *group = larger;
        }
    }

    /// Whether following views backwards ends in one of `inputs`.
    fn reachable(&self, inputs: &BTreeSet<usize>, number: usize) -> bool {
        inputs.contains(&number)
            || self.classes[number].is_some_and(|class| class == Class::Split)
                && self.operands[number].iter().all(|source| self.reachable(inputs, *source))
    }

    /// Roughly what an operator costs in PyTorch.
    fn plain_us(&self, number: usize) -> f64 {
        let node = &self.graph.nodes[number];
        let written = metas(&node.value).map(TensorMeta::bytes).sum::<u64>();
        let read: u64 = self.operands[number]
            .iter()
            .flat_map(|operand| metas(&self.graph.nodes[*operand].value))
            .map(TensorMeta::distinct_bytes)
            .sum();
        let dear = match self.classes[number] {
            Some(Class::Transcendental | Class::Composite | Class::Window) => {
                metas(&node.value).map(TensorMeta::numel).max().unwrap_or(0)
            }
            _ => 0,
        };
        debug_assert!(self.by_name.contains_key(node.name.as_str()));
        ATEN_CALL_US + move_us(written + read) + dear as f64 / DEAR_PER_US + self.product_us(number)
    }
}

fn move_us(bytes: u64) -> f64 {
    bytes as f64 / if bytes > CACHE_BYTES { MEMORY_BYTES_PER_US } else { CACHE_BYTES_PER_US }
}

fn metas(value: &Value) -> impl Iterator<Item = &TensorMeta> {
    let (one, several) = match value {
        Value::Tensor(meta) => (Some(meta), None),
        Value::Tuple(metas) => (None, Some(metas)),
        Value::Other => (None, None),
    };
    one.into_iter().chain(several.into_iter().flatten().flatten())
}

/// Whether one kernel is better than two: it lowers, moves less, and computes little more.
fn pays(a: &Group, b: &Group, joined: &Group) -> bool {
    let Some((bytes, work)) = joined.cost else { return false };
    let (Some((bytes_a, work_a)), Some((bytes_b, work_b))) = (a.cost, b.cost) else {
        // One of them cannot stand alone: the whole is what makes it a kernel.
        return true;
    };
    let saved = (bytes_a + bytes_b).saturating_sub(bytes);
    saved > 0 && work.saturating_sub(work_a + work_b) <= saved * WORK_PER_BYTE
}
