//! `bench`: every claim of a package again, on this machine.

use std::path::Path;

use autokernel_core::stats::Schedule;
use autokernel_core::verdict::Interval;
use autokernel_worker::toolchain::Artefact;
use serde::Serialize;

use crate::certificate::{Certificate, Claim, read_certificate};
use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::gate::{Entry, Gate, compare, gate};
use crate::options::ModelSpec;
use crate::package::{Manifest, read_manifest};
use crate::report::{DeviceReport, FormReport, Versions};
use crate::session::{Capture, Oracle, Tools, open_to_children, scratch};
use crate::tasks::rank;
use crate::trial::{Baselines, Entrant, Places, Terms, compare_packaged, fresh_runner, stage_again};

/// `autokernel.bench/1`.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct BenchReport {
    pub schema: String,
    pub package: String,
    pub form: String,
    pub device: DeviceReport,
    pub versions: Versions,
    pub forms: Vec<FormReport>,
    pub claims: Vec<Claim>,
}

/// What takes part in every measurement of `bench`.
struct Bench<'a> {
    tools: &'a Tools,
    package: &'a Path,
    certificate: &'a Certificate,
    manifest: &'a Manifest,
    scratch: &'a Path,
}

/// Measures the claims of the package again: each region against the best baseline, then the model.
pub fn bench(
    mut tools: Tools,
    package: &Path,
    model: Option<&str>,
    observer: &mut dyn Observer,
) -> Result<BenchReport, EngineError> {
    let package = &fs_err::canonicalize(package).map_err(|error| EngineError::Package(error.to_string()))?;
    let manifest = read_manifest(package)?;
    let certificate = read_certificate(package)?;
    tools.threads = certificate.options.threads;
    let spec = match model {
        Some(spec) => ModelSpec::new(spec, certificate.options.model.inputs.clone()),
        None => certificate.options.model.clone(),
    };
    let scratch = scratch()?;
    observer.observe(&Event::Stage { what: format!("loading {}", spec.spec) });
    let mut oracle = Oracle::start(&tools, &spec, certificate.options.seed, scratch.path())?;
    let capture = oracle.capture(&tools)?;
    let bench = Bench {
        tools: &tools,
        package,
        certificate: &certificate,
        manifest: &manifest,
        scratch: scratch.path(),
    };
    let mut claims = bench.regions(&mut oracle, &capture, observer)?;
    let entry = Entry {
        model: &spec,
        seed: certificate.options.seed,
        package: (!manifest.regions.is_empty()).then_some(package.as_path()),
        artefacts: vec![],
    };
    let gate = gate(&mut oracle, &tools, &entry, scratch.path(), observer)?;
    claims.extend(bench.model(&gate));
    Ok(BenchReport {
        schema: "autokernel.bench/1".to_owned(),
        package: package.display().to_string(),
        form: certificate.chosen.clone(),
        device: tools.device_report(),
        versions: tools.versions(),
        forms: gate.forms,
        claims,
    })
}

impl Bench<'_> {
    fn regions(
        &self,
        oracle: &mut Oracle,
        capture: &Capture,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Claim>, EngineError> {
        let mut claims = vec![];
        if self.manifest.regions.is_empty() {
            return Ok(claims);
        }
        let tasks = rank(oracle, self.tools, capture)?.tasks;
        let mut baselines = Baselines::new();
        for kernel in &self.manifest.regions {
            let id = &kernel.region.id;
            let row = self.certificate.regions.iter().find(|row| row.id == id.0);
            let Some(claimed) = row.and_then(|row| row.speedup) else { continue };
            let Some(task) = tasks.iter().find(|task| task.region.id == *id) else {
                let what = format!("region {id}, which is not in this model as it was");
                claims.push(Claim { what, claimed, measured: NOTHING, holds: false });
                continue;
            };
            observer.observe(&Event::Stage { what: format!("measuring region {id}") });
            let folder = tempfile::Builder::new().prefix("task-").tempdir_in(self.scratch)?;
            open_to_children(folder.path())?;
            let judged = stage_again(oracle, self.tools, task, folder.path(), observer)?;
            baselines.prepare(self.tools, task, self.scratch, observer);
            let places = Places { task: folder.path(), scratch: self.scratch };
            let artefact = Artefact::from_bytes(fs_err::read(self.package.join(&kernel.artefact))?);
            let fresh = fresh_runner(self.tools, artefact, kernel.plan.clone(), kernel.guards.threads);
            let entrant = Entrant { package: self.package, kernel: &fresh, checked: None };
            let terms = Terms { schedule: Schedule::confirm(), family: 1, observer };
            let tried = compare_packaged(self.tools, &judged, &baselines, entrant, &places, terms)?;
            let measured = tried.decided.verdict.speedup().unwrap_or(NOTHING);
            let what = format!("region {id} over {}", tried.evidence.baseline);
            claims.push(Claim { what, claimed, measured, holds: holds(claimed, measured) });
        }
        Ok(claims)
    }

    fn model(&self, gate: &Gate) -> Vec<Claim> {
        let chosen = &self.certificate.chosen;
        let best_plain = self.certificate.race.ranking().into_iter().find(|form| !form.starts_with("ours"));
        let Some(speedup) = self.certificate.speedup else { return vec![] };
        let rows = [
            ("eager".to_owned(), Some("eager".to_owned()), speedup.vs_eager),
            ("the best plain form".to_owned(), best_plain, speedup.vs_best_plain),
        ];
        rows.into_iter()
            .map(|(name, from, claimed)| {
                let measured = match from {
                    Some(from) if from == *chosen => Interval { value: 1.0, low: 1.0, high: 1.0 },
                    // A form that is out now has no figure: the claim does not hold.
                    from => from.and_then(|from| compare(&gate.race, &from, chosen)).unwrap_or(NOTHING),
                };
                Claim {
                    what: format!("{chosen} over {name}"),
                    claimed,
                    measured,
                    holds: holds(claimed, measured),
                }
            })
            .collect()
    }
}

/// The figure of something that could not be measured.
const NOTHING: Interval = Interval { value: 0.0, low: 0.0, high: 0.0 };

/// A claim holds when what is measured now reaches into what was claimed, or lies above it.
fn holds(claimed: Interval, measured: Interval) -> bool {
    measured.high >= claimed.low
}
