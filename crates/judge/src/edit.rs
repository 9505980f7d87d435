//! Edits that make inputs new: every number becomes `x * m`, each with an `m` of its own just below one.
//!
//! A factor in (15/16, 1] keeps what inputs live by: sign, zero, infinity and NaN, the order of
//! magnitude, and with it bounds that a domain sets from above. One factor for all would not do: what is
//! the same for `x` and `2 x` could be answered from memory. Integers and truth values mean something
//! else than their size, so they stay; where a region takes nothing else, they change places.

use autokernel_core::dtype::Dtype;

/// How the bytes of a tensor are made from those of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Not at all.
    None,
    /// Every number by a factor of this key's.
    Scale(u64),
    /// Element `i` comes from `i + n`, around the end.
    Roll(u64),
}

/// The state-increment generator of Steele, Lea and Flood (2014), of which any word can be had alone.
pub(crate) fn word(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Edits elements of a tensor in place; `first` is the index of the first one and a multiple of four,
/// so that a tensor can be edited in pieces.
pub(crate) fn scale(dtype: Dtype, key: u64, first: u64, bytes: &mut [u8]) {
    match dtype {
        Dtype::F64 => {
            for (i, x) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let m = 1.0 - (word(key, first + i as u64) >> 11) as f64 * 2.0_f64.powi(-57);
                *x = (f64::from_le_bytes(*x) * m).to_le_bytes();
            }
        }
        Dtype::F32 => {
            for (i, pair) in bytes.chunks_mut(8).enumerate() {
                let word = word(key, first / 2 + i as u64);
                let draws = [word as u32, (word >> 32) as u32];
                for (x, draw) in pair.as_chunks_mut::<4>().0.iter_mut().zip(draws) {
                    // 24 bits: exact, and 1 - 2^-28 the largest below one that still rounds to less.
                    let m = 1.0 - (draw >> 8) as f32 * 2.0_f32.powi(-28);
                    *x = (f32::from_le_bytes(*x) * m).to_le_bytes();
                }
            }
        }
        Dtype::F16 => halves::<10, 0x1f>(key, first, bytes),
        Dtype::Bf16 => halves::<7, 0xff>(key, first, bytes),
        Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 | Dtype::U8 | Dtype::Bool => {}
    }
}

/// Sixteen-bit numbers with `FRACTION` bits of fraction and exponents up to `SPECIAL`.
fn halves<const FRACTION: u32, const SPECIAL: u32>(key: u64, first: u64, bytes: &mut [u8]) {
    for (i, four) in bytes.chunks_mut(8).enumerate() {
        let word = word(key, first / 4 + i as u64);
        for (lane, x) in four.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let draw = (word >> (16 * lane)) as u32 & 0xfff;
            *x = half::<FRACTION, SPECIAL>(u16::from_le_bytes(*x), draw).to_le_bytes();
        }
    }
}

/// `x * (1 - draw / 2^16)`, rounded to nearest; in whole numbers, since no type of Rust's has 16 bits.
fn half<const FRACTION: u32, const SPECIAL: u32>(x: u16, draw: u32) -> u16 {
    let bits = u32::from(x);
    let (sign, exponent) = (bits & 0x8000, (bits & 0x7fff) >> FRACTION);
    let fraction = bits & ((1 << FRACTION) - 1);
    if exponent == SPECIAL {
        return x;
    }
    let one = 1 << FRACTION;
    let significand = if exponent == 0 { fraction } else { one | fraction };
    let mut product = u64::from(significand) * u64::from(0x1_0000 - draw);
    let mut exponent = exponent.max(1);
    // At most one place is lost, and none below the smallest exponent.
    if product < u64::from(one) << 16 && exponent > 1 {
        product <<= 1;
        exponent -= 1;
    }
    let rounded = ((product + 0x8000) >> 16) as u32;
    // The leading bit counts one exponent up; without it the number is subnormal.
    (sign | (((exponent - 1) << FRACTION) + rounded)) as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::source::decode;

    const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16];

    fn decoded(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
        let mut values = vec![];
        decode(dtype, bytes, &mut values);
        values
    }

    proptest! {
        /// Any bits at all: NaN, infinities, subnormal numbers.
        #[test]
        fn what_inputs_live_by_survives(mut bytes in proptest::collection::vec(any::<u8>(), 64..=64), key: u64) {
            for dtype in FLOATS {
                let before = decoded(dtype, &bytes);
                let mut edited = bytes.clone();
                scale(dtype, key, 0, &mut edited);
                for (x, y) in before.iter().zip(decoded(dtype, &edited)) {
                    if x.is_finite() {
                        prop_assert_eq!(x.is_sign_negative(), y.is_sign_negative());
                        prop_assert!(y.abs() <= x.abs());
                        let step = match dtype {
                            Dtype::F16 => 2.0_f64.powi(-24),
                            Dtype::Bf16 => 2.0_f64.powi(-133),
                            Dtype::F32 => 2.0_f64.powi(-149),
                            _ => f64::from_bits(1),
                        };
                        let unit = dtype.unit_roundoff().unwrap();
                        prop_assert!(y.abs() >= x.abs() * (15.0 / 16.0) * (1.0 - unit) - step, "{:?} {} {}", dtype, x, y);
                    } else {
                        prop_assert_eq!(x.to_bits() & (1 << 63), y.to_bits() & (1 << 63));
                        prop_assert_eq!(x.is_nan(), y.is_nan());
                    }
                }
            }
            for dtype in [Dtype::I64, Dtype::I32, Dtype::I16, Dtype::I8, Dtype::U8, Dtype::Bool] {
                let before = bytes.clone();
                scale(dtype, key, 0, &mut bytes);
                prop_assert_eq!(&before, &bytes);
            }
        }

        #[test]
        fn pieces_make_the_whole(bytes in proptest::collection::vec(any::<u8>(), 160..=160), key: u64, cut in 1_usize..5) {
            for dtype in FLOATS {
                let size = dtype.size() as usize;
                let (mut whole, mut pieces) = (bytes.clone(), bytes.clone());
                scale(dtype, key, 0, &mut whole);
                let (head, tail) = pieces.split_at_mut(4 * cut * size);
                scale(dtype, key, 0, head);
                scale(dtype, key, 4 * cut as u64, tail);
                prop_assert_eq!(&whole, &pieces);
            }
        }
    }

    #[test]
    fn halves_are_rounded_to_nearest() {
        for (dtype, bits) in
            [(Dtype::F16, 0x7bff_u16), (Dtype::F16, 0x0403), (Dtype::F16, 0x0211), (Dtype::Bf16, 0x3fc3)]
        {
            for draw in [0, 1, 7, 0x123, 0x800, 0xfff] {
                let got = match dtype {
                    Dtype::F16 => half::<10, 0x1f>(bits, draw),
                    _ => half::<7, 0xff>(bits, draw),
                };
                let value = |bits: u16| decoded(dtype, &bits.to_le_bytes())[0];
                let exact = value(bits) * (1.0 - f64::from(draw) / 65536.0);
                let error = |bits: u16| (value(bits) - exact).abs();
                assert!(
                    error(got) <= error(got + 1) && error(got) <= error(got - 1),
                    "{dtype:?} {bits:#x} {draw:#x}"
                );
            }
        }
    }

    #[test]
    fn nearly_every_number_changes() {
        for dtype in FLOATS {
            let values: Vec<f64> = (0..4096).map(|i| (f64::from(i) * 0.7).sin() * 3.0).collect();
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|v| match dtype {
                    Dtype::F64 => v.to_le_bytes().to_vec(),
                    Dtype::F32 => (*v as f32).to_le_bytes().to_vec(),
                    Dtype::Bf16 => (((*v as f32).to_bits() >> 16) as u16).to_le_bytes().to_vec(),
                    // Numbers around one, whatever their fraction.
                    _ => (0x3c00 | (v.to_bits() >> 40) as u16 & 0x3ff).to_le_bytes().to_vec(),
                })
                .collect();
            let (mut one, mut other) = (bytes.clone(), bytes.clone());
            scale(dtype, 1, 0, &mut one);
            scale(dtype, 2, 0, &mut other);
            let size = dtype.size() as usize;
            let same =
                |a: &[u8], b: &[u8]| a.chunks(size).zip(b.chunks(size)).filter(|(a, b)| a == b).count();
            assert!(same(&bytes, &one) < 4096 / 8 && same(&one, &other) < 4096 / 4, "{dtype:?}");
            // No factor for all of them.
            let (before, after) = (decoded(dtype, &bytes), decoded(dtype, &one));
            let ratios: Vec<f64> =
                before.iter().zip(&after).filter(|(b, _)| **b != 0.0).map(|(b, a)| a / b).collect();
            let (low, high) = ratios.iter().fold((1.0_f64, 0.0_f64), |(l, h), r| (l.min(*r), h.max(*r)));
            assert!(low < 0.95 && high > 0.98, "{dtype:?} {low} {high}");
        }
    }
}
