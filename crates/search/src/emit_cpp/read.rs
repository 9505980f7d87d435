//! How values are read: along the row, at places that are looked up, and not at all where there is nothing.

use std::fmt::Write as _;

use super::{Emitter, shift};
use crate::loops::{Access, TABLES, Table};

/// Only for kernels that look indices up.
const LOOKUPS: &str = "\
// An index inside of 0 .. size, or -1.
template <bool WRAPS> AK_FN int64_t inside(int64_t i, int64_t size) {
    if (WRAPS && i < 0) i += size;
    return uint64_t(i) < uint64_t(size) ? i : -1;
}
// Lanes that lie anywhere: at(j + i) is the i-th of n.
template <class At> AK_FN V anywhere(At at, int64_t j, int n) {
    E t[N];
    for (int i = 0; i < N; ++i) t[i] = i < n ? at(j + i) : E(0);
    return load_as<V>((const E*)t);
}
";

/// Only for kernels that count places.
const POSITIONS: &str = "\
// The number of each lane.
AK_FN V lanes() {
    V v;
    for (int i = 0; i < N; ++i) v[i] = E(i);
    return v;
}
";

impl Emitter<'_> {
    /// Constants, and what reading by index needs.
    pub(super) fn tables(&mut self) {
        self.scan_helpers();
        if !self.program.positions.is_empty() {
            let _ = writeln!(self.text.out, "{POSITIONS}");
        }
        if !self.program.lookups.is_empty() {
            let _ = writeln!(self.text.out, "{LOOKUPS}");
        }
        for (number, table) in self.program.tables.iter().enumerate() {
            let (kind, values): (&str, Vec<String>) = match table {
                Table::Whole(values) => ("int32_t", values.iter().map(ToString::to_string).collect()),
                Table::Numbers(values) => {
                    ("E", values.iter().map(|value| self.literal(value.to_bits())).collect())
                }
            };
            let _ = write!(self.text.out, "constexpr {kind} t{number}[] = {{");
            for (place, value) in values.iter().enumerate() {
                let _ = write!(self.text.out, "{}{value},", if place % 16 == 0 { "\n    " } else { " " });
            }
            let _ = writeln!(self.text.out, "\n}};\n");
        }
    }

    /// What the place of the row decides: guards, and indices that are the same all along it.
    pub(super) fn places(&mut self) {
        for (number, guard) in self.program.guards.iter().enumerate() {
            let at = self.at_row(&guard.strides[..self.program.kept.len()]);
            let line = format!("const bool g{number} = uint64_t({}{at}) < {};", guard.offset, guard.size);
            self.text.line(&line);
        }
        for (number, lookup) in self.program.lookups.iter().enumerate() {
            let access = &lookup.at;
            let element = format!("int64_t({}[{}])", self.base(access, false), self.place(access, "j"));
            let element = if access.tensor >= TABLES {
                element
            } else {
                format!("inside<{}>({element}, {})", lookup.wraps, lookup.size)
            };
            let value = match self.condition(access, lookup.lane) {
                Some(there) => format!("{there} ? {element} : -1"),
                None => element,
            };
            let line = if lookup.lane {
                format!("const auto x{number} = [&](int64_t j) -> int64_t {{ return {value}; }};")
            } else {
                format!("const int64_t x{number} = {value};")
            };
            self.text.line(&line);
        }
    }

    /// The index behind the base pointer; `j` names the place along the row.
    fn place(&self, access: &Access, j: &str) -> String {
        let mut text = access.offset.to_string();
        match access.strides.last().copied().unwrap_or(0) {
            0 => {}
            1 => {
                let _ = write!(text, " + {j}");
            }
            stride => {
                let _ = write!(text, " + {j} * {stride}");
            }
        }
        for (lookup, stride) in &access.lookups {
            let _ = write!(text, " + {} * {stride}", self.looked_up(*lookup, j));
        }
        text
    }

    fn looked_up(&self, lookup: usize, j: &str) -> String {
        if self.program.lookups[lookup].lane { format!("x{lookup}({j})") } else { format!("x{lookup}") }
    }

    /// What must hold for there to be something to read. Tables of constants hold indices that are inside.
    fn condition(&self, access: &Access, lanes: bool) -> Option<String> {
        let guards = access.guards.iter().map(|guard| format!("g{guard}"));
        let found = self.indices_found(access, lanes);
        let all: Vec<String> = guards.chain(found).collect();
        (!all.is_empty()).then(|| all.join(" && "))
    }

    fn indices_found(&self, access: &Access, lanes: bool) -> Vec<String> {
        access
            .lookups
            .iter()
            .filter(|(lookup, _)| {
                let lookup = &self.program.lookups[*lookup];
                lookup.at.tensor < TABLES && (lanes || !lookup.lane)
            })
            .map(|(lookup, _)| format!("{} >= 0", self.looked_up(*lookup, "j")))
            .collect()
    }

    /// A value that is read, or what stands for it where there is nothing: zero beyond a guard, NaN for an
    /// index that is outside.
    fn guarded(&self, access: &Access, value: String, of: &str) -> String {
        let found = self.indices_found(access, false);
        let mut value = value;
        if !found.is_empty() {
            let nan = self.literal(f64::NAN.to_bits());
            value = format!("({} ? {value} : {})", found.join(" && "), of.replace('_', &nan));
        }
        if !access.guards.is_empty() {
            let guards: Vec<String> = access.guards.iter().map(|guard| format!("g{guard}")).collect();
            value = format!("({} ? {value} : {})", guards.join(" && "), of.replace('_', "E(0)"));
        }
        value
    }

    /// A value that is the same all along the row.
    pub(super) fn load_scalar(&self, load: usize) -> String {
        let access = &self.program.loads[load];
        let place = self.place(access, "0");
        let place = if place == "0" { String::new() } else { format!(" + {place}") };
        let place = if access.lookups.is_empty() { shift(access.offset) } else { place };
        let value = format!("load_as<E>({}{place})", self.base(access, false));
        self.guarded(access, value, "_")
    }

    /// One vector of the row.
    pub(super) fn load(&self, load: usize) -> String {
        let access = &self.program.loads[load];
        let base = self.base(access, false);
        if self.program.scatters(access) {
            return self.guarded(access, self.scattered(access), "splat(_)");
        }
        let mut offset = self.around(access);
        for (lookup, stride) in &access.lookups {
            let _ = write!(offset, " + x{lookup} * {stride}");
        }
        let value = match access.strides.last().copied().unwrap_or(0) {
            0 => format!("splat(load_as<E>({base}{offset}))"),
            1 => format!("get(whole, {base}{offset} + j, n)"),
            stride => format!("gather<V>({base}{offset} + j * {stride}, {stride}, n)"),
        };
        self.guarded(access, value, "splat(_)")
    }

    /// A place as one number for each lane.
    pub(super) fn position(&self, number: usize) -> String {
        let position = &self.program.positions[number];
        let stride = position.strides.last().copied().unwrap_or(0);
        let kept = self.program.kept.len();
        let mut start = position.offset.to_string() + &self.at_row(&position.strides[..kept]);
        for (d, stride) in position.strides[kept..position.strides.len() - 1].iter().enumerate() {
            if *stride != 0 {
                let _ = write!(start, " + i{d} * {stride}");
            }
        }
        match stride {
            0 => format!("splat(E({start}))"),
            stride => format!("(splat(E({start} + j * {stride})) + lanes() * E({stride}))"),
        }
    }

    /// The constant part of an index, and that of the loops around the one that vectors run along.
    pub(super) fn around(&self, access: &Access) -> String {
        let mut text = shift(access.offset);
        let kept = self.program.kept.len();
        for (d, stride) in access.strides[kept..access.strides.len() - 1].iter().enumerate() {
            if *stride != 0 {
                let _ = write!(text, " + i{d} * {stride}");
            }
        }
        text
    }

    /// Lanes whose indices are read one by one.
    fn scattered(&self, access: &Access) -> String {
        let mut declared = String::new();
        let mut place = Access { lookups: vec![], ..access.clone() };
        place.guards.clear();
        let mut at = self.place(&place, "i");
        let mut found = vec![];
        for (lookup, stride) in &access.lookups {
            let meaning = &self.program.lookups[*lookup];
            if meaning.lane {
                let _ = write!(declared, "const int64_t y{lookup} = x{lookup}(i); ");
                let _ = write!(at, " + y{lookup} * {stride}");
                if meaning.at.tensor < TABLES {
                    found.push(format!("y{lookup} >= 0"));
                }
            } else {
                let _ = write!(at, " + x{lookup} * {stride}");
            }
        }
        let value = format!("load_as<E>({} + {at})", self.base(access, false));
        let value = if found.is_empty() {
            value
        } else {
            format!("{} ? {value} : {}", found.join(" && "), self.literal(f64::NAN.to_bits()))
        };
        format!("anywhere([&](int64_t i) -> E {{ {declared}return {value}; }}, j, n)")
    }
}
