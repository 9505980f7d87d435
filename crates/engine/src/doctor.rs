//! Whether this machine can do the work, and what is missing.

use std::fmt::Write;

use autokernel_worker::device::DeviceFacts;
use autokernel_worker::python;
use autokernel_worker::toolchain::Toolchain;
use serde::Serialize;

use crate::session::{PythonChoice, alone, confinement};

/// `autokernel.doctor/1`.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct DoctorReport {
    pub schema: String,
    /// Whether `optimize` can run here.
    pub fine: bool,
    pub checks: Vec<Check>,
    /// The same for a reader.
    pub text: String,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Check {
    pub name: String,
    pub ok: bool,
    pub what: String,
}

/// From this slowdown on two of the cores that a system shows are taken for one.
const SHARED_CORE: f64 = 1.25;

/// What running on all cores at once costs each thread.
fn together(slowdown: f64) -> String {
    if slowdown < SHARED_CORE {
        return ", each on its own".to_owned();
    }
    format!(", which share physical cores (with all at work a thread takes {slowdown:.1} times as long)")
}

/// Looks at everything; never fails.
pub fn doctor(choice: &PythonChoice) -> DoctorReport {
    let mut checks = vec![];
    let mut check = |name: &str, result: Result<String, String>| {
        let ok = result.is_ok();
        checks.push(Check { name: name.to_owned(), ok, what: result.unwrap_or_else(|error| error) });
    };
    check(
        "python",
        python::discover(choice.explicit.as_deref())
            .map(|found| format!("{} (Python {}, torch {})", found.path.display(), found.python, found.torch))
            .map_err(|error| {
                format!(
                    "{error}; `pip install torch` (2.9 or newer), --python, or --yes for an own environment"
                )
            }),
    );
    check(
        "compiler",
        Toolchain::detect()
            .map(|found| format!("{} ({}), {}", found.version, found.cxx, found.isa))
            .map_err(|error| error.to_string()),
    );
    check("confinement", confinement());
    let alone = alone();
    check(
        "machine",
        DeviceFacts::measure()
            .map(|facts| {
                let rates: Vec<String> = facts
                    .copy
                    .iter()
                    .map(|rate| {
                        format!("{} KiB at {:.1} GB/s", rate.footprint >> 10, rate.bytes_per_us / 1000.0)
                    })
                    .collect();
                let together = facts.together.map_or_else(String::new, together);
                format!(
                    "{}, {} cores{together}; copies {}; multiplies at {:.0} GFLOP/s",
                    facts.name,
                    facts.cores,
                    rates.join(", "),
                    facts.flops_per_us / 1000.0
                )
            })
            .map_err(|error| error.to_string()),
    );
    drop(alone);
    let fine = checks.iter().all(|check| check.ok);
    let mut text = String::new();
    for check in &checks {
        let _ = writeln!(
            text,
            "{} {:<12} {}",
            if check.ok { "ok     " } else { "MISSING" },
            check.name,
            check.what
        );
    }
    text.push_str(if fine {
        "Everything is here. Nothing of your model leaves this machine.\n"
    } else {
        "Something is missing; see above.\n"
    });
    DoctorReport { schema: "autokernel.doctor/1".to_owned(), fine, checks, text }
}
