//! Cuts an expression into tokens.

use crate::kernel_file::caps;

use super::parse::{ExprError, ExprErrorKind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token<'a> {
    Int(i64),
    Word(&'a str),
    Symbol(&'static str),
    End,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Lexed<'a> {
    pub(super) token: Token<'a>,
    /// Counted in characters from one.
    pub(super) column: usize,
}

/// Longer symbols first, so that `<=` is not read as `<`.
const SYMBOLS: [&str; 18] =
    ["==", "!=", "<=", ">=", "<", ">", "=", "+", "-", "*", "/", "%", "(", ")", "[", "]", ",", "."];

/// The tokens of `text`; the last one is [`Token::End`].
pub(super) fn lex(text: &str) -> Result<Vec<Lexed<'_>>, ExprError> {
    if text.len() > caps::EXPR_BYTES {
        return Err(ExprError { column: 1, kind: ExprErrorKind::TooLong });
    }
    let mut tokens = vec![];
    let mut rest = text;
    let mut column = 1;
    loop {
        let trimmed = rest.trim_start_matches([' ', '\t', '\r', '\n']);
        // Only ASCII was trimmed, and every token is ASCII, so bytes are characters.
        column += rest.len() - trimmed.len();
        rest = trimmed;
        let fail = |kind| Err(ExprError { column, kind });
        let Some(first) = rest.bytes().next() else { break };
        let (token, length) = if first.is_ascii_digit() {
            let length = span(rest, |b| b.is_ascii_digit());
            match rest[..length].parse() {
                Ok(value) => (Token::Int(value), length),
                Err(_) => return fail(ExprErrorKind::NumberTooLarge),
            }
        } else if first == b'_' || first.is_ascii_alphabetic() {
            let length = span(rest, |b| b == b'_' || b.is_ascii_alphanumeric());
            if length > caps::NAME {
                return fail(ExprErrorKind::NameTooLong);
            }
            (Token::Word(&rest[..length]), length)
        } else {
            let symbol = SYMBOLS.into_iter().find(|symbol| rest.starts_with(symbol));
            match symbol.filter(|_| !rest.starts_with("//")) {
                Some(symbol) => (Token::Symbol(symbol), symbol.len()),
                None => return fail(ExprErrorKind::character(rest)),
            }
        };
        tokens.push(Lexed { token, column });
        column += length;
        rest = &rest[length..];
    }
    tokens.push(Lexed { token: Token::End, column });
    Ok(tokens)
}

/// Bytes at the start of `text` that `keep` takes.
fn span(text: &str, keep: impl Fn(u8) -> bool) -> usize {
    text.bytes().take_while(|b| keep(*b)).count()
}
