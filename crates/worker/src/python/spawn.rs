//! Starting Python.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};

use super::bridge::bridge_dir;
use super::discover::Interpreter;
use super::environment::seen_by;
use super::output::Output;
use super::peer::{Peer, PeerError, io_error, socket_pair};
use super::process::{Process, die_with_parent};
use crate::child;
use crate::sandbox::{Confinement, SandboxError, launch_command};

/// The name of the variable that carries the number of the socket.
const FD_VARIABLE: &str = "AUTOKERNEL_FD";

/// Puts the bridge in front of everything, also of the working folder, where `-m` would look
/// first and where a package of ours may lie under the same name.
const BOOT: &str = "import sys,runpy;sys.path.insert(0,sys.argv.pop(1));\
                    runpy.run_module('autokernel',run_name='__main__',alter_sys=True)";

/// Starts the bridge in `role` (`"oracle"` or `"zygote"`) in the folder `cwd`, with `env` on top of
/// the user's environment without its secrets.
///
/// With a confinement it goes through the `launch` role; what Python itself has to read (the
/// interpreter, torch, the bridge, `PYTHONPATH`) and the socket are added to it here.
pub fn spawn(
    interpreter: &Interpreter,
    role: &str,
    confinement: Option<&Confinement>,
    cwd: &Path,
    env: &[(OsString, OsString)],
) -> Result<Peer, PeerError> {
    let bridge = bridge_dir().map_err(io_error("bridge folder"))?;
    spawn_from(&bridge, interpreter, role, confinement, cwd, env)
}

/// The same with a given bridge folder.
pub(super) fn spawn_from(
    bridge: &Path,
    interpreter: &Interpreter,
    role: &str,
    confinement: Option<&Confinement>,
    cwd: &Path,
    env: &[(OsString, OsString)],
) -> Result<Peer, PeerError> {
    let (ours, theirs) = socket_pair()?;
    let mut command = match confinement {
        None => Command::new(&interpreter.path),
        Some(given) => {
            let mut full = given.clone();
            full.read.extend(needed_paths(interpreter, bridge));
            full.keep.push(theirs.as_raw_fd());
            launch_command(&full, &interpreter.path)
                .map_err(|SandboxError { what }| io_error("launch")(io::Error::other(what)))?
        }
    };
    command.args(["-B", "-c", BOOT]).arg(bridge).arg(role).current_dir(cwd);
    command.env_clear().envs(child_environment(env::vars_os(), bridge)).envs(env.iter().cloned());
    start(command, ours, &theirs)
}

/// Starts any program as a peer that holds the other end of `ours`.
pub(super) fn start(mut command: Command, ours: OwnedFd, theirs: &OwnedFd) -> Result<Peer, PeerError> {
    let pipe = || -> io::Result<_> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let copy = writer.try_clone()?;
        Ok((reader, writer, copy))
    };
    let (reader, writer, copy) = pipe().map_err(io_error("pipe"))?;
    command.env(FD_VARIABLE, theirs.as_raw_fd().to_string());
    command.stdin(Stdio::null()).stdout(writer).stderr(copy).process_group(0);
    die_with_parent(&mut command);
    hand_over(&mut command, theirs.as_raw_fd()).map_err(io_error("descriptors"))?;
    let child = child::spawn(command).map_err(io_error("start of Python"))?;
    let process = Process::own(child).map_err(io_error("pidfd"))?;
    let output = Output::drain(reader).map_err(io_error("output thread"))?;
    Peer::new(process, ours, output)
}

/// Lets the child keep `fd` and nothing else beyond its standard streams.
fn hand_over(command: &mut Command, fd: RawFd) -> io::Result<()> {
    let leaks = inherited(fd)?;
    let hook = move || {
        // SAFETY: the starter keeps `fd` open until the child has started.
        fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::empty())?;
        for leak in &leaks {
            // SAFETY: used for this one call only, and the number is not negative. Another thread
            // of the parent may have closed it meanwhile; then the call fails, which is as good.
            let _ = fcntl_setfd(unsafe { BorrowedFd::borrow_raw(*leak) }, FdFlags::CLOEXEC);
        }
        Ok(())
    };
    // SAFETY: between fork and exec the hook makes system calls on numbers collected before.
    unsafe { command.pre_exec(hook) };
    Ok(())
}

/// Descriptors that this program was itself started with and that would pass through exec.
fn inherited(except: RawFd) -> io::Result<Vec<RawFd>> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir("/proc/self/fd")? {
        let number = entry?.file_name().to_string_lossy().parse::<RawFd>().unwrap_or(0);
        if number <= 2 || number == except {
            continue;
        }
        // SAFETY: used for this one call only; at worst the number is stale and the call fails.
        let flags = fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) });
        if flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC)) {
            found.push(number);
        }
    }
    Ok(found)
}

/// What a confined Python has to read.
fn needed_paths(interpreter: &Interpreter, bridge: &Path) -> Vec<PathBuf> {
    let mut paths = vec![
        interpreter.path.clone(),
        interpreter.prefix.clone(),
        interpreter.base_prefix.clone(),
        interpreter.gomp.clone(),
        bridge.to_owned(),
    ];
    // The site folder: torch's dependencies lie beside it, perhaps outside the prefix.
    paths.extend(interpreter.torch_lib.ancestors().nth(2).map(Path::to_owned));
    paths.extend(interpreter.path.canonicalize().ok());
    paths.extend(seen_by(&interpreter.prefix));
    paths.extend(env::var_os("PYTHONPATH").iter().flat_map(env::split_paths));
    paths.retain(|path| path.is_absolute() && path.exists());
    paths.sort();
    paths.dedup();
    paths
}

/// The user's environment as a child may see it: no secrets, nothing that steers Python off the
/// bridge, one OpenBLAS thread (numpy's pool must not exist beside torch's).
pub(super) fn child_environment(
    user: impl Iterator<Item = (OsString, OsString)>,
    bridge: &Path,
) -> Vec<(OsString, OsString)> {
    let mut path = OsString::from(bridge);
    let mut kept = Vec::new();
    for (name, value) in user {
        if name == "PYTHONPATH" {
            if !value.is_empty() {
                // The user's model may need it; the bridge still comes first.
                path.push(":");
                path.push(&value);
            }
        } else if !is_secret(&name) && !steers_python(&name) {
            kept.push((name, value));
        }
    }
    kept.push(("PYTHONPATH".into(), path));
    kept.push(("OPENBLAS_NUM_THREADS".into(), "1".into()));
    kept
}

/// Whether a variable's name smells of a secret.
pub(super) fn is_secret(name: &OsStr) -> bool {
    const WORDS: [&str; 7] = ["KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL"];
    const PROVIDERS: [&str; 17] = [
        "OPENAI_",
        "ANTHROPIC_",
        "CLAUDE_",
        "GEMINI_",
        "GOOGLE_",
        "AWS_",
        "AZURE_",
        "MISTRAL_",
        "GROQ_",
        "XAI_",
        "DEEPSEEK_",
        "OPENROUTER_",
        "COHERE_",
        "TOGETHER_",
        "FIREWORKS_",
        "OLLAMA_",
        "BEDROCK_",
    ];
    const SOCKETS: [&str; 2] = ["SSH_AUTH_SOCK", "GPG_AGENT_INFO"];
    // A switch of the tokenizers library, not a token.
    if name == "TOKENIZERS_PARALLELISM" {
        return false;
    }
    let name = name.to_string_lossy().to_uppercase();
    WORDS.iter().any(|word| name.contains(word))
        || PROVIDERS.iter().any(|prefix| name.starts_with(prefix))
        || SOCKETS.contains(&name.as_str())
}

/// Variables that change what Python starts, or that switch our own packages.
fn steers_python(name: &OsStr) -> bool {
    const NAMES: [&str; 5] =
        ["PYTHONSTARTUP", "PYTHONHOME", "PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "PYTHONSAFEPATH"];
    NAMES.iter().any(|n| name == *n) || name.as_encoded_bytes().starts_with(b"AUTOKERNEL_")
}
