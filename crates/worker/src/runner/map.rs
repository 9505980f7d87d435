//! What is mapped in a runner, by the system's own list, before and after a candidate ran.
//!
//! The runner opens the list while it is still trusted and hands the descriptor over, so that it can be
//! read by a parent without privileges too, and says what the system says whatever the child does.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The mappings of a process: addresses, rights, what is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryMap(Vec<String>);

impl MemoryMap {
    /// Reads the list; the process had better stand still.
    pub(super) fn read(list: &File) -> io::Result<Self> {
        let (mut text, mut chunk) = (vec![], [0; 4096]);
        loop {
            match list.read_at(&mut chunk, text.len() as u64)? {
                0 => break,
                length => text.extend(&chunk[..length]),
            }
        }
        Ok(Self::parse(&String::from_utf8_lossy(&text)))
    }

    fn parse(text: &str) -> Self {
        let line = |line: &str| match line.split_once('-') {
            // The main thread's stack grows downwards as it is used.
            Some((_, rest)) if line.ends_with("[stack]") => rest.to_owned(),
            _ => line.to_owned(),
        };
        Self(text.lines().map(line).collect())
    }

    /// What is mapped now and was not, or no longer and was; `None` where nothing changed.
    pub(super) fn difference(&self, after: &Self) -> Option<String> {
        // Addresses mean nothing to a reader; rights and names do.
        let kind = |line: &String| {
            let mut fields = line.split_ascii_whitespace().skip(1);
            let rights = fields.next().unwrap_or_default().to_owned();
            fields.nth(3).map_or(rights.clone(), |name| format!("{rights} {name}"))
        };
        let beyond =
            |all: &[String], known: &[String]| all.iter().find(|line| !known.contains(line)).map(kind);
        beyond(&after.0, &self.0)
            .map(|kind| format!("a mapping ({kind}) that was not there"))
            .or_else(|| beyond(&self.0, &after.0).map(|kind| format!("a mapping ({kind}) less")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_stack_may_grow() {
        let before =
            "1000-2000 r-xp 00000000 00:00 1 /lib/m.so\n7ff0-8000 rw-p 00000000 00:00 0          [stack]\n";
        let parse = MemoryMap::parse;
        let difference = |after: &str| parse(before).difference(&parse(after));
        assert_eq!(difference(before), None);
        assert_eq!(difference(&before.replace("7ff0", "7000")), None);
        let more = format!("{before}9000-a000 rwxp 00000000 00:00 0\n");
        assert_eq!(difference(&more), Some("a mapping (rwxp) that was not there".to_owned()));
        let other = before.replace("r-xp", "rwxp");
        assert_eq!(difference(&other), Some("a mapping (rwxp /lib/m.so) that was not there".to_owned()));
        let less = before.lines().nth(1).map(|line| format!("{line}\n")).unwrap();
        assert_eq!(difference(&less), Some("a mapping (r-xp /lib/m.so) less".to_owned()));
        assert!(difference(&before.replace("1000-2000", "1000-3000")).is_some());
    }

    #[test]
    fn a_new_mapping_of_a_live_process_is_seen() {
        let list = File::open("/proc/self/maps").unwrap();
        let before = MemoryMap::read(&list).unwrap();
        assert!(before.0.iter().any(|line| line.ends_with("[stack]")));
        let flags = rustix::mm::MapFlags::PRIVATE;
        let rights = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::EXEC;
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody uses.
        let made = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 4096, rights, flags) }.unwrap();
        let after = MemoryMap::read(&list).unwrap();
        let told = before.difference(&after).unwrap();
        assert!(!told.is_empty());
        // SAFETY: the mapping made above.
        unsafe { rustix::mm::munmap(made, 4096) }.unwrap();
    }
}
