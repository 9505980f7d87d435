//! What can be wrong with what a user gives: each has an exit code, a kind, and a message that says
//! what to do.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::journey::journey;
use crate::program::{Outcome, folder, json, model, program, program_with_python, run};

/// What a failed command must look like, as text and as JSON.
struct Wanted<'a> {
    code: i32,
    kind: &'a str,
    /// Parts of the message.
    message: &'a [&'a str],
    /// Part of the advice.
    help: &'a str,
}

fn check(name: &str, mut command: Command, wanted: &Wanted<'_>) -> Outcome {
    command.args(["--format", "json"]);
    let outcome = run(command);
    let told = format!("{name}: {}", outcome.told());
    assert_eq!(outcome.code, Some(wanted.code), "{told}");
    let error = outcome.json();
    assert_eq!(error["schema"], "autokernel.error/1", "{told}");
    assert_eq!(error["exit_code"], wanted.code, "{told}");
    assert_eq!(error["kind"], wanted.kind, "{told}");
    for part in wanted.message {
        assert!(error["message"].as_str().unwrap().contains(part), "`{part}` in {told}");
        assert!(outcome.stderr.contains(part), "`{part}` on stderr in {told}");
    }
    assert!(error["help"].as_str().unwrap_or_default().contains(wanted.help), "`{}` in {told}", wanted.help);
    assert!(outcome.stderr.contains("error: "), "{told}");
    assert!(!outcome.stderr.contains("panicked"), "{told}");
    outcome
}

/// The program where nothing is installed: no environment, a path with nothing on it.
fn bare(home: &Path) -> Command {
    let empty = home.join("empty");
    std::fs::create_dir_all(&empty).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_autokernel"));
    command.env_clear().env("PATH", &empty).env("HOME", home).env("AUTOKERNEL_HOME", home.join("store"));
    command.current_dir(&empty);
    command
}

/// A Python environment with nothing in it, and its folder of packages.
fn empty_environment(at: &Path) -> (PathBuf, PathBuf) {
    let base = autokernel_testbed::interpreter().path;
    let mut venv = Command::new(base);
    venv.args(["-I", "-m", "venv", "--without-pip"]).arg(at);
    run(venv).expect(0);
    let lib = std::fs::read_dir(at.join("lib")).unwrap().next().unwrap().unwrap().path();
    (at.join("bin/python"), lib.join("site-packages"))
}

#[test]
fn no_python() {
    let home = folder("no_python");
    let mut command = bare(&home);
    command.args(["optimize", &model("tiny_norm")]);
    let wanted = Wanted {
        code: 3,
        kind: "python",
        message: &["no Python found", "python3 on the path"],
        help: "install Python 3.10",
    };
    check("no Python", command, &wanted);
}

#[test]
fn python_without_a_torch_that_can_be_used() {
    let home = folder("no_torch");
    let (python, site) = empty_environment(&home.join("env"));
    let optimize = |python: &str| {
        let mut command = bare(&home);
        command.args(["optimize", &model("tiny_norm"), "--python", python]);
        command
    };
    let python = python.display().to_string();
    let wanted = Wanted { code: 3, kind: "python", message: &["no torch in", &python], help: "--yes" };
    check("no torch", optimize(&python), &wanted);
    let mut active = bare(&home);
    active.env("VIRTUAL_ENV", home.join("env")).args(["profile", &model("tiny_norm")]);
    check("no torch in the active environment", active, &wanted);

    std::fs::create_dir_all(site.join("torch")).unwrap();
    std::fs::create_dir_all(site.join("torch-2.1.0.dist-info")).unwrap();
    std::fs::write(site.join("torch/__init__.py"), "").unwrap();
    std::fs::write(site.join("torch/version.py"), "__version__ = '2.1.0'\n").unwrap();
    std::fs::write(site.join("torch-2.1.0.dist-info/METADATA"), "Name: torch\nVersion: 2.1.0\n").unwrap();
    let wanted = Wanted {
        code: 3,
        kind: "python",
        message: &["torch 2.1.0", "2.9 or newer"],
        help: "pip install --upgrade torch",
    };
    check("old torch", optimize(&python), &wanted);

    let wanted = Wanted { code: 3, kind: "python", message: &["/no/such/python"], help: "--python" };
    check("no such interpreter", optimize("/no/such/python"), &wanted);
    let wanted =
        Wanted { code: 3, kind: "python", message: &["/bin/false", "does not work"], help: "doctor" };
    check("an interpreter that is none", optimize("/bin/false"), &wanted);
}

#[test]
fn no_compiler() {
    let home = folder("no_compiler");
    let python = autokernel_testbed::interpreter().path.display().to_string();
    let mut command = bare(&home);
    command.env("CXX", "/nonexistent").args(["optimize", &model("tiny_norm"), "--python", &python]);
    let wanted = Wanted { code: 4, kind: "compiler", message: &["/nonexistent"], help: "install g++" };
    check("CXX that is not there", command, &wanted);
    let mut command = bare(&home);
    command.args(["profile", &model("tiny_norm"), "--python", &python]);
    let wanted = Wanted { code: 4, kind: "compiler", message: &["compiler"], help: "install g++" };
    check("no compiler on the path", command, &wanted);
}

#[test]
fn doctor_says_what_is_missing() {
    let home = folder("doctor");
    let mut command = bare(&home);
    command.args(["doctor", "--format", "json"]);
    let report = run(command).expect(8).json();
    let missing = |name: &str| {
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap()["ok"] == false
    };
    assert!(missing("python") && missing("compiler") && report["fine"] == false, "{report}");
    let report = json(&home, &["doctor"]).expect(0).json();
    assert_eq!(report["fine"], true, "{report}");
}

#[test]
fn doctor_tells_what_there_is_and_no_secret() {
    let home = folder("doctor_facts");
    std::fs::write(home.join("something"), [0; 4096]).unwrap();
    let mut command = program_with_python(&home);
    command.env("MISTRAL_API_KEY", "the-secret-itself").env_remove("COHERE_API_KEY");
    // Where no driver is to be found there is no GPU, whatever this machine has.
    command.env("PATH", "/usr/bin:/bin").args(["doctor", "--format", "json"]);
    let outcome = run(command).expect(0);
    assert!(!outcome.told().contains("the-secret-itself"), "{}", outcome.told());
    let report = outcome.json();
    let facts = &report["facts"];
    assert_eq!(facts["keys"]["MISTRAL_API_KEY"], true);
    assert_eq!(facts["keys"]["COHERE_API_KEY"], false);
    assert!(report["text"].as_str().unwrap().contains("MISTRAL_API_KEY"));
    assert!(facts["python"]["torch"].is_string() && facts["compiler"]["version"].is_string(), "{facts}");
    assert!(facts["cores"]["usable"].as_u64().unwrap() >= 1);
    assert!(facts["gpus"].is_array());
    assert!(facts["copy_gb_per_s"].as_object().unwrap().len() >= 3);
    assert_eq!(facts["sandbox"]["self_test"], true);
    let runs = &facts["caches"][0];
    assert_eq!(runs["path"], home.display().to_string().as_str());
    assert_eq!(runs["bytes"], 4096);
    assert!(facts["leaves"][0].as_str().unwrap().starts_with("Nothing of your model"));
}

#[test]
fn models_that_cannot_be_used() {
    let home = folder("bad_models");
    let cases: &[(&str, &str, &str, &[&str], &str)] = &[
        ("no file", "/no/such/model.py", "file_not_found", &["/no/such/model.py"], "check the path"),
        ("no model in it", &model("no_model"), "no_model", &["no_model.py", "build()"], "get_inputs"),
        (
            "no such name",
            &format!("{}:Nothing", model("tiny_norm")),
            "no_model",
            &["Nothing", "Model"],
            "get_inputs",
        ),
        (
            "needs a module",
            &model("missing_import"),
            "import_error",
            &["a_module_that_nobody_has"],
            "install what is missing",
        ),
        (
            "raises",
            &model("raises"),
            "model_raises",
            &["ValueError", "the third layer is missing"],
            "plain PyTorch",
        ),
        ("NaN", &model("gives_nan"), "non_finite", &[], "NaN"),
        ("differs between two calls", &model("differs"), "not_deterministic", &[], "dropout"),
    ];
    for (name, model, kind, message, help) in cases {
        let mut command = program_with_python(&home);
        command.args(["profile", model]);
        let outcome = check(name, command, &Wanted { code: 5, kind, message, help });
        if *kind == "model_raises" {
            assert!(
                outcome.stderr.contains("raises.py\", line"),
                "the user's own traceback: {}",
                outcome.told()
            );
        }
    }
}

#[test]
fn a_failed_run_is_kept_as_failed() {
    let home = folder("failed");
    let mut command = program_with_python(&home);
    command.args(["optimize", &model("raises")]);
    let wanted =
        Wanted { code: 5, kind: "model_raises", message: &["the third layer"], help: "plain PyTorch" };
    check("optimize", command, &wanted);
    let runs = json(&home, &["runs"]).expect(0).json();
    assert_eq!(runs["runs"][0]["status"], "failed");
    let packages = std::fs::read_dir(home.join("packages"));
    assert!(packages.is_ok_and(|mut found| found.next().is_none()) || !home.join("packages").exists());
}

#[test]
fn arguments_that_cannot_be_used() {
    let home = folder("arguments");
    let there = home.display().to_string();
    let tiny = model("tiny_norm");
    let cases: &[(&[&str], &str, &[&str])] = &[
        (&["optimize", &tiny, "--out", &there], "usage", &[&there, "exists"]),
        (&["optimize", &tiny, "--budget", "soon"], "usage", &["--budget", "10m, 90s or 1h"]),
        (&["optimize", &tiny, "--budget", "5m,2usd"], "usage", &["dollars"]),
        (&["profile", &tiny, "--input", "1x128:float31"], "usage", &["--input", "float31", "float32"]),
        (&["profile", &tiny, "--input", "1 by 128"], "usage", &["1x128:int64"]),
        (&["profile", &tiny, "--threads", "0"], "usage", &["--threads"]),
        (&["optimise", &tiny], "usage", &["optimise", "optimize"]),
        (&["optimize"], "usage", &["MODEL"]),
        (&["bench", "/no/such/package"], "package", &["/no/such/package"]),
        (&["brief", "nothing", "0"], "no_run", &["nothing"]),
        (&["resume"], "no_run", &["last"]),
        (&["judge", "nothing", "0", &tiny], "no_run", &["nothing"]),
        (&["judge", "last", "0", "/no/such/kernel.cpp"], "usage", &["/no/such/kernel.cpp"]),
    ];
    for (arguments, kind, message) in cases {
        let mut command = program_with_python(&home);
        command.args(*arguments);
        check(&arguments.join(" "), command, &Wanted { code: 2, kind, message, help: "" });
    }
}

#[test]
fn an_unknown_region_is_told_with_those_that_there_are() {
    let journey = journey();
    let run = journey.report["run"].as_str().unwrap();
    let have = journey.report["regions"][0]["id"].as_str().unwrap();
    for command_name in ["brief", "judge"] {
        let mut command = program_with_python(&journey.home);
        command.args([command_name, run, "ffffffffffff"]);
        if command_name == "judge" {
            command.arg(crate::program::fixture("kernels/honest.cpp"));
        }
        check(
            command_name,
            command,
            &Wanted { code: 2, kind: "no_region", message: &["ffffffffffff", have], help: "" },
        );
    }
}

#[test]
fn stores_that_cannot_be_used() {
    let home = folder("damaged");
    std::fs::write(
        home.join("autokernel.db"),
        "not a database at all, but long enough to be read as one".repeat(40),
    )
    .unwrap();
    let damaged =
        Wanted { code: 7, kind: "store", message: &["damaged", "left as it is"], help: "AUTOKERNEL_HOME" };
    for arguments in [&["runs"][..], &["resume"], &["brief", "last", "0"]] {
        let mut command = program(&home);
        command.args(arguments);
        check("damaged", command, &damaged);
    }
    assert!(std::fs::read_to_string(home.join("autokernel.db")).unwrap().starts_with("not a database"));

    let around = folder("no_rights");
    std::fs::write(around.join("file"), "").unwrap();
    let mut command = program(&around);
    command.env("AUTOKERNEL_HOME", around.join("file/home")).arg("runs");
    check(
        "a home below a file",
        command,
        &Wanted { code: 7, kind: "store", message: &["file/home"], help: "AUTOKERNEL_HOME" },
    );

    // Nobody may write below /proc, not even root, whom rights on a folder do not stop.
    let mut command = program_with_python(&around);
    command.env("AUTOKERNEL_HOME", "/proc/autokernel").args(["optimize", &model("tiny_norm")]);
    check(
        "a home that can't be written",
        command,
        &Wanted { code: 7, kind: "store", message: &["/proc/autokernel"], help: "AUTOKERNEL_HOME" },
    );
}
