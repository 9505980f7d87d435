//! One pass over the row: accumulators, the loop over whole vectors, the rest.

use super::{Emitter, shift};
use crate::loops::{Expr, Id, Reduction, Store, Unary};

/// Elements that one set of accumulators sums.
const LONG: u64 = 8192;

pub(super) const fn neutral(kind: Reduction) -> &'static str {
    match kind {
        Reduction::Sum => "E(0)",
        Reduction::Max => "-E(__builtin_inf())",
        Reduction::Min => "E(__builtin_inf())",
    }
}

pub(super) fn combine(kind: Reduction, a: &str, b: &str) -> String {
    match kind {
        Reduction::Sum => format!("{a} + {b}"),
        Reduction::Max => format!("max({a}, {b})"),
        Reduction::Min => format!("min({a}, {b})"),
    }
}

const fn horizontal(kind: Reduction) -> &'static str {
    match kind {
        Reduction::Sum => "hsum",
        Reduction::Max => "hmax",
        Reduction::Min => "hmin",
    }
}

impl Emitter<'_> {
    pub(super) fn pass(&mut self, pass: usize) {
        let unroll = self.schedule.unroll(pass);
        let reduces = self.schedule.passes[pass].reduces.clone();
        self.text.line(&format!("// Pass {} of {}.", pass + 1, self.schedule.passes.len()));
        for reduce in &reduces {
            self.text.line(&format!("E r{reduce};"));
        }
        self.text.line("{");
        for reduce in &reduces {
            let start = neutral(self.program.reduces[*reduce].kind);
            self.text.line(&format!("V a{reduce}[{unroll}];"));
            self.text.line(&format!("for (V& a : a{reduce}) a = splat({start});"));
        }
        self.begin_scans(pass);
        self.loops();
        for segment in 0..self.program.segments.len() {
            self.segment(pass, segment, &unroll);
        }
        self.end_loops();
        for reduce in &reduces {
            let kind = self.program.reduces[*reduce].kind;
            let joined = combine(kind, &format!("a{reduce}[0]"), &format!("a{reduce}[u]"));
            self.text.line(&format!("for (int u = 1; u < {unroll}; ++u) a{reduce}[0] = {joined};"));
            self.text.line(&format!("r{reduce} = {}(a{reduce}[0]);", horizontal(kind)));
        }
        self.text.line("}");
    }

    /// The loops around the one that vectors run along.
    pub(super) fn loops(&mut self) {
        for (d, size) in self.program.outer.clone().into_iter().enumerate() {
            self.text.line(&format!("for (int64_t i{d} = 0; i{d} < {size}; ++i{d}) {{"));
        }
    }

    pub(super) fn end_loops(&mut self) {
        for _ in &self.program.outer {
            self.text.line("}");
        }
    }

    fn segment(&mut self, pass: usize, segment: usize, unroll: &str) {
        let reduces = self.schedule.passes[pass].reduces.clone();
        let (start, end) = self.program.segments[segment];
        let (start, end) = match self.part {
            Some([from, to]) if self.program.segments.len() == 1 => (from.to_owned(), to.to_owned()),
            Some([from, to]) => {
                (format!("({from} > {start} ? {from} : {start})"), format!("({to} < {end} ? {to} : {end})"))
            }
            None => (start.to_string(), end.to_string()),
        };
        let joined = |prefix: &str| {
            reduces.iter().fold(String::new(), |text, reduce| text + prefix + &reduce.to_string())
        };
        let (parameters, accumulators) = (joined(", V& a"), joined(", a"));
        self.text.line(&format!("auto step{segment} = [&](auto whole, int64_t j, int n{parameters}) __attribute__((always_inline)) {{"));
        self.body(pass, segment);
        self.text.line("};");
        let sums = reduces.iter().any(|reduce| self.program.reduces[*reduce].kind == Reduction::Sum);
        let (from, to) = self.program.segments[segment];
        let around: u64 = self.program.outer.iter().product();
        if !sums || (to - from) * around <= LONG {
            self.text.line(&format!("sweep<{unroll}>({start}, {end}, step{segment}{accumulators});"));
            return;
        }
        // Sums of sums: an error that grows with the number of terms would pass what PyTorch's own sums have.
        self.text.line(&format!("for (int64_t b = {start}; b < {end}; b += {LONG}) {{"));
        for reduce in &reduces {
            let start = neutral(self.program.reduces[*reduce].kind);
            self.text.line(&format!("V b{reduce}[{unroll}];\nfor (V& a : b{reduce}) a = splat({start});"));
        }
        let stop = format!("b + {LONG} < {end} ? b + {LONG} : {end}");
        self.text.line(&format!("sweep<{unroll}>(b, {stop}, step{segment}{});", joined(", b")));
        for reduce in &reduces {
            let kind = self.program.reduces[*reduce].kind;
            let value = combine(kind, &format!("a{reduce}[u]"), &format!("b{reduce}[u]"));
            self.text.line(&format!("for (int u = 0; u < {unroll}; ++u) a{reduce}[u] = {value};"));
        }
        self.text.line("}");
    }

    /// What happens at one vector of the row.
    fn body(&mut self, pass: usize, segment: usize) {
        let last = pass + 1 == self.schedule.passes.len();
        if last {
            self.prefetches(segment);
        }
        for id in self.schedule.body(self.program, pass, segment) {
            let value = if self.schedule.reads_buffer(id, pass, segment) {
                format!("get(whole, kept{} + j, n)", self.schedule.kept[segment][&id])
            } else if let Expr::Load(load) = self.expr(id) {
                self.load(load)
            } else {
                self.operation(id)
            };
            self.text.line(&format!("const auto v{} = {value};", id.0));
            if let Some(buffer) = self.schedule.kept[segment].get(&id)
                && self.schedule.stages[id.index()] == pass
            {
                self.text.line(&format!("put<false>(whole, kept{buffer} + j, v{}, n);", id.0));
            }
        }
        for reduce in self.schedule.passes[pass].reduces.clone() {
            let kind = self.program.reduces[reduce].kind;
            let value = self.lanes(self.program.reduces[reduce].bodies[segment]);
            let only = format!("only(whole, {value}, {}, n)", neutral(kind));
            self.text.line(&format!("a{reduce} = {};", combine(kind, &format!("a{reduce}"), &only)));
        }
        for store in self.schedule.passes[pass].stores.clone() {
            self.store(store, segment);
        }
    }

    pub(super) fn store(&mut self, number: usize, segment: usize) {
        let Store::Lane(access, values) = &self.program.stores[number] else { return };
        let dtype = self.output_dtype(access.tensor);
        let id = values[segment];
        // A store rounds by itself.
        let id = match self.expr(id) {
            Expr::Unary(Unary::RoundTo(to), inner) if to == dtype => inner,
            _ => id,
        };
        let value = self.stored(id);
        let offset = self.around(access);
        let nt = if self.streamable(access) { "NT" } else { "false" };
        let line = format!("put<{nt}>(whole, {}{offset} + j, {value}, n);", self.base(access, true));
        self.text.line(&line);
    }

    pub(super) fn stored(&self, id: Id) -> String {
        let value = self.lanes(id);
        if self.program.arena.is_mask(id) {
            format!("select({value}, splat(E(1)), splat(E(0)))")
        } else {
            value
        }
    }

    /// Asks for what is read next, while this pass mostly writes.
    fn prefetches(&mut self, segment: usize) {
        let rows = self.schedule.passes.len() > 1;
        let mut done = vec![];
        for load in self.ahead(segment) {
            let access = &self.program.loads[load];
            let step = match (rows, self.program.kept.is_empty()) {
                (true, false) => access.strides[access.strides.len() - 2],
                _ => 1,
            };
            let line = format!(
                "if (AHEAD) prefetch({}{} + j + AHEAD * {step});",
                self.base(access, false),
                shift(access.offset)
            );
            if step != 0 && !done.contains(&line) {
                self.text.line(&line);
                done.push(line);
            }
        }
    }
}
