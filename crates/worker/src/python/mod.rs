//! The parent's side of Python: finding an interpreter with torch, starting the bridge in it, and
//! talking to it over a private socket.
//!
//! Nothing here loads Python. A child is a process group of its own, dies with this program, is
//! stopped and read from outside, and is never believed beyond the form of its replies.

mod bridge;
mod discover;
mod environment;
mod output;
mod peer;
pub(crate) mod process;
mod spawn;

#[cfg(test)]
mod discover_tests;
#[cfg(test)]
mod peer_tests;

pub use bridge::{bridge_dir, bridge_files};
pub use discover::{Interpreter, PythonError, Source, discover, probe, probe_fully};
pub use environment::{
    CPU_ENVIRONMENT_BYTES, ENVIRONMENT_BYTES, has_nvidia_device, is_requirement, make_environment,
    make_environment_from, own_environment, with_packages,
};
pub use peer::{Exit, Peer, PeerError};
pub use spawn::spawn;
