//! `profile`: where the time goes and what could be won, without trying anything.

use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::harvest::untried;
use crate::options::ModelSpec;
use crate::report::{ModelReport, ProfileReport};
use crate::session::{Oracle, Tools, scratch};
use crate::tasks::rank;

/// Captures and profiles a model.
pub fn profile(
    tools: &Tools,
    model: &ModelSpec,
    seed: u64,
    observer: &mut dyn Observer,
) -> Result<ProfileReport, EngineError> {
    let scratch = scratch()?;
    observer.observe(&Event::Stage { what: format!("loading {}", model.spec) });
    let mut oracle = Oracle::start(tools, model, seed, scratch.path())?;
    observer.observe(&Event::Stage { what: "capturing".to_owned() });
    let capture = oracle.capture(tools)?;
    observer.observe(&Event::Stage { what: "profiling".to_owned() });
    let ranked = rank(&mut oracle, tools, &capture)?;
    Ok(ProfileReport {
        schema: "autokernel.profile/1".to_owned(),
        device: tools.device_report(),
        versions: tools.versions(),
        model: ModelReport {
            name: oracle.model.name.clone(),
            graphs: capture.graphs.len(),
            breaks: capture.breaks,
            forms: vec![],
            chosen: None,
            winnable: ranked.winnable,
            speedup: None,
        },
        eager_us: ranked.eager_us,
        regions: ranked.tasks.iter().map(|task| untried(task, "not tried by `profile`")).collect(),
        left: ranked.left,
    })
}
