//! Role `runner`: the confined child that calls kernels.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};
use rustix::time::{ClockId, clock_gettime};

use super::control::{control, set_control};
use super::kernel::{Kernel, prepared_bytes};
use super::{open_descriptors, stack};
use crate::sandbox::{self, Confined, Confinement, Domain, SandboxError};
use crate::wire::{self, Failure, Reply, Request};

/// Address space beyond the arenas: libraries, stacks, the C library's pools.
const ADDRESS_SPACE: u64 = 4 << 30;
/// Address space of one more thread: its stack and its pool.
const THREAD_SPACE: u64 = 256 << 20;
/// Bytes that the heap is grown by before it can grow no more. A message of [`wire::LIMIT`] bytes and what
/// is made of it stay far below; pages that are never touched cost nothing.
const HEAP: usize = 256 << 20;
/// Stacks beyond two of each thread of the pool, made before mapping is forbidden. libgomp ends threads
/// when a team shrinks and starts others when it grows again, perhaps before the old ones have left their
/// stacks. A kernel that starts a few threads too many is told so; one that starts many, or changes the
/// size of its teams dozens of times a call, ends at the system call for their memory.
const SPARE_THREADS: u32 = 16;
/// Places of numbers in the kernel's account, counted from the first field after the name.
const THREADS: usize = 17;
const VSIZE: usize = 20;
/// Processor seconds of a runner's life.
const CPU_SECONDS: u64 = 3600;

/// `GOMP_parallel(function, data, threads, flags)`.
type GompParallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, u32, u32);

/// Serves the parent until it hangs up.
pub(super) fn serve(parent: i32, gomp: &str) -> ExitCode {
    let Ok(socket) = take_socket() else { return ExitCode::from(super::NOT_CONFINED) };
    let team = start(parent, gomp).and_then(|(team, confined)| {
        let reply = Reply::Ready { uid: confined.uid, landlock_abi: confined.landlock_abi };
        wire::send(socket.as_fd(), &reply, &[team.maps.as_fd()])
            .map_err(|e| (Failure::Confine, e.to_string()))?;
        Ok(team)
    });
    let result = match &team {
        Ok(team) => converse(socket.as_fd(), team),
        Err((stage, reason)) => Err((*stage, reason.clone())),
    };
    let failed = result.is_err();
    if let Err((stage, reason)) = result {
        // If the parent is gone there is nobody to tell.
        let _ = wire::send(socket.as_fd(), &Reply::Failed { stage, reason }, &[]);
    }
    // At once: behind the last filter nothing can be closed or unmapped in order.
    // SAFETY: ends the process.
    unsafe { _exit(c_int::from(failed)) }
}

unsafe extern "C" {
    fn _exit(code: c_int) -> !;
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
                let pool = prepared_bytes(&plan, inputs.spans.len()).map_err(|e| (Failure::Load, e))? as u64;
                let arenas = inputs.size.saturating_add(outputs.size).saturating_add(pool);
                team.limit_memory(arenas, threads).map_err(|e| (Failure::Load, e))?;
                let loaded = Kernel::load(plan, threads, &artefact, (ins, inputs), (outs, outputs))
                    .map_err(|e| (Failure::Load, e))?;
                drop(artefact);
                let threads = u32::try_from(threads).unwrap_or(u32::MAX);
                // The pool at its full size and a heap that need not grow: afterwards nothing is mapped.
                team.restore_control(threads.max(2));
                grow_heap().map_err(|e| (Failure::Load, e))?;
                sandbox::filter::runner_running()
                    .and_then(|filter| filter.apply_to_all_threads())
                    .map_err(|e| (Failure::Confine, e.what))?;
                kernel = Some((loaded, threads));
                Reply::Loaded
            }
            (Request::Prepare { calls }, Some((kernel, threads))) => {
                // What a call left on a stack is gone before the next batch, and what a prepare step
                // left is gone before the calls.
                team.wipe_stacks(*threads).map_err(|e| (Failure::Call, e))?;
                kernel.prepare(&calls).map_err(|e| (Failure::Call, e))?;
                if kernel.prepares() {
                    team.wipe_stacks(*threads).map_err(|e| (Failure::Call, e))?;
                }
                team.restore_control(*threads);
                Reply::Prepared
            }
            (Request::Go, Some((kernel, threads))) => {
                let before = cpu_time();
                kernel.run();
                let live = team.settled_threads(*threads);
                let control_ok = team.restore_control(*threads);
                Reply::Done { cpu_ns: cpu_time() - before, control_ok, threads: live }
            }
            _ => return Err((Failure::Call, "a request out of order".to_owned())),
        };
        wire::send(socket, &reply, &[]).map_err(|e| (Failure::Call, e.to_string()))?;
    }
}

/// Takes a large block from the heap and gives it back. The C library was told (see
/// [`crate::runner::ALLOCATOR`]) to take it from the heap's end and to keep it there.
fn grow_heap() -> Result<(), String> {
    let mut block: Vec<u8> = Vec::new();
    block.try_reserve_exact(HEAP).map_err(|e| format!("cannot grow the heap: {e}"))?;
    std::hint::black_box(block.as_mut_ptr());
    Ok(())
}

/// Threads of a runner that is at rest: the self-test has used two at least, and idle ones stay.
fn idle_threads(threads: u32) -> usize {
    threads.max(2) as usize
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
    /// Its memory map, likewise.
    maps: std::fs::File,
    control: u64,
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
        let maps = std::fs::File::open("/proc/self/maps").map_err(|e| e.to_string())?;
        Ok(Self { parallel, account, maps, control: control() })
    }

    /// The self-test again, from at least one thread of the pool.
    fn self_test(&self, parent: i32) -> Result<(), String> {
        let test = Test {
            parent,
            main: rustix::thread::gettid(),
            workers: AtomicU32::new(0),
            problem: Mutex::new(None),
        };
        let threads: u32 =
            std::env::var("OMP_NUM_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(2).max(2);
        let threads = threads.saturating_mul(2).saturating_add(SPARE_THREADS);
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

    /// The same once threads that libgomp let go have ended, which takes a moment; those that stay
    /// longer are counted.
    fn settled_threads(&self, threads: u32) -> usize {
        let started = clock_gettime(ClockId::Monotonic).tv_sec;
        loop {
            let live = self.live_threads();
            // Counted in whole seconds: a patience of one to two.
            if live <= idle_threads(threads) || clock_gettime(ClockId::Monotonic).tv_sec > started + 1 {
                return live;
            }
            rustix::thread::sched_yield();
        }
    }

    /// Allows so much address space beyond what is in use.
    fn limit_memory(&self, arenas: u64, threads: usize) -> Result<(), String> {
        let bytes = arenas
            .saturating_add(ADDRESS_SPACE)
            .saturating_add(THREAD_SPACE.saturating_mul(threads as u64))
            .saturating_add(self.stat(VSIZE).unwrap_or(0));
        rustix::process::setrlimit(Resource::As, Rlimit { current: Some(bytes), maximum: Some(bytes) })
            .map_err(|e| format!("cannot limit memory: {e}"))
    }

    /// How many threads there are; 0 if the kernel does not say.
    fn live_threads(&self) -> usize {
        self.stat(THREADS).and_then(|count| count.try_into().ok()).unwrap_or(0)
    }

    /// A number of the kernel's account, by its place after the name.
    fn stat(&self, place: usize) -> Option<u64> {
        let mut text = [0; 512];
        let length = self.account.read_at(&mut text, 0).unwrap_or(0);
        // The name in parentheses may hold anything.
        let text = String::from_utf8_lossy(&text[..length]);
        let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
        fields.split_whitespace().nth(place)?.parse().ok()
    }

    /// Whether the control word of every thread of the team is as it was; puts it back if not.
    fn restore_control(&self, threads: u32) -> bool {
        let check =
            Check { expected: self.control, same: AtomicBool::new(true), fresh: AtomicBool::new(false) };
        let data = std::ptr::from_ref(&check).cast_mut().cast();
        Check::run(data);
        if threads > 1 {
            // SAFETY: as above, with `check`.
            unsafe { (self.parallel)(Check::run, data, threads, 0) };
        }
        if check.fresh.load(Ordering::Relaxed) {
            // The kernel's last team was smaller: threads were started just now, while those that the
            // kernel let go may still be on their way out.
            self.settled_threads(threads);
        }
        check.same.load(Ordering::Relaxed)
    }
}

impl Team {
    /// Overwrites what lies below the stack pointer of every thread of the team.
    fn wipe_stacks(&self, threads: u32) -> Result<(), String> {
        let wipe = Wipe { maps: &self.maps, problem: Mutex::new(None) };
        let data = std::ptr::from_ref(&wipe).cast_mut().cast();
        Wipe::run(data);
        if threads > 1 {
            // SAFETY: as in `self_test`, with `wipe`.
            unsafe { (self.parallel)(Wipe::run, data, threads, 0) };
        }
        wipe.problem.into_inner().map_err(|e| e.to_string())?.map_or(Ok(()), Err)
    }
}

struct Wipe<'a> {
    maps: &'a std::fs::File,
    problem: Mutex<Option<String>>,
}

impl Wipe<'_> {
    extern "C" fn run(data: *mut c_void) {
        // SAFETY: `wipe_stacks` passes the address of a `Wipe` that is shared and lives long enough.
        let wipe = unsafe { &*data.cast::<Self>() };
        if let Err(problem) = stack::floor(wipe.maps).and_then(stack::wipe)
            && let Ok(mut slot) = wipe.problem.lock()
        {
            *slot = Some(problem);
        }
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
    expected: u64,
    same: AtomicBool,
    /// Whether a thread came that had never been here.
    fresh: AtomicBool,
}

thread_local! { static SEEN: Cell<bool> = const { Cell::new(false) }; }

impl Check {
    extern "C" fn run(data: *mut c_void) {
        // SAFETY: `restore_control` passes the address of a `Check` that is shared and lives long enough.
        let check = unsafe { &*data.cast::<Self>() };
        if !SEEN.replace(true) {
            check.fresh.store(true, Ordering::Relaxed);
        }
        if control() != check.expected {
            check.same.store(false, Ordering::Relaxed);
            set_control(check.expected);
        }
    }
}
