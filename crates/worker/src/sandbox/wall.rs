//! The wall around a forked Python child: what is left of the system once a candidate may run.
//!
//! A deployment zygote lives under a list of refusals, because a Python that imports torch and compiles
//! needs nearly everything. A child that only calls what is loaded already needs little, so it gets a
//! second filter, a list of what is allowed. The program is compiled here, from names, and travels to
//! the child as bytes: what Python does with it is one call, and no rule is written twice.

use serde_json::{Value, json};

use super::SandboxError;
use super::filter::{self, Filter, call, call_if};

/// `prctl` options: the name of a thread, the name of an anonymous mapping.
const PR_NAMES: [u64; 2] = [15, 0x5356_4d41];
/// `ioctl` requests that opening a file or a socket makes: terminal settings, close-on-exec, blocking.
const IOCTLS: [u64; 4] = [0x5401, 0x5450, 0x5451, 0x5421];
/// `fcntl` commands: read and set close-on-exec, read the mode, copy a descriptor.
const FCNTLS: [u64; 4] = [1, 2, 3, 1030];

/// Which children get which wall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wall {
    /// One packaged operator: no memory may become executable.
    Operator,
    /// A whole model with kernels in it. PyTorch's own libraries write machine code at their first call,
    /// so executable memory is allowed. Its kernels have had their verdict behind the stricter wall.
    Model,
}

/// The filter of a child with this process id. Whatever is not named fails with `EPERM`: libraries probe
/// and go on, a kernel gains nothing, and a self-test can try.
///
/// Reading files stays, for Python imports at the moment of need; landlock says which. Memory and threads
/// stay, for torch's allocator and for libgomp, which ends and starts threads when teams change their
/// size. What goes is whatever starts, signals or inspects a process, leaves the group, opens a socket or
/// a file for writing, makes shared memory, or changes limits, affinity, timers and priorities.
pub(crate) fn python_child(wall: Wall, pid: i32) -> Result<Filter, SandboxError> {
    let names = [
        // Talking to the parent, reading files.
        "read",
        "pread64",
        "readv",
        "write",
        "writev",
        "sendto",
        "sendmsg",
        "recvfrom",
        "recvmsg",
        "ppoll",
        "close",
        "fstat",
        "newfstatat",
        "statx",
        "lseek",
        "getdents64",
        "readlinkat",
        "faccessat",
        "faccessat2",
        "getcwd",
        // Memory that no code runs from.
        "munmap",
        "mremap",
        "madvise",
        "brk",
        // Threads.
        "futex",
        "clone3",
        "openat2",
        "set_robust_list",
        "rseq",
        "gettid",
        "sched_yield",
        "sched_getaffinity",
        "getcpu",
        "exit",
        "exit_group",
        "restart_syscall",
        "rt_sigprocmask",
        "rt_sigaction",
        "rt_sigreturn",
        "sigaltstack",
        // Asking for facts.
        "clock_gettime",
        "clock_getres",
        "clock_nanosleep",
        "nanosleep",
        "gettimeofday",
        "getrandom",
        "getpid",
        "getuid",
        "geteuid",
        "getgid",
        "getegid",
        "getrusage",
        "uname",
        "sysinfo",
    ];
    let mut rules: Vec<Value> = names.iter().map(|name| call(name)).collect();
    #[cfg(target_arch = "x86_64")]
    rules.extend(["poll", "stat", "lstat", "access", "readlink", "time"].map(call));
    rules.push(filter::opens_for_reading());
    rules.push(filter::starts_a_thread());
    rules.push(filter::signals_itself(pid));
    for name in ["mmap", "mprotect"] {
        rules.push(match wall {
            Wall::Operator => filter::not_executable(name),
            Wall::Model => call(name),
        });
    }
    // Reading a limit of its own, never setting one.
    rules.push(json!({ "syscall": "prlimit64", "args": [
        { "index": 0, "type": "dword", "op": "eq", "val": 0 },
        { "index": 2, "type": "qword", "op": "eq", "val": 0 },
    ] }));
    for (name, index, values) in
        [("prctl", 0, &PR_NAMES[..]), ("ioctl", 1, &IOCTLS[..]), ("fcntl", 1, &FCNTLS[..])]
    {
        rules.extend(values.iter().map(|value| call_if(name, index, u64::from(u32::MAX), *value)));
    }
    Filter::compile(&json!({ "errno": filter::EPERM }), &json!("allow"), &rules)
}

/// The number of the system call that installs a filter.
#[cfg(target_arch = "x86_64")]
pub(crate) const INSTALL: u32 = 317;
/// The number of the system call that installs a filter.
#[cfg(target_arch = "aarch64")]
pub(crate) const INSTALL: u32 = 277;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walls_compile_and_differ() {
        let bytes = |wall, pid| python_child(wall, pid).unwrap().bytes();
        assert_ne!(bytes(Wall::Operator, 7), bytes(Wall::Model, 7));
        assert_ne!(bytes(Wall::Model, 7), bytes(Wall::Model, 8), "the process is named");
        let program = bytes(Wall::Operator, 7);
        // Eight bytes an instruction; the kernel takes at most 4096 of them.
        assert!(program.len().is_multiple_of(8) && program.len() / 8 < 4096);
    }
}
