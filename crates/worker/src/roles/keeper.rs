//! Stands between the parent and a program that starts further ones, as compilers do.
//!
//! The signal at a parent's death reaches a child and none of the child's own. So a keeper watches a pipe
//! whose other end the parent holds: when the parent ends, however it ends, the pipe does, and the keeper
//! ends its whole process group. Where the program has a process namespace of its own ([`crate::sandbox`]),
//! the system ends what has left the group, too, when the program or the keeper ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FileType;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process, kill_process_group, pidfd_open};

use crate::sandbox::SandboxError;

/// Whether standard input is a pipe, by which a parent says that it lives.
pub(super) fn is_wanted() -> bool {
    rustix::fs::fstat(io::stdin()).is_ok_and(|file| FileType::from_raw_mode(file.st_mode) == FileType::Fifo)
}

/// Runs the command to its end and ends as it did; ends everything when the parent is gone.
pub(super) fn keep(mut command: Command) -> Result<ExitCode, SandboxError> {
    let fail = |e: &dyn std::fmt::Display| SandboxError::new("keep a program", e);
    // From here on the pipe says it; a keeper that is killed first could not pass it on.
    rustix::process::set_parent_process_death_signal(None).map_err(|e| fail(&e))?;
    command.stdin(Stdio::null());
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    let mut child = command.spawn().map_err(|e| fail(&e))?;
    let status = watch(&mut child).map_err(|e| fail(&e))?;
    if let Some(signal) = status.signal().and_then(Signal::from_named_raw) {
        // So that whoever waits sees the signal and not a number that stands for it.
        let _ = kill_process(getpid(), signal);
    }
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)))
}

fn watch(child: &mut Child) -> io::Result<ExitStatus> {
    let pid = Pid::from_raw(child.id().cast_signed()).ok_or(io::ErrorKind::NotFound)?;
    let program = pidfd_open(pid, PidfdFlags::empty())?;
    let stdin = io::stdin();
    let parent: BorrowedFd<'_> = stdin.as_fd();
    loop {
        let mut watched = [
            PollFd::from_borrowed_fd(program.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(parent, PollFlags::IN),
        ];
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
            Ok(_) => {}
        }
        if !watched[0].revents().is_empty() {
            return child.wait();
        }
        // Nobody writes into the pipe: whatever happens to it is its end.
        kill_process_group(rustix::process::getpgrp(), Signal::KILL)?;
    }
}
