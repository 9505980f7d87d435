//! How a [`Program`] is run: passes over the row, what is kept between them, what may be tuned.
//!
//! A reduction is known only after the pass that computes it, so expressions have a *stage*: the
//! first pass in which they can be computed. Whatever a later pass needs again is either computed
//! again from its inputs, which are then in cache, or kept in a row buffer on the stack. Each such
//! choice of structure is one [`Schedule`], and so one kernel file; numbers are left to the sweep.

use std::collections::{BTreeMap, BTreeSet};

use autokernel_core::dtype::Dtype;
use autokernel_core::plan::Device;
use autokernel_core::region::Region;

use crate::loops::{Access, Binary, Expr, Id, Program, Store, Unary, for_each_operand};

/// Bytes of row buffers that one thread may put on its stack.
const STACK: u64 = 128 * 1024;
/// Elements in a vector register of f32 on the widest machine; only steers which values are offered.
const WIDEST: u64 = 16;
/// Bytes of output from which writing around the caches may pay, and from which it is the first guess.
///
/// What goes around the caches has to be fetched again by its reader. A screen has no reader, so a
/// small output would look better streamed and be worse in the model: it is not offered there.
const STREAM_OFFER: u64 = 8 << 20;
const STREAM_FIRST: u64 = 8 << 20;
/// Bytes moved from which reading ahead may pay.
const AHEAD_OFFER: u64 = 1 << 20;
/// Elements times cost that one thread does in about ten microseconds.
const THREAD_WORK: u64 = 40_000;

/// One pass over the row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Reductions that it computes.
    pub reduces: Vec<usize>,
    /// Lane-level stores that it writes.
    pub stores: Vec<usize>,
}

/// One structural idea.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Passes in order.
    pub passes: Vec<Pass>,
    /// Stage of each expression.
    pub stages: Vec<usize>,
    /// For each segment, the lane-level values that are kept between passes, with their buffer.
    pub kept: Vec<BTreeMap<Id, usize>>,
    /// Whether the row itself is split over threads, because it is the only one and nothing is reduced.
    pub flat: bool,
    /// Whether threads share each row, because there are fewer rows than threads.
    pub shared: bool,
    /// Parameters for the sweep, first guess first.
    pub params: BTreeMap<String, Vec<i64>>,
    /// One line for people.
    pub note: String,
}

impl Schedule {
    /// What pass `pass` computes in `segment`: bodies of reductions, then values of stores.
    pub fn roots(&self, program: &Program, pass: usize, segment: usize) -> Vec<Id> {
        let pass = &self.passes[pass];
        let bodies = pass.reduces.iter().map(|reduce| program.reduces[*reduce].bodies[segment]);
        let values = pass.stores.iter().filter_map(|store| match &program.stores[*store] {
            Store::Lane(_, values) => values.get(segment).copied(),
            Store::Row(..) | Store::Once(..) => None,
        });
        bodies.chain(values).collect()
    }

    /// Lane-level expressions of a pass in one segment, operands first.
    pub fn body(&self, program: &Program, pass: usize, segment: usize) -> Vec<Id> {
        let mut order = BTreeSet::new();
        let mut open = self.roots(program, pass, segment);
        while let Some(id) = open.pop() {
            if !program.arena.is_lane(id) || !order.insert(id) || self.reads_buffer(id, pass, segment) {
                continue;
            }
            let expr = program.arena.get(id);
            if let Expr::Scan(scan) = expr {
                open.push(program.scans[scan].body);
            }
            for_each_operand(expr, |operand| open.push(operand));
        }
        order.into_iter().collect()
    }

    /// Whether a pass finds this value in a row buffer.
    pub fn reads_buffer(&self, id: Id, pass: usize, segment: usize) -> bool {
        self.kept[segment].contains_key(&id) && self.stages[id.index()] < pass
    }

    /// The parameter that says how many vectors a pass takes at a time. Few passes have one each; many
    /// share two, so that the sweep stays small.
    pub fn unroll(&self, pass: usize) -> String {
        let number = if self.passes.len() <= 3 {
            pass + 1
        } else if pass + 1 < self.passes.len() {
            1
        } else {
            2
        };
        format!("U{number}")
    }

    /// Number of row buffers.
    pub fn buffers(&self) -> usize {
        self.kept.iter().map(BTreeMap::len).max().unwrap_or(0)
    }
}

/// All structural ideas for a program, best guess first.
pub fn schedules(program: &Program, region: &Region, device: &Device) -> Vec<Schedule> {
    let stages = stages(program);
    let passes = passes(program, &stages);
    let only_lanes = program.stores.iter().all(|store| matches!(store, Store::Lane(..)));
    let flat = program.kept.is_empty()
        && program.outer.is_empty()
        && !program.needs_rows()
        && program.segments.len() == 1
        && only_lanes;
    let mut base = Schedule {
        passes,
        stages,
        kept: vec![BTreeMap::new(); program.segments.len()],
        flat,
        shared: false,
        params: BTreeMap::new(),
        note: String::new(),
    };
    let count = base.passes.len();
    base.params = params(program, &base, region, device);
    base.note = match (flat, count) {
        (true, _) => "one flat loop, split over threads".to_owned(),
        (false, 1) => "rows split over threads, one pass over a row".to_owned(),
        (false, _) => format!("rows split over threads, {count} passes over a row that stays in cache"),
    };
    if program.across {
        base.params = across_params(program, device);
        base.note = format!("a row for each lane, blocks of them split over threads, {count} passes");
        return vec![base];
    }
    let mut ideas = vec![];
    if !flat && can_share(program, device) {
        let note = format!("threads share each row, {count} passes over it");
        ideas.push(Schedule { shared: true, note, ..base.clone() });
    }
    let kept = kept_values(program, &base);
    let buffers = kept.iter().map(BTreeMap::len).max().unwrap_or(0) as u64;
    let element = if program.wide { 8 } else { 4 };
    if buffers > 0 && program.outer.is_empty() && buffers * program.row * element <= STACK {
        let mut keeping = Schedule { kept, ..base.clone() };
        keeping.params = params(program, &keeping, region, device);
        keeping.note = format!(
            "rows split over threads, {count} passes over a row, values between them in a row buffer"
        );
        let dear = keeping
            .kept
            .iter()
            .flat_map(BTreeMap::keys)
            .map(|id| cost(program, *id, &BTreeMap::new()))
            .max()
            .unwrap_or(0);
        if dear >= DEAR {
            ideas.push(keeping);
            ideas.push(base);
        } else {
            ideas.push(base);
            ideas.push(keeping);
        }
    } else {
        ideas.push(base);
    }
    ideas
}

/// The stage of what is known only when all rows are done.
pub(crate) const AFTER_ROWS: usize = usize::MAX;

/// One pass over parts of rows that a kernel has at hand; only for programs without reductions.
pub(crate) fn epilogue(program: &Program) -> Schedule {
    let stages = stages(program);
    Schedule {
        passes: passes(program, &stages),
        stages,
        kept: vec![BTreeMap::new(); program.segments.len()],
        flat: false,
        shared: false,
        params: BTreeMap::new(),
        note: String::new(),
    }
}

fn stages(program: &Program) -> Vec<usize> {
    // A reduction stands in the arena after its bodies, since those were built before it.
    let mut stages = vec![0_usize; program.arena.len()];
    for id in program.arena.ids() {
        let mut stage = 0;
        match program.arena.get(id) {
            Expr::Reduce(reduce) => {
                let bodies = program.reduces[reduce].bodies.iter();
                stage = 1 + bodies.map(|body| stages[body.index()]).max().unwrap_or(0);
            }
            Expr::Scan(scan) => stage = stages[program.scans[scan].body.index()],
            // After everything that is done for a row.
            Expr::Total(_) => stage = AFTER_ROWS,
            expr => for_each_operand(expr, |operand| stage = stage.max(stages[operand.index()])),
        }
        stages[id.index()] = stage;
    }
    stages
}

fn passes(program: &Program, stages: &[usize]) -> Vec<Pass> {
    let mut passes: Vec<Pass> = vec![];
    let mut at = |number: usize| -> usize {
        while passes.len() <= number {
            passes.push(Pass::default());
        }
        number
    };
    let mut placed = vec![];
    for (number, reduce) in program.reduces.iter().enumerate() {
        let stage = reduce.bodies.iter().map(|body| stages[body.index()]).max().unwrap_or(0);
        placed.push((at(stage), number, true));
    }
    for (number, store) in program.stores.iter().enumerate() {
        if let Store::Lane(_, values) = store {
            let stage = values.iter().map(|value| stages[value.index()]).max().unwrap_or(0);
            placed.push((at(stage), number, false));
        }
    }
    for (pass, number, is_reduce) in placed {
        if is_reduce {
            passes[pass].reduces.push(number);
        } else {
            passes[pass].stores.push(number);
        }
    }
    passes
}

/// From this cost on, computing again is worse than a buffer without doubt.
const DEAR: u64 = 8;

fn own_cost(expr: Expr) -> u64 {
    match expr {
        Expr::Const(_)
        | Expr::Load(_)
        | Expr::Within(_)
        | Expr::Position(_)
        | Expr::Reduce(_)
        | Expr::Total(_) => 0,
        Expr::Unary(op, _) => match op {
            Unary::Neg | Unary::Abs => 1,
            Unary::RoundTo(_) => 3,
            Unary::Sqrt | Unary::Rsqrt | Unary::Recip => 4,
            Unary::Exp | Unary::Sigmoid => 10,
            _ => 16,
        },
        Expr::Scan(_) => 10,
        Expr::Binary(Binary::Div, ..) => 4,
        Expr::Binary(Binary::Pow, ..) => 30,
        Expr::Binary(Binary::Min | Binary::Max, ..) => 2,
        _ => 1,
    }
}

/// What computing a lane-level value again, from inputs and from what is `kept`, costs more than one load.
fn cost(program: &Program, root: Id, kept: &BTreeMap<Id, usize>) -> u64 {
    let (mut seen, mut open, mut sum, mut loads) = (BTreeSet::new(), vec![root], 0, 0_u64);
    while let Some(id) = open.pop() {
        if !program.arena.is_lane(id) || !seen.insert(id) {
            continue;
        }
        if id != root && kept.contains_key(&id) {
            loads += 1;
            continue;
        }
        let expr = program.arena.get(id);
        sum += own_cost(expr);
        loads += u64::from(matches!(expr, Expr::Load(_)));
        for_each_operand(expr, |operand| open.push(operand));
    }
    sum + loads.saturating_sub(1)
}

/// Cost of everything that one element of the row needs, on average over its segments.
pub(crate) fn element_cost(program: &Program) -> u64 {
    let weighed: u64 = program
        .segments
        .iter()
        .enumerate()
        .map(|(segment, (start, end))| (end - start) * segment_cost(program, segment))
        .sum();
    weighed.div_ceil(program.row.max(1))
}

fn segment_cost(program: &Program, segment: usize) -> u64 {
    let bodies = program.reduces.iter().filter_map(|reduce| reduce.bodies.get(segment).copied());
    let values = program.stores.iter().filter_map(|store| match store {
        Store::Lane(_, values) => values.get(segment).copied(),
        Store::Row(..) | Store::Once(..) => None,
    });
    let (mut open, mut seen, mut sum) = (bodies.chain(values).collect::<Vec<Id>>(), BTreeSet::new(), 0);
    while let Some(id) = open.pop() {
        if program.arena.is_lane(id) && seen.insert(id) {
            let expr = program.arena.get(id);
            let scatters = matches!(expr, Expr::Load(load) if program.scatters(&program.loads[load]));
            if let Expr::Scan(scan) = expr {
                open.push(program.scans[scan].body);
            }
            sum += 1 + own_cost(expr) + 4 * u64::from(scatters);
            for_each_operand(expr, |operand| open.push(operand));
        }
    }
    sum
}

/// Lane-level values that an earlier pass has at hand, that a later one needs, and that are worth a buffer.
fn kept_values(program: &Program, base: &Schedule) -> Vec<BTreeMap<Id, usize>> {
    let mut all = vec![];
    for segment in 0..program.segments.len() {
        let computed: Vec<BTreeSet<Id>> = (0..base.passes.len())
            .map(|pass| base.body(program, pass, segment).into_iter().collect())
            .collect();
        let mut kept = BTreeMap::new();
        for pass in 1..base.passes.len() {
            let mut open = base.roots(program, pass, segment);
            let mut seen = BTreeSet::new();
            while let Some(id) = open.pop() {
                if !program.arena.is_lane(id) || !seen.insert(id) || kept.contains_key(&id) {
                    continue;
                }
                let stage = base.stages[id.index()];
                let at_hand = stage < pass && computed[stage].contains(&id);
                if at_hand && cost(program, id, &kept) >= 2 && !program.arena.is_mask(id) {
                    kept.insert(id, kept.len());
                    continue;
                }
                for_each_operand(program.arena.get(id), |operand| open.push(operand));
            }
        }
        all.push(kept);
    }
    all
}

/// Whether a store can go around the caches: whole vectors at aligned places, in the type that is computed.
pub(crate) fn can_stream(program: &Program, access: &Access, dtype: Dtype) -> bool {
    let size = dtype.size() as i64;
    let same = dtype == if program.wide { Dtype::F64 } else { Dtype::F32 };
    let (_, kept) = access.strides.split_last().unwrap_or((&1, &[]));
    let aligned = |elements: i64| elements * size % 64 == 0;
    same && aligned(access.offset)
        && kept.iter().all(|stride| aligned(*stride))
        && program.segments.iter().all(|(start, _)| aligned(*start as i64))
}

/// Loads that move with the rows and lie one behind the other: what prefetching can help.
pub(crate) fn streamed_loads(program: &Program, body: &[Id]) -> Vec<usize> {
    let mut loads = vec![];
    for id in body {
        if let Expr::Load(load) = program.arena.get(*id) {
            let access = &program.loads[load];
            let (row, kept) = access.strides.split_last().unwrap_or((&0, &[]));
            let known = access.lookups.is_empty() && access.guards.is_empty();
            if known && *row == 1 && (kept.is_empty() || kept.iter().any(|stride| *stride != 0)) {
                loads.push(load);
            }
        }
    }
    loads
}

fn params(
    program: &Program,
    schedule: &Schedule,
    region: &Region,
    device: &Device,
) -> BTreeMap<String, Vec<i64>> {
    let mut params = BTreeMap::new();
    let longest = program.segments.iter().map(|(start, end)| end - start).max().unwrap_or(0);
    for pass in 0..schedule.passes.len() {
        let mut work = 0;
        for segment in 0..program.segments.len() {
            let body = schedule.body(program, pass, segment);
            let computed = body.into_iter().filter(|id| !schedule.reads_buffer(*id, pass, segment));
            work = computed.map(|id| own_cost(program.arena.get(id))).max().unwrap_or(0).max(work);
        }
        let reduces = !schedule.passes[pass].reduces.is_empty();
        let guesses: &[i64] = match (work >= DEAR, reduces) {
            (true, _) => &[2, 4, 1],
            (false, true) => &[4, 8, 2, 1],
            (false, false) => &[2, 4, 1, 8],
        };
        let fitting =
            guesses.iter().copied().filter(|unroll| *unroll == 1 || *unroll as u64 * WIDEST <= longest);
        params.entry(schedule.unroll(pass)).or_insert_with(|| fitting.collect());
    }
    let metas = region.output_metas();
    let streamed: u64 = program
        .stores
        .iter()
        .filter(|store| {
            matches!(store, Store::Lane(..))
                && can_stream(program, store.access(), metas[store.access().tensor].dtype)
        })
        .map(|store| metas[store.access().tensor].bytes())
        .sum();
    if streamed >= STREAM_OFFER && program.outer.is_empty() {
        params.insert("STREAM".to_owned(), if streamed >= STREAM_FIRST { vec![1, 0] } else { vec![0, 1] });
    }
    if region.bytes() >= AHEAD_OFFER && program.outer.is_empty() && (program.rows() > 1 || schedule.flat) {
        let values = if schedule.passes.len() > 1 { vec![1, 0, 2] } else { vec![0, 512, 2048] };
        params.insert("AHEAD".to_owned(), values);
    }
    params.insert("GRAIN".to_owned(), grains(program, device));
    params
}

/// Whether rows are so few and long that a thread for each leaves others without work.
fn can_share(program: &Program, device: &Device) -> bool {
    let threads = u64::try_from(device.cores).unwrap_or(1);
    program.outer.is_empty()
        && program.scans.is_empty()
        && program.totals.is_empty()
        && program.rows() < threads.max(1) * 2
        && program.row * element_cost(program) >= 4 * THREAD_WORK
}

/// How many vectors of rows are walked together: each step down the rows then reads so many neighbours.
fn across_params(program: &Program, device: &Device) -> BTreeMap<String, Vec<i64>> {
    let fitting =
        [4, 2, 8, 1].into_iter().filter(|unroll| *unroll == 1 || *unroll as u64 * WIDEST <= program.row);
    BTreeMap::from([("WIDTH".to_owned(), fitting.collect()), ("GRAIN".to_owned(), grains(program, device))])
}

/// Elements a thread must have before another one is asked for: all threads, or none but the caller's.
fn grains(program: &Program, device: &Device) -> Vec<i64> {
    let elements = program.points();
    let threads = u64::try_from(device.cores).unwrap_or(1).max(1);
    let work = elements * element_cost(program);
    // On a machine with more threads than this one they may all come, as long as each has work.
    let enough = (THREAD_WORK / element_cost(program).max(1)).max(1);
    let all = (elements / threads).min(enough).max(1) as i64;
    let alone = elements as i64 + 1;
    // Two threads may share one core, and then a second one can cost more than it brings.
    if work >= 128 * THREAD_WORK {
        vec![all]
    } else if work >= THREAD_WORK {
        vec![all, alone]
    } else {
        vec![alone, all]
    }
}
