//! The plan: the launches of a kernel file, evaluated for given shapes, parameters and device.
//!
//! A plan holds nothing but numbers and indices, so a runner and the package's runtime follow it
//! without reading a header or an expression.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::graph::TensorMeta;
use crate::kernel_file::{Swizzle, TensorName};

mod build;
mod evaluate;
mod expr;
mod lex;
mod parse;
#[cfg(test)]
mod tests;

pub use build::{MAX_BUFFER_NUMEL, PlanError, check_region, plan};
pub use evaluate::{Device, EvalError, Scope};
pub use expr::Expr;
pub(crate) use expr::Mention;
pub(crate) use parse::{Argument, argument};
pub use parse::{ExprError, ExprErrorKind, RESERVED};

/// What a runner does for one call, and once beforehand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Working memory of one call, in order of name.
    pub scratch: Vec<ScratchBuffer>,
    /// Steps that fill buffers from constant inputs, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prepare: Vec<PlannedPrepare>,
    /// Launches of one call, in order; never empty.
    pub launches: Vec<PlannedLaunch>,
}

/// One scratch buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScratchBuffer {
    /// Its name in the header.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements; may be zero.
    pub numel: u64,
    /// Whether it must be zeroed before each call.
    pub zero: bool,
}

/// One prepare step and the buffer that it fills.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedPrepare {
    /// Its name in the header.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements; may be zero.
    pub numel: u64,
    /// The constant inputs that it reads: when one of them changes, it runs again.
    pub inputs: Vec<usize>,
    /// What fills it.
    pub launch: PlannedLaunch,
}

/// One launch. For C++ the extents are all one and only `entry` and `args` matter; for Triton the
/// builder knows the block and the shared memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedLaunch {
    /// The function to call.
    pub entry: String,
    /// Blocks in each direction.
    pub grid: [i64; 3],
    /// Threads of a block in each direction.
    pub block: [i64; 3],
    /// Bytes of dynamic shared memory.
    pub shared: i64,
    /// Blocks of a cluster in each direction.
    pub cluster: Option<[i64; 3]>,
    /// Whether all blocks must be resident at once.
    pub cooperative: bool,
    /// What the function is given, in order.
    pub args: Vec<PlannedArg>,
}

/// An argument of a launch: a pointer, or a 64-bit integer, or a tensor map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlannedArg {
    /// Pointer to an input of the region.
    Input(usize),
    /// Pointer to an output of the region.
    Output(usize),
    /// Pointer to an entry of [`Plan::scratch`].
    Scratch(usize),
    /// Pointer to the buffer of an entry of [`Plan::prepare`].
    Prepared(usize),
    /// A number.
    Int(i64),
    /// The caller's thread count.
    Threads,
    /// A tensor map over an input or output.
    TensorMap {
        /// Which tensor.
        tensor: TensorName,
        /// Its shape, strides and element type.
        meta: TensorMeta,
        /// Extents of the box, in the order of the tensor's dimensions.
        extents: Vec<i64>,
        /// The swizzle of shared memory.
        swizzle: Swizzle,
    },
}
