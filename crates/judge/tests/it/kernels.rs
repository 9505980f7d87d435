//! Kernels for `out[i][j] = x[i][j] / sqrt(mean_j(x[i][j]^2) + eps) * w[j]`: right ones and wrong ones.

use autokernel_core::verdict::Stage;

/// A kernel file around the body of `k(x, w, out, s, rows, cols, threads)`; `s` is a scratch of 64 words.
pub(crate) fn kernel(body: &str) -> String {
    format!(
        r#"/*@ autokernel 1
language = "c++"
[scratch]
s = {{ dtype = "i64", size = "64" }}
[[launch]]
entry = "k"
args = ["in0", "in1", "out0", "s", "in0.size(0)", "in0.size(1)", "threads"]
@*/
#include <cstdint>
#include <cmath>
#include <cstring>
static inline float scale(const float* x, int64_t n) {{
    float sum = 0;
    for (int64_t j = 0; j < n; j++) sum += x[j] * x[j];
    return 1.0f / std::sqrt(sum / (float)n + 1e-6f);
}}
static inline void row(const float* x, const float* w, float* out, int64_t n) {{
    float f = scale(x, n);
    for (int64_t j = 0; j < n; j++) out[j] = x[j] * f * w[j];
}}
extern "C" void k(const float* x, const float* w, float* out, int64_t* s, int64_t rows, int64_t cols, int64_t threads) {{
    (void)x; (void)w; (void)out; (void)s; (void)rows; (void)cols; (void)threads;
{body}
}}
"#
    )
}

pub(crate) const HONEST: &[(&str, &str)] = &[
    ("plain", "for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);"),
    (
        "threads",
        "#pragma omp parallel for num_threads(threads)\nfor (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);",
    ),
    (
        "repeated",
        "for (int r = 0; r < 12; r++) { asm volatile(\"\" ::: \"memory\"); for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols); }",
    ),
    (
        "scratch",
        "for (int64_t i = 0; i < rows; i++) { float f = scale(x + i * cols, cols); memcpy(s, &f, 4); row(x + i * cols, w, out + i * cols, cols); }",
    ),
];

pub(crate) const WRONG: &[(&str, Stage, &str)] = &[
    ("does not compile", Stage::Build, "this is no C++;"),
    (
        "keeps state",
        Stage::Admission,
        "static int64_t calls = 0; if (calls++ < 100) for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);",
    ),
    (
        "calls the system",
        Stage::Admission,
        "struct S { static int run() { int r; asm volatile(\"call system@PLT\" : \"=a\"(r)); return r; } }; out[0] = (float)S::run();",
    ),
    ("zeros", Stage::Correctness, "memset(out, 0, (size_t)(rows * cols) * 4);"),
    ("constant", Stage::Correctness, "for (int64_t i = 0; i < rows * cols; i++) out[i] = 0.01f;"),
    ("nothing written", Stage::Correctness, ""),
    (
        "half of the rows",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows / 2; i++) row(x + i * cols, w, out + i * cols, cols);",
    ),
    (
        "last element dropped",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);\nout[rows * cols - 1] = 0;",
    ),
    (
        "last column not summed",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows; i++) { float f = scale(x + i * cols, cols - 1); for (int64_t j = 0; j < cols; j++) out[i * cols + j] = x[i * cols + j] * f * w[j]; }",
    ),
    (
        "bf16 inputs",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows; i++) { float f = scale(x + i * cols, cols); for (int64_t j = 0; j < cols; j++) { uint32_t b; memcpy(&b, x + i * cols + j, 4); b = (b + 0x8000) & 0xffff0000u; float v; memcpy(&v, &b, 4); out[i * cols + j] = v * f * w[j]; } }",
    ),
    (
        "no epsilon",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows; i++) { float sum = 0; for (int64_t j = 0; j < cols; j++) sum += x[i * cols + j] * x[i * cols + j]; float f = 1.0f / std::sqrt(sum / (float)cols); for (int64_t j = 0; j < cols; j++) out[i * cols + j] = x[i * cols + j] * f * w[j]; }",
    ),
    (
        "reads past its input",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows; i++) { float f = scale(x + i * cols + 1, cols); for (int64_t j = 0; j < cols; j++) out[i * cols + j] = x[i * cols + j] * f * w[j]; }",
    ),
    (
        "NaN left out of the sum",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows; i++) { float sum = 0; for (int64_t j = 0; j < cols; j++) { float v = x[i * cols + j]; sum += v == v ? v * v : 0; } float f = 1.0f / std::sqrt(sum / (float)cols + 1e-6f); for (int64_t j = 0; j < cols; j++) out[i * cols + j] = x[i * cols + j] * f * w[j]; }",
    ),
    (
        "right at aligned inputs only",
        Stage::Correctness,
        "if ((uintptr_t)x % 16) return; for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);",
    ),
    (
        "right at equally aligned inputs only",
        Stage::Correctness,
        "if (((uintptr_t)x ^ (uintptr_t)w) % 64) return; for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);",
    ),
    (
        "aligned loads",
        Stage::Run,
        "typedef float V __attribute__((vector_size(16))); V v = *(const V*)(const void*)x; asm volatile(\"\" :: \"x\"(v)); for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);",
    ),
    (
        "adds to what was there",
        Stage::Correctness,
        "for (int64_t i = 0; i < rows; i++) { float f = scale(x + i * cols, cols); for (int64_t j = 0; j < cols; j++) out[i * cols + j] = out[i * cols + j] * 0.0f + x[i * cols + j] * f * w[j]; }",
    ),
    (
        "writes past its output",
        Stage::Memory,
        "for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);\nout[rows * cols] = 1.0f;",
    ),
    (
        "writes far before its output",
        Stage::Memory,
        "for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);\nout[-5000] = 1.0f;",
    ),
    (
        "writes to its input",
        Stage::Run,
        "for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);\n*(volatile float*)(uintptr_t)x = 0;",
    ),
    ("null pointer", Stage::Run, "*(volatile float*)(uintptr_t)16 = 1.0f;"),
    ("endless", Stage::Run, "for (;;) asm volatile(\"\" ::: \"memory\");"),
    (
        "sets flush to zero",
        Stage::Admission,
        "for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);\n#if defined(__x86_64__)\nunsigned c; asm volatile(\"stmxcsr %0\" : \"=m\"(c)); c |= 0x8040; asm volatile(\"ldmxcsr %0\" :: \"m\"(c));\n#else\nuint64_t c; asm volatile(\"mrs %0, fpcr\" : \"=r\"(c)); c |= 1u << 24; asm volatile(\"msr fpcr, %0\" :: \"r\"(c));\n#endif",
    ),
    (
        "depends on unwritten scratch",
        Stage::Determinism,
        "for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);\nuint64_t h = 0; for (int j = 0; j < 64; j++) h = h * 31 + (uint64_t)s[j];\nfor (int j = 0; j < 32; j++) { uint32_t b; memcpy(&b, out + 7 + j, 4); b ^= (uint32_t)(h >> j) & 1; memcpy(out + 7 + j, &b, 4); }",
    ),
    (
        "stops working after some calls",
        Stage::Timed,
        // Seven calls a checked batch, one of each set.
        "if (s[0] != 42) { s[0] = 42; s[1] = 0; }\nif (s[1]++ < 7) for (int64_t i = 0; i < rows; i++) row(x + i * cols, w, out + i * cols, cols);",
    ),
];
