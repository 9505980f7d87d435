//! Kernel files: one full header in each language, a table of faults, and properties.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const CPP: &str = r#"
/*@ autokernel 1
language = "c++"
note     = "rows in parallel, two passes"
guard    = ["in0.size(-1) % VEC == 0", "in0.stride(1) == 1"]
[params]
VEC    = [8, 16]
UNROLL = [1, 2, 4]
[scratch]
partial = { dtype = "f32", size = "in0.size(0) * 64", zero = true }
[scratch.order]
dtype = "i64"
size  = 12
[[prepare]]
output = "packed"
dtype  = "bf16"
size   = "in1.numel"
entry  = "pack"
args   = ["in1", "packed", "in1.numel", "threads"]
[[launch]]
entry = "sums"
args  = ["in0", "partial", "in0.size(0)", "in0.size(1)", "threads"]
[[launch]]
entry = "scale"
when  = "not (in0.size(0) == 0) and UNROLL < 4"
args  = ["in0", "packed", "partial", "order", "out0", "VEC", "max(in0.numel, 1, device.cores)"]
@*/
#include "autokernel/vec.h"
extern "C" void sums() {}
"#;

const CUDA: &str = r#"/*@ autokernel 1
language = "cuda"
note     = "one row a block, 16-byte loads, row kept in registers"
[params]
BLOCK = [128, 256, 512]
VEC   = [4, 8]
[scratch]
partial = { dtype = "f32", size = "in0.size(0) * 64", zero = true }
[[launch]]
entry  = "rms_norm"
when   = "in0.size(1) % VEC == 0"
grid   = ["min(in0.size(0), device.sms * 8)", 1, "next_pow2(VEC)"]
block  = ["BLOCK"]
shared = "(BLOCK + 1) * in0.itemsize"
cluster = ["1"]
cooperative = true
args   = ["tensor_map(in0, box=[1, BLOCK * VEC], swizzle=128)", "in1", "partial", "out0", "in0.size(0)"]
@*/
"#;

const TRITON: &str = r#""""autokernel 1
language = "triton"
[params]
ROWS = [1, 4]
[[launch]]
entry = "softmax"
grid  = ["ceildiv(in0.size(0), ROWS)"]
args  = ["in0", "out0", "in0.stride(-2)", "in0.size(-1)"]
"""
import triton
"#;

#[test]
fn a_full_cpp_file() {
    insta::assert_debug_snapshot!(KernelFile::parse(CPP).unwrap());
}

#[test]
fn a_full_cuda_file() {
    insta::assert_debug_snapshot!(KernelFile::parse(CUDA).unwrap());
}

#[test]
fn a_triton_file() {
    insta::assert_debug_snapshot!(KernelFile::parse(TRITON).unwrap());
}

#[test]
fn what_may_stand_before_and_around_a_header() {
    let file = KernelFile::parse(CPP).unwrap();
    let trimmed = CPP.trim_start();
    for text in [
        format!("\u{feff}{trimmed}"),
        format!("\u{feff}\r\n\t {trimmed}"),
        trimmed.replace("/*@ autokernel", "/*@\nautokernel"),
        trimmed.replace('\n', "\r\n"),
    ] {
        let read = KernelFile::parse(&text).unwrap();
        assert_eq!(KernelFile { source: file.source.clone(), ..read }, file);
    }
    let triton = KernelFile::parse(TRITON).unwrap();
    let single = TRITON.replace("\"\"\"", "'''");
    for text in [single.clone(), format!("r{single}"), format!("r{TRITON}"), format!("\u{feff}\n{TRITON}")] {
        let read = KernelFile::parse(&text).unwrap();
        assert_eq!(KernelFile { source: triton.source.clone(), ..read }, triton);
    }
}

#[test]
fn entries_params_and_points() {
    let file = KernelFile::parse(CPP).unwrap();
    assert_eq!(file.entries().into_iter().collect::<Vec<_>>(), ["pack", "scale", "sums"]);
    assert_eq!(file.default_params(), Params::from([("UNROLL".to_owned(), 1), ("VEC".to_owned(), 8)]));
    assert_eq!(file.space(), 6);
    let points: Vec<Params> = file.points().collect();
    assert_eq!(points.first(), Some(&file.default_params()));
    assert!(points.iter().all(|point| file.check_params(point).is_ok()));
    let bare = KernelFile { params: BTreeMap::new(), ..file };
    assert_eq!((bare.space(), bare.points().count()), (1, 1));
}

/// A C++ file with `head` above and `tail` below a launch that is well.
fn cpp(head: &str, tail: &str) -> String {
    format!(
        "/*@ autokernel 1\nlanguage = \"c++\"\n{head}\n[[launch]]\nentry = \"k\"\nargs = [\"out0\"]\n{tail}\n@*/\n"
    )
}

/// A CUDA file with one launch.
fn cuda(launch: &str) -> String {
    format!("/*@ autokernel 1\nlanguage = \"cuda\"\n[[launch]]\nentry = \"k\"\n{launch}\n@*/\n")
}

fn args(text: &str) -> String {
    cpp("[params]\nBLOCK = [1]\n[scratch]\ntmp = { dtype = \"f32\", size = \"1\" }", "")
        .replace("[\"out0\"]", &format!("[{text}]"))
}

fn layout_faults() -> Vec<(&'static str, String)> {
    vec![
        ("empty", String::new()),
        ("no header", "int main() {}".to_owned()),
        ("another comment", "/* autokernel 1 */".to_owned()),
        ("another word", "/*@ autokernels 1 @*/".to_owned()),
        ("not first", format!("// mine\n{}", cpp("", ""))),
        ("unclosed", cpp("", "").replace("@*/", "")),
        ("closed as a comment", cpp("", "").replace("@*/", "*/")),
        ("closed early", cpp("note = \"*/\"", "")),
        ("unclosed docstring", TRITON.replace("\"\"\"\nimport", "import")),
        ("escaped quotes", TRITON.replace("\"\"\"\nimport", "\\\"\"\"\nimport")),
        ("version", cpp("", "").replace("autokernel 1", "autokernel 2")),
        ("no version", "/*@ autokernel @*/".to_owned()),
        ("wrong form", format!("\"\"\"autokernel 1\nlanguage = \"cuda\"\n{}", "\"\"\"")),
        ("wrong form", cpp("", "").replace("c++", "triton")),
        ("too long", cpp("", &"#".repeat(caps::FILE_BYTES))),
    ]
}

fn toml_faults() -> Vec<(&'static str, String)> {
    vec![
        ("empty header", "/*@ autokernel 1 @*/".to_owned()),
        ("not TOML", cpp("this is prose", "")),
        ("open string", cpp("note = \"open", "")),
        ("duplicate key", cpp("note = \"a\"\nnote = \"b\"", "")),
        ("duplicate param", cpp("[params]\nA = [1]\nA = [2]", "")),
        ("language", cpp("", "").replace("c++", "rust")),
        ("no language", cpp("", "").replace("language", "note")),
        ("unknown root key", cpp("[param]\nA = [1]", "")),
        ("unknown launch key", cpp("", "gird = [\"1\"]")),
        ("misplaced key", cpp("", "guard = [\"1\"]")),
        ("unknown scratch key", cpp("[scratch]\ns = { dtype = \"f32\", size = \"1\", zeroed = true }", "")),
        ("dtype", cpp("[scratch]\ns = { dtype = \"float32\", size = \"1\" }", "")),
        ("no size", cpp("[scratch]\ns = { dtype = \"f32\" }", "")),
        ("no args", cpp("", "").replace("args", "#")),
        ("scalar param", cpp("[params]\nA = 1", "")),
        ("float param", cpp("[params]\nA = [1, 2.5]", "")),
        ("float expression", cpp("guard = [1.5]", "")),
        ("no launch", "/*@ autokernel 1\nlanguage = \"c++\"\n@*/".to_owned()),
        (
            "launch is a table",
            "/*@ autokernel 1\nlanguage = \"c++\"\n[launch]\nentry = \"k\"\nargs = []\n@*/".to_owned(),
        ),
    ]
}

fn name_faults() -> Vec<(&'static str, String)> {
    let param = |name: &str| cpp(&format!("[params]\n{name} = [1]"), "");
    let scratch = |name: &str| cpp(&format!("[scratch]\n{name} = {{ dtype = \"f32\", size = \"1\" }}"), "");
    let entry = |name: &str| cpp("", "").replace("\"k\"", &format!("\"{name}\""));
    vec![
        ("param", param("\"a b\"")),
        ("param", param("1a")),
        ("param", param("\"\"")),
        ("param", param("\"é\"")),
        ("param", param(&"n".repeat(65))),
        ("param", param("threads")),
        ("param", param("next_pow2")),
        ("param", param("in0")),
        ("param", param("float")),
        ("param", param("__FAST_MATH__")),
        ("param", param("_Alignas")),
        ("param", param("k")),
        ("param", TRITON.replace("ROWS =", "lambda =")),
        ("scratch", scratch("out3")),
        ("scratch", scratch("device")),
        ("entry", entry("two words")),
        ("entry", entry("min")),
        ("entry", entry("double")),
        ("taken", cpp("[params]\nA = [1]\n[scratch]\nA = { dtype = \"f32\", size = \"1\" }", "")),
        (
            "taken",
            cpp("", "[[prepare]]\noutput = \"p\"\ndtype = \"f32\"\nsize = 1\nentry = \"f\"\nargs = [\"p\"]\n").replace(
                "[[launch]]",
                "[[prepare]]\noutput = \"p\"\ndtype = \"f32\"\nsize = 1\nentry = \"f\"\nargs = [\"p\"]\n[[launch]]",
            ),
        ),
    ]
}

fn cap_faults() -> Vec<(&'static str, String)> {
    let list = |n: usize, f: fn(usize) -> String| (0..n).map(f).collect::<Vec<_>>().join(", ");
    let lines = |n: usize, f: fn(usize) -> String| (0..n).map(f).collect::<Vec<_>>().join("\n");
    vec![
        ("note", cpp(&format!("note = \"{}\"", "n".repeat(1025)), "")),
        ("params", cpp(&format!("[params]\n{}", lines(33, |i| format!("P{i} = [1]"))), "")),
        ("values", cpp(&format!("[params]\nA = [{}]", list(65, |i| i.to_string())), "")),
        ("no values", cpp("[params]\nA = []", "")),
        ("repeated value", cpp("[params]\nB = [1]\nA = [1, 2, 1]", "")),
        ("guards", cpp(&format!("guard = [{}]", list(33, |_| "1".to_owned())), "")),
        ("launches", cpp("", &lines(16, |_| "[[launch]]\nentry = \"k\"\nargs = []".to_owned()))),
        ("args", args(&list(49, |_| "1".to_owned()))),
        ("scratch", cpp(&lines(33, |i| format!("[scratch.s{i}]\ndtype = \"f32\"\nsize = 1")), "")),
        ("long expression", args(&format!("\"{}\"", "1 + ".repeat(300)))),
    ]
}

fn expression_faults() -> Vec<(&'static str, String)> {
    let prepare = |rest: &str| {
        let step = format!("[[prepare]]\noutput = \"p\"\ndtype = \"f32\"\nsize = 1\nentry = \"f\"\n{rest}");
        cpp(&format!("[scratch]\ntmp = {{ dtype = \"f32\", size = 1 }}\n{step}"), "")
    };
    vec![
        ("syntax", args("\"out0\", \"BLOCK *\"")),
        ("unknown name", args("\"BLOK\"")),
        ("unknown name", args("\"BLOK + 1\"")),
        ("unknown tensor", args("\"x.size(0)\"")),
        ("unknown tensor", args("\"input0\"")),
        ("tensor as number", args("\"in0 + 1\"")),
        ("scratch as number", args("\"tmp + 1\"")),
        ("scratch size", args("\"tmp.size(0)\"")),
        ("param size", args("\"BLOCK.numel\"")),
        ("threads inside", args("\"threads * 2\"")),
        ("threads in a guard", cpp("guard = [\"threads\"]", "")),
        ("tensor map", args("\"tensor_map(in0, box=[1])\"")),
        ("guard", cpp("guard = [\"1\",\n  \"in0.size(0) = 1\"]", "")),
        ("grid for C++", cpp("", "grid = [\"1\"]")),
        ("cooperative for C++", cpp("", "cooperative = false")),
        ("no grid", cuda("block = [\"1\"]\nargs = [\"out0\"]")),
        ("no block", cuda("grid = [\"1\"]\nargs = [\"out0\"]")),
        ("no extents", cuda("grid = []\nblock = [1]\nargs = [\"out0\"]")),
        ("four extents", cuda("grid = [1, 1, 1, 1]\nblock = [1]\nargs = [\"out0\"]")),
        ("threads for CUDA", cuda("grid = [1]\nblock = [1]\nargs = [\"threads\"]")),
        ("map of a number", cuda("grid = [1]\nblock = [1]\nargs = [\"tensor_map(x, box=[1])\"]")),
        ("map without box", cuda("grid = [1]\nblock = [1]\nargs = [\"tensor_map(in0)\"]")),
        ("swizzle", cuda("grid = [1]\nblock = [1]\nargs = [\"tensor_map(in0, box=[1], swizzle=96)\"]")),
        ("more than a map", cuda("grid = [1]\nblock = [1]\nargs = [\"tensor_map(in0, box=[1]) + 1\"]")),
        ("six extents", cuda("grid = [1]\nblock = [1]\nargs = [\"tensor_map(in0, box=[1, 1, 1, 1, 1, 1])\"]")),
        ("block for Triton", TRITON.replace("args  =", "block = [\"128\"]\nargs  =")),
        ("no grid for Triton", TRITON.replace("grid  =", "#")),
        ("step without its output", prepare("args = [\"in0\"]")),
        ("step with an output", prepare("args = [\"p\", \"out0\"]")),
        ("step with scratch", prepare("args = [\"p\", \"tmp\"]")),
        (
            "step before its input",
            prepare("args = [\"p\", \"q\"]").replace(
                "[[launch]]",
                "[[prepare]]\noutput = \"q\"\ndtype = \"f32\"\nsize = 1\nentry = \"f\"\nargs = [\"q\"]\n[[launch]]",
            ),
        ),
        ("entry is a param", args("\"out0\"").replace("entry = \"k\"", "entry = \"BLOCK\"")),
    ]
}

fn messages(faults: Vec<(&'static str, String)>) -> String {
    let lines = faults.into_iter().map(|(what, text)| match KernelFile::parse(&text) {
        Ok(_) => format!("{what}: accepted"),
        Err(error) => format!("{what}: {error}"),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn faults_of_layout() {
    insta::assert_snapshot!(messages(layout_faults()));
}

#[test]
fn faults_of_toml() {
    insta::assert_snapshot!(messages(toml_faults()));
}

#[test]
fn faults_of_names() {
    insta::assert_snapshot!(messages(name_faults()));
}

#[test]
fn faults_of_size() {
    insta::assert_snapshot!(messages(cap_faults()));
}

#[test]
fn faults_of_expressions() {
    insta::assert_snapshot!(messages(expression_faults()));
}

#[test]
fn nesting_is_bounded() {
    for text in ["[".repeat(200_000), "{a=".repeat(60_000), "a.".repeat(100_000)] {
        assert!(KernelFile::parse(&cpp(&format!("guard = {text}"), "")).is_err());
        assert!(KernelFile::parse(&cpp(&text, "")).is_err());
    }
}

#[test]
fn messages_stay_short() {
    let long = "x".repeat(10_000);
    for text in [
        cpp(&format!("{long} = 1"), ""),
        cpp(&format!("[params]\n{long} = [1]"), ""),
        cpp(&format!("note = [\"{long}\"]"), ""),
        args(&format!("\"{}\"", "(".repeat(10_000))),
        cpp("", "").replace("autokernel 1", &format!("autokernel {long}")),
        cpp("", "").replace("c++", &long),
    ] {
        let message = KernelFile::parse(&text).unwrap_err().to_string();
        assert!(message.len() < 600, "{message}");
    }
}

/// Valid files to mutate.
fn valid() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![CPP, CUDA, TRITON])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_read_or_refused(text in "(/\\*@ autokernel 1|\"\"\"autokernel 1)?\\PC{0,200}(@\\*/|\"\"\")?") {
        let _ = KernelFile::parse(&text);
    }

    #[test]
    fn mutated_files_are_read_or_refused(
        file in valid(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..4_u8, any::<prop::sample::Index>(), any::<char>()), 1..6),
    ) {
        let mut chars: Vec<char> = file.chars().collect();
        for (at, kind, other, insert) in edits {
            let (at, other) = (at.index(chars.len()), other.index(chars.len()));
            match kind {
                0 => { chars.remove(at); }
                1 => chars.insert(at, insert),
                2 => chars.swap(at, other),
                _ => {
                    let piece: Vec<char> = chars[at.min(other)..at.max(other)].to_vec();
                    chars.splice(at..at, piece);
                }
            }
            if chars.is_empty() { break; }
        }
        let text: String = chars.into_iter().collect();
        match KernelFile::parse(&text) {
            Ok(read) => prop_assert_eq!(read.source, text),
            Err(error) => {
                let lines = 1 + text.matches('\n').count();
                prop_assert!(error.line.is_none_or(|line| (1..=lines).contains(&line)), "{}", error);
            }
        }
    }

    #[test]
    fn points_are_the_space(lists in prop::collection::btree_map(
        "[A-Z]{1,4}", prop::collection::btree_set(any::<i64>(), 1..5), 0..6)) {
        let params = lists.into_iter().map(|(name, values)| (name, values.into_iter().collect())).collect();
        let file = KernelFile { params, ..KernelFile::parse(CPP).unwrap() };
        let points: Vec<Params> = file.points().collect();
        let distinct: BTreeSet<&Params> = points.iter().collect();
        prop_assert_eq!(points.len() as u64, file.space());
        prop_assert_eq!(distinct.len(), points.len());
        prop_assert_eq!(points.first(), Some(&file.default_params()));
        for point in &points {
            prop_assert_eq!(file.check_params(point), Ok(()));
        }
    }
}

#[test]
fn a_huge_space_saturates() {
    let values: Vec<i64> = (0..64).collect();
    let params = (0..32).map(|i| (format!("P{i}"), values.clone())).collect();
    let file = KernelFile { params, ..KernelFile::parse(CPP).unwrap() };
    assert_eq!(file.space(), u64::MAX);
    assert_eq!(file.points().take(1000).count(), 1000);
}
