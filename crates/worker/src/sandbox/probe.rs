//! Proof of confinement: what must be refused is tried.

use std::io::{Read, Write};
use std::process::Stdio;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use serde::{Deserialize, Serialize};

use super::{Confined, Confinement, Domain, SandboxError, confine};
use crate::child;

/// What this machine can enforce, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "a report of yes and no")]
pub struct SandboxReport {
    /// Version of landlock's interface; 0 where there is none.
    pub landlock_abi: u32,
    /// Whether system-call filters work.
    pub seccomp: bool,
    /// The user that we run as.
    pub uid: u32,
    /// The user that a child runs as; another one where we are root.
    pub child_uid: u32,
    /// Whether children get a user of their own.
    pub uid_drop: bool,
    /// Whether a user namespace is needed: never so far.
    pub user_namespace_needed: bool,
    /// Whether builders get process ids of their own, so that nothing of theirs outlives them. Without,
    /// their process group is ended, which compilers do not leave.
    pub pid_namespace: bool,
    /// Whether a confined child tried what is forbidden and was refused.
    pub self_test: bool,
    /// What failed, if anything.
    pub problem: Option<String>,
}

/// Tries what a runner may not do, from the calling thread. `Err` names what was possible.
pub(crate) fn self_test(parent: i32) -> Result<(), String> {
    let refused = |what: &str, result: Result<(), Errno>| match result {
        Err(Errno::ACCESS | Errno::PERM) => Ok(()),
        Err(e) => Err(format!("{what} failed for another reason: {e}")),
        Ok(()) => Err(format!("{what} was possible")),
    };
    let open = |path, flags| rustix::fs::open(path, flags, Mode::empty()).map(drop);
    // The root folder exists everywhere and everyone may list it: only landlock can refuse.
    refused("listing the root folder", open("/", OFlags::RDONLY | OFlags::DIRECTORY))?;
    refused("opening a device for writing", open("/dev/null", OFlags::WRONLY))?;
    refused(
        "opening a socket",
        rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).map(drop),
    )?;
    refused(
        "opening a local socket",
        rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).map(drop),
    )?;
    refused(
        "making a memory file",
        rustix::fs::memfd_create("probe", rustix::fs::MemfdFlags::CLOEXEC).map(drop),
    )?;
    let parent = rustix::process::Pid::from_raw(parent).ok_or("no parent to try")?;
    refused("signalling the parent", rustix::process::test_kill_process(parent))
}

/// Role `probe`: confines itself as a runner and prints what it reached.
pub(crate) fn report_to_stdout(parent: i32) -> Result<(), SandboxError> {
    let confined = confine(&Confinement::new(Domain::Runner), parent)?;
    self_test(parent).map_err(|what| SandboxError { what })?;
    let thread = std::thread::spawn(move || self_test(parent)).join();
    thread
        .map_err(|_| SandboxError { what: "a thread of the self-test ended".to_owned() })?
        .map_err(|what| SandboxError { what: format!("in a thread: {what}") })?;
    let text = serde_json::to_vec(&confined).map_err(|e| SandboxError::new("report", &e))?;
    std::io::stdout().write_all(&text).map_err(|e| SandboxError::new("report", &e))
}

/// Tries the confinement in a child and reports.
pub fn probe() -> SandboxReport {
    let uid = rustix::process::geteuid().as_raw();
    let (confined, problem) = match try_child() {
        Ok(confined) => (Some(confined), None),
        Err(problem) => (None, Some(problem)),
    };
    let child_uid = confined.map_or(uid, |c| c.uid);
    SandboxReport {
        landlock_abi: confined.map_or(0, |c| c.landlock_abi),
        seccomp: confined.is_some(),
        uid,
        child_uid,
        uid_drop: uid == 0 && child_uid != 0,
        user_namespace_needed: false,
        pid_namespace: run("namespace").is_ok(),
        self_test: confined.is_some(),
        problem,
    }
}

fn try_child() -> Result<Confined, String> {
    serde_json::from_str(&run("probe")?).map_err(|e| format!("unreadable report: {e}"))
}

/// What a role that needs no more than its name printed, if it came to a good end.
fn run(role: &str) -> Result<String, String> {
    let mut command = child::role_command(role);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut started = child::spawn(command).map_err(|e| format!("cannot start a child: {e}"))?;
    let mut group = child::Group::new(&started).map_err(|e| e.to_string())?;
    let end = group.wait(Duration::from_secs(10));
    group.kill();
    // Both are far smaller than a pipe, so the child never waited for a reader.
    let (mut out, mut err) = (String::new(), String::new());
    if let (Some(stdout), Some(stderr)) = (started.stdout.as_mut(), started.stderr.as_mut()) {
        stdout
            .read_to_string(&mut out)
            .and_then(|_| stderr.read_to_string(&mut err))
            .map_err(|e| e.to_string())?;
    }
    match end {
        Some(child::End::Code(0)) => Ok(out),
        Some(end) => Err(format!("the child ended with {end:?}: {}", err.trim())),
        None => Err("the child did not answer".to_owned()),
    }
}
