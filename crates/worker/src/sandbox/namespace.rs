//! Process ids of one's own: when the first process of such a namespace ends, the system ends all others.

use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};

/// Gives the processes that this one starts from now on their own process ids and their own System V
/// memory; says whether it worked. Root may where it has its usual rights, others where the system lets
/// users make namespaces. Nothing depends on it alone.
///
/// The first process started afterwards is the one whose end is the others' end.
pub(crate) fn own_processes() -> bool {
    let root = rustix::process::geteuid().is_root();
    let base = UnshareFlags::NEWPID | UnshareFlags::NEWIPC;
    let flags = if root { base } else { base | UnshareFlags::NEWUSER };
    // SAFETY: the flags leave files, memory and the filesystem shared as they are.
    if unsafe { rustix::thread::unshare_unsafe(flags) }.is_err() {
        return false;
    }
    if root {
        return true;
    }
    // The maker of a user namespace is all-powerful in it, which opens more of the system to it.
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).is_ok()
}
