//! The desk of a finished run, as commands and over the Model Context Protocol.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use autokernel_store::Store;
use serde_json::{Value, json};

use crate::journey::journey;
use crate::program::{fixture, folder, json, program_with_python};

/// A copy of the journey's home, so that what agents hand in here is nobody else's business. Other
/// tests write to the original meanwhile, so the database makes its copy itself.
fn home(name: &str) -> (PathBuf, String) {
    let (from, to) = (&journey().home, folder(name));
    let backup = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).backup(sqlite3.connect(sys.argv[2]))";
    let mut python = Command::new(autokernel_testbed::interpreter().path);
    python.args(["-c", backup]).arg(from.join("autokernel.db")).arg(to.join("autokernel.db"));
    assert!(python.status().unwrap().success());
    copy(&from.join("files"), &to.join("files"));
    (to, journey().report["run"].as_str().unwrap().to_owned())
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}

/// A client that speaks the protocol by hand.
struct Client {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    next: u64,
}

impl Client {
    fn connect(home: &Path, run: &str) -> Self {
        let mut command = program_with_python(home);
        command.args(["mcp", run, "--name", "tester", "--quiet"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let (to, from) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut client = Self { child, to, from, next: 0 };
        let info = json!({ "name": "tester", "version": "1" });
        let hello = json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info });
        let answer = client.ask("initialize", &hello);
        assert_eq!(answer["serverInfo"]["name"], "autokernel");
        client.write(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }));
        client
    }

    fn write(&mut self, message: &Value) {
        writeln!(self.to.as_mut().unwrap(), "{message}").unwrap();
    }

    fn send(&mut self, method: &str, params: &Value) -> u64 {
        self.next += 1;
        self.write(&json!({ "jsonrpc": "2.0", "id": self.next, "method": method, "params": params }));
        self.next
    }

    fn ask(&mut self, method: &str, params: &Value) -> Value {
        let id = self.send(method, params);
        loop {
            let mut line = String::new();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "the server is gone");
            let mut message: Value = serde_json::from_str(&line).unwrap();
            if message["id"] == id {
                assert!(message["error"].is_null(), "{message}");
                return message["result"].take();
            }
        }
    }

    /// Calls a verb: whether it is an error, its text, its document.
    fn verb(&mut self, name: &str, arguments: &Value) -> (bool, String, Value) {
        let mut answer = self.ask("tools/call", &json!({ "name": name, "arguments": arguments }));
        let text = answer["content"][0]["text"].as_str().unwrap().to_owned();
        (answer["isError"] == true, text, answer["structuredContent"].take())
    }

    fn leave(mut self) {
        self.to = None;
        assert!(self.child.wait().unwrap().success());
    }
}

fn kernel(name: &str) -> String {
    std::fs::read_to_string(fixture(&format!("kernels/{name}.cpp"))).unwrap()
}

#[test]
fn a_client_works_through_a_task() {
    let (home, run) = home("desk-mcp");
    let mut client = Client::connect(&home, &run);
    let listed = client.ask("tools/list", &json!({}));
    let names: Vec<&str> =
        listed["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["tasks", "brief", "judge", "sweep", "history", "playbook", "finish"]);

    let (failed, text, tasks) = client.verb("tasks", &json!({}));
    assert!(!failed, "{text}");
    assert_eq!(tasks["schema"], "autokernel.tasks/1");
    let region = tasks["tasks"][0]["region"].as_str().unwrap().to_owned();
    let (_, brief, _) = client.verb("brief", &json!({ "region": region }));
    assert!(brief.contains("## Contract"), "{brief}");

    // Wrong, broken and unreadable kernels are answers that say where and why.
    for (name, stage) in [("last_element", "correctness"), ("segfault", "run"), ("static_cache", "admission")]
    {
        let (failed, text, answer) =
            client.verb("judge", &json!({ "region": region, "source": kernel(name), "proof": "always" }));
        assert!(!failed, "{text}");
        assert_eq!((&answer["verdict"], &answer["stage"]), (&json!("rejected"), &json!(stage)), "{text}");
        assert!(text.starts_with(&format!("REJECTED at {stage}")), "{text}");
    }
    let (failed, text, answer) = client.verb("judge", &json!({ "region": 0, "source": "int main() {}" }));
    assert!(!failed && answer["stage"] == "parse", "{text}");

    let (_, text, answer) =
        client.verb("judge", &json!({ "region": 0, "source": kernel("honest"), "proof": "never" }));
    assert_eq!(answer["verdict"], "correct", "{text}");
    assert!(answer["screen_us"].as_f64().unwrap() > 0.0 && answer["winner"] == false, "{text}");
    assert!(text.contains("reach") && text.contains("worst element"), "{text}");

    // What can't be understood is an error that a mind can mend, and the desk goes on.
    for (verb, arguments) in [
        ("judge", json!({ "region": 0 })),
        ("judge", json!({ "region": 0, "source": kernel("honest"), "params": { "NOPE": 1 } })),
        ("brief", json!({ "region": "77" })),
        ("dance", json!({})),
    ] {
        let (failed, text, _) = client.verb(verb, &arguments);
        assert!(failed && !text.is_empty(), "{verb}: {text}");
    }
    let (_, text, history) = client.verb("history", &json!({ "region": 0 }));
    let mine = history["candidates"].as_array().unwrap().iter().filter(|row| row["agent"] == "tester");
    assert_eq!(mine.count(), 4, "{text}");
    assert!(text.contains("rejected at correctness") && text.contains("right, and slow"), "{text}");
    let (_, text, _) = client.verb("playbook", &json!({ "query": "softmax" }));
    assert!(text.contains("# Reductions"), "{text}");
    client.leave();
}

#[test]
fn a_client_that_leaves_loses_nothing() {
    let (home, run) = home("desk-leave");
    let mut client = Client::connect(&home, &run);
    let arguments = json!({ "region": 0, "source": kernel("honest"), "proof": "never" });
    client.send("tools/call", &json!({ "name": "judge", "arguments": arguments }));
    client.leave();
    let store = Store::open(&home).unwrap();
    let region = store.tasks(&run).unwrap()[0].region.clone();
    let mine = store.candidates(&run, &region).unwrap().into_iter().filter(|row| row.agent == "tester");
    assert_eq!(mine.count(), 1);
}

#[test]
fn a_sweep_searches_the_parameters_and_finish_measures_the_winners() {
    let (home, run) = home("desk-sweep");
    let brief = json(&home, &["brief", &run, "0"]).expect(0).json();
    let best = brief["text"].as_str().unwrap().split_once("## The best so far").unwrap().1;
    let source = best.split_once("```c++\n").unwrap().1.rsplit_once("```").unwrap().0;
    let file = home.join("idea.cpp");
    std::fs::write(&file, source).unwrap();
    let swept = json(&home, &["sweep", &run, "0", &file.display().to_string(), "--budget", "10s"]);
    let answer = swept.json();
    let verdict = answer["verdict"].as_str().unwrap();
    assert!(["faster", "same", "slower", "ambiguous"].contains(&verdict), "{}", swept.told());
    assert_eq!(swept.code, Some(if verdict == "faster" { 0 } else { 8 }), "{}", swept.told());
    assert!(answer["points"].as_u64() >= Some(1), "{}", swept.told());
    assert!(answer["surface"].as_str().unwrap().contains("best"), "{}", swept.told());

    let out = home.join("finished");
    let finished = json(&home, &["finish", &run, "--out", &out.display().to_string()]).expect(0);
    let report = finished.json();
    assert_eq!(report["run"], run.as_str());
    assert_eq!(report["package"], out.display().to_string());
    assert!(out.join("manifest.json").exists() && journey().package.join("manifest.json").exists());
    if verdict == "faster" {
        assert_eq!(report["regions"][0]["verdict"], "faster", "{}", finished.told());
    }
}
