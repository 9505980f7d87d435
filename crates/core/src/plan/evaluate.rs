//! The value of an expression: `i64`, checked, with Python's floor division.
//!
//! Every expression has a value or an error; nothing here can panic or run for long. Comparisons,
//! `and`, `or` and `not` give 0 or 1, and `and` and `or` leave their right side alone where the left
//! one decides, so that a condition can guard a division.

use serde::{Deserialize, Serialize};

use crate::graph::TensorMeta;
use crate::kernel_file::Params;

use super::expr::{Binary, DeviceField, Expr, Field, Function, Node, Unary};

/// What expressions may ask of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Streaming multiprocessors; zero on a CPU.
    pub sms: i64,
    /// Bytes of shared memory that one block may use; zero on a CPU.
    pub shared: i64,
    /// CPU cores.
    pub cores: i64,
}

/// What the names of an expression mean.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    /// Tensors by name, `in0` and so on.
    pub tensors: &'a [(String, TensorMeta)],
    /// Values of parameters.
    pub params: &'a Params,
    /// The device.
    pub device: &'a Device,
}

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum EvalError {
    #[error("division by zero")]
    DivisionByZero,
    #[error("{operation} leaves the range of 64-bit integers")]
    Overflow { operation: &'static str },
    #[error("no parameter is called `{name}`")]
    UnknownParam { name: String },
    #[error("no tensor is called `{name}`")]
    UnknownTensor { name: String },
    #[error("`{tensor}` has {rank} dimensions, {index} is none of them")]
    Dimension { tensor: String, index: i64, rank: usize },
}

impl Expr {
    /// The value in `scope`.
    pub fn evaluate(&self, scope: &Scope<'_>) -> Result<i64, EvalError> {
        scope.value(&self.0)
    }
}

impl Scope<'_> {
    fn value(&self, node: &Node) -> Result<i64, EvalError> {
        match node {
            Node::Int(value) => Ok(*value),
            Node::Param(name) => {
                self.params.get(name).copied().ok_or_else(|| EvalError::UnknownParam { name: name.clone() })
            }
            Node::Tensor(name, field) => self.field(name, *field),
            Node::Device(DeviceField::Sms) => Ok(self.device.sms),
            Node::Device(DeviceField::Shared) => Ok(self.device.shared),
            Node::Device(DeviceField::Cores) => Ok(self.device.cores),
            Node::Unary(Unary::Neg, operand) => {
                self.value(operand)?.checked_neg().ok_or(EvalError::Overflow { operation: "-" })
            }
            Node::Unary(Unary::Not, operand) => Ok(i64::from(self.value(operand)? == 0)),
            Node::Binary(Binary::And, left, right) => {
                Ok(i64::from(self.value(left)? != 0 && self.value(right)? != 0))
            }
            Node::Binary(Binary::Or, left, right) => {
                Ok(i64::from(self.value(left)? != 0 || self.value(right)? != 0))
            }
            Node::Binary(op, left, right) => binary(*op, self.value(left)?, self.value(right)?),
            Node::Call(function, args) => {
                let args = args.iter().map(|arg| self.value(arg)).collect::<Result<Vec<_>, _>>()?;
                call(*function, &args)
            }
        }
    }

    fn field(&self, name: &str, field: Field) -> Result<i64, EvalError> {
        let (_, meta) = self
            .tensors
            .iter()
            .find(|(known, _)| known == name)
            .ok_or_else(|| EvalError::UnknownTensor { name: name.to_owned() })?;
        let value = match field {
            Field::Size(index) => pick(name, &meta.shape, index)?,
            Field::Stride(index) => pick(name, &meta.stride, index)?,
            // Not `meta.numel()`, which trusts that the product fits.
            Field::Numel => {
                let product = meta.shape.iter().try_fold(1_u64, |product, n| product.checked_mul(*n));
                product.ok_or(EvalError::Overflow { operation: "numel" })?
            }
            Field::Itemsize => meta.dtype.size(),
            Field::Dim => meta.shape.len() as u64,
        };
        i64::try_from(value).map_err(|_| EvalError::Overflow { operation: "the size of a tensor" })
    }
}

/// One entry of a shape or of strides; negative indices count from the end.
fn pick(tensor: &str, values: &[u64], index: i64) -> Result<u64, EvalError> {
    let rank = values.len();
    let place = if index < 0 { index.checked_add_unsigned(rank as u64) } else { Some(index) };
    place
        .and_then(|place| usize::try_from(place).ok())
        .and_then(|place| values.get(place).copied())
        .ok_or_else(|| EvalError::Dimension { tensor: tensor.to_owned(), index, rank })
}

fn binary(op: Binary, left: i64, right: i64) -> Result<i64, EvalError> {
    let value = match op {
        Binary::Add => left.checked_add(right),
        Binary::Sub => left.checked_sub(right),
        Binary::Mul => left.checked_mul(right),
        Binary::Div => floor_div(left, right)?,
        Binary::Rem => Some(floor_rem(left, right)?),
        Binary::Eq => Some(i64::from(left == right)),
        Binary::Ne => Some(i64::from(left != right)),
        Binary::Lt => Some(i64::from(left < right)),
        Binary::Le => Some(i64::from(left <= right)),
        Binary::Gt => Some(i64::from(left > right)),
        Binary::Ge => Some(i64::from(left >= right)),
        Binary::And => Some(i64::from(left != 0 && right != 0)),
        Binary::Or => Some(i64::from(left != 0 || right != 0)),
    };
    value.ok_or(EvalError::Overflow { operation: op.text() })
}

fn floor_div(left: i64, right: i64) -> Result<Option<i64>, EvalError> {
    let remainder = floor_rem(left, right)?;
    // The floored remainder has the divisor's sign, so the rounded quotient exceeds the floor by
    // one exactly where the signs of the operands differ and something is left over.
    let quotient = left.checked_div(right);
    Ok(quotient.map(|q| if remainder != 0 && (left < 0) != (right < 0) { q - 1 } else { q }))
}

fn floor_rem(left: i64, right: i64) -> Result<i64, EvalError> {
    if right == 0 {
        return Err(EvalError::DivisionByZero);
    }
    // Wrapping: the one case that overflows, i64::MIN % -1, is zero.
    let remainder = left.wrapping_rem(right);
    Ok(if remainder != 0 && (remainder < 0) != (right < 0) { remainder + right } else { remainder })
}

fn call(function: Function, args: &[i64]) -> Result<i64, EvalError> {
    let overflow = EvalError::Overflow { operation: function.name() };
    let value = match (function, args) {
        (Function::Ceildiv, &[left, right]) => {
            let part = i64::from(floor_rem(left, right)? != 0);
            floor_div(left, right)?.and_then(|quotient| quotient.checked_add(part))
        }
        (Function::NextPow2, &[value]) => {
            let power = u64::try_from(value.max(1)).ok().and_then(u64::checked_next_power_of_two);
            power.and_then(|power| i64::try_from(power).ok())
        }
        (Function::Min, args) => args.iter().copied().min(),
        (Function::Max, args) => args.iter().copied().max(),
        // The reader checks the number of arguments.
        (Function::Ceildiv | Function::NextPow2, _) => None,
    };
    value.ok_or(overflow)
}
