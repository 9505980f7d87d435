//! Why a kernel file is turned away, with the line of the file where one can be named.

use crate::plan::ExprError;
use crate::words::nearest;

use super::{HEADER_VERSION, Language, caps};

/// Why a kernel file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFileError {
    /// Line of the file, counted from one, where the fault stands.
    pub line: Option<usize>,
    /// What is wrong.
    pub kind: HeaderError,
}

impl std::fmt::Display for KernelFileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        write!(f, "{}", self.kind)
    }
}

impl std::error::Error for KernelFileError {}

/// What is wrong with a header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum HeaderError {
    #[error("the file has {bytes} bytes, the most is {}", caps::FILE_BYTES)]
    FileTooLong { bytes: usize },
    #[error(
        "no header: the file must begin with `/*@ autokernel {HEADER_VERSION}` (C++, CUDA) or, \
         as its docstring, `\"\"\"autokernel {HEADER_VERSION}` (Triton)"
    )]
    Missing,
    #[error("the header must be the first thing in the file")]
    NotFirst,
    #[error("the header has no end, expected `{closer}`")]
    Unclosed { closer: &'static str },
    #[error("`*/` ends the comment inside the header, which ends with `@*/`")]
    ClosedEarly,
    #[error("header version `{found}` is not known, write `autokernel {HEADER_VERSION}`")]
    Version { found: String },
    #[error("the note has {bytes} bytes, the most is {}", caps::NOTE_BYTES)]
    NoteTooLong { bytes: usize },
    #[error("{message}")]
    Toml { message: String },
    #[error("unknown key `{key}`{}; known: {known}", Self::misplaced(key, nearest.as_deref()))]
    Key { key: String, nearest: Option<String>, known: String },
    #[error("a {language} file has its header in {expected}")]
    Form { language: Language, expected: &'static str },
    #[error(
        "`{name}` is no name: one letter or `_`, then letters, digits or `_`, at most {} in all",
        caps::NAME
    )]
    Identifier { name: String },
    #[error("`{name}` is a reserved word of the header")]
    Reserved { name: String },
    #[error("`{name}` is a keyword of {language}")]
    Keyword { name: String, language: Language },
    #[error("`{name}` is a name that belongs to the compiler")]
    CompilerName { name: String },
    #[error("`{name}` would be taken for a tensor of the region")]
    TensorLike { name: String },
    #[error("`{name}` is already the name of {by}")]
    Taken { name: String, by: &'static str },
    #[error("{got} {what}, the most is {most}")]
    TooMany { what: &'static str, got: usize, most: usize },
    #[error("parameter `{name}` has no values")]
    NoValues { name: String },
    #[error("parameter `{name}` lists {value} twice")]
    RepeatedValue { name: String, value: i64 },
    #[error("{field}: `{text}`: {source}")]
    Expression { field: String, text: String, source: Box<ExprError> },
    #[error("{field}: nothing is called `{name}`{}", Self::guess_tensor(nearest.as_deref()))]
    UnknownName { field: String, name: String, nearest: Option<String> },
    #[error("{field}: `{name}` is {is}, not a number")]
    NotNumber { field: String, name: String, is: &'static str },
    #[error("{field}: `{name}` is {is}; only the region's tensors (in0, out0, …) have sizes and strides")]
    NotTensor { field: String, name: String, is: &'static str },
    #[error("{language} launches have no `{key}`{advice}")]
    NotForLanguage { language: Language, key: &'static str, advice: &'static str },
    #[error("{language} launches need `{key}`")]
    Required { language: Language, key: &'static str },
    #[error("`{key}` has {got} extents, it takes 1 to {most}")]
    Extents { key: &'static str, got: usize, most: usize },
    #[error("no [[launch]]: the file says nothing of what to run")]
    NoLaunch,
    #[error("`{entry}` is also a parameter, whose value would replace it")]
    EntryIsParam { entry: String },
    #[error(
        "a prepare step may not take {what}: only constant inputs, its output and earlier steps' outputs"
    )]
    PrepareArg { what: String },
    #[error("the prepare step for `{output}` is not given its output")]
    PrepareOutput { output: String },
}

/// Keys that belong above the first table; written below one, TOML takes them for that table's.
const ROOT_KEYS: [&str; 3] = ["language", "note", "guard"];

impl HeaderError {
    /// For faults of the file as a whole.
    pub(super) const fn without_line(self) -> KernelFileError {
        KernelFileError { line: None, kind: self }
    }

    /// From the message of a TOML error. serde's wording for unknown keys and words is fixed
    /// (`unknown field `x`, expected one of `a`, `b``), so the parts can be taken out of it.
    pub(super) fn from_toml(message: &str) -> Self {
        let mut quoted = message.split('`').skip(1).step_by(2);
        if message.starts_with("unknown field `")
            && let Some(key) = quoted.next()
        {
            let known: Vec<&str> = quoted.collect();
            let nearest = nearest(key, known.iter().copied()).map(str::to_owned);
            return Self::Key { key: crate::words::clip(key), nearest, known: known.join(", ") };
        }
        Self::Toml { message: crate::words::clip_to(message, 200) }
    }

    fn misplaced(key: &str, nearest: Option<&str>) -> String {
        if ROOT_KEYS.contains(&key) {
            return ", which belongs above the first [table]".to_owned();
        }
        Self::guess(nearest)
    }

    fn guess_tensor(nearest: Option<&str>) -> String {
        match nearest {
            Some(_) => Self::guess(nearest),
            None => "; tensors are called in0, in1, … and out0, out1, …".to_owned(),
        }
    }

    fn guess(nearest: Option<&str>) -> String {
        nearest.map(|word| format!(", did you mean `{word}`?")).unwrap_or_default()
    }
}

/// Why a choice of parameter values does not fit a kernel file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ParamsError {
    #[error("parameter `{name}` has no value")]
    Missing { name: String },
    #[error("no parameter is called `{name}`")]
    Unknown { name: String },
    #[error("parameter `{name}` is {value}, which is not one of {values:?}")]
    NotListed { name: String, value: i64, values: Vec<i64> },
}
