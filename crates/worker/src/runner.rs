//! The runner: one confined child that loads one artefact and runs its plan in timed batches.
//!
//! This is the parent's half; the child's is the role `runner`. A batch is prepared first (the
//! arguments of every call are resolved), then the clock runs from "go" to "done", then the child's
//! process group is frozen, and only then does anyone look at the outputs. Nothing depends on the
//! child's honesty: a forged "done" leaves wrong outputs behind.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use autokernel_core::plan::Plan;
use rustix::fs::SealFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

use crate::admission;
use crate::child::{self, End, Group};
use crate::memory::{Arena, memory_file, seal};
use crate::toolchain::Artefact;
use crate::wire::{self, Failure, Layout, Reply, Request};
use map::MemoryMap;

mod map;

/// How the C library's allocator works in a runner, which can map no memory once its artefact is loaded:
/// one heap for all threads, everything from its end, nothing given back, stacks of ended threads kept.
pub(crate) const ALLOCATOR: &str = "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:\
    glibc.malloc.trim_threshold=0x7fffffffffffffff:glibc.pthread.stack_cache_size=0x100000000";

/// How long a child may take to react to a signal.
const REACTION: Duration = Duration::from_secs(5);

/// How a runner is started.
#[derive(Clone, Debug)]
pub struct RunnerConfig {
    /// The libgomp that torch loaded, absolute.
    pub gomp: PathBuf,
    /// The thread count that kernels are given.
    pub threads: usize,
    /// Limit for start and load.
    pub timeout: Duration,
}

/// Which buffers one call uses: indices into the inputs arena, and twice into the outputs arena.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// One buffer of the inputs arena for each input of the region.
    pub inputs: Vec<usize>,
    /// One buffer of the outputs arena for each output.
    pub outputs: Vec<usize>,
    /// One buffer of the outputs arena for each scratch entry of the plan.
    pub scratch: Vec<usize>,
}

/// What one batch gave. The child is frozen; outputs are to be read from the arena.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// From the parent's "go" to the child's "done", on the parent's clock.
    pub wall: Duration,
    /// Processor time of all threads, as the child's kernel accounts it.
    pub cpu: Duration,
    /// Whether every thread's floating-point control word came back unchanged.
    pub mxcsr_ok: bool,
    /// Whether no more threads live than were configured.
    pub threads_ok: bool,
}

/// What can go wrong with a runner.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RunnerError {
    #[error("cannot start the runner: {what}")]
    Spawn { what: String },
    #[error("the runner could not be confined: {what}")]
    Sandbox { what: String },
    #[error("the artefact could not be loaded: {reason}")]
    Load { reason: String },
    #[error("the kernel crashed with signal {signal}{}", child::meaning(*signal))]
    Crashed { signal: i32 },
    #[error("the kernel ended the process with code {code}")]
    Exited { code: i32 },
    #[error("the kernel changed what is mapped in its process: {what}")]
    Memory { what: String },
    #[error("no answer within {seconds} s")]
    Hung { seconds: f64 },
    #[error("the runner broke the protocol: {what}")]
    Protocol { what: String },
    #[error("cannot {what}")]
    Io { what: &'static str, source: io::Error },
}

/// The parent's handle of one runner child. Dropping it kills the child's process group.
#[derive(Debug)]
pub struct Runner {
    group: Group,
    socket: OwnedFd,
    timeout: Duration,
    threads: usize,
    frozen: bool,
    uid: u32,
    /// The child's list of mappings, and what was on it before the candidate ran.
    maps: Option<(File, MemoryMap)>,
}

impl Runner {
    /// Starts the child; returns once its confinement has passed its own test.
    pub fn spawn(config: &RunnerConfig) -> Result<Self, RunnerError> {
        let fail =
            |what: &str, e: &dyn std::fmt::Display| RunnerError::Spawn { what: format!("{what}: {e}") };
        if !config.gomp.is_absolute() {
            return Err(fail("libgomp", &"the path is not absolute"));
        }
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| fail("no socket", &e))?;
        let threads = config.threads.max(1);
        let mut command = child::role_command("runner");
        // The socket travels as standard input: no descriptor is ever open to other children.
        command.arg(&config.gomp).stdin(theirs).stdout(Stdio::null()).stderr(Stdio::null());
        // The wait policy stays unset, as torch leaves it: idle threads spin shortly, then sleep.
        command.env("OMP_NUM_THREADS", threads.to_string()).env("OMP_DYNAMIC", "false");
        command.env("GLIBC_TUNABLES", ALLOCATOR);
        let started = child::spawn(command).map_err(|e| fail("no child", &e))?;
        let group = Group::new(&started).map_err(|e| fail("no child", &e))?;
        let mut runner =
            Self { group, socket: ours, timeout: config.timeout, threads, frozen: false, uid: 0, maps: None };
        match runner.receive_with(config.timeout)? {
            (Reply::Ready { uid, .. }, mut descriptors) => {
                let list = File::from(descriptors.pop().ok_or_else(|| fail("no memory map", &"not sent"))?);
                let map = MemoryMap::read(&list).map_err(|e| fail("no memory map", &e))?;
                runner.uid = uid;
                runner.maps = Some((list, map));
                Ok(runner)
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Admits and loads the artefact; `outputs` holds outputs and scratch.
    pub fn load(
        &mut self,
        artefact: &Artefact,
        plan: &Plan,
        inputs: &Arena,
        outputs: &Arena,
    ) -> Result<(), RunnerError> {
        let launches = plan.prepare.iter().map(|step| &step.launch).chain(&plan.launches);
        let entries: Vec<&str> = launches.map(|launch| launch.entry.as_str()).collect();
        admission::admit(&artefact.bytes, &entries)
            .map_err(|e| RunnerError::Load { reason: e.to_string() })?;
        let io = |what| move |source| RunnerError::Io { what, source };
        let mut file = memory_file("artefact", true).map_err(io("make a memory file"))?;
        file.write_all(&artefact.bytes).map_err(io("write the artefact"))?;
        seal(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)
            .map_err(|e| RunnerError::Io { what: "seal the artefact", source: io::Error::other(e) })?;
        let read_only = inputs.read_only().map_err(io("share the inputs"))?;
        let request = Request::Load {
            plan: plan.clone(),
            artefact_bytes: artefact.bytes.len() as u64,
            inputs: Layout { size: inputs.size(), spans: inputs.spans().to_vec() },
            outputs: Layout { size: outputs.size(), spans: outputs.spans().to_vec() },
            threads: self.threads,
        };
        self.send(&request, &[file.as_fd(), read_only.as_fd(), outputs.descriptor()])?;
        match self.receive(self.timeout)? {
            Reply::Loaded => {}
            other => return Err(unexpected(&other)),
        }
        let maps = self.maps.as_mut().ok_or_else(|| RunnerError::Protocol { what: "no map".to_owned() })?;
        maps.1 = MemoryMap::read(&maps.0).map_err(io("read the memory map"))?;
        Ok(())
    }

    /// Runs the calls back to back. When it returns the child's process group is frozen, whatever
    /// the result; [`Runner::batch`] thaws it by itself the next time.
    pub fn batch(&mut self, calls: &[Call], timeout: Duration) -> Result<Batch, RunnerError> {
        self.thaw();
        self.send(&Request::Prepare { calls: calls.to_vec() }, &[])?;
        match self.receive(timeout.max(self.timeout))? {
            Reply::Prepared => {}
            other => return Err(unexpected(&other)),
        }
        let start = Instant::now();
        self.send(&Request::Go, &[])?;
        let reply = self.receive(timeout);
        let wall = start.elapsed();
        let reply = reply?;
        self.freeze()?;
        self.check_map()?;
        match reply {
            Reply::Done { cpu_ns, control_ok, threads } => Ok(Batch {
                wall,
                cpu: Duration::from_nanos(cpu_ns),
                mxcsr_ok: control_ok,
                // The self-test has used two threads at least, and idle ones stay.
                threads_ok: threads.max(self.live_threads().unwrap_or(0)) <= self.threads.max(2),
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Lets the child run again. [`Runner::batch`] does it by itself.
    pub fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            self.group.thaw();
        }
    }

    /// The child's process id.
    pub fn pid(&self) -> i32 {
        self.group.pid()
    }

    /// The user that the child runs as.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Kills the child's process group and reaps it.
    pub fn kill(mut self) {
        self.group.kill();
    }

    fn freeze(&mut self) -> Result<(), RunnerError> {
        match self.group.freeze(REACTION) {
            Ok(true) => {
                self.frozen = true;
                Ok(())
            }
            Ok(false) => Err(self.ended()),
            Err(source) => {
                self.group.kill();
                Err(RunnerError::Io { what: "freeze the runner", source })
            }
        }
    }

    /// Compares what is mapped in the frozen child with what was before the candidate ran.
    fn check_map(&self) -> Result<(), RunnerError> {
        let Some((list, before)) = &self.maps else { return Ok(()) };
        let after = MemoryMap::read(list)
            .map_err(|source| RunnerError::Io { what: "read the memory map", source })?;
        before.difference(&after).map_or(Ok(()), |what| Err(RunnerError::Memory { what }))
    }

    /// Threads of the frozen child. Its own count comes earlier, before the pool shrinks again, but
    /// this one it cannot forge.
    fn live_threads(&self) -> Option<usize> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.group.pid())).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Threads:"))?.trim().parse().ok()
    }

    fn send(
        &mut self,
        request: &Request,
        descriptors: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(), RunnerError> {
        match wire::send(self.socket.as_fd(), request, descriptors) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(self.ended()),
            Err(source) => Err(RunnerError::Io { what: "send to the runner", source }),
        }
    }

    fn receive(&mut self, timeout: Duration) -> Result<Reply, RunnerError> {
        self.receive_with(timeout).map(|(reply, _)| reply)
    }

    /// A reply and the descriptors that came with it.
    fn receive_with(&mut self, timeout: Duration) -> Result<(Reply, Vec<OwnedFd>), RunnerError> {
        let error = match wire::receive::<Reply>(self.socket.as_fd(), Some(Instant::now() + timeout)) {
            Ok((Reply::Failed { stage: Failure::Confine, reason }, _)) => {
                RunnerError::Sandbox { what: reason }
            }
            Ok((Reply::Failed { stage: Failure::Load, reason }, _)) => RunnerError::Load { reason },
            Ok((Reply::Failed { stage: Failure::Call, reason }, _)) => RunnerError::Protocol { what: reason },
            Ok(received) => return Ok(received),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(self.ended()),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => {
                RunnerError::Hung { seconds: timeout.as_secs_f64() }
            }
            Err(e) => RunnerError::Protocol { what: e.to_string() },
        };
        self.group.kill();
        Err(error)
    }

    /// The other side has closed: says how the child ended.
    fn ended(&mut self) -> RunnerError {
        match self.group.wait(REACTION) {
            Some(End::Signal(signal)) => RunnerError::Crashed { signal },
            Some(End::Code(code)) => RunnerError::Exited { code },
            None => {
                self.group.kill();
                RunnerError::Protocol { what: "the runner closed its socket and lives on".to_owned() }
            }
        }
    }
}

fn unexpected(reply: &Reply) -> RunnerError {
    RunnerError::Protocol { what: format!("unexpected reply: {reply:?}") }
}
