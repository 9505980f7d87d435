//! Integer expressions of a header: the tree, its canonical text, and the names that it mentions.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::parse::{self, ExprError};

/// A total integer expression over parameters, the metadata of tensors, and the device.
///
/// Arithmetic is that of [`super::evaluate`]. [`fmt::Display`] prints canonical text with the fewest
/// parentheses; reading that text gives an equal expression.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Expr(pub(super) Node);

/// A node of the tree. The reader never makes a negative [`Node::Int`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Node {
    Int(i64),
    Param(String),
    Tensor(String, Field),
    Device(DeviceField),
    Unary(Unary, Box<Node>),
    Binary(Binary, Box<Node>, Box<Node>),
    Call(Function, Vec<Node>),
}

/// What may be asked of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Field {
    Size(i64),
    Stride(i64),
    Numel,
    Itemsize,
    Dim,
}

/// What may be asked of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum DeviceField {
    Sms,
    Shared,
    Cores,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Unary {
    Neg,
    Not,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Binary {
    Or,
    And,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Add,
    Sub,
    Mul,
    Div,
    Rem,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Function {
    Ceildiv,
    Min,
    Max,
    NextPow2,
}

/// How tightly things bind, as in Python: `or`, `and`, `not`, comparisons, sums, products, signs, atoms.
pub(super) mod binding {
    pub(in crate::plan) const OR: u8 = 1;
    pub(in crate::plan) const AND: u8 = 2;
    pub(in crate::plan) const NOT: u8 = 3;
    pub(in crate::plan) const COMPARISON: u8 = 4;
    pub(in crate::plan) const SUM: u8 = 5;
    pub(in crate::plan) const PRODUCT: u8 = 6;
    pub(in crate::plan) const SIGN: u8 = 7;
    pub(in crate::plan) const ATOM: u8 = 8;
}

impl Binary {
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Or => "or",
            Self::And => "and",
            Self::Eq => "==",
            Self::Ne => "!=",
            Self::Lt => "<",
            Self::Le => "<=",
            Self::Gt => ">",
            Self::Ge => ">=",
            Self::Add => "+",
            Self::Sub => "-",
            Self::Mul => "*",
            Self::Div => "/",
            Self::Rem => "%",
        }
    }

    pub(super) const fn binds(self) -> u8 {
        match self {
            Self::Or => binding::OR,
            Self::And => binding::AND,
            Self::Eq | Self::Ne | Self::Lt | Self::Le | Self::Gt | Self::Ge => binding::COMPARISON,
            Self::Add | Self::Sub => binding::SUM,
            Self::Mul | Self::Div | Self::Rem => binding::PRODUCT,
        }
    }

    /// All of them, for the reader and for tests.
    pub(super) const ALL: [Self; 13] = [
        Self::Or,
        Self::And,
        Self::Eq,
        Self::Ne,
        Self::Lt,
        Self::Le,
        Self::Gt,
        Self::Ge,
        Self::Add,
        Self::Sub,
        Self::Mul,
        Self::Div,
        Self::Rem,
    ];
}

impl Function {
    pub(super) const ALL: [Self; 4] = [Self::Ceildiv, Self::Min, Self::Max, Self::NextPow2];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ceildiv => "ceildiv",
            Self::Min => "min",
            Self::Max => "max",
            Self::NextPow2 => "next_pow2",
        }
    }
}

impl DeviceField {
    pub(super) const ALL: [Self; 3] = [Self::Sms, Self::Shared, Self::Cores];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sms => "sms",
            Self::Shared => "shared",
            Self::Cores => "cores",
        }
    }
}

impl Node {
    const fn binds(&self) -> u8 {
        match self {
            Self::Binary(op, ..) => op.binds(),
            Self::Unary(Unary::Not, _) => binding::NOT,
            Self::Unary(Unary::Neg, _) => binding::SIGN,
            _ => binding::ATOM,
        }
    }

    /// Levels of the tree below and including this node.
    pub(super) fn depth(&self) -> usize {
        1 + match self {
            Self::Unary(_, operand) => operand.depth(),
            Self::Binary(_, left, right) => left.depth().max(right.depth()),
            Self::Call(_, args) => args.iter().map(Self::depth).max().unwrap_or(0),
            Self::Int(_) | Self::Param(_) | Self::Tensor(..) | Self::Device(_) => 0,
        }
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, at_least: u8) -> fmt::Result {
        if self.binds() < at_least {
            f.write_str("(")?;
            self.write(f, 0)?;
            return f.write_str(")");
        }
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Param(name) => f.write_str(name),
            Self::Tensor(name, field) => write!(f, "{name}.{field}"),
            Self::Device(field) => write!(f, "device.{}", field.name()),
            Self::Unary(Unary::Neg, operand) => {
                f.write_str("-")?;
                operand.write(f, binding::SIGN)
            }
            Self::Unary(Unary::Not, operand) => {
                f.write_str("not ")?;
                operand.write(f, binding::NOT)
            }
            Self::Binary(op, left, right) => {
                // Equal levels group to the left, except comparisons, which do not group at all.
                let binds = op.binds();
                left.write(f, if binds == binding::COMPARISON { binds + 1 } else { binds })?;
                write!(f, " {} ", op.text())?;
                right.write(f, binds + 1)
            }
            Self::Call(function, args) => {
                write!(f, "{}(", function.name())?;
                for (index, arg) in args.iter().enumerate() {
                    f.write_str(if index == 0 { "" } else { ", " })?;
                    arg.write(f, 0)?;
                }
                f.write_str(")")
            }
        }
    }

    fn visit<'a>(&'a self, visit: &mut impl FnMut(Mention<'a>)) {
        match self {
            Self::Param(name) => visit(Mention::Param(name)),
            Self::Tensor(name, _) => visit(Mention::Tensor(name)),
            Self::Int(_) | Self::Device(_) => {}
            Self::Unary(_, operand) => operand.visit(visit),
            Self::Binary(_, left, right) => {
                left.visit(visit);
                right.visit(visit);
            }
            Self::Call(_, args) => args.iter().for_each(|arg| arg.visit(visit)),
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(index) => write!(f, "size({index})"),
            Self::Stride(index) => write!(f, "stride({index})"),
            Self::Numel => f.write_str("numel"),
            Self::Itemsize => f.write_str("itemsize"),
            Self::Dim => f.write_str("dim"),
        }
    }
}

/// A name inside an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mention<'a> {
    /// Stands for a number.
    Param(&'a str),
    /// Something is asked of it.
    Tensor(&'a str),
}

impl Expr {
    /// The name, where the expression is nothing but one.
    pub(crate) fn lone_name(&self) -> Option<&str> {
        match &self.0 {
            Node::Param(name) => Some(name),
            _ => None,
        }
    }

    /// Calls `visit` with every name, left to right.
    pub(crate) fn for_each_name<'a>(&'a self, visit: &mut impl FnMut(Mention<'a>)) {
        self.0.visit(visit);
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, 0)
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write(f, 0)
    }
}

/// The canonical text: a tree printed as a tree tells a reader less.
impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{self}`")
    }
}

impl FromStr for Expr {
    type Err = ExprError;

    fn from_str(text: &str) -> Result<Self, ExprError> {
        parse::expression(text)
    }
}

impl TryFrom<String> for Expr {
    type Error = ExprError;

    fn try_from(text: String) -> Result<Self, ExprError> {
        text.parse()
    }
}

impl From<Expr> for String {
    fn from(expr: Expr) -> Self {
        expr.to_string()
    }
}
