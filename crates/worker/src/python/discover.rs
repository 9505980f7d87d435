//! Which Python runs the user's model.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::environment::own_environment;
use super::output::clean;
use super::peer::Exit;
use super::process::run;
use super::spawn::is_secret;

/// The script that describes an interpreter.
const PROBE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/autokernel/probe.py"));
/// How long an interpreter may take to describe itself.
const PROBE_LIMIT: Duration = Duration::from_mins(1);
/// How long it may take when torch is imported, perhaps from a cold disk.
const IMPORT_LIMIT: Duration = Duration::from_mins(3);
const OLDEST_PYTHON: (u32, u32) = (3, 10);
const OLDEST_TORCH: (u32, u32) = (2, 9);

/// Where an interpreter came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `--python` or `$AUTOKERNEL_PYTHON`.
    Explicit,
    /// `$VIRTUAL_ENV`, `$CONDA_PREFIX` or `.venv` in the working folder.
    Environment,
    /// `python3` or `python` on the path.
    Path,
    /// The environment that the program made for itself.
    Own,
}

/// A Python that can run the bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interpreter {
    /// The program to start.
    pub path: PathBuf,
    /// Where it was found.
    pub source: Source,
    /// Python's version, such as `3.11.7`.
    pub python: String,
    /// `sys.prefix`.
    pub prefix: PathBuf,
    /// `sys.base_prefix`: where the standard library is, outside `prefix` for a virtual environment.
    pub base_prefix: PathBuf,
    /// torch's version, such as `2.15.0+cu130`.
    pub torch: String,
    /// The folder of torch's shared libraries.
    pub torch_lib: PathBuf,
    /// The OpenMP library that torch loads, absolute.
    pub gomp: PathBuf,
    /// numpy's version, if there is one.
    pub numpy: Option<String>,
    /// torch was built for CUDA and the machine has a driver; CUDA was not started to find out.
    pub cuda: bool,
}

/// Why there is no usable Python.
#[derive(Debug, thiserror::Error)]
pub enum PythonError {
    /// No interpreter where one was looked for.
    #[error("no Python found; looked at {}", tried.join(", "))]
    NotFound {
        /// Places, in order.
        tried: Vec<String>,
    },
    /// Interpreters work but none has torch.
    #[error("no torch in {}", paths(interpreters))]
    NoTorch {
        /// The interpreters.
        interpreters: Vec<PathBuf>,
    },
    /// torch is older than 2.9.
    #[error("torch {torch} of {} is too old, 2.9 or newer is needed", interpreter.display())]
    TorchTooOld {
        /// The interpreter.
        interpreter: PathBuf,
        /// Its torch.
        torch: String,
    },
    /// Python is older than 3.10.
    #[error("Python {python} of {} is too old, 3.10 or newer is needed", interpreter.display())]
    PythonTooOld {
        /// The interpreter.
        interpreter: PathBuf,
        /// Its version.
        python: String,
    },
    /// The interpreter doesn't answer as a Python does.
    #[error("{} does not work: {stderr}", interpreter.display())]
    Broken {
        /// The interpreter.
        interpreter: PathBuf,
        /// What it printed, or what happened.
        stderr: String,
    },
    /// torch is there but the OpenMP library that it uses is not.
    #[error("no OpenMP library found for the torch of {}", interpreter.display())]
    NoOpenMp {
        /// The interpreter.
        interpreter: PathBuf,
    },
    /// Too little room for our own environment.
    #[error("{} has {free} bytes free, {needed} are needed", dir.display())]
    NoSpace {
        /// The folder.
        dir: PathBuf,
        /// Bytes free.
        free: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// A step of making our own environment failed.
    #[error("{step} failed: {output}")]
    Environment {
        /// The step: `venv`, `pip`, `lock`.
        step: &'static str,
        /// The last lines of its output, with advice where we have some.
        output: String,
    },
    /// A file or process operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

fn paths(list: &[PathBuf]) -> String {
    list.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Finds the interpreter to use. `explicit` is `--python`.
///
/// Order: `explicit`, `$AUTOKERNEL_PYTHON`, `$VIRTUAL_ENV`, `$CONDA_PREFIX`, `.venv` in the working
/// folder, `python3` and `python` on the path, our own environment. The first two are the user's
/// word: when they don't work that is the answer. The others are passed over.
pub fn discover(explicit: Option<&Path>) -> Result<Interpreter, PythonError> {
    Surroundings::real().discover(explicit)
}

/// Looks at one interpreter: a program, a name on the path, or the folder of an environment.
pub fn probe(path: &Path) -> Result<Interpreter, PythonError> {
    Surroundings::real().explicit(path)
}

/// Looks at one interpreter as [`probe`] does and imports torch in it, which takes seconds.
pub fn probe_fully(path: &Path) -> Result<Interpreter, PythonError> {
    let found = probe(path)?;
    interpret(&found.path, ask(&found.path, true, IMPORT_LIMIT)?, found.source)
}

/// What discovery depends on, so that tests can make it up.
pub(super) struct Surroundings {
    pub(super) variables: Vec<(OsString, OsString)>,
    pub(super) folder: PathBuf,
    pub(super) own: Option<PathBuf>,
    pub(super) limit: Duration,
}

impl Surroundings {
    pub(super) fn real() -> Self {
        Self {
            variables: env::vars_os().collect(),
            folder: env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            own: own_environment(),
            limit: PROBE_LIMIT,
        }
    }

    fn variable(&self, name: &str) -> Option<&OsStr> {
        let found = self.variables.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_os_str()).filter(|value| !value.is_empty())
    }

    pub(super) fn discover(&self, explicit: Option<&Path>) -> Result<Interpreter, PythonError> {
        let named = explicit.or_else(|| self.variable("AUTOKERNEL_PYTHON").map(Path::new));
        if let Some(path) = named {
            return self.explicit(path);
        }
        let mut failures = Failures::default();
        for (place, source, path) in self.candidates() {
            failures.tried.push(place);
            let Some(path) = path else { continue };
            match self.look(&path, source) {
                Ok(found) => return Ok(found),
                Err(error) => failures.add(&path, error),
            }
        }
        Err(failures.answer())
    }

    /// The places besides the user's word, in order, with the program where there is one.
    fn candidates(&self) -> Vec<(String, Source, Option<PathBuf>)> {
        let mut list = Vec::new();
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            if let Some(value) = self.variable(name) {
                let path = program_in(&self.folder.join(value));
                list.push((format!("${name} ({})", value.to_string_lossy()), Source::Environment, path));
            }
        }
        list.push((".venv".into(), Source::Environment, program_in(&self.folder.join(".venv"))));
        for name in ["python3", "python"] {
            list.push((format!("{name} on the path"), Source::Path, self.on_path(OsStr::new(name))));
        }
        if let Some(own) = &self.own {
            list.push(("AutoKernel's own environment".into(), Source::Own, program_in(own)));
        }
        list
    }

    /// The programs that could be the base of an environment, best first.
    pub(super) fn bases(&self) -> Vec<PathBuf> {
        let from_list = self.candidates().into_iter().filter(|(_, source, _)| *source != Source::Own);
        let mut bases: Vec<PathBuf> = from_list.filter_map(|(_, _, path)| path).collect();
        let versioned = ["python3.14", "python3.13", "python3.12", "python3.11", "python3.10"];
        bases.extend(versioned.iter().filter_map(|name| self.on_path(OsStr::new(name))));
        bases
    }

    fn on_path(&self, name: &OsStr) -> Option<PathBuf> {
        env::split_paths(self.variable("PATH")?)
            .map(|dir| self.folder.join(dir).join(name))
            .find(|p| is_program(p))
    }

    pub(super) fn explicit(&self, path: &Path) -> Result<Interpreter, PythonError> {
        let in_folder = self.folder.join(path);
        let found = if in_folder.is_dir() {
            program_in(&in_folder)
        } else if path.components().count() == 1 && !in_folder.exists() {
            self.on_path(path.as_os_str())
        } else {
            Some(in_folder).filter(|p| p.exists())
        };
        let Some(program) = found else {
            return Err(PythonError::NotFound { tried: vec![path.display().to_string()] });
        };
        self.look(&program, Source::Explicit)
    }

    fn look(&self, path: &Path, source: Source) -> Result<Interpreter, PythonError> {
        let facts = ask(path, false, self.limit)?;
        // Where no file looks like the OpenMP library, torch itself has to say what it loads.
        let hidden = facts.torch.is_some() && facts.openmp.is_none();
        let facts = if hidden { ask(path, true, IMPORT_LIMIT)? } else { facts };
        interpret(path, facts, source)
    }
}

/// What the probe prints.
#[derive(Debug, Deserialize)]
pub(super) struct Facts {
    probe: u32,
    python: String,
    executable: Option<PathBuf>,
    prefix: PathBuf,
    base_prefix: PathBuf,
    torch: Option<String>,
    torch_error: Option<String>,
    torch_lib: Option<PathBuf>,
    openmp: Option<PathBuf>,
    numpy: Option<String>,
    cuda: bool,
}

impl Facts {
    pub(super) fn python(&self) -> (u32, u32) {
        version(&self.python)
    }

    /// What a shim (pyenv's, a shell script) stands for; starting that saves the detour.
    pub(super) fn program(&self, asked: &Path) -> PathBuf {
        self.executable
            .clone()
            .filter(|p| p.is_absolute() && is_program(p))
            .unwrap_or_else(|| asked.to_owned())
    }
}

/// Runs the probe in an interpreter.
pub(super) fn ask(path: &Path, full: bool, limit: Duration) -> Result<Facts, PythonError> {
    let broken = |stderr: String| PythonError::Broken { interpreter: path.to_owned(), stderr };
    let mut command = Command::new(path);
    command.args(["-I", "-B", "-c", PROBE]).args(full.then_some("full"));
    command.env_clear().envs(env::vars_os().filter(|(name, _)| !is_secret(name)));
    let mut streams = [Vec::new(), Vec::new()];
    let exit = run(command, limit, &mut |stream, bytes| {
        let kept = &mut streams[usize::from(stream == 2)];
        if kept.len() < 1 << 20 {
            kept.extend_from_slice(bytes);
        }
    })
    .map_err(|e| broken(e.to_string()))?;
    let [out, err] = streams.map(|bytes| clean(&bytes));
    let facts = out.lines().rev().find_map(|line| serde_json::from_str::<Facts>(line).ok());
    match (exit, facts) {
        (None, _) => Err(broken(format!("no answer in {} s {}", limit.as_secs_f64(), last_lines(&err, 5)))),
        (Some(Exit::Code(0)), Some(facts)) if facts.probe == 1 => Ok(facts),
        (Some(Exit::Code(0)), _) => {
            Err(broken(format!("it doesn't answer as Python does {}", last_lines(&err, 5))))
        }
        (Some(exit), _) => {
            let words = if err.trim().is_empty() { &out } else { &err };
            Err(broken(format!("{} {}", exit_words(exit), last_lines(words, 10))))
        }
    }
}

fn exit_words(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exit code {code}"),
        Exit::Signal(signal) => format!("signal {signal}"),
    }
}

/// The last lines that are not empty.
pub(super) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Checks the facts against what the bridge needs.
fn interpret(path: &Path, facts: Facts, source: Source) -> Result<Interpreter, PythonError> {
    let interpreter = path.to_owned();
    if facts.python() < OLDEST_PYTHON {
        return Err(PythonError::PythonTooOld { interpreter, python: facts.python });
    }
    let program = facts.program(path);
    let Some(torch) = facts.torch else {
        return Err(PythonError::NoTorch { interpreters: vec![interpreter] });
    };
    if version(&torch) < OLDEST_TORCH {
        return Err(PythonError::TorchTooOld { interpreter, torch });
    }
    if let Some(stderr) = facts.torch_error {
        return Err(PythonError::Broken { interpreter, stderr });
    }
    let (Some(gomp), Some(torch_lib)) = (facts.openmp, facts.torch_lib) else {
        return Err(PythonError::NoOpenMp { interpreter });
    };
    Ok(Interpreter {
        path: program,
        source,
        python: facts.python,
        prefix: facts.prefix,
        base_prefix: facts.base_prefix,
        torch,
        torch_lib,
        gomp,
        numpy: facts.numpy,
        cuda: facts.cuda,
    })
}

/// Major and minor number of a version such as `2.15.0a0+git12`; zero where there is none.
fn version(text: &str) -> (u32, u32) {
    let mut parts = text.split('.').map(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part[..digits].parse().unwrap_or(0)
    });
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// The interpreter of an environment's folder.
pub(super) fn program_in(folder: &Path) -> Option<PathBuf> {
    ["bin/python", "bin/python3"].iter().map(|name| folder.join(name)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// What discovery met on its way.
#[derive(Default)]
struct Failures {
    tried: Vec<String>,
    without_torch: Vec<PathBuf>,
    other: Option<PythonError>,
}

impl Failures {
    fn add(&mut self, path: &Path, error: PythonError) {
        // How near it is to working: the nearest miss is the one that is worth telling.
        let rank = |error: &PythonError| match error {
            PythonError::TorchTooOld { .. } => 4,
            PythonError::NoOpenMp { .. } => 3,
            PythonError::PythonTooOld { .. } => 2,
            PythonError::Broken { .. } => 1,
            _ => 0,
        };
        if let PythonError::NoTorch { .. } = error {
            if !self.without_torch.iter().any(|p| p == path) {
                self.without_torch.push(path.to_owned());
            }
        } else if self.other.as_ref().is_none_or(|old| rank(old) < rank(&error)) {
            self.other = Some(error);
        }
    }

    fn answer(self) -> PythonError {
        match self.other {
            Some(error @ (PythonError::TorchTooOld { .. } | PythonError::NoOpenMp { .. })) => error,
            _ if !self.without_torch.is_empty() => PythonError::NoTorch { interpreters: self.without_torch },
            Some(error) => error,
            None => PythonError::NotFound { tried: self.tried },
        }
    }
}
