//! Products as the text of a C++ kernel file; see [`mod@crate::product`] for the idea.
//!
//! The text of the multiplication is fixed and its sizes are constants before it. What follows a
//! product is written like one pass over rows, of which a call sees the columns of one tile.

use std::fmt::Write as _;

use autokernel_core::dtype::Dtype;
use autokernel_core::region::Region;

use super::{Emitter, c_type};
use crate::loops::Program;
use crate::product::{Plan, Products};
use crate::schedule;

const PACK: &str = "\
template <int X> struct number { static constexpr int value = X; };

// The first row of a panel: the tall ones stand first.
AK_FN int64_t row_of(int64_t p) { return p * TALL - (p > TALLS ? p - TALLS : 0); }

// Calls f with the number of rows of panel p.
template <class F> AK_FN void with_height(int64_t p, F f) {
    if constexpr (TALL > 1) {
        if (p >= TALLS) return f(number<TALL - 1>{});
    }
    f(number<TALL>{});
}

// Strips from to to of the right operand, element (k, j) at k * SK + j * SN: NR columns, one k after another.
template <int64_t SK, int64_t SN> AK_FN void pack_right(const B* __restrict w, B* __restrict out, int64_t from, int64_t to) {
    for (int64_t q = from; q < to; ++q) {
        const int64_t wide = ROW - q * NR < NR ? ROW - q * NR : NR;
        // So few terms at a time that what is written stays in the first-level cache.
        for (int64_t first = 0; first < DEPTH; first += 16) {
            const int64_t last = first + 16 < DEPTH ? first + 16 : DEPTH;
            B* const strip = out + q * DEPTH * NR;
            if constexpr (SN == 1) {
                for (int64_t k = first; k < last; ++k)
                    for (int64_t j = 0; j < wide; ++j) strip[k * NR + j] = w[k * SK + q * NR + j];
            } else {
                for (int64_t j = 0; j < wide; ++j)
                    for (int64_t k = first; k < last; ++k) strip[k * NR + j] = w[k * SK + (q * NR + j) * SN];
            }
            for (int64_t k = first; k < last; ++k)
                for (int64_t j = wide; j < NR; ++j) strip[k * NR + j] = B{};
        }
    }
}
template <int64_t SK, int64_t SN> AK_FN void pack_right(const B* w, B* out, int64_t threads) {
    const int64_t most = DEPTH * ROW / 65536, n = threads < most ? threads : most;
    if (n <= 1) return pack_right<SK, SN>(w, out, 0, STRIPS);
    #pragma omp parallel num_threads(int(n))
    {
        const int64_t t = omp_get_thread_num(), of = omp_get_num_threads();
        pack_right<SK, SN>(w, out, STRIPS * t / of, STRIPS * (t + 1) / of);
    }
}

// A panel of R rows of the left operand: R rows, one k after another.
template <int R> AK_FN void pack_left(const A* __restrict in, E* __restrict out) {
    for (int64_t first = 0; first < DEPTH; first += 16) {
        const int64_t last = first + 16 < DEPTH ? first + 16 : DEPTH;
        for (int i = 0; i < R; ++i)
            for (int64_t k = first; k < last; ++k) out[k * R + i] = load_as<E>(in + i * LEFT_ROW + k * LEFT_TERM);
    }
}

// Terms from to to of a tile: R rows of the left operand times one strip of each right operand, the sums in registers.
template <int R> AK_FN void multiply(const E* a, const B* const (&b)[S], E (*tile)[TALL][NR], int64_t from, int64_t to) {
    V sum[S][R][NV];
    #pragma GCC unroll 4
    for (int s = 0; s < S; ++s)
        #pragma GCC unroll 32
        for (int i = 0; i < R; ++i)
            #pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) sum[s][i][v] = V{};
    for (int64_t k = from; k < to; ++k) {
        V w[S][NV];
        #pragma GCC unroll 4
        for (int s = 0; s < S; ++s)
            #pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) w[s][v] = load_as<V>(b[s] + k * NR + v * N);
        #pragma GCC unroll 32
        for (int i = 0; i < R; ++i) {
            const V x = splat(a[k * R + i]);
            #pragma GCC unroll 4
            for (int s = 0; s < S; ++s)
                #pragma GCC unroll 8
                for (int v = 0; v < NV; ++v) sum[s][i][v] = fma(x, w[s][v], sum[s][i][v]);
        }
    }
    #pragma GCC unroll 4
    for (int s = 0; s < S; ++s)
        #pragma GCC unroll 32
        for (int i = 0; i < R; ++i)
            #pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) {
                E* const at = &tile[s][i][v * N];
                store_from(at, from == 0 ? sum[s][i][v] : load_as<V>((const E*)at) + sum[s][i][v]);
            }
}
// Sums of sums: in one chain the error would grow faster with the number of terms than a library's.
template <int R> AK_FN void multiply(const E* a, const B* const (&b)[S], E (*tile)[TALL][NR]) {
    for (int64_t k = 0; k < DEPTH; k += CHAIN) multiply<R>(a, b, tile, k, k + CHAIN < DEPTH ? k + CHAIN : DEPTH);
}
";

/// Terms that are added in one chain.
const CHAIN: u64 = 1024;

/// The text of a kernel file for a region with products.
pub(crate) fn emit_products(program: &Program, products: &Products, plan: &Plan, region: &Region) -> String {
    let schedule = schedule::epilogue(program);
    let mut emitter = Emitter::new(program, &schedule, region, Some(["from", "to"]));
    emitter.product_header(products, plan);
    emitter.prelude();
    emitter.product_constants(products);
    emitter.text.out.push_str(PACK);
    emitter.text.blank();
    emitter.finish();
    emitter.panels(products);
    emitter.product_entries(products);
    emitter.text.out
}

fn rights(products: &Products) -> Vec<String> {
    (0..products.right.len()).map(|number| format!("right{number}")).collect()
}

impl Emitter<'_> {
    fn product_header(&mut self, products: &Products, plan: &Plan) {
        let mut text = format!("/*@ autokernel 1\nlanguage = \"c++\"\nnote = \"{}\"\n[params]\n", plan.note);
        for (name, values) in &plan.params {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            let _ = writeln!(text, "{name} = [{}]", values.join(", "));
        }
        let element = if self.program.wide { Dtype::F64 } else { Dtype::F32 };
        let _ = writeln!(
            text,
            "[scratch]\nleft = {{ dtype = \"{}\", size = \"device.cores * MB * MR * {}\" }}",
            element.name(),
            plan.panel_row
        );
        let dtype = products.right_dtype.name();
        let mut steps = String::new();
        for (number, right) in products.right.iter().enumerate() {
            let args = format!("args = [\"in{}\", \"right{number}\", \"threads\"]", right.input);
            if self.region.inputs[right.input].constant {
                let _ = writeln!(
                    steps,
                    "[[prepare]]\noutput = \"right{number}\"\ndtype = \"{dtype}\"\nsize = \"{}\"\nentry = \"pack{number}\"\n{args}",
                    plan.packed
                );
            } else {
                let _ =
                    writeln!(text, "right{number} = {{ dtype = \"{dtype}\", size = \"{}\" }}", plan.packed);
                let _ = writeln!(steps, "[[launch]]\nentry = \"pack{number}\"\n{args}");
            }
        }
        let args: Vec<String> =
            self.args().into_iter().chain(rights(products)).map(|name| format!("\"{name}\"")).collect();
        let _ = writeln!(
            text,
            "{steps}[[launch]]\nentry = \"region\"\nargs = [{}, \"left\", \"threads\"]\n@*/",
            args.join(", ")
        );
        self.text.out.push_str(&text);
    }

    fn product_constants(&mut self, products: &Products) {
        let left = self.input_type(products.left.input);
        let right = c_type(products.right_dtype);
        let [row, term] = products.left.strides;
        let text = format!(
            "typedef {left} A;\ntypedef {right} B;\n\
             constexpr int S = {};\nconstexpr int64_t DEPTH = {}, CHAIN = {CHAIN}, LEFT_ROW = {row}, LEFT_TERM = {term};\n\
             // A tile must fit into the registers: 32 of them with AVX-512 and on aarch64, else 16.\n\
             #if defined(AK_AVX512) || defined(__aarch64__)\nconstexpr int FIT = 28 / (S * NV);\n\
             #else\nconstexpr int FIT = 12 / (S * NV);\n#endif\n\
             constexpr int MOST = FIT < 1 ? 1 : MR < FIT ? MR : FIT, NR = NV * N, U1 = NV;\n\
             constexpr int64_t PANELS = (ROWS + MOST - 1) / MOST, STRIPS = (ROW + NR - 1) / NR;\n\
             // Rows are dealt evenly: the first TALLS panels have TALL of them, the others one less.\n\
             constexpr int TALL = int((ROWS + PANELS - 1) / PANELS);\n\
             constexpr int64_t TALLS = ROWS - PANELS * (TALL - 1);\n\n",
            products.right.len(),
            products.depth,
        );
        self.text.out.push_str(&text);
    }

    /// What the region computes with a tile.
    fn finish(&mut self) {
        let tensors = self.tensors();
        self.text.line("// The rest of the region: rows begin to end, columns from to to.");
        self.text.line(&format!(
            "__attribute__((noinline)) void finish({tensors}, const E (*tile)[TALL][NR], int64_t begin, int64_t end, int64_t from, int64_t to) {{"
        ));
        self.text.line("for (int64_t r = begin; r < end; ++r) {");
        self.pointers();
        for pass in 0..self.schedule.passes.len() {
            self.scalars(pass);
            self.pass(pass);
        }
        self.text.line("}\n}");
        self.text.blank();
    }

    fn panels(&mut self, products: &Products) {
        let (tensors, args) = (self.tensors(), self.args().join(", "));
        let names = rights(products);
        let rights: Vec<String> = names.iter().map(|name| format!("const B* {name}, ")).collect();
        let strips: Vec<String> = names.iter().map(|name| format!("{name} + q * DEPTH * NR")).collect();
        self.text.line("// Panels first to last, strips from to to; left has room for MB panels.");
        self.text.line(&format!(
            "__attribute__((noinline)) void work({tensors}, {}E* left, int64_t first, int64_t last, int64_t from, int64_t to) {{",
            rights.concat()
        ));
        self.text.line("alignas(64) E tile[S][TALL][NR];");
        self.text.line("for (int64_t block = first; block < last; block += MB) {");
        self.text.line("const int64_t stop = block + MB < last ? block + MB : last;");
        self.text.line("for (int64_t p = block; p < stop; ++p) {");
        self.text.line("with_height(p, [&](auto height) __attribute__((always_inline)) {");
        self.text.line(&format!(
            "pack_left<height.value>(in{} + row_of(p) * LEFT_ROW, left + (p - block) * TALL * DEPTH);",
            products.left.input
        ));
        self.text.line("});\n}");
        self.text.line("for (int64_t q = from; q < to; ++q) {");
        self.text.line(&format!("const B* const strips[S] = {{{}}};", strips.join(", ")));
        self.text.line("const int64_t edge = (q + 1) * NR < ROW ? (q + 1) * NR : ROW;");
        self.text.line("for (int64_t p = block; p < stop; ++p) {");
        self.text.line("with_height(p, [&](auto height) __attribute__((always_inline)) {");
        self.text.line("multiply<height.value>(left + (p - block) * TALL * DEPTH, strips, tile);");
        self.text.line(&format!("finish({args}, tile, row_of(p), row_of(p) + height.value, q * NR, edge);"));
        self.text.line("});\n}\n}\n}\n}");
        self.text.blank();
        self.text.line("}  // namespace");
        self.text.blank();
    }

    fn product_entries(&mut self, products: &Products) {
        for (number, right) in products.right.iter().enumerate() {
            let [term, column] = right.strides;
            self.text.line(&format!(
                "extern \"C\" void pack{number}(const B* w, B* out, int64_t threads) {{ pack_right<{term}, {column}>(w, out, threads); }}"
            ));
        }
        let names = rights(products);
        let rights: Vec<String> = names.iter().map(|name| format!("const B* {name}, ")).collect();
        let args = format!("{}, {}", self.args().join(", "), names.join(", "));
        let tensors = self.tensors();
        self.text.line(&format!(
            "extern \"C\" void region({tensors}, {}E* left, int64_t threads) {{",
            rights.concat()
        ));
        self.text.line("int64_t n = ROWS * ROW * DEPTH * S / GRAIN;");
        self.text.line("n = n < threads ? n : threads;\nn = n < PANELS * STRIPS ? n : PANELS * STRIPS;");
        self.text.line("if (n <= 1) {");
        self.text.line(&format!("work({args}, left, 0, PANELS, 0, STRIPS);"));
        self.text.line("return;\n}");
        self.text.line("#pragma omp parallel num_threads(int(n))\n{");
        self.text.line("const int64_t t = omp_get_thread_num(), of = omp_get_num_threads();");
        self.text.line("int64_t across = SPLIT < of ? SPLIT : of;\nwhile (of % across) --across;");
        self.text.line("const int64_t down = of / across, y = t / across, x = t % across;");
        self.text.line(&format!(
            "work({args}, left + t * MB * TALL * DEPTH, PANELS * y / down, PANELS * (y + 1) / down, STRIPS * x / across, STRIPS * (x + 1) / across);"
        ));
        self.text.line("}\n}");
    }
}
