//! What a command needs before its work begins: an interpreter, a compiler, a confined child that
//! works, the machine's rates, and the user's model captured in an oracle.

use std::path::{Path, PathBuf};
use std::time::Duration;

use autokernel_core::graph::Graph;
use autokernel_core::plan::Device;
use autokernel_judge::{JudgeError, LOCK_PATIENCE, MachineLock};
use autokernel_worker::device::DeviceFacts;
use autokernel_worker::python::{self, Interpreter, Peer};
use autokernel_worker::sandbox::{self, SandboxReport};
use autokernel_worker::toolchain::Toolchain;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{EngineError, model_error};
use crate::event::{Event, Observer};
use crate::options::ModelSpec;
use crate::report::{Break, DeviceReport, Versions};

/// Longest wait for one thing that the user's own code does (import, construction, a run).
pub(crate) const MODEL_TIMEOUT: Duration = Duration::from_mins(10);

/// Interpreter, compiler and machine.
pub struct Tools {
    /// The user's Python.
    pub interpreter: Interpreter,
    /// The C++ compiler.
    pub toolchain: Toolchain,
    /// The machine.
    pub device: DeviceFacts,
    /// Threads of models and kernels.
    pub threads: usize,
    /// How children are confined.
    pub confinement: String,
}

/// Held around work that would disturb a measurement of another process of ours: builds, the user's
/// model, PyTorch's compiler. Who holds it must not measure.
pub(crate) fn beside() -> Result<MachineLock, EngineError> {
    Ok(MachineLock::work(LOCK_PATIENCE).map_err(JudgeError::from)?)
}

/// Held around what is timed outside of the judge.
pub(crate) fn alone() -> Result<MachineLock, EngineError> {
    Ok(MachineLock::measure(LOCK_PATIENCE).map_err(JudgeError::from)?)
}

/// How an interpreter may be found or made.
#[derive(Clone, Debug, Default)]
pub struct PythonChoice {
    /// Named by the user; nothing else is tried then.
    pub explicit: Option<PathBuf>,
    /// Whether an environment of our own may be made when none is usable.
    pub may_make: bool,
    /// Packages that the model needs on top; they go into a light environment of our own.
    pub with: Vec<String>,
}

impl PythonChoice {
    /// The same, with the interpreter of an earlier command where none is named now.
    pub(crate) fn or(&self, python: Option<&PathBuf>) -> Self {
        Self { explicit: self.explicit.clone().or_else(|| python.cloned()), ..self.clone() }
    }
}

impl Tools {
    /// Finds everything or says what is missing.
    pub fn find(
        choice: &PythonChoice,
        threads: Option<usize>,
        observer: &mut dyn Observer,
    ) -> Result<Self, EngineError> {
        let interpreter = find_interpreter(choice, observer)?;
        let (toolchain, confinement) = {
            let _beside = beside()?;
            (Toolchain::detect()?, confinement().map_err(|what| EngineError::Sandbox { what })?)
        };
        let device = {
            let _alone = alone()?;
            DeviceFacts::measure()?
        };
        let threads = threads.unwrap_or(device.cores).max(1);
        Ok(Self { interpreter, toolchain, device, threads, confinement })
    }

    /// The facts that a kernel file's expressions may ask for.
    pub fn plan_device(&self) -> Device {
        Device { sms: 0, shared: 0, cores: self.threads as i64 }
    }

    /// For reports.
    pub fn device_report(&self) -> DeviceReport {
        DeviceReport {
            kind: "cpu".to_owned(),
            name: self.device.name.clone(),
            cores: self.device.cores,
            threads: self.threads,
            copy_gb_per_s: self
                .device
                .copy
                .iter()
                .map(|rate| (rate.footprint.to_string(), (rate.bytes_per_us / 10.0).round() / 100.0))
                .collect(),
            sandbox: "confined".to_owned(),
        }
    }

    /// For reports.
    pub fn versions(&self) -> Versions {
        Versions {
            autokernel: env!("CARGO_PKG_VERSION").to_owned(),
            python: self.interpreter.python.clone(),
            torch: self.interpreter.torch.clone(),
            compiler: self.toolchain.version.clone(),
        }
    }
}

/// How children are confined here, or why they can't be.
pub(crate) fn confinement() -> Result<String, String> {
    confinement_of(&sandbox::probe())
}

/// The same for what was found already.
pub(crate) fn confinement_of(report: &SandboxReport) -> Result<String, String> {
    match &report.problem {
        None if report.self_test => {
            let user =
                if report.uid_drop { format!(", as user {}", report.child_uid) } else { String::new() };
            Ok(format!("landlock {} and seccomp{user}; the self-test passed", report.landlock_abi))
        }
        None => Err("the self-test of a confined child failed".to_owned()),
        Some(problem) => Err(problem.clone()),
    }
}

fn find_interpreter(choice: &PythonChoice, observer: &mut dyn Observer) -> Result<Interpreter, EngineError> {
    let base = find_base(choice, observer)?;
    if choice.with.is_empty() {
        return Ok(base);
    }
    let what = format!("adding {} in an environment over {}", choice.with.join(", "), base.path.display());
    observer.observe(&Event::Stage { what });
    let note = &mut |line: &str| observer.observe(&Event::Note { what: line.to_owned() });
    Ok(python::with_packages(&base, &choice.with, note)?)
}

fn find_base(choice: &PythonChoice, observer: &mut dyn Observer) -> Result<Interpreter, EngineError> {
    let missing = match python::discover(choice.explicit.as_deref()) {
        Ok(interpreter) => return Ok(interpreter),
        Err(error) => error,
    };
    if choice.explicit.is_some() || !choice.may_make {
        return Err(EngineError::Python(missing));
    }
    let Some(dir) = python::own_environment() else { return Err(EngineError::Python(missing)) };
    observer
        .observe(&Event::Stage { what: format!("making an environment with torch at {}", dir.display()) });
    let made =
        python::make_environment(&dir, &mut |line| observer.observe(&Event::Note { what: line.to_owned() }))?;
    Ok(made)
}

/// What the oracle said of the model.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LoadedModel {
    /// Its class or function.
    pub(crate) name: String,
}

/// The captured graphs and what was checked of them.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Capture {
    /// One or more graphs, checked.
    pub(crate) graphs: Vec<Graph>,
    /// Where the model breaks.
    #[serde(default)]
    pub(crate) breaks: Vec<Break>,
    /// Whether the captured graphs equal the model.
    pub(crate) equal: Equality,
}

/// The captured graph against the user's model on two inputs.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Equality {
    /// Largest relative error, root mean square of the difference over that of the output.
    pub(crate) max_relative_error: f64,
    /// Whether it stays inside the limit of the dtype.
    pub(crate) ok: bool,
}

/// An oracle that holds the user's model.
pub(crate) struct Oracle {
    /// The connection.
    pub(crate) peer: Peer,
    /// What was loaded.
    pub(crate) model: LoadedModel,
}

impl Oracle {
    /// Starts an oracle and loads the model under a fixed seed.
    pub(crate) fn start(
        tools: &Tools,
        spec: &ModelSpec,
        seed: u64,
        scratch: &Path,
    ) -> Result<Self, EngineError> {
        let _beside = beside()?;
        let mut peer = spawn_trusted(tools, "oracle", scratch)?;
        let body =
            json!({ "model": spec.spec, "inputs": spec.inputs, "seed": seed, "threads": tools.threads });
        let reply = peer
            .request("load", body, MODEL_TIMEOUT)
            .map_err(|error| model_error(error, &tools.interpreter))?;
        Ok(Self { model: serde_json::from_value(reply)?, peer })
    }

    /// Captures the model; graphs that do not equal it are an error.
    pub(crate) fn capture(&mut self, tools: &Tools) -> Result<Capture, EngineError> {
        let reply = self.ask(tools, "capture", json!({}))?;
        let capture: Capture = serde_json::from_value(reply)?;
        for graph in &capture.graphs {
            graph.check()?;
        }
        if !capture.equal.ok {
            return Err(EngineError::CaptureDiffers { relative: capture.equal.max_relative_error });
        }
        Ok(capture)
    }

    /// One request; the user's own errors become model errors. A profile is a measurement, the rest
    /// is work.
    pub(crate) fn ask(&mut self, tools: &Tools, op: &str, body: Value) -> Result<Value, EngineError> {
        let _held = if op == "profile" { alone()? } else { beside()? };
        self.peer.request(op, body, MODEL_TIMEOUT).map_err(|error| model_error(error, &tools.interpreter))
    }
}

/// A Python child that runs the user's own code, unconfined as the user's own.
pub(crate) fn spawn_trusted(tools: &Tools, role: &str, scratch: &Path) -> Result<Peer, EngineError> {
    let cache = inductor_cache();
    fs_err::create_dir_all(&cache)?;
    let cwd = std::env::current_dir().unwrap_or_else(|_| scratch.to_owned());
    let extra = [("TORCHINDUCTOR_CACHE_DIR".into(), cache.into_os_string())];
    Ok(python::spawn(&tools.interpreter, role, None, &cwd, &extra)?)
}

/// Compiled baselines are kept between runs; candidates never see this folder.
fn inductor_cache() -> PathBuf {
    cache_root().join("inductor")
}

/// What can be made again at any time.
pub(crate) fn cache_root() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("autokernel")
}

/// A folder for everything that a command needs only while it runs. It vanishes with the command;
/// what killed ones left behind is removed here.
pub(crate) fn scratch() -> Result<tempfile::TempDir, EngineError> {
    let dead = |name: &str| {
        let pid = name.strip_prefix(SCRATCH)?.split('-').next()?.parse::<u32>().ok()?;
        Some(!Path::new("/proc").join(pid.to_string()).exists())
    };
    for entry in fs_err::read_dir(std::env::temp_dir())?.flatten() {
        if entry.file_name().to_str().and_then(dead) == Some(true) {
            // Another process may be at it, or it is another user's: then it is not ours to remove.
            let _ = fs_err::remove_dir_all(entry.path());
        }
    }
    let folder = tempfile::Builder::new().prefix(&format!("{SCRATCH}{}-", std::process::id())).tempdir()?;
    open_to_children(folder.path())?;
    Ok(folder)
}

/// How scratch folders begin; the process id follows.
const SCRATCH: &str = "autokernel-";

/// Children of root run as another user and must be able to walk through a folder of ours.
pub(crate) fn open_to_children(folder: &Path) -> Result<(), EngineError> {
    use std::os::unix::fs::PermissionsExt;
    fs_err::set_permissions(folder, std::fs::Permissions::from_mode(0o711))?;
    Ok(())
}
