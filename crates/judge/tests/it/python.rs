//! The verdict over real Python peers: a model against cheaper and
//! wrong stand-ins for it.

use std::path::Path;
use std::time::Duration;

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::stats::Schedule;
use autokernel_core::verdict::{Stage, Verdict};
use autokernel_judge::evidence::Facts;
use autokernel_judge::round::{Contest, Contestant, Protocol, Staging};
use autokernel_judge::truth::{RawSet, Truth};
use autokernel_judge::verdict::{compare, race};
use autokernel_judge::{Patience, Record, decide};
use autokernel_worker::python::{Interpreter, Peer, spawn};
use serde_json::json;

const LIMIT: Duration = Duration::from_mins(3);
const SEEDS: [u64; 3] = [11, 12, 13];

fn model(dir: &Path, name: &str, body: &str) -> String {
    let text = format!(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        {body}\n\ndef get_init_inputs():\n    return []\ndef get_inputs():\n    return [torch.randn(256, 512)]\n"
    );
    let path = dir.join(name);
    fs_err::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn contestant(interpreter: &Interpreter, dir: &Path, name: &str, body: &str, checked: bool) -> Contestant {
    let file = model(dir, &format!("{name}.py"), body);
    let mut peer: Peer = spawn(interpreter, "zygote", None, dir, &[]).unwrap();
    let subject = json!({ "kind": "model", "model": file, "form": "eager", "seed": 0 });
    peer.request("prepare", json!({ "subject": subject, "threads": 1 }), LIMIT).unwrap();
    Contestant { name: name.to_owned(), zygote: Box::new(peer), checked }
}

fn truth(interpreter: &Interpreter, dir: &Path, body: &str) -> Truth {
    let file = model(dir, "model.py", body);
    let mut oracle = spawn(interpreter, "oracle", None, dir, &[]).unwrap();
    oracle.request("load", json!({ "model": file, "inputs": [], "seed": 0, "threads": 1 }), LIMIT).unwrap();
    let body = json!({ "draws": SEEDS, "dir": dir.join("truth") });
    let reply = oracle.request("model_truth", body, LIMIT).unwrap();
    let draws: Vec<RawSet> = serde_json::from_value(reply["draws"].clone()).unwrap();
    let contract = Contract { limits: vec![Limits::for_dtype(Dtype::F32, 1)], deterministic: false };
    Truth::prepare(contract, draws).unwrap()
}

pub(crate) fn a_model_is_compared_with_its_stand_ins() {
    let interpreter = autokernel_testbed::interpreter();
    let dir = tempfile::tempdir().unwrap();
    let slow = "for _ in range(12): y = torch.exp(x) * 0.5\n        return y";
    let truth = truth(&interpreter, dir.path(), slow);
    let protocol = Protocol { batch_ms: 2.0, batches: 3, staged: 2, warm_ms: 2.0, ..Protocol::default() };
    let contest = Contest { truth: &truth, staging: Staging::Draws(SEEDS.to_vec()), protocol };
    let mut baselines = [contestant(&interpreter, dir.path(), "slow", slow, false)];

    let mut fast = contestant(&interpreter, dir.path(), "fast", "return torch.exp(x) * 0.5", true);
    let mut say = |_: &str| {};
    let mut patience = Patience::new(Duration::from_secs(2), &mut say);
    let facts = Facts::default;
    let evidence =
        compare(&contest, &mut baselines, &mut fast, (Schedule::confirm(), 1), facts(), &mut patience)
            .unwrap();
    let decided = decide(&evidence).unwrap();
    // Beside other tests the machine may be unfit; then the judge must say so, and nothing false.
    let faster = matches!(decided.verdict, Verdict::Faster { .. });
    let undecided = matches!(decided.verdict, Verdict::Ambiguous { .. }) && decided.unfit;
    assert!(faster || undecided, "{decided:?} {:?}", evidence.rounds);
    let record = Record::new(evidence).unwrap();
    assert_eq!(Record::parse(record.print().as_bytes()).unwrap().replay().unwrap(), decided);

    let mut wrong = contestant(&interpreter, dir.path(), "wrong", "return torch.exp(x) * 0.50001", true);
    let evidence =
        compare(&contest, &mut baselines, &mut wrong, (Schedule::confirm(), 1), facts(), &mut patience)
            .unwrap();
    let verdict = decide(&evidence).unwrap().verdict;
    assert!(matches!(verdict, Verdict::Rejected { stage: Stage::Timed, .. }), "{verdict:?}");

    let mut all = [fast, wrong];
    let raced = race(&contest, &mut all, 2, facts(), &mut patience).unwrap();
    assert_eq!(raced.ranking(), ["fast"]);
    assert_eq!(raced.failures.len(), 1);
}
