//! Processes from outside: starting, looking at, stopping and ending them.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process_group, pidfd_open,
    pidfd_send_signal, set_parent_process_death_signal, waitid,
};

use super::peer::Exit;
use crate::child;

/// How long a killed process may take to vanish; longer means that it hangs in the kernel.
const REAP: Duration = Duration::from_secs(10);

/// Has the kernel kill the child when this program dies; start it with [`child::spawn`].
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above, and then no signal ever comes.
        if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec the hook makes three system calls; it takes no lock and
    // allocates nothing.
    unsafe { command.pre_exec(hook) };
}

/// What `/proc/PID/stat` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) state: char,
    pub(super) parent: i32,
    pub(super) group: i32,
}

/// The state of a process or thread (`PID` or `PID/task/TID`); `None` when there is none.
pub(super) fn stat(of: &str) -> Option<Stat> {
    let text = fs_err::read_to_string(format!("/proc/{of}/stat")).ok()?;
    // The name is in parentheses and may itself contain any character, parentheses included.
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    Some(Stat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
    })
}

/// Whether every thread of the process is stopped.
fn stands_still(pid: Pid) -> bool {
    let pid = pid.as_raw_pid();
    let pass = || {
        let Ok(tasks) = fs_err::read_dir(format!("/proc/{pid}/task")) else { return false };
        tasks.flatten().all(|task| {
            let name = task.file_name();
            stat(&format!("{pid}/task/{}", name.to_string_lossy()))
                .is_some_and(|s| matches!(s.state, 'T' | 't'))
        })
    };
    // A thread that started another one just before it stopped may hide it from one pass.
    pass() && pass()
}

/// Waits until one of the descriptors is ready; the answer says which. All false: time is up.
pub(super) fn wait_ready<const N: usize>(
    mut fds: [PollFd<'_>; N],
    deadline: Instant,
) -> io::Result<[bool; N]> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left =
            Timespec { tv_sec: left.as_secs().min(1 << 30) as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut fds, Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(fds.map(|fd| !fd.revents().is_empty())),
        }
    }
}

/// A process group of ours: its leader is our child, or a child of a zygote of ours.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    handle: OwnedFd,
    child: Option<Child>,
    buried: bool,
    exit: Option<Exit>,
}

impl Process {
    /// Takes over a child that leads a process group of its own.
    pub(super) fn own(mut child: Child) -> io::Result<Self> {
        let opened = i32::try_from(child.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(rustix::io::Errno::SRCH)
            .and_then(|pid| Ok((pid, pidfd_open(pid, PidfdFlags::empty())?)));
        match opened {
            Ok((pid, handle)) => Ok(Self { pid, handle, child: Some(child), buried: false, exit: None }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error.into())
            }
        }
    }

    /// Takes over a process that `parent` says it forked. Believed only when the kernel agrees,
    /// since everything else that this handle does is sending signals.
    pub(super) fn forked(pid: i32, parent: i32, deadline: Instant) -> Result<Self, String> {
        let group = Pid::from_raw(pid).filter(|_| pid > 1).ok_or("no process id")?;
        let handle = pidfd_open(group, PidfdFlags::empty()).map_err(|e| format!("process {pid}: {e}"))?;
        loop {
            match stat(&pid.to_string()) {
                Some(Stat { parent: real, .. }) if real != parent => {
                    return Err(format!("process {pid} is not a child of {parent}"));
                }
                // The child joins its own group after the fork, perhaps after the zygote's reply.
                Some(Stat { group, .. }) if group == pid => break,
                None => return Err(format!("process {pid} is gone")),
                Some(_) if Instant::now() > deadline => {
                    return Err(format!("process {pid} has no group of its own"));
                }
                Some(_) => thread::sleep(Duration::from_micros(200)),
            }
        }
        Ok(Self { pid: group, handle, child: None, buried: false, exit: None })
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid.as_raw_pid()
    }

    /// Becomes readable when the process ends.
    pub(super) fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// Whether it was killed or found dead.
    pub(super) fn buried(&self) -> bool {
        self.buried
    }

    /// How it ended, where that is known.
    pub(super) fn exit(&self) -> Option<Exit> {
        self.exit
    }

    /// Whether it runs or is stopped.
    pub(super) fn alive(&self) -> bool {
        !self.buried && !self.ends_before(Instant::now())
    }

    /// Waits for the end.
    pub(super) fn ends_before(&self, deadline: Instant) -> bool {
        wait_ready([PollFd::new(&self.handle, PollFlags::IN)], deadline).is_ok_and(|[ended]| ended)
    }

    /// Signals the whole group, unless its number may belong to somebody else by now.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        if self.buried {
            return Err(rustix::io::Errno::SRCH.into());
        }
        // A dead child of ours keeps its number until it is reaped. A dead child of a zygote may
        // be reaped: then only an orphaned group can still be meant, never a new process.
        let reused = self.child.is_none()
            && !self.alive()
            && stat(&self.pid().to_string()).is_some_and(|s| s.state != 'Z');
        if reused {
            return Err(rustix::io::Errno::SRCH.into());
        }
        kill_process_group(self.pid, signal)?;
        Ok(())
    }

    /// Stops the group; returns when every thread of the leader stands still.
    pub(super) fn stop(&self, deadline: Instant) -> io::Result<()> {
        self.signal(Signal::STOP)?;
        let mut pause = Duration::from_micros(20);
        loop {
            let stopped = if self.child.is_some() {
                let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
                waitid(WaitId::Pid(self.pid), options)?.is_some_and(|status| status.stopped())
            } else {
                stands_still(self.pid)
            };
            if stopped {
                return Ok(());
            }
            if !self.alive() {
                return Err(rustix::io::Errno::SRCH.into());
            }
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Kills the group and reaps the leader. Idempotent.
    pub(super) fn bury(&mut self) -> Option<Exit> {
        if self.buried {
            return self.exit;
        }
        // Before reaping: from then on the number may be given to somebody else.
        if self.signal(Signal::KILL).is_err() {
            let _ = pidfd_send_signal(&self.handle, Signal::KILL);
        }
        let gone = self.ends_before(Instant::now() + REAP);
        match &mut self.child {
            Some(child) if gone => self.exit = child.wait().ok().and_then(exit_of),
            // Its zygote has it reaped, which may come a moment after the end.
            None if gone => {
                let patience = Instant::now() + Duration::from_millis(100);
                self.exit = exit_from_handle(&self.handle);
                while self.exit.is_none()
                    && stat(&self.pid().to_string()).is_some()
                    && Instant::now() < patience
                {
                    thread::sleep(Duration::from_millis(1));
                    self.exit = exit_from_handle(&self.handle);
                }
            }
            _ => {}
        }
        self.buried = true;
        self.exit
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.bury();
    }
}

/// What a process handle says of a process that is gone, as `struct pidfd_info` of Linux 6.15 and newer.
#[repr(C)]
#[derive(Default)]
struct HandleInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit: i32,
}

/// `PIDFD_GET_INFO`, and the bit of its mask that stands for the exit.
const GET_INFO: rustix::ioctl::Opcode = rustix::ioctl::opcode::read_write::<HandleInfo>(0xff, 11);
const EXIT: u64 = 1 << 3;

/// How a process ended that is not our child; `None` where the system does not say.
fn exit_from_handle(handle: &OwnedFd) -> Option<Exit> {
    let mut info = HandleInfo { mask: EXIT, ..HandleInfo::default() };
    // SAFETY: the request reads and writes a structure of this size, which its number names.
    let asked = unsafe {
        rustix::ioctl::ioctl(handle, rustix::ioctl::Updater::<GET_INFO, HandleInfo>::new(&mut info))
    };
    asked.ok().filter(|()| info.mask & EXIT != 0).and_then(|()| exit_of(ExitStatus::from_raw(info.exit)))
}

fn exit_of(status: ExitStatus) -> Option<Exit> {
    status.code().map(Exit::Code).or(status.signal().map(Exit::Signal))
}

/// Runs a command to its end, or kills its group at the deadline (then the answer is `None`).
/// `sink` gets what it prints as it comes: stream (1 or 2) and bytes.
pub(crate) fn run(
    mut command: Command,
    limit: Duration,
    sink: &mut dyn FnMut(u8, &[u8]),
) -> io::Result<Option<Exit>> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    die_with_parent(&mut command);
    let deadline = Instant::now() + limit;
    let mut child = child::spawn(command)?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let mut process = Process::own(child)?;
    let (Some(mut out), Some(mut err)) = (out, err) else { return Err(io::ErrorKind::BrokenPipe.into()) };
    rustix::io::ioctl_fionbio(&out, true)?;
    rustix::io::ioctl_fionbio(&err, true)?;
    let (mut open_out, mut open_err) = (true, true);
    let ended = loop {
        // A closed pipe is always ready; asking for nothing still reports that, so it is swapped
        // for the process handle.
        let first = if open_out { out.as_fd() } else { process.handle() };
        let second = if open_err { err.as_fd() } else { process.handle() };
        let [_, _, ended] = wait_ready(
            [
                PollFd::from_borrowed_fd(first, PollFlags::IN),
                PollFd::from_borrowed_fd(second, PollFlags::IN),
                PollFd::from_borrowed_fd(process.handle(), PollFlags::IN),
            ],
            deadline,
        )?;
        open_out = open_out && drain(&mut out, &mut |bytes| sink(1, bytes))?;
        open_err = open_err && drain(&mut err, &mut |bytes| sink(2, bytes))?;
        if ended || Instant::now() >= deadline {
            break ended;
        }
    };
    let exit = process.bury();
    if ended { exit.map(Some).ok_or_else(|| io::ErrorKind::NotFound.into()) } else { Ok(None) }
}

/// Passes on what a non-blocking pipe holds; false at its end.
fn drain(pipe: &mut impl io::Read, sink: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
    let mut chunk = [0; 8192];
    loop {
        match pipe.read(&mut chunk) {
            Ok(0) => return Ok(false),
            Ok(n) => sink(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
