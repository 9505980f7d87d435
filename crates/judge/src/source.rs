//! Reading tensors from wherever they lie (arena, file, another process's memory), in logical order
//! and in pieces, so that the parent's memory stays small.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;
use autokernel_worker::memory::{Arena, MemoryError};

/// Bytes that can be read at an offset.
pub trait Source {
    /// Fills `buf` from `offset`, or fails.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
}

impl Source for Vec<u8> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start.checked_add(buf.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(self.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Source for File {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buf, offset)
    }
}

/// One buffer of an arena.
#[derive(Clone, Copy, Debug)]
pub struct ArenaBuffer<'a> {
    /// The arena.
    pub arena: &'a Arena,
    /// Which of its buffers.
    pub buffer: usize,
}

impl Source for ArenaBuffer<'_> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.arena.read(self.buffer, offset, buf).map_err(|e| match e {
            MemoryError::Io { source, .. } => source,
            other => io::Error::other(other),
        })
    }
}

/// A tensor somewhere: its bytes and how they are laid out.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Its storage, first element at offset 0.
    pub source: &'a dyn Source,
    /// Element type, shape, strides.
    pub meta: &'a TensorMeta,
}

/// The elements of a tensor in logical (row-major) order.
pub(crate) struct Logical<'a> {
    source: &'a dyn Source,
    /// Set for a tensor whose storage order is another: gathered once. Such outputs are rare
    /// (channels-last, transposed), and reading them piecewise would read each page many times.
    gathered: Option<Vec<u8>>,
    size: u64,
}

impl<'a> Logical<'a> {
    pub(crate) fn new(tensor: Tensor<'a>) -> io::Result<Self> {
        let gathered = if tensor.meta.is_contiguous() { None } else { Some(gather(tensor)?) };
        Ok(Self { source: tensor.source, gathered, size: tensor.meta.dtype.size() })
    }

    /// The bytes of elements `start..start + count`.
    pub(crate) fn read(&self, start: u64, count: usize, bytes: &mut Vec<u8>) -> io::Result<()> {
        bytes.resize(count * self.size as usize, 0);
        match &self.gathered {
            Some(all) => all.read_at(start * self.size, bytes),
            None => self.source.read_at(start * self.size, bytes),
        }
    }
}

fn gather(tensor: Tensor<'_>) -> io::Result<Vec<u8>> {
    let (meta, size) = (tensor.meta, tensor.meta.dtype.size() as usize);
    let mut storage = vec![0; meta.extent() as usize * size];
    tensor.source.read_at(0, &mut storage)?;
    let mut dense = Vec::with_capacity(meta.bytes() as usize);
    let mut index = vec![0_u64; meta.shape.len()];
    let mut at = 0_u64;
    for _ in 0..meta.numel() {
        let from = at as usize * size;
        dense.extend_from_slice(&storage[from..from + size]);
        for d in (0..index.len()).rev() {
            index[d] += 1;
            at += meta.stride[d];
            if index[d] < meta.shape[d] {
                break;
            }
            at -= meta.stride[d] * index[d];
            index[d] = 0;
        }
    }
    Ok(dense)
}

/// Decodes elements into doubles, exactly but for 64-bit integers above 2^53.
pub(crate) fn decode(dtype: Dtype, bytes: &[u8], values: &mut Vec<f64>) {
    values.clear();
    match dtype {
        Dtype::F64 => values.extend(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b))),
        Dtype::F32 => values.extend(bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)))),
        Dtype::F16 => values.extend(bytes.as_chunks().0.iter().map(|b| half(u16::from_le_bytes(*b)))),
        Dtype::Bf16 => values.extend(
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))),
        ),
        Dtype::I64 => values.extend(bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64)),
        Dtype::I32 => values.extend(bytes.as_chunks().0.iter().map(|b| f64::from(i32::from_le_bytes(*b)))),
        Dtype::I16 => values.extend(bytes.as_chunks().0.iter().map(|b| f64::from(i16::from_le_bytes(*b)))),
        Dtype::I8 => values.extend(bytes.iter().map(|b| f64::from(*b as i8))),
        Dtype::U8 | Dtype::Bool => values.extend(bytes.iter().map(|b| f64::from(*b))),
    }
}

fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from((bits >> 10) & 0x1f), f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2.0_f64.powi(-24),
        0x1f if fraction == 0.0 => f64::INFINITY,
        0x1f => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2.0_f64.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// From this magnitude on a real number rounds to infinity in `dtype`.
pub(crate) fn overflow(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 65520.0,
        // Largest finite number plus half a step.
        Dtype::Bf16 => (2.0 - 2.0_f64.powi(-8)) * 2.0_f64.powi(127),
        Dtype::F32 => (2.0 - 2.0_f64.powi(-24)) * 2.0_f64.powi(127),
        _ => f64::INFINITY,
    }
}

/// What a value is once rounded to an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Finite,
    Nan,
    /// Whether it is positive.
    Infinite(bool),
}

impl Kind {
    /// The kind of `value` in the type whose [`overflow`] is given.
    pub(crate) fn of(value: f64, overflow: f64) -> Self {
        if value.is_nan() {
            Self::Nan
        } else if value.abs() < overflow {
            Self::Finite
        } else {
            Self::Infinite(value > 0.0)
        }
    }
}

/// An absolute error that never counts: below it `dtype` has no relative precision, and honest
/// kernels differ there (flushed or clamped exponentials).
pub(crate) fn tiny(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => f64::MIN_POSITIVE,
        Dtype::F16 => 2.0_f64.powi(-24),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_decode() {
        for (bits, value) in [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 2.0_f64.powi(-24)),
            (0x0400, 2.0_f64.powi(-14)),
            (0xfc00, f64::NEG_INFINITY),
        ] {
            assert_eq!(half(bits).to_bits(), f64::to_bits(value), "{bits:#x}");
        }
        assert!(half(0x7e00).is_nan());
        let mut values = vec![];
        decode(Dtype::Bf16, &[0x80, 0x3f, 0x40, 0xc0], &mut values);
        assert_eq!(values, [1.0, -3.0]);
        decode(Dtype::I8, &[0xff], &mut values);
        assert_eq!(values, [-1.0]);
    }

    #[test]
    fn strided_tensors_are_read_in_logical_order() {
        let bytes: Vec<u8> = (0..6).collect();
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![3, 2], stride: vec![1, 3] };
        let logical = Logical::new(Tensor { source: &bytes, meta: &meta }).unwrap();
        let mut read = vec![];
        logical.read(0, 6, &mut read).unwrap();
        assert_eq!(read, [0, 3, 1, 4, 2, 5]);
        logical.read(3, 2, &mut read).unwrap();
        assert_eq!(read, [4, 2]);
        let short = TensorMeta::contiguous(Dtype::U8, &[7]);
        assert!(
            Logical::new(Tensor { source: &bytes, meta: &short }).unwrap().read(0, 7, &mut read).is_err()
        );
    }
}
