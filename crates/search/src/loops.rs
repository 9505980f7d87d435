//! The middle representation: a region as loops over an iteration space.
//!
//! A [`Program`] walks the *kept* dimensions; at each point of those it walks the *row*, which the
//! reductions run over. Values are scalar expressions in an arena without duplicates. An expression
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
}

/// Where a tensor is read or written: `offset + Σ stride[d] * variable[d]`, in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Number of the region's input or output; a load's number beyond the inputs is one of [`Program::products`].
    pub tensor: usize,
    /// Constant part.
    pub offset: i64,
    /// One stride for each dimension: the kept ones, then the row's.
    pub strides: Vec<i64>,
}

/// A reduction over the row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reduce {
    /// How.
    pub kind: Reduction,
    /// What is reduced, for each segment.
    pub bodies: Vec<Id>,
}

/// A value that leaves the program.
#[derive(Clone, Debug, PartialEq)]
pub enum Store {
    /// One element for each point of the row; one value for each segment.
    Lane(Access, Vec<Id>),
    /// One element for each row.
    Row(Access, Id),
}

impl Store {
    /// Where it goes.
    pub const fn access(&self) -> &Access {
        match self {
            Self::Lane(access, _) | Self::Row(access, _) => access,
        }
    }

    fn access_mut(&mut self) -> &mut Access {
        match self {
            Self::Lane(access, _) | Self::Row(access, _) => access,
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
        matches!(self.get(id), Expr::Compare(..) | Expr::Logic(..) | Expr::Not(_))
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

/// Calls `visit` with the direct operands; the bodies of a reduction are not operands.
pub fn for_each_operand(expr: Expr, mut visit: impl FnMut(Id)) {
    match expr {
        Expr::Const(_) | Expr::Load(_) | Expr::Reduce(_) => {}
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
    /// Length of the row.
    pub row: u64,
    /// Half-open pieces of the row, in order, without gaps.
    pub segments: Vec<(u64, u64)>,
    /// All expressions.
    pub arena: Arena,
    /// What is read.
    pub loads: Vec<Access>,
    /// What is reduced; each depends only on loads and on reductions before it.
    pub reduces: Vec<Reduce>,
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

    /// Merges neighbouring dimensions that every access walks as one. `row_dims` is the number of
    /// trailing dimensions that make the row; returns how many are left of them.
    pub(crate) fn coalesce(&mut self, sizes: &mut Vec<u64>, mut row_dims: usize) -> usize {
        let mut d = sizes.len().saturating_sub(1);
        while d > 0 {
            let outer = d - 1;
            let first_row = sizes.len() - row_dims;
            let crosses = outer < first_row && d >= first_row;
            let may_cross = self.reduces.is_empty() && self.segments.len() == 1;
            let inner = sizes[d] as i64;
            let mergeable = (!crosses || may_cross)
                && self.accesses().all(|access| access.strides[outer] == access.strides[d] * inner);
            if mergeable {
                sizes[outer] *= sizes[d];
                sizes.remove(d);
                for access in self.loads.iter_mut().chain(self.stores.iter_mut().map(Store::access_mut)) {
                    access.strides.remove(outer);
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

    fn accesses(&self) -> impl Iterator<Item = &Access> {
        self.loads.iter().chain(self.stores.iter().map(Store::access))
    }
}
