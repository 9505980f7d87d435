//! Sums over all rows: each thread's own, then those of all threads in their order.

use super::Emitter;
use crate::loops::{Store, for_each_operand};
use crate::schedule::AFTER_ROWS;

/// Most threads whose sums are kept apart.
const MOST: u64 = 64;
/// Sums of one thread, in a cache line of their own.
const LINE: usize = 8;

impl Emitter<'_> {
    fn totals(&self) -> usize {
        self.program.totals.len()
    }

    /// Where a function that works on rows begins to sum.
    pub(super) fn begin_totals(&mut self) {
        for total in 0..self.totals() {
            self.text.line(&format!("double w{total} = 0;"));
        }
    }

    /// After each row.
    pub(super) fn add_totals(&mut self) {
        for (total, value) in self.program.totals.iter().enumerate() {
            let value = self.scalar(*value);
            self.text.line(&format!("w{total} += double({value});"));
        }
    }

    pub(super) fn end_totals(&mut self) {
        for total in 0..self.totals() {
            self.text.line(&format!("total[{total}] = w{total};"));
        }
    }

    /// Arguments for the sums of a thread that works alone, and of one of several.
    pub(super) fn totals_of_threads(&self) -> (&'static str, &'static str) {
        if self.totals() == 0 { ("", "") } else { (", total[0]", ", total[t]") }
    }

    pub(super) fn declare_totals(&mut self) {
        if self.totals() > 0 {
            let each = self.totals().next_multiple_of(LINE);
            self.text.line(&format!(
                "n = n < {MOST} ? n : {MOST};\nalignas(64) double total[{MOST}][{each}] = {{}};"
            ));
        }
    }

    /// Joins the sums and writes what follows from them. Threads that never came have left zeros.
    pub(super) fn write_totals(&mut self) {
        for total in 0..self.totals() {
            self.text.line(&format!("double w{total} = 0;"));
            self.text.line(&format!("for (int64_t t = 0; t < {MOST}; ++t) w{total} += total[t][{total}];"));
        }
        let mut needed = std::collections::BTreeSet::new();
        let mut open: Vec<_> = self
            .program
            .stores
            .iter()
            .filter_map(|store| if let Store::Once(_, value) = store { Some(*value) } else { None })
            .collect();
        while let Some(id) = open.pop() {
            if self.schedule.stages[id.index()] == AFTER_ROWS && needed.insert(id) {
                for_each_operand(self.expr(id), |operand| open.push(operand));
            }
        }
        for id in needed {
            let value = self.operation(id);
            if !value.is_empty() {
                let kind = if self.program.arena.is_mask(id) { "bool" } else { "E" };
                self.text.line(&format!("const {kind} s{} = {value};", id.0));
            }
        }
        for store in &self.program.stores {
            if let Store::Once(access, value) = store {
                let line =
                    format!("store_from(out{} + {}, {});", access.tensor, access.offset, self.scalar(*value));
                self.text.line(&line);
            }
        }
    }
}
