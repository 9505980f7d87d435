//! Admission of artefacts that real compilers made, and of nonsense.

use std::process::Command;

use autokernel_worker::admission::{AdmissionError, Forbidden, admit};
use proptest::prelude::*;

use crate::{build, build_body};

fn verdict(source: &str) -> Result<(), AdmissionError> {
    admit(&build(source).bytes, &["k"])
}

const K: &str = "extern \"C\" void k(const float* in, float* out, int64_t n, int64_t threads)";

#[test]
fn honest_kernels_are_admitted() {
    for body in [
        "for (int64_t i = 0; i < n; i++) out[i] = 2 * in[i];",
        "static const float table[5] = {1, 2, 3, 4, 5}; for (int64_t i = 0; i < n; i++) out[i] = in[i] * table[i % 5];",
        "static constexpr const char* names[] = {\"a\", \"b\"}; for (int64_t i = 0; i < n; i++) out[i] = names[i % 2][0];",
        "#pragma omp parallel for num_threads(threads) schedule(static)\nfor (int64_t i = 0; i < n; i++) out[i] = expf(in[i]);",
        "#pragma omp parallel for num_threads(threads) schedule(dynamic, 64)\nfor (int64_t i = 0; i < n; i++) out[i] = erff(in[i]);",
        "#pragma omp parallel num_threads(threads)\n{\n#pragma omp for\nfor (int64_t i = 0; i < n; i++) out[i] = tanhf(in[i]);\n#pragma omp barrier\n}",
        "double s = 0;\n#pragma omp parallel for num_threads(threads) reduction(+:s)\nfor (int64_t i = 0; i < n; i++) s += in[i];\nout[0] = (float)s;",
        "memcpy(out, in, n * 4); memset(out, 0, n); out[0] += memcmp(in, out, n);",
        "out[0] = (float)((__int128)n * n / (threads + 1));",
        // Jump tables, pointers to functions, x87 rounding, half precision, wide integers, string moves.
        "for (int64_t i = 0; i < n; i++) switch ((int)in[i]) { case 0: out[i] = expf(in[i]); break; case 1: out[i] = 7; break; case 2: out[i] = erff(in[i]); break; case 3: out[i] = in[0]; break; case 4: out[i] = tanhf(in[i]); break; case 5: out[i] = -1; break; default: out[i] = 0; }",
        "static float (*const table[3])(float) = {expf, erff, tanhf}; for (int64_t i = 0; i < n; i++) out[i] = table[i % 3](in[i]);",
        "long double s = 0; for (int64_t i = 0; i < n; i++) s += __builtin_floorl(in[i]) + __builtin_rintl(s); out[0] = (float)s; out[1] = (float)(long)s;",
        "for (int64_t i = 0; i < n; i++) out[i] = (float)(_Float16)in[i];",
        "double s = 0; for (int64_t i = 0; i < n; i++) s += (double)(unsigned __int128)(in[i] * 1e20f); out[0] = (float)s;",
        "for (int64_t i = 0; i < n; i++) { out[i] = __builtin_popcountll((uint64_t)in[i]) + __builtin_ctzll(i + 1); __builtin_prefetch(in + i + 64); }",
        "if (n < 0) __builtin_trap(); if (threads < 0) __builtin_unreachable(); __builtin_memset(out, 0, (size_t)n * 4);",
        "volatile float big[1 << 16]; for (int64_t i = 0; i < n; i++) { big[i & 0xffff] = in[i]; out[i] = big[(i * 7) & 0xffff]; }",
        "#pragma omp parallel for num_threads(threads)\nfor (int64_t i = 0; i < n; i++) {\n#pragma omp atomic\nout[0] += in[i];\n}",
    ] {
        assert_eq!(admit(&build_body(body).bytes, &["k"]), Ok(()), "{body}");
    }
}

#[test]
fn imports_outside_the_list_are_named() {
    for (declaration, call, name) in [
        ("int printf(const char*, ...);", "printf(\"%d\", (int)n);", "printf"),
        ("int system(const char*);", "system(\"id\");", "system"),
        ("void* dlopen(const char*, int);", "dlopen(\"x\", 1);", "dlopen"),
        ("void* malloc(unsigned long);", "out[0] = (float)(uint64_t)malloc(n);", "malloc"),
        ("long syscall(long, ...);", "syscall(1);", "syscall"),
        ("int omp_get_max_threads();", "out[0] = omp_get_max_threads();", "omp_get_max_threads"),
        ("void weak() __attribute__((weak));", "if (weak) weak();", "weak"),
    ] {
        let source = format!("extern \"C\" {{ {declaration} }}\n{K} {{ {call} }}");
        assert_eq!(verdict(&source), Err(AdmissionError::Import(name.to_owned())));
    }
}

#[test]
fn state_between_calls_is_refused() {
    for source in [
        format!("{K} {{ static int64_t calls; out[0] = ++calls; }}"),
        format!("static float cache[1000] = {{1}};\n{K} {{ cache[n] = in[0]; out[0] = cache[threads]; }}"),
        format!("float* kept = nullptr;\n{K} {{ if (!kept) kept = out; kept[0] = 1; }}"),
    ] {
        assert_eq!(verdict(&source), Err(AdmissionError::WritableData), "{source}");
    }
    let local = format!("thread_local int64_t calls;\n{K} {{ out[0] = ++calls; }}");
    assert!(
        matches!(verdict(&local), Err(AdmissionError::ThreadLocal | AdmissionError::Import(_))),
        "{:?}",
        verdict(&local)
    );
    let local = format!(
        "static __thread int64_t calls __attribute__((tls_model(\"initial-exec\")));\n{K} {{ out[0] = ++calls; }}"
    );
    assert!(
        matches!(verdict(&local), Err(AdmissionError::ThreadLocal | AdmissionError::Dynamic(_))),
        "{:?}",
        verdict(&local)
    );
}

#[test]
fn nothing_may_run_at_load() {
    let honest = format!("{K} {{ out[0] = 1; }}");
    for (extra, expected) in [
        ("__attribute__((constructor)) static void early() { asm volatile(\"nop\"); }", "DT_INIT_ARRAY"),
        ("__attribute__((destructor)) static void late() { asm volatile(\"nop\"); }", "DT_FINI_ARRAY"),
        (
            "static void early() { asm volatile(\"nop\"); }\n__attribute__((section(\".init_array\"), used)) static void (*hook)() = early;",
            "DT_INIT_ARRAY",
        ),
        ("extern \"C\" void _init() { asm volatile(\"nop\"); }", "DT_INIT"),
        ("extern \"C\" void _fini() { asm volatile(\"nop\"); }", "DT_FINI"),
        ("asm(\".section .init_array,\\\"aw\\\"\\n.quad k\\n.previous\");", "DT_INIT_ARRAY"),
    ] {
        assert_eq!(
            verdict(&format!("{honest}\n{extra}")),
            Err(AdmissionError::Constructor(expected)),
            "{extra}"
        );
    }
    let resolver = "static void real() {}\nextern \"C\" void* pick() { return (void*)real; }\nextern \"C\" void chosen() __attribute__((ifunc(\"pick\")));";
    assert!(matches!(verdict(&format!("{resolver}\n{honest}")), Err(AdmissionError::Ifunc(_))));
    let hidden = "static void real() {}\nextern \"C\" void* pick() { return (void*)real; }\nstatic void chosen() __attribute__((ifunc(\"pick\")));";
    let source = format!("{hidden}\n{K} {{ chosen(); }}");
    assert!(matches!(verdict(&source), Err(AdmissionError::Ifunc(_))), "{:?}", verdict(&source));
}

#[test]
fn entries_must_be_exported_functions() {
    let bytes =
        build(&format!("{K} {{ out[0] = 1; }}\nextern \"C\" const int data = 3;\nstatic void quiet() {{}}"))
            .bytes;
    assert_eq!(admit(&bytes, &["k"]), Ok(()));
    for name in ["other", "data", "quiet", ""] {
        assert_eq!(admit(&bytes, &["k", name]), Err(AdmissionError::NoEntry(name.to_owned())));
    }
}

/// Links a small kernel by hand, with flags that the builder would never pass.
fn linked(flags: &[&str]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("k.cpp");
    std::fs::write(&source, "extern \"C\" void k(const float* in, float* out) { out[0] = in[0]; }").unwrap();
    let out = folder.path().join("k.so");
    let base = ["-O1", "-shared", "-fPIC", "-nostartfiles", "-nodefaultlibs", "-Wl,-z,now", "-Wl,-z,relro"];
    let done = Command::new("c++").args(base).args(flags).arg(&source).arg("-o").arg(&out).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    std::fs::read(out).unwrap()
}

#[test]
fn dangerous_link_options_are_refused() {
    assert_eq!(admit(&linked(&[]), &["k"]), Ok(()));
    assert_eq!(admit(&linked(&["-Wl,-z,execstack"]), &["k"]), Err(AdmissionError::ExecutableStack));
    assert_eq!(admit(&linked(&["-Wl,--no-as-needed", "-lm"]), &["k"]), Err(AdmissionError::Needed));
    for flags in [
        &["-Wl,-rpath,/tmp"][..],
        &["-Wl,--disable-new-dtags,-rpath,/tmp"],
        &["-Wl,--audit=/tmp/a.so"],
        &["-Wl,-z,nodelete"],
    ] {
        assert!(matches!(admit(&linked(flags), &["k"]), Err(AdmissionError::Dynamic(_))), "{flags:?}");
    }
    assert_eq!(admit(&linked(&["-Wl,-z,norelro"]), &["k"]), Err(AdmissionError::WritableData));
    assert_eq!(admit(&linked(&["-Wl,-init=k"]), &["k"]), Err(AdmissionError::Constructor("DT_INIT")));
    let object = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    assert!(admit(&object, &["k"]).is_err(), "this very program");
}

#[test]
fn nonsense_is_refused_with_a_reason() {
    assert!(matches!(admit(&[], &[]), Err(AdmissionError::Malformed(_))));
    assert!(matches!(admit(b"\x7fELF", &[]), Err(AdmissionError::Malformed(_))));
    let good = linked(&[]);
    let mut other = good.clone();
    other[18] = 0x28;
    assert_eq!(admit(&other, &["k"]), Err(AdmissionError::OtherMachine));
    let mut executable = good;
    executable[16] = 2;
    assert_eq!(admit(&executable, &["k"]), Err(AdmissionError::NotSharedObject));
}

/// Where the program header of the first segment of a kind stands.
fn header_of(bytes: &[u8], kind: u32) -> usize {
    let count = usize::from(u16::from_le_bytes(bytes[56..58].try_into().unwrap()));
    let mut headers = (0..count).map(|n| 64 + n * 56);
    headers.find(|at| bytes[*at..at + 4] == kind.to_le_bytes()).unwrap()
}

#[test]
fn what_lies_elsewhere_than_the_loader_looks_is_refused() {
    const LOAD: u32 = 1;
    const DYNAMIC: u32 = 2;
    let good = sample().to_vec();
    assert_eq!(admit(&good, &["k"]), Ok(()));
    let dynamic = header_of(&good, DYNAMIC);
    let file_offset = |bytes: &[u8]| u64::from_le_bytes(bytes[dynamic + 8..dynamic + 16].try_into().unwrap());
    // The loader goes by the address, so the offset may say anything and hides nothing.
    let mut moved = good.clone();
    moved[dynamic + 8..dynamic + 16].copy_from_slice(&8_u64.to_le_bytes());
    assert_eq!(admit(&moved, &["k"]), Ok(()));
    let mut forged = good.clone();
    forged[dynamic + 16..dynamic + 24].copy_from_slice(&0_u64.to_le_bytes());
    assert!(admit(&forged, &["k"]).is_err(), "a dynamic section elsewhere in memory");

    let refused = |bytes: &[u8]| assert!(matches!(admit(bytes, &["k"]), Err(AdmissionError::Malformed(_))));
    let load = header_of(&good, LOAD);
    let mut out_of_place = good.clone();
    out_of_place[load + 8] = 8;
    refused(&out_of_place);
    let mut over_each_other = good.clone();
    let (first, second) = (over_each_other[load..load + 56].to_vec(), load + 56);
    over_each_other[second..second + 56].copy_from_slice(&first);
    refused(&over_each_other);
    let mut shorter = good.clone();
    shorter[load + 40..load + 48].copy_from_slice(&8_u64.to_le_bytes());
    refused(&shorter);

    // One tag in the place of another: the first says it, too.
    let at = file_offset(&good) as usize;
    let mut twice = good.clone();
    let tag = twice[at..at + 8].to_vec();
    twice[at + 16..at + 24].copy_from_slice(&tag);
    refused(&twice);
}

fn sample() -> &'static [u8] {
    static SAMPLE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    SAMPLE.get_or_init(|| {
        build_body("#pragma omp parallel for num_threads(threads)\nfor (int64_t i = 0; i < n; i++) out[i] = expf(in[i]);").bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = admit(&bytes, &["k"]);
    }

    #[test]
    fn mutated_artefacts_never_panic(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        header in any::<bool>(),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = sample().to_vec();
        // Headers and the dynamic section steer everything, so half of the cases aim at those.
        let reach = if header { 0x300.min(bytes.len()) } else { bytes.len() };
        for (at, value) in edits {
            bytes[at.index(reach)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(sample().len()));
        }
        let _ = admit(&bytes, &["k"]);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn instructions_that_no_kernel_needs_are_named() {
    let instruction = |text: &str| {
        verdict(&format!(
            "{K} {{ if (n > 1) asm volatile(\"{text}\" : : \"a\"(out), \"c\"(in) : \"rdx\", \"rbx\", \"memory\"); }}"
        ))
    };
    for (text, expected) in [
        ("syscall", Forbidden::SystemCall),
        ("int $0x80", Forbidden::SystemCall),
        ("sysenter", Forbidden::SystemCall),
        ("rdtsc", Forbidden::Clock),
        ("rdtscp", Forbidden::Clock),
        ("cpuid", Forbidden::Machine),
        ("xgetbv", Forbidden::Machine),
        ("rdrand %%eax", Forbidden::Machine),
        ("ldmxcsr (%%rax)", Forbidden::Control),
        ("vldmxcsr (%%rax)", Forbidden::Control),
        ("fldenv (%%rax)", Forbidden::Control),
        ("xrstor (%%rax)", Forbidden::Control),
        ("wrpkru", Forbidden::Control),
        ("mov %%fs:0, %%rax", Forbidden::ThreadLocal),
        ("movl $1, %%gs:(%%rax)", Forbidden::ThreadLocal),
        ("rdfsbase %%rax", Forbidden::ThreadLocal),
        ("wrgsbase %%rax", Forbidden::ThreadLocal),
        ("lret", Forbidden::Mode),
        ("clflush (%%rax)", Forbidden::Cache),
        ("xbegin 1f; 1:", Forbidden::Transaction),
    ] {
        assert!(
            matches!(instruction(text), Err(AdmissionError::Instruction(_, kind)) if kind == expected),
            "{text}: {:?}",
            instruction(text)
        );
    }
    for text in ["pause", "sfence", "stmxcsr (%%rax)", "prefetchnta (%%rax)", "nop", "fnstcw (%%rax)"] {
        assert_eq!(instruction(text), Ok(()), "{text}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn code_is_code_and_branches_stay_in_it() {
    let with = |text: &str| {
        verdict(&format!("{K} {{ asm volatile(\"{text}\" : : : \"rax\", \"memory\"); out[0] = 1; }}"))
    };
    // Into the middle of another instruction, out of the artefact, bytes of no instruction.
    for text in ["jmp 1f + 1; 1: movl $0x90c3050f, %%eax", "jmp . + 0x100000", "call . - 0x4000"] {
        assert!(matches!(with(text), Err(AdmissionError::Branch(_))), "{text}: {:?}", with(text));
    }
    assert!(matches!(with("jmp 1f; .byte 0x06; 1:"), Err(AdmissionError::Unreadable(_))));
    assert!(matches!(with("jmp *in_text(%%rip); in_text: .quad 0"), Err(AdmissionError::Branch(_))));
    // A function of whose start the table says something else, and a pointer into an instruction.
    let off = format!(
        "{K} {{ out[0] = 1; }}\nasm(\".globl odd\\n.type odd, @function\\n.set odd, inner + 1\\n.text\\ninner: movl $0x90c3050f, %eax; ret\");"
    );
    assert!(matches!(verdict(&off), Err(AdmissionError::Branch(_))), "{:?}", verdict(&off));
    let pointer = format!(
        "{K} {{ out[0] = 1; }}\nasm(\".section .data.rel.ro, \\\"aw\\\"\\n.quad inner + 1\\n.text\\ninner: movl $0x90c3050f, %eax; ret\");"
    );
    assert!(matches!(verdict(&pointer), Err(AdmissionError::Branch(_))), "{:?}", verdict(&pointer));
    // Code in a section of its own is looked at like any other.
    let other = format!("{K} {{ out[0] = 1; }}\nasm(\".section hidden, \\\"ax\\\"\\nsyscall\\n.text\");");
    assert!(matches!(verdict(&other), Err(AdmissionError::Instruction(..))), "{:?}", verdict(&other));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn code_that_no_section_speaks_of_is_found() {
    let mut bytes = build(&format!("{K} {{ out[0] = expf(in[0]); }}")).bytes;
    assert_eq!(admit(&bytes, &["k"]), Ok(()));
    // The flag that says "code" is taken from every section header: the code is still there.
    let table = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
    let count = usize::from(u16::from_le_bytes(bytes[60..62].try_into().unwrap()));
    for header in 0..count {
        bytes[table + 64 * header + 8] &= !4;
    }
    assert!(
        matches!(admit(&bytes, &["k"]), Err(AdmissionError::Unreadable(_))),
        "{:?}",
        admit(&bytes, &["k"])
    );
}
