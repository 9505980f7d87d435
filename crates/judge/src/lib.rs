//! Is a kernel correct, is it faster. Knows no agent.
//!
//! The way of a candidate: [`correctness`] builds, admits and runs it in a confined runner and checks
//! every output against the [`truth`], whose power to tell wrong from right [`controls`] proved before; [`screen`] times the same calls, for ranking only; [`verdict`]
//! compares the packaged form with the best baseline over pairs of fresh processes and leaves
//! [`evidence`], from which the verdict can be decided again offline.
//!
//! Every comparison is made here, from copied bytes, while the candidate's process stands still.

mod child;
mod content;
pub mod controls;
pub mod correctness;
pub mod decide;
mod edit;
pub mod error;
pub mod evidence;
pub mod fault;
pub mod life;
pub mod lock;
pub mod metrics;
pub mod patience;
pub mod record;
pub mod rerun;
pub mod round;
pub mod screen;
pub mod secret;
pub mod source;
mod stale;
mod timed;
pub mod truth;
pub mod verdict;
pub mod watch;

pub use controls::{Controls, Examination};
pub use correctness::{Checked, Judge, JudgedTask};
pub use decide::{Decided, EvidenceError, decide};
pub use error::JudgeError;
pub use evidence::{Evidence, Facts, Race};
pub use life::Life;
pub use lock::{LOCK_PATIENCE, MachineLock};
pub use patience::{PATIENCE, Patience};
pub use record::{Record, RecordError};
pub use rerun::{FreshRunner, Rerun};
pub use round::{Child, Contest, Contestant, Protocol, Staging, Zygote};
pub use screen::{ScreenOutcome, Screened};
pub use truth::{RawSet, TensorFile, Truth, Unfit};
pub use verdict::{compare, race};
