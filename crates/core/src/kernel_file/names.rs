//! Which names a header may give.

use crate::plan::RESERVED;
use crate::words::clip;

use super::{HeaderError, Language, caps};

/// What a name is for; the source sees parameters and entries, the rest lives in the header only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Param,
    Entry,
    Buffer,
}

const CPP_KEYWORDS: &str = " alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t \
char32_t class compl concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype \
default defined delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long \
mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast \
requires return short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try \
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq ";

const PYTHON_KEYWORDS: &str = " False None True and as assert async await break class continue def del elif else except \
finally for from global if import in is lambda nonlocal not or pass raise return try while with yield ";

/// Checks one name by itself.
pub(super) fn check(name: &str, role: Role, language: Language) -> Result<(), HeaderError> {
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|b| b == b'_' || b.is_ascii_alphabetic());
    if !first || name.len() > caps::NAME || !bytes.all(|b| b == b'_' || b.is_ascii_alphanumeric()) {
        return Err(HeaderError::Identifier { name: clip(name) });
    }
    let name = name.to_owned();
    if RESERVED.contains(&name.as_str()) {
        return Err(HeaderError::Reserved { name });
    }
    if role != Role::Entry && is_like_tensor(&name) {
        return Err(HeaderError::TensorLike { name });
    }
    if role == Role::Buffer {
        return Ok(());
    }
    let keywords = if language == Language::Triton { PYTHON_KEYWORDS } else { CPP_KEYWORDS };
    if keywords.contains(&format!(" {name} ")) {
        return Err(HeaderError::Keyword { name, language });
    }
    // Parameters become macros: `__FAST_MATH__` would change what the rest of the file means.
    if role == Role::Param && language != Language::Triton && is_compilers(&name) {
        return Err(HeaderError::CompilerName { name });
    }
    Ok(())
}

/// Whether it reads like `in0` or `out12`.
pub(super) fn is_like_tensor(name: &str) -> bool {
    let digits = name.strip_prefix("in").or_else(|| name.strip_prefix("out"));
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// Names that the C++ standard keeps for the implementation.
fn is_compilers(name: &str) -> bool {
    let after = name.strip_prefix('_').and_then(|rest| rest.bytes().next());
    name.contains("__") || after.is_some_and(|b| b.is_ascii_uppercase())
}
