//! Finds the header in the text of a kernel file.

use crate::words::clip;

use super::{HEADER_VERSION, HeaderError, KernelFileError, Language};

/// Where a header stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `/*@ … @*/`.
    Comment,
    /// The docstring of a Python module.
    Docstring,
}

impl Form {
    /// Whether a file in `language` has its header here.
    pub(super) const fn suits(self, language: Language) -> bool {
        matches!(
            (self, language),
            (Self::Comment, Language::Cpp | Language::Cuda) | (Self::Docstring, Language::Triton)
        )
    }

    /// For the message when it does not.
    pub(super) const fn expected(language: Language) -> &'static str {
        match language {
            Language::Cpp | Language::Cuda => "a comment, `/*@ autokernel 1 … @*/`",
            Language::Triton => "its docstring, `\"\"\"autokernel 1 …\"\"\"`",
        }
    }
}

/// A header inside a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header<'a> {
    /// The TOML.
    pub(super) toml: &'a str,
    /// Byte of the file at which the TOML begins.
    pub(super) start: usize,
    /// Where it stands.
    pub(super) form: Form,
}

/// The line, counted from one, of a byte of `text`.
pub(super) fn line_of(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|b| *b == b'\n').count()
}

/// Finds the header at the top of `text`.
pub(super) fn find(text: &str) -> Result<Header<'_>, KernelFileError> {
    let body = text.strip_prefix('\u{feff}').unwrap_or(text).trim_start();
    let start = text.len() - body.len();
    let (form, opened) = if body.starts_with("/*@") {
        (Form::Comment, start + 3)
    } else if let Some(opened) = docstring(body) {
        (Form::Docstring, start + opened)
    } else {
        return Err(absent(text, start));
    };
    // The word must follow before the end is looked for: any other comment is simply no header.
    let after_word = word(text, opened).ok_or_else(|| absent(text, start))?;
    let end = match form {
        Form::Comment => comment_end(text, opened)?,
        Form::Docstring => docstring_end(text, opened)?,
    };
    let inside = text.get(after_word..end).unwrap_or_default();
    let token = inside.trim_start();
    let token_start = end - token.len();
    let version = token.split(char::is_whitespace).next().unwrap_or_default();
    if version != HEADER_VERSION.to_string() {
        let kind = HeaderError::Version { found: clip(version) };
        return Err(KernelFileError { line: Some(line_of(text, token_start)), kind });
    }
    let start = token_start + version.len();
    Ok(Header { toml: text.get(start..end).unwrap_or_default(), start, form })
}

/// Bytes of the opening quotes of a docstring.
fn docstring(body: &str) -> Option<usize> {
    let raw = usize::from(body.starts_with(['r', 'R']));
    let quotes = body.get(raw..)?;
    (quotes.starts_with("\"\"\"") || quotes.starts_with("'''")).then_some(raw + 3)
}

/// The byte behind the word `autokernel`, if it is what stands at `opened`.
fn word(text: &str, opened: usize) -> Option<usize> {
    let inside = text.get(opened..)?;
    let rest = inside.trim_start().strip_prefix("autokernel")?;
    let spaced = rest.starts_with(char::is_whitespace) || rest.starts_with(['@', '"', '\'']);
    spaced.then(|| text.len() - rest.len())
}

fn comment_end(text: &str, opened: usize) -> Result<usize, KernelFileError> {
    let unclosed = HeaderError::Unclosed { closer: "@*/" };
    let inside = text.get(opened..).unwrap_or_default();
    // The compiler ends the comment at the first `*/`; a header that goes on would be read as code.
    match inside.find("*/") {
        None => Err(KernelFileError { line: Some(line_of(text, opened)), kind: unclosed }),
        Some(close) => match inside.get(..close).and_then(|inside| inside.strip_suffix('@')) {
            Some(inside) => Ok(opened + inside.len()),
            None if inside.contains("@*/") => Err(KernelFileError {
                line: Some(line_of(text, opened + close)),
                kind: HeaderError::ClosedEarly,
            }),
            None => Err(KernelFileError { line: Some(line_of(text, opened)), kind: unclosed }),
        },
    }
}

fn docstring_end(text: &str, opened: usize) -> Result<usize, KernelFileError> {
    let quotes = text.get(opened - 3..opened).unwrap_or_default();
    let bytes = text.as_bytes();
    let mut at = opened;
    while at < bytes.len() {
        if bytes[at] == b'\\' {
            // Python lets no escaped quote end a string, in raw strings neither.
            at += 2;
        } else if bytes[at..].starts_with(quotes.as_bytes()) {
            return Ok(at);
        } else {
            at += 1;
        }
    }
    let closer = if quotes == "'''" { "'''" } else { "\"\"\"" };
    Err(KernelFileError { line: Some(line_of(text, opened)), kind: HeaderError::Unclosed { closer } })
}

/// `start` is where the text begins, which is where the header would have to stand.
fn absent(text: &str, start: usize) -> KernelFileError {
    let found = ["/*@ autokernel", "\"\"\"autokernel"].iter().filter_map(|opening| text.find(opening));
    let later = found.filter(|byte| *byte > start).min();
    match later {
        Some(byte) => KernelFileError { line: Some(line_of(text, byte)), kind: HeaderError::NotFirst },
        None => HeaderError::Missing.without_line(),
    }
}
