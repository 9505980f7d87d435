//! Kernels in which several threads share one row: for a few long rows.
//!
//! Each pass is a function over a part of the row. Threads leave what their parts reduce to in an array on the
//! caller's stack; the caller joins it, in the order of the threads, before the next pass starts.

use super::pass::combine;
use super::{Emitter, FLAT_UNIT};
use crate::loops::Store;

/// Most threads that share a row.
const MOST: u64 = 64;

impl Emitter<'_> {
    pub(super) fn shared_rows(&mut self) {
        let tensors = self.tensors();
        let streams = self.streams();
        let found = "const E* found";
        for pass in 0..self.schedule.passes.len() {
            self.text.line("// Elements begin to end of row r.");
            self.text.line(&format!(
                "template <bool NT> __attribute__((noinline)) void pass{pass}({tensors}, int64_t r, int64_t begin, int64_t end, \
                 {found}, E* part) {{"
            ));
            self.pointers();
            self.found_before(pass);
            self.pass(pass);
            for reduce in self.schedule.passes[pass].reduces.clone() {
                self.text.line(&format!("part[{reduce}] = r{reduce};"));
            }
            if streams {
                self.text.line("if (NT) fence();");
            }
            self.text.line("}\n");
        }
        if self.program.stores.iter().any(|store| matches!(store, Store::Row(..))) {
            self.text.line(&format!("void finish({tensors}, int64_t r, {found}) {{"));
            self.pointers();
            self.found_before(self.schedule.passes.len());
            self.row_stores();
            self.text.line("}\n");
        }
        self.text.line("}  // namespace\n");
        self.share();
    }

    /// Results of passes before `pass`, and everything that follows from them.
    fn found_before(&mut self, pass: usize) {
        for before in 0..pass {
            for reduce in self.schedule.passes[before].reduces.clone() {
                self.text.line(&format!("const E r{reduce} = found[{reduce}];"));
            }
        }
        for stage in 0..=pass {
            self.scalars(stage);
        }
    }

    fn share(&mut self) {
        let (args, tensors) = (self.args().join(", "), self.tensors());
        self.text.line(&format!("extern \"C\" void region({tensors}, int64_t threads) {{"));
        self.declare_streaming();
        self.text.line(&format!("constexpr int64_t UNITS = (ROW + {FLAT_UNIT} - 1) / {FLAT_UNIT};"));
        self.text.line("int64_t n = POINTS / GRAIN;\nn = n < threads ? n : threads;");
        self.text.line(&format!("n = n < UNITS ? n : UNITS;\nn = n < {MOST} ? n : {MOST};"));
        let results = self.program.reduces.len().max(1).next_multiple_of(16);
        self.text.line(&format!("alignas(64) E part[{MOST}][{results}];\nE found[{results}];"));
        self.text.line("int64_t team = 1;\nfor (int64_t r = 0; r < ROWS; ++r) {");
        for pass in 0..self.schedule.passes.len() {
            let call = |range: &str, part: &str| {
                self.streaming_call(&format!("pass{pass}"), &format!("{args}, r, {range}, found, {part}"))
            };
            let (alone, together) = (call("0, ROW", "part[0]"), call("begin, end", "part[t]"));
            self.text.line("if (n <= 1) {");
            self.text.line(&alone);
            self.text.line("} else {\n#pragma omp parallel num_threads(int(n))\n{");
            self.text.line("const int64_t t = omp_get_thread_num(), of = omp_get_num_threads();");
            self.text.line("if (t == 0) team = of;");
            self.text.line(&format!(
                "const int64_t begin = UNITS * t / of * {FLAT_UNIT}, stop = UNITS * (t + 1) / of * {FLAT_UNIT};"
            ));
            self.text.line("const int64_t end = stop < ROW ? stop : ROW;");
            self.text.line(&together);
            self.text.line("}\n}");
            for reduce in self.schedule.passes[pass].reduces.clone() {
                let kind = self.program.reduces[reduce].kind;
                let joined = combine(kind, &format!("found[{reduce}]"), &format!("part[t][{reduce}]"));
                self.text.line(&format!("found[{reduce}] = part[0][{reduce}];"));
                self.text.line(&format!("for (int64_t t = 1; t < team; ++t) found[{reduce}] = {joined};"));
            }
        }
        if self.program.stores.iter().any(|store| matches!(store, Store::Row(..))) {
            self.text.line(&format!("finish({args}, r, found);"));
        }
        self.text.line("}\n}");
    }
}
