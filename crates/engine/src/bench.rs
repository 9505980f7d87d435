//! `bench`: every claim of a package again, on this machine.

use std::path::Path;

use autokernel_core::verdict::Interval;
use serde::Serialize;

use crate::certificate::{CERTIFICATE_SCHEMA, Certificate, Claim};
use crate::error::EngineError;
use crate::event::{Event, Observer};
use crate::gate::{Entry, compare, gate};
use crate::options::ModelSpec;
use crate::package::read_manifest;
use crate::report::{DeviceReport, FormReport, Versions};
use crate::session::{Oracle, Tools};

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

/// Measures the claims of the package again.
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
    let scratch = tempfile::tempdir()?;
    crate::optimize::open_to_children(scratch.path())?;
    observer.observe(&Event::Stage { what: format!("loading {}", spec.spec) });
    let mut oracle = Oracle::start(&tools, &spec, certificate.options.seed, scratch.path())?;
    oracle.capture(&tools)?;
    let entry = Entry {
        model: &spec,
        seed: certificate.options.seed,
        package: (!manifest.regions.is_empty()).then_some(package.as_path()),
        artefacts: vec![],
    };
    let gate = gate(&mut oracle, &tools, &entry, scratch.path(), observer)?;
    let best_plain = certificate.race.ranking().into_iter().find(|form| !form.starts_with("ours"));
    let mut claims = vec![];
    if let Some(speedup) = certificate.speedup {
        let rows = [
            ("eager", Some("eager".to_owned()), speedup.vs_eager),
            ("the best plain form", best_plain, speedup.vs_best_plain),
        ];
        for (name, from, claimed) in rows {
            let one = Interval { value: 1.0, low: 1.0, high: 1.0 };
            let measured = match from.as_deref() {
                Some(from) if from == certificate.chosen => Some(one),
                Some(from) => compare(&gate.race, from, &certificate.chosen),
                None => None,
            };
            // A form that is out now has no figure: the claim does not hold.
            let measured = measured.unwrap_or(Interval { value: 0.0, low: 0.0, high: 0.0 });
            claims.push(Claim {
                what: format!("{} over {name}", certificate.chosen),
                claimed,
                measured,
                holds: overlaps(claimed, measured),
            });
        }
    }
    Ok(BenchReport {
        schema: "autokernel.bench/1".to_owned(),
        package: package.display().to_string(),
        form: certificate.chosen,
        device: tools.device_report(),
        versions: tools.versions(),
        forms: gate.forms,
        claims,
    })
}

/// A claim holds when what is measured now reaches into what was claimed, or lies above it.
fn overlaps(claimed: Interval, measured: Interval) -> bool {
    measured.high >= claimed.low
}

fn read_certificate(package: &Path) -> Result<Certificate, EngineError> {
    let path = package.join("certificate.json");
    let text = fs_err::read_to_string(&path).map_err(|error| EngineError::Package(error.to_string()))?;
    let certificate: Certificate = serde_json::from_str(&text)
        .map_err(|error| EngineError::Package(format!("{} can't be read: {error}", path.display())))?;
    if certificate.schema == CERTIFICATE_SCHEMA {
        Ok(certificate)
    } else {
        Err(EngineError::Package(format!(
            "{} has schema `{}`, this program knows `{CERTIFICATE_SCHEMA}`",
            path.display(),
            certificate.schema
        )))
    }
}
