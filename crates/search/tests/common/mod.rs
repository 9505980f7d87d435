//! A way to write small graphs, an interpreter of regions in f64 that shares nothing with the
//! lowering, and a way to run a kernel file in a process of its own.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod interpreter;
pub(crate) mod process;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, GRAPH_SCHEMA, Graph, Node, NodeKind, TensorMeta, Value};
use autokernel_core::region::Region;

/// Writes a graph node by node; names are given by number.
#[derive(Default)]
pub(crate) struct Sketch {
    pub(crate) nodes: Vec<Node>,
}

pub(crate) fn r(name: &str) -> Arg<String> {
    Arg::Ref(name.to_owned())
}

pub(crate) fn ints(values: &[i64]) -> Arg<String> {
    Arg::List(values.iter().map(|value| Arg::Int(*value)).collect())
}

impl Sketch {
    pub(crate) fn input(&mut self, dtype: Dtype, shape: &[u64]) -> String {
        self.input_as(TensorMeta::contiguous(dtype, shape))
    }

    pub(crate) fn input_as(&mut self, meta: TensorMeta) -> String {
        self.push(NodeKind::Placeholder, "", vec![], vec![], Value::Tensor(meta))
    }

    /// A parameter of the model.
    pub(crate) fn constant(&mut self, dtype: Dtype, shape: &[u64]) -> String {
        let name = self.input(dtype, shape);
        self.nodes.last_mut().unwrap().constant = true;
        name
    }

    pub(crate) fn call(&mut self, op: &str, args: Vec<Arg<String>>, dtype: Dtype, shape: &[u64]) -> String {
        self.push(NodeKind::Call, op, args, vec![], Value::Tensor(TensorMeta::contiguous(dtype, shape)))
    }

    pub(crate) fn call_as(
        &mut self,
        op: &str,
        args: Vec<Arg<String>>,
        kwargs: Vec<(String, Arg<String>)>,
        value: Value,
    ) -> String {
        self.push(NodeKind::Call, op, args, kwargs, value)
    }

    fn push(
        &mut self,
        kind: NodeKind,
        op: &str,
        args: Vec<Arg<String>>,
        kwargs: Vec<(String, Arg<String>)>,
        value: Value,
    ) -> String {
        let name = format!("n{}", self.nodes.len());
        let target = if op.is_empty() { name.clone() } else { op.to_owned() };
        self.nodes.push(Node { name: name.clone(), kind, target, args, kwargs, value, constant: false });
        name
    }

    pub(crate) fn meta(&self, name: &str) -> &TensorMeta {
        self.nodes.iter().find(|node| node.name == name).and_then(|node| node.value.tensor()).unwrap()
    }

    pub(crate) fn graph(mut self, outputs: &[String]) -> Graph {
        let args = outputs.iter().map(|name| r(name)).collect();
        self.push(NodeKind::Output, "output", args, vec![], Value::Other);
        let graph = Graph { schema: GRAPH_SCHEMA.to_owned(), nodes: self.nodes };
        graph.check().unwrap();
        graph
    }

    /// One region of everything that was called.
    pub(crate) fn region(self, outputs: &[String]) -> Region {
        let members: Vec<String> = self
            .nodes
            .iter()
            .filter(|node| node.kind == NodeKind::Call)
            .map(|node| node.name.clone())
            .collect();
        Region::extract(&self.graph(outputs), 0, &members).unwrap().0
    }
}

/// A small generator, so that inputs are the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) ^ (self.0 >> 13)
    }

    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() % (1 << 24)) as f64 / f64::from(1 << 24)
    }

    /// Roughly normal.
    pub(crate) fn normal(&mut self) -> f64 {
        (0..6).map(|_| self.unit()).sum::<f64>() * 2.0_f64.sqrt() - 3.0 * 2.0_f64.sqrt()
    }
}

/// The nearest number of a type.
pub(crate) fn rounded(value: f64, dtype: Dtype) -> f64 {
    let drop = |bits_kept: u32| {
        if value == 0.0 || !value.is_finite() {
            return value;
        }
        let exponent = value.abs().log2().floor() as i32;
        let step = 2.0_f64.powi(exponent - bits_kept as i32 + 1);
        (value / step).round_ties_even() * step
    };
    match dtype {
        Dtype::F32 => f64::from(value as f32),
        Dtype::Bf16 => drop(8),
        Dtype::F16 => drop(11),
        Dtype::Bool => f64::from(u8::from(value != 0.0)),
        Dtype::F64 => value,
        _ => value.trunc(),
    }
}

/// Whether two results agree, NaN and infinities included.
pub(crate) fn close(ours: f64, truth: f64, dtype: Dtype) -> bool {
    let tolerance = match dtype {
        Dtype::F64 => 1e-9,
        Dtype::F32 => 2e-5,
        Dtype::F16 => 2e-3,
        Dtype::Bf16 => 1.6e-2,
        _ => 0.0,
    };
    ours == truth
        || ours.is_nan() && truth.is_nan()
        || (ours - truth).abs() <= tolerance * truth.abs().max(1.0)
}
