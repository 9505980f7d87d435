//! The program as a user runs it: real children, a real torch, nothing of ours replaced.
//!
//! What needs a finished run shares one (`journey::journey`): each `optimize` takes most of a minute.
//! No test asserts a time or a ratio.
#![expect(clippy::unwrap_used, reason = "helpers of tests are not known as such")]

mod bad_input;
mod bridge;
mod desk;
mod documents;
mod hostile;
mod journey;
mod models;
mod program;
mod resume;
mod shape;
