//! A hostile kernel in a forked Python child: a real zygote, a real package, raw system calls.
#![allow(unsafe_code, reason = "a test has to set a variable of its own process")]
#![allow(clippy::unwrap_used, reason = "a test's way to fail and to tell")]
#![cfg(target_arch = "x86_64")]

use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use autokernel_worker::python::{Interpreter, Peer, PeerError, spawn};
use autokernel_worker::sandbox::{Confinement, Domain, Wall};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_mins(3);
const EPERM: f32 = -1.0;
const ENOSYS: f32 = -38.0;

/// What a kernel may try: a name for the message, the number of the call and its arguments as C++.
const ATTEMPTS: &[(&str, u32, &str)] = &[
    ("fork", 57, ""),
    ("vfork", 58, ""),
    ("clone of a process", 56, "17"),
    ("execve", 59, "(long)\"/bin/true\""),
    ("execveat", 322, "-100, (long)\"/bin/true\""),
    ("setsid", 112, ""),
    ("setpgid", 109, "0, 0"),
    ("kill", 62, "sys(39), 0"),
    ("kill the group", 62, "0, 0"),
    ("tgkill of another", 234, "sys(110), sys(110), 0"),
    ("tkill", 200, "sys(186), 0"),
    ("pidfd_open", 434, "sys(39), 0"),
    ("pidfd_send_signal", 424, "0, 0, 0, 0"),
    ("ptrace", 101, "0"),
    ("process_vm_readv", 310, "sys(39)"),
    ("sched_setaffinity", 203, "0, 8, (long)memory"),
    ("sched_setscheduler", 144, "0, 0, (long)memory"),
    ("setpriority", 141, "0, 0, 0"),
    ("prlimit that sets", 302, "0, 3, (long)memory, 0"),
    ("setrlimit", 160, "3, (long)memory"),
    ("death signal", 157, "1, 0"),
    ("dumpable", 157, "4, 0"),
    ("subreaper", 157, "36, 1"),
    ("a filter of its own", 317, "1, 0, (long)memory"),
    ("socket", 41, "1, 1, 0"),
    ("socketpair", 53, "1, 1, 0, (long)memory"),
    ("bind", 49, "0, (long)memory, 16"),
    ("connect", 42, "0, (long)memory, 16"),
    ("open for writing", 257, "-100, (long)\"/dev/null\", 1"),
    ("open for both", 257, "-100, (long)\"/dev/null\", 2"),
    ("create", 257, "-100, (long)\"made\", 0100, 0600"),
    ("open the old way", 2, "(long)\"/dev/null\", 1"),
    ("creat", 85, "(long)\"made\", 0600"),
    ("mkdir", 83, "(long)\"made\", 0700"),
    ("unlink", 87, "(long)\"given\""),
    ("rename", 82, "(long)\"given\", (long)\"taken\""),
    ("ftruncate", 77, "0, 0"),
    ("executable memory", 9, "0, 4096, 5, 34, -1, 0"),
    ("memory made executable", 10, "(long)memory & -4096, 4096, 5"),
    ("pkey_mprotect", 329, "(long)memory & -4096, 4096, 5, -1"),
    ("memfd_create", 319, "(long)\"kept\", 0"),
    ("memfd_secret", 447, "0"),
    ("shmget", 29, "0, 4096, 0600"),
    ("msgget", 68, "0, 0600"),
    ("userfaultfd", 323, "1"),
    ("bpf", 321, "0"),
    ("io_uring_setup", 425, "8, (long)memory"),
    ("keyctl", 250, "0, -3, 0"),
    ("perf_event_open", 298, "(long)memory, 0, -1, -1, 0"),
    ("setitimer", 38, "0, (long)memory, 0"),
    ("alarm", 37, "0"),
    ("timer_create", 222, "1, 0, (long)memory"),
    ("pipe", 22, "(long)memory"),
    ("eventfd", 290, "0, 0"),
    ("epoll_create1", 291, "0"),
    ("inotify_init1", 294, "0"),
    ("arch_prctl", 158, "0x1003, (long)memory"),
    ("personality", 135, "0xffffffff"),
    ("unshare", 272, "0x10000000"),
    ("landlock", 444, "0, 0, 1"),
    ("dup", 32, "0"),
    ("dup2", 33, "1, 0"),
    ("F_SETOWN", 72, "0, 8, 0"),
    ("F_DUPFD", 72, "0, 0, 100"),
    ("TIOCSTI", 16, "0, 0x5412, (long)memory"),
    ("wait4", 61, "-1, (long)memory, 1"),
    ("a number of another interface", 0x4000_0000 + 41, "1, 1, 0"),
];

fn hostile() -> String {
    let attempts =
        ATTEMPTS.iter().enumerate().fold(String::new(), |text, (index, (_, number, arguments))| {
            let comma = if arguments.is_empty() { "" } else { ", " };
            text + &format!("out[{index}] = (float)sys({number}{comma}{arguments});\n")
        });
    format!(
        "#include <cstdint>
static long sys(long n, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0, long f = 0) {{
    register long r10 asm(\"r10\") = d; register long r8 asm(\"r8\") = e; register long r9 asm(\"r9\") = f;
    asm volatile(\"syscall\" : \"+a\"(n) : \"D\"(a), \"S\"(b), \"d\"(c), \"r\"(r10), \"r\"(r8), \"r\"(r9) : \"rcx\", \"r11\", \"memory\");
    return n;
}}
static void deeper(volatile char* above) {{ volatile char more[4096]; more[0] = above[0]; deeper(more); above[1] = more[1]; }}
extern \"C\" void rms_norm(const float*, const float* mode, float* out, int64_t, int64_t, int64_t threads) {{
    if (mode[0] == 1) *(volatile int*)8 = 1;
    if (mode[0] == 2) {{ for (int f = 3; f < 64; f++) sys(3, f); return; }}
    if (mode[0] == 3) {{ volatile char top[2] = {{1, 1}}; deeper(top); }}
    if (mode[0] == 4) {{
        #pragma omp parallel num_threads(5)
        out[0] = 1;
        return;
    }}
    if (mode[0] == 5) {{ sys(231, 9); }}
    alignas(4096) char memory[8192] = {{1}};
    #pragma omp parallel num_threads(threads)
    {{
        #pragma omp barrier
        #pragma omp for schedule(static, 1)
        for (int64_t half = 0; half < 2; half++) {{
            // From a thread of the pool first, then from the thread that Python runs in.
            if (half == 1) out[{count}] = (float)sys(57);
        }}
    }}
    {attempts}
    out[{count} + 1] = (float)sys(435, (long)memory, 88);
    out[{count} + 2] = (float)sys(39);
}}",
        count = ATTEMPTS.len()
    )
}

fn run(program: &mut Command) -> String {
    let output = program.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A package whose kernel is `source`; gives its region.
fn package(interpreter: &Interpreter, folder: &Path, source: &str) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let script = "import json, sys; sys.path[:0] = sys.argv[1:3]; import handmade as hm; from pathlib import Path; \
                  hm.make_package(Path(sys.argv[3]), 'ours+eager', [(hm.rms_region(), hm.rms_plan())]); print(json.dumps(hm.rms_region()))";
    let made = folder.join("package");
    let text = run(Command::new(&interpreter.path).args(["-B", "-c", script]).args([
        &root,
        &root.join("tests"),
        &made,
    ]));
    let region: Value = serde_json::from_str(text.trim()).unwrap();
    let file = folder.join("kernel.cpp");
    std::fs::write(&file, source).unwrap();
    let artefact = made.join("artefacts").join(format!("{}.so", region["id"].as_str().unwrap()));
    let flags = ["-O1", "-fopenmp", "-fPIC", "-shared", "-nostartfiles", "-nodefaultlibs", "-fno-exceptions"];
    run(Command::new("c++").args(flags).arg(&file).arg("-o").arg(&artefact));
    region
}

/// A confined zygote with that package's operator in it.
fn zygote(interpreter: &Interpreter, folder: &Path, region: &Value) -> Peer {
    let own = folder.join("own");
    std::fs::create_dir(&own).unwrap();
    std::fs::write(own.join("given"), "").unwrap();
    let confinement = Confinement {
        read: vec![folder.to_owned()],
        write: vec![own.clone()],
        ..Confinement::new(Domain::Deployment)
    };
    let extra = [("TMPDIR".into(), own.clone().into()), ("HOME".into(), own.clone().into())];
    let mut peer = spawn(interpreter, "zygote", Some(&confinement), &own, &extra).unwrap();
    peer.wall_children(Wall::Operator);
    let subject =
        json!({"kind": "region", "region": region, "how": "package", "package": folder.join("package")});
    peer.request("prepare", json!({"subject": subject, "threads": 2}), LIMIT).unwrap();
    peer
}

/// Gives a child one slot, with zeros for `x` and `mode` for every element of `w`.
fn stage(child: &mut Peer, folder: &Path, mode: f32) {
    let meta = |shape: &[usize], stride: &[usize]| json!({"dtype": "f32", "shape": shape, "stride": stride});
    let inputs = [meta(&[48, 96], &[96, 1]), meta(&[96], &[1])];
    let inputs: Vec<Value> = inputs.iter().map(|meta| json!({"meta": meta, "constant": false})).collect();
    child.request("stage", json!({"inputs": inputs, "groups": 1, "slots": 1}), LIMIT).unwrap();
    let (x, w) = (0_f32.to_ne_bytes().repeat(48 * 96), mode.to_ne_bytes().repeat(96));
    let file = folder.join("content");
    std::fs::write(&file, [x.as_slice(), w.as_slice()].concat()).unwrap();
    let content = std::fs::File::open(&file).unwrap();
    let body = json!({"slots": [0], "offsets": [[0, x.len()]]});
    child.request_with("refresh", body, content.as_fd(), LIMIT).unwrap();
}

#[test]
fn raw_system_calls_get_nowhere_in_a_forked_child() {
    let interpreter = autokernel_testbed::interpreter();
    // SAFETY: the only test of this program, before it has started any thread.
    unsafe { std::env::set_var("AUTOKERNEL_EXE", env!("CARGO_BIN_EXE_autokernel-worker-child")) };
    let folder = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    let region = package(&interpreter, folder.path(), &hostile());
    let mut zygote = zygote(&interpreter, folder.path(), &region);

    let mut child = zygote.fork().unwrap();
    stage(&mut child, folder.path(), 0.0);
    // Without the wall the candidate does not run.
    let early = child.request("batch", json!({"calls": [0]}), LIMIT);
    assert!(matches!(&early, Err(PeerError::Remote { kind, .. }) if kind == "not_confined"), "{early:?}");
    child.confine(LIMIT).unwrap();
    let reply = child.request("batch", json!({"calls": [0]}), LIMIT).unwrap();
    child.freeze().unwrap();
    let address = reply["outputs"][0][0]["address"].as_u64().unwrap();
    let mut bytes = vec![0; 4 * (ATTEMPTS.len() + 3)];
    child.read_memory(address, &mut bytes).unwrap();
    let results: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|quad| f32::from_ne_bytes(*quad)).collect();
    for (result, (name, ..)) in results.iter().zip(ATTEMPTS) {
        assert_eq!(result.to_bits(), EPERM.to_bits(), "{name}: {result}");
    }
    let [in_a_worker, clone3, pid] = results[ATTEMPTS.len()..] else { panic!() };
    assert_eq!(in_a_worker.to_bits(), EPERM.to_bits(), "fork in a thread of the pool: {in_a_worker}");
    assert_eq!(clone3.to_bits(), ENOSYS.to_bits(), "clone3: {clone3}");
    assert_eq!(pid as i32, child.pid(), "what is harmless works");
    assert!(folder.path().join("own/given").exists() && !folder.path().join("own/made").exists());
    drop(child);

    // A child that was told nothing of its confinement, or something else, is not taken for confined.
    let mut child = zygote.fork().unwrap();
    let nothing = json!({"program": "", "install": 317, "executable": false});
    let refused = child.request("confine", nothing, LIMIT);
    assert!(matches!(&refused, Err(PeerError::Remote { kind, .. }) if kind == "not_confined"), "{refused:?}");
    // One instruction that allows everything: the child finds that it can still do what it must not.
    let open = json!({"program": "060000000000ff7f", "install": 317, "executable": false});
    let refused = child.request("confine", open, LIMIT);
    assert!(
        matches!(&refused, Err(PeerError::Remote { message, .. }) if message.contains("start a process")),
        "{refused:?}"
    );

    // How a child ends is told, though it is not ours to bury. Before Linux 6.15 nobody can say.
    let known = release() >= (6, 15);
    for (mode, words) in [
        (1.0, "signal 11 (SIGSEGV"),
        (2.0, "Bad file descriptor"),
        (3.0, "signal 11 (SIGSEGV"),
        (5.0, "exit code 9"),
    ] {
        let mut child = zygote.fork().unwrap();
        stage(&mut child, folder.path(), mode);
        child.confine(LIMIT).unwrap();
        let error = child.request("batch", json!({"calls": [0], "addresses": false}), LIMIT).unwrap_err();
        assert!(matches!(error, PeerError::Died { .. }), "{mode}: {error:?}");
        assert!(!known || error.to_string().contains(words), "{mode}: {error}");
    }

    // More threads than it was given are seen once it stands still.
    let mut child = zygote.fork().unwrap();
    stage(&mut child, folder.path(), 4.0);
    child.confine(LIMIT).unwrap();
    child.freeze().unwrap();
    child.thaw().unwrap();
    let mut frozen = Ok(());
    for _ in 0..3 {
        frozen.unwrap();
        child.request("batch", json!({"calls": [0]}), LIMIT).unwrap();
        frozen = child.freeze();
        child.thaw().unwrap();
    }
    assert!(matches!(&frozen, Err(PeerError::Protocol { what }) if what.contains("threads")), "{frozen:?}");
}

/// Major and minor number of the running kernel.
fn release() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(['.', '-']).filter_map(|part| part.trim().parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}
