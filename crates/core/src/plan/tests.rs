//! Expressions and plans: properties, and a table of texts.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::dtype::Dtype;
use crate::graph::{TensorMeta, Value};
use crate::kernel_file::{KernelFile, Params, TensorName, caps};
use crate::region::{Region, RegionId, RegionInput, RegionNode};

use super::expr::{Binary, DeviceField, Field, Function, Node, Unary};
use super::*;

const DEVICE: Device = Device { sms: 132, shared: 232_448, cores: 16 };

fn tensors() -> Vec<(String, TensorMeta)> {
    vec![
        ("in0".to_owned(), TensorMeta::contiguous(Dtype::Bf16, &[8, 0, 3])),
        ("in1".to_owned(), TensorMeta::contiguous(Dtype::F32, &[])),
        ("out0".to_owned(), TensorMeta::contiguous(Dtype::F64, &[u64::from(u32::MAX), 7])),
    ]
}

fn params() -> Params {
    [("A", 0), ("BLOCK", 128), ("big", i64::MAX), ("low", i64::MIN), ("n", -7)]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
}

// ---- random trees -------------------------------------------------------------------------------

fn leaf() -> impl Strategy<Value = Node> {
    let number = prop_oneof![3 => 0..20_i64, 1 => Just(i64::MAX), 1 => 0..=i64::MAX];
    let name = prop::sample::select(vec!["A", "BLOCK", "big", "low", "n"]);
    let tensor = prop::sample::select(vec!["in0", "in1", "out0"]);
    let field = prop_oneof![
        (-4..4_i64).prop_map(Field::Size),
        (-4..4_i64).prop_map(Field::Stride),
        Just(Field::Numel),
        Just(Field::Itemsize),
        Just(Field::Dim),
    ];
    prop_oneof![
        4 => number.prop_map(Node::Int),
        3 => name.prop_map(|name| Node::Param(name.to_owned())),
        2 => (tensor, field).prop_map(|(name, field)| Node::Tensor(name.to_owned(), field)),
        1 => prop::sample::select(DeviceField::ALL.to_vec()).prop_map(Node::Device),
    ]
}

fn tree() -> impl Strategy<Value = Node> {
    leaf().prop_recursive(8, 48, 4, |inner| {
        let binary = prop::sample::select(Binary::ALL.to_vec());
        let many = prop::sample::select(vec![Function::Min, Function::Max]);
        prop_oneof![
            1 => inner.clone().prop_map(|a| Node::Unary(Unary::Neg, Box::new(a))),
            1 => inner.clone().prop_map(|a| Node::Unary(Unary::Not, Box::new(a))),
            6 => (binary, inner.clone(), inner.clone())
                .prop_map(|(op, a, b)| Node::Binary(op, Box::new(a), Box::new(b))),
            1 => (many, prop::collection::vec(inner.clone(), 2..4)).prop_map(|(f, args)| Node::Call(f, args)),
            1 => (inner.clone(), inner.clone()).prop_map(|(a, b)| Node::Call(Function::Ceildiv, vec![a, b])),
            1 => inner.prop_map(|a| Node::Call(Function::NextPow2, vec![a])),
        ]
    })
}

// ---- an independent evaluator: i128, its own lookup, division by search of the floor ---------------

fn reference(node: &Node) -> Option<i128> {
    let value = match node {
        Node::Int(v) => i128::from(*v),
        Node::Param(name) => i128::from(*params().get(name)?),
        Node::Device(DeviceField::Sms) => 132,
        Node::Device(DeviceField::Shared) => 232_448,
        Node::Device(DeviceField::Cores) => 16,
        Node::Tensor(name, field) => {
            let all: BTreeMap<String, TensorMeta> = tensors().into_iter().collect();
            let meta = &all[name];
            let rank = meta.shape.len() as i64;
            let at = |i: &i64, list: &[u64]| {
                let i = if *i < 0 { *i + rank } else { *i };
                (0..rank).contains(&i).then(|| i128::from(list[i as usize]))
            };
            match field {
                Field::Size(i) => at(i, &meta.shape)?,
                Field::Stride(i) => at(i, &meta.stride)?,
                Field::Numel => meta.shape.iter().map(|n| i128::from(*n)).product(),
                Field::Itemsize => i128::from(meta.dtype.size()),
                Field::Dim => i128::from(rank),
            }
        }
        Node::Unary(Unary::Neg, a) => -reference(a)?,
        Node::Unary(Unary::Not, a) => i128::from(reference(a)? == 0),
        Node::Binary(Binary::And, a, b) => i128::from(reference(a)? != 0 && reference(b)? != 0),
        Node::Binary(Binary::Or, a, b) => i128::from(reference(a)? != 0 || reference(b)? != 0),
        Node::Binary(op, a, b) => {
            let (a, b) = (reference(a)?, reference(b)?);
            match op {
                Binary::Add => a + b,
                Binary::Sub => a - b,
                Binary::Mul => a * b,
                Binary::Div => floor(a, b)?,
                Binary::Rem => a - b * floor(a, b)?,
                Binary::Eq => i128::from(a == b),
                Binary::Ne => i128::from(a != b),
                Binary::Lt => i128::from(a < b),
                Binary::Le => i128::from(a <= b),
                Binary::Gt => i128::from(a > b),
                Binary::Ge => i128::from(a >= b),
                Binary::And | Binary::Or => unreachable!(),
            }
        }
        Node::Call(function, args) => {
            let args: Vec<i128> = args.iter().map(reference).collect::<Option<_>>()?;
            match function {
                Function::Min => *args.iter().min()?,
                Function::Max => *args.iter().max()?,
                Function::Ceildiv => -floor(-args[0], args[1])?,
                Function::NextPow2 => (0..64).map(|bit| 1_i128 << bit).find(|power| *power >= args[0])?,
            }
        }
    };
    // Every step must fit, not only the result.
    i64::try_from(value).is_ok().then_some(value)
}

fn floor(a: i128, b: i128) -> Option<i128> {
    if b == 0 {
        return None;
    }
    let guess = a / b;
    [guess - 1, guess, guess + 1].into_iter().find(|q| {
        let left = a - q * b;
        if b > 0 { (0..b).contains(&left) } else { left <= 0 && left > b }
    })
}

fn evaluate(node: &Node) -> Result<i64, EvalError> {
    Expr(node.clone()).evaluate(&Scope { tensors: &tensors(), params: &params(), device: &DEVICE })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn text_reads_back(node in tree()) {
        let text = node.to_string();
        prop_assume!(text.len() <= caps::EXPR_BYTES);
        let read: Expr = text.parse().map_err(|e| TestCaseError::fail(format!("{text}: {e}")))?;
        prop_assert_eq!(&read.0, &node, "{}", text);
        prop_assert_eq!(read.to_string(), text);
    }

    #[test]
    fn parentheses_are_needed(node in tree()) {
        // Taking out any one pair changes the tree or the text no longer reads.
        let text = node.to_string();
        prop_assume!(text.len() <= 200);
        for (open, close) in pairs(&text) {
            let before = text[..open].chars().next_back();
            if before.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_') {
                continue; // A call's.
            }
            let without = format!("{}{}{}", &text[..open], &text[open + 1..close], &text[close + 1..]);
            let same = without.parse::<Expr>().is_ok_and(|read| read.0 == node);
            prop_assert!(!same, "{} needs less: {}", text, without);
        }
    }

    #[test]
    fn values_are_the_references(node in tree()) {
        let got = evaluate(&node).ok().map(i128::from);
        prop_assert_eq!(got, reference(&node), "{}", node);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,80}") {
        let _ = text.parse::<Expr>();
    }

    #[test]
    fn any_tokens_are_read_or_refused(words in prop::collection::vec(
        prop::sample::select(vec![
            "(", ")", "-", "+", "*", "/", "//", "%", "<", "==", "=", "and", "or", "not", "in0", ".", "size", "(0)", ",",
            "min", "max(", "ceildiv(", "7", "99999999999999999999", "threads", "device", "tensor_map(", "box=[", "]",
        ]), 0..60)) {
        let text = words.join(" ");
        if let Ok(read) = text.parse::<Expr>() {
            prop_assert_eq!(read.to_string().parse::<Expr>(), Ok(read));
        }
        let _ = argument(&text);
    }
}

fn pairs(text: &str) -> Vec<(usize, usize)> {
    let (mut open, mut pairs) = (vec![], vec![]);
    for (at, c) in text.char_indices() {
        match c {
            '(' => open.push(at),
            ')' => pairs.extend(open.pop().map(|start| (start, at))),
            _ => {}
        }
    }
    pairs
}

// ---- tables ------------------------------------------------------------------------------------------

#[test]
fn canonical_texts() {
    for (text, canonical) in [
        ("((a))+(b*c)", "a + b * c"),
        ("(a+b)*c", "(a + b) * c"),
        ("a-(b-c)-d", "a - (b - c) - d"),
        ("not(a)and not(b or c)", "not a and not (b or c)"),
        ("not (a==b)", "not a == b"),
        ("(not a)==b", "(not a) == b"),
        ("-(-a)", "--a"),
        ("-(a*b)", "-(a * b)"),
        ("(-a)*b", "-a * b"),
        ("(a<b)==(c<d)", "(a < b) == (c < d)"),
        ("min( in0.size( -1 ) ,in0.numel, 3)", "min(in0.size(-1), in0.numel, 3)"),
        ("ceildiv(in0.stride(0)\n, device.sms)", "ceildiv(in0.stride(0), device.sms)"),
        ("0007", "7"),
    ] {
        assert_eq!(text.parse::<Expr>().unwrap().to_string(), canonical, "{text}");
    }
}

#[test]
fn the_deepest_trees_read_back() {
    type Wrap = fn(Node) -> Node;
    let one = || Box::new(Node::Int(1));
    let shapes: [(&str, Wrap); 6] = [
        ("left", |node| Node::Binary(Binary::Sub, Box::new(node), Box::new(Node::Int(1)))),
        ("right", |node| Node::Binary(Binary::Sub, Box::new(Node::Int(1)), Box::new(node))),
        ("comparison", |node| Node::Binary(Binary::Lt, Box::new(Node::Int(1)), Box::new(node))),
        ("not", |node| Node::Unary(Unary::Not, Box::new(node))),
        ("sign", |node| Node::Unary(Unary::Neg, Box::new(node))),
        ("call", |node| Node::Call(Function::NextPow2, vec![node])),
    ];
    for (shape, wrap) in shapes {
        let mut node = *one();
        for _ in 1..caps::EXPR_DEPTH {
            node = wrap(node);
        }
        assert_eq!(node.to_string().parse::<Expr>(), Ok(Expr(node.clone())), "{shape}");
        let deeper = wrap(node).to_string().parse::<Expr>().unwrap_err();
        assert_eq!(deeper.kind, ExprErrorKind::TooDeep, "{shape}");
    }
    // The most parentheses that a tree can need: a pair at every level.
    let mut node = *one();
    for level in 1..caps::EXPR_DEPTH {
        node = if level % 2 == 1 {
            Node::Unary(Unary::Not, Box::new(node))
        } else {
            Node::Unary(Unary::Neg, Box::new(node))
        };
    }
    assert_eq!(node.to_string().parse::<Expr>(), Ok(Expr(node)));
}

#[test]
fn division_is_pythons() {
    for (text, value) in [
        ("7 / 2", 3),
        ("-7 / 2", -4),
        ("7 / -2", -4),
        ("-7 / -2", 3),
        ("7 % -2", -1),
        ("-7 % 2", 1),
        ("low % -1", 0),
        ("ceildiv(7, 2)", 4),
        ("ceildiv(-7, 2)", -3),
        ("next_pow2(0)", 1),
        ("next_pow2(-5)", 1),
        ("next_pow2(5)", 8),
        ("A == 0 or 1 / A", 1),
        ("A != 0 and 1 / A == 1", 0),
        ("not 3", 0),
        ("3 and 4", 1),
        ("in0.size(-1) * in0.itemsize", 6),
        ("in1.dim + in1.numel", 1),
    ] {
        assert_eq!(evaluate(&text.parse::<Expr>().unwrap().0), Ok(value), "{text}");
    }
}

#[test]
fn what_has_no_value() {
    let messages: Vec<String> = [
        "1 / A",
        "1 % A",
        "ceildiv(1, A)",
        "big + 1",
        "low - 1",
        "-low",
        "low / -1",
        "ceildiv(low, -1)",
        "big * 2",
        "next_pow2(big)",
        "in0.size(3)",
        "in0.stride(-4)",
        "in1.size(0)",
        "in7.numel",
        "nothing",
    ]
    .iter()
    .map(|text| format!("{text}: {}", evaluate(&text.parse::<Expr>().unwrap().0).unwrap_err()))
    .collect();
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn what_is_no_expression() {
    let deep = format!("{}1{}", "(".repeat(200), ")".repeat(200));
    let chain = vec!["1"; 66].join("+");
    let signs = format!("{}1", "-".repeat(1000));
    let long = "1 ".repeat(600);
    let growing = vec!["12345678901234567890".get(..18).unwrap(); 50].join("<1)and(").replace("and", "+");
    let name = "n".repeat(65);
    let messages: Vec<String> = [
        "",
        "1 +",
        "(1",
        "1)",
        "a b",
        "7x",
        "a // b",
        "a && b",
        "a || b",
        "!a",
        "a ^ b",
        "a = b",
        "a ** b",
        "a $ b",
        "é",
        "a < b < c",
        "a == b != c",
        "a + not b",
        "and",
        "threads + 1",
        "tensor_map(x)",
        "device",
        "device.sm",
        "device.sms(0)",
        "device.",
        "in0.shape(0)",
        "in0.size",
        "in0.size(n)",
        "in0.size()",
        "in0.numel()",
        "in0.nume",
        "min",
        "min(1)",
        "max()",
        "ceildiv(1)",
        "ceildiv(1, 2, 3)",
        "next_pow2(1, 2)",
        "cdiv(1, 2)",
        "ceil_div(1, 2)",
        "min(1, 2",
        "min(,)",
        "'a'",
        "3.5",
        "9223372036854775808",
        &deep,
        &chain,
        &signs,
        &long,
        &growing,
        &name,
    ]
    .iter()
    .map(|text| {
        let shown: String = text.chars().take(24).collect();
        format!("{shown}: {}", text.parse::<Expr>().unwrap_err())
    })
    .collect();
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn serde_is_the_text() {
    let expr: Expr = "a+1".parse().unwrap();
    assert_eq!(serde_json::to_string(&expr).unwrap(), "\"a + 1\"");
    assert_eq!(serde_json::from_str::<Expr>("\"a+1\"").unwrap(), expr);
    assert!(serde_json::from_str::<Expr>("\"a+\"").is_err());
}

// ---- plans -------------------------------------------------------------------------------------------

/// Two inputs (the second constant), two outputs.
fn region() -> Region {
    let x = TensorMeta::contiguous(Dtype::F32, &[64, 1024]);
    let node = |meta: &TensorMeta| RegionNode {
        op: "aten.mul.Tensor".to_owned(),
        args: vec![],
        kwargs: vec![],
        value: Value::Tensor(meta.clone()),
    };
    let rows = TensorMeta::contiguous(Dtype::F32, &[64]);
    Region {
        schema: crate::region::REGION_SCHEMA.to_owned(),
        id: RegionId("0".repeat(12)),
        inputs: vec![
            RegionInput { meta: x.clone(), constant: false },
            RegionInput { meta: TensorMeta::contiguous(Dtype::F32, &[1024]), constant: true },
        ],
        nodes: vec![node(&x), node(&rows)],
        outputs: vec![0, 1],
    }
}

fn planned(header: &str) -> Result<Plan, PlanError> {
    let file = KernelFile::parse(&format!("/*@ autokernel 1\n{header}\n@*/\n")).unwrap();
    plan(&file, &region(), &file.default_params(), &DEVICE)
}

#[test]
fn a_full_plan() {
    let plan = planned(
        r#"
language = "cuda"
guard = ["in0.size(1) % VEC == 0"]
[params]
BLOCK = [256, 128]
VEC = [4]
[scratch]
sums = { dtype = "f32", size = "in0.size(0) * 8", zero = true }
aside = { dtype = "i32", size = "0" }
[[prepare]]
output = "packed"
dtype = "bf16"
size = "in1.numel"
entry = "pack"
grid = ["ceildiv(in1.numel, 256)"]
block = ["256"]
args = ["in1", "packed", "in1.numel"]
[[prepare]]
output = "twice"
dtype = "bf16"
size = "in1.numel"
entry = "double_it"
grid = ["1"]
block = ["256"]
args = ["packed", "twice"]
[[launch]]
entry = "scalar"
when = "VEC == 1"
grid = ["in0.size(7)"]
block = ["1"]
args = ["in0"]
[[launch]]
entry = "rows"
grid = ["min(in0.size(0), device.sms * 8)", "2"]
block = ["BLOCK", "2"]
shared = "BLOCK * in0.itemsize"
cluster = ["2"]
cooperative = true
args = ["in0", "twice", "sums", "out0", "out1", "in0.size(-1)", "VEC", "tensor_map(in0, box=[8, BLOCK / 4], swizzle=128)"]
"#,
    )
    .unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    insta::assert_json_snapshot!(plan);
}

#[test]
fn a_plan_for_a_cpu() {
    let plan = planned(
        r#"
language = "c++"
[[launch]]
entry = "rows"
args = ["in0", "in1", "out0", "out1", "in0.size(0)", "threads"]
"#,
    );
    insta::assert_json_snapshot!(plan.unwrap());
}

#[test]
fn what_has_no_plan() {
    let cpp = |rest: &str| format!("language = \"c++\"\n{rest}");
    let all = "args = [\"in0\", \"out0\", \"out1\"]";
    let cuda = |launch: &str| format!("language = \"cuda\"\n[[launch]]\nentry = \"k\"\n{all}\n{launch}");
    let prepare = |rest: &str| {
        cpp(&format!(
            "[[prepare]]\noutput = \"p\"\ndtype = \"f32\"\nentry = \"f\"\n{rest}\n\
             [[launch]]\nentry = \"k\"\nargs = [\"p\", \"out0\", \"out1\"]"
        ))
    };
    let cases = [
        cpp(&format!("guard = [\"1\", \"in0.size(0) == 63\"]\n[[launch]]\nentry = \"k\"\n{all}")),
        cpp(&format!("guard = [\"1 / (in0.dim - 2)\"]\n[[launch]]\nentry = \"k\"\n{all}")),
        cpp(&format!("guard = [\"in2.numel\"]\n[[launch]]\nentry = \"k\"\n{all}")),
        cpp("[[launch]]\nentry = \"k\"\nargs = [\"in0\", \"in2\", \"out0\", \"out1\"]"),
        cpp("[[launch]]\nentry = \"k\"\nargs = [\"in0\", \"out0\", \"out2\"]"),
        cpp("[[launch]]\nentry = \"k\"\nargs = [\"in0\", \"out0\", \"out1.numel\"]"),
        cpp(&format!("[[launch]]\nentry = \"k\"\nwhen = \"in0.dim == 3\"\n{all}")),
        cpp(&format!(
            "[[launch]]\nentry = \"k\"\nwhen = \"0\"\n{all}\n[[launch]]\nentry = \"l\"\nargs = [\"out1\"]"
        )),
        cpp(&format!(
            "[scratch]\ns = {{ dtype = \"f32\", size = \"-1\" }}\n[[launch]]\nentry = \"k\"\n{all}"
        )),
        cpp(&format!(
            "[scratch]\ns = {{ dtype = \"f32\", size = \"1099511627777\" }}\n[[launch]]\nentry = \"k\"\n{all}"
        )),
        cpp("[[launch]]\nentry = \"k\"\nargs = [\"in0\", \"out0\", \"out1\", \"in0.size(2)\"]"),
        cuda("grid = [\"in0.dim - 2\"]\nblock = [\"1\"]"),
        cuda("grid = [\"1\", \"65536\"]\nblock = [\"1\"]"),
        cuda("grid = [\"1\"]\nblock = [\"1\", \"1\", \"65\"]"),
        cuda("grid = [\"1\"]\nblock = [\"512\", \"4\"]"),
        cuda("grid = [\"1\"]\nblock = [\"1\"]\nshared = \"device.shared + 1\""),
        cuda("grid = [\"3\"]\nblock = [\"1\"]\ncluster = [\"2\"]"),
        cuda("grid = [\"8\", \"8\"]\nblock = [\"1\"]\ncluster = [\"8\", \"4\"]"),
        cuda("grid = [\"1\"]\nblock = [\"1\"]").replace("\"in0\"", "\"tensor_map(in0, box=[8])\""),
        cuda("grid = [\"1\"]\nblock = [\"1\"]").replace("\"in0\"", "\"tensor_map(in0, box=[8, 257])\""),
        prepare("size = \"8\"\nargs = [\"in0\", \"p\"]"),
        prepare("size = \"8\"\nargs = [\"in9\", \"p\"]"),
        prepare("size = \"-8\"\nargs = [\"in1\", \"p\"]"),
        prepare("size = \"8\"\nwhen = \"0\"\nargs = [\"in1\", \"p\"]"),
    ];
    let messages: Vec<String> = cases.iter().map(|header| planned(header).unwrap_err().to_string()).collect();
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn parameters_must_be_chosen_from_the_list() {
    let text = "/*@ autokernel 1\nlanguage = \"c++\"\n[params]\nA = [1, 2]\n[[launch]]\nentry = \"k\"\nargs = [\"out0\", \"out1\", \"A\"]\n@*/";
    let file = KernelFile::parse(text).unwrap();
    let tried = |params: &[(&str, i64)]| {
        let params = params.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        plan(&file, &region(), &params, &DEVICE).map_err(|error| error.to_string())
    };
    assert_eq!(tried(&[]).unwrap_err(), "parameter `A` has no value");
    assert_eq!(tried(&[("A", 3)]).unwrap_err(), "parameter `A` is 3, which is not one of [1, 2]");
    assert_eq!(tried(&[("A", 1), ("B", 1)]).unwrap_err(), "no parameter is called `B`");
    assert_eq!(tried(&[("A", 2)]).unwrap().launches[0].args.last(), Some(&PlannedArg::Int(2)));
}

#[test]
fn tensor_names() {
    assert_eq!(TensorName::parse("in0"), Some(TensorName::Input(0)));
    assert_eq!(TensorName::parse("out12"), Some(TensorName::Output(12)));
    for text in ["in", "out", "in01", "in-1", "int", "input0", "in99999999999999999999", "0", ""] {
        assert_eq!(TensorName::parse(text), None, "{text}");
    }
}
