//! What reaches an agent: capped, without control codes.
//!
//! Names, compiler messages and notes may hold anything, and some of it was written by whoever would
//! like to steer the reader.

use std::fmt::Write;

/// Most bytes of one answer's text.
pub const ANSWER_BYTES: usize = 24 << 10;

/// The text without control codes other than line ends and tabs, and without invisible or reordering
/// characters, cut at `most` bytes with a note of how much is missing.
pub fn clean(text: &str, most: usize) -> String {
    let mut out = String::with_capacity(text.len().min(most) + 64);
    for (at, c) in text.char_indices() {
        if out.len() + c.len_utf8() > most {
            let left = text.len() - at;
            let _ = write!(out, "\n[{left} more bytes are not shown]");
            break;
        }
        if is_plain(c) {
            out.push(c);
        }
    }
    out
}

fn is_plain(c: char) -> bool {
    // Zero-width characters, marks of direction, and tags can hide or reorder what a person would see.
    let hidden = matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}');
    (c == '\n' || c == '\t' || !c.is_control()) && !hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_codes_and_hidden_characters_are_gone() {
        assert_eq!(clean("a\u{1b}[31mb\r\n\tc\u{202e}d\u{200b}e\u{7}\u{e0041}", 100), "a[31mb\n\tcde");
    }

    #[test]
    fn long_text_is_cut_between_characters_and_says_so() {
        let cut = clean(&"ä".repeat(10), 7);
        assert!(cut.starts_with("äää\n["), "{cut}");
        assert!(cut.contains("14 more bytes"), "{cut}");
        assert_eq!(clean("short", 5), "short");
    }
}
