//! Element types of tensors.

use serde::{Deserialize, Serialize};

/// The element type of a tensor, named as in the wire format and in kernel files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Whether values are real numbers with rounding.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Unit roundoff: half the distance from 1 to the next number, or `None` for exact types.
    pub const fn unit_roundoff(self) -> Option<f64> {
        match self {
            Self::F64 => Some(1.110_223_024_625_156_5e-16),
            Self::F32 => Some(5.960_464_477_539_063e-8),
            Self::F16 => Some(4.882_812_5e-4),
            Self::Bf16 => Some(3.906_25e-3),
            _ => None,
        }
    }

    /// The name used on the wire: `f32`, `bf16`, `bool` and so on.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::Bool => "bool",
        }
    }
}
