//! The builder: what a compiler may do, and what it says.

use std::time::{Duration, Instant};

use autokernel_core::kernel_file::Params;
use autokernel_worker::toolchain::{BuildError, BuildLimits};

use crate::{kernel_file, toolchain, try_build};

fn refused(source: &str) -> String {
    match try_build(source) {
        Err(BuildError::Compiler { diagnostics }) => diagnostics,
        other => panic!("expected the compiler's refusal, got {other:?}"),
    }
}

#[test]
fn detection_names_compiler_and_processor() {
    let toolchain = toolchain();
    assert!(toolchain.cxx.starts_with('/') && !toolchain.version.is_empty() && !toolchain.isa.is_empty());
}

#[test]
fn equal_sources_give_equal_artefacts() {
    let source = "extern \"C\" void k(const float* a, float* b, int64_t, int64_t) { b[0] = a[0]; }";
    let (a, b) = (try_build(source).unwrap(), try_build(source).unwrap());
    assert_eq!(a.id, b.id);
    assert_eq!(a.id.len(), 64);
}

#[test]
fn errors_have_line_numbers_and_no_host_paths() {
    let text = refused("int x = undefined_name;\n#include <vector>\nstd::vector<int&> v;\n");
    assert!(text.contains("kernel.cpp:10:"), "{text}");
    assert!(text.contains("undefined_name"));
    assert!(!text.contains("/usr") && !text.contains("/tmp"), "{text}");
    assert!(text.len() <= 8192);
}

#[test]
fn files_outside_cannot_be_read() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "#error the secret text\n").unwrap();
    let path = secret.path().display();
    for source in [
        "#include \"/etc/passwd\"\n".to_owned(),
        format!("#include \"{path}\"\n"),
        format!("asm(\".incbin \\\"{path}\\\"\");\n"),
        "asm(\".incbin \\\"/etc/hostname\\\"\");\n".to_owned(),
        "asm(\".incbin \\\"/proc/self/environ\\\"\");\n".to_owned(),
        // Endless, and once the end of all memory.
        "#include \"/dev/zero\"\n".to_owned(),
    ] {
        let text = refused(&source);
        assert!(
            text.contains("denied") || text.contains("can't open") || text.contains("not found"),
            "{text}"
        );
        assert!(!text.contains("the secret text") && !text.contains("root:"), "{text}");
    }
}

#[test]
fn a_template_bomb_is_stopped() {
    let bomb = "template<int N, unsigned M> struct T { static constexpr unsigned v = T<N-1, 2*M>::v + T<N-1, 2*M+1>::v; };\n\
                template<unsigned M> struct T<0, M> { static constexpr unsigned v = M; };\n\
                unsigned x = T<26, 1>::v;\n";
    let limits = BuildLimits { wall: Duration::from_secs(2), ..BuildLimits::default() };
    let start = Instant::now();
    let result = toolchain().build(&kernel_file(bomb), &Params::new(), &limits);
    assert!(matches!(result, Err(BuildError::Timeout { .. })), "{result:?}");
    assert!(start.elapsed() < Duration::from_secs(8));
}

#[test]
fn parameters_are_macros_and_the_header_is_found() {
    let mut file = kernel_file(
        "#include \"autokernel/vec.h\"\nstatic_assert(BLOCK == 16);\nextern \"C\" void k(const float*, float* b, int64_t, int64_t) { b[0] = BLOCK; }",
    );
    file.params.insert("BLOCK".to_owned(), vec![16, 32]);
    let built = |value| {
        toolchain().build(&file, &Params::from([("BLOCK".to_owned(), value)]), &BuildLimits::default())
    };
    built(16).unwrap();
    assert!(matches!(built(32), Err(BuildError::Compiler { .. })));
    assert!(matches!(built(64), Err(BuildError::Params(_))));
}
