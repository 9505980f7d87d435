//! Confinement of child processes: identity, filesystem, system calls, limits.
//!
//! A child confines itself ([`confine`]) while it has one thread, before anything of a candidate is
//! near it. Everything is a hard requirement: what the kernel cannot enforce is an error, and the
//! child's self-test proves the rest. Programs that are not ours (compilers, Python) are started
//! through our own `launch` role, which confines itself and then becomes them ([`launch_command`]).

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

use crate::child;

mod files;
pub(crate) mod filter;
mod namespace;
mod probe;
mod wall;

pub(crate) use namespace::own_processes;
pub use probe::{SandboxReport, probe};
pub(crate) use probe::{report_to_stdout, self_test};
pub use wall::Wall;
pub(crate) use wall::{INSTALL, python_child};

/// First of the users that children of root become; nobody's on common systems.
const FIRST_UID: u32 = 60_000;
/// How many there are.
const UIDS: u32 = 5_000;
/// Address space of one process of a builder; a compiler of a kernel takes a tenth.
const BUILDER_MEMORY: u64 = 4 << 30;
/// Processes and threads of one child's user.
const PROCESSES: u64 = 4_096;

/// Which set of rules a child lives under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Domain {
    /// A compiler: reads the system's toolchain folders, writes one folder.
    Builder,
    /// A candidate's code in our own process: no file at all.
    Runner,
    /// Python with torch and a package: reads the system and what it is given, no network.
    Deployment,
}

/// A domain with its paths and limits: what a child asks for when it confines itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Confinement {
    /// The set of rules.
    pub domain: Domain,
    /// Files and folders that may be read and executed, besides those of the domain. They must exist.
    pub read: Vec<PathBuf>,
    /// Folders that may be written too. Where root is left, they are given to the new user.
    pub write: Vec<PathBuf>,
    /// Descriptors besides 0, 1 and 2 that stay open across the start of a program.
    pub keep: Vec<i32>,
    /// Processor seconds, if limited.
    pub cpu_seconds: Option<u64>,
    /// Largest file that may be written, if limited.
    pub file_bytes: Option<u64>,
}

impl Confinement {
    /// A confinement with the domain's own paths only.
    pub fn new(domain: Domain) -> Self {
        Self { domain, read: vec![], write: vec![], keep: vec![], cpu_seconds: None, file_bytes: None }
    }
}

/// What cannot be enforced.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct SandboxError {
    /// The measure and why it failed.
    pub what: String,
}

impl SandboxError {
    pub(crate) fn new(what: &str, why: &dyn fmt::Display) -> Self {
        Self { what: format!("cannot {what}: {why}") }
    }
}

/// Confines the calling process, for good. Child side, while single-threaded. `parent` is the
/// process that must not be outlived.
///
/// The order matters: paths are opened with the old user's rights; the death signal is lost when
/// the user changes; landlock and filters need `no_new_privs` once root is gone.
pub fn confine(confinement: &Confinement, parent: i32) -> Result<Confined, SandboxError> {
    let files = files::Files::prepare(confinement)?;
    limit(confinement)?;
    let uid = leave_root(confinement)?;
    // Across the start of a program this is reset; for our own code it keeps equals of the same
    // user from reading its memory.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|e| SandboxError::new("forbid inspection", &e))?;
    die_with(parent)?;
    rustix::thread::set_no_new_privs(true).map_err(|e| SandboxError::new("give up new privileges", &e))?;
    let landlock_abi = files.enforce()?;
    match confinement.domain {
        Domain::Runner => filter::runner_loading()?.apply()?,
        Domain::Builder | Domain::Deployment => filter::program()?.apply()?,
    }
    // Last, because answers of equal strictness come from the newest filter.
    filter::unseen()?.apply()?;
    Ok(Confined { landlock_abi, uid })
}

/// What [`confine`] reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Confined {
    /// Version of landlock's interface.
    pub landlock_abi: u32,
    /// The user that the child runs as.
    pub uid: u32,
}

fn limit(confinement: &Confinement) -> Result<(), SandboxError> {
    let set = |resource, value| {
        // A hard limit that is lower already stays.
        let old = rustix::process::getrlimit(resource);
        let value = old.maximum.map_or(value, |maximum| maximum.min(value));
        rustix::process::setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })
            .map_err(|e| SandboxError::new("limit resources", &e))
    };
    set(Resource::Core, 0)?;
    if confinement.domain == Domain::Builder {
        // A template bomb or an endless include must end in the compiler's own words, not in the
        // machine's memory. Python and a runner reserve far more address space than they use.
        set(Resource::As, BUILDER_MEMORY)?;
    }
    if let Some(seconds) = confinement.cpu_seconds {
        set(Resource::Cpu, seconds.max(1))?;
    }
    if let Some(bytes) = confinement.file_bytes {
        set(Resource::Fsize, bytes)?;
    }
    // Counted for the whole user, so it only makes sense where the child has its own.
    if rustix::process::geteuid().is_root() {
        set(Resource::Nproc, PROCESSES)?;
    }
    Ok(())
}

/// Root reads and writes everyone's memory and files, so its children become a user of their own.
/// The number follows the process id: children that live at the same time get different users.
fn leave_root(confinement: &Confinement) -> Result<u32, SandboxError> {
    let uid = rustix::process::geteuid();
    if !uid.is_root() {
        return Ok(uid.as_raw());
    }
    let fail = |e: rustix::io::Errno| SandboxError::new("leave root", &e);
    let number = FIRST_UID + rustix::process::getpid().as_raw_nonzero().get().unsigned_abs() % UIDS;
    let (uid, gid) = (rustix::process::Uid::from_raw(number), rustix::process::Gid::from_raw(number));
    for folder in &confinement.write {
        std::os::unix::fs::chown(folder, Some(number), Some(number))
            .map_err(|e| SandboxError::new(&format!("give `{}` away", folder.display()), &e))?;
    }
    let keep_reading = confinement.domain == Domain::Deployment;
    rustix::thread::set_keep_capabilities(keep_reading).map_err(fail)?;
    rustix::thread::set_thread_groups(&[]).map_err(fail)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(fail)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(fail)?;
    // An environment of Python below root's own home can be read by root only. Landlock, which
    // comes next, says what may be read; this one capability makes it so for such folders too.
    let kept = if keep_reading { CapabilitySet::DAC_READ_SEARCH } else { CapabilitySet::empty() };
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: kept },
    )
    .map_err(fail)?;
    if keep_reading {
        rustix::thread::configure_capability_in_ambient_set(kept, true).map_err(fail)?;
    }
    if rustix::process::geteuid().is_root() || rustix::process::getuid().is_root() {
        return Err(SandboxError { what: "still root".to_owned() });
    }
    Ok(number)
}

/// Asks for SIGKILL when the parent ends, and makes sure that it has not ended already.
pub(crate) fn die_with(parent: i32) -> Result<(), SandboxError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| SandboxError::new("tie the child's life to the parent's", &e))?;
    match rustix::process::getppid() {
        Some(pid) if pid.as_raw_nonzero().get() == parent => Ok(()),
        _ => Err(SandboxError { what: "the parent has ended".to_owned() }),
    }
}

/// The command that starts `program` confined, by way of our own `launch` role. The caller sets
/// arguments, environment, folder and standard streams as on any command.
///
/// The child dies with the *thread* that starts it; start it with [`crate::child::spawn`].
pub fn launch_command(confinement: &Confinement, program: &Path) -> Result<Command, SandboxError> {
    let mut confinement = confinement.clone();
    // A program of a virtual environment is a link into another installation.
    for path in [Some(program.to_owned()), program.canonicalize().ok()].into_iter().flatten() {
        confinement.read.extend(files::installation(&path));
    }
    let text =
        serde_json::to_string(&confinement).map_err(|e| SandboxError::new("describe a confinement", &e))?;
    let mut command = child::role_command("launch");
    command.arg(text).arg("--").arg(program);
    Ok(command)
}
