//! A run that is killed without a word goes on where it was.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use autokernel_store::{Candidate, Store};

use crate::program::{folder, json, model, program_with_python};

fn candidates(home: &Path) -> Vec<Candidate> {
    let Ok(store) = Store::open(home) else { return vec![] };
    let Some(run) = store.runs().unwrap().into_iter().next() else { return vec![] };
    let tasks = store.tasks(&run.id).unwrap();
    tasks.iter().flat_map(|task| store.candidates(&run.id, &task.region).unwrap()).collect()
}

/// Parent and start time of every process that is not a zombie.
fn processes() -> HashMap<u32, (u32, String)> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
    pids.filter_map(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in brackets may hold anything.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        (fields[0] != "Z").then(|| (pid, (fields[1].parse().unwrap(), fields[19].to_owned())))
    })
    .collect()
}

/// Everything below a process: its number and start time.
fn below(root: u32) -> BTreeSet<(u32, String)> {
    let all = processes();
    let mut found = BTreeSet::new();
    let mut next = vec![root];
    while let Some(parent) = next.pop() {
        for (pid, (_, start)) in all.iter().filter(|(_, (of, _))| *of == parent) {
            if found.insert((*pid, start.clone())) {
                next.push(*pid);
            }
        }
    }
    found
}

fn wait_for(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {} s", limit.as_secs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_killed_run_goes_on() {
    let home = folder("killed");
    let out = home.join("package");
    let mut command = program_with_python(&home);
    command.args(["optimize", &model("tiny_norm"), "--budget", "40s", "--format", "json", "--out"]).arg(&out);
    command
        .stdout(File::create(home.join("stdout")).unwrap())
        .stderr(File::create(home.join("stderr")).unwrap());
    let mut child = command.spawn().unwrap();
    let told = || std::fs::read_to_string(home.join("stderr")).unwrap_or_default();
    wait_for("the first candidate", Duration::from_mins(5), || {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself:\n{}", told());
        !candidates(&home).is_empty()
    });
    let children = below(child.id());
    assert!(!children.is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the end of its children", Duration::from_secs(20), || {
        let alive = processes();
        children.iter().all(|(pid, start)| alive.get(pid).is_none_or(|(_, now)| now != start))
    });
    assert!(!out.exists());

    let kept = candidates(&home);
    let runs = json(&home, &["runs"]).expect(0).json();
    assert_eq!(runs["runs"][0]["status"], "running");
    let outcome = json(&home, &["resume"]).expect(0);
    let report = outcome.json();
    assert_eq!(report["run"], runs["runs"][0]["run"]);
    assert!(out.join("manifest.json").exists(), "{}", outcome.told());

    let all = candidates(&home);
    let now = |c: &Candidate| {
        (c.id.0, c.source.0.clone(), c.params.to_string(), c.screen.clone().map(|s| s.to_string()))
    };
    assert!(kept.iter().all(|old| all.iter().any(|new| now(new) == now(old))), "{kept:?}\n{all:?}");
    let distinct: BTreeSet<_> = all.iter().map(|c| (c.source.0.clone(), c.params.to_string())).collect();
    assert_eq!(distinct.len(), all.len(), "nothing is built twice: {all:?}");
    let built = report["candidates"]["built"].as_u64().unwrap() as usize;
    let new = all.len() - kept.len();
    assert_eq!(built, new, "{kept:?}\n{all:?}\n{}", outcome.told());
}
