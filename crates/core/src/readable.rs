//! A region as PyTorch that a person or a model can read: what an agent is shown instead of a dump.

use std::fmt::Write;

use crate::graph::{Arg, TensorMeta};
use crate::region::{Operand, Region, RegionNode};

/// `f32[64, 1024]`, with strides where the tensor isn't dense row-major.
pub fn describe(meta: &TensorMeta) -> String {
    let shape: Vec<String> = meta.shape.iter().map(u64::to_string).collect();
    let mut text = format!("{}[{}]", meta.dtype.name(), shape.join(", "));
    if !meta.is_contiguous() {
        let stride: Vec<String> = meta.stride.iter().map(u64::to_string).collect();
        let _ = write!(text, " strides ({})", stride.join(", "));
    }
    text
}

/// The region as a Python function over `torch`, one line a call.
pub fn python(region: &Region) -> String {
    let mut text = String::from("def region(");
    let names: Vec<String> = (0..region.inputs.len()).map(|i| format!("in{i}")).collect();
    let _ = writeln!(text, "{}):", names.join(", "));
    for (i, input) in region.inputs.iter().enumerate() {
        let kind = if input.constant { "  (parameter or buffer)" } else { "" };
        let _ = writeln!(text, "    # in{i}: {}{kind}", describe(&input.meta));
    }
    for (i, node) in region.nodes.iter().enumerate() {
        let comment = node.value.tensor().map(|meta| format!("  # {}", describe(meta))).unwrap_or_default();
        let _ = writeln!(text, "    t{i} = {}{comment}", call(node));
    }
    let outputs: Vec<String> = region.outputs.iter().map(|i| format!("t{i}")).collect();
    let _ = writeln!(text, "    return {}", outputs.join(", "));
    text
}

fn call(node: &RegionNode) -> String {
    let args: Vec<String> = node.args.iter().map(argument).collect();
    if node.op == "getitem" {
        return format!(
            "{}[{}]",
            args.first().map_or("", String::as_str),
            args.get(1).map_or("", String::as_str)
        );
    }
    let kwargs = node.kwargs.iter().map(|(key, arg)| format!("{key}={}", argument(arg)));
    let all: Vec<String> = args.iter().cloned().chain(kwargs).collect();
    let name = node.op.strip_prefix("aten.").unwrap_or(&node.op);
    let infix = match name {
        "add.Tensor" | "add.Scalar" => "+",
        "sub.Tensor" | "sub.Scalar" => "-",
        "mul.Tensor" | "mul.Scalar" => "*",
        "div.Tensor" | "div.Scalar" => "/",
        _ => "",
    };
    if !infix.is_empty() && all.len() == 2 && args.len() == 2 {
        return format!("{} {infix} {}", all[0], all[1]);
    }
    format!("torch.ops.{}({})", node.op, all.join(", "))
}

fn argument(arg: &Arg<Operand>) -> String {
    match arg {
        Arg::Ref(Operand::Input(i)) => format!("in{i}"),
        Arg::Ref(Operand::Node(i)) => format!("t{i}"),
        Arg::Int(v) => v.to_string(),
        Arg::Float(v) if v.is_finite() => format!("{v:?}"),
        Arg::Float(v) => format!("float('{}')", v.to_string().to_lowercase()),
        Arg::Bool(v) => if *v { "True" } else { "False" }.to_owned(),
        Arg::None => "None".to_owned(),
        Arg::Dtype(d) => format!("torch.{}", torch_name(d.name())),
        Arg::Str(s) => format!("{s:?}"),
        Arg::Opaque(s) => s.clone(),
        Arg::List(items) => format!("[{}]", items.iter().map(argument).collect::<Vec<_>>().join(", ")),
    }
}

fn torch_name(name: &str) -> String {
    match name {
        "bf16" => "bfloat16".to_owned(),
        "bool" => "bool".to_owned(),
        "u8" => "uint8".to_owned(),
        _ => name.replacen('f', "float", 1).replacen('i', "int", usize::from(name.starts_with('i'))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::graph::Value;
    use crate::region::{REGION_SCHEMA, RegionId, RegionInput};

    #[test]
    fn a_region_reads_as_python() {
        let meta = TensorMeta::contiguous(Dtype::F32, &[2, 3]);
        let strided = TensorMeta { dtype: Dtype::Bf16, shape: vec![2, 3], stride: vec![1, 2] };
        let region = Region {
            schema: REGION_SCHEMA.to_owned(),
            id: RegionId("0".into()),
            inputs: vec![
                RegionInput { meta: meta.clone(), constant: false },
                RegionInput { meta: strided, constant: true },
            ],
            nodes: vec![
                RegionNode {
                    op: "aten._to_copy.default".into(),
                    args: vec![Arg::Ref(Operand::Input(1))],
                    kwargs: vec![("dtype".into(), Arg::Dtype(Dtype::F32))],
                    value: Value::Tensor(meta.clone()),
                },
                RegionNode {
                    op: "aten.mul.Tensor".into(),
                    args: vec![Arg::Ref(Operand::Input(0)), Arg::Ref(Operand::Node(0))],
                    kwargs: vec![],
                    value: Value::Tensor(meta),
                },
            ],
            outputs: vec![1],
        };
        insta::assert_snapshot!(python(&region), @r"
        def region(in0, in1):
            # in0: f32[2, 3]
            # in1: bf16[2, 3] strides (1, 2)  (parameter or buffer)
            t0 = torch.ops.aten._to_copy.default(in1, dtype=torch.float32)  # f32[2, 3]
            t1 = in0 * t0  # f32[2, 3]
            return t1
        ");
    }
}
