//! The captured graph as typed data: AOTAutograd's functional ATen graph of one Dynamo graph.
//!
//! The bridge writes it as JSON (`autokernel.graph/1`); [`Graph::check`] makes sure that it is
//! well formed, so that everything behind it can index without asking.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;

/// Shape, strides (both in elements) and element type of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMeta {
    /// Element type.
    pub dtype: Dtype,
    /// Size of each dimension.
    pub shape: Vec<u64>,
    /// Stride of each dimension in elements; zero for an expanded dimension.
    pub stride: Vec<u64>,
}

impl TensorMeta {
    /// A dense row-major tensor.
    pub fn contiguous(dtype: Dtype, shape: &[u64]) -> Self {
        let mut stride = vec![1; shape.len()];
        for i in (0..shape.len().saturating_sub(1)).rev() {
            stride[i] = stride[i + 1] * shape[i + 1].max(1);
        }
        Self { dtype, shape: shape.to_vec(), stride }
    }

    /// Number of elements.
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of the elements, counting an expanded element once for each place that it stands in.
    pub fn bytes(&self) -> u64 {
        self.numel() * self.dtype.size()
    }

    /// Elements of storage from the first to the last one that the strides reach.
    pub fn extent(&self) -> u64 {
        if self.numel() == 0 {
            return 0;
        }
        1 + self.shape.iter().zip(&self.stride).map(|(n, s)| (n - 1) * s).sum::<u64>()
    }

    /// Bytes of distinct storage that reading every element touches, at most.
    pub fn distinct_bytes(&self) -> u64 {
        let distinct: u64 =
            self.shape.iter().zip(&self.stride).filter(|(_, s)| **s != 0).map(|(n, _)| *n).product();
        if self.numel() == 0 { 0 } else { distinct * self.dtype.size() }
    }

    /// Whether the strides are those of a dense row-major tensor (dimensions of size one are free).
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (n, s) in self.shape.iter().zip(&self.stride).rev() {
            if *n != 1 && *s != expected {
                return false;
            }
            expected *= n.max(&1);
        }
        true
    }
}

/// What a node produces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    /// One tensor.
    Tensor(TensorMeta),
    /// Several results; `None` where one is not a tensor.
    Tuple(Vec<Option<TensorMeta>>),
    /// Something else: a number, a symbol, nothing.
    Other,
}

impl Value {
    /// The tensor, if it is exactly one.
    pub fn tensor(&self) -> Option<&TensorMeta> {
        match self {
            Self::Tensor(meta) => Some(meta),
            _ => None,
        }
    }
}

/// An argument of a call. `R` is how an argument refers to another value: a node's name on the
/// wire, a [`crate::region::Operand`] inside a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arg<R> {
    /// The result of another node.
    Ref(R),
    /// A whole number.
    Int(i64),
    /// A real number; `inf`, `-inf` and `nan` travel as those words.
    Float(#[serde(with = "float_text")] f64),
    /// A truth value.
    Bool(bool),
    /// Python's `None`.
    None,
    /// An element type.
    Dtype(Dtype),
    /// A word, such as `"tanh"` for GELU.
    Str(String),
    /// A list or tuple.
    List(Vec<Arg<R>>),
    /// Anything that has no meaning here (device, layout, memory format, symbols), as Python prints it.
    Opaque(String),
}

impl<R> Arg<R> {
    /// Calls `visit` with every reference inside, left to right.
    pub fn for_each_ref<'a>(&'a self, visit: &mut impl FnMut(&'a R)) {
        match self {
            Self::Ref(r) => visit(r),
            Self::List(items) => items.iter().for_each(|item| item.for_each_ref(visit)),
            _ => {}
        }
    }

    /// The same argument with every reference replaced; stops at the first error.
    pub fn try_map<S, E>(&self, map: &mut impl FnMut(&R) -> Result<S, E>) -> Result<Arg<S>, E> {
        Ok(match self {
            Self::Ref(r) => Arg::Ref(map(r)?),
            Self::Int(v) => Arg::Int(*v),
            Self::Float(v) => Arg::Float(*v),
            Self::Bool(v) => Arg::Bool(*v),
            Self::None => Arg::None,
            Self::Dtype(v) => Arg::Dtype(*v),
            Self::Str(v) => Arg::Str(v.clone()),
            Self::Opaque(v) => Arg::Opaque(v.clone()),
            Self::List(items) => {
                Arg::List(items.iter().map(|item| item.try_map(map)).collect::<Result<_, _>>()?)
            }
        })
    }
}

/// Floats as JSON numbers where JSON can hold them, as words where it can't.
mod float_text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() {
            serializer.serialize_f64(*value)
        } else {
            serializer.serialize_str(&value.to_string().to_lowercase())
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::Number(n) => n.as_f64().ok_or_else(|| D::Error::custom("number out of range")),
            serde_json::Value::String(s) => match s.as_str() {
                "inf" => Ok(f64::INFINITY),
                "-inf" => Ok(f64::NEG_INFINITY),
                "nan" => Ok(f64::NAN),
                _ => Err(D::Error::custom("a float must be a number, inf, -inf or nan")),
            },
            _ => Err(D::Error::custom("a float must be a number, inf, -inf or nan")),
        }
    }
}

/// What kind of node it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// An input of the graph; parameters and buffers are inputs too.
    Placeholder,
    /// A call of an operator, or Python's `getitem` on a tuple.
    Call,
    /// A constant held by the graph module.
    GetAttr,
    /// The one output node; its arguments are what the graph returns.
    Output,
}

/// One node. Nodes refer to each other by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Unique within the graph.
    pub name: String,
    /// What it is.
    pub kind: NodeKind,
    /// `aten.mul.Tensor`, `getitem`, the name of a placeholder, or `output`.
    pub target: String,
    /// Positional arguments.
    pub args: Vec<Arg<String>>,
    /// Keyword arguments, in the order of the call.
    pub kwargs: Vec<(String, Arg<String>)>,
    /// What it produces.
    pub value: Value,
    /// For a placeholder: whether it is a parameter or buffer of the model.
    #[serde(default)]
    pub constant: bool,
}

impl Node {
    /// Calls `visit` with the name of every node that this one reads.
    pub fn for_each_operand<'a>(&'a self, visit: &mut impl FnMut(&'a String)) {
        self.args
            .iter()
            .chain(self.kwargs.iter().map(|(_, arg)| arg))
            .for_each(|arg| arg.for_each_ref(visit));
    }
}

/// A functional graph in topological order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Graph {
    /// `autokernel.graph/1`.
    pub schema: String,
    /// All nodes; each reads only nodes before it.
    pub nodes: Vec<Node>,
}

/// The schema string of [`Graph`].
pub const GRAPH_SCHEMA: &str = "autokernel.graph/1";

/// Why a graph from the bridge was refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum GraphError {
    #[error("graph schema is `{0}`, expected `{GRAPH_SCHEMA}`")]
    Schema(String),
    #[error("two nodes are named `{0}`")]
    Duplicate(String),
    #[error("node `{node}` reads `{operand}`, which does not stand before it")]
    Order { node: String, operand: String },
    #[error("tensor of node `{0}` has {1} sizes and {2} strides")]
    Rank(String, usize, usize),
    #[error("graph has {0} output nodes, expected one at the end")]
    Output(usize),
}

impl Graph {
    /// Checks names, order, ranks and the output node.
    pub fn check(&self) -> Result<(), GraphError> {
        if self.schema != GRAPH_SCHEMA {
            return Err(GraphError::Schema(self.schema.clone()));
        }
        let mut seen = std::collections::HashSet::new();
        for node in &self.nodes {
            let mut missing = None;
            node.for_each_operand(&mut |name| {
                if missing.is_none() && !seen.contains(name.as_str()) {
                    missing = Some(name.clone());
                }
            });
            if let Some(operand) = missing {
                return Err(GraphError::Order { node: node.name.clone(), operand });
            }
            let metas: Vec<&TensorMeta> = match &node.value {
                Value::Tensor(meta) => vec![meta],
                Value::Tuple(metas) => metas.iter().flatten().collect(),
                Value::Other => vec![],
            };
            for meta in metas {
                if meta.shape.len() != meta.stride.len() {
                    return Err(GraphError::Rank(node.name.clone(), meta.shape.len(), meta.stride.len()));
                }
            }
            if !seen.insert(node.name.as_str()) {
                return Err(GraphError::Duplicate(node.name.clone()));
            }
        }
        let outputs = self.nodes.iter().filter(|node| node.kind == NodeKind::Output).count();
        if outputs != 1 || self.nodes.last().is_none_or(|node| node.kind != NodeKind::Output) {
            return Err(GraphError::Output(outputs));
        }
        Ok(())
    }
}
