//! How much a region computes, whatever computes it.

use crate::dtype::Dtype;
use crate::graph::{Arg, TensorMeta, Value};
use crate::region::{Operand, Region, RegionNode};

/// The most terms that any call of the region sums into one element.
pub fn longest_reduction(region: &Region) -> u64 {
    region.nodes.iter().map(|node| terms(region, node)).max().unwrap_or(1).max(1)
}

/// Additions and multiplications of the region's matrix products and convolutions, a term of a sum
/// counting two. What else it computes is not counted: that waits for memory.
///
/// Double precision counts twice, since a register holds half as many numbers.
pub fn product_flops(region: &Region) -> u64 {
    let flops = |node: &RegionNode| {
        let terms = product_terms(region, node)?;
        let result = node.value.tensor()?;
        Some(2 * result.numel() * terms * if result.dtype == Dtype::F64 { 2 } else { 1 })
    };
    region.nodes.iter().filter_map(flops).sum()
}

/// Terms of each sum of a matrix product or convolution, `None` for other operators.
fn product_terms(region: &Region, node: &RegionNode) -> Option<u64> {
    let operand = |position: usize| match node.args.get(position)? {
        Arg::Ref(operand) => meta(region, *operand),
        _ => None,
    };
    match node.op.split('.').nth(1)? {
        "mm" | "bmm" | "linear" | "matmul" | "mv" | "dot" => operand(0)?.shape.last().copied(),
        "addmm" | "baddbmm" | "addmv" => operand(1)?.shape.last().copied(),
        // A filter holds the terms of one element of its channel.
        "convolution" => operand(1)?.shape.split_first().map(|(_, filter)| filter.iter().product()),
        _ => None,
    }
}

fn terms(region: &Region, node: &RegionNode) -> u64 {
    if let Some(terms) = product_terms(region, node) {
        return terms;
    }
    let results: Vec<u64> = match &node.value {
        Value::Tensor(meta) => vec![meta.numel()],
        Value::Tuple(metas) => metas.iter().flatten().map(TensorMeta::numel).collect(),
        Value::Other => vec![],
    };
    let smallest = results.into_iter().filter(|n| *n > 0).min().unwrap_or(1);
    let mut longest = 1;
    for arg in &node.args {
        arg.for_each_ref(&mut |operand| {
            longest = longest.max(meta(region, *operand).map_or(0, TensorMeta::numel) / smallest);
        });
    }
    longest
}

fn meta(region: &Region, operand: Operand) -> Option<&TensorMeta> {
    match operand {
        Operand::Input(index) => Some(&region.inputs.get(index)?.meta),
        Operand::Node(index) => region.nodes.get(index)?.value.tensor(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{REGION_SCHEMA, RegionId, RegionInput};

    fn region(op: &str, inputs: &[&[u64]], result: &[u64], dtype: Dtype) -> Region {
        let input =
            |shape: &&[u64]| RegionInput { meta: TensorMeta::contiguous(dtype, shape), constant: false };
        Region {
            schema: REGION_SCHEMA.to_owned(),
            id: RegionId("0".into()),
            inputs: inputs.iter().map(input).collect(),
            nodes: vec![RegionNode {
                op: op.to_owned(),
                args: (0..inputs.len()).map(|index| Arg::Ref(Operand::Input(index))).collect(),
                kwargs: vec![],
                value: Value::Tensor(TensorMeta::contiguous(dtype, result)),
            }],
            outputs: vec![0],
        }
    }

    #[test]
    fn a_reduction_is_as_long_as_its_row() {
        let mean = region("aten.mean.dim", &[&[64, 1024]], &[64, 1], Dtype::F32);
        assert_eq!((longest_reduction(&mean), product_flops(&mean)), (1024, 0));
    }

    #[test]
    fn a_product_sums_over_what_its_operands_share() {
        // A large right operand, a large left one, and both small beside the result.
        for (m, k, n) in [(2, 48, 4096), (4096, 48, 2), (512, 3, 512)] {
            let cases = [
                region("aten.mm.default", &[&[m, k], &[k, n]], &[m, n], Dtype::F32),
                region("aten.addmm.default", &[&[n], &[m, k], &[k, n]], &[m, n], Dtype::F32),
                region("aten.linear.default", &[&[1, m, k], &[n, k], &[n]], &[1, m, n], Dtype::F32),
                region("aten.bmm.default", &[&[5, m, k], &[5, k, n]], &[5, m, n], Dtype::F32),
            ];
            for case in cases {
                let batch = if case.nodes[0].op == "aten.bmm.default" { 5 } else { 1 };
                assert_eq!(longest_reduction(&case), k, "{}", case.nodes[0].op);
                assert_eq!(product_flops(&case), 2 * batch * m * k * n, "{}", case.nodes[0].op);
            }
        }
        let image: [&[u64]; 2] = [&[1, 16, 8, 8], &[32, 16, 3, 3]];
        assert_eq!(
            longest_reduction(&region("aten.convolution.default", &image, &[1, 32, 6, 6], Dtype::F32)),
            144
        );
        let wide = region("aten.mm.default", &[&[2, 3], &[3, 4]], &[2, 4], Dtype::F64);
        assert_eq!(product_flops(&wide), 96);
    }
}
