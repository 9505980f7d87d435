//! One pointwise operator at one index: its arguments as expressions, and ways to build on them.

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::Arg;
use autokernel_core::region::{Operand, RegionNode};

use super::views::argument;
use super::{Lower, Stop, Unsupported, exact};
use crate::affine::Affine;
use crate::loops::{Binary, Compare, Expr, Id, Logic, Unary};

pub(crate) struct Call<'l, 'r> {
    lower: &'l mut Lower<'r>,
    node: &'l RegionNode,
    index: &'l [Affine],
}

impl<'l, 'r> Call<'l, 'r> {
    pub(super) fn new(lower: &'l mut Lower<'r>, node: &'l RegionNode, index: &'l [Affine]) -> Self {
        Self { lower, node, index }
    }

    /// Name and overload, without the namespace.
    pub(crate) fn name(&self) -> (&'l str, &'l str) {
        let op = self.node.op.as_str();
        op.strip_prefix("aten.").unwrap_or(op).split_once('.').unwrap_or((op, ""))
    }

    pub(crate) fn unsupported(&self, reason: &str) -> Stop {
        Unsupported::new(&self.node.op, reason).into()
    }

    /// Whether an argument is there and is not `None`.
    pub(crate) fn given(&self, position: usize, keyword: &str) -> bool {
        !matches!(argument(self.node, position, keyword), None | Some(Arg::None))
    }

    /// An argument as a value: a tensor's element at this place, or a number.
    fn value(&mut self, position: usize, keyword: &str) -> Result<Id, Stop> {
        match argument(self.node, position, keyword) {
            Some(Arg::Ref(operand)) => self.element(*operand),
            Some(Arg::Int(value)) => Ok(self.constant(*value as f64)),
            Some(Arg::Float(value)) => Ok(self.constant(*value)),
            Some(Arg::Bool(value)) => Ok(self.constant(f64::from(u8::from(*value)))),
            _ => Err(self.unsupported("has an argument that is no tensor and no number")),
        }
    }

    fn element(&mut self, operand: Operand) -> Result<Id, Stop> {
        let meta = self.lower.meta(operand, &self.node.op)?;
        let index = self.lower.broadcast(meta, self.index);
        self.lower.pull(operand, 0, &index)
    }

    pub(crate) fn number(&mut self, position: usize) -> Result<Id, Stop> {
        self.number_or(position, "")
    }

    pub(crate) fn number_or(&mut self, position: usize, keyword: &str) -> Result<Id, Stop> {
        let id = self.value(position, keyword)?;
        Ok(self.lower.as_number(id))
    }

    /// The element type that the operator returns.
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        self.node.value.tensor().map(|meta| meta.dtype)
    }

    pub(crate) fn truth(&mut self, position: usize) -> Result<Id, Stop> {
        self.must_be_exact(position)?;
        let id = self.value(position, "")?;
        Ok(self.lower.as_truth(id))
    }

    /// Refuses to look closely at a number that was rounded inside the region (see [`mod@crate::op`]).
    pub(crate) fn must_be_exact(&self, position: usize) -> Result<(), Stop> {
        match self.node.args.get(position) {
            Some(Arg::Ref(operand)) if !exact::is_exact(self.lower.region, *operand) => {
                Err(self.unsupported(exact::TIPPED))
            }
            _ => Ok(()),
        }
    }

    /// An operand of a comparison. What f32 cannot hold exactly is refused, and a number is rounded to
    /// the type of the tensor that it is compared with, as PyTorch does.
    pub(crate) fn comparable(&mut self, position: usize) -> Result<Id, Stop> {
        let meta = |position: usize| match self.node.args.get(position) {
            Some(Arg::Ref(operand)) => self.lower.meta(*operand, &self.node.op).map(Some),
            _ => Ok(None),
        };
        let (mine, other) = (meta(position)?, meta(1 - position)?);
        let whole = |dtype: Dtype| !dtype.is_float() && dtype != Dtype::Bool;
        if mine.is_some_and(|meta| exact::is_wide_integer(meta.dtype)) {
            return Err(self.unsupported("compares wide integers"));
        }
        if let (None, Some(meta)) = (mine, other)
            && whole(meta.dtype)
            && !matches!(self.node.args.get(position), Some(Arg::Int(0..=127) | Arg::Float(_)))
        {
            return Err(self.unsupported("compares small integers with a number that they may not hold"));
        }
        let id = self.number(position)?;
        let constant = matches!(self.lower.arena.get(id), Expr::Const(_));
        if !constant {
            self.must_be_exact(position)?;
        }
        // A tensor of no dimensions counts as a number beside one that has some.
        let narrow = match (mine, other) {
            (None, Some(other)) => other.dtype,
            (Some(mine), Some(other)) if mine.shape.is_empty() && !other.shape.is_empty() => other.dtype,
            (Some(mine), _) if constant => mine.dtype,
            _ => return Ok(id),
        };
        let rounds = matches!(narrow, Dtype::Bf16 | Dtype::F16)
            && mine.is_none_or(|meta| constant || meta.dtype != narrow);
        Ok(if rounds { self.unary(Unary::RoundTo(narrow), id) } else { id })
    }

    /// A number that must stand in the graph itself.
    pub(crate) fn scalar(&self, position: usize, keyword: &str, default: f64) -> Result<f64, Stop> {
        match argument(self.node, position, keyword) {
            None | Some(Arg::None) => Ok(default),
            Some(Arg::Int(value)) => Ok(*value as f64),
            Some(Arg::Float(value)) => Ok(*value),
            Some(_) => Err(self.unsupported("has an argument that is no number")),
        }
    }

    pub(crate) fn word(&self, position: usize, keyword: &str) -> Option<&'l str> {
        match argument(self.node, position, keyword) {
            Some(Arg::Str(word)) => Some(word),
            _ => None,
        }
    }

    /// `_to_copy`: rounds where the new type is narrower.
    pub(crate) fn cast(&mut self) -> Result<Id, Stop> {
        let x = self.value(0, "self")?;
        let dtype = self.dtype();
        if dtype == Some(Dtype::Bool) {
            self.must_be_exact(0)?;
        }
        Ok(match dtype {
            Some(Dtype::Bool) => self.lower.as_truth(x),
            Some(dtype @ (Dtype::Bf16 | Dtype::F16)) => {
                let x = self.lower.as_number(x);
                let known = matches!(self.node.args.first(), Some(Arg::Ref(operand))
                    if matches!(operand, Operand::Input(_)) && self.lower.meta(*operand, &self.node.op)?.dtype == dtype);
                if known { x } else { self.unary(Unary::RoundTo(dtype), x) }
            }
            _ => self.lower.as_number(x),
        })
    }

    /// A tensor of one value.
    pub(super) fn fill(&mut self) -> Result<Id, Stop> {
        let (name, _) = self.name();
        let value = match name {
            "zeros_like" => 0.0,
            "ones_like" => 1.0,
            "scalar_tensor" => self.scalar(0, "s", f64::NAN)?,
            _ => match argument(self.node, 1, "fill_value") {
                Some(Arg::Bool(value)) => f64::from(u8::from(*value)),
                _ => self.scalar(1, "fill_value", f64::NAN)?,
            },
        };
        let dtype = self.dtype();
        let id = self.constant(value);
        Ok(if dtype == Some(Dtype::Bool) { self.lower.as_truth(id) } else { id })
    }

    pub(crate) fn constant(&mut self, value: f64) -> Id {
        self.lower.constant(value)
    }

    pub(crate) fn scaled(&mut self, x: Id, factor: f64) -> Id {
        if factor - 1.0 == 0.0 {
            return x;
        }
        let factor = self.constant(factor);
        self.binary(Binary::Mul, x, factor)
    }

    pub(crate) fn clamped(&mut self, x: Id, low: f64, high: f64) -> Id {
        let (low, high) = (self.constant(low), self.constant(high));
        let raised = self.binary(Binary::Max, x, low);
        self.binary(Binary::Min, raised, high)
    }

    pub(crate) fn unary(&mut self, op: Unary, a: Id) -> Id {
        self.lower.unary(op, a)
    }

    pub(crate) fn binary(&mut self, op: Binary, a: Id, b: Id) -> Id {
        self.lower.binary(op, a, b)
    }

    pub(crate) fn compare(&mut self, op: Compare, a: Id, b: Id) -> Id {
        self.lower.arena.add(Expr::Compare(op, a, b), false)
    }

    pub(crate) fn logic(&mut self, op: Logic, a: Id, b: Id) -> Id {
        self.lower.logic(op, a, b)
    }

    pub(crate) fn not(&mut self, a: Id) -> Id {
        self.lower.arena.add(Expr::Not(a), false)
    }

    pub(crate) fn select(&mut self, mask: Id, a: Id, b: Id) -> Id {
        self.lower.arena.add(Expr::Select(mask, a, b), false)
    }
}
