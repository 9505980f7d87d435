//! System-call filters, written as names and compiled for the architecture that we run on.
//!
//! A process may stack several: for each call the kernel takes the strictest answer of all.

use serde_json::{Value, json};

use super::SandboxError;

/// `EPERM`, which libraries take as "not for you" and go on.
const EPERM: u32 = 1;
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

    fn compile(mismatch: &Value, matched: &Value, rules: &[Value]) -> Result<Self, SandboxError> {
        let text =
            json!({ "filter": { "mismatch_action": mismatch, "match_action": matched, "filter": rules } });
        let fail = |e: &dyn std::fmt::Display| SandboxError::new("compile a system-call filter", e);
        let arch = std::env::consts::ARCH.try_into().map_err(|e: seccompiler::BackendError| fail(&e))?;
        let mut map =
            seccompiler::compile_from_json(text.to_string().as_bytes(), arch).map_err(|e| fail(&e))?;
        map.remove("filter").map(Self).ok_or_else(|| fail(&"no program"))
    }
}

fn call(name: &str) -> Value {
    json!({ "syscall": name })
}

/// `name`, when the bits `mask` of argument `index` equal `value`.
fn call_if(name: &str, index: u8, mask: u64, value: u64) -> Value {
    json!({ "syscall": name, "args": [
        { "index": index, "type": "qword", "op": { "masked_eq": mask }, "val": value }
    ] })
}

/// Calls whose arguments lie in memory, where no filter can see them: they "do not exist".
pub(crate) fn unseen() -> Result<Filter, SandboxError> {
    let rules = ["clone3", "openat2"].map(call);
    Filter::compile(&json!("allow"), &json!({ "errno": ENOSYS }), &rules)
}

/// What a runner may do until its artefact is loaded: everything else is refused with `EPERM`, so
/// that the self-test can try and live.
pub(crate) fn runner_loading() -> Result<Filter, SandboxError> {
    let mut rules = runner_common();
    rules.extend(["mmap", "mprotect", "seccomp", "prctl", "readlinkat"].map(call));
    rules.push(call_if("prlimit64", 0, u64::from(u32::MAX), 0));
    // For reading an existing file only; landlock then refuses all but memory files.
    rules.push(call_if("openat", 2, O_ACCESS_MODE | O_CREAT | O_TRUNC, 0));
    Filter::compile(&json!({ "errno": EPERM }), &json!("allow"), &rules)
}

/// What is left once the artefact is loaded. Anything else kills the process: no honest kernel
/// makes a system call, and a killed one is easier to explain than one that goes on.
pub(crate) fn runner_running() -> Result<Filter, SandboxError> {
    let mut rules = runner_common();
    for name in ["mmap", "mprotect"] {
        rules.push(call_if(name, 2, PROT_EXEC, 0));
    }
    // The C library asks for the number of processors when a thread first allocates.
    rules.push(call_if("openat", 2, O_ACCESS_MODE | O_CREAT | O_TRUNC, 0));
    Filter::compile(&json!("kill_process"), &json!("allow"), &rules)
}

fn runner_common() -> Vec<Value> {
    let names = [
        "read",
        "pread64",
        "write",
        "close",
        "fstat",
        "newfstatat",
        "lseek",
        "recvmsg",
        "sendmsg",
        "ppoll",
        "munmap",
        "mremap",
        "madvise",
        "brk",
        "futex",
        "clone3",
        "openat2",
        "set_robust_list",
        "rseq",
        "gettid",
        "getpid",
        "sched_yield",
        "sched_getaffinity",
        "clock_gettime",
        "clock_nanosleep",
        "nanosleep",
        "getrandom",
        "rt_sigprocmask",
        "rt_sigaction",
        "rt_sigreturn",
        "sigaltstack",
        "restart_syscall",
        "exit",
        "exit_group",
    ];
    let mut rules: Vec<Value> = names.iter().map(|name| call(name)).collect();
    #[cfg(target_arch = "x86_64")]
    rules.extend(["poll", "time", "gettimeofday"].map(call));
    // Threads, never processes. clone3 and openat2 are allowed here and "do not exist" in `unseen`.
    rules.push(call_if("clone", 0, CLONE_THREAD, CLONE_THREAD));
    // Closing a file asks for its flags first in unoptimised builds.
    rules.push(call_if("fcntl", 1, u64::from(u32::MAX), F_GETFD));
    // abort() signals its own process only.
    let own = rustix::process::getpid().as_raw_nonzero().get() as u64;
    rules.push(call_if("tgkill", 0, u64::from(u32::MAX), own));
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
