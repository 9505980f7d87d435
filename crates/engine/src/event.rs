//! What happens in a run, as one stream: the terminal shows it, the store keeps it.

use serde::{Deserialize, Serialize};

/// The schema string of a stored [`Event`].
pub const EVENT_SCHEMA: &str = "autokernel.event/1";

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it; times are microseconds unless they end in `_s`")]
pub enum Event {
    /// A stage of the run began; `what` is a sentence for people.
    Stage {
        what: String,
    },
    /// Something that a user should know and nothing that stops the run.
    Note {
        what: String,
    },
    ModelLoaded {
        name: String,
        graphs: usize,
        breaks: usize,
        nodes: usize,
        eager_us: f64,
    },
    Ranked {
        regions: usize,
        winnable: f64,
    },
    RegionStarted {
        region: String,
        ops: Vec<String>,
        count: usize,
        share: f64,
        eager_us: f64,
        reach_us: f64,
    },
    Screened {
        region: String,
        params: String,
        us: f64,
        best_us: f64,
    },
    Rejected {
        region: String,
        stage: String,
        reason: String,
    },
    Verdict {
        region: String,
        verdict: String,
        baseline: String,
        speedup: Option<[f64; 3]>,
    },
    FormMeasured {
        form: String,
        us: f64,
    },
    Finished {
        chosen: String,
        vs_eager: Option<[f64; 3]>,
        vs_best_plain: Option<[f64; 3]>,
        package: Option<String>,
    },
}

/// Takes the events of a run.
pub trait Observer {
    /// Called in the order in which things happen, from one thread.
    fn observe(&mut self, event: &Event);
}

/// Takes nothing.
pub struct Silent;

impl Observer for Silent {
    fn observe(&mut self, _event: &Event) {}
}
