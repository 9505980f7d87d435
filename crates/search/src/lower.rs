//! From a region to a [`Program`], by asking backwards from the outputs.
//!
//! An output stands at every point of the iteration space; what it needs from its operands is asked
//! for at an index that is an affine expression of the iteration variables. Views, slices and
//! broadcasts only rewrite that index. Where an index stops being affine, the iteration space is
//! refined (a dimension is cut in two, or the row gets another segment) and lowering starts again;
//! dimensions that no access needs apart are merged at the end.

use std::collections::HashMap;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, TensorMeta, Value};
use autokernel_core::region::{Operand, Region, RegionNode};

use crate::affine::{Affine, Domain, Reshape, flatten, row_major, unflatten};
use crate::loops::{
    Access, Arena, Binary, Compare, Expr, Guard, Id, Logic, Lookup, Position, Program, Reduce, Reduction,
    Scan, Store, Table, Unary,
};
use crate::op::{self, Class};

mod arrange;
mod call;
mod composite;
mod exact;
mod lookup;
mod pieces;
mod product;
mod space;
mod total;
mod views;
mod window;

pub(crate) use call::Call;
use space::Space;
pub(crate) use views::{argument, source};

/// Why a region cannot be lowered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{op}` {reason}")]
pub struct Unsupported {
    /// The operator.
    pub op: String,
    /// What about it.
    pub reason: String,
}

impl Unsupported {
    pub(crate) fn new(op: &str, reason: impl Into<String>) -> Self {
        Self { op: op.to_owned(), reason: reason.into() }
    }
}

/// Why lowering stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// For good.
    Unsupported(Unsupported),
    /// Iteration dimension `dim` must be cut so that its inner part has `inner` steps.
    SplitDim { dim: usize, inner: u64 },
    /// The row must be cut at this position.
    SplitRow(u64),
}

impl From<Unsupported> for Stop {
    fn from(unsupported: Unsupported) -> Self {
        Self::Unsupported(unsupported)
    }
}

/// Each restart refines the space; a region that needs more is no row-wise work.
const MAX_RESTARTS: usize = 32;

/// Lowers a region.
pub fn lower(region: &Region) -> Result<Program, Unsupported> {
    let wide = compute_type(region)?;
    let mut space = Space::of(region)?;
    for _ in 0..MAX_RESTARTS {
        let mut lowering = Lower::new(region, &space);
        match lowering.outputs() {
            Ok(stores) => return arrange::finish(lowering, stores, wide),
            Err(Stop::Unsupported(unsupported)) => return Err(unsupported),
            Err(Stop::SplitDim { dim, inner }) => space.split(dim, inner)?,
            Err(Stop::SplitRow(at)) => space.cut_row(at)?,
        }
    }
    Err(Unsupported::new("region", "needs too many refinements of its iteration space"))
}

/// Whether numbers are f64: all floats of the region, or none.
fn compute_type(region: &Region) -> Result<bool, Unsupported> {
    let metas = region.inputs.iter().map(|input| &input.meta);
    let values = region.nodes.iter().flat_map(|node| match &node.value {
        Value::Tensor(meta) => vec![meta],
        Value::Tuple(metas) => metas.iter().flatten().collect(),
        Value::Other => vec![],
    });
    let (mut wide, mut narrow) = (false, false);
    for meta in metas.chain(values) {
        wide |= meta.dtype == Dtype::F64;
        narrow |= meta.dtype.is_float() && meta.dtype != Dtype::F64;
    }
    if wide && narrow {
        return Err(Unsupported::new("region", "mixes f64 with narrower floats"));
    }
    Ok(wide)
}

/// Segment, guards that hold, value, which of its results, index.
type Pulled = HashMap<(usize, Vec<usize>, Operand, usize, Vec<Affine>), Id>;

/// One attempt over one iteration space.
pub(crate) struct Lower<'a> {
    pub(crate) region: &'a Region,
    space: &'a Space,
    arena: Arena,
    loads: Vec<Access>,
    load_index: HashMap<Access, usize>,
    guards: Vec<Guard>,
    positions: Vec<Position>,
    lookups: Vec<Lookup>,
    tables: Vec<Table>,
    reduces: Vec<Reduce>,
    scans: Vec<Scan>,
    totals: Vec<Id>,
    products: Vec<usize>,
    pulled: Pulled,
    segment: usize,
    /// Guards that hold where a value is asked for just now, in ascending order.
    active: Vec<usize>,
    domain: Vec<(i64, i64)>,
}

impl<'a> Lower<'a> {
    fn new(region: &'a Region, space: &'a Space) -> Self {
        let domain = space.domain(0);
        Self {
            region,
            space,
            arena: Arena::default(),
            loads: vec![],
            load_index: HashMap::new(),
            guards: vec![],
            positions: vec![],
            lookups: vec![],
            tables: vec![],
            reduces: vec![],
            scans: vec![],
            totals: vec![],
            products: vec![],
            pulled: HashMap::new(),
            segment: 0,
            active: vec![],
            domain,
        }
    }

    /// Variables of an index: those of the iteration space, then those that stand for a [`Lookup`] each.
    fn rank(&self) -> usize {
        self.space.rank()
    }

    fn enter(&mut self, segment: usize) {
        self.segment = segment;
        self.domain = self.space.domain(segment);
        let first = self.space.dims.len();
        for (slot, lookup) in self.domain[first..].iter_mut().zip(&self.lookups) {
            *slot = (0, lookup.size as i64);
        }
    }

    /// Evaluates `body` in every segment of the row.
    fn each_segment(&mut self, body: &mut dyn FnMut(&mut Self) -> Result<Id, Stop>) -> Result<Vec<Id>, Stop> {
        let (before, domain) = (self.segment, self.domain.clone());
        let mut ids = Vec::with_capacity(self.space.segments.len());
        for segment in 0..self.space.segments.len() {
            // Guards of the rows hold all along them.
            self.enter(segment);
            let row = self.space.first_row();
            self.domain[..row].copy_from_slice(&domain[..row]);
            ids.push(body(self)?);
        }
        self.segment = before;
        // Lookups that were met on the way stay known.
        let first = self.space.dims.len();
        self.domain[..first].copy_from_slice(&domain[..first]);
        Ok(ids)
    }

    fn outputs(&mut self) -> Result<Vec<Store>, Stop> {
        let region = self.region;
        let mut stores = Vec::with_capacity(region.outputs.len());
        for (number, node_index) in region.outputs.iter().enumerate() {
            let node = &region.nodes[*node_index];
            let meta =
                node.value.tensor().ok_or_else(|| Unsupported::new(&node.op, "returns no single tensor"))?;
            let counts = matches!(node.op.as_str(), "aten.argmax.default" | "aten.argmin.default");
            if !meta.dtype.is_float() && meta.dtype != Dtype::Bool && !counts {
                return Err(Unsupported::new(&node.op, format!("returns {}", meta.dtype.name())).into());
            }
            if !meta.is_dense() {
                return Err(Unsupported::new(
                    &node.op,
                    "returns a tensor whose strides overlap or leave gaps",
                )
                .into());
            }
            let over_row = meta.numel() == self.space.total();
            let row_level = meta.numel() == self.space.rows() && self.space.rows_in_order;
            if meta.numel() == 1 && self.space.rows() > 1 {
                stores.push(self.once(number, *node_index, meta)?);
                continue;
            }
            if !over_row && !row_level {
                return Err(Unsupported::new(&node.op, "has another number of elements than the rest").into());
            }
            let flat = self.space.position(over_row);
            // Over the whole row: this index is used in every segment.
            let whole = self.space.whole();
            let index = reshape(&flat, meta, &whole, &node.op)?;
            let operand = Operand::Node(*node_index);
            let access = self.access(number, meta, &index);
            if over_row {
                let values = self.each_segment(&mut |lower| lower.number(operand, &index))?;
                stores.push(Store::Lane(access, values));
            } else {
                let value = self.number(operand, &index)?;
                if self.arena.is_lane(value) {
                    return Err(Unsupported::new(&node.op, "does not fit the rows of the rest").into());
                }
                stores.push(Store::Row(access, value));
            }
        }
        Ok(stores)
    }

    fn access(&self, tensor: usize, meta: &TensorMeta, index: &[Affine]) -> Access {
        let mut at = Affine::constant(self.rank(), 0);
        for (part, stride) in index.iter().zip(&meta.stride) {
            at.add_scaled(part, *stride as i64);
        }
        let numbers = at.coefficients.split_off(self.space.dims.len());
        let lookups = numbers.into_iter().enumerate().filter(|(_, stride)| *stride != 0).collect();
        Access { tensor, offset: at.offset, strides: at.coefficients, lookups, guards: self.active.clone() }
    }

    /// Whether an access changes along the row.
    fn moves_along_row(&self, access: &Access) -> bool {
        access.strides[self.space.first_row()..].iter().any(|stride| *stride != 0)
            || access.lookups.iter().any(|(lookup, _)| self.lookups[*lookup].lane)
    }

    /// Whether an index changes along the row.
    fn uses_row(&self, part: &Affine) -> bool {
        let dims = self.space.dims.len();
        let looked_up = part.coefficients[dims..].iter().zip(&self.lookups);
        part.coefficients[self.space.first_row()..dims].iter().any(|coefficient| *coefficient != 0)
            || looked_up.into_iter().any(|(coefficient, lookup)| *coefficient != 0 && lookup.lane)
    }

    /// The index in `meta`'s shape of a row-major position, within the current segment.
    fn reshape(&self, flat: &Affine, meta: &TensorMeta, op: &str) -> Result<Vec<Affine>, Stop> {
        match reshape(flat, meta, &self.domain, op) {
            Err(Stop::SplitDim { dim, .. }) if dim >= self.space.dims.len() => {
                Err(Unsupported::new(op, "cuts an index that is read").into())
            }
            other => other,
        }
    }

    /// A value as a number.
    pub(crate) fn number(&mut self, operand: Operand, index: &[Affine]) -> Result<Id, Stop> {
        let id = self.pull(operand, 0, index)?;
        Ok(self.as_number(id))
    }

    /// A value at an index; `result` picks one of several results.
    fn pull(&mut self, operand: Operand, result: usize, index: &[Affine]) -> Result<Id, Stop> {
        let key = (self.segment, self.active.clone(), operand, result, index.to_vec());
        if let Some(id) = self.pulled.get(&key) {
            return Ok(*id);
        }
        let id = match operand {
            Operand::Input(input) => self.input(input, index)?,
            Operand::Node(node) => self.node(node, result, index)?,
        };
        self.pulled.insert(key, id);
        Ok(id)
    }

    fn input(&mut self, input: usize, index: &[Affine]) -> Result<Id, Stop> {
        let region = self.region;
        let meta = &region.inputs[input].meta;
        if meta.dtype == Dtype::I16 {
            return Err(Unsupported::new("input", "is i16").into());
        }
        let access = self.access(input, meta, index);
        let id = self.load(access);
        if meta.dtype == Dtype::Bool {
            let zero = self.constant(0.0);
            return Ok(self.arena.add(Expr::Compare(Compare::Ne, id, zero), false));
        }
        Ok(id)
    }

    fn load(&mut self, access: Access) -> Id {
        let lane = self.moves_along_row(&access);
        let next = self.loads.len();
        let load = *self.load_index.entry(access.clone()).or_insert(next);
        if load == next {
            self.loads.push(access);
        }
        self.arena.add(Expr::Load(load), lane)
    }

    fn node(&mut self, number: usize, result: usize, index: &[Affine]) -> Result<Id, Stop> {
        let region = self.region;
        let node = &region.nodes[number];
        let class =
            op::class(&node.op).ok_or_else(|| Unsupported::new(&node.op, "is not in the operator table"))?;
        match class {
            Class::Pointwise | Class::Transcendental => {
                check_numbers(node)?;
                op::pointwise(&mut Call::new(self, node, index))
            }
            Class::Fill => Call::new(self, node, index).fill(),
            Class::View | Class::Copy => self.view(node, index),
            Class::Concat => self.concat(node, index),
            Class::Place => self.placed(node, index),
            Class::Window => self.window(node, result, index),
            Class::Lookup => self.looked_up(node, index),
            Class::Reduction => self.reduction(node, index),
            Class::Scan => self.scan(node, index),
            Class::Composite => self.composite(node, result, index),
            Class::Channelwise => self.channelwise(node, result, index),
            Class::Loss => self.loss(node, result, index),
            Class::Split => self.split(node, result, index),
            Class::Product => self.product(node, number, index),
            Class::Pick => match (node.args.first(), node.args.get(1)) {
                (Some(Arg::Ref(operand)), Some(Arg::Int(which))) => {
                    self.pull(*operand, *which as usize, index)
                }
                _ => Err(Unsupported::new(&node.op, "picks in an unknown way").into()),
            },
        }
    }

    /// Shape and type of what an operand is.
    fn meta(&self, operand: Operand, op: &str) -> Result<&'a TensorMeta, Stop> {
        let region = self.region;
        match operand {
            Operand::Input(input) => Ok(&region.inputs[input].meta),
            Operand::Node(node) => region.nodes[node]
                .value
                .tensor()
                .ok_or_else(|| Unsupported::new(op, "reads something that is no tensor").into()),
        }
    }

    /// An index as a number.
    fn place_number(&mut self, at: &Affine) -> Id {
        let strides = at.coefficients[..self.space.dims.len()].to_vec();
        let lane = strides[self.space.first_row()..].iter().any(|stride| *stride != 0);
        let position = Position { offset: at.offset, strides };
        let next = self.positions.len();
        let number = self.positions.iter().position(|known| *known == position).unwrap_or(next);
        if number == next {
            self.positions.push(position);
        }
        self.arena.add(Expr::Position(number), lane)
    }

    pub(crate) fn constant(&mut self, value: f64) -> Id {
        self.arena.add(Expr::Const(value.to_bits()), false)
    }

    fn as_number(&mut self, id: Id) -> Id {
        if !self.arena.is_mask(id) {
            return id;
        }
        let (one, zero) = (self.constant(1.0), self.constant(0.0));
        self.arena.add(Expr::Select(id, one, zero), false)
    }

    fn as_truth(&mut self, id: Id) -> Id {
        if self.arena.is_mask(id) {
            return id;
        }
        let zero = self.constant(0.0);
        self.arena.add(Expr::Compare(Compare::Ne, id, zero), false)
    }

    fn unary(&mut self, op: Unary, a: Id) -> Id {
        self.arena.add(Expr::Unary(op, a), false)
    }

    fn binary(&mut self, op: Binary, a: Id, b: Id) -> Id {
        self.arena.add(Expr::Binary(op, a, b), false)
    }

    fn logic(&mut self, op: Logic, a: Id, b: Id) -> Id {
        self.arena.add(Expr::Logic(op, a, b), false)
    }

    /// A reduction over the row of what `body` gives in each segment.
    fn reduce(
        &mut self,
        kind: Reduction,
        body: &mut dyn FnMut(&mut Self) -> Result<Id, Stop>,
    ) -> Result<Id, Stop> {
        let bodies = self.each_segment(body)?;
        let reduce = Reduce { kind, bodies };
        let number = self.reduces.iter().position(|known| *known == reduce).unwrap_or_else(|| {
            self.reduces.push(reduce);
            self.reduces.len() - 1
        });
        Ok(self.arena.add(Expr::Reduce(number), false))
    }
}

/// Integers cannot be computed in floats: an operator must return floats or truth values.
fn check_numbers(node: &RegionNode) -> Result<(), Stop> {
    let meta = node.value.tensor().ok_or_else(|| Unsupported::new(&node.op, "returns no single tensor"))?;
    if meta.dtype.is_float() || meta.dtype == Dtype::Bool {
        return Ok(());
    }
    Err(Unsupported::new(&node.op, format!("computes in {}", meta.dtype.name())).into())
}

fn reshape(flat: &Affine, meta: &TensorMeta, domain: &Domain, op: &str) -> Result<Vec<Affine>, Stop> {
    unflatten(flat, &meta.shape, domain).map_err(|error| match error {
        Reshape::Split { dim, inner } => Stop::SplitDim { dim, inner },
        Reshape::Impossible => {
            Unsupported::new(op, "walks through memory in a way that is not affine").into()
        }
    })
}

/// Dense in some order of its dimensions.
trait Dense {
    fn is_dense(&self) -> bool;
}

impl Dense for TensorMeta {
    fn is_dense(&self) -> bool {
        let mut dims: Vec<(u64, u64)> = self
            .stride
            .iter()
            .copied()
            .zip(self.shape.iter().copied())
            .filter(|(_, size)| *size != 1)
            .collect();
        dims.sort_unstable();
        let mut expected = 1;
        for (stride, size) in dims {
            if stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }
}

/// Dimension numbers as PyTorch counts them, negative ones from the end.
fn dimension(value: i64, rank: usize, op: &str) -> Result<usize, Stop> {
    let counted = if value < 0 { value + rank as i64 } else { value };
    usize::try_from(counted)
        .ok()
        .filter(|dim| *dim < rank)
        .ok_or_else(|| Unsupported::new(op, format!("names dimension {value} of {rank}")).into())
}

/// The index with the row's own variables in the reduced dimensions.
fn along_row(
    lower: &Lower<'_>,
    index: &[Affine],
    meta: &TensorMeta,
    dims: &[usize],
    op: &str,
) -> Result<Vec<Affine>, Stop> {
    let first_row = lower.space.first_row();
    let kept_use_row =
        index.iter().enumerate().any(|(dim, part)| !dims.contains(&dim) && lower.uses_row(part));
    if kept_use_row {
        return Err(Unsupported::new(op, "is needed at more than one place along a row").into());
    }
    let sizes: Vec<u64> = dims.iter().map(|dim| meta.shape[*dim]).collect();
    if sizes.iter().product::<u64>() != lower.space.row() {
        return Err(Unsupported::new(op, "reduces over another length than the rest").into());
    }
    let mut flat = Affine::constant(lower.rank(), 0);
    let row_sizes: Vec<u64> = lower.space.dims[first_row..].iter().map(|dim| dim.size).collect();
    // The row's variables in the order of the reduced tensor, whatever order they are walked in.
    let strides = lower.space.row_strides();
    debug_assert_eq!(row_sizes.len(), strides.len());
    for (offset, stride) in strides.iter().enumerate() {
        flat.coefficients[first_row + offset] = *stride;
    }
    let shape = TensorMeta::contiguous(meta.dtype, &sizes);
    let parts = lower.reshape(&flat, &shape, op)?;
    let mut moved = index.to_vec();
    for (dim, part) in dims.iter().zip(parts) {
        moved[*dim] = part;
    }
    debug_assert_eq!(row_major(&sizes).len(), dims.len());
    Ok(moved)
}

/// The row-major position of `index` in the shape of `meta`.
fn position(lower: &Lower<'_>, index: &[Affine], meta: &TensorMeta) -> Affine {
    flatten(index, &meta.shape, lower.rank())
}
