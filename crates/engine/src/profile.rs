//! `profile`: where the time goes and what could be won, without trying anything.

use serde::Deserialize;
use serde_json::json;

use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::harvest::untried;
use crate::options::ModelSpec;
use crate::report::{ModelReport, ProfileReport, PutBackReport};
use crate::session::{Equality, Oracle, Tools, scratch};
use crate::tasks::{Ranked, rank};

/// Captures and profiles a model. With `check` every region is also put back, as its own operators.
pub fn profile(
    tools: &Tools,
    model: &ModelSpec,
    seed: u64,
    check: bool,
    observer: &mut dyn Observer,
) -> Result<ProfileReport, EngineError> {
    let scratch = scratch()?;
    observer.observe(&Event::Stage { what: format!("loading {}", model.spec) });
    let mut oracle = Oracle::start(tools, model, seed, scratch.path())?;
    observer.observe(&Event::Stage { what: "capturing".to_owned() });
    let capture = oracle.capture(tools)?;
    observer.observe(&Event::Stage { what: "profiling".to_owned() });
    let ranked = rank(&mut oracle, tools, &capture)?;
    let put_back = if check {
        observer.observe(&Event::Stage { what: "putting regions back".to_owned() });
        Some(put_back(&mut oracle, tools, &ranked)?)
    } else {
        None
    };
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
        put_back,
    })
}

/// What the oracle found.
#[derive(Deserialize)]
struct PutBack {
    missed: Vec<String>,
    fallbacks: Vec<String>,
    equal: Equality,
    gradients: Option<Equality>,
}

/// Puts every region where a package would put its kernel; then the model must still be the model.
fn put_back(oracle: &mut Oracle, tools: &Tools, ranked: &Ranked) -> Result<PutBackReport, EngineError> {
    let regions: Vec<_> = ranked.tasks.iter().map(|task| &task.region).collect();
    let occurrences: Vec<_> = ranked.tasks.iter().map(|task| &task.occurrences).collect();
    let body = json!({ "regions": regions, "occurrences": occurrences });
    let found: PutBack = serde_json::from_value(oracle.ask(tools, "put_back", body)?)?;
    Ok(PutBackReport {
        regions: regions.len(),
        matched: regions.len() - found.missed.len(),
        missed: found.missed,
        fallbacks: found.fallbacks,
        same: found.equal.ok,
        max_relative_error: found.equal.max_relative_error,
        same_gradients: found.gradients.map(|equal| equal.ok),
    })
}
