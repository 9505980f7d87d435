//! Confinement of runners and of programs started through `launch`.

use std::process::Command;

use autokernel_worker::sandbox::{Confinement, Domain, launch_command, probe};

#[test]
fn the_probe_passes_its_own_test() {
    crate::set_up();
    let report = probe();
    assert_eq!(report.problem, None);
    assert!(report.self_test && report.seccomp && report.landlock_abi >= 1);
    assert_eq!(report.uid_drop, report.uid == 0);
    assert_eq!(report.uid == 0, report.child_uid != report.uid);
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<autokernel_worker::sandbox::SandboxReport>(&text).unwrap(), report);
}

fn shell(confinement: &Confinement, script: &str) -> (i32, String) {
    crate::set_up();
    let mut command: Command = launch_command(confinement, "/bin/sh".as_ref()).unwrap();
    let output = command.args(["-c", script]).env("PATH", "/usr/bin:/bin").output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    (output.status.code().unwrap_or(-1), text)
}

#[test]
fn a_launched_program_sees_what_it_was_given() {
    for domain in [Domain::Builder, Domain::Deployment] {
        let folder = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("given"), "inside").unwrap();
        std::fs::write(other.path().join("secret"), "outside").unwrap();
        let confinement = Confinement { write: vec![folder.path().to_owned()], ..Confinement::new(domain) };
        let script = format!(
            "cat {0}/given; echo new > {0}/made && cat {0}/made; cat {1}/secret; echo bad > {1}/made",
            folder.path().display(),
            other.path().display()
        );
        let (_, text) = shell(&confinement, &script);
        assert!(text.contains("inside") && text.contains("new"), "{text}");
        assert!(!text.contains("outside") && !other.path().join("made").exists(), "{text}");
    }
}

#[test]
fn a_launched_program_is_not_root_and_gains_nothing() {
    for domain in [Domain::Builder, Domain::Deployment] {
        let (code, text) = shell(
            &Confinement { read: vec!["/proc".into()], ..Confinement::new(domain) },
            "id -u; id -G; grep -E 'NoNewPrivs|Seccomp:|CapEff' /proc/self/status; ls -l /proc/self/fd | wc -l",
        );
        assert_eq!(code, 0, "{text}");
        let uid: u32 = text.lines().next().unwrap().parse().unwrap();
        assert_ne!(uid, 0);
        assert!(text.contains("NoNewPrivs:\t1") && text.contains("Seccomp:\t2"), "{text}");
        // Capabilities: none, or the one that reads folders which only root may.
        let capabilities =
            u64::from_str_radix(text.lines().find_map(|l| l.strip_prefix("CapEff:\t")).unwrap(), 16).unwrap();
        assert_eq!(capabilities & !(1 << 2), 0, "{text}");
    }
}

#[test]
fn a_missing_folder_is_an_error_and_not_less_confinement() {
    let confinement =
        Confinement { read: vec!["/no/such/folder".into()], ..Confinement::new(Domain::Builder) };
    let (code, text) = shell(&confinement, "echo ran");
    assert_eq!(code, 125);
    assert!(text.contains("not confined") && !text.contains("ran"), "{text}");
}

#[test]
fn a_launched_program_has_no_network() {
    let python = "import socket; socket.socket()";
    let (code, text) = shell(&Confinement::new(Domain::Deployment), &format!("python3 -c '{python}'"));
    // Without Python the shell says "not found", which proves nothing: skip loudly.
    if text.contains("not found") {
        println!("skipped: no python3");
        return;
    }
    assert_ne!(code, 0);
    assert!(text.contains("Operation not permitted"), "{text}");
}

#[test]
fn children_die_with_a_killed_parent() {
    crate::set_up();
    dies_with_its_parent(Domain::Builder);
    // With a capability kept across the start of the program, the death signal must survive too.
    dies_with_its_parent(Domain::Deployment);
}

fn dies_with_its_parent(domain: Domain) {
    // A shell stands for the parent: it starts a runner-like child that would sleep, then is killed.
    let confinement = serde_json::to_string(&Confinement::new(domain)).unwrap();
    let exe = env!("CARGO_BIN_EXE_autokernel-worker-child");
    let script = format!("{exe} __worker launch $$ '{confinement}' -- /bin/sleep 60 & echo $!; wait");
    let mut parent =
        Command::new("sh").args(["-c", &script]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(parent.stdout.take().unwrap()), &mut line)
        .unwrap();
    let child = line.trim().to_owned();
    let name = || std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
    for _ in 0..200 {
        if name().trim() == "sleep" {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(name().trim(), "sleep");
    parent.kill().unwrap();
    parent.wait().unwrap();
    let alive = || {
        let status = std::fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        status.contains("State:") && !status.contains("State:\tZ")
    };
    for _ in 0..200 {
        if !alive() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the child outlived its parent");
}

#[test]
fn the_parent_reads_the_memory_of_a_deployment_child() {
    crate::set_up();
    let mut command = launch_command(&Confinement::new(Domain::Deployment), "/bin/sleep".as_ref()).unwrap();
    let mut child = command.arg("60").spawn().unwrap();
    let proc = format!("/proc/{}", child.id());
    for _ in 0..300 {
        if std::fs::read_to_string(format!("{proc}/comm")).unwrap().trim() == "sleep" {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let maps = std::fs::read_to_string(format!("{proc}/maps")).unwrap_or_default();
    let start = maps.split('-').next().and_then(|text| u64::from_str_radix(text, 16).ok());
    let memory = std::fs::File::open(format!("{proc}/mem"));
    let mut magic = [0; 4];
    let read =
        memory.and_then(|file| std::os::unix::fs::FileExt::read_exact_at(&file, &mut magic, start.unwrap()));
    child.kill().unwrap();
    child.wait().unwrap();
    read.unwrap();
    assert_eq!(&magic, b"\x7fELF");
}

/// Ids of live processes whose command line holds this mark.
fn marked(mark: &str) -> Vec<i32> {
    let is_marked = |entry: &std::fs::DirEntry| {
        let text = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&text).contains(mark)
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter(is_marked).filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn within_seconds(limit: u64, mut reached: impl FnMut() -> bool) -> bool {
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_secs(limit) {
        if reached() {
            return true;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    false
}

#[test]
fn nothing_of_a_builder_outlives_its_parent() {
    crate::set_up();
    let has_namespace = probe().pid_namespace;
    // Grandchildren, as a compiler has; one leaves the group, which only a namespace notices.
    let leaves = if has_namespace { "setsid sleep 61.5791 &" } else { "" };
    let script = format!("sleep 60.5791 & (sleep 60.5791 & {leaves} sleep 60.5791) & wait");
    let expected = 3 + usize::from(has_namespace);
    let mut command = launch_command(&Confinement::new(Domain::Builder), "/bin/sh".as_ref()).unwrap();
    command.args(["-c", &script]).env("PATH", "/usr/bin:/bin").stdin(std::process::Stdio::piped());
    let mut keeper = command.spawn().unwrap();
    let sleepers = || {
        marked("0.5791").into_iter().filter(|pid| comm(*pid) == "sleep").count()
            + marked("1.5791").into_iter().filter(|pid| comm(*pid) == "sleep").count()
    };
    assert!(within_seconds(20, || sleepers() == expected), "{} of {expected}", sleepers());
    // What the death of a parent does: its end of the pipe closes.
    drop(keeper.stdin.take());
    assert!(within_seconds(20, || sleepers() == 0), "{} are left", sleepers());
    keeper.wait().unwrap();
}

fn comm(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

#[test]
fn a_kept_program_ends_as_it_would_alone() {
    crate::set_up();
    for (script, code, signal) in
        [("exit 7", Some(7), None), ("true", Some(0), None), ("kill -ABRT $$", None, Some(6))]
    {
        let mut command = launch_command(&Confinement::new(Domain::Builder), "/bin/sh".as_ref()).unwrap();
        // The shell of the script is the first process of its namespace, which such signals do not reach.
        command.args(["-c", &format!("sh -c '{script}'; code=$?; exit $code")]).env("PATH", "/usr/bin:/bin");
        let mut keeper = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        // Waiting would close it, and with it end everything.
        let _alive = keeper.stdin.take();
        let status = keeper.wait().unwrap();
        let told = signal.map_or(code, |signal| Some(128 + signal));
        assert_eq!(status.code(), told, "{script}: {status:?}");
    }
}
