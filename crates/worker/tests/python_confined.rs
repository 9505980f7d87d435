//! The real bridge in the real confinement.
#![allow(unsafe_code, reason = "a test has to set a variable of its own process")]

use std::time::Duration;

use autokernel_worker::python::{PeerError, spawn};
use autokernel_worker::sandbox::{Confinement, Domain};
use serde_json::json;

const LIMIT: Duration = Duration::from_mins(3);

/// Two threads' worth of work with a result that is known.
const MODEL: &str = "
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x * 0 + 3
def get_init_inputs():
    return []
def get_inputs():
    return [torch.rand(256, 1024)]
";

#[test]
fn a_confined_zygote_answers() {
    let interpreter = autokernel_testbed::interpreter();
    // SAFETY: the only test of this program, before it has started any thread.
    unsafe { std::env::set_var("AUTOKERNEL_EXE", env!("CARGO_BIN_EXE_autokernel-worker-child")) };
    let folder = tempfile::tempdir().unwrap();
    let mut confinement = Confinement::new(Domain::Deployment);
    confinement.write.push(folder.path().to_owned());
    let extra = [
        ("TMPDIR".into(), folder.path().into()),
        ("TORCHINDUCTOR_CACHE_DIR".into(), folder.path().join("inductor").into()),
        ("HOME".into(), folder.path().into()),
    ];
    let mut peer = spawn(&interpreter, "zygote", Some(&confinement), folder.path(), &extra).unwrap();
    let error = peer.request("no such thing", json!({}), LIMIT).unwrap_err();
    assert!(matches!(&error, PeerError::Remote { kind, .. } if kind == "unknown_op"), "{error:?}");
    peer.freeze().unwrap();
    peer.thaw().unwrap();
    let model = folder.path().join("model.py");
    std::fs::write(&model, MODEL).unwrap();
    let subject = json!({"kind": "model", "model": model, "form": "eager", "seed": 0});
    peer.request("prepare", json!({"subject": subject, "threads": 2}), LIMIT).unwrap();
    let mut child = peer.fork().unwrap();
    child.request("stage", json!({"draws": [1, 2]}), LIMIT).unwrap();
    let (reply, wall) = child.request_timed("batch", json!({"calls": [0, 1]}), LIMIT).unwrap();
    assert!(wall > Duration::ZERO);
    child.freeze().unwrap();
    for call in reply["outputs"].as_array().unwrap() {
        let mut bytes = vec![0; call[0]["bytes"].as_u64().unwrap() as usize];
        child.read_memory(call[0]["address"].as_u64().unwrap(), &mut bytes).unwrap();
        assert_eq!(bytes.len(), 256 * 1024 * 4);
        assert!(bytes.chunks_exact(4).all(|b| b == 3f32.to_ne_bytes()));
    }
    child.thaw().unwrap();
}
