//! The table of ATen operators: what is legal in a region, and what a pointwise operator means.
//!
//! Semantics follow PyTorch's CPU kernels, NaN and infinities included. *Promotion*: numbers are
//! computed in f32 (f64 when the region's floats are f64), whatever narrower type an operator
//! returns; only an explicit cast rounds inside a region, and every store rounds to its output's
//! type. Operators that return integers are not legal, since f32 cannot carry them.
//!
//! *Jumps*: a comparison, a sign and a truth value of a number change by a whole step when what they
//! look at moves by one rounding, and two honest kernels round differently. So they may only look at
//! numbers that nothing has rounded since they came into the region ([`keeps_numbers`]); on anything
//! computed a region ends before them. Continuous operators that choose (`relu`, `clamp`, `maximum`)
//! are no jumps, and neither is `isnan`.

use autokernel_core::dtype::Dtype;

use crate::loops::{Binary, Compare, Id, Logic, Unary};
use crate::lower::{Call, Stop};

/// What kind of work an operator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// One number from those at the same place.
    Pointwise,
    /// The same, through a function that costs tens of instructions.
    Transcendental,
    /// A tensor of one value.
    Fill,
    /// The same numbers at other places; free in PyTorch.
    View,
    /// The same numbers in a new tensor.
    Copy,
    /// Several tensors one after another.
    Concat,
    /// The same numbers, and perhaps constants, at places that no view describes.
    Place,
    /// One number from a small window.
    Window,
    /// Numbers at places that stand in a tensor.
    Lookup,
    /// A row becomes one number.
    Reduction,
    /// A row becomes the folds of its beginnings.
    Scan,
    /// Reductions and pointwise work in one operator.
    Composite,
    /// One number from that at the same place and some of its channel; several results.
    Channelwise,
    /// A loss of each row, or of all rows, against the number of its class.
    Loss,
    /// Several views of one tensor.
    Split,
    /// One result of several.
    Pick,
    /// Rows of one matrix times columns of another; see [`mod@crate::product`].
    Product,
}

impl Class {
    /// Whether PyTorch does no work for it beyond the call.
    pub const fn is_free(self) -> bool {
        matches!(self, Self::View | Self::Split | Self::Pick)
    }
}

/// The class of an operator, `None` where a region must end.
pub fn class(op: &str) -> Option<Class> {
    if op == "getitem" {
        return Some(Class::Pick);
    }
    let (name, overload) = op.strip_prefix("aten.")?.split_once('.')?;
    Some(match name {
        "add" | "sub" | "mul" | "rsub" | "neg" | "abs" | "sqrt" | "rsqrt" | "reciprocal" | "square"
        | "relu" | "leaky_relu" | "hardtanh" | "hardsigmoid" | "hardswish" | "clamp" | "clamp_min"
        | "clamp_max" | "maximum" | "minimum" | "where" | "eq" | "ne" | "lt" | "le" | "gt" | "ge"
        | "logical_and" | "logical_or" | "logical_not" | "logical_xor" | "bitwise_and" | "bitwise_or"
        | "bitwise_not" | "masked_fill" | "_to_copy" | "isnan" | "sign" | "threshold" => Class::Pointwise,
        "div" if overload != "Tensor_mode" && overload != "Scalar_mode" => Class::Pointwise,
        "pow" | "exp" | "expm1" | "log" | "log1p" | "log2" | "exp2" | "tanh" | "sigmoid" | "silu"
        | "gelu" | "elu" | "softplus" | "mish" | "sin" | "cos" | "erf" => Class::Transcendental,
        "full" | "full_like" | "zeros_like" | "ones_like" | "scalar_tensor" => Class::Fill,
        "view" if overload == "default" => Class::View,
        "_unsafe_view" | "reshape" | "unsqueeze" | "squeeze" | "flatten" | "alias" | "detach"
        | "transpose" | "t" | "permute" | "expand" | "slice" | "select" => Class::View,
        "clone" | "contiguous" => Class::Copy,
        "cat" | "stack" => Class::Concat,
        "flip" | "roll" | "repeat" | "constant_pad_nd" => Class::Place,
        "max_pool2d_with_indices" | "avg_pool2d" | "upsample_nearest2d" | "upsample_bilinear2d" => {
            Class::Window
        }
        "nll_loss_forward" => Class::Loss,
        "embedding" | "index_select" | "gather" | "index" => Class::Lookup,
        "sum" | "mean" | "amax" | "amin" | "linalg_vector_norm" | "logsumexp" | "argmax" | "argmin" => {
            Class::Reduction
        }
        "cumsum" | "cumprod" => Class::Scan,
        "var" | "std" if overload == "correction" => Class::Reduction,
        "_softmax" | "_log_softmax" | "native_layer_norm" | "native_group_norm" => Class::Composite,
        "var_mean" if overload == "correction" => Class::Composite,
        "_native_batch_norm_legit_no_training" => Class::Channelwise,
        "split" | "split_with_sizes" | "unbind" => Class::Split,
        "mm" | "addmm" | "linear" if overload == "default" => Class::Product,
        _ => return None,
    })
}

/// Whether every number that an operator returns is one that it was given, up to its sign, or a
/// constant: comparing after it is as exact as before. Its class may say so already.
pub fn keeps_numbers(op: &str) -> bool {
    let moves = |class: Class| {
        class.is_free()
            || matches!(class, Class::Fill | Class::Copy | Class::Concat | Class::Place | Class::Lookup)
    };
    let name = op.split('.').nth(1).unwrap_or(op);
    class(op).is_some_and(moves)
        || matches!(
            name,
            "neg"
                | "abs"
                | "relu"
                | "maximum"
                | "minimum"
                | "clamp"
                | "clamp_min"
                | "clamp_max"
                | "hardtanh"
                | "threshold"
                | "where"
                | "masked_fill"
                | "sign"
                | "amax"
                | "amin"
                | "max_pool2d_with_indices"
                | "upsample_nearest2d"
                | "_to_copy"
        )
}

const SQRT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// `sqrt(2 / π)`, of the tanh approximation of the Gaussian error linear unit.
const TANH_SCALE: f64 = 0.797_884_560_802_865_4;

/// The value of a pointwise operator at the place that `call` stands for.
pub(crate) fn pointwise(call: &mut Call<'_, '_>) -> Result<Id, Stop> {
    let (name, overload) = call.name();
    match name {
        "add" | "sub" | "rsub" => sum(call, name),
        "where" => {
            let (mask, a, b) = (call.truth(0)?, call.number(1)?, call.number(2)?);
            Ok(call.select(mask, a, b))
        }
        "masked_fill" => {
            let (mask, a, b) = (call.truth(1)?, call.number(2)?, call.number(0)?);
            Ok(call.select(mask, a, b))
        }
        "eq" | "ne" | "lt" | "le" | "gt" | "ge" => compare(call, name),
        "logical_and" | "bitwise_and" => logic(call, Logic::And),
        "logical_or" | "bitwise_or" => logic(call, Logic::Or),
        "logical_xor" => logic(call, Logic::Xor),
        "logical_not" | "bitwise_not" => {
            let a = call.truth(0)?;
            Ok(call.not(a))
        }
        "mul" => binary(call, Binary::Mul),
        "div" => binary(call, Binary::Div),
        "maximum" => binary(call, Binary::Max),
        "minimum" => binary(call, Binary::Min),
        "pow" => power(call, overload),
        "clamp" | "hardtanh" | "clamp_min" | "clamp_max" => clamp(call, name),
        "relu" => {
            let (x, zero) = (call.number(0)?, call.constant(0.0));
            Ok(call.binary(Binary::Max, x, zero))
        }
        "_to_copy" => call.cast(),
        _ => {
            let x = call.number(0)?;
            match unary(name) {
                Some(function) => Ok(call.unary(function, x)),
                None => activation(call, name, x),
            }
        }
    }
}

fn unary(name: &str) -> Option<Unary> {
    Some(match name {
        "neg" => Unary::Neg,
        "abs" => Unary::Abs,
        "sqrt" => Unary::Sqrt,
        "rsqrt" => Unary::Rsqrt,
        "reciprocal" => Unary::Recip,
        "exp" => Unary::Exp,
        "expm1" => Unary::Expm1,
        "log" => Unary::Log,
        "log1p" => Unary::Log1p,
        "tanh" => Unary::Tanh,
        "erf" => Unary::Erf,
        "sigmoid" => Unary::Sigmoid,
        "sin" => Unary::Sin,
        "cos" => Unary::Cos,
        _ => return None,
    })
}

/// `a ± alpha * b`, and reversed.
fn sum(call: &mut Call<'_, '_>, name: &str) -> Result<Id, Stop> {
    let alpha = call.scalar(2, "alpha", 1.0)?;
    if call.dtype() == Some(Dtype::Bool) {
        // Truth values have no sum: PyTorch's is true where any is.
        if name != "add" || alpha - 1.0 != 0.0 {
            return Err(call.unsupported("computes in bool"));
        }
        return logic(call, Logic::Or);
    }
    let (mut a, mut b) = (call.number(0)?, call.number(1)?);
    let op = if name == "add" { Binary::Add } else { Binary::Sub };
    let scaled = if name == "rsub" { &mut a } else { &mut b };
    *scaled = call.scaled(*scaled, alpha);
    if name == "rsub" {
        std::mem::swap(&mut a, &mut b);
    }
    Ok(call.binary(op, a, b))
}

fn binary(call: &mut Call<'_, '_>, op: Binary) -> Result<Id, Stop> {
    let (a, b) = (call.number(0)?, call.number(1)?);
    Ok(call.binary(op, a, b))
}

fn logic(call: &mut Call<'_, '_>, op: Logic) -> Result<Id, Stop> {
    let (a, b) = (call.truth(0)?, call.truth(1)?);
    Ok(call.logic(op, a, b))
}

fn compare(call: &mut Call<'_, '_>, name: &str) -> Result<Id, Stop> {
    let op = match name {
        "eq" => Compare::Eq,
        "ne" => Compare::Ne,
        "lt" => Compare::Lt,
        "le" => Compare::Le,
        "gt" => Compare::Gt,
        _ => Compare::Ge,
    };
    let (a, b) = (call.comparable(0)?, call.comparable(1)?);
    Ok(call.compare(op, a, b))
}

/// PyTorch computes some exponents by other means than `pow`, and so do we.
fn power(call: &mut Call<'_, '_>, overload: &str) -> Result<Id, Stop> {
    let x = call.number(0)?;
    if overload == "Tensor_Scalar" {
        let doubled = 2.0 * call.scalar(1, "exponent", f64::NAN)?;
        let halves = if doubled.fract() == 0.0 && doubled.abs() < 100.0 { doubled as i32 } else { 0 };
        let squared = |call: &mut Call<'_, '_>| call.binary(Binary::Mul, x, x);
        match halves {
            1 => return Ok(call.unary(Unary::Sqrt, x)),
            2 => return Ok(x),
            4 => return Ok(squared(call)),
            6 => {
                let squared = squared(call);
                return Ok(call.binary(Binary::Mul, squared, x));
            }
            -1 => return Ok(call.unary(Unary::Rsqrt, x)),
            -2 => return Ok(call.unary(Unary::Recip, x)),
            -4 => {
                let squared = squared(call);
                return Ok(call.unary(Unary::Recip, squared));
            }
            _ => {}
        }
    }
    let exponent = call.number(1)?;
    Ok(call.binary(Binary::Pow, x, exponent))
}

fn clamp(call: &mut Call<'_, '_>, name: &str) -> Result<Id, Stop> {
    let mut x = call.number(0)?;
    if name == "hardtanh" {
        let (low, high) = (call.scalar(1, "min_val", -1.0)?, call.scalar(2, "max_val", 1.0)?);
        return Ok(call.clamped(x, low, high));
    }
    let (low, high) = match name {
        "clamp" => (Some(1), Some(2)),
        "clamp_min" => (Some(1), None),
        _ => (None, Some(1)),
    };
    for (position, keyword, op) in [(low, "min", Binary::Max), (high, "max", Binary::Min)] {
        if let Some(position) = position
            && call.given(position, keyword)
        {
            let bound = call.number_or(position, keyword)?;
            x = call.binary(op, x, bound);
        }
    }
    Ok(x)
}

fn activation(call: &mut Call<'_, '_>, name: &str, x: Id) -> Result<Id, Stop> {
    Ok(match name {
        "square" => call.binary(Binary::Mul, x, x),
        "exp2" => {
            let two = call.constant(2.0);
            call.binary(Binary::Pow, two, x)
        }
        "log2" => {
            let log = call.unary(Unary::Log, x);
            call.scaled(log, std::f64::consts::LOG2_E)
        }
        "isnan" => call.compare(Compare::Ne, x, x),
        "sign" => {
            call.must_be_exact(0)?;
            let (zero, one, minus) = (call.constant(0.0), call.constant(1.0), call.constant(-1.0));
            let (above, below) = (call.compare(Compare::Gt, x, zero), call.compare(Compare::Lt, x, zero));
            let negative = call.select(below, minus, zero);
            call.select(above, one, negative)
        }
        "silu" => {
            let gate = call.unary(Unary::Sigmoid, x);
            call.binary(Binary::Mul, x, gate)
        }
        "gelu" => gelu(call, x),
        "mish" => {
            let soft = softplus(call, x, 1.0, 20.0);
            let gate = call.unary(Unary::Tanh, soft);
            call.binary(Binary::Mul, x, gate)
        }
        "softplus" => {
            let (beta, threshold) = (call.scalar(1, "beta", 1.0)?, call.scalar(2, "threshold", 20.0)?);
            softplus(call, x, beta, threshold)
        }
        "leaky_relu" => {
            let slope = call.scalar(1, "negative_slope", 0.01)?;
            let zero = call.constant(0.0);
            let (positive, small) = (call.compare(Compare::Gt, x, zero), call.scaled(x, slope));
            call.select(positive, x, small)
        }
        "threshold" => {
            let (threshold, value) = (call.scalar(1, "threshold", 0.0)?, call.scalar(2, "value", 0.0)?);
            if threshold - value != 0.0 {
                call.must_be_exact(0)?;
            }
            let (threshold, value) = (call.constant(threshold), call.constant(value));
            let below = call.compare(Compare::Le, x, threshold);
            call.select(below, value, x)
        }
        "elu" => {
            let alpha = call.scalar(1, "alpha", 1.0)?;
            let (scale, input_scale) = (call.scalar(2, "scale", 1.0)?, call.scalar(3, "input_scale", 1.0)?);
            let inner = call.scaled(x, input_scale);
            let grown = call.unary(Unary::Expm1, inner);
            let (negative, positive) = (call.scaled(grown, alpha * scale), call.scaled(x, scale));
            let zero = call.constant(0.0);
            let below = call.compare(Compare::Le, x, zero);
            call.select(below, negative, positive)
        }
        "hardsigmoid" | "hardswish" => {
            let three = call.constant(3.0);
            let moved = call.binary(Binary::Add, x, three);
            let clamped = call.clamped(moved, 0.0, 6.0);
            let top = if name == "hardswish" { call.binary(Binary::Mul, x, clamped) } else { clamped };
            call.scaled(top, 1.0 / 6.0)
        }
        _ => return Err(call.unsupported("has no meaning in the operator table")),
    })
}

fn gelu(call: &mut Call<'_, '_>, x: Id) -> Id {
    let gate = if call.word(1, "approximate").is_some_and(|word| word == "tanh") {
        let squared = call.binary(Binary::Mul, x, x);
        let cubic = call.scaled(squared, 0.044_715);
        let one = call.constant(1.0);
        let bend = call.binary(Binary::Add, cubic, one);
        let straight = call.scaled(x, TANH_SCALE);
        let inner = call.binary(Binary::Mul, straight, bend);
        call.unary(Unary::Tanh, inner)
    } else {
        let inner = call.scaled(x, SQRT_HALF);
        call.unary(Unary::Erf, inner)
    };
    let (half, one) = (call.scaled(x, 0.5), call.constant(1.0));
    let opened = call.binary(Binary::Add, gate, one);
    call.binary(Binary::Mul, half, opened)
}

fn softplus(call: &mut Call<'_, '_>, x: Id, beta: f64, threshold: f64) -> Id {
    let inner = call.scaled(x, beta);
    let limit = call.constant(threshold);
    let linear = call.compare(Compare::Gt, inner, limit);
    let exp = call.unary(Unary::Exp, inner);
    let log = call.unary(Unary::Log1p, exp);
    let soft = call.scaled(log, 1.0 / beta);
    call.select(linear, x, soft)
}
