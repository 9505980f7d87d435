//! What keeps the judge from judging. None of these says anything about a candidate.

use autokernel_worker::memory::MemoryError;
use autokernel_worker::python::PeerError;
use autokernel_worker::runner::RunnerError;
use autokernel_worker::toolchain::BuildError;

use crate::decide::EvidenceError;
use crate::lock::LockError;
use crate::truth::TruthError;

/// The judge could not do its work.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum JudgeError {
    #[error(transparent)]
    Truth(#[from] TruthError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("the runner failed")]
    Runner(#[source] RunnerError),
    #[error("the builder failed")]
    Builder(#[source] BuildError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("cannot make or read the inputs of timed calls")]
    Share { source: std::io::Error },
    #[error("no random numbers from the operating system: {0}")]
    Random(getrandom::Error),
    #[error("set {set} has {got} inputs, the region has {expected}")]
    Inputs { set: usize, got: usize, expected: usize },
    #[error("input {input} of set {set} is not laid out as the region says")]
    Layout { set: usize, input: usize },
    #[error("{path} holds {got} bytes, its description says {expected}")]
    Size { path: std::path::PathBuf, got: u64, expected: u64 },
    #[error("`{name}` failed")]
    Contestant { name: String, source: Box<PeerError> },
    #[error("`{name}` can't be compared with: {reason}")]
    BadBaseline { name: String, reason: String },
    #[error(transparent)]
    Evidence(#[from] EvidenceError),
    #[error("there is no usable baseline")]
    NoBaseline,
    #[error("outputs {outputs:?} carry too little signal on every family of inputs to tell right from wrong")]
    Weak { outputs: Vec<usize> },
    #[error(
        "its inputs tell only {killed} of {of} wrong forms of the region from it, and {least:.0} % are needed; \
         not told: {}",
        survivors.join("; "),
        least = crate::controls::LEAST_KILLED * 100.0
    )]
    Blind { killed: usize, of: usize, survivors: Vec<String> },
    #[error("the controls of the task could not be run: {reason}")]
    Controls { reason: String },
}

impl JudgeError {
    /// Whether it says something of the task at hand only, so that the next task may well be judged.
    pub const fn concerns_one_task(&self) -> bool {
        match self {
            Self::Truth(_)
            | Self::Inputs { .. }
            | Self::Layout { .. }
            | Self::Size { .. }
            | Self::Contestant { .. }
            | Self::BadBaseline { .. }
            | Self::Evidence(_)
            | Self::NoBaseline
            | Self::Weak { .. }
            | Self::Blind { .. }
            | Self::Controls { .. } => true,
            Self::Memory(_)
            | Self::Share { .. }
            | Self::Runner(_)
            | Self::Builder(_)
            | Self::Lock(_)
            | Self::Random(_) => false,
        }
    }
}

impl From<getrandom::Error> for JudgeError {
    fn from(error: getrandom::Error) -> Self {
        Self::Random(error)
    }
}
