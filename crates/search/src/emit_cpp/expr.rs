//! Expressions as C++ text.

use super::{Emitter, c_type};
use crate::loops::{Binary, Compare, Expr, Id, Logic, Unary, for_each_operand};

const fn unary(op: Unary) -> &'static str {
    match op {
        Unary::Neg => "-",
        Unary::Abs => "abs",
        Unary::Sqrt => "sqrt",
        Unary::Rsqrt => "rsqrt",
        Unary::Recip => "recip",
        Unary::Exp => "exp",
        Unary::Expm1 => "expm1",
        Unary::Log => "log",
        Unary::Log1p => "log1p",
        Unary::Tanh => "tanh",
        Unary::Erf => "erf",
        Unary::Sigmoid => "sigmoid",
        Unary::Sin => "sin",
        Unary::Cos => "cos",
        Unary::RoundTo(_) => "rounded",
    }
}

const fn comparison(op: Compare) -> &'static str {
    match op {
        Compare::Lt => "<",
        Compare::Le => "<=",
        Compare::Gt => ">",
        Compare::Ge => ">=",
        Compare::Eq => "==",
        Compare::Ne => "!=",
    }
}

impl Emitter<'_> {
    pub(super) fn literal(&self, bits: u64) -> String {
        let value = f64::from_bits(bits);
        let suffix = if self.program.wide { "" } else { "f" };
        let narrow = if self.program.wide { value } else { f64::from(value as f32) };
        if narrow.is_nan() {
            format!("__builtin_nan{suffix}(\"\")")
        } else if narrow.is_infinite() {
            format!("{}__builtin_inf{suffix}()", if narrow < 0.0 { "-" } else { "" })
        } else if self.program.wide {
            format!("{value:?}")
        } else {
            format!("{:?}f", value as f32)
        }
    }

    /// A row-level value.
    pub(super) fn scalar(&self, id: Id) -> String {
        if self.program.across {
            return self.of_rows(id);
        }
        match self.expr(id) {
            Expr::Const(bits) => self.literal(bits),
            Expr::Reduce(reduce) => format!("r{reduce}"),
            Expr::Within(guard) => format!("g{guard}"),
            Expr::Total(total) => format!("E(w{total})"),
            _ => format!("s{}", id.0),
        }
    }

    /// Any value inside a loop over the row.
    pub(super) fn lanes(&self, id: Id) -> String {
        if self.program.arena.is_lane(id) {
            format!("v{}", id.0)
        } else if self.program.across {
            self.of_rows(id)
        } else if self.program.arena.is_mask(id) {
            format!("(splat(E({})) != splat(E(0)))", self.scalar(id))
        } else {
            format!("splat({})", self.scalar(id))
        }
    }

    /// The operation itself, operands by name.
    pub(super) fn operation(&self, id: Id) -> String {
        let lane = self.program.across || self.program.arena.is_lane(id);
        let name = |operand: Id| if lane { self.lanes(operand) } else { self.scalar(operand) };
        match self.expr(id) {
            Expr::Const(_) | Expr::Load(_) | Expr::Within(_) | Expr::Reduce(_) | Expr::Total(_) => {
                String::new()
            }
            Expr::Position(position) => self.position(position),
            Expr::Scan(scan) => self.step(scan),
            Expr::Unary(Unary::Neg, a) => format!("-{}", name(a)),
            Expr::Unary(Unary::RoundTo(dtype), a) => format!("rounded<{}>({})", c_type(dtype), name(a)),
            Expr::Unary(op, a) => format!("{}({})", unary(op), name(a)),
            Expr::Binary(op, a, b) => match op {
                Binary::Add => format!("{} + {}", name(a), name(b)),
                Binary::Sub => format!("{} - {}", name(a), name(b)),
                Binary::Mul => format!("{} * {}", name(a), name(b)),
                Binary::Div => format!("{} / {}", name(a), name(b)),
                Binary::Pow => format!("pow({}, {})", name(a), name(b)),
                Binary::Min | Binary::Max => self.extreme(op == Binary::Max, a, b, name),
            },
            Expr::Compare(op, a, b) => format!("{} {} {}", name(a), comparison(op), name(b)),
            Expr::Logic(op, a, b) => {
                let sign = match op {
                    Logic::And => "&",
                    Logic::Or => "|",
                    Logic::Xor => "^",
                };
                format!("{} {sign} {}", name(a), name(b))
            }
            Expr::Not(a) => format!("{}{}", if lane { "~" } else { "!" }, name(a)),
            // The same all along the row: a branch, and no work for what is not chosen.
            Expr::Select(mask, a, b) if lane && self.is_branch(mask) => {
                format!("{} ? {} : {}", self.branch(mask), name(a), name(b))
            }
            Expr::Select(mask, a, b) => format!("select({}, {}, {})", name(mask), name(a), name(b)),
        }
    }

    /// The smaller or larger of two; beside a number one instruction does it.
    fn extreme(&self, larger: bool, a: Id, b: Id, name: impl Fn(Id) -> String) -> String {
        match self.expr(b) {
            Expr::Const(bits) if !f64::from_bits(bits).is_nan() => {
                let function = if larger { "at_least" } else { "at_most" };
                format!("{function}({}, {})", name(a), self.literal(bits))
            }
            _ => format!("{}({}, {})", if larger { "max" } else { "min" }, name(a), name(b)),
        }
    }

    /// Row-level values that can be computed before `pass` but not earlier, and that anything needs.
    pub(super) fn scalars(&mut self, pass: usize) {
        let mut needed = vec![false; self.program.arena.len()];
        for id in self.needed_scalars() {
            needed[id.index()] = true;
        }
        for id in self.program.arena.ids() {
            if !needed[id.index()] || self.schedule.stages[id.index()] != pass {
                continue;
            }
            let value = match self.expr(id) {
                Expr::Const(_) | Expr::Reduce(_) | Expr::Within(_) => continue,
                Expr::Load(load) if self.program.across => self.load(load),
                Expr::Load(load) => self.load_scalar(load),
                _ => self.operation(id),
            };
            if self.program.across {
                let kind = if self.program.arena.is_mask(id) { "M" } else { "V" };
                self.text.line(&format!("{kind} s{}[U];\nfor (int u = 0; u < U; ++u) {{", id.0));
                self.text.line(&format!("const int64_t j = first + u * N;\ns{}[u] = {value};\n}}", id.0));
                continue;
            }
            let kind = if self.program.arena.is_mask(id) { "bool" } else { "E" };
            self.text.line(&format!("const {kind} s{} = {value};", id.0));
        }
    }

    /// Whether a condition is the same for all lanes, and so can be a branch.
    fn is_branch(&self, mask: Id) -> bool {
        match self.expr(mask) {
            Expr::Within(_) => true,
            _ => !self.program.across && !self.program.arena.is_lane(mask),
        }
    }

    fn branch(&self, mask: Id) -> String {
        match self.expr(mask) {
            Expr::Within(guard) => format!("g{guard}"),
            _ => self.scalar(mask),
        }
    }

    /// With a row for each lane: what is the same all along a row is still a vector of them.
    fn of_rows(&self, id: Id) -> String {
        match self.expr(id) {
            Expr::Const(bits) => format!("splat({})", self.literal(bits)),
            Expr::Within(guard) => format!("(splat(E(g{guard})) != splat(E(0)))"),
            Expr::Reduce(reduce) => format!("r{reduce}[u]"),
            _ => format!("s{}[u]", id.0),
        }
    }

    fn needed_scalars(&self) -> Vec<Id> {
        let mut open: Vec<Id> = vec![];
        for pass in 0..self.schedule.passes.len() {
            for segment in 0..self.program.segments.len() {
                open.extend(self.schedule.roots(self.program, pass, segment));
                for id in self.schedule.body(self.program, pass, segment) {
                    if !self.schedule.reads_buffer(id, pass, segment) {
                        for_each_operand(self.expr(id), |operand| open.push(operand));
                    }
                }
            }
        }
        open.extend(self.program.stores.iter().filter_map(|store| match store {
            crate::loops::Store::Row(_, value) => Some(*value),
            crate::loops::Store::Lane(..) | crate::loops::Store::Once(..) => None,
        }));
        open.extend(&self.program.totals);
        open.retain(|id| !self.program.arena.is_lane(*id));
        let mut seen = std::collections::BTreeSet::new();
        while let Some(id) = open.pop() {
            if seen.insert(id) {
                for_each_operand(self.expr(id), |operand| open.push(operand));
            }
        }
        seen.into_iter().collect()
    }
}
