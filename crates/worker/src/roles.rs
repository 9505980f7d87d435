//! The child half of the program: `autokernel __worker ROLE PARENT …`.
//!
//! * `runner PARENT GOMP`: the socket is standard input; see [`crate::runner`].
//! * `launch PARENT CONFINEMENT -- PROGRAM ARGS…`: confines itself and becomes the program; a builder
//!   whose standard input is a pipe starts it instead, and ends it when the pipe ends ([`keeper`]).
//! * `probe PARENT`: confines itself as a runner and prints what it reached.
//! * `namespace PARENT`: says by its end whether what it starts could have process ids of its own.
//! * `device PARENT`: measures the machine; loads nothing of anybody's, so it is not confined.
//!
//! No role starts a thread before it is confined: landlock binds only the thread that asks.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::io::FdFlags;

use crate::sandbox::{self, Confinement, Domain, SandboxError};

mod control;
mod invoke;
mod keeper;
mod kernel;
mod runner;
mod stack;

/// What a role that could not confine itself exits with; no compiler uses it.
pub(crate) const NOT_CONFINED: u8 = 125;
/// What stands before the reason on standard error.
pub(crate) const NOT_CONFINED_TEXT: &str = "autokernel: not confined: ";

/// Runs a role. `args` is the program's whole argument list, or what follows `__worker`.
pub fn child_main(args: &[String]) -> ExitCode {
    let start = args.iter().position(|arg| arg == "__worker").map_or(0, |at| at + 1);
    let result = match &args[start..] {
        [role, parent, gomp] if role == "runner" => match parent.parse() {
            Ok(parent) => return runner::serve(parent, gomp),
            Err(_) => Err(usage()),
        },
        [role, parent, confinement, dashes, program @ ..] if role == "launch" && dashes == "--" => {
            match launch(parent, confinement, program) {
                Ok(code) => return code,
                Err(e) => Err(e),
            }
        }
        [role, parent] if role == "probe" => {
            parent.parse().map_err(|_| usage()).and_then(sandbox::report_to_stdout)
        }
        [role, _parent] if role == "namespace" => {
            // It can't be tried by a process that will go on: it could start no thread any more.
            let made = sandbox::own_processes();
            return if made { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        [role, _parent] if role == "device" => crate::device::print_facts(),
        _ => Err(usage()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // With nobody left to read it, the exit code still says it.
            let _ = writeln!(io::stderr(), "{NOT_CONFINED_TEXT}{e}");
            ExitCode::from(NOT_CONFINED)
        }
    }
}

fn usage() -> SandboxError {
    SandboxError { what: "not a role of this program".to_owned() }
}

/// Confines this process and becomes `program`, or stays between it and a parent that holds the other end
/// of standard input.
fn launch(parent: &str, confinement: &str, program: &[String]) -> Result<ExitCode, SandboxError> {
    let parent = parent.parse().map_err(|_| usage())?;
    let [program, args @ ..] = program else { return Err(usage()) };
    let mut confinement: Confinement =
        serde_json::from_str(confinement).map_err(|e| SandboxError::new("read the confinement", &e))?;
    let private: Option<RawFd> =
        std::env::var_os("AUTOKERNEL_FD").and_then(|text| text.to_str()?.parse().ok());
    confinement.keep.extend(private);
    close_descriptors_on_exec(&confinement.keep)?;
    let keeps = confinement.domain == Domain::Builder && keeper::is_wanted();
    if keeps {
        // Before root's rights are gone. Best effort: the keeper works without.
        sandbox::own_processes();
    }
    sandbox::confine(&confinement, parent)?;
    let mut command = Command::new(program);
    command.args(args.iter().map(OsString::from));
    if keeps {
        return keeper::keep(command);
    }
    let error = command.exec();
    Err(SandboxError::new(&format!("start `{program}`"), &error))
}

/// Descriptors above 2 that are open, whoever opened them.
fn open_descriptors() -> Result<Vec<RawFd>, SandboxError> {
    let fail = |e: io::Error| SandboxError::new("list open files", &e);
    let mut found: Vec<RawFd> = vec![];
    for entry in std::fs::read_dir("/proc/self/fd").map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        found.extend(name.to_str().and_then(|text| text.parse::<RawFd>().ok()).filter(|fd| *fd > 2));
    }
    // The listing saw its own descriptor, which is closed by now.
    // SAFETY: asking for the flags of a number that is no descriptor fails and changes nothing.
    found.retain(|fd| rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(*fd) }).is_ok());
    Ok(found)
}

fn close_descriptors_on_exec(keep: &[RawFd]) -> Result<(), SandboxError> {
    for fd in open_descriptors()? {
        // SAFETY: the number is that of an open file, and this process has one thread.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let flags = if keep.contains(&fd) { FdFlags::empty() } else { FdFlags::CLOEXEC };
        rustix::io::fcntl_setfd(borrowed, flags).map_err(|e| SandboxError::new("close files", &e))?;
    }
    Ok(())
}
