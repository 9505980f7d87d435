//! Discovery against made-up interpreters, and the environment with an empty list.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fs_err as fs;
use tempfile::TempDir;

use super::discover::{Interpreter, PythonError, Source, Surroundings, ask, probe};
use super::environment::{Contents, Lean, is_requirement, make, make_with, seen_by};
use super::peer_tests::python;

/// A machine with nothing on it but what a test puts there.
struct Machine {
    root: TempDir,
    around: Surroundings,
}

impl Machine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("usr");
        let around = Surroundings {
            variables: vec![(OsString::from("PATH"), path.into())],
            folder: root.path().join("work"),
            own: Some(root.path().join("own")),
            limit: Duration::from_secs(20),
        };
        Self { root, around }
    }

    fn set(&mut self, name: &str, below: &str) {
        self.around.variables.push((name.into(), self.root.path().join(below).into()));
    }

    /// A program that prints what a Python with this torch would print.
    fn python(&self, below: &str, python: &str, torch: Option<&str>) -> PathBuf {
        let torch = torch.map_or("null".to_owned(), |v| format!("\"{v}\""));
        self.script(below, &format!(
            "echo hello from a customisation\ncat <<'END'\n{{\"probe\":1,\"python\":\"{python}\",\"executable\":null,\"prefix\":\"/p\",\
             \"base_prefix\":\"/p\",\"torch\":{torch},\"torch_error\":null,\"torch_lib\":\"/p/site/torch/lib\",\"openmp\":\"/p/libgomp.so.1\",\
             \"numpy\":null,\"cuda\":false}}\nEND"
        ))
    }

    fn script(&self, below: &str, body: &str) -> PathBuf {
        let path = self.root.path().join(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    fn find(&self) -> Result<Interpreter, PythonError> {
        self.around.discover(None)
    }
}

#[test]
fn order_of_places() {
    let mut machine = Machine::new();
    assert!(matches!(machine.find(), Err(PythonError::NotFound { tried }) if tried.len() == 4));
    let own = machine.python("own/bin/python", "3.12.1", Some("2.15.0"));
    let found = machine.find().unwrap();
    assert_eq!((found.path, found.source), (own, Source::Own));
    let plain = machine.python("usr/python", "3.12.1", Some("2.15.0"));
    assert_eq!(machine.find().unwrap().path, plain);
    let three = machine.python("usr/python3", "3.10.0", Some("2.9.0a0+git"));
    let found = machine.find().unwrap();
    assert_eq!((found.path, found.source), (three, Source::Path));
    let dot = machine.python("work/.venv/bin/python3", "3.12.1", Some("2.15.0"));
    assert_eq!(machine.find().unwrap().path, dot);
    let conda = machine.python("conda/bin/python", "3.12.1", Some("2.15.0"));
    machine.set("CONDA_PREFIX", "conda");
    assert_eq!(machine.find().unwrap().path, conda);
    let active = machine.python("active/bin/python", "3.12.1", Some("3.0.0"));
    machine.set("VIRTUAL_ENV", "active");
    assert_eq!(machine.find().unwrap().path, active);
    let named = machine.python("named/python", "3.12.1", Some("2.15.0"));
    machine.set("AUTOKERNEL_PYTHON", "named/python");
    assert_eq!(machine.find().unwrap().source, Source::Explicit);
    assert_eq!(machine.find().unwrap().path, named);
    let given = machine.around.discover(Some(&machine.root.path().join("conda"))).unwrap();
    assert_eq!(given.path, conda, "the folder of an environment will do");
    let by_name = machine.around.discover(Some(Path::new("python3"))).unwrap();
    assert_eq!(by_name.python, "3.10.0");
}

#[test]
fn the_users_word_is_final() {
    let mut machine = Machine::new();
    machine.python("usr/python3", "3.12.1", Some("2.15.0"));
    let find = |m: &Machine, below: &str| m.around.discover(Some(&m.root.path().join(below))).unwrap_err();
    assert!(matches!(find(&machine, "nowhere"), PythonError::NotFound { tried } if tried.len() == 1));
    let bare = machine.python("bare", "3.12.1", None);
    assert!(
        matches!(find(&machine, "bare"), PythonError::NoTorch { interpreters } if interpreters == [bare])
    );
    machine.python("old", "3.12.1", Some("2.8.1+cpu"));
    assert!(matches!(find(&machine, "old"), PythonError::TorchTooOld { torch, .. } if torch == "2.8.1+cpu"));
    machine.python("older", "3.9.9", Some("2.15.0"));
    assert!(matches!(find(&machine, "older"), PythonError::PythonTooOld { .. }));
    machine.script("sick", "echo 'cannot \x1b[1mload' >&2; exit 127");
    let error = find(&machine, "sick");
    assert!(
        matches!(&error, PythonError::Broken { stderr, .. } if stderr == "exit code 127 cannot load"),
        "{error}"
    );
    machine.script("mute", "echo '{}'");
    assert!(matches!(find(&machine, "mute"), PythonError::Broken { .. }));
    fs::write(machine.root.path().join("text"), "").unwrap();
    assert!(matches!(find(&machine, "text"), PythonError::Broken { .. }));
    machine.set("AUTOKERNEL_PYTHON", "bare");
    assert!(matches!(machine.find(), Err(PythonError::NoTorch { .. })));
}

#[test]
fn unusable_places_are_passed_over_and_told() {
    let mut machine = Machine::new();
    machine.script("active/bin/python", "exit 1");
    machine.set("VIRTUAL_ENV", "active");
    assert!(matches!(machine.find(), Err(PythonError::Broken { .. })));
    let bare = machine.python("usr/python3", "3.12.1", None);
    assert!(matches!(machine.find(), Err(PythonError::NoTorch { interpreters }) if interpreters == [bare]));
    machine.python("usr/python", "3.12.1", Some("1.13.1"));
    assert!(matches!(machine.find(), Err(PythonError::TorchTooOld { .. })));
    let own = machine.python("own/bin/python", "3.12.1", Some("2.15.0"));
    assert_eq!(machine.find().unwrap().path, own);
}

#[test]
fn a_hung_interpreter_is_killed() {
    let mut machine = Machine::new();
    machine.around.limit = Duration::from_millis(200);
    machine.script("hung", "sleep 1000 & sleep 1000");
    let start = Instant::now();
    let error = machine.around.discover(Some(&machine.root.path().join("hung"))).unwrap_err();
    assert!(
        matches!(&error, PythonError::Broken { stderr, .. } if stderr.contains("no answer in 0.2 s")),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn this_machines_python_answers() {
    let facts = ask(python(), false, Duration::from_mins(1)).unwrap();
    assert!(facts.python() >= (3, 8), "{facts:?}");
    match probe(python()) {
        Ok(found) => assert!(found.gomp.is_file() && found.torch_lib.is_dir(), "{found:?}"),
        Err(PythonError::Broken { interpreter, stderr }) => panic!("{}: {stderr}", interpreter.display()),
        Err(_) => {}
    }
}

fn make_empty(dir: &Path, bytes: u64) -> (Result<PathBuf, PythonError>, Vec<String>) {
    let mut lines = Vec::new();
    let ready = |dir: &Path| {
        ask(&dir.join("bin/python"), false, Duration::from_mins(1))?;
        Ok(dir.to_owned())
    };
    let made =
        make(Some(python()), dir, "# nothing\n", bytes, &ready, &mut |line| lines.push(line.to_owned()));
    (made, lines)
}

#[test]
fn an_environment_is_made_once_and_resumed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data/env-1");
    let left = root.path().join("data/.env-1.new/half");
    fs::create_dir_all(&left).unwrap();
    let (made, lines) = make_empty(&dir, 1_000_000);
    assert_eq!(made.unwrap(), dir);
    assert!(lines[0].contains("env-1 (0.0 GB)"), "{lines:?}");
    assert!(!left.exists());
    let script = fs::read_to_string(dir.join("bin/activate")).unwrap();
    assert!(script.contains("data/env-1") && !script.contains(".env-1.new"), "scripts name the final place");
    let (again, lines) = make_empty(&dir, u64::MAX);
    assert_eq!(again.unwrap(), dir);
    assert_eq!(lines, Vec::<String>::new(), "nothing to do");
}

#[test]
fn a_full_disk_and_a_strangers_folder_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let (made, _) = make_empty(&root.path().join("env"), u64::MAX);
    assert!(matches!(made, Err(PythonError::NoSpace { .. })));
    let mine = root.path().join("mine");
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("thesis.tex"), "").unwrap();
    assert!(make_empty(&mine, 0).0.is_err());
    assert!(mine.join("thesis.tex").exists());
}

#[test]
fn a_small_build_is_tried_first_and_is_no_condition() {
    let root = tempfile::tempdir().unwrap();
    let ready = |dir: &Path| ask(&dir.join("bin/python"), false, Duration::from_mins(1)).map(drop);
    let attempt = |name: &str, requirements: &str| {
        let mut lines = Vec::new();
        // Nobody listens on the discard port of this machine.
        let lean = Lean { requirements, index: "http://127.0.0.1:9/simple", bytes: 1_000 };
        let contents = Contents { requirements: "# nothing\n", bytes: 2_000_000, lean: Some(lean), see: &[] };
        let dir = root.path().join(name);
        make_with(Some(python()), &dir, &contents, &ready, &mut |line| lines.push(line.to_owned())).unwrap();
        lines.join("\n")
    };
    let told = attempt("without", "no-such-package-of-ours==1\n");
    assert!(
        told.contains("can't be had from http://127.0.0.1:9") && told.contains("default build"),
        "{told}"
    );
    let told = attempt("with", "# nothing is a small build of nothing\n");
    assert!(!told.contains("can't be had"), "{told}");
}

#[test]
fn packages_come_on_top_of_a_base() {
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("base packages");
    fs::create_dir(&base).unwrap();
    fs::write(base.join("only_in_the_base.py"), "").unwrap();
    let contents = Contents {
        requirements: &format!("# nothing\n{}pip>=1\n", "# keep: "),
        bytes: 1_000,
        lean: None,
        see: std::slice::from_ref(&base),
    };
    let dir = root.path().join("with");
    let ready = |dir: &Path| {
        let output = Command::new(dir.join("bin/python"))
            .args(["-I", "-c", "import only_in_the_base, sys; print(sys.prefix)"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout).unwrap())
    };
    let prefix = make_with(Some(python()), &dir, &contents, &ready, &mut |_| {}).unwrap();
    assert_eq!(seen_by(&dir), [base]);
    assert_eq!(Path::new(prefix.trim()).canonicalize().unwrap(), dir.canonicalize().unwrap());
}

#[test]
fn two_processes_make_one_environment() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("env");
    let makers: Vec<_> = (0..2)
        .map(|_| {
            let dir = dir.clone();
            std::thread::spawn(move || make_empty(&dir, 1_000))
        })
        .collect();
    let told: Vec<String> = makers
        .into_iter()
        .map(|maker| {
            let (made, lines) = maker.join().unwrap();
            assert_eq!(made.unwrap(), dir);
            lines.join("\n")
        })
        .collect();
    assert_eq!(told.iter().filter(|lines| lines.contains("making /")).count(), 1, "{told:?}");
}

#[test]
fn what_pip_would_take_for_an_option_is_no_package() {
    for good in ["timm", "timm==1.0.31", "torchvision>=0.20,<1", "a[b]", "pkg@https://example.org/a.whl"] {
        assert!(is_requirement(good), "{good}");
    }
    for bad in ["", "-r", "--index-url=x", "./folder", "a b", "a\n-r b", "a;$(b)", "#a"] {
        assert!(!is_requirement(bad), "{bad}");
    }
}
