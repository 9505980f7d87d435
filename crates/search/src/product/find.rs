//! Which matrices a region multiplies.

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::{Arg, TensorMeta};
use autokernel_core::region::{Operand, Region, RegionNode};

use crate::affine::row_major;
use crate::loops::{Program, Store};
use crate::lower::{Unsupported, argument, source};
use crate::op::{self, Class};

/// A matrix inside an input: element `(i, j)` lies at `i * strides[0] + j * strides[1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Number of the region's input.
    pub input: usize,
    /// In elements.
    pub strides: [u64; 2],
}

/// The products of a region: `left · right[i]`, all of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Products {
    /// Rows of the results, and of `left`.
    pub rows: u64,
    /// Columns of the results, and of each of `right`.
    pub columns: u64,
    /// Terms of each sum.
    pub depth: u64,
    /// Indexed by row and term.
    pub left: Matrix,
    /// Indexed by term and column; in the order of [`Program::products`].
    pub right: Vec<Matrix>,
    /// Element type of all of `right`.
    pub right_dtype: Dtype,
}

/// Matrices beyond these leave a tile too few registers.
const MOST: usize = 4;

/// The products of a lowered region, or why they do not fit into one kernel.
pub fn find(program: &Program, region: &Region) -> Result<Products, Unsupported> {
    let mut found: Option<Products> = None;
    for number in &program.products {
        let next = product(region, &region.nodes[*number])?;
        let Some(first) = &mut found else {
            found = Some(next);
            continue;
        };
        let shared = first.left == next.left
            && (first.rows, first.columns, first.depth, first.right_dtype)
                == (next.rows, next.columns, next.depth, next.right_dtype);
        if !shared || first.right.len() == MOST {
            let reason = "stands beside a product of other matrices or sizes";
            return Err(Unsupported::new(&region.nodes[*number].op, reason));
        }
        first.right.extend(next.right);
    }
    let found = found.ok_or_else(|| Unsupported::new("region", "has no product"))?;
    check_program(program, region, &found)?;
    Ok(found)
}

/// The rest of the region must walk over the results row by row, as they come.
fn check_program(program: &Program, region: &Region, found: &Products) -> Result<(), Unsupported> {
    let op = &region.nodes[program.products[0]].op;
    if !program.reduces.is_empty() {
        return Err(Unsupported::new(op, "stands before a reduction"));
    }
    if program.segments.len() > 1 || program.row != found.columns || program.rows() != found.rows {
        return Err(Unsupported::new(op, "is walked in another order than that of its rows"));
    }
    if program.stores.iter().any(|store| matches!(store, Store::Row(..))) {
        return Err(Unsupported::new(op, "stands beside an output of one element a row"));
    }
    let mut expected: Vec<i64> =
        row_major(&program.kept).iter().map(|stride| stride * (found.columns as i64 + 1)).collect();
    expected.push(1);
    let inputs = region.inputs.len();
    let mut tiles = program.loads.iter().filter(|load| load.tensor >= inputs);
    if tiles.any(|load| load.offset != 0 || load.strides != expected) {
        return Err(Unsupported::new(op, "is needed at other places than where it is computed"));
    }
    Ok(())
}

/// The operands of a product: the left one, the right one, whether the right one is given by columns.
fn operands(node: &RegionNode) -> Option<(Operand, Operand, bool)> {
    let position = match node.op.as_str() {
        "aten.mm.default" | "aten.linear.default" => 0,
        "aten.addmm.default" => 1,
        _ => return None,
    };
    match (argument(node, position, ""), argument(node, position + 1, "")) {
        (Some(Arg::Ref(left)), Some(Arg::Ref(right))) => {
            Some((*left, *right, node.op == "aten.linear.default"))
        }
        _ => None,
    }
}

fn product(region: &Region, node: &RegionNode) -> Result<Products, Unsupported> {
    let fail = |reason: &str| Unsupported::new(&node.op, reason);
    let (left, right, transposed) = operands(node).ok_or_else(|| fail("is no product of two tensors"))?;
    let (left_input, left) = in_memory(region, left, &node.op)?;
    let (right_input, right) = in_memory(region, right, &node.op)?;
    if !left.dtype.is_float() || !right.dtype.is_float() {
        return Err(fail("multiplies integers"));
    }
    let ([.., depth], [a, b]) = (left.shape.as_slice(), right.shape.as_slice()) else {
        return Err(fail("multiplies something that is no matrix"));
    };
    let mut strides = [right.stride[0], right.stride[1]];
    let (inner, columns) = if transposed { (b, a) } else { (a, b) };
    if transposed {
        strides.swap(0, 1);
    }
    let rows = left.numel() / depth.max(&1);
    if inner != depth || rows * columns * depth == 0 {
        return Err(fail("multiplies matrices that are empty or do not fit"));
    }
    Ok(Products {
        rows,
        columns: *columns,
        depth: *depth,
        left: Matrix { input: left_input, strides: left_strides(left).ok_or_else(|| fail(UNEVEN))? },
        right: vec![Matrix { input: right_input, strides }],
        right_dtype: right.dtype,
    })
}

const UNEVEN: &str = "has a left operand whose rows do not lie at equal distances";

/// Strides of a tensor as a matrix whose rows are all dimensions but the last.
fn left_strides(meta: &TensorMeta) -> Option<[u64; 2]> {
    let (depth_stride, outer) = meta.stride.split_last()?;
    let (mut row_stride, mut walked) = (0, 1);
    for (size, stride) in meta.shape.iter().zip(outer).rev().filter(|(size, _)| **size != 1) {
        if walked == 1 {
            row_stride = *stride;
        } else if *stride != row_stride * walked {
            return None;
        }
        walked *= size;
    }
    Some([row_stride, *depth_stride])
}

/// Whether an operator only looks at its operand's memory in another way, from the same place on.
pub(crate) fn is_view(op: &str) -> bool {
    let name = op.split('.').nth(1).unwrap_or(op);
    matches!(name, "view" | "t" | "transpose" | "permute" | "unsqueeze" | "squeeze" | "expand" | "alias")
        && op::class(op) == Some(Class::View)
}

/// The input that an operand is a view of, with the view's shape and strides.
fn in_memory<'r>(
    region: &'r Region,
    operand: Operand,
    op: &str,
) -> Result<(usize, &'r TensorMeta), Unsupported> {
    let mut meta = None;
    let mut at = operand;
    loop {
        match at {
            Operand::Input(input) => return Ok((input, meta.unwrap_or(&region.inputs[input].meta))),
            Operand::Node(number) => {
                let node = &region.nodes[number];
                if !is_view(&node.op) {
                    return Err(Unsupported::new(op, "multiplies what the region computes"));
                }
                meta = meta.or(node.value.tensor());
                at = source(node)?;
            }
        }
    }
}

/// Additions and multiplications of a call, 0 where it is no product; a term of a sum counts two.
pub(crate) fn flops(op: &str, result: &TensorMeta, left: &TensorMeta) -> u64 {
    match op::class(op) {
        Some(Class::Product) => 2 * result.numel() * left.shape.last().copied().unwrap_or(1),
        _ => 0,
    }
}
