//! The desk at which every agent works, and the doors that lead to it.
//!
//! An agent is free and nobody trusts it: it reads what a desk answers and hands in kernel files.
//! [`desk`] is the one trait, [`verbs`] its verbs as data (a name, a schema, arguments), for every
//! door; [`mcp`] is the door for clients of the Model Context Protocol; [`playbook`] holds what is
//! known about writing kernels.

pub mod desk;
pub mod mcp;
pub mod playbook;
pub mod text;
pub mod verbs;

pub use desk::{Answer, Attempt, Desk, DeskError, Proof};
