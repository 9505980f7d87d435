//! Our own Python environment, for users who have no torch.

use std::env;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};

use super::bridge::user_folder;
use super::discover::{
    Interpreter, PythonError, Source, Surroundings, ask, last_lines, probe_fully, program_in,
};
use super::output::clean;
use super::peer::Exit;
use super::process::run;
use super::spawn::is_secret;

/// What the environment holds.
const LOCK: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/autokernel/requirements.txt"));
/// The list in the environment's folder; also says that the folder is ours to remove.
const MARKER: &str = "autokernel-requirements.txt";
/// Disk space that the environment takes while it is made; a CUDA build of torch comes with CUDA's libraries.
pub const ENVIRONMENT_BYTES: u64 = 7_000_000_000;
/// The same with a CPU build of torch.
pub const CPU_ENVIRONMENT_BYTES: u64 = 1_800_000_000;
/// PyTorch's own index of CPU builds; the default index has CUDA builds only (on x86-64 Linux).
const CPU_INDEX: &str = "https://download.pytorch.org/whl/cpu";
/// The oldest Python that the lock has versions for.
const OLDEST_BASE: (u32, u32) = (3, 10);
/// Longest download and installation.
const PIP_LIMIT: Duration = Duration::from_hours(2);
const VENV_LIMIT: Duration = Duration::from_mins(5);

/// The folder of our own environment (whether or not it is there); `None` without a home folder.
pub fn own_environment() -> Option<PathBuf> {
    let name = format!("env-{}", &blake3::hash(LOCK.as_bytes()).to_hex()[..16]);
    Some(user_folder("XDG_DATA_HOME", ".local/share")?.join("autokernel").join(name))
}

/// Makes our own environment in `dir` with the first usable Python of the machine; takes it as it
/// is when it is there. `progress` gets lines for people.
pub fn make_environment(dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Interpreter, PythonError> {
    make_environment_from(None, dir, progress)
}

/// The same with a given base interpreter.
pub fn make_environment_from(
    base: Option<&Path>,
    dir: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<Interpreter, PythonError> {
    let ready = |dir: &Path| probe_fully(dir).map(|found| Interpreter { source: Source::Own, ..found });
    let torch: String = LOCK
        .lines()
        .filter(|line| line.starts_with("torch=="))
        .fold(String::new(), |a, line| a + line + "\n");
    let lean = (!has_nvidia_device()).then_some(Lean {
        requirements: &torch,
        index: CPU_INDEX,
        bytes: CPU_ENVIRONMENT_BYTES,
    });
    let contents = Contents { requirements: LOCK, bytes: ENVIRONMENT_BYTES, lean, see: &[] };
    make_with(base, dir, &contents, &ready, progress)
}

/// Whether there is an NVIDIA device with a driver; nothing of CUDA is loaded to find out.
pub fn has_nvidia_device() -> bool {
    ["/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists())
}

/// What goes into an environment.
pub(super) struct Contents<'a> {
    /// pip's list.
    pub(super) requirements: &'a str,
    /// Room that it takes.
    pub(super) bytes: u64,
    /// What is tried before the list.
    pub(super) lean: Option<Lean<'a>>,
    /// Folders of packages that the environment sees besides its own.
    pub(super) see: &'a [PathBuf],
}

/// A smaller build of a part of the list, from another index. Where that does not answer, the list is taken.
pub(super) struct Lean<'a> {
    pub(super) requirements: &'a str,
    pub(super) index: &'a str,
    /// Room for the environment with it.
    pub(super) bytes: u64,
}

/// An interpreter that has `packages` (as pip names them) on top of everything that `base` has. The
/// environment of `base` is not touched; the new one is light, and is kept for the next time.
pub fn with_packages(
    base: &Interpreter,
    packages: &[String],
    progress: &mut dyn FnMut(&str),
) -> Result<Interpreter, PythonError> {
    let mut list: Vec<&str> = packages.iter().map(String::as_str).collect();
    list.sort_unstable();
    list.dedup();
    // What torch was tested with stays: an extra package may not bring another one.
    let list = format!("{}\n{KEEP}torch=={}\n", list.join("\n"), base.torch);
    let identity = format!("{list}{}\n{}\n", base.path.display(), base.python);
    let name = format!("with-{}", &blake3::hash(identity.as_bytes()).to_hex()[..16]);
    let home = user_folder("XDG_DATA_HOME", ".local/share").ok_or_else(|| PythonError::Environment {
        step: "choice of a folder",
        output: "there is no home folder to put an environment in".into(),
    })?;
    let dir = home.join("autokernel").join(name);
    // Its own folder, which may name others, and the one in which torch lies.
    let mut see: Vec<PathBuf> = own_packages(&base.prefix).into_iter().collect();
    see.extend(base.torch_lib.ancestors().nth(2).map(Path::to_owned));
    see.dedup();
    let contents = Contents { requirements: &list, bytes: WITH_BYTES, lean: None, see: &see };
    let ready = |dir: &Path| probe_fully(dir).map(|found| Interpreter { source: base.source, ..found });
    make_with(Some(&base.path), &dir, &contents, &ready, progress)
}

/// Room for what `--with` adds; most packages take a small part of it.
const WITH_BYTES: u64 = 500_000_000;
/// The list of those folders, in the environment's folder.
const SEES: &str = "autokernel-sees.txt";
/// Marks lines of a list that pip gets as constraints.
const KEEP: &str = "# keep: ";

/// Whether pip would take `text` for a package, and not for an option or a file of its own.
pub fn is_requirement(text: &str) -> bool {
    let first = text.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    first && text.chars().all(|c| c.is_ascii_graphic()) && !text.contains(['#', '\\', '\'', '"', '$', '`'])
}

/// An environment of what one list says.
#[cfg(test)]
pub(super) fn make<T>(
    base: Option<&Path>,
    dir: &Path,
    requirements: &str,
    bytes: u64,
    ready: &dyn Fn(&Path) -> Result<T, PythonError>,
    progress: &mut dyn FnMut(&str),
) -> Result<T, PythonError> {
    make_with(base, dir, &Contents { requirements, bytes, lean: None, see: &[] }, ready, progress)
}

/// Builds beside the final place and renames, under a lock: what stands under the final name is
/// always complete, and two processes never build the same.
pub(super) fn make_with<T>(
    base: Option<&Path>,
    dir: &Path,
    contents: &Contents<'_>,
    ready: &dyn Fn(&Path) -> Result<T, PythonError>,
    progress: &mut dyn FnMut(&str),
) -> Result<T, PythonError> {
    let dir = &std::path::absolute(dir).map_err(io_error("environment folder"))?;
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
        return Err(io_error("environment folder")(io::ErrorKind::InvalidInput.into()));
    };
    fs::create_dir_all(parent).map_err(io_error("environment folder"))?;
    let _lock = lock(&parent.join(hidden(name, ".lock")), progress)?;
    let fresh_name = hidden(name, ".new");
    let fresh = parent.join(&fresh_name);
    if program_in(dir).is_some() {
        match ready(dir) {
            Ok(found) => return Ok(found),
            Err(error) => progress(&format!("making it again: {error}")),
        }
    }
    clear_place(dir, &fresh).map_err(io_error("old environment"))?;
    let bytes = contents.lean.as_ref().map_or(contents.bytes, |lean| lean.bytes);
    check_space(parent, bytes)?;
    let base = base_interpreter(base)?;
    progress(&format!("making {} ({:.1} GB) with {}", dir.display(), bytes as f64 / 1e9, base.display()));
    let made = fill(&base, &fresh, contents, progress).and_then(|()| {
        relocate(&fresh, dir).map_err(io_error("scripts of the environment"))?;
        fs::rename(&fresh, dir).map_err(io_error("environment folder"))
    });
    if let Err(error) = made {
        // Several gigabytes that nobody could use; pip's own cache makes the next try quick.
        drop(fs::remove_dir_all(&fresh));
        return Err(error);
    }
    ready(dir)
}

/// Removes what stands in the way: only what we made ourselves.
fn clear_place(dir: &Path, fresh: &Path) -> io::Result<()> {
    // Only the holder of the lock writes here, so this is what a dead process left.
    if fresh.symlink_metadata().is_ok() {
        fs::remove_dir_all(fresh)?;
    }
    if dir.join(MARKER).is_file() {
        return fs::remove_dir_all(dir);
    }
    match fs::remove_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn hidden(name: &OsStr, suffix: &str) -> String {
    format!(".{}{suffix}", name.to_string_lossy())
}

pub(super) fn io_error(what: &str) -> impl Fn(io::Error) -> PythonError {
    move |source| PythonError::Io { what: what.to_owned(), source }
}

/// Takes the lock; tells once that somebody else has it.
fn lock(path: &Path, progress: &mut dyn FnMut(&str)) -> Result<File, PythonError> {
    let file = File::options().create(true).append(true).open(path).map_err(io_error("lock"))?;
    let deadline = Instant::now() + PIP_LIMIT;
    let mut told = false;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {}
            Err(error) => return Err(io_error("lock")(error.into())),
        }
        if !told {
            progress("another autokernel is making the environment; waiting for it");
            told = true;
        }
        thread::sleep(Duration::from_millis(200));
    }
}

fn check_space(dir: &Path, needed: u64) -> Result<(), PythonError> {
    let room = rustix::fs::statvfs(dir).map_err(|e| io_error("free space")(e.into()))?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    if free < needed { Err(PythonError::NoSpace { dir: dir.to_owned(), free, needed }) } else { Ok(()) }
}

/// The given interpreter, or the first of the machine that is new enough.
fn base_interpreter(given: Option<&Path>) -> Result<PathBuf, PythonError> {
    let candidates = given.map_or_else(|| Surroundings::real().bases(), |path| vec![path.to_owned()]);
    let mut failure = None;
    for path in &candidates {
        match ask(path, false, Duration::from_mins(1)) {
            Ok(facts) if facts.python() >= OLDEST_BASE => return Ok(facts.program(path)),
            Ok(facts) => {
                let (major, minor) = facts.python();
                let output = format!(
                    "{} is Python {major}.{minor}; 3.{} or newer is needed (--python names another one)",
                    path.display(),
                    OLDEST_BASE.1
                );
                failure.get_or_insert(PythonError::Environment { step: "choice of Python", output });
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    let tried = vec!["python3 on the path".to_owned(), "python on the path".to_owned()];
    Err(failure.unwrap_or(PythonError::NotFound { tried }))
}

/// An environment with everything installed.
fn fill(
    base: &Path,
    fresh: &Path,
    contents: &Contents<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<(), PythonError> {
    let mut venv = Command::new(base);
    venv.args(["-I", "-m", "venv", "--prompt", "autokernel"]).arg(fresh);
    if let Err(output) = step(venv, VENV_LIMIT, &mut |_| {}) {
        return Err(PythonError::Environment { step: "venv", output: venv_advice(base, &output) });
    }
    let python = program_in(fresh).ok_or_else(|| PythonError::Environment {
        step: "venv",
        output: "there is no Python in the new environment".into(),
    })?;
    if !contents.see.is_empty() {
        let folders = contents.see.iter().map(|folder| folder.display().to_string());
        let (mut lines, mut names) = (String::new(), String::new());
        for folder in folders {
            // A line of such a file that begins with `import` is run.
            let _ = writeln!(lines, "import site; site.addsitedir({folder:?})");
            let _ = writeln!(names, "{folder}");
        }
        let file = own_packages(fresh)?.join("autokernel-base.pth");
        fs::write(file, lines).map_err(io_error("path of the base"))?;
        fs::write(fresh.join(SEES), names).map_err(io_error("path of the base"))?;
    }
    let write = |name: &str, text: &str| {
        let file = fresh.join(name);
        fs::write(&file, text).map_err(io_error("requirements")).map(|()| file)
    };
    let pip = || {
        let mut pip = Command::new(&python);
        pip.args(["-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]);
        pip
    };
    if let Some(lean) = &contents.lean {
        let mut first = pip();
        first.args(["--index-url", lean.index, "--timeout", "15", "--retries", "1", "-r"]);
        first.arg(write("autokernel-lean.txt", lean.requirements)?);
        if let Err(output) = step(first, PIP_LIMIT, progress) {
            progress(&format!(
                "the small CPU build can't be had from {} ({}); taking the default build ({:.1} GB)",
                lean.index,
                last_lines(&output, 1),
                contents.bytes as f64 / 1e9
            ));
            check_space(fresh, contents.bytes)?;
        }
    }
    let list = write(MARKER, contents.requirements)?;
    let mut rest = pip();
    let kept: Vec<&str> = contents.requirements.lines().filter_map(|line| line.strip_prefix(KEEP)).collect();
    if !kept.is_empty() {
        rest.arg("-c").arg(write("autokernel-kept.txt", &kept.join("\n"))?);
    }
    rest.arg("-r").arg(&list);
    step(rest, PIP_LIMIT, progress)
        .map_err(|output| PythonError::Environment { step: "pip", output: pip_advice(&output) })
}

/// What an environment of ours sees besides its own packages: a confined Python has to read it too.
pub(super) fn seen_by(environment: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(environment.join(SEES)).unwrap_or_default();
    text.lines().map(PathBuf::from).collect()
}

/// The folder of an environment's own packages.
fn own_packages(environment: &Path) -> Result<PathBuf, PythonError> {
    let lib = fs::read_dir(environment.join("lib")).map_err(io_error("new environment"))?;
    let found = lib.flatten().map(|entry| entry.path().join("site-packages")).find(|path| path.is_dir());
    found.ok_or_else(|| io_error("new environment")(io::ErrorKind::NotFound.into()))
}

/// Runs one step and passes its lines on; the error is the end of what it printed.
fn step(mut command: Command, limit: Duration, progress: &mut dyn FnMut(&str)) -> Result<(), String> {
    // pip's own variables stay, credentials of a mirror included: it is their only reader.
    let kept = env::vars_os().filter(|(name, _)| {
        let pip = name.as_encoded_bytes().starts_with(b"PIP_");
        let python = name.as_encoded_bytes().starts_with(b"PYTHON");
        pip || !(python || is_secret(name))
    });
    command.env_clear().envs(kept);
    // A user's default of installing elsewhere is not meant for this folder.
    command.env("PIP_USER", "0").env_remove("PIP_TARGET").env_remove("PIP_PREFIX").env_remove("PIP_ROOT");
    let (mut partial, mut tail) = ([Vec::new(), Vec::new()], String::new());
    let exit = run(command, limit, &mut |stream, bytes| {
        let line = &mut partial[usize::from(stream == 2)];
        line.extend_from_slice(bytes);
        while let Some(end) = line.iter().position(|b| *b == b'\n') {
            let text = clean(&line.drain(..=end).collect::<Vec<_>>());
            progress(text.trim_end());
            tail.push_str(&text);
        }
        if tail.len() > 64 << 10 {
            tail.drain(..tail.floor_char_boundary(tail.len() - (32 << 10)));
        }
    })
    .map_err(|error| error.to_string())?;
    for rest in &partial {
        tail.push_str(&clean(rest));
    }
    match exit {
        Some(Exit::Code(0)) => Ok(()),
        Some(_) => Err(last_lines(&tail, 15)),
        None => Err(format!("no end after {} s\n{}", limit.as_secs(), last_lines(&tail, 10))),
    }
}

fn venv_advice(base: &Path, output: &str) -> String {
    let missing = ["No module named venv", "No module named 'venv'", "ensurepip"];
    if missing.iter().any(|sign| output.contains(sign)) {
        return format!(
            "{} cannot make environments; install its venv module (Debian and Ubuntu: apt install python3-venv)\n{output}",
            base.display()
        );
    }
    output.to_owned()
}

fn pip_advice(output: &str) -> String {
    let offline = [
        "NewConnectionError",
        "Temporary failure in name resolution",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProxyError",
    ];
    if offline.iter().any(|sign| output.contains(sign)) {
        return format!(
            "the package index does not answer; a mirror can be named by PIP_INDEX_URL\n{output}"
        );
    }
    if output.contains("No space left on device") {
        return format!("the disk is full; pip downloads to its cache and TMPDIR first\n{output}");
    }
    output.to_owned()
}

/// Scripts name the folder that they were made in; after the rename they must name the other one.
fn relocate(from: &Path, to: &Path) -> io::Result<()> {
    let (Some(from_text), Some(to_text)) = (from.to_str(), to.to_str()) else { return Ok(()) };
    let mut files = vec![from.join("pyvenv.cfg")];
    for entry in fs::read_dir(from.join("bin"))? {
        let entry = entry?;
        if entry.file_type()?.is_file() && entry.metadata()?.len() < 1 << 20 {
            files.push(entry.path());
        }
    }
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        if text.contains(from_text) {
            fs::write(&file, text.replace(from_text, to_text))?;
        }
    }
    Ok(())
}
