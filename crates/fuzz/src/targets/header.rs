//! Headers of kernel files, and plans from their expressions.

use anyhow::Result;
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, TensorMeta, Value};
use autokernel_core::kernel_file::{KernelFile, caps};
use autokernel_core::plan::{Device, check_region, plan};
use autokernel_core::region::{Operand, REGION_SCHEMA, Region, RegionId, RegionInput, RegionNode};

use super::{Target, mutated, rule};
use crate::mutate::{EDGES, Random};

/// The parser of headers.
pub(super) const HEADER: Target = Target { name: "header", seeds, make: make_header, check: check_header };
/// Parser and evaluator of expressions.
pub(super) const PLAN: Target = Target { name: "plan", seeds, make: make_plan, check: check_plan };

const WORDS: &[&str] = &[
    "in0",
    "in1",
    "out0",
    "in0.size(0)",
    "in0.stride(-1)",
    "in0.numel",
    "ceildiv(",
    "min(",
    "max(",
    "next_pow2(",
    "threads",
    "device.cores",
    "device.sms",
    " // ",
    " % ",
    " and ",
    " or ",
    " not ",
    " == ",
    " if ",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "'",
    "\n",
    "=",
    ",",
    "[params]",
    "[scratch]",
    "[[launch]]",
    "[[prepare]]",
    "guard = [",
    "@*/",
    "/*@ autokernel 1",
    "\"\"\"",
    "é",
    "\u{202e}",
    "\0",
    "-",
    "9223372036854775807",
    "dtype = \"f32\"",
    "size = ",
    "entry = ",
    "args = [",
];

#[expect(clippy::unnecessary_wraps, reason = "of one form with targets whose seeds have to be built")]
fn seeds() -> Result<Vec<Vec<u8>>> {
    let full = r#"/*@ autokernel 1
language = "c++"
note = "seed"
guard = ["in0.size(1) % 8 == 0", "in0.numel > 4 and not in1.size(0) == 3"]
[params]
VEC = [8, 16]
UNROLL = [1, 2, 4]
[scratch]
partial = { dtype = "f32", size = "ceildiv(in0.numel, VEC) * 2", zero = true }
[[prepare]]
output = "packed"
dtype = "bf16"
size = "in1.numel"
entry = "pack"
args = ["in1", "packed", "in1.size(0)"]
[[launch]]
entry = "work"
when = "in0.size(0) > 1"
args = ["in0", "packed", "out0", "partial", "in0.size(0)", "max(in0.stride(0), 3) // 2", "threads"]
@*/
extern "C" void work() {}
"#;
    let cuda = r#"/*@ autokernel 1
language = "cuda"
[params]
BLOCK = [128, 256]
[[launch]]
entry = "work"
grid = ["ceildiv(in0.numel, BLOCK)", "1"]
block = ["BLOCK"]
shared = "BLOCK * 4"
args = ["in0", "in1", "out0", "in0.numel"]
@*/
"#;
    let triton = "\"\"\"autokernel 1\nlanguage = \"triton\"\n[params]\nROWS = [1, 4]\n[[launch]]\nentry = \"softmax\"\ngrid = [\"ceildiv(in0.size(0), ROWS)\"]\nargs = [\"in0\", \"out0\", \"in0.stride(-2)\"]\n\"\"\"\nimport triton\n";
    Ok([full, cuda, triton].map(|text| text.as_bytes().to_vec()).to_vec())
}

fn make_header(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    mutated(seeds, WORDS, random)
}

fn check_header(input: &[u8]) -> Result<bool, String> {
    let text = String::from_utf8_lossy(input);
    let Ok(file) = KernelFile::parse(&text) else { return Ok(false) };
    rule(KernelFile::parse(&text).as_ref() == Ok(&file), "a header reads the same twice")?;
    rule(file.launches.len() <= caps::LAUNCHES && !file.launches.is_empty(), "launches are capped")?;
    rule(file.params.len() <= caps::PARAMS, "parameters are capped")?;
    for point in file.points().take(64) {
        rule(file.check_params(&point).is_ok(), "every point of a file fits it")?;
    }
    for expr in &file.guard {
        let shown = expr.to_string();
        rule(shown.parse().as_ref() == Ok(expr), "an expression reads back as it is shown")?;
    }
    Ok(true)
}

/// A random expression: what text mutation seldom gives is depth.
fn expression(depth: usize, random: &mut Random) -> String {
    const BINARY: [&str; 12] = ["+", "-", "*", "//", "%", "==", "!=", "<", "<=", ">", "and", "or"];
    const LEAVES: [&str; 9] = [
        "in0.size(0)",
        "in0.size(-1)",
        "in1.size(0)",
        "in0.stride(0)",
        "in0.numel",
        "out0.numel",
        "VEC",
        "device.cores",
        "in0.size(9)",
    ];
    if depth == 0 || random.below(5) == 0 {
        return if random.below(2) == 0 {
            (*random.pick(&EDGES) as i64).unsigned_abs().min(i64::MAX as u64).to_string()
        } else {
            (*random.pick(&LEAVES)).to_owned()
        };
    }
    let mut part = || expression(depth - 1, random);
    let (a, b) = (part(), part());
    match random.below(8) {
        0 => format!("ceildiv({a}, {b})"),
        1 => format!("min({a}, {b})"),
        2 => format!("max({a}, {b})"),
        3 => format!("next_pow2({a})"),
        4 => format!("-({a})"),
        5 => format!("not ({a})"),
        _ => format!("({a}) {} ({b})", random.pick(&BINARY)),
    }
}

fn make_plan(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    // Eight bytes say the sizes of the region.
    let mut input = random.number().to_le_bytes().to_vec();
    if random.below(3) == 0 {
        input.extend(mutated(seeds, WORDS, random));
        return input;
    }
    let depth = random.below(7);
    let mut part = || expression(depth, random);
    let (guard, size, when, argument) = (part(), part(), part(), part());
    let guard = if random.below(2) == 0 { String::new() } else { format!("guard = [\"{guard}\"]\n") };
    let text = format!(
        "/*@ autokernel 1\nlanguage = \"c++\"\n{guard}[params]\nVEC = [8, -1]\n[scratch]\ns = {{ dtype = \"f64\", size = \"{size}\" }}\n[[launch]]\nentry = \"k\"\nwhen = \"{when}\"\nargs = [\"in0\", \"s\", \"out0\", \"{argument}\"]\n@*/\n"
    );
    input.extend(text.bytes());
    input
}

fn region(sizes: [u64; 3]) -> Region {
    let [rows, columns, stride] = sizes;
    let meta = TensorMeta { dtype: Dtype::F32, shape: vec![rows, columns], stride: vec![stride, 1] };
    let weight = TensorMeta::contiguous(Dtype::Bf16, &[columns]);
    let node = RegionNode {
        op: "aten.mul.Tensor".into(),
        args: vec![Arg::Ref(Operand::Input(0)), Arg::Ref(Operand::Input(1))],
        kwargs: vec![],
        value: Value::Tensor(TensorMeta::contiguous(Dtype::F32, &[rows, columns])),
    };
    Region {
        schema: REGION_SCHEMA.into(),
        id: RegionId("fuzz".into()),
        inputs: vec![RegionInput { meta, constant: false }, RegionInput { meta: weight, constant: true }],
        nodes: vec![node],
        outputs: vec![0],
    }
}

fn check_plan(input: &[u8]) -> Result<bool, String> {
    let Some((sizes, text)) = input.split_at_checked(8) else { return Ok(false) };
    let Ok(file) = KernelFile::parse(&String::from_utf8_lossy(text)) else { return Ok(false) };
    // Sizes whose product is a number of elements: what no tensor can be is no region.
    let size = |byte: u8| 1_u64 << (byte % 24) | u64::from(byte >> 5);
    let region = region([size(sizes[0]), size(sizes[1]), size(sizes[2])]);
    let device = Device { sms: 0, shared: 0, cores: i64::from(sizes[3]) };
    let fits = check_region(&file, &region).is_ok();
    let mut any = false;
    for params in file.points().take(8) {
        let Ok(made) = plan(&file, &region, &params, &device) else { continue };
        any = true;
        rule(fits, "a file that has a plan for a region passes its first check")?;
        rule(plan(&file, &region, &params, &device).as_ref() == Ok(&made), "a plan is the same twice")?;
        rule(!made.launches.is_empty(), "a plan launches something")?;
        rule(made.scratch.iter().all(|s| s.numel <= 1 << 40), "scratch is capped")?;
    }
    Ok(any)
}
