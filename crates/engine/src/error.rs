//! What can go wrong in a command, by kind; the program turns each kind into an exit code.

use std::path::PathBuf;

use autokernel_core::graph::GraphError;
use autokernel_judge::JudgeError;
use autokernel_store::StoreError;
use autokernel_worker::device::DeviceError;
use autokernel_worker::python::{Interpreter, PeerError, PythonError};
use autokernel_worker::runner::RunnerError;
use autokernel_worker::toolchain::{BuildError, ToolchainError};

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum EngineError {
    #[error(transparent)]
    Python(#[from] PythonError),
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    #[error("this machine can't confine children: {what}")]
    Sandbox { what: String },
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The user's model; `kind` is the bridge's word for what happened.
    #[error("{message}")]
    Model { kind: String, message: String, traceback: Option<String>, interpreter: PathBuf },
    #[error(
        "the captured graph differs from the model by {relative:.1e} (relative); it can't be optimised safely"
    )]
    CaptureDiffers { relative: f64 },
    #[error("the bridge sent a graph that is not well formed: {0}")]
    Graph(#[from] GraphError),
    #[error("a Python child failed: {0}")]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Judge(#[from] JudgeError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("a message or record can't be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Package(String),
    #[error("the kernel file can't be used: {0}")]
    KernelFile(#[from] autokernel_core::kernel_file::KernelFileError),
    #[error("another process works on run {run}")]
    Busy { run: String },
    #[error(transparent)]
    Evidence(#[from] autokernel_judge::EvidenceError),
    #[error(transparent)]
    Record(#[from] autokernel_judge::RecordError),
    #[error("stopped by the user; `autokernel resume {run}` goes on where it stopped")]
    Interrupted { run: String },
}

impl EngineError {
    /// Whether children can't be confined here, wherever that was found out.
    pub fn is_sandbox(&self) -> bool {
        matches!(
            self,
            Self::Sandbox { .. }
                | Self::Judge(
                    JudgeError::Builder(BuildError::Sandbox { .. })
                        | JudgeError::Runner(RunnerError::Sandbox { .. })
                )
        )
    }

    /// Whether another process of ours is in the way.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Judge(JudgeError::Lock(_)))
    }
}

/// An error reply of a bridge about the user's model keeps its kind; everything else is ours.
pub(crate) fn model_error(error: PeerError, interpreter: &Interpreter) -> EngineError {
    match error {
        PeerError::Remote { kind, message, traceback, .. } if kind != "internal" => {
            let traceback = (!traceback.is_empty()).then_some(traceback);
            EngineError::Model { kind, message, traceback, interpreter: interpreter.path.clone() }
        }
        other => EngineError::Peer(other),
    }
}

/// An error with its causes, as one sentence.
pub fn full_message(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        // A transparent error repeats its cause.
        if !text.ends_with(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}
