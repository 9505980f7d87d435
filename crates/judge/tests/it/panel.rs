//! Calibration: kernels that are right but compute otherwise pass on every set, wrong ones do not.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use autokernel_core::contract::Contract;
use autokernel_core::region::Region;
use autokernel_judge::metrics::Comparer;
use autokernel_judge::source::Tensor;
use autokernel_judge::truth::{RawSet, TensorFile, Truth};
use autokernel_judge::{Examination, JudgeError};
use autokernel_worker::python::spawn;
use serde::Deserialize;
use serde_json::Value;

const LIMIT: Duration = Duration::from_mins(3);

#[derive(Deserialize)]
struct Entry {
    name: String,
    region: Region,
    reply: Reply,
    honest: Vec<Honest>,
}

#[derive(Deserialize)]
struct Reply {
    sets: Vec<RawSet>,
    dropped: Vec<Value>,
}

#[derive(Deserialize)]
struct Honest {
    form: String,
    set: usize,
    outputs: Vec<TensorFile>,
}

/// The region's outputs as PyTorch gives them, and every honest form, on every set that is used.
fn honest_forms_pass(entry: &Entry, truth: &Truth) -> Vec<String> {
    let mut rejected = vec![];
    let baseline = entry.reply.sets.iter().enumerate().map(|(set, raw)| ("eager", set, &raw.baseline));
    let forms = entry.honest.iter().map(|honest| (honest.form.as_str(), honest.set, &honest.outputs));
    let mut tried = 0;
    for (form, set, outputs) in baseline.chain(forms) {
        let family = &entry.reply.sets[set].family;
        let Some(set) = truth.all().iter().position(|used| used.family == *family) else { continue };
        tried += 1;
        let mut comparer = Comparer::new(truth);
        for (output, file) in outputs.iter().enumerate() {
            let (source, meta) = (File::open(&file.file).unwrap(), file.meta());
            let comparison = comparer.compare(set, output, Tensor { source: &source, meta: &meta }).unwrap();
            if let Some(fault) = comparison.fault {
                rejected.push(format!("{} by `{form}`: {fault:.400}", entry.name));
            }
        }
    }
    assert!(tried >= 2 * truth.sets().len(), "{}: only {tried} comparisons", entry.name);
    rejected
}

/// With a seed of the system, so that over time the panel is held against many inputs; a failure names it.
#[expect(clippy::print_stdout, reason = "a test program")]
pub(crate) fn honest_kernels_pass_and_mutants_do_not() {
    let interpreter = autokernel_testbed::interpreter();
    let dir = tempfile::tempdir().unwrap();
    let seed = std::env::var("AUTOKERNEL_TEST_SEED").ok().and_then(|text| text.parse::<u64>().ok());
    let seed = seed.unwrap_or_else(|| getrandom::u64().unwrap() >> 1);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/panel.py");
    let mut command = Command::new(&interpreter.path);
    command.arg("-B").arg(script).arg(dir.path()).arg(seed.to_string());
    if let Ok(names) = std::env::var("AUTOKERNEL_TEST_PANEL") {
        command.args(names.split(','));
    }
    assert!(command.status().unwrap().success(), "panel of seed {seed}");
    let text = fs_err::read_to_string(dir.path().join("panel.json")).unwrap();
    let panel: Vec<Entry> = serde_json::from_str(&text).unwrap();
    let mut oracle = spawn(&interpreter, "oracle", None, dir.path(), &[]).unwrap();
    let mut wrong = vec![];
    for entry in &panel {
        let truth = Truth::prepare(Contract::for_region(&entry.region), entry.reply.sets.clone()).unwrap();
        assert!(truth.weak_outputs().is_empty(), "{}", entry.name);
        wrong.extend(honest_forms_pass(entry, &truth));
        let start = Instant::now();
        let mut ask = |op: &'static str, body: Value| {
            oracle.request(op, body, LIMIT).map_err(|e| JudgeError::Controls { reason: e.to_string() })
        };
        let mutants = dir.path().join("mutants");
        let mut examination = Examination::begin(&entry.region, &mutants, seed, &mut ask).unwrap();
        examination.run(&truth, &mut ask).unwrap();
        let found = examination.result();
        println!(
            "  {}: {} sets, {} dropped, {} unfit; {} of {} killed, {} equivalent, {:.1} s; alive: {:?}",
            entry.name,
            truth.sets().len(),
            entry.reply.dropped.len(),
            truth.unfit().len(),
            found.killed,
            found.mutants,
            found.equivalent,
            start.elapsed().as_secs_f64(),
            found.survivors
        );
        assert!(found.mutants >= 25 && found.fit(), "{} with seed {seed}: {found:?}", entry.name);
    }
    assert!(wrong.is_empty(), "seed {seed}:\n{}", wrong.join("\n"));
}
