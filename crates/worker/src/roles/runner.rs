//! Role `runner`: the confined child that calls kernels.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};
use rustix::time::{ClockId, clock_gettime};

use super::kernel::Kernel;
use super::open_descriptors;
use crate::sandbox::{self, Confined, Confinement, Domain, SandboxError};
use crate::wire::{self, Failure, Reply, Request};

/// Address space beyond the arenas: libraries, stacks, the C library's pools.
const ADDRESS_SPACE: u64 = 4 << 30;
/// Address space of one more thread: its stack and its pool.
const THREAD_SPACE: u64 = 256 << 20;
/// Processor seconds of a runner's life.
const CPU_SECONDS: u64 = 3600;

/// `GOMP_parallel(function, data, threads, flags)`.
type GompParallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, u32, u32);

/// Serves the parent until it hangs up.
pub(super) fn serve(parent: i32, gomp: &str) -> ExitCode {
    let Ok(socket) = take_socket() else { return ExitCode::from(super::NOT_CONFINED) };
    let result = start(parent, gomp).and_then(|(team, confined)| {
        let reply = Reply::Ready { uid: confined.uid, landlock_abi: confined.landlock_abi };
        wire::send(socket.as_fd(), &reply, &[]).map_err(|e| (Failure::Confine, e.to_string()))?;
        converse(socket.as_fd(), &team)
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err((stage, reason)) => {
            // If the parent is gone there is nobody to tell.
            let _ = wire::send(socket.as_fd(), &Reply::Failed { stage, reason }, &[]);
            ExitCode::FAILURE
        }
    }
}

/// Moves the socket away from standard input, and leaves nothing else open.
fn take_socket() -> Result<OwnedFd, SandboxError> {
    let fail = |e: rustix::io::Errno| SandboxError::new("take the socket", &e);
    let others = open_descriptors()?;
    for fd in others {
        // SAFETY: the number came from the kernel's list of open files, and nothing in this process
        // owns any of them yet: it has done nothing but start.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3).map_err(fail)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(fail)?;
    rustix::stdio::dup2_stdin(&null).map_err(fail)?;
    Ok(socket)
}

/// Loads what is trusted, confines the process, and proves it in both kinds of thread.
fn start(parent: i32, gomp: &str) -> Result<(Team, Confined), (Failure, String)> {
    let team = Team::load(gomp).map_err(|e| (Failure::Load, e))?;
    // The first look at a clock makes system calls that the last filter kills for.
    cpu_time();
    let confinement = Confinement {
        cpu_seconds: Some(CPU_SECONDS),
        file_bytes: Some(0),
        ..Confinement::new(Domain::Runner)
    };
    let confined = sandbox::confine(&confinement, parent).map_err(|e| (Failure::Confine, e.what))?;
    sandbox::self_test(parent).map_err(|e| (Failure::Confine, e))?;
    team.self_test(parent).map_err(|e| (Failure::Confine, e))?;
    Ok((team, confined))
}

fn converse(socket: BorrowedFd<'_>, team: &Team) -> Result<(), (Failure, String)> {
    let mut kernel: Option<(Kernel, u32)> = None;
    loop {
        let (request, descriptors) = match wire::receive(socket, None) {
            Ok(message) => message,
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(e) => return Err((Failure::Call, e.to_string())),
        };
        let reply = match (request, &mut kernel) {
            (Request::Load { plan, artefact_bytes: _, inputs, outputs, threads }, None) => {
                let [artefact, ins, outs] = <[OwnedFd; 3]>::try_from(descriptors)
                    .map_err(|_| (Failure::Load, "three descriptors belong to a load".to_owned()))?;
                limit_memory(inputs.size + outputs.size, threads).map_err(|e| (Failure::Load, e))?;
                let loaded = Kernel::load(plan, threads, &artefact, (ins, inputs), (outs, outputs))
                    .map_err(|e| (Failure::Load, e))?;
                drop(artefact);
                sandbox::filter::runner_running()
                    .and_then(|filter| filter.apply_to_all_threads())
                    .map_err(|e| (Failure::Confine, e.what))?;
                kernel = Some((loaded, u32::try_from(threads).unwrap_or(u32::MAX)));
                Reply::Loaded
            }
            (Request::Prepare { calls }, Some((kernel, threads))) => {
                kernel.prepare(&calls).map_err(|e| (Failure::Call, e))?;
                team.restore_control(*threads);
                Reply::Prepared
            }
            (Request::Go, Some((kernel, threads))) => {
                let before = cpu_time();
                kernel.run();
                let live = team.live_threads();
                let control_ok = team.restore_control(*threads);
                Reply::Done { cpu_ns: cpu_time() - before, control_ok, threads: live }
            }
            _ => return Err((Failure::Call, "a request out of order".to_owned())),
        };
        wire::send(socket, &reply, &[]).map_err(|e| (Failure::Call, e.to_string()))?;
    }
}

fn limit_memory(arenas: u64, threads: usize) -> Result<(), String> {
    let bytes =
        arenas.saturating_add(ADDRESS_SPACE).saturating_add(THREAD_SPACE.saturating_mul(threads as u64));
    rustix::process::setrlimit(Resource::As, Rlimit { current: Some(bytes), maximum: Some(bytes) })
        .map_err(|e| format!("cannot limit memory: {e}"))
}

/// Nanoseconds of processor time of all threads so far.
fn cpu_time() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// The OpenMP runtime, and the floating-point control word that every thread must keep.
struct Team {
    parallel: GompParallel,
    /// The kernel's account of this process, opened while files could be opened.
    account: std::fs::File,
    control: u32,
}

impl Team {
    /// Loads libgomp and libm so that an artefact's imports find them.
    fn load(gomp: &str) -> Result<Self, String> {
        let open = |path: &str| {
            // SAFETY: trusted libraries of the system and of torch, named by the parent; their
            // constructors are meant to run in any process.
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| e.to_string())
        };
        let (gomp, libm) = (open(gomp)?, open("libm.so.6")?);
        // SAFETY: `GOMP_parallel` has had this signature since GCC 4.9.
        let parallel = *unsafe { gomp.get::<GompParallel>(b"GOMP_parallel\0") }.map_err(|e| e.to_string())?;
        // They stay loaded: worker threads of the pool never end.
        std::mem::forget((gomp, libm));
        let account = std::fs::File::open("/proc/self/stat").map_err(|e| e.to_string())?;
        Ok(Self { parallel, account, control: control() })
    }

    /// The self-test again, from at least one thread of the pool.
    fn self_test(&self, parent: i32) -> Result<(), String> {
        let test = Test {
            parent,
            main: rustix::thread::gettid(),
            workers: AtomicU32::new(0),
            problem: Mutex::new(None),
        };
        let threads = std::env::var("OMP_NUM_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(2).max(2);
        // SAFETY: the callback gets the address of `test`, which outlives the call: GOMP_parallel
        // returns after every thread of the team has.
        unsafe { (self.parallel)(Test::run, std::ptr::from_ref(&test).cast_mut().cast(), threads, 0) };
        if let Some(problem) = test.problem.lock().map_err(|e| e.to_string())?.take() {
            return Err(format!("in an OpenMP thread: {problem}"));
        }
        if test.workers.load(Ordering::Relaxed) == 0 {
            return Err("no OpenMP thread came to the self-test".to_owned());
        }
        Ok(())
    }

    /// How many threads there are; 0 if the kernel does not say.
    fn live_threads(&self) -> usize {
        let mut text = [0; 512];
        let length = self.account.read_at(&mut text, 0).unwrap_or(0);
        // The name in parentheses may hold anything; the count is the 18th field after it.
        let text = String::from_utf8_lossy(&text[..length]);
        let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
        fields.split_whitespace().nth(17).and_then(|count| count.parse().ok()).unwrap_or(0)
    }

    /// Whether the control word of every thread of the team is as it was; puts it back if not.
    fn restore_control(&self, threads: u32) -> bool {
        let check = Check { expected: self.control, same: AtomicBool::new(true) };
        let data = std::ptr::from_ref(&check).cast_mut().cast();
        Check::run(data);
        if threads > 1 {
            // SAFETY: as above, with `check`.
            unsafe { (self.parallel)(Check::run, data, threads, 0) };
        }
        check.same.load(Ordering::Relaxed)
    }
}

struct Test {
    parent: i32,
    main: rustix::thread::Pid,
    workers: AtomicU32,
    problem: Mutex<Option<String>>,
}

impl Test {
    extern "C" fn run(data: *mut c_void) {
        // SAFETY: `self_test` passes the address of a `Test` that is shared and lives long enough.
        let test = unsafe { &*data.cast::<Self>() };
        if rustix::thread::gettid() != test.main {
            test.workers.fetch_add(1, Ordering::Relaxed);
        }
        if let Err(problem) = sandbox::self_test(test.parent)
            && let Ok(mut slot) = test.problem.lock()
        {
            *slot = Some(problem);
        }
    }
}

struct Check {
    expected: u32,
    same: AtomicBool,
}

impl Check {
    extern "C" fn run(data: *mut c_void) {
        // SAFETY: `restore_control` passes the address of a `Check` that is shared and lives long enough.
        let check = unsafe { &*data.cast::<Self>() };
        if control() != check.expected {
            check.same.store(false, Ordering::Relaxed);
            set_control(check.expected);
        }
    }
}

/// Bits of MXCSR that record what happened, rather than say what shall.
#[cfg(target_arch = "x86_64")]
const FLAGS: u32 = 0x3f;

/// Rounding, flush-to-zero, denormals-are-zero and exception masks of this thread.
#[cfg(target_arch = "x86_64")]
fn control() -> u32 {
    let mut word: u32 = 0;
    // SAFETY: stores the register into a local variable.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
    word & !FLAGS
}

#[cfg(target_arch = "x86_64")]
fn set_control(word: u32) {
    // SAFETY: `word` came from `control` in a thread with the default environment.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn control() -> u32 {
    let word: u64;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
    word as u32
}

#[cfg(target_arch = "aarch64")]
fn set_control(word: u32) {
    // SAFETY: `word` came from `control` in a thread with the default environment.
    unsafe {
        std::arch::asm!("msr fpcr, {}", in(reg) u64::from(word), options(nomem, nostack, preserves_flags))
    };
}
