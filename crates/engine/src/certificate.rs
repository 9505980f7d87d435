//! The certificate: what a package claims, and everything from which each claim can be repeated.

use std::path::Path;

use autokernel_core::verdict::Interval;
use autokernel_judge::Race;
use serde::{Deserialize, Serialize};

use crate::error::EngineError;
use crate::gate::Gate;
use crate::options::OptimizeOptions;
use crate::report::{DeviceReport, FormReport, RegionReport, Speedups, Versions};
use crate::session::Tools;
use crate::tasks::Ranked;

/// The schema string of `certificate.json`.
pub const CERTIFICATE_SCHEMA: &str = "autokernel.certificate/1";

/// `certificate.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Certificate {
    pub schema: String,
    pub run: String,
    pub made: String,
    pub device: DeviceReport,
    pub versions: Versions,
    /// The model, its seed and threads, so that `bench` can measure again.
    pub options: OptimizeOptions,
    pub grad_mode: String,
    pub eager_us: f64,
    pub chosen: String,
    pub speedup: Option<Speedups>,
    pub forms: Vec<FormReport>,
    pub regions: Vec<RegionReport>,
    /// Raw samples, order, seeds, hashes of the whole-model race.
    pub race: Race,
}

/// One claim that `bench` repeats.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Claim {
    pub what: String,
    pub claimed: Interval,
    pub measured: Interval,
    pub holds: bool,
}

pub(crate) fn certificate(
    run: &str,
    options: &OptimizeOptions,
    tools: &Tools,
    ranked: &Ranked,
    regions: &[RegionReport],
    gate: &Gate,
) -> Result<String, EngineError> {
    let certificate = Certificate {
        schema: CERTIFICATE_SCHEMA.to_owned(),
        run: run.to_owned(),
        made: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        device: tools.device_report(),
        versions: tools.versions(),
        options: options.clone(),
        grad_mode: "no_grad".to_owned(),
        eager_us: ranked.eager_us,
        chosen: gate.chosen.clone(),
        speedup: gate.speedup,
        forms: gate.forms.clone(),
        regions: regions.to_vec(),
        race: gate.race.clone(),
    };
    Ok(serde_json::to_string_pretty(&certificate)?)
}

/// Reads a package's certificate.
pub(crate) fn read_certificate(package: &Path) -> Result<Certificate, EngineError> {
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
