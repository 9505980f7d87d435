//! System-call filters, written as names and compiled for the architecture that we run on.
//!
//! A process may stack several: for each call the kernel takes the strictest answer of all.

use serde_json::{Value, json};

use super::SandboxError;

/// `EPERM`, which libraries take as "not for you" and go on.
pub(super) const EPERM: u32 = 1;
/// `ENOSYS`, which makes the C library fall back to an older call whose arguments can be checked.
const ENOSYS: u32 = 38;
const CLONE_THREAD: u64 = 0x0001_0000;
/// New mount, cgroup, UTS, IPC, user, PID and network namespaces.
const CLONE_NAMESPACES: [u64; 7] =
    [0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000];
const O_ACCESS_MODE: u64 = 0o3;
const O_CREAT: u64 = 0o100;
const O_TRUNC: u64 = 0o1000;
const PROT_EXEC: u64 = 4;
const F_GETFD: u64 = 1;
const MADV_DONTNEED: u64 = 4;
const STDERR: u64 = 2;
/// `SIGABRT`, `SIGBUS`, `SIGSEGV`: their handlers are put back to the default on the way out.
const FATAL: [u64; 3] = [6, 7, 11];

/// A compiled filter.
pub(crate) struct Filter(seccompiler::BpfProgram);

impl Filter {
    /// Installs it for this thread and those that it will start.
    pub(crate) fn apply(&self) -> Result<(), SandboxError> {
        seccompiler::apply_filter(&self.0).map_err(|e| SandboxError::new("install a system-call filter", &e))
    }

    /// Installs it for every thread of the process.
    pub(crate) fn apply_to_all_threads(&self) -> Result<(), SandboxError> {
        seccompiler::apply_filter_all_threads(&self.0)
            .map_err(|e| SandboxError::new("install a system-call filter in all threads", &e))
    }

    /// The program as the kernel reads it: eight bytes an instruction, in the machine's byte order.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let encode = |op: &seccompiler::sock_filter| {
            let mut bytes = [0; 8];
            bytes[..2].copy_from_slice(&op.code.to_ne_bytes());
            bytes[2..4].copy_from_slice(&[op.jt, op.jf]);
            bytes[4..].copy_from_slice(&op.k.to_ne_bytes());
            bytes
        };
        self.0.iter().flat_map(encode).collect()
    }

    pub(super) fn compile(mismatch: &Value, matched: &Value, rules: &[Value]) -> Result<Self, SandboxError> {
        let text =
            json!({ "filter": { "mismatch_action": mismatch, "match_action": matched, "filter": rules } });
        let fail = |e: &dyn std::fmt::Display| SandboxError::new("compile a system-call filter", e);
        let arch = std::env::consts::ARCH.try_into().map_err(|e: seccompiler::BackendError| fail(&e))?;
        let mut map =
            seccompiler::compile_from_json(text.to_string().as_bytes(), arch).map_err(|e| fail(&e))?;
        map.remove("filter").map(Self).ok_or_else(|| fail(&"no program"))
    }
}

pub(super) fn call(name: &str) -> Value {
    json!({ "syscall": name })
}

/// `name`, when the bits `mask` of argument `index` equal `value`.
pub(super) fn call_if(name: &str, index: u8, mask: u64, value: u64) -> Value {
    json!({ "syscall": name, "args": [
        { "index": index, "type": "qword", "op": { "masked_eq": mask }, "val": value }
    ] })
}

/// Calls whose arguments lie in memory, where no filter can see them: they "do not exist".
pub(crate) fn unseen() -> Result<Filter, SandboxError> {
    let rules = ["clone3", "openat2"].map(call);
    Filter::compile(&json!("allow"), &json!({ "errno": ENOSYS }), &rules)
}

/// Opening an existing file for reading.
pub(super) fn opens_for_reading() -> Value {
    call_if("openat", 2, O_ACCESS_MODE | O_CREAT | O_TRUNC, 0)
}

/// A new thread, never a process. `clone3`, whose arguments no filter sees, "does not exist" ([`unseen`]).
pub(super) fn starts_a_thread() -> Value {
    call_if("clone", 0, CLONE_THREAD, CLONE_THREAD)
}

/// What `abort()` does: a signal to the process's own thread.
pub(super) fn signals_itself(pid: i32) -> Value {
    call_if("tgkill", 0, u64::from(u32::MAX), u64::from(pid.unsigned_abs()))
}

/// `mmap` or `mprotect` of memory that no code runs from.
pub(super) fn not_executable(name: &str) -> Value {
    call_if(name, 2, PROT_EXEC, 0)
}

/// What a runner may do until its artefact is loaded: everything else is refused with `EPERM`, so
/// that the self-test can try and live.
pub(crate) fn runner_loading() -> Result<Filter, SandboxError> {
    let names = [
        "read",
        "write",
        "close",
        "fstat",
        "newfstatat",
        "lseek",
        "readlinkat",
        "ppoll",
        "munmap",
        "mremap",
        "mmap",
        "mprotect",
        "madvise",
        "brk",
        "openat2",
        "sched_getaffinity",
        "clock_nanosleep",
        "nanosleep",
        "getrandom",
        "rt_sigaction",
        "sigaltstack",
        "seccomp",
        "prctl",
    ];
    let mut rules = runner_common();
    rules.extend(names.iter().map(|name| call(name)));
    #[cfg(target_arch = "x86_64")]
    rules.extend(["poll", "time", "gettimeofday"].map(call));
    // Closing a file asks for its flags first in unoptimised builds.
    rules.push(call_if("fcntl", 1, u64::from(u32::MAX), F_GETFD));
    rules.push(call_if("prlimit64", 0, u64::from(u32::MAX), 0));
    // Landlock then refuses all but memory files.
    rules.push(opens_for_reading());
    Filter::compile(&json!({ "errno": EPERM }), &json!("allow"), &rules)
}

/// What is left once the artefact is loaded: messages with the parent, and what libgomp does with its
/// threads. No memory is mapped, protected otherwise or given back, no file opened or closed: the
/// runner's heap was grown before ([`crate::roles`]), and stacks of ended threads are used again.
/// Anything else kills the process: no honest kernel makes a system call, and a killed one is easier
/// to explain than one that goes on.
pub(crate) fn runner_running() -> Result<Filter, SandboxError> {
    let mut rules = runner_common();
    // A last word on standard error, which is the null device, and the end: how a stack overflow is told
    // from a wild pointer.
    rules.push(call_if("write", 0, u64::from(u32::MAX), STDERR));
    rules.extend(FATAL.iter().map(|signal| call_if("rt_sigaction", 0, u64::from(u32::MAX), *signal)));
    // A thread that ends gives the pages of its stack back, and our own wiping does.
    rules.push(call_if("madvise", 2, u64::from(u32::MAX), MADV_DONTNEED));
    Filter::compile(&json!("kill_process"), &json!("allow"), &rules)
}

fn runner_common() -> Vec<Value> {
    let names = [
        "pread64",
        "recvmsg",
        "sendmsg",
        "futex",
        "clone3",
        "set_robust_list",
        "rseq",
        "gettid",
        "getpid",
        "sched_yield",
        "clock_gettime",
        "rt_sigprocmask",
        "rt_sigreturn",
        "restart_syscall",
        "exit",
        "exit_group",
    ];
    let mut rules: Vec<Value> = names.iter().map(|name| call(name)).collect();
    rules.push(starts_a_thread());
    rules.push(signals_itself(rustix::process::getpid().as_raw_nonzero().get()));
    rules
}

/// What neither a compiler nor Python may do. A list of refusals, because what such programs need
/// differs between versions; landlock, the user and the limits do the rest.
pub(crate) fn program() -> Result<Filter, SandboxError> {
    let names = [
        "socket",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "process_madvise",
        "pidfd_getfd",
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "keyctl",
        "add_key",
        "request_key",
        "open_by_handle_at",
        "name_to_handle_at",
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "mount",
        "umount2",
        "move_mount",
        "open_tree",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
        "mount_setattr",
        "pivot_root",
        "chroot",
        "unshare",
        "setns",
        "init_module",
        "finit_module",
        "delete_module",
        "kexec_load",
        "kexec_file_load",
        "reboot",
        "swapon",
        "swapoff",
        "acct",
        "quotactl",
        "quotactl_fd",
        "syslog",
        "settimeofday",
        "clock_settime",
        "clock_adjtime",
        "adjtimex",
        "sethostname",
        "setdomainname",
        "truncate",
    ];
    let mut rules: Vec<Value> = names.iter().map(|name| call(name)).collect();
    rules.extend(CLONE_NAMESPACES.iter().map(|flag| call_if("clone", 0, *flag, *flag)));
    // Landlock before its third version lets a file be emptied that is opened for reading.
    rules.push(call_if("openat", 2, O_ACCESS_MODE | O_TRUNC, O_TRUNC));
    #[cfg(target_arch = "x86_64")]
    {
        rules.extend(["iopl", "ioperm"].map(call));
        rules.push(call_if("open", 1, O_ACCESS_MODE | O_TRUNC, O_TRUNC));
    }
    Filter::compile(&json!("allow"), &json!({ "errno": EPERM }), &rules)
}
