//! Stopping on a person's word: finish the candidate, keep everything, say how to go on.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::EngineError;

/// One process works on one run, so one flag is enough.
static WANTED: AtomicBool = AtomicBool::new(false);

/// Asks the run of this process to stop at the next candidate. `false` when it was asked before.
pub fn interrupt() -> bool {
    !WANTED.swap(true, Ordering::SeqCst)
}

/// Ends the run here if somebody asked for it.
pub(crate) fn stop_if_asked(run: &str) -> Result<(), EngineError> {
    if WANTED.load(Ordering::SeqCst) { Err(EngineError::Interrupted { run: run.to_owned() }) } else { Ok(()) }
}
