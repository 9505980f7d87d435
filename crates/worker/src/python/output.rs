//! What children print: the end of it, made fit for a terminal.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

/// How much is kept.
pub(super) const KEPT: usize = 64 << 10;

/// The reading end of a child's output, drained by a thread of its own so that a child that prints
/// a lot never blocks.
#[derive(Debug)]
pub(super) struct Output {
    pipe: OwnedFd,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    bytes: VecDeque<u8>,
    closed: bool,
}

impl Output {
    /// Starts draining. The thread ends when the last process that holds the other end is gone.
    pub(super) fn drain(pipe: OwnedFd) -> io::Result<Arc<Self>> {
        let output = Arc::new(Self { pipe, kept: Mutex::default() });
        let drained = Arc::clone(&output);
        thread::Builder::new().name("ak-output".into()).spawn(move || while drained.step() {})?;
        Ok(output)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self) -> bool {
        if matches!(poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], None), Err(e) if e != rustix::io::Errno::INTR)
        {
            return false;
        }
        // Read under the lock: whoever then sees an empty pipe has everything in `kept`.
        let mut kept = self.kept();
        let mut chunk = [0; 8192];
        match rustix::io::read(&self.pipe, &mut chunk) {
            Ok(n) if n > 0 => {
                kept.bytes.extend(&chunk[..n]);
                let surplus = kept.bytes.len().saturating_sub(KEPT);
                kept.bytes.drain(..surplus);
                true
            }
            Err(rustix::io::Errno::INTR) => true,
            _ => {
                kept.closed = true;
                false
            }
        }
    }

    /// The end of what was printed so far.
    pub(super) fn text(&self) -> String {
        let bytes: Vec<u8> = self.kept().bytes.iter().copied().collect();
        clean(&bytes)
    }

    /// The same after everything that a dead child wrote has arrived.
    pub(super) fn last_words(&self) -> String {
        let deadline = Instant::now() + Duration::from_millis(500);
        loop {
            let kept = self.kept();
            let arrived = kept.closed || rustix::io::ioctl_fionread(&self.pipe).is_ok_and(|n| n == 0);
            drop(kept);
            if arrived || Instant::now() > deadline {
                return self.text();
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Text without escape sequences and control codes other than line feed and tab. A carriage return
/// becomes a line feed, so that progress bars read as lines.
pub(super) fn clean(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\n' | '\t' => out.push(c),
            '\r' if chars.peek() != Some(&'\n') => out.push('\n'),
            '\u{1b}' => skip_escape(&mut chars),
            c if c.is_control() || is_direction_mark(c) => {}
            c => out.push(c),
        }
    }
    out
}

/// Marks that reorder what a reader sees.
fn is_direction_mark(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn skip_escape(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    match chars.peek() {
        // Control sequence: up to a letter or one of a few signs.
        Some('[') => {
            chars.next();
            while chars.next_if(|c| ('\u{20}'..'\u{40}').contains(c)).is_some() {}
            chars.next_if(|c| ('\u{40}'..='\u{7e}').contains(c));
        }
        // Command strings: up to a bell or the string terminator, on one line.
        Some(']' | 'P' | '_' | '^') => {
            while let Some(c) = chars.next_if(|c| *c != '\n') {
                if c == '\u{7}' || (c == '\u{1b}' && chars.next_if_eq(&'\\').is_some()) {
                    break;
                }
            }
        }
        Some(c) if !c.is_control() => {
            chars.next();
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::clean;

    #[test]
    fn control_codes_are_removed() {
        assert_eq!(
            clean(b"\x1b[31mred\x1b[0m\tx\x07\r\nb\rc\x1b]0;title\x07d\x1b]8;;u\x1b\\e\x00"),
            "red\tx\nb\ncde"
        );
        assert_eq!(clean("a\u{202e}b\u{9b}c".as_bytes()), "abc");
        assert_eq!(clean(b"\xff\x1b"), "\u{fffd}");
        assert_eq!(clean(b"\x1b[\nnext"), "\nnext");
    }
}
