//! The one trait at which search agents, language models and people's own tools stand.

use std::collections::BTreeMap;
use std::error::Error;

use serde::Serialize;
use serde_json::Value;

use crate::text::{ANSWER_BYTES, clean};

/// When a kernel that passed every check is also compared with PyTorch's best, over pairs of fresh
/// processes. That is the only figure that counts, and it takes most of a minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Proof {
    /// When the screen puts it at or near the front of what the region has.
    #[default]
    IfBest,
    /// In any case.
    Always,
    /// Only checks and the screen.
    Never,
}

/// A kernel file that an agent hands in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// A region's hash, the beginning of it, or its rank from 0.
    pub region: String,
    /// The whole kernel file.
    pub source: String,
    /// Values for `[params]`; the first of each where left out.
    pub params: BTreeMap<String, i64>,
    /// Whether it is compared with PyTorch's best.
    pub proof: Proof,
}

/// What a desk says: `text` for a mind, `data` for a program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// At most [`ANSWER_BYTES`], without control codes.
    pub text: String,
    /// A document with a `schema`.
    pub data: Value,
}

impl Answer {
    /// An answer whose text is cleaned and capped.
    pub fn new(text: &str, data: Value) -> Self {
        Self { text: clean(text, ANSWER_BYTES), data }
    }
}

/// Why a desk could not do what it was asked. A kernel that is wrong is an [`Answer`], not this.
#[derive(Debug, thiserror::Error)]
pub enum DeskError {
    /// The request can't be understood; the message says what would be.
    #[error("{0}")]
    Request(String),
    /// The desk itself is in trouble.
    #[error("{}", chain(.0.as_ref()))]
    Failed(Box<dyn Error + Send + Sync>),
}

/// An error with its causes, as one sentence.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        // A transparent error repeats its cause.
        if !text.ends_with(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

/// Everything that an agent can do. One request at a time.
pub trait Desk {
    /// The regions of the run, with what can be won where.
    fn tasks(&mut self) -> Result<Answer, DeskError>;
    /// Everything needed to write a kernel for a region.
    fn brief(&mut self, region: &str) -> Result<Answer, DeskError>;
    /// Builds, checks and screens one point of a kernel file, and compares it as [`Proof`] says.
    fn judge(&mut self, attempt: &Attempt) -> Result<Answer, DeskError>;
    /// Searches the `[params]` of a kernel file for at most `seconds`, then compares the best point.
    fn sweep(&mut self, attempt: &Attempt, seconds: u64) -> Result<Answer, DeskError>;
    /// What was tried on a region, and what came of it.
    fn history(&mut self, region: &str) -> Result<Answer, DeskError>;
    /// Pages of the playbook that fit a query best; without one, what pages there are.
    fn playbook(&mut self, query: &str) -> Result<Answer, DeskError>;
    /// Puts the winners into a package and measures the whole model.
    fn finish(&mut self) -> Result<Answer, DeskError>;
}
