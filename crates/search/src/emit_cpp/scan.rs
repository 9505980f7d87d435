//! Folds along the row of which every step is wanted.
//!
//! Within a vector the lanes are folded in `log2 N` steps; from vector to vector the fold so far is carried in
//! f64, as PyTorch's is. With a row for each lane the carry is a vector, and a sum keeps what rounding took from it.

use super::Emitter;
use crate::loops::{Expr, Folding};

/// Only for kernels that scan.
const ALONG: &str = "\
template <int S, int... I> AK_FN V moved(V x, V fill, detail::list<I...>) {
    return __builtin_shufflevector(x, fill, (I >= S ? I - S : N + I)...);
}
struct Plus { template <class T> AK_MEMBER T operator()(T a, T b) const { return a + b; } };
struct Times { template <class T> AK_MEMBER T operator()(T a, T b) const { return a * b; } };
// Each lane folded with those before it.
template <int S, class Op> AK_FN V folded(V x, V neutral, Op op) {
    if constexpr (S < N) return folded<2 * S>(op(x, moved<S>(x, neutral, detail::upto<N>{})), neutral, op);
    else return x;
}
template <class Op> AK_FN V scanned(V x, E neutral, double& carry, Op op) {
    const V inner = folded<1>(x, splat(neutral), op), all = op(splat(E(carry)), inner);
    carry = op(carry, double(inner[N - 1]));
    return all;
}
";
const ACROSS: &str = "\
// The sum with one more term, and what rounding took from it.
AK_FN V added(V x, V& sum, V& lost) {
    const V term = x - lost, next = sum + term;
    // An infinite sum has lost nothing.
    const V rest = (next - sum) - term;
    lost = select(rest - rest == splat(E(0)), rest, splat(E(0)));
    return sum = next;
}
";

impl Emitter<'_> {
    pub(super) fn scan_helpers(&mut self) {
        if !self.program.scans.is_empty() {
            let text = if self.program.across { ACROSS } else { ALONG };
            self.text.out.push_str(text);
            self.text.blank();
        }
    }

    /// Carries of the scans that a pass computes.
    pub(super) fn begin_scans(&mut self, pass: usize) {
        for id in self.schedule.body(self.program, pass, 0) {
            let Expr::Scan(scan) = self.expr(id) else { continue };
            if self.schedule.reads_buffer(id, pass, 0) {
                continue;
            }
            let start = match self.program.scans[scan].kind {
                Folding::Sum => 0,
                Folding::Product => 1,
            };
            let line = if self.program.across {
                format!(
                    "V c{scan}[U], l{scan}[U];\nfor (int u = 0; u < U; ++u) c{scan}[u] = splat(E({start})), l{scan}[u] = splat(E(0));"
                )
            } else {
                format!("double c{scan} = {start};")
            };
            self.text.line(&line);
        }
    }

    /// One step of a scan.
    pub(super) fn step(&self, scan: usize) -> String {
        let meaning = &self.program.scans[scan];
        let x = self.lanes(meaning.body);
        match (self.program.across, meaning.kind) {
            (true, Folding::Sum) => format!("added({x}, c{scan}[u], l{scan}[u])"),
            (true, Folding::Product) => format!("c{scan}[u] = c{scan}[u] * {x}"),
            (false, Folding::Sum) => format!("scanned({x}, E(0), c{scan}, Plus{{}})"),
            (false, Folding::Product) => format!("scanned({x}, E(1), c{scan}, Times{{}})"),
        }
    }
}
