//! Exit codes, and how an error is told.

use autokernel_agent::DeskError;
use autokernel_engine::{EngineError, full_message};
use autokernel_store::StoreError;
use autokernel_worker::python::{PeerError, PythonError};
use serde_json::json;

use crate::arguments::Format;

/// Exit codes; README lists them for users. 2 is the argument parser's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ExitCode {
    /// A fault of this program.
    Internal = 1,
    /// An argument that can't be used: no such run, no such package, a folder that exists.
    Usage = 2,
    /// No usable Python or torch.
    Python = 3,
    /// No C++ compiler that works.
    Compiler = 4,
    /// The model: not found, raises, not finite, not deterministic, can't be captured.
    Model = 5,
    /// Children can't be confined here.
    Sandbox = 6,
    /// The store: full disk, damage, no rights.
    Store = 7,
    /// `judge`: the kernel file was rejected or is not faster; `bench`: a claim did not hold.
    NotConfirmed = 8,
    /// The user stopped it.
    Interrupted = 9,
}

/// What the argument parser says: help and the version are results, the rest is an error, which is a
/// document for those who asked for documents.
pub(crate) fn unusable_arguments(error: &clap::Error, raw: &[String]) -> std::process::ExitCode {
    let asked = raw.windows(2).any(|pair| pair == ["--format", "json"]);
    if error.use_stderr() && (asked || raw.iter().any(|word| word == "--format=json")) {
        let text = error.to_string();
        let message = text.trim_start_matches("error: ").trim_end();
        return Failure { help: None, ..Failure::usage(message, "") }.report(Format::Json);
    }
    // Where even this can't be printed there is nobody to tell.
    let _ = error.print();
    std::process::ExitCode::from(error.exit_code() as u8)
}

/// An error on its way to the user.
#[derive(Debug)]
pub(crate) struct Failure {
    code: ExitCode,
    kind: String,
    message: String,
    details: Option<String>,
    help: Option<String>,
}

impl Failure {
    /// An argument that can't be used.
    pub(crate) fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            code: ExitCode::Usage,
            kind: "usage".into(),
            message: message.into(),
            details: None,
            help: Some(help.into()),
        }
    }

    /// A result that is complete and says no; it was printed already.
    pub(crate) fn not_confirmed() -> Self {
        Self {
            code: ExitCode::NotConfirmed,
            kind: "not_confirmed".into(),
            message: String::new(),
            details: None,
            help: None,
        }
    }

    /// What went wrong, in a sentence.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Tells the user and gives the exit code. With JSON the one document on stdout is the error.
    pub(crate) fn report(self, format: Format) -> std::process::ExitCode {
        if !self.message.is_empty() {
            if format == Format::Json {
                let body = json!({
                    "schema": "autokernel.error/1", "kind": self.kind, "exit_code": self.code as u8,
                    "message": self.message, "details": self.details, "help": self.help,
                });
                crate::tables::line(&body.to_string());
            }
            let mut text = String::new();
            if let Some(details) = &self.details {
                text.push_str(details.trim_end());
                text.push('\n');
            }
            text.push_str("error: ");
            text.push_str(&self.message);
            if let Some(help) = &self.help {
                text.push_str("\n  help: ");
                text.push_str(help);
            }
            crate::progress::error(&text);
        }
        std::process::ExitCode::from(self.code as u8)
    }
}

impl From<DeskError> for Failure {
    fn from(error: DeskError) -> Self {
        match error {
            DeskError::Request(message) => {
                Self::usage(message, "`autokernel brief` shows what a kernel file looks like")
            }
            DeskError::Failed(error) => match error.downcast::<EngineError>() {
                Ok(error) => (*error).into(),
                Err(other) => Self {
                    code: ExitCode::Internal,
                    kind: "desk".into(),
                    message: other.to_string(),
                    details: None,
                    help: None,
                },
            },
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let message = full_message(&error);
        let (code, kind, help) = describe(&error);
        let details = match &error {
            EngineError::Model { traceback, .. } => traceback.clone(),
            EngineError::Peer(PeerError::Died { stderr, .. } | PeerError::Timeout { stderr, .. }) => {
                Some(stderr.clone())
            }
            EngineError::Peer(PeerError::Remote { traceback, .. }) => Some(traceback.clone()),
            EngineError::Python(PythonError::Broken { stderr, .. }) => Some(stderr.clone()),
            _ => None,
        };
        Self { code, kind, message, details, help }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        EngineError::from(error).into()
    }
}

fn describe(error: &EngineError) -> (ExitCode, String, Option<String>) {
    let plain =
        |code, kind: &str, help: &str| (code, kind.to_owned(), (!help.is_empty()).then(|| help.to_owned()));
    match error {
        EngineError::Python(error) => plain(ExitCode::Python, "python", python_help(error)),
        EngineError::Toolchain(_) => plain(
            ExitCode::Compiler,
            "compiler",
            "install g++ 11 or newer or clang++ 15 or newer (Debian, Ubuntu: `apt install g++`), or name one in CXX",
        ),
        error if error.is_busy() => plain(
            ExitCode::Usage,
            "busy",
            "another autokernel is at work; wait for it or stop it, then `autokernel resume` goes on",
        ),
        error if error.is_sandbox() => plain(
            ExitCode::Sandbox,
            "sandbox",
            "candidate code never runs unconfined: landlock needs Linux 5.13 or newer with landlock among its security modules; in a container allow the landlock and seccomp system calls",
        ),
        EngineError::Model { kind, interpreter, .. } => {
            (ExitCode::Model, kind.clone(), Some(model_help(kind, &interpreter.display().to_string())))
        }
        EngineError::CaptureDiffers { .. } => {
            plain(ExitCode::Model, "capture_differs", "please report the model; nothing was changed")
        }
        EngineError::Graph(_) => {
            plain(ExitCode::Model, "graph", "please report the model; nothing was changed")
        }
        EngineError::Store(StoreError::NoRun { .. }) => {
            plain(ExitCode::Usage, "no_run", "`autokernel runs` lists them")
        }
        EngineError::Store(StoreError::NoEvidence { .. }) => plain(
            ExitCode::Usage,
            "no_evidence",
            "name a file, six or more digits of the hash that `judge` printed, or RUN/REGION",
        ),
        EngineError::Record(_) | EngineError::Evidence(_) => plain(
            ExitCode::Store,
            "evidence",
            "nothing can be said from damaged evidence; put the kernel file before the judge again",
        ),
        EngineError::Store(StoreError::NoRegion { .. }) => plain(ExitCode::Usage, "no_region", ""),
        EngineError::Store(_) => plain(
            ExitCode::Store,
            "store",
            "the store lies in $AUTOKERNEL_HOME or ~/.local/share/autokernel; free some space or name another folder in AUTOKERNEL_HOME",
        ),
        EngineError::Package(_) => plain(ExitCode::Usage, "package", ""),
        EngineError::KernelFile(_) => plain(
            ExitCode::NotConfirmed,
            "kernel_file",
            "`autokernel brief RUN REGION` shows a working kernel file",
        ),
        EngineError::Interrupted { .. } => plain(ExitCode::Interrupted, "interrupted", ""),
        EngineError::Io(error) if error.kind() == std::io::ErrorKind::StorageFull => {
            plain(ExitCode::Store, "disk_full", "free some space and run `autokernel resume`")
        }
        _ => plain(
            ExitCode::Internal,
            "internal",
            "this is a fault of autokernel; `autokernel resume` goes on with the run",
        ),
    }
}

fn python_help(error: &PythonError) -> &'static str {
    match error {
        PythonError::NotFound { .. } => "install Python 3.10 or newer, or name one with --python",
        PythonError::NoTorch { .. } => {
            "`pip install torch` into the environment of your model, name its interpreter with --python, or pass --yes to let autokernel make its own"
        }
        PythonError::TorchTooOld { .. } => {
            "autokernel needs torch 2.9 or newer: `pip install --upgrade torch`, or pass --yes for an environment of its own"
        }
        _ => "`autokernel doctor` shows which interpreters were tried",
    }
}

fn model_help(kind: &str, interpreter: &str) -> String {
    match kind {
        "file_not_found" => "check the path; MODEL is `file.py`, `file.py:Name` or `package.module:factory`".to_owned(),
        "import_error" => format!("install what is missing into {interpreter}, name another interpreter with --python, or let autokernel add it with --with PACKAGE"),
        "no_model" => "the file needs a class `Model` with `get_inputs()` and `get_init_inputs()`, or a function `build()` that returns (module, inputs); or name one with `file.py:Name --input 1x128:int64`".to_owned(),
        "non_finite" => "the model gives NaN or infinity on its own example inputs; there is no right answer to hold a kernel against".to_owned(),
        "not_deterministic" => "two equal calls gave different outputs: switch off dropout and other randomness (`model.eval()`), or fix the seed inside".to_owned(),
        _ => "run the model once in plain PyTorch with the same inputs; the traceback above is its own".to_owned(),
    }
}
