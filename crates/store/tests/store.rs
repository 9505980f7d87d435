//! The store as the engine and the commands use it.

use autokernel_store::{FileId, NewCandidate, RunStatus, Store, StoreError};
use serde_json::json;

fn candidate(source: &str, verdict: Option<serde_json::Value>) -> NewCandidate<'_> {
    NewCandidate {
        run: "m-1",
        region: "abc",
        agent: "search",
        source,
        params: json!({"U": 4}),
        artefact: None,
        screen: None,
        verdict,
    }
}

#[test]
fn a_run_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    {
        let mut store = Store::open(dir.path()).unwrap();
        store.create_run("m-1", &json!({"model": "m.py"})).unwrap();
        store
            .put_tasks("m-1", &[("abc".into(), json!({"share": 0.5})), ("abd".into(), json!({"share": 0.1}))])
            .unwrap();
        let id = store.record_candidate(&candidate("void f(){}", None)).unwrap();
        store.record_verdict(id, &json!({"verdict": "faster"}), &json!({"samples": [1, 2]})).unwrap();
        store.set_outcome("m-1", "abc", &json!({"winner": 1})).unwrap();
        // Tasks written again (a resumed run) keep their outcome.
        store.put_tasks("m-1", &[("abc".into(), json!({"share": 0.6}))]).unwrap();
    }
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.run("last").unwrap().status, RunStatus::Running);
    let tasks = store.tasks("m-1").unwrap();
    assert_eq!(
        (tasks[0].region.as_str(), &tasks[0].body["share"], &tasks[0].outcome),
        ("abc", &json!(0.6), &Some(json!({"winner": 1})))
    );
    let found = store.candidates("m-1", "abc").unwrap();
    assert_eq!(store.get_file(&found[0].source).unwrap(), b"void f(){}");
    assert_eq!(store.get_file(found[0].evidence.as_ref().unwrap()).unwrap(), br#"{"samples":[1,2]}"#);
    assert!(matches!(store.task("m-1", "ab"), Err(StoreError::NoRegion { .. })), "two regions begin with ab");
    assert_eq!(store.task("m-1", "1").unwrap().region, "abd");
    assert!(matches!(store.run("x"), Err(StoreError::NoRun { near: Some(_), .. })));
}

#[test]
fn damage_is_named_and_nothing_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("autokernel.db");
    fs_err::write(
        &path,
        b"not a database, but long enough to look at: ................................................",
    )
    .unwrap();
    assert!(matches!(Store::open(dir.path()), Err(StoreError::Damaged { .. })));
    assert!(fs_err::read(&path).unwrap().starts_with(b"not a database"));

    let dir = tempfile::tempdir().unwrap();
    drop(Store::open(dir.path()).unwrap());
    let raw = rusqlite::Connection::open(dir.path().join("autokernel.db")).unwrap();
    raw.pragma_update(None, "user_version", 99).unwrap();
    assert!(matches!(Store::open(dir.path()), Err(StoreError::Version { found: 99, .. })));
}

#[test]
fn a_changed_file_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let id = store.put_file(b"kernel").unwrap();
    fs_err::write(dir.path().join("files").join(&id.0[..2]).join(&id.0), b"forged").unwrap();
    assert!(matches!(store.get_file(&id), Err(StoreError::File(_))));
    assert!(matches!(store.get_file(&FileId("é".into())), Err(StoreError::File(_))), "no panic on odd names");
}

#[test]
fn two_processes_may_open_a_new_store_at_once() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let root = dir.path();
            scope.spawn(move || {
                let store = Store::open(root).unwrap();
                store.create_run(&format!("r{n}"), &json!({})).unwrap();
            });
        }
    });
    assert_eq!(Store::open(dir.path()).unwrap().runs().unwrap().len(), 8);
}
