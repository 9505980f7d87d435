//! The middle representation: a region as loops over an iteration space.
//!
//! A [`Program`] walks the *kept* dimensions; at each point of those it walks the *row*, which the
//! reductions run over. A row may have several dimensions. Values are scalar expressions in an arena without duplicates. An expression
//! is *lane-level* when it changes along the row, *row-level* when it does not. Where a value is
//! put together from pieces (a concatenation), the row is cut into segments with expressions of
//! their own. Nothing here knows an operator, a schedule or a language.

use std::collections::HashMap;

use autokernel_core::dtype::Dtype;

/// An expression of a [`Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub(crate) u32);

impl Id {
    /// The position in the arena; operands stand before their users.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Unary {
    Neg,
    Abs,
    Sqrt,
    Rsqrt,
    Recip,
    Exp,
    Expm1,
    Log,
    Log1p,
    Tanh,
    Erf,
    Sigmoid,
    Sin,
    Cos,
    /// Rounds to what a narrower element type holds.
    RoundTo(Dtype),
}

/// Functions of two numbers; minimum and maximum propagate NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Min,
    Max,
}

/// Comparisons, false where an operand is NaN except `Ne`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Compare {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

/// Functions of two truth values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Logic {
    And,
    Or,
    Xor,
}

/// How a row becomes one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Reduction {
    Sum,
    Max,
    Min,
}

/// A scalar expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expr {
    /// A number, as the bits of an `f64`.
    Const(u64),
    /// Index into [`Program::loads`].
    Load(usize),
    /// Whether a guard holds: an index into [`Program::guards`]. The same all along a row.
    Within(usize),
    /// An index as a number: an index into [`Program::positions`].
    Position(usize),
    /// A function of one number.
    Unary(Unary, Id),
    /// A function of two numbers.
    Binary(Binary, Id, Id),
    /// A truth value from two numbers.
    Compare(Compare, Id, Id),
    /// A truth value from two.
    Logic(Logic, Id, Id),
    /// The opposite truth value.
    Not(Id),
    /// The second operand where the first is true, else the third.
    Select(Id, Id, Id),
    /// Index into [`Program::reduces`].
    Reduce(usize),
    /// Index into [`Program::scans`]: what the row up to here, this place included, comes to.
    Scan(usize),
    /// Index into [`Program::totals`]; known once all rows are done.
    Total(usize),
}

/// Where a tensor is read or written: `offset + Σ stride[d] * variable[d]`, in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Number of the region's input or output; a load's number beyond the inputs is one of [`Program::products`],
    /// or from [`TABLES`] on one of [`Program::tables`].
    pub tensor: usize,
    /// Constant part.
    pub offset: i64,
    /// One stride for each dimension: the kept ones, [`Program::outer`], the one that vectors run along.
    pub strides: Vec<i64>,
    /// [`Program::lookups`] that are part of the index, with their strides.
    pub lookups: Vec<(usize, i64)>,
    /// Only where all these [`Program::guards`] hold is there anything to read; elsewhere it counts as zero.
    pub guards: Vec<usize>,
}

/// A condition on a place: `0 <= offset + Σ stride[d] * variable[d] < size`. It never depends on the row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Guard {
    /// Constant part.
    pub offset: i64,
    /// One stride for each dimension; those of the row are zero.
    pub strides: Vec<i64>,
    /// How many values are inside.
    pub size: u64,
}

/// A place as a number: `offset + Σ stride[d] * variable[d]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// Constant part.
    pub offset: i64,
    /// One stride for each dimension.
    pub strides: Vec<i64>,
}

/// Part of an index that is read from a tensor of whole numbers. What lies outside of `0..size` reads nothing:
/// a load that depends on it gives NaN.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lookup {
    /// Where the number stands.
    pub at: Access,
    /// Size of the dimension that it is an index of.
    pub size: u64,
    /// Whether negative numbers count from the end.
    pub wraps: bool,
    /// Whether it changes along the row.
    pub lane: bool,
}

/// The number of the first table as a tensor that is read.
pub const TABLES: usize = 1 << 32;

/// Numbers that are known before the kernel is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Table {
    /// Indices, each inside of what it is an index of.
    Whole(Vec<i64>),
    /// Values.
    Numbers(Vec<f64>),
}

/// A reduction over the row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reduce {
    /// How.
    pub kind: Reduction,
    /// What is reduced, for each segment.
    pub bodies: Vec<Id>,
}

/// How a row is folded up to each of its places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Folding {
    Sum,
    Product,
}

/// A fold along the row of which every step is wanted; never over a row in pieces.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scan {
    /// How.
    pub kind: Folding,
    /// What is folded.
    pub body: Id,
}

/// A value that leaves the program.
#[derive(Clone, Debug, PartialEq)]
pub enum Store {
    /// One element for each point of the row; one value for each segment.
    Lane(Access, Vec<Id>),
    /// One element for each row.
    Row(Access, Id),
    /// One element in all, from [`Program::totals`] and constants.
    Once(Access, Id),
}

impl Store {
    /// Where it goes.
    pub const fn access(&self) -> &Access {
        match self {
            Self::Lane(access, _) | Self::Row(access, _) | Self::Once(access, _) => access,
        }
    }

    fn access_mut(&mut self) -> &mut Access {
        match self {
            Self::Lane(access, _) | Self::Row(access, _) | Self::Once(access, _) => access,
        }
    }
}

/// Expressions without duplicates.
#[derive(Clone, Debug, Default)]
pub struct Arena {
    exprs: Vec<Expr>,
    lane: Vec<bool>,
    index: HashMap<Expr, Id>,
}

impl Arena {
    /// The id of an expression; `lane` says whether a load changes along the row.
    pub fn add(&mut self, expr: Expr, lane_load: bool) -> Id {
        if let Some(id) = self.index.get(&expr) {
            return *id;
        }
        let mut lane = lane_load;
        for_each_operand(expr, |operand| lane |= self.lane[operand.index()]);
        let id = Id(self.exprs.len() as u32);
        self.exprs.push(expr);
        self.lane.push(lane);
        self.index.insert(expr, id);
        id
    }

    /// The expression behind an id.
    pub fn get(&self, id: Id) -> Expr {
        self.exprs[id.index()]
    }

    /// Whether it changes along the row.
    pub fn is_lane(&self, id: Id) -> bool {
        self.lane[id.index()]
    }

    /// Whether it is a truth value.
    pub fn is_mask(&self, id: Id) -> bool {
        matches!(self.get(id), Expr::Within(_) | Expr::Compare(..) | Expr::Logic(..) | Expr::Not(_))
    }

    /// Number of expressions.
    pub const fn len(&self) -> usize {
        self.exprs.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.exprs.is_empty()
    }

    /// All ids, operands first.
    pub fn ids(&self) -> impl Iterator<Item = Id> + use<> {
        (0..self.exprs.len() as u32).map(Id)
    }
}

/// Calls `visit` with the direct operands; the bodies of reductions and scans are not operands.
pub fn for_each_operand(expr: Expr, mut visit: impl FnMut(Id)) {
    match expr {
        Expr::Const(_)
        | Expr::Load(_)
        | Expr::Within(_)
        | Expr::Position(_)
        | Expr::Reduce(_)
        | Expr::Scan(_)
        | Expr::Total(_) => {}
        Expr::Unary(_, a) | Expr::Not(a) => visit(a),
        Expr::Binary(_, a, b) | Expr::Compare(_, a, b) | Expr::Logic(_, a, b) => {
            visit(a);
            visit(b);
        }
        Expr::Select(a, b, c) => {
            visit(a);
            visit(b);
            visit(c);
        }
    }
}

/// A region as loops.
#[derive(Clone, Debug)]
pub struct Program {
    /// Sizes of the kept dimensions, outermost first.
    pub kept: Vec<u64>,
    /// Further dimensions of the row, walked around the one that vectors run along.
    pub outer: Vec<u64>,
    /// Length of the dimension that vectors run along: the row, or its innermost dimension.
    pub row: u64,
    /// Whether vectors run across rows instead: along a kept dimension, while the whole row is in `outer`.
    /// Each lane then has a row of its own.
    pub across: bool,
    /// Half-open pieces of the row, in order, without gaps.
    pub segments: Vec<(u64, u64)>,
    /// All expressions.
    pub arena: Arena,
    /// What is read.
    pub loads: Vec<Access>,
    /// Conditions on places.
    pub guards: Vec<Guard>,
    /// Places that are numbers.
    pub positions: Vec<Position>,
    /// Indices that are read.
    pub lookups: Vec<Lookup>,
    /// Constants that are read like tensors.
    pub tables: Vec<Table>,
    /// What is reduced; each depends only on loads and on reductions before it.
    pub reduces: Vec<Reduce>,
    /// What is folded step by step.
    pub scans: Vec<Scan>,
    /// What is summed over all rows; each is the same all along its row.
    pub totals: Vec<Id>,
    /// What is written.
    pub stores: Vec<Store>,
    /// Nodes of the region whose results are at hand a tile at a time: as loads they count on from the
    /// inputs, and their rows do not lie one behind the other.
    pub products: Vec<usize>,
    /// Whether numbers are double precision.
    pub wide: bool,
}

impl Program {
    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.kept.iter().product()
    }

    /// Whether anything depends on where a row begins and ends.
    pub fn needs_rows(&self) -> bool {
        !self.reduces.is_empty() || !self.scans.is_empty()
    }

    /// Number of places in the iteration space.
    pub fn points(&self) -> u64 {
        self.rows() * self.outer.iter().product::<u64>() * self.row
    }

    /// Merges neighbouring dimensions that every access walks as one. `row_dims` is the number of
    /// trailing dimensions that make the row; returns how many are left of them.
    pub(crate) fn coalesce(&mut self, sizes: &mut Vec<u64>, mut row_dims: usize) -> usize {
        let mut d = sizes.len().saturating_sub(1);
        while d > 0 {
            let outer = d - 1;
            let first_row = sizes.len() - row_dims;
            let crosses = outer < first_row && d >= first_row;
            let may_cross = !self.needs_rows() && self.segments.len() == 1;
            let inner = sizes[d] as i64;
            let mergeable =
                (!crosses || may_cross) && self.strides().all(|strides| strides[outer] == strides[d] * inner);
            if mergeable {
                sizes[outer] *= sizes[d];
                sizes.remove(d);
                for strides in self.strides_mut() {
                    strides.remove(outer);
                }
                if !crosses && d >= first_row {
                    row_dims -= 1;
                }
            }
            d -= 1;
            d = d.min(sizes.len() - 1);
        }
        row_dims
    }

    /// The strides of everything that depends on the place.
    fn strides(&self) -> impl Iterator<Item = &Vec<i64>> {
        let lookups = self.lookups.iter().map(|lookup| &lookup.at);
        let accesses = self.loads.iter().chain(lookups).chain(self.stores.iter().map(Store::access));
        accesses
            .map(|access| &access.strides)
            .chain(self.guards.iter().map(|guard| &guard.strides))
            .chain(self.positions.iter().map(|position| &position.strides))
    }

    pub(crate) fn strides_mut(&mut self) -> impl Iterator<Item = &mut Vec<i64>> {
        let lookups = self.lookups.iter_mut().map(|lookup| &mut lookup.at);
        let stores = self.stores.iter_mut().map(Store::access_mut);
        let accesses = self.loads.iter_mut().chain(lookups).chain(stores);
        accesses
            .map(|access| &mut access.strides)
            .chain(self.guards.iter_mut().map(|guard| &mut guard.strides))
            .chain(self.positions.iter_mut().map(|position| &mut position.strides))
    }

    /// How a load reads along the row, its row-level guards and lookups aside.
    pub fn row_stride(&self, access: &Access) -> i64 {
        access.strides.last().copied().unwrap_or(0)
    }

    /// Whether an access looks something up that changes along the row.
    pub fn scatters(&self, access: &Access) -> bool {
        access.lookups.iter().any(|(lookup, _)| self.lookups[*lookup].lane)
    }
}
