//! Calling an entry of a kernel: every argument is a pointer or a 64-bit integer.

use std::ffi::c_void;

/// The address of an entry.
#[derive(Clone, Copy)]
pub(super) struct Entry(pub(super) *const c_void);

/// Most arguments of an entry.
pub(super) const ARGUMENTS: usize = autokernel_core::kernel_file::caps::ARGS;

macro_rules! argument {
    ($index:literal) => {
        u64
    };
}

/// Tries each arity in turn: `[indices so far] next rest…`.
macro_rules! by_arity {
    ($entry:ident, $args:ident, [$($have:literal)*]) => { by_arity!(@call $entry, $args, [$($have)*] else {}) };
    ($entry:ident, $args:ident, [$($have:literal)*] $next:literal $($rest:literal)*) => {
        by_arity!(@call $entry, $args, [$($have)*] else { by_arity!($entry, $args, [$($have)* $next] $($rest)*) })
    };
    (@call $entry:ident, $args:ident, [$($have:literal)*] else $otherwise:block) => {
        if let [$(by_arity!(@name $have)),*] = $args {
            by_arity!(@apply $entry, $args, [$($have)*])
        } else $otherwise
    };
    (@name $have:literal) => { _ };
    (@apply $entry:ident, $args:ident, [$($have:literal)*]) => {{
        // SAFETY: the caller promises that the entry takes exactly this many 64-bit integers or
        // pointers. Both are of class INTEGER in the C calling convention, so one function type
        // serves for every mixture; the address is not null.
        let function: unsafe extern "C" fn($(argument!($have)),*) = unsafe { std::mem::transmute($entry.0) };
        // SAFETY: as above, and the pointers among the arguments are the caller's to vouch for.
        unsafe { function($($args[$have]),*) }
    }};
}

/// Calls an entry; more than [`ARGUMENTS`] arguments do nothing.
///
/// # Safety
///
/// `entry` must be a C function that takes as many arguments as `args` has, each a pointer or an
/// `int64_t`, and returns nothing. What it does to memory is not checked here: this runs only in a
/// confined process of its own, in which nothing is worth more than the candidate.
#[expect(clippy::cognitive_complexity, reason = "one arm an arity")]
pub(super) unsafe fn invoke(entry: Entry, args: &[u64]) {
    by_arity!(entry, args, [] 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
        33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48);
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! { static SEEN: RefCell<Vec<u64>> = const { RefCell::new(vec![]) }; }

    extern "C" fn none() {
        SEEN.with_borrow_mut(|seen| seen.push(0));
    }

    #[expect(clippy::many_single_char_names, reason = "they have no meaning")]
    extern "C" fn nine(a: u64, b: i64, c: u64, d: u64, e: u64, f: u64, g: u64, h: u64, i: *const u8) {
        SEEN.with_borrow_mut(|seen| seen.extend([a, b.cast_unsigned(), c, d, e, f, g, h, i as u64]));
    }

    #[test]
    fn arguments_arrive_in_order() {
        let args: Vec<u64> = (1..=9).collect();
        // SAFETY: both functions take that many integers or pointers and read no memory through them.
        unsafe {
            invoke(Entry(none as *const c_void), &[]);
            invoke(Entry(nine as *const c_void), &args);
        }
        SEEN.with_borrow(|seen| assert_eq!(*seen, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]));
    }
}
