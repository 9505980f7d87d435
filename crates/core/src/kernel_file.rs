//! The kernel file: one source file with a header that says how it is launched and what may be tuned.
//!
//! The header is TOML inside a comment at the top (`/*@ autokernel 1 … @*/` for C++ and CUDA) or inside
//! the module docstring (Triton). [`KernelFile::parse`] checks everything that needs no region: names,
//! caps, the rules of the language. What needs shapes is checked by [`crate::plan::plan`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::plan::Expr;

mod error;
mod header;
mod lower;
mod names;
mod raw;
#[cfg(test)]
mod tests;

pub use error::{HeaderError, KernelFileError, ParamsError};

/// The version of the header that this program reads.
pub const HEADER_VERSION: u32 = 1;

/// Our vector maths for C++ kernels: files below an include folder. Kernels `#include "autokernel/vec.h"`.
pub const HEADERS: &[(&str, &str)] = &[
    ("autokernel/vec.h", include_str!("../include/autokernel/vec.h")),
    ("autokernel/vec_math.h", include_str!("../include/autokernel/vec_math.h")),
];

/// Caps: a kernel file comes from an agent, so nothing in it may be unbounded.
pub mod caps {
    /// Bytes of a whole kernel file.
    pub const FILE_BYTES: usize = 256 * 1024;
    /// Bytes of the note: others read it, so it must stay a note.
    pub const NOTE_BYTES: usize = 1024;
    /// Names in `[params]`.
    pub const PARAMS: usize = 32;
    /// Values of one parameter.
    pub const VALUES: usize = 64;
    /// Entries in `[scratch]`.
    pub const SCRATCH: usize = 32;
    /// Entries in `guard`.
    pub const GUARDS: usize = 32;
    /// `[[launch]]` tables, and also `[[prepare]]` tables.
    pub const LAUNCHES: usize = 16;
    /// Arguments of one launch.
    pub const ARGS: usize = 48;
    /// Characters of a name.
    pub const NAME: usize = 64;
    /// Bytes of one expression, as written and in canonical form.
    pub const EXPR_BYTES: usize = 1024;
    /// Levels of one expression's tree.
    pub const EXPR_DEPTH: usize = 64;
}

/// The language of a kernel file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Language {
    /// C++ for a CPU.
    #[serde(rename = "c++")]
    Cpp,
    /// CUDA C++.
    #[serde(rename = "cuda")]
    Cuda,
    /// Triton, in Python.
    #[serde(rename = "triton")]
    Triton,
}

impl Language {
    /// The word in a header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpp => "c++",
            Self::Cuda => "cuda",
            Self::Triton => "triton",
        }
    }

    /// The extension of a file in this language, without the dot.
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Cpp => "cpp",
            Self::Cuda => "cu",
            Self::Triton => "py",
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Chosen parameter values, one for each name of `[params]`.
pub type Params = BTreeMap<String, i64>;

/// A parsed kernel file.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelFile {
    /// What the source is written in.
    pub language: Language,
    /// The author's one line about the idea; empty if there is none.
    pub note: String,
    /// Compile-time constants and the values that a sweep may choose from, never empty.
    pub params: BTreeMap<String, Vec<i64>>,
    /// Working memory that lives for one call.
    pub scratch: BTreeMap<String, Scratch>,
    /// Conditions, all of which must hold; they narrow what the kernel is used for.
    pub guard: Vec<Expr>,
    /// Steps over constant inputs, run once and again only when those change, in order.
    pub prepare: Vec<Prepare>,
    /// What one call runs, in order; never empty.
    pub launches: Vec<Launch>,
    /// The whole file, header included.
    pub source: String,
}

/// An entry of `[scratch]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Scratch {
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements.
    pub size: Expr,
    /// Whether every call finds it zeroed.
    pub zero: bool,
}

/// An entry of `[[prepare]]`: one launch that fills a buffer from inputs which the task calls constant.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepare {
    /// The name under which launches take the buffer.
    pub output: String,
    /// Element type of the buffer.
    pub dtype: Dtype,
    /// Number of elements of the buffer.
    pub size: Expr,
    /// The launch that fills it.
    pub launch: Launch,
}

/// An entry of `[[launch]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The function to call.
    pub entry: String,
    /// Left out when this is zero.
    pub when: Option<Expr>,
    /// One to three extents of the grid; empty for C++.
    pub grid: Vec<Expr>,
    /// One to three extents of a block; empty for C++ and Triton.
    pub block: Vec<Expr>,
    /// Bytes of dynamic shared memory; CUDA only.
    pub shared: Option<Expr>,
    /// One to three extents of a cluster, or empty; CUDA only.
    pub cluster: Vec<Expr>,
    /// Whether all blocks must be resident at once; not for C++.
    pub cooperative: bool,
    /// What the function is given, in order.
    pub args: Vec<LaunchArg>,
}

/// An argument of a launch.
#[derive(Clone, Debug, PartialEq)]
pub enum LaunchArg {
    /// An input or output of the region: `in0`, `out0`.
    Tensor(TensorName),
    /// An entry of `[scratch]`.
    Scratch(String),
    /// The output of a `[[prepare]]`.
    Prepared(String),
    /// A whole number.
    Int(Expr),
    /// The caller's thread count, known only at call time; C++ only.
    Threads,
    /// A tensor map for the tensor memory accelerator, encoded by the runner; CUDA only.
    TensorMap(TensorMap),
}

/// An input or output of the region by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorName {
    /// `in0`, `in1`, …
    Input(usize),
    /// `out0`, `out1`, …
    Output(usize),
}

impl TensorName {
    /// Reads `in0` or `out12`; numbers have no leading zero.
    pub fn parse(text: &str) -> Option<Self> {
        let (make, digits): (fn(usize) -> Self, &str) = if let Some(digits) = text.strip_prefix("in") {
            (Self::Input, digits)
        } else {
            (Self::Output, text.strip_prefix("out")?)
        };
        let canonical = digits == "0" || !digits.starts_with('0');
        let plain = !digits.is_empty() && digits.len() <= 4 && digits.bytes().all(|b| b.is_ascii_digit());
        if canonical && plain { digits.parse().ok().map(make) } else { None }
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(index) => write!(f, "in{index}"),
            Self::Output(index) => write!(f, "out{index}"),
        }
    }
}

/// `tensor_map(t, box=[…], swizzle=…)`.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorMap {
    /// The tensor that the map describes.
    pub tensor: TensorName,
    /// Extents of the box that one instruction moves, in the order of the tensor's dimensions.
    pub extents: Vec<Expr>,
    /// How shared memory is swizzled.
    pub swizzle: Swizzle,
}

/// The swizzle of a tensor map; numbers are spans in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Swizzle {
    /// No swizzle.
    #[default]
    #[serde(rename = "none")]
    None,
    /// 32 bytes.
    #[serde(rename = "32")]
    B32,
    /// 64 bytes.
    #[serde(rename = "64")]
    B64,
    /// 128 bytes.
    #[serde(rename = "128")]
    B128,
}

impl KernelFile {
    /// Reads a whole kernel file.
    pub fn parse(text: &str) -> Result<Self, KernelFileError> {
        if text.len() > caps::FILE_BYTES {
            return Err(HeaderError::FileTooLong { bytes: text.len() }.without_line());
        }
        lower::lower(text, &header::find(text)?)
    }

    /// The first value of each parameter.
    pub fn default_params(&self) -> Params {
        self.params.iter().filter_map(|(name, values)| Some((name.clone(), *values.first()?))).collect()
    }

    /// Whether `params` chooses one of the listed values for each name and nothing else.
    pub fn check_params(&self, params: &Params) -> Result<(), ParamsError> {
        for (name, values) in &self.params {
            let value = *params.get(name).ok_or_else(|| ParamsError::Missing { name: name.clone() })?;
            if !values.contains(&value) {
                return Err(ParamsError::NotListed { name: name.clone(), value, values: values.clone() });
            }
        }
        match params.keys().find(|name| !self.params.contains_key(*name)) {
            Some(name) => Err(ParamsError::Unknown { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// Every choice of parameter values, each once; the last name varies fastest, and the first
    /// point is [`Self::default_params`].
    pub fn points(&self) -> impl Iterator<Item = Params> + '_ {
        let mut next = Some(vec![0_usize; self.params.len()]);
        std::iter::from_fn(move || {
            let digits = next.take()?;
            let point = self
                .params
                .iter()
                .zip(&digits)
                .filter_map(|((name, values), digit)| Some((name.clone(), *values.get(*digit)?)));
            let point: Params = point.collect();
            let mut following = digits;
            for (digit, values) in following.iter_mut().zip(self.params.values()).rev() {
                *digit += 1;
                if *digit < values.len() {
                    next = Some(following);
                    return Some(point);
                }
                *digit = 0;
            }
            Some(point)
        })
    }

    /// The number of points, or `u64::MAX` where it is larger.
    pub fn space(&self) -> u64 {
        self.params.values().fold(1, |product: u64, values| product.saturating_mul(values.len() as u64))
    }

    /// Names of the functions that the file must define.
    pub fn entries(&self) -> BTreeSet<&str> {
        let prepare = self.prepare.iter().map(|step| step.launch.entry.as_str());
        self.launches.iter().map(|launch| launch.entry.as_str()).chain(prepare).collect()
    }
}
