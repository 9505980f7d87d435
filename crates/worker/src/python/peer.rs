//! One JSON-lines connection to a Python process.

use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::output::{Output, clean};
use super::process::{Process, wait_ready};
use crate::child;
use crate::sandbox::{INSTALL, Wall, python_child};

/// Longest line in either direction.
pub(super) const MAX_LINE: usize = 64 << 20;
/// Longest message or traceback that is passed on.
const MAX_TEXT: usize = 64 << 10;
/// How long a fork may take.
const FORK: Duration = Duration::from_mins(1);
/// How long a group may take to stand still.
const FREEZE: Duration = Duration::from_secs(10);
/// Too many threads once or twice may be those that libgomp let go when a team shrank, stopped on their
/// way out. They can't be waited for: what computes past its time would get that time. But they are gone
/// when it is stopped the next time.
const CROWDED: u32 = 3;
/// How long a process that hung up may take to be gone.
const FAREWELL: Duration = Duration::from_secs(2);

/// What a limit beyond the clock's range amounts to.
const FOREVER: Duration = Duration::from_hours(24 * 365);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// What can go wrong between a request and its reply.
///
/// After anything but [`PeerError::Remote`], [`PeerError::Request`] and [`PeerError::Frozen`] the
/// child's state is unknown, so its group has been killed.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The bridge reported an error; the child is alive and well.
    #[error("{kind}: {message}")]
    Remote {
        /// Short word that callers match on, such as `no_model`.
        kind: String,
        /// One sentence or more.
        message: String,
        /// Python's traceback, or empty.
        traceback: String,
        /// Further fields of the error object.
        data: Value,
    },
    /// The child is gone. How is unknown for a forked child, which is not ours to reap, before Linux 6.15.
    #[error("Python process ended ({}){}", exit_text(*exit), last_line(*exit, stderr))]
    Died {
        /// How it ended.
        exit: Option<Exit>,
        /// The end of what it printed.
        stderr: String,
    },
    /// No complete reply in time.
    #[error("no reply to {op} in {seconds} s")]
    Timeout {
        /// The request.
        op: String,
        /// The limit.
        seconds: f64,
        /// The end of what it printed.
        stderr: String,
    },
    /// The child broke the protocol.
    #[error("broken reply: {what}")]
    Protocol {
        /// What is wrong.
        what: String,
    },
    /// The request can't be sent as it is; nothing was sent.
    #[error("request {what}")]
    Request {
        /// What is wrong.
        what: &'static str,
    },
    /// The child is frozen and can't answer.
    #[error("the Python process is frozen")]
    Frozen,
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

fn exit_text(exit: Option<Exit>) -> String {
    match exit {
        None => "it crashed, was killed or left; this system does not say which".into(),
        Some(Exit::Code(code)) => format!("exit code {code}"),
        Some(Exit::Signal(signal)) => format!("signal {signal}{}", child::meaning(signal)),
    }
}

/// What a process that ended by itself said last: Python's own reason, as a rule.
fn last_line(exit: Option<Exit>, stderr: &str) -> String {
    let said = stderr.lines().rev().map(str::trim).find(|line| !line.is_empty());
    match (exit, said) {
        (Some(Exit::Code(_)), Some(line)) => format!(": {}", line.chars().take(200).collect::<String>()),
        _ => String::new(),
    }
}

/// Shorthand for the operations that can only fail with a system call.
pub(super) fn io_error(what: &'static str) -> impl Fn(io::Error) -> PeerError {
    move |source| PeerError::Io { what, source }
}

/// Why an exchange came to nothing, before the child was looked at.
enum Fault {
    Late,
    Gone,
    Protocol(String),
    Io(io::Error),
}

#[derive(Deserialize)]
struct Reply {
    id: u64,
    ok: Option<Value>,
    error: Option<RemoteError>,
}

#[derive(Deserialize)]
struct RemoteError {
    kind: String,
    message: String,
    #[serde(default)]
    traceback: Option<String>,
    #[serde(flatten)]
    data: Map<String, Value>,
}

/// A Python process that serves requests. Dropping it kills its process group.
#[derive(Debug)]
pub struct Peer {
    // Before the socket, so that the child is killed and not merely hung up on.
    process: Process,
    socket: OwnedFd,
    buffer: Vec<u8>,
    output: Arc<Output>,
    frozen: AtomicBool,
    walls: Walls,
    /// How many times in a row too many threads were there when it was stopped.
    crowded: AtomicU32,
}

/// Which walls a process builds.
#[derive(Clone, Copy, Debug, Default)]
struct Walls {
    /// Those of the children that it forks.
    children: Option<Wall>,
    /// Its own, until it stands.
    own: Option<Wall>,
    /// The threads that lived when its own stood, where no more may come.
    threads: Option<usize>,
}

impl Peer {
    /// Takes over a started child and our end of its socket.
    pub(super) fn new(process: Process, socket: OwnedFd, output: Arc<Output>) -> Result<Self, PeerError> {
        rustix::io::ioctl_fionbio(&socket, true).map_err(|e| io_error("socket")(e.into()))?;
        Ok(Self {
            process,
            socket,
            buffer: Vec::new(),
            output,
            frozen: AtomicBool::new(false),
            walls: Walls::default(),
            crowded: AtomicU32::new(0),
        })
    }

    /// Sends `op` with the fields of `body` (an object) and waits for the reply.
    pub fn request(&mut self, op: &str, body: Value, timeout: Duration) -> Result<Value, PeerError> {
        self.exchange(op, body, None, timeout).map(|(value, _)| value)
    }

    /// The same with a descriptor, of which the child gets a copy.
    pub fn request_with(
        &mut self,
        op: &str,
        body: Value,
        descriptor: BorrowedFd<'_>,
        timeout: Duration,
    ) -> Result<Value, PeerError> {
        self.exchange(op, body, Some(descriptor), timeout).map(|(value, _)| value)
    }

    /// [`Self::request`] with the time from just before the write to just after the reply is complete.
    pub fn request_timed(
        &mut self,
        op: &str,
        body: Value,
        timeout: Duration,
    ) -> Result<(Value, Duration), PeerError> {
        self.exchange(op, body, None, timeout)
    }

    /// Zygote only: forks a child that serves on a connection of its own.
    pub fn fork(&mut self) -> Result<Peer, PeerError> {
        let deadline = Instant::now() + FORK;
        let (ours, theirs) = socket_pair()?;
        let (reply, _) = self.exchange("fork", Value::Object(Map::new()), Some(theirs.as_fd()), FORK)?;
        drop(theirs);
        let pid = reply.get("pid").and_then(Value::as_i64).and_then(|pid| i32::try_from(pid).ok());
        let process = match Process::forked(pid.unwrap_or(0), self.pid(), deadline) {
            Ok(process) => process,
            Err(what) => return Err(self.fail(Fault::Protocol(what), "fork", FORK)),
        };
        let mut child = Peer::new(process, ours, Arc::clone(&self.output))?;
        child.walls.own = self.walls.children;
        Ok(child)
    }

    /// Zygote only: children forked from now on call a candidate's code, behind such a wall. They refuse
    /// to until [`Peer::confine`] has been called on them.
    pub fn wall_children(&mut self, wall: Wall) {
        self.walls.children = Some(wall);
    }

    /// Confines a child whose zygote asked for it; called again, or on any other process, it does nothing.
    ///
    /// Whatever the child has to compile or import it does before. Its own proof that the filter stands
    /// is completed by what the system says of each of its threads.
    pub fn confine(&mut self, timeout: Duration) -> Result<(), PeerError> {
        let Some(wall) = self.walls.own else { return Ok(()) };
        let refuse = |peer: &mut Self, what| peer.fail(Fault::Protocol(what), "confine", timeout);
        let before = filters(self.pid());
        let program = match python_child(wall, self.pid()) {
            Ok(filter) => filter.bytes(),
            Err(e) => return Err(refuse(self, e.what)),
        };
        let hex = program.iter().fold(String::new(), |mut text, byte| {
            // Writing to a string can't fail.
            let _ = write!(text, "{byte:02x}");
            text
        });
        let body =
            serde_json::json!({ "program": hex, "install": INSTALL, "executable": wall == Wall::Model });
        self.request("confine", body, timeout)?;
        let after = filters(self.pid());
        let stands = match (before.as_slice(), after.as_slice()) {
            ([.., before], [first, rest @ ..]) => *first == before + 1 && rest.iter().all(|n| n == first),
            _ => false,
        };
        if !stands {
            return Err(refuse(self, "the child says that it is confined, and is not".to_owned()));
        }
        self.walls.own = None;
        self.walls.threads = (wall == Wall::Operator).then_some(after.len());
        Ok(())
    }

    /// Process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Whether the process still runs.
    pub fn alive(&self) -> bool {
        self.process.alive()
    }

    /// The end of what the process (and its zygote) printed.
    pub fn output(&self) -> String {
        self.output.text()
    }

    /// Stops the process group; returns when every thread of the child stands still.
    pub fn freeze(&self) -> Result<(), PeerError> {
        self.process.stop(Instant::now() + FREEZE).map_err(|e| self.signal_error("freeze", e))?;
        self.frozen.store(true, Ordering::Release);
        let crowded = self.walls.threads.is_some_and(|most| filters(self.pid()).len() > most);
        let times = if crowded { self.crowded.load(Ordering::Relaxed) + 1 } else { 0 };
        self.crowded.store(times, Ordering::Relaxed);
        if times < CROWDED {
            return Ok(());
        }
        Err(PeerError::Protocol { what: "more threads live than the kernel was given".to_owned() })
    }

    /// Lets a frozen group go on.
    pub fn thaw(&self) -> Result<(), PeerError> {
        self.process.signal(Signal::CONT).map_err(|e| self.signal_error("thaw", e))?;
        self.frozen.store(false, Ordering::Release);
        Ok(())
    }

    /// Reads the child's memory; freeze it first.
    pub fn read_memory(&self, address: u64, buf: &mut [u8]) -> io::Result<()> {
        // Opened each time: the file stands for the address space at the time of opening.
        let memory = std::fs::File::open(format!("/proc/{}/mem", self.pid()))?;
        // Only after opening does a live process prove that its number was not given away.
        if !self.alive() {
            return Err(rustix::io::Errno::SRCH.into());
        }
        memory.read_exact_at(buf, address)
    }

    /// Kills the process group and reaps the child.
    pub fn kill(mut self) {
        self.process.bury();
    }

    fn signal_error(&self, what: &'static str, source: io::Error) -> PeerError {
        if self.alive() {
            return PeerError::Io { what, source };
        }
        PeerError::Died { exit: self.process.exit(), stderr: self.output.last_words() }
    }

    #[cfg(test)]
    pub(super) fn frozen_for_tests(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Release);
    }

    fn exchange(
        &mut self,
        op: &str,
        body: Value,
        descriptor: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<(Value, Duration), PeerError> {
        let id = fresh_id()?;
        let line = encode(id, op, body)?;
        self.ready().map_err(|fault| self.fail(fault, op, timeout))?;
        if self.frozen.load(Ordering::Acquire) {
            return Err(PeerError::Frozen);
        }
        self.buffer.clear();
        self.buffer.reserve(64 << 10);
        let start = Instant::now();
        let deadline = start.checked_add(timeout).unwrap_or(start + FOREVER);
        let received = self.send(&line, descriptor, deadline).and_then(|()| self.receive(deadline));
        let wall = start.elapsed();
        let reply = received.and_then(|()| self.decode(id));
        if self.buffer.capacity() > 1 << 20 {
            self.buffer = Vec::new();
        }
        match reply {
            Err(fault) => Err(self.fail(fault, op, timeout)),
            Ok(Reply { ok: Some(value), error: None, .. }) => Ok((value, wall)),
            Ok(Reply { error: Some(e), ok: None, .. }) => Err(PeerError::Remote {
                kind: shorten(&e.kind),
                message: shorten(&e.message),
                traceback: shorten(e.traceback.as_deref().unwrap_or("")),
                data: Value::Object(e.data),
            }),
            Ok(_) => Err(self.fail(Fault::Protocol("neither ok nor error".into()), op, timeout)),
        }
    }

    /// Makes sure that the child waits for us. A reply that is there before its request would pass
    /// for a fast one.
    fn ready(&self) -> Result<(), Fault> {
        if self.process.buried() {
            return Err(Fault::Gone);
        }
        let mut byte = [0u8; 1];
        match recv(&self.socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::AGAIN) if self.process.alive() => Ok(()),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNRESET) | Ok((_, 0)) => Err(Fault::Gone),
            Ok(_) => Err(Fault::Protocol("message without a request".into())),
            Err(e) => Err(Fault::Io(e.into())),
        }
    }

    fn send(
        &self,
        mut line: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), Fault> {
        let rights = descriptor.as_ref().map(std::slice::from_ref);
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(rights) = rights {
            control.push(SendAncillaryMessage::ScmRights(rights));
        }
        while !line.is_empty() {
            match sendmsg(&self.socket, &[io::IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL) {
                Ok(n) => {
                    line = &line[n..];
                    // The descriptor travels with the first byte, once.
                    control.clear();
                }
                Err(rustix::io::Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(Fault::Gone),
                Err(e) => return Err(Fault::Io(e.into())),
            }
        }
        Ok(())
    }

    /// Fills the buffer with one line.
    fn receive(&mut self, deadline: Instant) -> Result<(), Fault> {
        loop {
            self.wait(PollFlags::IN, deadline)?;
            let old = self.buffer.len();
            self.buffer.reserve(64 << 10);
            match recv(&self.socket, rustix::buffer::spare_capacity(&mut self.buffer), RecvFlags::empty()) {
                Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return Err(Fault::Gone),
                Ok(_) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(Fault::Io(e.into())),
            }
            match self.buffer[old..].iter().position(|b| *b == b'\n') {
                Some(at) if old + at + 1 == self.buffer.len() => return Ok(()),
                Some(_) => return Err(Fault::Protocol("more than one line".into())),
                None if self.buffer.len() > MAX_LINE => {
                    return Err(Fault::Protocol(format!("line longer than {MAX_LINE} bytes")));
                }
                None => {}
            }
        }
    }

    /// Waits for the socket. The process handle is watched too: a grandchild that inherited the
    /// other end would keep the connection open beyond the child's death.
    fn wait(&self, flags: PollFlags, deadline: Instant) -> Result<(), Fault> {
        let fds = [
            PollFd::new(&self.socket, flags),
            PollFd::from_borrowed_fd(self.process.handle(), PollFlags::IN),
        ];
        match wait_ready(fds, deadline).map_err(Fault::Io)? {
            [true, _] => Ok(()),
            [false, true] => Err(Fault::Gone),
            [false, false] => Err(Fault::Late),
        }
    }

    fn decode(&self, id: u64) -> Result<Reply, Fault> {
        let reply: Reply = serde_json::from_slice(&self.buffer).map_err(|e| {
            let start = clean(&self.buffer[..self.buffer.len().min(200)]);
            Fault::Protocol(format!("{e} in {:?}", start.trim_end()))
        })?;
        if reply.id == id { Ok(reply) } else { Err(Fault::Protocol("reply to another request".into())) }
    }

    /// Ends the child, whose state nobody knows any more, and says why.
    fn fail(&mut self, fault: Fault, op: &str, timeout: Duration) -> PeerError {
        if matches!(fault, Fault::Gone) && !self.process.buried() {
            // It may have closed the socket on its way out; its own exit status is worth a moment.
            self.process.ends_before(Instant::now() + FAREWELL);
        }
        let exit = self.process.bury();
        match fault {
            Fault::Late => {
                let stderr = self.output.last_words();
                PeerError::Timeout { op: op.to_owned(), seconds: timeout.as_secs_f64(), stderr }
            }
            Fault::Gone => PeerError::Died { exit, stderr: self.output.last_words() },
            Fault::Protocol(what) => PeerError::Protocol { what },
            Fault::Io(source) => PeerError::Io { what: "socket", source },
        }
    }
}

/// How many system-call filters each thread of a process lives under.
fn filters(pid: i32) -> Vec<u32> {
    let of = |task: io::Result<std::fs::DirEntry>| -> Option<u32> {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        // Kernels before 5.9 do not count; there the mode is all that can be seen.
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok();
        field("Seccomp_filters:").or_else(|| field("Seccomp:"))
    };
    std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(of).collect()
}

/// A pair of connected stream sockets, closed on exec.
pub(super) fn socket_pair() -> Result<(OwnedFd, OwnedFd), PeerError> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|e| io_error("socketpair")(e.into()))
}

/// An id that the child can't guess, so that it can't answer a request before it was made.
fn fresh_id() -> Result<u64, PeerError> {
    let mut bytes = [0u8; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| io_error("getrandom")(e.into()))?;
    // 53 bits: a whole number in every JSON library.
    Ok(u64::from_le_bytes(bytes) >> 11)
}

fn encode(id: u64, op: &str, body: Value) -> Result<Vec<u8>, PeerError> {
    let Value::Object(mut body) = body else { return Err(PeerError::Request { what: "is not an object" }) };
    body.insert("id".into(), id.into());
    body.insert("op".into(), op.into());
    let mut line = Value::Object(body).to_string().into_bytes();
    if line.len() >= MAX_LINE {
        return Err(PeerError::Request { what: "is longer than a line may be" });
    }
    line.push(b'\n');
    Ok(line)
}

/// Cleaned, and cut in the middle: both ends of a traceback matter.
fn shorten(text: &str) -> String {
    let text = clean(text.as_bytes());
    if text.len() <= MAX_TEXT {
        return text;
    }
    let head = text.floor_char_boundary(MAX_TEXT / 2);
    let tail = text.ceil_char_boundary(text.len() - MAX_TEXT / 2);
    format!("{}\n[…]\n{}", &text[..head], &text[tail..])
}
