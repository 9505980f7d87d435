//! The peer against real children that speak the protocol, well and badly.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::discover::{Interpreter, Source};
use super::peer::{Exit, Peer, PeerError, socket_pair};
use super::process::stat;
use super::spawn::{child_environment, is_secret, spawn_from, start};

const LIMIT: Duration = Duration::from_secs(30);

/// A bridge of few words: no torch, and operations that misbehave on demand.
const FAKE: &str = r#"
import ctypes, json, os, signal, socket, subprocess, sys, threading, time
COUNT = ctypes.c_uint64(0)
BLOB = ctypes.create_string_buffer(bytes(range(256)) * 4096)
def count():
    while True: COUNT.value += 1
def serve(s):
    data, fds = b"", []
    while True:
        while b"\n" not in data:
            got, new, _, _ = socket.recv_fds(s, 65536, 4)
            fds += new
            if not got: return
            data += got
        line, data = data.split(b"\n", 1)
        r = json.loads(line); op = r["op"]
        def ok(v, rid=r["id"]): s.sendall(json.dumps({"id": rid, "ok": v}).encode() + b"\n")
        if op == "echo": ok({k: v for k, v in r.items() if k not in ("id", "op")})
        elif op == "error": s.sendall(json.dumps({"id": r["id"], "error": {"kind": "no_model", "message": "m\x1b[1m", "traceback": "t" * 200000, "file": "x.py"}}).encode() + b"\n")
        elif op == "garbage": s.sendall(b"\x1b[31mhello world\n")
        elif op == "other_id": ok({}, r["id"] ^ 1)
        elif op == "twice": s.sendall(b"".join(json.dumps({"id": r["id"], "ok": {}}).encode() + b"\n" for _ in range(2)))
        elif op == "both": s.sendall(json.dumps({"id": r["id"]}).encode() + b"\n")
        elif op == "later":
            ok({}); time.sleep(0.05); ok({})
        elif op == "huge":
            try:
                while True: s.sendall(b"x" * (1 << 20))
            except OSError: pass
        elif op == "exit":
            s.sendall(b'{"id":'); print("last \x1b[31mwords", file=sys.stderr, flush=True); os._exit(3)
        elif op == "crash": os.kill(os.getpid(), signal.SIGSEGV)
        elif op == "noise":
            os.write(1, b"noise\n" * 100000); os.write(2, b"the end\n"); ok({})
        elif op == "hang": time.sleep(1000)
        elif op == "sleep": time.sleep(r["seconds"]); ok({})
        elif op == "env": ok(dict(os.environ))
        elif op == "files": ok({"open": sorted(int(f) for f in os.listdir("/proc/self/fd"))})
        elif op == "memory": ok({"count": ctypes.addressof(COUNT), "blob": ctypes.addressof(BLOB), "bytes": len(BLOB) - 1})
        elif op == "count":
            threading.Thread(target=count, daemon=True).start(); ok({"address": ctypes.addressof(COUNT)})
        elif op == "child":
            p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], close_fds=False)
            ok({"pid": p.pid})
        elif op == "fork":
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0); s.close(); s = socket.socket(fileno=fds.pop())
            else:
                os.close(fds.pop()); ok({"pid": pid})
        elif op == "where": ok({"argv": sys.argv[1:], "path": sys.path[0], "cwd": os.getcwd(), "pyc": sys.dont_write_bytecode})
        elif op == "pid": ok({"pid": os.getpid(), "group": os.getpgid(0)})
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
s = socket.socket(fileno=int(os.environ["AUTOKERNEL_FD"]))
os.set_inheritable(s.fileno(), True)
serve(s)
"#;

/// The real interpreter behind `python3`, which may be a slow shim.
pub(super) fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let script = "import sys; print(sys.executable)";
        let output = Command::new("python3").args(["-I", "-c", script]).output().expect("tests need python3");
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
    })
}

fn fake_with(extra: &[(&str, &str)]) -> Peer {
    let (ours, theirs) = socket_pair().unwrap();
    let mut command = Command::new(python());
    let user = std::env::vars_os().chain(extra.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))));
    command.args(["-B", "-S", "-c", FAKE]).env_clear().envs(child_environment(user, Path::new("/bridge")));
    start(command, ours, &theirs).unwrap()
}

fn fake() -> Peer {
    fake_with(&[])
}

fn gone(pid: i32) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        if stat(&pid.to_string()).is_none_or(|s| s.state == 'Z') {
            return true;
        }
        thread::sleep(Duration::from_millis(2));
    }
    false
}

#[test]
fn replies_and_errors() {
    let mut peer = fake();
    let body = json!({"x": [1, 2.5, "ü"], "big": "y".repeat(1 << 20)});
    assert_eq!(peer.request("echo", body.clone(), LIMIT).unwrap(), body);
    let Err(PeerError::Remote { kind, message, traceback, data }) = peer.request("error", json!({}), LIMIT)
    else {
        panic!("no error");
    };
    assert_eq!((kind.as_str(), message.as_str()), ("no_model", "m"));
    assert!(traceback.len() < 70_000);
    assert_eq!(data, json!({"file": "x.py"}));
    let (_, wall) = peer.request_timed("sleep", json!({"seconds": 0.05}), LIMIT).unwrap();
    assert!(wall >= Duration::from_millis(50) && wall < Duration::from_secs(5), "{wall:?}");
    assert!(matches!(peer.request("echo", json!([]), LIMIT), Err(PeerError::Request { .. })));
    assert!(peer.request("echo", json!({}), Duration::MAX).is_ok(), "alive after all of these");
}

#[test]
fn broken_replies_end_the_child() {
    for (op, sign) in [
        ("garbage", "hello world"),
        ("other_id", "another request"),
        ("twice", "more than one line"),
        ("both", "neither"),
        ("huge", "longer than"),
    ] {
        let mut peer = fake();
        let pid = peer.pid();
        let error = peer.request(op, json!({}), LIMIT).unwrap_err();
        assert!(matches!(&error, PeerError::Protocol { what } if what.contains(sign)), "{op}: {error}");
        assert!(!error.to_string().contains('\u{1b}'));
        assert!(!peer.alive() && gone(pid), "{op}");
        assert!(matches!(peer.request("echo", json!({}), LIMIT), Err(PeerError::Died { .. })));
    }
}

#[test]
fn a_reply_before_its_request_is_refused() {
    let mut peer = fake();
    peer.request("later", json!({}), LIMIT).unwrap();
    thread::sleep(Duration::from_millis(300));
    assert!(matches!(peer.request("echo", json!({}), LIMIT), Err(PeerError::Protocol { .. })));
}

#[test]
fn death_is_told_with_the_last_words() {
    let mut peer = fake();
    peer.request("noise", json!({}), LIMIT).unwrap();
    let error = peer.request("exit", json!({}), LIMIT).unwrap_err();
    let PeerError::Died { exit, stderr } = error else { panic!("{error}") };
    assert_eq!(exit, Some(Exit::Code(3)));
    assert!(stderr.ends_with("the end\nlast words\n"), "{:?}", &stderr[stderr.len() - 40..]);
    assert!(stderr.len() <= super::output::KEPT);
    let error = fake().request("crash", json!({}), LIMIT).unwrap_err();
    assert!(matches!(error, PeerError::Died { exit: Some(Exit::Signal(11)), .. }), "{error}");
}

#[test]
fn a_hang_ends_at_the_limit_without_orphans() {
    let mut peer = fake();
    let grandchild = peer.request("child", json!({}), LIMIT).unwrap()["pid"].as_i64().unwrap() as i32;
    let pid = peer.pid();
    let start = Instant::now();
    let error = peer.request("hang", json!({}), Duration::from_millis(200)).unwrap_err();
    assert!(matches!(error, PeerError::Timeout { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(8));
    assert!(gone(pid) && gone(grandchild));
}

#[test]
fn a_child_that_does_not_read_blocks_nobody() {
    let mut peer = fake();
    peer.freeze().unwrap();
    peer.frozen_for_tests(false);
    let body = json!({"x": "y".repeat(8 << 20)});
    let error = peer.request("echo", body, Duration::from_millis(200)).unwrap_err();
    assert!(matches!(error, PeerError::Timeout { .. }), "{error}");
}

#[test]
fn death_of_the_leader_is_seen_though_a_grandchild_holds_the_socket() {
    let mut peer = fake();
    let grandchild = peer.request("child", json!({}), LIMIT).unwrap()["pid"].as_i64().unwrap() as i32;
    let error = peer.request("crash", json!({}), LIMIT).unwrap_err();
    assert!(matches!(error, PeerError::Died { .. }), "{error}");
    assert!(gone(grandchild));
}

#[test]
fn drop_and_kill_take_the_group() {
    for by_kill in [true, false] {
        let mut peer = fake();
        let grandchild = peer.request("child", json!({}), LIMIT).unwrap()["pid"].as_i64().unwrap() as i32;
        let pid = peer.pid();
        if by_kill {
            peer.kill();
        } else {
            drop(peer);
        }
        assert!(stat(&pid.to_string()).is_none(), "reaped");
        assert!(gone(grandchild));
    }
}

fn check_freeze(peer: &mut Peer) {
    let address = peer.request("count", json!({}), LIMIT).unwrap()["address"].as_u64().unwrap();
    let read = |peer: &Peer| {
        let mut bytes = [0; 8];
        peer.read_memory(address, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    for _ in 0..3 {
        peer.freeze().unwrap();
        let before = read(peer);
        assert!(matches!(peer.request("echo", json!({}), LIMIT), Err(PeerError::Frozen)));
        thread::sleep(Duration::from_millis(30));
        assert_eq!(read(peer), before);
        peer.thaw().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while read(peer) == before {
            assert!(Instant::now() < deadline, "still frozen after the thaw");
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(peer.request("echo", json!({}), LIMIT).is_ok());
}

#[test]
fn freeze_stands_still_and_thaw_goes_on() {
    check_freeze(&mut fake());
}

#[test]
fn memory_is_read_from_outside() {
    let mut peer = fake();
    let at = peer.request("memory", json!({}), LIMIT).unwrap();
    let mut bytes = vec![0; at["bytes"].as_u64().unwrap() as usize];
    peer.freeze().unwrap();
    peer.read_memory(at["blob"].as_u64().unwrap(), &mut bytes).unwrap();
    assert!(bytes.iter().enumerate().all(|(i, b)| *b == i as u8));
    assert!(peer.read_memory(8, &mut bytes).is_err(), "an unmapped page is an error");
    drop(peer);
}

#[test]
fn forked_children_are_peers_of_their_own() {
    let mut zygote = fake();
    let mut child = zygote.fork().unwrap();
    let mut other = zygote.fork().unwrap();
    let said = child.request("pid", json!({}), LIMIT).unwrap();
    assert_eq!(said, json!({"pid": child.pid(), "group": child.pid()}));
    assert_ne!(child.pid(), zygote.pid());
    check_freeze(&mut child);
    let error = child.request("crash", json!({}), LIMIT).unwrap_err();
    // It is the zygote's to bury; Linux says since 6.15 how it ended.
    assert!(matches!(error, PeerError::Died { exit: None | Some(Exit::Signal(11)), .. }), "{error}");
    assert!(!child.alive());
    let grandchild = other.request("child", json!({}), LIMIT).unwrap()["pid"].as_i64().unwrap() as i32;
    let pid = other.pid();
    other.freeze().unwrap();
    drop(other);
    assert!(gone(pid) && gone(grandchild));
    assert!(zygote.request("echo", json!({}), LIMIT).is_ok(), "the zygote lives on");
}

#[test]
fn a_zygote_cannot_name_a_stranger() {
    let (ours, theirs) = socket_pair().unwrap();
    let script = FAKE.replace("ok({\"pid\": pid})", "ok({\"pid\": os.getppid()})");
    let mut command = Command::new(python());
    command.args(["-B", "-S", "-c", &script]);
    let mut zygote = start(command, ours, &theirs).unwrap();
    let error = zygote.fork().unwrap_err();
    assert!(matches!(&error, PeerError::Protocol { what } if what.contains("not a child")), "{error}");
    assert!(!zygote.alive());
}

#[test]
fn secrets_and_strange_descriptors_stay_behind() {
    // A descriptor without close-on-exec, as a careless parent of ours may leave one open.
    let leak = std::fs::File::open("/dev/null").unwrap();
    rustix::io::fcntl_setfd(&leak, rustix::io::FdFlags::empty()).unwrap();
    let mut peer = fake_with(&[
        ("OPENAI_API_KEY", "sk-1"),
        ("MY_SECRET_THING", "sk-2"),
        ("hf_token", "sk-3"),
        ("AWS_PROFILE", "sk-4"),
        ("AUTOKERNEL_DISABLE", "1"),
        ("PYTHONSTARTUP", "/x.py"),
        ("PYTHONPATH", "/mine:/yours"),
        ("HF_HOME", "/models"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ]);
    let env = peer.request("env", json!({}), LIMIT).unwrap();
    let Value::Object(env) = env else { panic!("{env}") };
    for name in env.keys().filter(|name| *name != "TOKENIZERS_PARALLELISM") {
        assert!(!is_secret(name.as_ref()), "{name}");
    }
    assert!(!env.values().any(|v| v.as_str().is_some_and(|v| v.starts_with("sk-"))));
    assert!(!env.contains_key("PYTHONSTARTUP") && !env.contains_key("AUTOKERNEL_DISABLE"));
    assert_eq!(env["PYTHONPATH"], "/bridge:/mine:/yours");
    assert_eq!(env["HF_HOME"], "/models");
    assert_eq!(env["OPENBLAS_NUM_THREADS"], "1");
    let files = peer.request("files", json!({}), LIMIT).unwrap();
    // The three standard streams, the socket, and the folder that is being listed.
    assert_eq!(files["open"].as_array().unwrap().len(), 5, "{files}");
    drop(leak);
}

#[test]
fn a_child_outlives_the_thread_that_started_it() {
    let mut peer = thread::spawn(fake).join().unwrap();
    thread::sleep(Duration::from_millis(100));
    assert!(peer.request("echo", json!({}), LIMIT).is_ok());
}

#[test]
fn the_bridge_comes_before_the_working_folder() {
    let root = tempfile::tempdir().unwrap();
    let (bridge, work) = (root.path().join("bridge"), root.path().join("work"));
    for (folder, text) in [(&bridge, FAKE), (&work, "raise SystemExit('not the bridge')")] {
        let package = folder.join("autokernel");
        fs_err::create_dir_all(&package).unwrap();
        fs_err::write(package.join("__init__.py"), "").unwrap();
        fs_err::write(package.join("__main__.py"), text).unwrap();
    }
    let interpreter = Interpreter {
        path: python().to_owned(),
        source: Source::Path,
        python: String::new(),
        prefix: PathBuf::new(),
        base_prefix: PathBuf::new(),
        torch: String::new(),
        torch_lib: PathBuf::new(),
        gomp: PathBuf::new(),
        numpy: None,
        cuda: false,
    };
    let extra = [("TORCHINDUCTOR_CACHE_DIR".into(), "/cache".into()), ("A_TOKEN".into(), "given".into())];
    let mut peer = spawn_from(&bridge, &interpreter, "oracle", None, &work, &extra).unwrap();
    let said = peer.request("where", json!({}), LIMIT).unwrap();
    assert_eq!(said, json!({"argv": ["oracle"], "path": bridge, "cwd": work, "pyc": true}));
    let env = peer.request("env", json!({}), LIMIT).unwrap();
    assert_eq!((&env["TORCHINDUCTOR_CACHE_DIR"], &env["A_TOKEN"]), (&json!("/cache"), &json!("given")));
}

#[test]
fn a_frozen_or_dead_child_is_told_apart() {
    let mut peer = fake();
    peer.request("echo", json!({}), LIMIT).unwrap();
    assert!(peer.request("crash", json!({}), LIMIT).is_err());
    assert!(matches!(peer.freeze(), Err(PeerError::Died { exit: Some(Exit::Signal(11)), .. })));
    assert!(matches!(peer.thaw(), Err(PeerError::Died { .. })));
}
