//! The contract: what "the same function" means for a region.
//!
//! Set by the task, never by a kernel. Limits follow the protocol that ARCHITECTURE.md describes:
//! truth `r` in fp64 on the already rounded inputs, three metrics, and as scale the error of the
//! baseline `b` or the noise `s` (how far roundings move the truth), whichever is larger.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

/// Limits for one output. See [`Limits::for_dtype`] for the numbers and where they come from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// `rms(c - r)` may be at most this many times `max(rms(b - r), 0.4 u rms(r), rms(s))`.
    pub ratio: f64,
    /// `max |c - r| / (u |r| + max(rowrms(b - r), rowrms(s), s))` may be at most this.
    pub element: f64,
    /// `rms(c - r) / std(r)` may be at most this, on well-conditioned inputs.
    pub centred: f64,
}

impl Limits {
    /// Starting limits for a chain of operations whose longest reduction has `reduced` terms;
    /// `None` for exact types, whose outputs must be equal bit for bit.
    ///
    /// The values are those of a simulation over honest and cheating variants (summation orders,
    /// lower precision, dropped terms); `sqrt(K)` growth follows Higham and Mary 2019.
    pub fn for_dtype(dtype: Dtype, reduced: u64) -> Option<Self> {
        let unit = dtype.unit_roundoff()?;
        Some(match dtype {
            Dtype::F64 => Self { ratio: 32.0, element: 128.0, centred: 1e-12 },
            Dtype::F32 => {
                Self { ratio: 8.0, element: 64.0, centred: (0.5 * (reduced as f64).sqrt() * unit).max(2e-6) }
            }
            Dtype::F16 => Self { ratio: 3.0, element: 16.0, centred: 3e-3 },
            _ => Self { ratio: 3.0, element: 16.0, centred: 2e-2 },
        })
    }
}

/// The contract of a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contract {
    /// Limits for each output; `None` means equal bit for bit.
    pub limits: Vec<Option<Limits>>,
    /// Whether two calls on equal inputs must give equal bits.
    pub deterministic: bool,
}
