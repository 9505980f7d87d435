//! Starting and ending child processes.
//!
//! A child that asks for a signal when its parent ends gets it when the *thread* that started it
//! ends. Threads of a pool come and go, so one thread that lives as long as the program starts
//! every child ([`spawn`]).

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

/// Path of the program to re-execute, for tests; else our own.
const PROGRAM: &str = "AUTOKERNEL_EXE";

type Order = (Command, mpsc::SyncSender<io::Result<Child>>);

/// Starts a child from the one thread whose end is the program's.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    static STARTER: OnceLock<Option<Mutex<mpsc::Sender<Order>>>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (sender, orders) = mpsc::channel::<Order>();
        let thread = std::thread::Builder::new().name("starter".to_owned()).spawn(move || {
            for (mut command, answer) in orders {
                // Whoever asked may have gone; the child is then a zombie that dies with us.
                let _ = answer.send(command.spawn());
            }
        });
        thread.ok().map(|_| Mutex::new(sender))
    });
    let gone = || io::Error::other("the thread that starts children has ended");
    let (answer, child) = mpsc::sync_channel(1);
    starter.as_ref().and_then(|sender| sender.lock().ok()?.send((command, answer)).ok()).ok_or_else(gone)?;
    child.recv().map_err(|_| gone())?
}

/// `autokernel __worker ROLE PARENT`, in a process group of its own and with an empty environment.
pub(crate) fn role_command(role: &str) -> Command {
    // The link keeps naming the running program when its file is replaced by an update.
    let program = std::env::var_os(PROGRAM).unwrap_or_else(|| "/proc/self/exe".into());
    let mut command = Command::new(program);
    command.arg0("autokernel").args(["__worker", role, &std::process::id().to_string()]);
    command.env_clear().process_group(0);
    command
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Signal(i32),
    Code(i32),
}

/// What ended a child by this signal, where the number alone says too little. What a kernel has to do with
/// the memory and system calls of it the judge says.
pub(crate) const fn meaning(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL: a trap, or an instruction that this processor lacks)",
        5 => " (SIGTRAP: a breakpoint)",
        6 => " (SIGABRT: it ran off its stack, or a library that it called gave up)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE: a division of integers by zero, or its like)",
        9 => " (SIGKILL: not by its own doing; the machine may be out of memory)",
        11 => " (SIGSEGV)",
        24 => " (SIGXCPU: its processor time is used up)",
        31 => " (SIGSYS)",
        _ => "",
    }
}

/// A child that leads its process group; killed and reaped when dropped.
#[derive(Debug)]
pub(crate) struct Group {
    pid: Pid,
    end: Option<End>,
}

impl Group {
    pub(crate) fn new(child: &Child) -> io::Result<Self> {
        let pid = Pid::from_raw(child.id().cast_signed()).ok_or_else(|| io::Error::other("no process id"))?;
        Ok(Self { pid, end: None })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    fn signal(&self, signal: Signal) {
        // A group that has gone already is what was wanted, or will be noticed by the wait.
        if self.end.is_none() {
            let _ = rustix::process::kill_process_group(self.pid, signal);
        }
    }

    /// Stops every process of the group and waits until the leader has stopped (or ended).
    pub(crate) fn freeze(&mut self, timeout: Duration) -> io::Result<bool> {
        self.signal(Signal::STOP);
        let deadline = Instant::now() + timeout;
        loop {
            match self.poll(true)? {
                Some(Change::Stopped) => return Ok(true),
                Some(Change::Ended) => return Ok(false),
                None if Instant::now() > deadline => return Err(io::ErrorKind::TimedOut.into()),
                None => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Waits for the end, at most this long.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Option<End> {
        let deadline = Instant::now() + timeout;
        while self.end.is_none() && Instant::now() < deadline {
            if self.poll(false).is_err() {
                break;
            }
            if self.end.is_none() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        self.end
    }

    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.wait(Duration::from_secs(10));
    }

    /// The end is looked at before it is taken: while the leader is a zombie its group's number
    /// cannot go to someone else, so whatever it left behind is killed without doubt.
    fn poll(&mut self, or_stopped: bool) -> io::Result<Option<Change>> {
        let mut options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        options.set(WaitIdOptions::STOPPED, or_stopped);
        let Some(status) = waitid(WaitId::Pid(self.pid), options | WaitIdOptions::NOWAIT)? else {
            return Ok(None);
        };
        if status.stopped() {
            waitid(WaitId::Pid(self.pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG)?;
            return Ok(Some(Change::Stopped));
        }
        self.signal(Signal::KILL);
        waitid(WaitId::Pid(self.pid), WaitIdOptions::EXITED)?;
        self.end = match (status.terminating_signal(), status.exit_status()) {
            (Some(signal), _) => Some(End::Signal(signal)),
            (None, code) => Some(End::Code(code.unwrap_or(-1))),
        };
        Ok(Some(Change::Ended))
    }
}

enum Change {
    Stopped,
    Ended,
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}
