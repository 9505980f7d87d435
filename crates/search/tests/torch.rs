//! Kernels against PyTorch itself: every operator of the table, every overload, other than default
//! arguments, special values. `torch/cases.py` lists the cases, `torch/compare.py` judges.
//!
//! Needs a C++ compiler; says so and skips where there is none.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    clippy::print_stderr,
    clippy::format_push_string,
    reason = "helpers of tests"
)]

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use autokernel_core::graph::{Graph, NodeKind, TensorMeta};
use autokernel_core::kernel_file::{HEADERS, KernelFile};
use autokernel_core::plan::{Device, Plan, plan};
use autokernel_core::region::Region;
use autokernel_search::propose;
use common::process::compiler;

const DEVICE: Device = Device { sms: 0, shared: 0, cores: 2 };
/// Compilers at work at the same time.
const PARTS: usize = 2;

#[derive(serde::Deserialize)]
struct Wanted {
    name: String,
    /// Part of the reason for which the search agent must refuse it.
    refused: Option<String>,
    graph: Graph,
}

#[derive(serde::Serialize)]
struct Output {
    name: String,
    meta: TensorMeta,
}

#[derive(serde::Serialize)]
struct Job {
    name: String,
    /// Stands before the names of the plan's entries.
    prefix: String,
    inputs: Vec<String>,
    outputs: Vec<Output>,
    plan: Plan,
}

/// The kernel of one case in a namespace of its own, so that all fit into one translation unit.
fn wrapped(file: &KernelFile, prefix: &str) -> String {
    let body = file.source.split_once("@*/").unwrap().1;
    let body: String = body
        .lines()
        .filter(|line| !line.starts_with("#include"))
        .fold(String::new(), |text, line| text + line + "\n");
    let (mut text, mut end) = (String::new(), String::new());
    for (name, value) in file.default_params() {
        text += &format!("#define {name} {value}\n");
        end += &format!("#undef {name}\n");
    }
    let body = file.entries().iter().fold(body, |body, entry| {
        body.replace(&format!("extern \"C\" void {entry}("), &format!("extern \"C\" void {prefix}{entry}("))
    });
    format!("{text}namespace in_{prefix} {{\n{body}}}\n{end}")
}

/// The kernel of a case, or why there is none; `Err` when that is not what the case wants.
fn kernel(wanted: &Wanted, prefix: &str) -> Result<Option<(Job, String)>, String> {
    wanted.graph.check().unwrap();
    let calls = wanted.graph.nodes.iter().filter(|node| node.kind == NodeKind::Call);
    let members: Vec<String> = calls.map(|node| node.name.clone()).collect();
    let (region, occurrence) =
        Region::extract(&wanted.graph, 0, &members).map_err(|error| format!("{}: {error}", wanted.name))?;
    match (propose(&region, &DEVICE), &wanted.refused) {
        (Err(error), Some(reason)) if error.to_string().contains(reason) => Ok(None),
        (Err(error), _) => Err(format!("{}: {error}", wanted.name)),
        (Ok(_), Some(reason)) => Err(format!("{}: is not refused because it `{reason}`", wanted.name)),
        (Ok(files), None) => {
            let names = region.outputs.iter().map(|node| occurrence.nodes[*node].clone());
            let metas = region.output_metas().into_iter().cloned();
            let outputs = names.zip(metas).map(|(name, meta)| Output { name, meta }).collect();
            let job = Job {
                name: wanted.name.clone(),
                prefix: prefix.to_owned(),
                inputs: occurrence.inputs,
                outputs,
                plan: plan(&files[0], &region, &files[0].default_params(), &DEVICE).unwrap(),
            };
            Ok(Some((job, wrapped(&files[0], prefix))))
        }
    }
}

fn compile(folder: &Path, sources: &[String]) {
    for (name, text) in HEADERS {
        let path = folder.join("include").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let start = |(number, source): (usize, &String)| -> Child {
        let (unit, library) = (format!("part{number}.cpp"), format!("part{number}.so"));
        std::fs::write(folder.join(&unit), source).unwrap();
        // As the builder does, less what only makes it slower to compile or smaller.
        let flags = "-std=c++20 -O1 -march=native -fopenmp -fPIC -fno-math-errno -fno-trapping-math \
                     -ffp-contract=fast -fno-exceptions -fno-rtti -w -iquote include -shared -o";
        let mut command = Command::new("c++");
        command.current_dir(folder).args(flags.split_whitespace()).args([&library, &unit]).arg("-lm");
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    let running: Vec<Child> = sources.iter().enumerate().map(start).collect();
    for child in running {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
}

#[test]
fn operators_are_those_of_torch() {
    let python = autokernel_testbed::interpreter().path;
    if !compiler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut judge = Command::new(python)
        .arg("-B")
        .arg(here.join("tests/torch/compare.py"))
        .arg(folder.path())
        .env("PYTHONPATH", here.join("../../python"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(judge.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "ready");

    let wanted: Vec<Wanted> =
        serde_json::from_slice(&std::fs::read(folder.path().join("graphs.json")).unwrap()).unwrap();
    every_operator_has_a_case(&wanted);
    let (mut jobs, mut failures) = (vec![], vec![]);
    let mut sources = vec!["#include \"autokernel/vec.h\"\n".to_owned(); PARTS];
    for (number, wanted) in wanted.iter().enumerate() {
        match kernel(wanted, &format!("k{number}_")) {
            Ok(Some((job, text))) => {
                jobs.push(job);
                sources[number % PARTS] += &text;
            }
            Ok(None) => {}
            Err(error) => failures.push(error),
        }
    }
    let started = std::time::Instant::now();
    compile(folder.path(), &sources);
    eprintln!("{} kernels compiled in {:.1} s", jobs.len(), started.elapsed().as_secs_f64());
    std::fs::write(folder.path().join("jobs.json"), serde_json::to_vec(&jobs).unwrap()).unwrap();
    judge.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let mut report = String::new();
    said.read_to_string(&mut report).unwrap();
    eprintln!("{report}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(judge.wait().unwrap().success(), "differs from PyTorch; see above");
}

/// The names in the operator table, read from its text, against the calls of all cases.
fn every_operator_has_a_case(wanted: &[Wanted]) {
    let source = include_str!("../src/op.rs");
    let table = source.split_once("pub fn class(").unwrap().1.split_once("_ => return None").unwrap().0;
    let table = table.split_once("match name {").unwrap().1;
    let words = table.split('"').skip(1).step_by(2).map(str::to_owned);
    // Overloads that stand in conditions, and what a capture never holds because it is made of others.
    let others = [
        "Tensor_mode",
        "Scalar_mode",
        "default",
        "correction",
        "reshape",
        "flatten",
        "contiguous",
        "square",
        "detach",
    ];
    let known: BTreeSet<String> = words.filter(|word| !others.contains(&word.as_str())).collect();
    let nodes = wanted.iter().filter(|case| case.refused.is_none()).flat_map(|case| &case.graph.nodes);
    let called: BTreeSet<String> =
        nodes.filter_map(|node| node.target.split('.').nth(1).map(str::to_owned)).collect();
    let missing: Vec<&String> = known.difference(&called).collect();
    assert!(missing.is_empty(), "no case for {missing:?}");
}
