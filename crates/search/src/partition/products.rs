//! Matrix products and what follows them.
//!
//! What is bound by memory has found its groups before a product looks around. A product then takes in
//! a whole group that reads it, or the first operators of one, when fewer bytes are moved in all: what
//! stands between a product and a normalisation goes with the product, the normalisation stays.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, Node, TensorMeta};

use super::{Class, Cutter, FLOPS_PER_US, Group, MAX_NODES, pays};
use crate::product;

/// Below this a product waits for memory, and a library's reads its operand as fast.
const FEW_ROWS: u64 = 16;
/// From here on it is worth to pack an operand that is another one at each call.
const MANY_ROWS: u64 = 128;
/// Operators at the start of a group that a product looks at.
const HEAD: usize = 24;

type Groups = BTreeMap<usize, Group>;

impl Cutter<'_> {
    pub(super) fn is_product(&self, number: usize) -> bool {
        self.classes[number] == Some(Class::Product)
    }

    fn meta(&self, number: usize) -> Option<&TensorMeta> {
        self.graph.nodes[number].value.tensor()
    }

    /// Numbers of the left and the right operand.
    fn factors(&self, node: &Node) -> Option<(usize, usize)> {
        let first = usize::from(node.target == "aten.addmm.default");
        let operand = |position: usize| match node.args.get(position)? {
            Arg::Ref(name) => self.by_name.get(name.as_str()).copied(),
            _ => None,
        };
        Some((operand(first)?, operand(first + 1)?))
    }

    /// Why a product should be left to the library, `None` for one of ours and for other operators.
    pub(super) fn product_reason(&self, number: usize) -> Option<String> {
        if !self.is_product(number) {
            return None;
        }
        let node = &self.graph.nodes[number];
        let Some((left, right)) = self.factors(node) else {
            return Some("has operands that are no tensors".to_owned());
        };
        let (result, left, weight) = (self.meta(number)?, self.meta(left)?, self.meta(right)?);
        let rows = result.numel() / result.shape.last().copied().unwrap_or(1).max(1);
        let narrow = [result, left, weight].iter().any(|meta| !matches!(meta.dtype, Dtype::F32 | Dtype::F64));
        if narrow {
            return Some("is of a type that libraries multiply with instructions of its own".to_owned());
        }
        let few = if self.is_constant(right) { FEW_ROWS } else { MANY_ROWS };
        (rows < few).then(|| format!("has only {rows} rows, too few for an operand packed for it"))
    }

    /// Whether a node is a parameter or a view of one.
    fn is_constant(&self, number: usize) -> bool {
        let node = &self.graph.nodes[number];
        node.constant
            || product::is_view(&node.target)
                && self.operands[number].iter().all(|source| self.is_constant(*source))
    }

    /// The views through which a product alone sees its operands belong to it.
    pub(super) fn take_views(&self, number: usize, members: &mut BTreeSet<usize>) {
        let mut open = vec![number];
        while let Some(at) = open.pop() {
            for operand in &self.operands[at] {
                let own = self.users[*operand].iter().all(|user| members.contains(user));
                if own && product::is_view(&self.graph.nodes[*operand].target) && members.insert(*operand) {
                    open.push(*operand);
                }
            }
        }
    }

    /// Microseconds of a library's product, 0 for other operators.
    pub(super) fn product_us(&self, number: usize) -> f64 {
        let node = &self.graph.nodes[number];
        let flops = || {
            let (left, _) = self.factors(node)?;
            Some(product::flops(&node.target, self.meta(number)?, self.meta(left)?))
        };
        if self.is_product(number) { flops().unwrap_or(0) as f64 / FLOPS_PER_US } else { 0.0 }
    }

    /// Lets each product take in what follows it.
    pub(super) fn join_products(&self, groups: &mut Groups, group_of: &mut HashMap<usize, usize>) {
        for number in (0..self.graph.nodes.len()).filter(|number| self.is_product(*number)) {
            let mut refused = BTreeSet::new();
            // Every group that was taken in may show another one behind it.
            while let Some(mine) = group_of.get(&number).copied() {
                if groups.get(&mine).is_none_or(|group| group.cost.is_none()) {
                    break;
                }
                let reader = self
                    .readers(number, group_of)
                    .into_iter()
                    .find(|(theirs, _)| *theirs != mine && !refused.contains(theirs));
                let Some((theirs, way)) = reader else { break };
                let joined = self.join_whole(mine, theirs, &way, groups, group_of)
                    || self.join_head(mine, theirs, &way, groups, group_of);
                if !joined || groups.contains_key(&theirs) {
                    refused.insert(theirs);
                }
            }
        }
    }

    /// Groups that read a node, directly or through free nodes, with all those free nodes; nearest first.
    fn readers(&self, number: usize, group_of: &HashMap<usize, usize>) -> Vec<(usize, BTreeSet<usize>)> {
        let mut readers: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut open: Vec<(usize, Vec<usize>)> =
            self.users[number].iter().map(|user| (*user, vec![])).collect();
        while let Some((at, way)) = open.pop() {
            if let Some(group) = group_of.get(&at) {
                readers.entry(*group).or_default().extend(way);
            } else if self.classes[at].is_some_and(Class::is_free) {
                for user in &self.users[at] {
                    let mut longer = way.clone();
                    longer.push(at);
                    open.push((*user, longer));
                }
            }
        }
        readers.into_iter().collect()
    }

    fn join_whole(
        &self,
        mine: usize,
        theirs: usize,
        way: &BTreeSet<usize>,
        groups: &mut Groups,
        group_of: &mut HashMap<usize, usize>,
    ) -> bool {
        let (Some(a), Some(b)) = (groups.get(&mine), groups.get(&theirs)) else { return false };
        let members: BTreeSet<usize> = a.members.iter().chain(&b.members).chain(way).copied().collect();
        let Some(joined) = self.legal(members) else { return false };
        // A product that must not be ours must not come in through another's door.
        if b.cost.is_none() && b.members.iter().any(|number| self.is_product(*number)) || !pays(a, b, &joined)
        {
            return false;
        }
        groups.remove(&theirs);
        settle(mine, joined, groups, group_of);
        true
    }

    /// Takes the first operators out of a group, as many as make the sum of both cheapest.
    fn join_head(
        &self,
        mine: usize,
        theirs: usize,
        way: &BTreeSet<usize>,
        groups: &mut Groups,
        group_of: &mut HashMap<usize, usize>,
    ) -> bool {
        let (Some(a), Some(b)) = (groups.get(&mine), groups.get(&theirs)) else { return false };
        let (Some((bytes_a, _)), Some((bytes_b, _))) = (a.cost, b.cost) else { return false };
        if b.members.iter().any(|number| self.is_product(*number)) {
            return false;
        }
        let mut inside: BTreeSet<usize> = a.members.union(way).copied().collect();
        let mut rest = b.members.clone();
        let mut best: Option<(u64, Group, Group)> = None;
        for number in b.members.iter().copied().take(HEAD) {
            let operands = &self.operands[number];
            let follows = operands.iter().any(|operand| inside.contains(operand))
                && operands.iter().all(|operand| !rest.contains(operand));
            if !follows {
                continue;
            }
            inside.insert(number);
            rest.remove(&number);
            let (Some(joined), Some(left)) = (self.legal(inside.clone()), self.legal(rest.clone())) else {
                continue;
            };
            let (Some((bytes, _)), Some((bytes_left, _))) = (joined.cost, left.cost) else { continue };
            let sum = bytes + bytes_left;
            if sum < best.as_ref().map_or(bytes_a + bytes_b, |(sum, ..)| *sum) {
                best = Some((sum, joined, left));
            }
        }
        let Some((_, joined, left)) = best else { return false };
        groups.insert(theirs, left);
        settle(mine, joined, groups, group_of);
        true
    }

    fn legal(&self, members: BTreeSet<usize>) -> Option<Group> {
        let fits = !members.is_empty()
            && members.len() <= MAX_NODES
            && self.is_convex(&members)
            && !self.stores_needlessly(&members);
        fits.then(|| self.price(members))
    }
}

fn settle(mine: usize, joined: Group, groups: &mut Groups, group_of: &mut HashMap<usize, usize>) {
    for member in &joined.members {
        group_of.insert(*member, mine);
    }
    groups.insert(mine, joined);
}
