//! Runners with good, broken and hostile kernels.

use std::time::{Duration, Instant};

use autokernel_core::dtype::Dtype;
use autokernel_core::plan::{Plan, PlannedArg, ScratchBuffer};
use autokernel_worker::memory::{Arena, BufferSpec, Pattern};
use autokernel_worker::runner::{Batch, Call, Runner, RunnerConfig, RunnerError};
use autokernel_worker::toolchain::Artefact;

use crate::{build_body, config, plan};

const N: usize = 1000;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Arenas for `calls` calls of a kernel over `N` floats.
struct Desk {
    inputs: Arena,
    outputs: Arena,
    calls: Vec<Call>,
}

impl Desk {
    fn new(calls: usize) -> Self {
        let specs = vec![BufferSpec { bytes: 4 * N as u64, align: 64 }; calls];
        let desk = Self {
            inputs: Arena::create("inputs", &specs).unwrap(),
            outputs: Arena::create("outputs", &specs).unwrap(),
            calls: (0..calls).map(|i| Call { inputs: vec![i], outputs: vec![i], scratch: vec![] }).collect(),
        };
        for i in 0..calls {
            let values: Vec<u8> = (0..N).flat_map(|j| ((i * N + j) as f32).to_le_bytes()).collect();
            desk.inputs.write(i, 0, &values).unwrap();
            desk.outputs.poison(i, Pattern::Nan).unwrap();
        }
        desk
    }

    fn output(&self, buffer: usize) -> Vec<f32> {
        let mut bytes = vec![0; 4 * N];
        self.outputs.read(buffer, 0, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|quad| f32::from_le_bytes(*quad)).collect()
    }

    fn runner(&self, artefact: &Artefact) -> Runner {
        let mut runner = Runner::spawn(&config()).unwrap();
        runner.load(artefact, &plan(N as i64), &self.inputs, &self.outputs).unwrap();
        runner
    }

    fn batch(&self, body: &str) -> Result<Batch, RunnerError> {
        let mut runner = self.runner(&build_body(body));
        let pid = runner.pid();
        let result = runner.batch(&self.calls, TIMEOUT);
        drop(runner);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "an orphan is left");
        result
    }
}

fn status(pid: i32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    text.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

#[test]
fn a_good_kernel_is_right_timed_and_frozen() {
    let desk = Desk::new(3);
    let body = "#pragma omp parallel for num_threads(threads)\nfor (int64_t i = 0; i < n; i++) out[i] = 2 * in[i] + threads;";
    let mut runner = desk.runner(&build_body(body));
    for round in 0..3_u8 {
        let batch = runner.batch(&desk.calls, TIMEOUT).unwrap();
        assert!(batch.mxcsr_ok && batch.threads_ok);
        assert!(batch.wall > Duration::ZERO && batch.wall < TIMEOUT);
        assert!(batch.cpu > Duration::ZERO);
        assert!(status(runner.pid(), "State:").starts_with('T'), "frozen after round {round}");
        for i in 0..3 {
            let expected: Vec<f32> = (0..N).map(|j| 2.0 * (i * N + j) as f32 + 2.0).collect();
            assert_eq!(desk.output(i), expected);
            desk.outputs.poison(i, Pattern::Nan).unwrap();
        }
    }
    assert!(desk.inputs.guards_intact().unwrap() && desk.outputs.guards_intact().unwrap());
    runner.thaw();
    let uid: u32 = status(runner.pid(), "Uid:").split_whitespace().next().unwrap().parse().unwrap();
    assert_eq!(uid, runner.uid());
    assert_ne!(uid, 0, "root was left");
    assert_eq!(status(runner.pid(), "Groups:"), "");
    assert_eq!(status(runner.pid(), "CapEff:"), "0000000000000000");
    assert_eq!(status(runner.pid(), "Seccomp:"), "2");
    runner.kill();
}

#[test]
fn scratch_and_prepared_buffers_are_filled() {
    let body = "const float* weights = in; (void)weights;\nfor (int64_t i = 0; i < n; i++) out[i] = in[i];";
    let source = format!(
        "extern \"C\" void fill(const float* in, float* to, int64_t n) {{ for (int64_t i = 0; i < n; i++) to[i] = in[i] + 1; }}\n\
         extern \"C\" void k(const float* ready, float* scratch, float* out, int64_t n) {{ for (int64_t i = 0; i < n; i++) out[i] = ready[i] + scratch[i]++; }}\n\
         extern \"C\" void unused(const float* in, float* out, int64_t n) {{ {body} }}"
    );
    let artefact = crate::build(&source);
    let specs = [BufferSpec { bytes: 4 * N as u64, align: 64 }; 2];
    let desk = Desk { outputs: Arena::create("outputs", &specs).unwrap(), ..Desk::new(1) };
    let base = plan(N as i64).launches.remove(0);
    let mut launch = base.clone();
    launch.args = vec![
        PlannedArg::Prepared(0),
        PlannedArg::Scratch(0),
        PlannedArg::Output(0),
        PlannedArg::Int(N as i64),
    ];
    let mut fill = base;
    fill.entry = "fill".to_owned();
    fill.args = vec![PlannedArg::Input(0), PlannedArg::Prepared(0), PlannedArg::Int(N as i64)];
    let plan: Plan = Plan {
        scratch: vec![ScratchBuffer { name: "s".to_owned(), dtype: Dtype::F32, numel: N as u64, zero: true }],
        prepare: vec![autokernel_core::plan::PlannedPrepare {
            name: "ready".to_owned(),
            dtype: Dtype::F32,
            numel: N as u64,
            inputs: vec![0],
            launch: fill,
        }],
        launches: vec![launch],
    };
    let mut runner = Runner::spawn(&config()).unwrap();
    runner.load(&artefact, &plan, &desk.inputs, &desk.outputs).unwrap();
    let call = Call { inputs: vec![0], outputs: vec![0], scratch: vec![1] };
    runner.batch(&[call.clone(), call.clone(), call], TIMEOUT).unwrap();
    let expected: Vec<f32> = (0..N).map(|j| j as f32 + 1.0).collect();
    assert_eq!(desk.output(0), expected);
    let short = Call { inputs: vec![0], outputs: vec![0], scratch: vec![] };
    let result = runner.batch(&[short], TIMEOUT);
    assert!(matches!(result, Err(RunnerError::Protocol { .. })), "{result:?}");
}

#[test]
fn crashes_are_told_apart() {
    let desk = Desk::new(1);
    let signal = |body: &str| match desk.batch(body) {
        Err(RunnerError::Crashed { signal }) => signal,
        other => panic!("{other:?}"),
    };
    assert_eq!(signal("*(volatile int*)8 = 1;"), 11);
    assert_eq!(signal("__builtin_trap();"), 4);
    // abort() in effect: SIGABRT to the own thread, as the C library sends it.
    assert_eq!(
        signal(
            &"long r; asm volatile(\"syscall\" : \"=a\"(r) : \"0\"(39) : \"rcx\", \"r11\", \"memory\"); long pid = r;\n\
        asm volatile(\"syscall\" : \"=a\"(r) : \"0\"(186) : \"rcx\", \"r11\", \"memory\");\n\
        asm volatile(\"syscall\" : \"=a\"(r) : \"0\"(234), \"D\"(pid), \"S\"(r), \"d\"(6) : \"rcx\", \"r11\", \"memory\");"
                .replace("syscall", HIDDEN)
        ),
        6
    );
    assert_eq!(
        signal(
            "volatile char deep[64 << 20]; for (int64_t i = 64 << 20; i > 0; i -= 512) deep[i - 1] = 1; out[0] = deep[n];"
        ),
        6
    );
    assert_eq!(signal("((float*)in)[0] = 1;"), 11, "inputs are mapped for reading only");
    let far = desk.batch("out[int64_t(1) << 36] = 1;");
    assert!(matches!(far, Err(RunnerError::Crashed { signal: 11 })), "{far:?}");
}

/// A system call that admission does not see: `syscall; ret` inside the constant of another instruction,
/// reached by a computed call.
#[cfg(target_arch = "x86_64")]
const HIDDEN: &str = "sub $128, %%rsp; lea 1f + 1(%%rip), %%r11; call *%%r11; jmp 2f; \
    1: .byte 0xb8, 0x0f, 0x05, 0xc3, 0x90; 2: add $128, %%rsp";

/// A raw system call whose result lands in `out[0]`.
#[cfg(target_arch = "x86_64")]
fn syscall(number: i64, arguments: &str) -> String {
    format!(
        "long r = {number}; {{ {arguments} asm volatile(\"{HIDDEN}\" : \"+a\"(r) : \"D\"(a), \"S\"(b), \"d\"(c), \"r\"(d) : \"rcx\", \"r11\", \"memory\"); }} out[0] = (float)r;"
    )
}

#[cfg(target_arch = "x86_64")]
#[test]
fn raw_system_calls_get_nowhere() {
    let desk = Desk::new(1);
    let args = |a: &str, b: &str, c: &str| {
        format!("long a = (long)({a}), b = (long)({b}), c = (long)({c}); register long d asm(\"r10\") = 0;")
    };
    for (what, number, arguments) in [
        ("open for reading", 257, args("-100", "\"/etc/passwd\"", "0")),
        ("open its own memory", 257, args("-100", "\"/proc/self/mem\"", "0")),
        ("map memory", 9, args("0", "4096", "3")),
        ("unmap memory", 11, args("out", "4096", "0")),
        ("grow the heap", 12, args("0", "0", "0")),
        ("move a mapping", 25, args("out", "4096", "8192")),
        ("make memory writable", 10, args("(long)in & -4096", "4096", "3")),
        ("lock memory in place", 149, args("out", "4096", "0")),
        ("free pages some other way", 28, args("(long)out & -4096", "4096", "8")),
        ("read", 0, args("0", "out", "1")),
        ("write to another file", 1, args("3", "out", "1")),
        ("close", 3, args("3", "0", "0")),
        ("sleep", 35, args("in", "0", "0")),
        ("change a signal's meaning", 13, args("10", "0", "0")),
        ("change affinity", 203, args("0", "8", "in")),
        ("change limits", 302, args("0", "3", "in")),
        ("leave the group", 109, args("0", "0", "0")),
        ("start a session", 112, args("0", "0", "0")),
        ("install a filter", 317, args("1", "0", "in")),
        ("shared memory", 29, args("0", "4096", "0600")),
        ("open for writing", 257, args("-100", "\"/dev/null\"", "1")),
        ("open the old way", 2, args("\"/etc/passwd\"", "0", "0")),
        ("socket", 41, args("2", "1", "0")),
        ("execve", 59, args("\"/bin/sh\"", "0", "0")),
        ("fork", 57, args("0", "0", "0")),
        ("clone without a thread", 56, args("17", "0", "0")),
        ("kill the parent", 62, args("1", "9", "0")),
        ("memfd_create", 319, args("\"x\"", "0", "0")),
        ("ptrace", 101, args("0", "0", "0")),
        ("process_vm_readv", 310, args("1", "0", "0")),
        ("executable memory", 9, args("0", "4096", "7")),
        ("prctl", 157, args("4", "1", "0")),
        ("io_uring", 425, args("8", "0", "0")),
        ("another architecture's number", 0x4000_0000 + 41, args("2", "1", "0")),
    ] {
        let result = desk.batch(&syscall(number, &arguments));
        assert!(matches!(result, Err(RunnerError::Crashed { signal: 31 })), "{what}: {result:?}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn leaving_and_hanging_are_noticed() {
    let desk = Desk::new(1);
    let exit = "asm volatile(\"syscall\" : : \"a\"(231), \"D\"(7) : \"rcx\", \"r11\", \"memory\");";
    let exit = &exit.replace("syscall", HIDDEN);
    assert!(matches!(desk.batch(exit), Err(RunnerError::Exited { code: 7 })));
    let mut runner = desk.runner(&build_body("for (;;) asm volatile(\"\" ::: \"memory\");"));
    let pid = runner.pid();
    let start = Instant::now();
    let result = runner.batch(&desk.calls, Duration::from_millis(300));
    assert!(matches!(result, Err(RunnerError::Hung { .. })), "{result:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    // A closed socket would be an end too, and it can't be closed.
    let close = "for (int f = 0; f < 64; f++) { long r = 3; asm volatile(\"syscall\" : \"+a\"(r) : \"D\"(f) : \"rcx\", \"r11\", \"memory\"); } for (;;) asm volatile(\"\" ::: \"memory\");";
    let result = desk.batch(&close.replace("syscall", HIDDEN));
    assert!(matches!(result, Err(RunnerError::Crashed { signal: 31 })), "{result:?}");
}

#[test]
fn one_element_past_the_end_is_found() {
    let desk = Desk::new(1);
    desk.batch("for (int64_t i = 0; i <= n; i++) out[i] = 1;").unwrap();
    assert!(!desk.outputs.guards_intact().unwrap());
    desk.outputs.restore_guards().unwrap();
    desk.batch("out[-1] = 0;").unwrap();
    assert!(!desk.outputs.guards_intact().unwrap());
    desk.outputs.restore_guards().unwrap();
    desk.batch("for (int64_t i = 0; i < n; i++) out[i] = in[i + 4096] + in[i - 5000];").unwrap();
    assert!(desk.output(0).iter().all(|value| value.is_nan()), "guards are NaN");
    assert!(desk.outputs.guards_intact().unwrap());
}

#[cfg(target_arch = "x86_64")]
#[test]
fn changed_rounding_modes_are_found_and_put_back() {
    let desk = Desk::new(1);
    // `ldmxcsr (%rax); ret` inside a constant: in plain sight it would not be admitted.
    let set = "unsigned word = 0x9fc0; asm volatile(\"sub $128, %%rsp; lea 1f + 2(%%rip), %%r11; call *%%r11; jmp 2f; \
               1: .byte 0x48, 0xb9, 0x0f, 0xae, 0x10, 0xc3, 0x90, 0x90, 0x90, 0x90; 2: add $128, %%rsp\" \
               : : \"a\"(&word) : \"r11\", \"rcx\", \"memory\");";
    let mut runner = desk.runner(&build_body(&format!("if (in[0] == 0) {{ {set} }}")));
    assert!(!runner.batch(&desk.calls, TIMEOUT).unwrap().mxcsr_ok);
    desk.inputs.write(0, 0, &1.0_f32.to_le_bytes()).unwrap();
    assert!(runner.batch(&desk.calls, TIMEOUT).unwrap().mxcsr_ok);
    drop(runner);
    let worker = format!(
        "#pragma omp parallel for num_threads(threads) schedule(static, 1)\nfor (int i = 0; i < threads; i++) if (i == 1) {{ {set} }}"
    );
    assert!(!desk.batch(&worker).unwrap().mxcsr_ok, "in a thread of the pool");
    // The x87 unit's word too, which compilers change and put back to round `long double`.
    let x87 = "unsigned short word = 0x0f7f; asm volatile(\"fldcw %0\" : : \"m\"(word));";
    assert!(!desk.batch(x87).unwrap().mxcsr_ok);
    assert!(desk.batch("out[0] = in[1] / 3 + 1e-30f * 1e-30f;").unwrap().mxcsr_ok, "flags do not count");
}

#[test]
fn more_threads_than_configured_are_counted() {
    let desk = Desk::new(1);
    let body = "#pragma omp parallel for num_threads(6)\nfor (int64_t i = 0; i < n; i++) out[i] = in[i];";
    assert!(!desk.batch(body).unwrap().threads_ok);
    // Far more of them need memory for their stacks, which is a system call.
    let crowd = desk.batch(&body.replace("(6)", "(90)"));
    assert!(matches!(crowd, Err(RunnerError::Crashed { signal: 31 })), "{crowd:?}");
    let one = RunnerConfig { threads: 1, ..config() };
    for (body, fine) in [("out[0] = in[0];", true), (body, false)] {
        let mut runner = Runner::spawn(&one).unwrap();
        runner.load(&build_body(body), &plan(N as i64), &desk.inputs, &desk.outputs).unwrap();
        assert_eq!(runner.batch(&desk.calls, TIMEOUT).unwrap().threads_ok, fine, "{body}");
    }
}

#[test]
fn what_is_not_admitted_is_not_loaded() {
    let desk = Desk::new(1);
    let artefact = build_body("static int64_t calls; out[0] = ++calls;");
    let mut runner = Runner::spawn(&config()).unwrap();
    let result = runner.load(&artefact, &plan(1), &desk.inputs, &desk.outputs);
    assert!(
        matches!(&result, Err(RunnerError::Load { reason }) if reason.contains("writable data")),
        "{result:?}"
    );
}

#[test]
fn a_wrong_runtime_is_an_error() {
    let mut wrong = config();
    wrong.gomp = "/no/such/libgomp.so".into();
    assert!(matches!(Runner::spawn(&wrong), Err(RunnerError::Load { .. })));
    wrong.gomp = "relative.so".into();
    assert!(matches!(Runner::spawn(&wrong), Err(RunnerError::Spawn { .. })));
}

#[test]
fn a_runner_outlives_the_thread_that_asked_for_it() {
    let desk = Desk::new(1);
    let artefact = build_body("for (int64_t i = 0; i < n; i++) out[i] = in[i] + 1;");
    let mut runner = std::thread::spawn(|| Runner::spawn(&config()).unwrap()).join().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    runner.load(&artefact, &plan(N as i64), &desk.inputs, &desk.outputs).unwrap();
    runner.batch(&desk.calls, TIMEOUT).unwrap();
    assert_eq!(desk.output(0)[..3], [1.0, 2.0, 3.0]);
}

#[test]
fn honest_openmp_needs_nothing_that_is_forbidden() {
    let desk = Desk::new(3);
    let runner = RunnerConfig { threads: 4, ..config() };
    // Teams that shrink and grow end threads and start them again; schedules, reductions and sections
    // take memory from the heap, also in threads of the pool.
    for body in [
        "for (int team = 1; team <= threads; team++) {\n#pragma omp parallel for num_threads(team)\nfor (int64_t i = 0; i < n; i++) out[i] = in[i] + 1;\n}",
        "for (int team = threads; team > 0; team--) {\n#pragma omp parallel for num_threads(team) schedule(dynamic, 3)\nfor (int64_t i = 0; i < n; i++) out[i] = in[i] + 1;\n}",
        "for (int round = 0; round < 16; round++) {\n#pragma omp parallel num_threads(1 + round % threads)\n{\n#pragma omp for schedule(guided) nowait\nfor (int64_t i = 0; i < n / 2; i++) out[i] = in[i] + 1;\n#pragma omp for schedule(dynamic)\nfor (int64_t i = n / 2; i < n; i++) out[i] = in[i] + 1;\n}\n}",
        "#pragma omp parallel sections num_threads(threads)\n{\n#pragma omp section\nfor (int64_t i = 0; i < n / 2; i++) out[i] = in[i] + 1;\n#pragma omp section\nfor (int64_t i = n / 2; i < n; i++) out[i] = in[i] + 1;\n}",
        "double s = 0;\n#pragma omp parallel for num_threads(threads) reduction(+:s)\nfor (int64_t i = 0; i < n; i++) s += in[i];\nfor (int64_t i = 0; i < n; i++) out[i] = in[i] + 1 + 0 * (float)s;",
        "volatile float deep[3 << 18]; for (int64_t i = 0; i < (3 << 18); i += 512) deep[i] = 1; for (int64_t i = 0; i < n; i++) out[i] = in[i] + deep[512];",
        "#pragma omp parallel for num_threads(threads)\nfor (int64_t i = 0; i < n; i++) { volatile float deep[1 << 18]; deep[i] = 1; out[i] = in[i] + deep[i]; }",
    ] {
        let mut runner = Runner::spawn(&runner).unwrap();
        runner.load(&build_body(body), &plan(N as i64), &desk.inputs, &desk.outputs).unwrap();
        for _ in 0..3 {
            let batch = runner.batch(&desk.calls, TIMEOUT).unwrap_or_else(|e| panic!("{body}: {e}"));
            assert!(batch.threads_ok && batch.mxcsr_ok, "{body}");
            for i in 0..3 {
                let expected: Vec<f32> = (0..N).map(|j| (i * N + j) as f32 + 1.0).collect();
                assert_eq!(desk.output(i), expected, "{body}");
                desk.outputs.poison(i, Pattern::Nan).unwrap();
            }
        }
    }
}

/// Keeps a count of its calls below its stack, `DEPTH` bytes down, in the thread that `WHERE` names.
#[cfg(target_arch = "x86_64")]
fn counts_below_its_stack(depth: &str, worker: bool) -> String {
    let count = format!(
        "char* top; asm volatile(\"mov %%rsp, %0\" : \"=r\"(top)); \
         volatile long* kept = (volatile long*)((long)(top - ({depth})) & -64); \
         if (kept[0] != 0x5afe5afe) {{ kept[0] = 0x5afe5afe; kept[1] = 0; }} kept[1] = kept[1] + 1; out[0] = (float)kept[1];"
    );
    if worker {
        format!(
            "#pragma omp parallel for num_threads(threads) schedule(static, 1)\nfor (int64_t t = 0; t < threads; t++) if (t == 1) {{ {count} }}"
        )
    } else {
        count
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn nothing_survives_below_the_stack_from_batch_to_batch() {
    let desk = Desk::new(2);
    for worker in [false, true] {
        for depth in ["300", "4 << 10", "60 << 10", "1 << 20", "5 << 20"] {
            let mut runner = desk.runner(&build_body(&counts_below_its_stack(depth, worker)));
            for batch in 0..3 {
                runner.batch(&desk.calls, TIMEOUT).unwrap();
                let counts = [desk.output(0)[0] as i32, desk.output(1)[0] as i32];
                // Within a batch it does: that is the stack of a running program.
                assert_eq!(counts, [1, 2], "worker {worker}, {depth} down, batch {batch}");
            }
        }
    }
}
