//! Kernels in which each lane has a row of its own: for reductions whose rows lie across memory.
//!
//! A block is `WIDTH` vectors of neighbouring rows. All passes walk down it; what is the same all along a row is
//! an array of them, and no reduction across lanes is needed.

use super::Emitter;
use super::pass::{combine, neutral};
use crate::loops::{Expr, Reduction, Store};

/// Steps down the rows that one set of accumulators sums.
const LONG: u64 = 512;

impl Emitter<'_> {
    pub(super) fn columns(&mut self) {
        let (tensors, args) = (self.tensors(), self.args().join(", "));
        self.text.line("constexpr int64_t BLOCKS = (ROW + WIDTH * N - 1) / (WIDTH * N);\n");
        self.text.line("// Rows first to first + U * N; of the last vector n lanes exist.");
        self.text.line("template <int U, class W>");
        let inlined = "__attribute__((always_inline)) inline";
        self.text
            .line(&format!("{inlined} void block(W whole, {tensors}, int64_t r, int64_t first, int n) {{"));
        self.pointers();
        for pass in 0..self.schedule.passes.len() {
            self.scalars(pass);
            self.column_pass(pass);
        }
        self.scalars(self.schedule.passes.len());
        for store in &self.program.stores {
            if let Store::Row(access, value) = store {
                let (base, value) = (self.base(access, true), self.stored(*value));
                let offset = self.around(access);
                let write = match access.strides.last().copied().unwrap_or(1) {
                    1 => format!("put<false>(whole, {base}{offset} + first + u * N, {value}, n)"),
                    stride => {
                        format!("scatter({base}{offset} + (first + u * N) * {stride}, {stride}, {value}, n)")
                    }
                };
                let line = format!("for (int u = 0; u < U; ++u) {write};");
                self.text.line(&line);
            }
        }
        self.text.line("}\n\n// Blocks begin to end.\ntemplate <bool NT>");
        self.text
            .line(&format!("__attribute__((noinline)) void work({tensors}, int64_t begin, int64_t end) {{"));
        self.text.line("for (int64_t b = begin; b < end; ++b) {");
        self.text.line("const int64_t r = b / BLOCKS;\nint64_t j = b % BLOCKS * WIDTH * N;");
        self.text.line("if (j + WIDTH * N <= ROW) {");
        self.text.line(&format!("block<WIDTH>(Whole{{}}, {args}, r, j, N);\ncontinue;\n}}"));
        self.text.line(&format!("for (; j + N <= ROW; j += N) block<1>(Whole{{}}, {args}, r, j, N);"));
        self.text.line(&format!("if (j < ROW) block<1>(Tail{{}}, {args}, r, j, int(ROW - j));"));
        self.text.line("}\n}\n\n}  // namespace\n");
    }

    fn column_pass(&mut self, pass: usize) {
        let reduces = self.schedule.passes[pass].reduces.clone();
        self.text.line(&format!("// Pass {} of {}.", pass + 1, self.schedule.passes.len()));
        let kind = |emitter: &Self, reduce: usize| emitter.program.reduces[reduce].kind;
        for reduce in &reduces {
            let start = neutral(kind(self, *reduce));
            self.text.line(&format!("V r{reduce}[U];\nfor (V& a : r{reduce}) a = splat({start});"));
        }
        self.begin_scans(pass);
        // Sums of sums, as along a row.
        let longest = self.program.outer.last().copied().unwrap_or(1);
        let sums: Vec<usize> =
            reduces.iter().copied().filter(|reduce| kind(self, *reduce) == Reduction::Sum).collect();
        let parts = longest > LONG && !sums.is_empty();
        let last = self.program.outer.len().saturating_sub(1);
        for (d, size) in self.program.outer.clone().into_iter().enumerate() {
            if parts && d == last {
                self.text.line(&format!("for (int64_t b = 0; b < {size}; b += {LONG}) {{"));
                self.text.line(&format!("const int64_t stop = b + {LONG} < {size} ? b + {LONG} : {size};"));
                for reduce in &sums {
                    self.text.line(&format!("V b{reduce}[U];\nfor (V& a : b{reduce}) a = splat(E(0));"));
                }
                self.text.line(&format!("for (int64_t i{d} = b; i{d} < stop; ++i{d}) {{"));
            } else {
                self.text.line(&format!("for (int64_t i{d} = 0; i{d} < {size}; ++i{d}) {{"));
            }
        }
        self.text.line("#pragma GCC unroll 16\nfor (int u = 0; u < U; ++u) {");
        self.text.line("const int64_t j = first + u * N;");
        for id in self.schedule.body(self.program, pass, 0) {
            let value = match self.expr(id) {
                Expr::Load(load) => self.load(load),
                _ => self.operation(id),
            };
            self.text.line(&format!("const auto v{} = {value};", id.0));
        }
        for reduce in &reduces {
            let body = self.lanes(self.program.reduces[*reduce].bodies[0]);
            let to = if parts && sums.contains(reduce) { 'b' } else { 'r' };
            let joined = combine(kind(self, *reduce), &format!("{to}{reduce}[u]"), &body);
            self.text.line(&format!("{to}{reduce}[u] = {joined};"));
        }
        for store in self.schedule.passes[pass].stores.clone() {
            self.store(store, 0);
        }
        self.text.line("}");
        if parts {
            self.text.line("}");
            for reduce in &sums {
                self.text.line(&format!("for (int u = 0; u < U; ++u) r{reduce}[u] += b{reduce}[u];"));
            }
        }
        self.end_loops();
    }
}
