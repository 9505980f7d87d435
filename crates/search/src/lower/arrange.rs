//! Which dimension vectors run along, once all accesses are known.

use super::{Lower, Unsupported};
use crate::loops::{Access, Program, Store};

/// Below this a row does not fill vectors.
const MIN_ROW: u64 = 8;
/// Elements apart at which lanes may be read: an interleaved layout. Further apart each is a cache line.
const INTERLEAVED: i64 = 4;
/// The same where a row is so short that whole rows lie in the lines that are read.
const SHORT_ROWS: i64 = 8;

pub(super) fn finish(lowering: Lower<'_>, stores: Vec<Store>, wide: bool) -> Result<Program, Unsupported> {
    let space = lowering.space;
    let mut sizes: Vec<u64> = space.dims.iter().map(|dim| dim.size).collect();
    let mut program = Program {
        kept: vec![],
        outer: vec![],
        row: 0,
        across: false,
        segments: space.segments.clone(),
        arena: lowering.arena,
        loads: lowering.loads,
        guards: lowering.guards,
        positions: lowering.positions,
        lookups: lowering.lookups,
        tables: lowering.tables,
        reduces: lowering.reduces,
        scans: lowering.scans,
        totals: lowering.totals,
        stores,
        products: lowering.products,
        wide,
    };
    let row_dims = program.coalesce(&mut sizes, space.row_dims);
    let first_row = sizes.len() - row_dims;
    let along = check(&program, sizes[sizes.len() - 1], sizes.len() - 1);
    let plain = program.segments.len() == 1 && program.lookups.iter().all(|lookup| !lookup.lane);
    let special = !program.guards.is_empty()
        || !program.lookups.is_empty()
        || !program.positions.is_empty()
        || !program.scans.is_empty()
        || !program.totals.is_empty();
    if !program.products.is_empty() && (special || row_dims > 1) {
        return Err(Unsupported::new("region", "joins a product with work that is not done row by row"));
    }
    if !program.scans.is_empty() && program.segments.len() > 1 {
        return Err(Unsupported::new("region", "adds up a row in pieces"));
    }
    if let Err(reason) = along {
        let dim = across(&program, &sizes, first_row).filter(|_| {
            plain && program.needs_rows() && program.totals.is_empty() && program.products.is_empty()
        });
        let dim = dim.ok_or(reason)?;
        for strides in program.strides_mut() {
            let stride = strides.remove(dim);
            strides.push(stride);
        }
        let size = sizes.remove(dim);
        sizes.push(size);
        program.across = true;
        program.outer = sizes[first_row - 1..sizes.len() - 1].to_vec();
        program.kept = sizes[..first_row - 1].to_vec();
    } else {
        if row_dims > 1 && !plain {
            return Err(Unsupported::new("region", "walks pieces of a row in several dimensions"));
        }
        program.outer = sizes[first_row..sizes.len() - 1].to_vec();
        program.kept = sizes[..first_row].to_vec();
    }
    program.row = sizes[sizes.len() - 1];
    if program.segments.len() == 1 {
        program.segments = vec![(0, program.row)];
    }
    Ok(program)
}

/// Whether vectors can run along a dimension of so many places.
fn check(program: &Program, size: u64, dim: usize) -> Result<(), Unsupported> {
    if size < MIN_ROW {
        return Err(Unsupported::new("region", format!("has rows of only {size} elements")));
    }
    let writes = program.stores.iter().filter(|store| matches!(store, Store::Lane(..)));
    if writes.into_iter().any(|store| store.access().strides[dim] != 1) {
        return Err(Unsupported::new("region", "writes an output against the grain of its layout"));
    }
    let scattered = |load: &Access| load.strides[dim].abs() > INTERLEAVED && !program.scatters(load);
    if program.loads.iter().any(scattered) {
        return Err(Unsupported::new("region", "reads an input against the grain of its layout"));
    }
    Ok(())
}

/// A kept dimension that lies in memory as vectors need it, so that each lane can have a row of its own.
fn across(program: &Program, sizes: &[u64], first_row: usize) -> Option<usize> {
    let row: u64 = sizes[first_row..].iter().product();
    let furthest = if row < MIN_ROW { SHORT_ROWS } else { INTERLEAVED };
    let fits = |dim: &usize| {
        sizes[*dim] >= MIN_ROW
            && program.stores.iter().all(|store| match store {
                Store::Lane(access, _) => access.strides[*dim] == 1,
                // One number for a whole row may be written anywhere, if rows are told apart.
                Store::Row(access, _) => access.strides[*dim] != 0,
                Store::Once(..) => false,
            })
            && program.loads.iter().all(|load| load.strides[*dim].abs() <= furthest)
            && program.guards.iter().all(|guard| guard.strides[*dim] == 0)
            && program.lookups.iter().all(|lookup| lookup.at.strides[*dim] == 0)
    };
    (0..first_row).rev().find(fits)
}
