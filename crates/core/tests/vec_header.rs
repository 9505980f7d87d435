//! Builds `vec_header/test.cpp` against `autokernel/vec.h` for each instruction set that this machine can run, and
//! runs it: accuracy of every function, special values, memory next to a guard page, conversions.
//!
//! `AUTOKERNEL_EXHAUSTIVE=1` checks all 2^32 floats instead of a sample (about an hour).

#![expect(clippy::print_stderr, reason = "a test reports what it measured and what it skipped")]
#![expect(clippy::expect_used, reason = "helpers of the tests fail like the tests themselves")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What the builder passes, less what makes it a shared object.
const FLAGS: [&str; 7] = [
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
];

fn compiler() -> Option<String> {
    let chosen = std::env::var("CXX").ok();
    let known = ["c++", "g++", "clang++"].map(String::from);
    let works =
        |name: &String| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    chosen.into_iter().chain(known).find(works)
}

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn compile(cxx: &str, isa: &[&str], extra: &[&str], source: &Path, out: &Path) -> Output {
    Command::new(cxx)
        .args(FLAGS)
        .args(isa)
        .args(extra)
        .arg("-I")
        .arg(crate_dir().join("include"))
        .arg(source)
        .arg("-o")
        .arg(out)
        .output()
        .expect("the compiler starts")
}

fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vec_header");
    std::fs::create_dir_all(&dir).expect("a folder for the builds");
    dir.join(name)
}

/// Builds and runs the whole test program.
fn check(name: &str, isa: &[&str]) {
    let Some(cxx) = compiler() else {
        eprintln!("SKIPPED {name}: no C++ compiler (tried $CXX, c++, g++, clang++)");
        return;
    };
    let program = scratch(name);
    let source = crate_dir().join("tests/vec_header/test.cpp");
    let built = compile(&cxx, isa, &[], &source, &program);
    let diagnostics = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{name} does not build:\n{diagnostics}");
    let run = Command::new(&program).output().expect("the test program starts");
    let report = String::from_utf8_lossy(&run.stdout);
    eprintln!("{name}: {report}");
    assert!(run.status.success(), "{name}: {:?}\n{report}", run.status);
}

#[test]
fn native() {
    check("native", &["-march=native"]);
}

#[test]
fn baseline() {
    check("baseline", &[]);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2() {
    if !(std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma")) {
        eprintln!("SKIPPED avx2: this CPU has no AVX2 with FMA");
        return;
    }
    // Without -mf16c, so that the arithmetic for f16 runs at this width as well.
    check("avx2", &["-mavx2", "-mfma"]);
}

/// One function of each name, for vectors and scalars, in a shared object as the builder makes it.
fn leaf_source() -> String {
    let mut text = String::from("#include \"autokernel/vec.h\"\n");
    let unary = [
        "abs", "sqrt", "rsqrt", "recip", "exp", "expm1", "log", "log1p", "tanh", "erf", "sigmoid", "sin",
        "cos", "floor", "ceil", "trunc", "round",
    ];
    for (lane, element) in
        [("ak::vf", "float"), ("ak::vd", "double"), ("float", "float"), ("double", "double")]
    {
        let id = lane.replace("ak::", "");
        for name in unary {
            let _ = writeln!(
                text,
                "extern \"C\" void {name}_{id}({element}* p) {{ ak::store_from(p, ak::{name}(ak::load_as<{lane}>(p))); }}"
            );
        }
        for stored in
            ["float", "double", "ak::bf16", "ak::f16", "int8_t", "uint8_t", "int32_t", "int64_t", "bool"]
        {
            let own = stored.replace("ak::", "");
            let _ = writeln!(
                text,
                "extern \"C\" void copy_{id}_{own}(const {stored}* a, {stored}* b, int n) {{ \
                 auto x = ak::load_partial_as<{lane}>(a, n); ak::store_partial_from(b, ak::pow(x, ak::load_as<{lane}>(a)), n); \
                 ak::scatter(b, 3, ak::gather<{lane}>(a, 2, n), n); }}"
            );
        }
    }
    text
}

/// The names of instructions in GCC and those in `<immintrin.h>` must mean the same.
#[cfg(target_arch = "x86_64")]
#[test]
fn both_spellings_of_an_instruction_make_the_same_code() {
    let Some(cxx) = compiler() else {
        eprintln!("SKIPPED: no C++ compiler");
        return;
    };
    let source = scratch("spelling.cpp");
    std::fs::write(&source, leaf_source()).expect("the source is written");
    for isa in [&["-march=native"][..], &["-march=x86-64-v3"], &[]] {
        let code = |name: &str, extra: &[&str]| {
            let object = scratch(name);
            let built =
                compile(&cxx, isa, &[&["-c", "-fno-ident", "-Wall"], extra].concat(), &source, &object);
            assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
            std::fs::read(object).expect("the object is read")
        };
        let (ours, theirs) = (code("spelling.o", &[]), code("spelling.o", &["-DAK_IMMINTRIN"]));
        assert!(ours == theirs, "the code differs with {isa:?}");
    }
}

/// A kernel may import libm and the mem* functions, and must carry no state and no constructors.
#[test]
fn leaf_code() {
    let (Some(cxx), true) = (compiler(), Command::new("nm").arg("--version").output().is_ok()) else {
        eprintln!("SKIPPED leaf_code: needs a C++ compiler and nm");
        return;
    };
    let (source, object) = (scratch("leaf.cpp"), scratch("leaf.so"));
    std::fs::write(&source, leaf_source()).expect("the source is written");
    let shared = ["-fPIC", "-shared", "-nostartfiles", "-nodefaultlibs", "-Wall", "-Wextra", "-Werror"];
    for isa in [&["-march=native"][..], &[]] {
        let built = compile(&cxx, isa, &shared, &source, &object);
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let listed = Command::new("nm").arg(&object).output().expect("nm starts");
        for line in String::from_utf8_lossy(&listed.stdout).lines() {
            let mut words = line.split_whitespace().rev();
            let (symbol, kind) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let linker = symbol.starts_with('_') && !symbol.starts_with("_ZN");
            match kind {
                "U" => assert!(
                    ["memcpy", "memset", "memmove", "erf", "sin", "cos", "pow", "sinf", "cosf"]
                        .contains(&symbol),
                    "imports {symbol} with {isa:?}"
                ),
                "B" | "b" | "D" | "d" => assert!(linker, "{symbol} is writable data with {isa:?}"),
                _ => assert!(kind != "I" && kind != "i", "{symbol} is an ifunc"),
            }
        }
    }
}
