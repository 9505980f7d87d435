//! How the work of a product is cut: tiles of registers, blocks of cache, parts for threads.
//!
//! A tile is `MR` rows by `NV` vectors of accumulators that live in registers over the whole sum, so
//! results are touched once. `MB` panels of `MR` rows of the left operand are packed at a time and
//! stay in the second-level cache while the strips of the right operand stream by, each read once a
//! block. Threads part the rows, the columns (`SPLIT` of them side by side), or both.

use std::collections::BTreeMap;

use autokernel_core::plan::Device;
use autokernel_core::region::Region;

use super::Products;
use crate::loops::Program;

/// Accumulators of a tile where there are 32 vector registers; the others hold a row's number and a strip's.
const ACCUMULATORS: u64 = 28;
/// Lanes of the narrowest element type in the widest register; strips are padded for it.
const LANES: u64 = 16;
/// Bytes of packed panels that leave the strips room in a second-level cache.
const BLOCK_BYTES: u64 = 512 << 10;
/// Terms (a multiplication and an addition each) that one thread does in about five microseconds.
const GRAIN: u64 = 1 << 18;

/// Numbers of one kernel.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Parameters for the sweep, first guess first.
    pub params: BTreeMap<String, Vec<i64>>,
    /// Elements of one packed right operand, whatever the width of a vector.
    pub packed: u64,
    /// Elements of a packed panel of the left operand for each row of `MR`.
    pub panel_row: u64,
    /// One line for people.
    pub note: String,
}

/// Chooses the parameters and their first guesses.
pub fn plan(program: &Program, products: &Products, region: &Region, device: &Device) -> Plan {
    let threads = u64::try_from(device.cores).unwrap_or(1).max(1);
    let many = products.right.len() as u64;
    let vectors: Vec<u64> = match many {
        1 if products.rows * 4 <= ACCUMULATORS => vec![2, 4],
        1 => vec![2],
        _ => vec![1],
    };
    let widest = vectors.iter().max().copied().unwrap_or(1);
    let heights = heights(products.rows, ACCUMULATORS / (vectors[0] * many), threads);
    let element = if program.wide { 8 } else { 4 };
    let panels = products.rows.div_ceil(heights[0]);
    let block = (BLOCK_BYTES / (heights[0] * products.depth * element)).clamp(1, panels);
    let mut blocks = vec![block];
    blocks.extend([(block / 2).max(1), (block * 2).min(panels)]);
    let strips = products.columns.div_ceil(vectors[0] * LANES);
    let work = products.rows * products.columns * products.depth * many;
    let alone = work + 1;
    let mut params = BTreeMap::new();
    let mut insert = |name: &str, values: Vec<u64>| {
        let mut kept: Vec<i64> = vec![];
        for value in values {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            if !kept.contains(&value) {
                kept.push(value);
            }
        }
        params.insert(name.to_owned(), kept);
    };
    insert("GRAIN", if work >= 32 * GRAIN { vec![GRAIN] } else { vec![GRAIN, alone] });
    insert("MB", blocks);
    insert("MR", heights);
    insert("NV", vectors);
    insert("SPLIT", splits(panels, strips, threads));
    let constant = products.right.iter().all(|right| region.inputs[right.input].constant);
    let note = match (many, constant) {
        (1, true) => "a product from a packed constant, the rest on each tile",
        (1, false) => "a product, packed at each call, the rest on each tile",
        (_, true) => "products of one operand from packed constants, the rest on each tile",
        (_, false) => "products of one operand, packed at each call, the rest on each tile",
    };
    Plan {
        params,
        packed: products.columns.div_ceil(widest * LANES) * widest * LANES * products.depth,
        panel_row: products.depth,
        note: note.to_owned(),
    }
}

/// Heights of tiles, the one that should be fastest first.
///
/// Panels get `rows / panels` rows, up or down. What a thread with the most panels does counts, and a
/// low tile loads as many strips as a high one for less work.
fn heights(rows: u64, most: u64, threads: u64) -> Vec<u64> {
    let most = most.max(1);
    if rows <= most {
        return vec![rows];
    }
    let mut known: Vec<(u64, u64)> = vec![];
    for height in (most.div_ceil(2)..=most).rev() {
        let panels = rows.div_ceil(height);
        let even = rows.div_ceil(panels);
        let cost = panels.div_ceil(threads) * (even * 8 + 8);
        if known.iter().all(|(_, other)| rows.div_ceil(*other) != panels) {
            known.push((cost, even));
        }
    }
    known.sort_by_key(|(cost, height)| (*cost, std::cmp::Reverse(*height)));
    known.into_iter().take(3).map(|(_, height)| height).collect()
}

/// How many threads stand side by side over the columns: few where there are panels for all.
fn splits(panels: u64, strips: u64, threads: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (1..=threads).filter(|across| threads.is_multiple_of(*across)).collect();
    // The part that the busiest thread has to do, then the least that is packed twice.
    let cost = |across: u64| panels.div_ceil(threads / across) * strips.div_ceil(across);
    all.sort_by_key(|across| (cost(*across), *across));
    all.truncate(4);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heights_fill_threads_evenly_and_never_exceed_the_registers() {
        assert_eq!(heights(256, 14, 2)[0], 13, "20 panels part in two halves, 19 do not");
        assert_eq!(heights(1, 14, 8), [1]);
        for rows in 1..200 {
            for threads in [1, 2, 3, 64] {
                let found = heights(rows, 14, threads);
                assert!(!found.is_empty() && found.iter().all(|height| (1..=14).contains(height)), "{rows}");
            }
        }
    }

    #[test]
    fn few_rows_are_parted_by_columns() {
        assert_eq!(splits(1, 32, 4)[0], 4);
        assert_eq!(splits(20, 32, 2)[0], 1);
    }
}
