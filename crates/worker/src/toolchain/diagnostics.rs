//! Compiler messages as an agent may see them: capped, printable, without paths of the machine.
//!
//! A candidate's author shapes this text, and it goes back into prompts and onto terminals.

/// Bytes kept.
const LIMIT: usize = 8 * 1024;
/// What stands where the rest was.
const MORE: &str = "\n[more was printed]\n";

/// Cleans what a compiler printed.
pub(super) fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(LIMIT));
    for line in text.lines() {
        let line = line_without_paths(line);
        let line = line.trim_end();
        if out.len() + line.len() + 1 + MORE.len() > LIMIT {
            let room = LIMIT.saturating_sub(out.len() + MORE.len());
            out.push_str(&line[..line.floor_char_boundary(room)]);
            out.push_str(MORE);
            break;
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}

/// Absolute paths shrink to their last part; control characters vanish.
fn line_without_paths(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    let mut before = ' ';
    while let Some(c) = chars.next() {
        let starts_path = c == '/'
            && !(before.is_alphanumeric() || matches!(before, '.' | '_' | '-' | '/' | '*' | ')' | ']' | '<'))
            && chars.peek().is_some_and(|next| next.is_alphanumeric() || matches!(next, '.' | '_' | '-'));
        if starts_path {
            let mut path = String::new();
            while let Some(next) = chars.next_if(|next| is_path(*next)) {
                path.push(next);
            }
            // Division without spaces looks alike; a path of one part tells nothing anyway.
            if let Some((_, last)) = path.trim_end_matches('/').rsplit_once('/') {
                out.push_str(last);
            } else {
                out.push('/');
                out.push_str(&path);
            }
        } else if c == '\t' || !c.is_control() {
            out.push(c);
        }
        before = c;
    }
    out
}

fn is_path(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '/' | '.' | '_' | '-' | '+' | '~' | '@')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_shrink_and_code_stays() {
        let text = "In file included from /usr/include/c++/12/cmath:47,\nkernel.cpp:3:5: error: 'a/b' and x / y\n\
                    include/autokernel/vec.h:9:1: note: `/home/me/x.h'";
        let expected = "In file included from cmath:47,\nkernel.cpp:3:5: error: 'a/b' and x / y\n\
                        include/autokernel/vec.h:9:1: note: `x.h'\n";
        assert_eq!(clean(text), expected);
    }

    #[test]
    fn control_characters_and_length_are_bounded() {
        assert_eq!(clean("a\u{1b}[31mb\u{7}\r"), "a[31mb\n");
        let long = "ü".repeat(100_000);
        assert!(clean(&long).len() <= LIMIT);
        let many = "error\n".repeat(100_000);
        let cleaned = clean(&many);
        assert!(cleaned.len() <= LIMIT && cleaned.ends_with(MORE));
    }
}
