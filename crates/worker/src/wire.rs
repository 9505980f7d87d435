//! Messages between the parent and a runner: a length, then JSON, with descriptors alongside.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use autokernel_core::plan::Plan;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::memory::Span;
use crate::runner::Call;

/// Largest message.
pub(crate) const LIMIT: usize = 16 << 20;
/// Most descriptors with one message.
pub(crate) const DESCRIPTORS: usize = 3;

/// What the parent asks a runner. Versioned by both halves being the same program.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// With the artefact, the inputs and the outputs as descriptors.
    Load { plan: Plan, artefact_bytes: u64, inputs: Layout, outputs: Layout, threads: usize },
    /// Resolve the arguments of these calls.
    Prepare { calls: Vec<Call> },
    /// Run the prepared calls.
    Go,
}

/// The buffers of an arena.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) size: u64,
    pub(crate) spans: Vec<Span>,
}

/// What a runner answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// Confined, and the self-test has passed.
    Ready {
        uid: u32,
        landlock_abi: u32,
    },
    Loaded,
    Prepared,
    Done {
        cpu_ns: u64,
        control_ok: bool,
        threads: usize,
    },
    /// The stage that failed, and why.
    Failed {
        stage: Failure,
        reason: String,
    },
}

/// Where a runner failed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    Confine,
    Load,
    Call,
}

/// Sends one message.
pub(crate) fn send<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let mut bytes = u32::try_from(body.len()).map_err(io::Error::other)?.to_le_bytes().to_vec();
    bytes.extend(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors"));
    }
    let mut sent = 0;
    while sent < bytes.len() {
        match sendmsg(socket, &[IoSlice::new(&bytes[sent..])], &mut control, SendFlags::NOSIGNAL) {
            Ok(n) => {
                sent += n;
                control.clear();
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Receives one message and the descriptors that came with it; waits at most until `deadline`.
/// `UnexpectedEof` when the other side is gone, `TimedOut` when it said nothing.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    deadline: Option<Instant>,
) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut descriptors = vec![];
    let mut length = [0; 4];
    fill(socket, &mut length, deadline, &mut descriptors)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LIMIT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut body = vec![0; length];
    fill(socket, &mut body, deadline, &mut descriptors)?;
    Ok((serde_json::from_slice(&body)?, descriptors))
}

fn fill(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    deadline: Option<Instant>,
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut filled = 0;
    while filled < bytes.len() {
        wait_readable(socket, deadline)?;
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut bytes[filled..])];
        match recvmsg(socket, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(message) => filled += message.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::CONNRESET) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) => return Err(e.into()),
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
    }
    Ok(())
}

fn wait_readable(socket: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<()> {
    let Some(deadline) = deadline else { return Ok(()) };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)], Some(&timeout)) {
            Ok(0) if left == Duration::ZERO => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Reads bytes as a hostile child's answer and as a request, the way they come in from a socket, until
/// nothing is left of them. How many messages each reading found.
pub fn read_bytes(bytes: &[u8]) -> io::Result<(usize, usize)> {
    fn count<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<usize> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let mut sent = 0;
        while sent < bytes.len() {
            match rustix::net::send(&theirs, &bytes[sent..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(n) => sent += n,
                // What does not fit the socket's buffer is cut off, which is one more thing to survive.
                Err(rustix::io::Errno::AGAIN) => break,
                Err(e) => return Err(e.into()),
            }
        }
        drop(theirs);
        let mut found = 0;
        while receive::<T>(ours.as_fd(), Some(Instant::now() + Duration::from_secs(1))).is_ok() {
            found += 1;
        }
        Ok(found)
    }
    Ok((count::<Reply>(bytes)?, count::<Request>(bytes)?))
}
