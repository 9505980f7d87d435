//! A [`Schedule`] of a [`Program`] as the text of a C++ kernel file.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use autokernel_core::dtype::Dtype;
use autokernel_core::region::Region;

use crate::loops::{Access, Expr, Id, Program, Store, TABLES, Table};
use crate::schedule::{Schedule, can_stream, streamed_loads};

mod columns;
mod expr;
mod pass;
mod product;
mod read;
mod scan;
mod shared;
mod total;

pub(crate) use product::emit_products;

/// Elements by which a flat loop is split: whole cache lines whatever the type.
const FLAT_UNIT: u64 = 64;

/// A writer with indentation.
#[derive(Default)]
struct Text {
    out: String,
    depth: usize,
}

impl Text {
    fn blank(&mut self) {
        self.out.push('\n');
    }

    fn line(&mut self, text: &str) {
        for line in text.lines() {
            if line.starts_with('}') {
                self.depth = self.depth.saturating_sub(1);
            }
            let indent = if line.is_empty() { 0 } else { self.depth * 4 };
            let _ = writeln!(self.out, "{:indent$}{line}", "");
            if line.ends_with('{') {
                self.depth += 1;
            }
        }
    }
}

/// Where an access starts in a row: the tensor and its steps over the kept dimensions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Base {
    output: bool,
    tensor: usize,
    kept: Vec<i64>,
}

impl Base {
    fn of(access: &Access, output: bool, kept: usize) -> Self {
        let kept = access.strides[..kept].to_vec();
        Self { output, tensor: access.tensor, kept }
    }
}

pub(crate) struct Emitter<'a> {
    program: &'a Program,
    schedule: &'a Schedule,
    region: &'a Region,
    bases: BTreeMap<Base, String>,
    /// Variables that hold the ends of the part of the row to walk, where it is not the whole row.
    part: Option<[&'static str; 2]>,
    text: Text,
}

const HELPERS: &str = "\
struct Whole { static constexpr bool tail = false; };
struct Tail { static constexpr bool tail = true; };

// The first n lanes.
AK_FN M first(int n) {
    M lanes;
    for (int i = 0; i < N; ++i) lanes[i] = i;
    return lanes < n;
}
template <class W, class T> AK_FN V get(W, const T* p, int n) {
    if constexpr (W::tail) return load_partial_as<V>(p, n);
    else return load_as<V>(p);
}
template <bool NT, class W, class T> AK_FN void put(W, T* p, V x, int n) {
    if constexpr (W::tail) store_partial_from(p, x, n);
    else if constexpr (NT) stream(p, x);
    else store_from(p, x);
}
// Lanes beyond the row must not change a reduction.
template <class W> AK_FN V only(W, V x, E neutral, int n) {
    if constexpr (W::tail) return select(first(n), x, splat(neutral));
    else return x;
}
// Runs step over [j, end), U vectors at a time; the u-th of them has accumulator u.
template <int U, class Step, class... A> AK_FN void sweep(int64_t j, int64_t end, Step step, A&... acc) {
    for (; j + U * N <= end; j += U * N) {
        #pragma GCC unroll 16
        for (int u = 0; u < U; ++u) step(Whole{}, j + u * N, N, acc[u]...);
    }
    for (; j + N <= end; j += N) step(Whole{}, j, N, acc[0]...);
    if (j < end) step(Tail{}, j, int(end - j), acc[0]...);
}
template <class T> AK_FN V rounded(V x) {
    T t[N];
    store_from(t, x);
    return load_as<V>((const T*)t);
}
template <class T> AK_FN E rounded(E x) {
    T t[1];
    store_from(t, x);
    return load_as<E>((const T*)t);
}
";

/// The text of a kernel file.
pub(crate) fn emit(program: &Program, schedule: &Schedule, region: &Region) -> String {
    let part = (schedule.flat || schedule.shared).then_some(["begin", "end"]);
    let mut emitter = Emitter::new(program, schedule, region, part);
    emitter.header();
    emitter.prelude();
    if schedule.shared {
        emitter.shared_rows();
        return emitter.text.out;
    }
    if program.across {
        emitter.columns();
    } else {
        emitter.rows();
    }
    emitter.entry();
    emitter.text.out
}

/// A constant offset behind a pointer.
fn shift(offset: i64) -> String {
    if offset == 0 {
        String::new()
    } else {
        format!(" {} {}", if offset < 0 { '-' } else { '+' }, offset.abs())
    }
}

const fn c_type(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F64 => "double",
        Dtype::F32 => "float",
        Dtype::F16 => "f16",
        Dtype::Bf16 => "bf16",
        Dtype::I64 => "int64_t",
        Dtype::I32 => "int32_t",
        Dtype::I16 => "int16_t",
        Dtype::I8 => "int8_t",
        Dtype::U8 => "uint8_t",
        Dtype::Bool => "bool",
    }
}

impl<'a> Emitter<'a> {
    fn new(
        program: &'a Program,
        schedule: &'a Schedule,
        region: &'a Region,
        part: Option<[&'static str; 2]>,
    ) -> Self {
        let mut emitter =
            Self { program, schedule, region, bases: BTreeMap::new(), part, text: Text::default() };
        emitter.find_bases();
        emitter
    }

    fn input_type(&self, tensor: usize) -> &'static str {
        match (self.region.inputs.get(tensor), self.table(tensor)) {
            (Some(input), _) => c_type(input.meta.dtype),
            (_, Some(Table::Whole(_))) => "int32_t",
            _ => "E",
        }
    }

    /// The table of constants that a tensor's number stands for.
    fn table(&self, tensor: usize) -> Option<&Table> {
        self.program.tables.get(tensor.checked_sub(TABLES)?)
    }

    fn output_dtype(&self, tensor: usize) -> Dtype {
        self.region.output_metas()[tensor].dtype
    }

    fn has(&self, param: &str) -> bool {
        self.schedule.params.contains_key(param)
    }

    fn find_bases(&mut self) {
        let kept = self.program.kept.len();
        let lookups = self.program.lookups.iter().map(|lookup| &lookup.at);
        let loads = self.program.loads.iter().chain(lookups).map(|access| Base::of(access, false, kept));
        let stores = self.program.stores.iter().map(|store| Base::of(store.access(), true, kept));
        let (mut reads, mut writes) = (0, 0);
        for base in loads.chain(stores) {
            if self.bases.contains_key(&base) {
                continue;
            }
            let (letter, count) = if base.output { ('q', &mut writes) } else { ('p', &mut reads) };
            let name = format!("{letter}{count}");
            *count += 1;
            self.bases.insert(base, name);
        }
    }

    fn base(&self, access: &Access, output: bool) -> &str {
        self.bases.get(&Base::of(access, output, self.program.kept.len())).map_or("", String::as_str)
    }

    fn args(&self) -> Vec<String> {
        let inputs = (0..self.region.inputs.len()).map(|n| format!("in{n}"));
        inputs.chain((0..self.region.outputs.len()).map(|n| format!("out{n}"))).collect()
    }

    /// Parameters of a C++ function that takes all tensors.
    fn tensors(&self) -> String {
        let inputs =
            (0..self.region.inputs.len()).map(|n| format!("const {}* __restrict in{n}", self.input_type(n)));
        let outputs = (0..self.region.outputs.len())
            .map(|n| format!("{}* __restrict out{n}", c_type(self.output_dtype(n))));
        inputs.chain(outputs).collect::<Vec<_>>().join(", ")
    }

    fn header(&mut self) {
        let mut text = String::from("/*@ autokernel 1\nlanguage = \"c++\"\n");
        let _ = writeln!(text, "note = \"{}\"\n[params]", self.schedule.note);
        for (name, values) in &self.schedule.params {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            let _ = writeln!(text, "{name} = [{}]", values.join(", "));
        }
        let args: Vec<String> = self.args().iter().map(|name| format!("\"{name}\"")).collect();
        let _ =
            writeln!(text, "[[launch]]\nentry = \"region\"\nargs = [{}, \"threads\"]\n@*/", args.join(", "));
        self.text.out.push_str(&text);
    }

    fn prelude(&mut self) {
        let (rows, row, points) = (self.program.rows(), self.program.row, self.program.points());
        let ops = self.region.op_names().join(" ");
        let (element, vector, mask, lanes) =
            if self.program.wide { ("double", "vd", "md", "DLANES") } else { ("float", "vf", "mf", "LANES") };
        let text = format!(
            "// {ops}\n#include <stdint.h>\n#include \"autokernel/vec.h\"\n\nusing namespace ak;\n\n\
             extern \"C\" int omp_get_thread_num(void);\nextern \"C\" int omp_get_num_threads(void);\n\n\
             namespace {{\n\ntypedef {element} E;\ntypedef {vector} V;\ntypedef {mask} M;\nconstexpr int N = {lanes};\n\
             constexpr int64_t ROWS = {rows}, ROW = {row}, POINTS = {points};\n\n{HELPERS}\n"
        );
        self.text.out.push_str(&text);
        self.tables();
    }

    fn rows(&mut self) {
        let tensors = self.tensors();
        let what = if self.schedule.flat { "Elements" } else { "Rows" };
        self.text.line(&format!("// {what} begin to end."));
        self.text.line("template <bool NT>");
        let totals = if self.program.totals.is_empty() { "" } else { ", double* total" };
        self.text.line(&format!(
            "__attribute__((noinline)) void work({tensors}, int64_t begin, int64_t end{totals}) {{"
        ));
        self.begin_totals();
        for buffer in 0..self.schedule.buffers() {
            self.text.line(&format!("alignas(64) E kept{buffer}[ROW];"));
        }
        if !self.schedule.flat {
            self.text.line("for (int64_t r = begin; r < end; ++r) {");
        }
        self.pointers();
        for pass in 0..self.schedule.passes.len() {
            self.scalars(pass);
            self.pass(pass);
        }
        self.scalars(self.schedule.passes.len());
        self.row_stores();
        self.add_totals();
        if !self.schedule.flat {
            self.text.line("}");
        }
        self.end_totals();
        self.text.line("if (NT) fence();");
        self.text.line("}");
        self.text.blank();
        self.text.line("}  // namespace");
        self.text.blank();
    }

    /// The start of this row in each tensor.
    fn pointers(&mut self) {
        let kept = &self.program.kept;
        if kept.len() > 1 {
            self.text.line("int64_t rest = r;");
            for (d, size) in kept.iter().enumerate().rev() {
                if d > 0 {
                    self.text.line(&format!("const int64_t k{d} = rest % {size}; rest /= {size};"));
                } else {
                    self.text.line("const int64_t k0 = rest;");
                }
            }
        }
        for (base, name) in &self.bases {
            let at = self.at_row(&base.kept);
            let line = if base.output {
                format!("{}* const {name} = out{}{at};", c_type(self.output_dtype(base.tensor)), base.tensor)
            } else if self.table(base.tensor).is_some() {
                let kind = self.input_type(base.tensor);
                format!("const {kind}* const {name} = t{}{at};", base.tensor - TABLES)
            } else if let Some(product) = base.tensor.checked_sub(self.region.inputs.len()) {
                format!("const E* const {name} = tile[{product}][r - begin] - from;")
            } else {
                format!("const {}* const {name} = in{}{at};", self.input_type(base.tensor), base.tensor)
            };
            self.text.line(&line);
        }
        self.places();
    }

    /// What the position of the row adds to an index.
    fn at_row(&self, strides: &[i64]) -> String {
        let several = self.program.kept.len() > 1;
        let moving = strides.iter().enumerate().filter(|(_, stride)| **stride != 0);
        moving.fold(String::new(), |mut text, (d, stride)| {
            let variable = if several { format!("k{d}") } else { "r".to_owned() };
            let _ = write!(text, " + {variable} * {stride}");
            text
        })
    }

    fn row_stores(&mut self) {
        for store in &self.program.stores {
            if let Store::Row(access, value) = store {
                let value = self.scalar(*value);
                let line =
                    format!("store_from({}{}, {value});", self.base(access, true), shift(access.offset));
                self.text.line(&line);
            }
        }
    }

    fn streamable(&self, access: &Access) -> bool {
        self.has("STREAM") && can_stream(self.program, access, self.output_dtype(access.tensor))
    }

    fn entry(&mut self) {
        let (args, tensors) = (self.args().join(", "), self.tensors());
        self.text.line(&format!("extern \"C\" void region({tensors}, int64_t threads) {{"));
        self.declare_streaming();
        let call = |range: &str| self.streaming_call("work", &format!("{args}, {range}"));
        let (first, own) = self.totals_of_threads();
        let all = if self.schedule.flat { "0, ROW" } else { "0, UNITS" };
        let (everything, part) = (call(&format!("{all}{first}")), call(&format!("begin, end{own}")));
        let unit = if self.schedule.flat { FLAT_UNIT } else { 1 };
        let total = match (self.schedule.flat, self.program.across) {
            (true, _) => "ROW",
            (_, true) => "ROWS * BLOCKS",
            _ => "ROWS",
        };
        let units =
            if self.schedule.flat { format!("(ROW + {unit} - 1) / {unit}") } else { total.to_owned() };
        self.text.line(&format!("constexpr int64_t UNITS = {units};"));
        self.text.line("int64_t n = POINTS / GRAIN;");
        self.text.line("n = n < threads ? n : threads;\nn = n < UNITS ? n : UNITS;");
        self.declare_totals();
        self.text.line("if (n <= 1) {");
        self.text.line(&everything);
        self.text.line("} else {\n#pragma omp parallel num_threads(int(n))\n{");
        self.text.line("const int64_t t = omp_get_thread_num(), of = omp_get_num_threads();");
        if self.schedule.flat {
            self.text.line(&format!(
                "const int64_t begin = UNITS * t / of * {unit}, stop = UNITS * (t + 1) / of * {unit};"
            ));
            self.text.line("const int64_t end = stop < ROW ? stop : ROW;");
        } else {
            self.text.line("const int64_t begin = UNITS * t / of, end = UNITS * (t + 1) / of;");
        }
        self.text.line(&part);
        self.text.line("}\n}");
        self.write_totals();
        self.text.line("}");
    }

    /// Outputs that may be written around the caches.
    fn streamed(&self) -> Vec<usize> {
        let lanes = self.program.stores.iter().filter(|store| matches!(store, Store::Lane(..)));
        lanes.filter(|store| self.streamable(store.access())).map(|store| store.access().tensor).collect()
    }

    fn streams(&self) -> bool {
        !self.streamed().is_empty()
    }

    /// Whether this call writes around the caches, where that is a choice.
    fn declare_streaming(&mut self) {
        let streamed = self.streamed();
        if !streamed.is_empty() {
            let aligned: Vec<String> =
                streamed.iter().map(|output| format!("uintptr_t(out{output}) % 64 == 0")).collect();
            self.text.line(&format!("const bool nt = STREAM && {};", aligned.join(" && ")));
        }
    }

    /// A call of a function that has a form for writing around the caches.
    fn streaming_call(&self, function: &str, args: &str) -> String {
        if self.streams() {
            format!("nt ? {function}<true>({args}) : {function}<false>({args});")
        } else {
            format!("{function}<false>({args});")
        }
    }

    /// Loads of the first pass that a prefetch may fetch ahead.
    fn ahead(&self, segment: usize) -> Vec<usize> {
        if self.has("AHEAD") {
            streamed_loads(self.program, &self.schedule.body(self.program, 0, segment))
        } else {
            vec![]
        }
    }

    fn expr(&self, id: Id) -> Expr {
        self.program.arena.get(id)
    }
}
