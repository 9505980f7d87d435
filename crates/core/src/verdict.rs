//! Verdicts: what the judge says of a candidate.

use serde::{Deserialize, Serialize};

/// Where a candidate was turned away, in the order in which the stages run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The header or the plan of the kernel file.
    Parse,
    /// The compiler.
    Build,
    /// The ELF of the artefact.
    Admission,
    /// Loading into a runner.
    Load,
    /// A call crashed, hung, or broke a rule of the runner.
    Run,
    /// Wrong outputs on one of the input families.
    Correctness,
    /// Something outside the outputs was written, or an input was.
    Memory,
    /// Equal inputs gave unequal bits.
    Determinism,
    /// The outputs of a timed call were wrong.
    Timed,
    /// The time lies below what nothing can beat.
    Audit,
}

impl Stage {
    /// The name on the wire and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parse => "parse",
            Self::Build => "build",
            Self::Admission => "admission",
            Self::Load => "load",
            Self::Run => "run",
            Self::Correctness => "correctness",
            Self::Memory => "memory",
            Self::Determinism => "determinism",
            Self::Timed => "timed",
            Self::Audit => "audit",
        }
    }
}

/// A ratio or time with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// What the judge decided. `speedup` is baseline time over candidate time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the design's words")]
pub enum Verdict {
    Rejected {
        stage: Stage,
        reason: String,
    },
    Slower {
        speedup: Interval,
    },
    /// The interval lies inside 1 ± 1 %.
    Same {
        speedup: Interval,
    },
    /// Not decided; never rounded up.
    Ambiguous {
        speedup: Interval,
    },
    Faster {
        speedup: Interval,
    },
}

impl Verdict {
    /// Decides from an interval: the one rule for screens, regions and whole models.
    pub fn from_speedup(speedup: Interval) -> Self {
        if speedup.low > 1.0 && speedup.value >= 1.01 {
            Self::Faster { speedup }
        } else if speedup.high < 1.0 && speedup.value <= 0.99 {
            Self::Slower { speedup }
        } else if speedup.low >= 0.99 && speedup.high <= 1.01 {
            Self::Same { speedup }
        } else {
            Self::Ambiguous { speedup }
        }
    }

    /// Baseline time over candidate time, where it was measured.
    pub const fn speedup(&self) -> Option<Interval> {
        match self {
            Self::Rejected { .. } => None,
            Self::Slower { speedup }
            | Self::Same { speedup }
            | Self::Ambiguous { speedup }
            | Self::Faster { speedup } => Some(*speedup),
        }
    }

    /// The word for tables and JSON.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Rejected { .. } => "rejected",
            Self::Slower { .. } => "slower",
            Self::Same { .. } => "same",
            Self::Ambiguous { .. } => "ambiguous",
            Self::Faster { .. } => "faster",
        }
    }
}
