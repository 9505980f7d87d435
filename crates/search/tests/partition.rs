//! What regions come out of the example models, and which work is left alone and why.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    clippy::print_stderr,
    clippy::format_push_string,
    reason = "helpers of tests"
)]

mod common;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, Graph, TensorMeta, Value};
use autokernel_core::plan::{Device, plan};
use autokernel_search::partition::{Partition, partition};
use autokernel_search::propose;
use common::interpreter::several;
use common::{Sketch, ints, r};

const DEVICE: Device = Device { sms: 0, shared: 0, cores: 2 };

fn example(text: &str) -> Graph {
    let graph: Graph = serde_json::from_str(text).unwrap();
    graph.check().unwrap();
    graph
}

/// One line a region and a line for each thing left, for people to read.
fn describe(partition: &Partition) -> String {
    let mut text = String::new();
    for (region, occurrences) in &partition.regions {
        let shapes: Vec<String> = region
            .output_metas()
            .iter()
            .map(|meta| format!("{:?} / {:?}", meta.shape, meta.stride))
            .collect();
        text += &format!("{}x {}\n", occurrences.len(), region.op_names().join(" "));
        text += &format!("   {} inputs -> {}\n", region.inputs.len(), shapes.join(", "));
        for file in propose(region, &DEVICE).unwrap() {
            text += &format!("   {}; {:?}\n", file.note, file.params);
            plan(&file, region, &file.default_params(), &DEVICE).unwrap();
        }
    }
    for (op, reason) in &partition.left {
        text += &format!("left {op}: {reason}\n");
    }
    text
}

#[test]
fn one_normalisation() {
    let graph = example(include_str!("graphs/rms_norm.json"));
    insta::assert_snapshot!(describe(&partition(&[graph])));
}

#[test]
fn an_unknown_activation_and_normalisation() {
    let graph = example(include_str!("graphs/new_activation.json"));
    insta::assert_snapshot!(describe(&partition(&[graph])));
}

#[test]
fn a_decoder_block_twice() {
    let graph = example(include_str!("graphs/llama_block.json"));
    let found = partition(&[graph.clone(), graph]);
    assert!(found.regions.iter().all(|(_, occurrences)| occurrences.len().is_multiple_of(2)));
    assert_eq!(found.regions[0].1.last().unwrap().graph, 1);
    insta::assert_snapshot!(describe(&found));
}

#[test]
fn the_text_of_a_kernel_file() {
    let graph = example(include_str!("graphs/rms_norm.json"));
    let (region, _) = partition(&[graph]).regions.remove(0);
    insta::assert_snapshot!(propose(&region, &DEVICE).unwrap()[0].source);
}

#[test]
fn many_layers_take_little_time() {
    let graph = example(include_str!("graphs/llama_block.json"));
    let graphs: Vec<Graph> = std::iter::repeat_n(graph, 40).collect();
    let start = std::time::Instant::now();
    let found = partition(&graphs);
    assert!(found.regions.iter().all(|(_, occurrences)| occurrences.len().is_multiple_of(40)));
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn a_path_through_a_product_keeps_regions_apart() {
    let shape = [256, 256];
    let mut sketch = Sketch::default();
    let (x, w) = (sketch.input(Dtype::F32, &shape), sketch.input(Dtype::F32, &shape));
    let bent = sketch.call("aten.tanh.default", vec![r(&x)], Dtype::F32, &shape);
    let product = sketch.call("aten.mm.default", vec![r(&bent), r(&w)], Dtype::F32, &shape);
    let sum = sketch.call("aten.add.Tensor", vec![r(&bent), r(&product)], Dtype::F32, &shape);
    let out = sketch.call("aten.gelu.default", vec![r(&sum)], Dtype::F32, &shape);
    let found = partition(&[sketch.graph(&[out])]);
    let ops: Vec<String> = found.regions.iter().map(|(region, _)| region.op_names().join(" ")).collect();
    assert_eq!(ops, ["tanh", "mm add gelu"]);
}

#[test]
fn what_cannot_win_or_is_not_understood_stays() {
    let reasons = |build: &dyn Fn(&mut Sketch) -> String| {
        let mut sketch = Sketch::default();
        let out = build(&mut sketch);
        let found = partition(&[sketch.graph(&[out])]);
        assert!(found.regions.is_empty(), "{}", describe(&found));
        found.left.iter().map(|(_, reason)| reason.clone()).collect::<Vec<_>>().join("; ")
    };
    let shape = [64, 512, 32];
    let turned = |sketch: &mut Sketch| {
        let x = sketch.input(Dtype::F32, &shape);
        let view = TensorMeta { dtype: Dtype::F32, shape: vec![32, 64, 512], stride: vec![1, 16_384, 32] };
        let order = vec![r(&x), ints(&[2, 0, 1])];
        let x = sketch.call_as("aten.permute.default", order, vec![], Value::Tensor(view));
        sketch.call("aten.exp.default", vec![r(&x)], Dtype::F32, &[32, 64, 512])
    };
    assert!(reasons(&turned).contains("against the grain"), "{}", reasons(&turned));
    let integers = |sketch: &mut Sketch| {
        let x = sketch.input(Dtype::I64, &shape);
        sketch.call("aten.abs.default", vec![r(&x)], Dtype::I64, &shape)
    };
    assert!(reasons(&integers).contains("i64"));
    let small = |sketch: &mut Sketch| {
        let x = sketch.input(Dtype::F32, &[4, 16]);
        let a = sketch.call("aten.tanh.default", vec![r(&x)], Dtype::F32, &[4, 16]);
        sketch.call("aten.exp.default", vec![r(&a)], Dtype::F32, &[4, 16])
    };
    assert!(reasons(&small).contains("too small"));
    let alone = |sketch: &mut Sketch| {
        let x = sketch.input(Dtype::F32, &[1024, 1024]);
        sketch.call("aten.add.Tensor", vec![r(&x), r(&x)], Dtype::F32, &[1024, 1024])
    };
    assert!(reasons(&alone).contains("stands alone"));
}

/// Rows that lie across memory are walked many at a time.
#[test]
fn columns_become_a_row_for_each_lane() {
    let shape = [64, 512, 32];
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &shape);
    let args = vec![r(&x), Arg::Int(1), Arg::Bool(false)];
    let out = sketch.call("aten._softmax.default", args, Dtype::F32, &shape);
    let found = partition(&[sketch.graph(&[out])]);
    let files = propose(&found.regions[0].0, &DEVICE).unwrap();
    assert!(files[0].note.starts_with("a row for each lane"), "{}", files[0].note);
}

/// Pieces that lie one after another in memory, and those of each row.
#[test]
fn pieces_are_written_where_they_belong() {
    for dim in [0, 1] {
        let mut sketch = Sketch::default();
        let x = sketch.input(Dtype::F32, &[512, 512]);
        let a = sketch.call("aten.tanh.default", vec![r(&x)], Dtype::F32, &[512, 512]);
        let pieces = vec![Arg::List(vec![r(&a), r(&x)]), Arg::Int(dim)];
        let shape = if dim == 0 { [1024, 512] } else { [512, 1024] };
        let out = sketch.call("aten.cat.default", pieces, Dtype::F32, &shape);
        let found = partition(&[sketch.graph(&[out])]);
        assert_eq!(found.regions[0].0.op_names(), ["tanh", "cat"]);
    }
}

/// A view that is read outside stays outside; its source is written once.
#[test]
fn views_at_the_border_stay_outside() {
    let shape = [512, 512];
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &shape);
    let w = sketch.input(Dtype::F32, &[256, 256]);
    let bent = sketch.call("aten.silu.default", vec![r(&x)], Dtype::F32, &shape);
    let scaled = sketch.call("aten.mul.Tensor", vec![r(&bent), Arg::Float(2.0)], Dtype::F32, &shape);
    let view =
        sketch.call("aten.view.default", vec![r(&scaled), ints(&[1024, 256])], Dtype::F32, &[1024, 256]);
    let product = sketch.call("aten.mm.default", vec![r(&view), r(&w)], Dtype::F32, &[1024, 256]);
    let found = partition(&[sketch.graph(&[product])]);
    assert_eq!(found.regions[0].0.op_names(), ["silu", "mul"]);
}

/// Rounding may tip a comparison, so what it looks at is an input of its region.
#[test]
fn a_region_ends_before_a_comparison_of_what_it_computed() {
    let shape = [512, 512];
    let ops = |clamped: bool| {
        let mut sketch = Sketch::default();
        let (x, y) = (sketch.input(Dtype::F32, &shape), sketch.input(Dtype::F32, &shape));
        let seen = if clamped {
            sketch.call("aten.clamp.default", vec![r(&x), Arg::Float(-1.0)], Dtype::F32, &shape)
        } else {
            sketch.call("aten.mul.Tensor", vec![r(&x), r(&y)], Dtype::F32, &shape)
        };
        let bent = sketch.call("aten.tanh.default", vec![r(&seen)], Dtype::F32, &shape);
        let above = sketch.call("aten.gt.Scalar", vec![r(&bent), Arg::Float(0.5)], Dtype::Bool, &shape);
        let early = sketch.call("aten.gt.Scalar", vec![r(&seen), Arg::Float(0.5)], Dtype::Bool, &shape);
        let one = sketch.call("aten.where.self", vec![r(&above), r(&x), r(&y)], Dtype::F32, &shape);
        let two = sketch.call("aten.where.self", vec![r(&early), r(&one), r(&bent)], Dtype::F32, &shape);
        let out = sketch.call("aten.exp.default", vec![r(&two)], Dtype::F32, &shape);
        let found = partition(&[sketch.graph(&[out])]);
        found.regions.iter().map(|(region, _)| region.op_names().join(" ")).collect::<Vec<_>>()
    };
    assert_eq!(ops(false), ["mul tanh", "gt gt where where exp"]);
    assert_eq!(ops(true), ["clamp tanh gt", "gt where where exp"]);
}

/// What writes into a tensor, or looks at memory by strides of its own, is no member of a region; what it
/// reads is written as if it stood alone.
#[test]
fn mutation_and_aliases_end_a_region() {
    let shape = [512, 512];
    let mut sketch = Sketch::default();
    let (x, y) = (sketch.input(Dtype::F32, &shape), sketch.input(Dtype::F32, &shape));
    let bent = sketch.call("aten.tanh.default", vec![r(&x)], Dtype::F32, &shape);
    let sum = sketch.call("aten.add.Tensor", vec![r(&bent), r(&y)], Dtype::F32, &shape);
    let args = vec![r(&sum), ints(&[512, 512]), ints(&[1, 512])];
    let strided = sketch.call("aten.as_strided.default", args, Dtype::F32, &shape);
    let after = sketch.call("aten.exp.default", vec![r(&strided)], Dtype::F32, &shape);
    let copied = sketch.call("aten.copy_.default", vec![r(&x), r(&sum)], Dtype::F32, &shape);
    let found = partition(&[sketch.graph(&[after, copied])]);
    let ops: Vec<String> = found.regions.iter().map(|(region, _)| region.op_names().join(" ")).collect();
    assert_eq!(ops, ["tanh add", "exp"]);
    let outside: Vec<&str> = found.left.iter().map(|(op, _)| op.as_str()).collect();
    assert_eq!(outside, ["aten.as_strided.default", "aten.copy_.default"]);
}

/// The page for people lists what the table holds.
#[test]
fn every_operator_is_documented() {
    let page = include_str!("../../../docs/operators.md");
    let source = include_str!("../src/op.rs");
    let table = source.split_once("pub fn class(").unwrap().1.split_once("_ => return None").unwrap().0;
    let words = table.split_once("match name {").unwrap().1.split('"').skip(1).step_by(2);
    let overloads = ["Tensor_mode", "Scalar_mode", "default", "correction"];
    let missing: Vec<&str> = words
        .filter(|word| {
            !overloads.contains(word) && !page.contains(&format!("`{}`", word.trim_start_matches('_')))
        })
        .collect();
    assert!(missing.is_empty(), "docs/operators.md does not name {missing:?}");
}

/// Results of an operator with several results belong to it.
#[test]
fn picks_come_with_their_operator() {
    let shape = [512, 768];
    let mut sketch = Sketch::default();
    let x = sketch.input(Dtype::F32, &shape);
    let metas = [&shape[..], &[512, 1], &[512, 1]]
        .map(|shape| autokernel_core::graph::TensorMeta::contiguous(Dtype::F32, shape));
    let args = vec![r(&x), ints(&[768]), Arg::None, Arg::None, Arg::Float(1e-5)];
    let norm = sketch.call_as("aten.native_layer_norm.default", args, vec![], several(metas.to_vec()));
    let first = sketch.call("getitem", vec![r(&norm), Arg::Int(0)], Dtype::F32, &shape);
    let bent = sketch.call("aten.tanh.default", vec![r(&first)], Dtype::F32, &shape);
    let found = partition(&[sketch.graph(&[bent])]);
    assert_eq!(found.regions[0].0.op_names(), ["native_layer_norm", "getitem", "tanh"]);
    assert!(found.regions[0].0.nodes.iter().any(|node| matches!(node.value, Value::Tuple(_))));
}
