//! Whether this machine can do the work, what is missing, and what there is: for people, and as facts.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use autokernel_store::Store;
use autokernel_worker::device::DeviceFacts;
use autokernel_worker::gpu::{Gpu, nvidia_devices};
use autokernel_worker::python::{self, Interpreter};
use autokernel_worker::sandbox::{self, SandboxReport};
use autokernel_worker::toolchain::Toolchain;
use serde::Serialize;

use crate::session::{PythonChoice, alone, cache_root, confinement_of};

/// `autokernel.doctor/1`.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct DoctorReport {
    pub schema: String,
    /// Whether `optimize` can run here.
    pub fine: bool,
    pub checks: Vec<Check>,
    pub facts: Facts,
    /// The same for a reader.
    pub text: String,
}

/// One thing without which nothing works.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Check {
    pub name: String,
    pub ok: bool,
    pub what: String,
}

/// What was found; null where it could not be.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Facts {
    pub python: Option<PythonFacts>,
    pub compiler: Option<CompilerFacts>,
    pub processor: Option<String>,
    pub cores: Option<CoreFacts>,
    /// Footprint in bytes (read plus written) to measured GB/s with all cores.
    pub copy_gb_per_s: BTreeMap<String, f64>,
    pub gpus: Vec<Gpu>,
    pub sandbox: SandboxReport,
    /// Variables that hold keys of providers: names and whether they are set, never values.
    pub keys: BTreeMap<String, bool>,
    pub caches: Vec<CacheFacts>,
    /// What leaves the machine, and when.
    pub leaves: Vec<String>,
}

/// The interpreter that a command would use.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct PythonFacts {
    pub path: PathBuf,
    pub version: String,
    pub torch: String,
    pub numpy: Option<String>,
    /// torch was built for CUDA and there is a driver.
    pub cuda: bool,
}

/// The C++ compiler.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CompilerFacts {
    pub path: PathBuf,
    pub version: String,
    pub isa: String,
}

/// Cores, and whether two of them are one.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CoreFacts {
    pub usable: usize,
    /// How many times as long a thread takes with all of them at work as alone; null with one core.
    pub together: Option<f64>,
    pub shared: bool,
    /// Products of matrices on all cores.
    pub gflop_per_s: f64,
}

/// A folder that AutoKernel keeps for later.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CacheFacts {
    pub what: String,
    pub path: PathBuf,
    pub bytes: u64,
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

/// Where providers' keys are looked for by people who have them.
const KEYS: [&str; 12] = [
    "ANTHROPIC_API_KEY",
    "OPENAI_API_KEY",
    "GEMINI_API_KEY",
    "GOOGLE_API_KEY",
    "MISTRAL_API_KEY",
    "DEEPSEEK_API_KEY",
    "OPENROUTER_API_KEY",
    "GROQ_API_KEY",
    "XAI_API_KEY",
    "TOGETHER_API_KEY",
    "COHERE_API_KEY",
    "FIREWORKS_API_KEY",
];

const LEAVES: [&str; 2] = [
    "Nothing of your model, your code or your measurements leaves this machine.",
    "--yes and --with ask the package index for packages; nothing else opens a connection.",
];

/// Looks at everything; never fails.
pub fn doctor(choice: &PythonChoice) -> DoctorReport {
    let mut checks = vec![];
    let mut check = |name: &str, result: Result<String, String>| {
        let ok = result.is_ok();
        checks.push(Check { name: name.to_owned(), ok, what: result.unwrap_or_else(|error| error) });
    };

    let python = python::discover(choice.explicit.as_deref());
    check(
        "python",
        python.as_ref().map(interpreter).map_err(|error| {
            format!("{error}; `pip install torch` (2.9 or newer), --python, or --yes for an own environment")
        }),
    );
    let compiler = Toolchain::detect();
    check(
        "compiler",
        compiler
            .as_ref()
            .map(|found| format!("{} ({}), {}", found.version, found.cxx, found.isa))
            .map_err(ToString::to_string),
    );
    let sandbox = sandbox::probe();
    check("confinement", confinement_of(&sandbox));
    let alone = alone();
    let device = DeviceFacts::measure();
    drop(alone);
    check("machine", device.as_ref().map(machine).map_err(ToString::to_string));

    let facts = Facts {
        python: python.ok().map(|found| PythonFacts {
            path: found.path,
            version: found.python,
            torch: found.torch,
            numpy: found.numpy,
            cuda: found.cuda,
        }),
        compiler: compiler.ok().map(|found| CompilerFacts {
            path: PathBuf::from(&found.cxx),
            version: found.version.clone(),
            isa: found.isa.clone(),
        }),
        processor: device.as_ref().ok().map(|found| found.name.clone()),
        cores: device.as_ref().ok().map(|found| CoreFacts {
            usable: found.cores,
            together: found.together.map(|slowdown| (slowdown * 100.0).round() / 100.0),
            shared: found.together.is_some_and(|slowdown| slowdown >= SHARED_CORE),
            gflop_per_s: (found.flops_per_us / 100.0).round() / 10.0,
        }),
        copy_gb_per_s: device
            .iter()
            .flat_map(|found| &found.copy)
            .map(|rate| (rate.footprint.to_string(), (rate.bytes_per_us / 10.0).round() / 100.0))
            .collect(),
        gpus: nvidia_devices(),
        sandbox,
        keys: KEYS.iter().map(|name| ((*name).to_owned(), is_set(name))).collect(),
        caches: caches(),
        leaves: LEAVES.map(str::to_owned).to_vec(),
    };
    let fine = checks.iter().all(|check| check.ok);
    let text = text(&checks, &facts, fine);
    DoctorReport { schema: "autokernel.doctor/1".to_owned(), fine, checks, facts, text }
}

fn interpreter(found: &Interpreter) -> String {
    format!("{} (Python {}, torch {})", found.path.display(), found.python, found.torch)
}

fn machine(facts: &DeviceFacts) -> String {
    let rates: Vec<String> = facts
        .copy
        .iter()
        .map(|rate| format!("{} KiB at {:.1} GB/s", rate.footprint >> 10, rate.bytes_per_us / 1000.0))
        .collect();
    format!(
        "{}, {} cores{}; copies {}; multiplies at {:.0} GFLOP/s",
        facts.name,
        facts.cores,
        facts.together.map_or_else(String::new, together),
        rates.join(", "),
        facts.flops_per_us / 1000.0
    )
}

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

/// The folders that may grow, with what they hold now.
fn caches() -> Vec<CacheFacts> {
    let mut places =
        vec![("runs and kernels", Store::default_root()), ("compiled baselines, bridge", cache_root())];
    // Environments lie beside the runs unless those were sent elsewhere; they are counted by themselves.
    places.extend(python::own_environment().map(|dir| ("own environment with torch", dir)));
    let skipped: Vec<PathBuf> = places.iter().map(|(_, path)| path.clone()).collect();
    places
        .into_iter()
        .map(|(what, path)| {
            let inner: Vec<&Path> =
                skipped.iter().map(PathBuf::as_path).filter(|other| *other != path).collect();
            CacheFacts { what: what.to_owned(), bytes: size(&path, &inner), path }
        })
        .collect()
}

/// Bytes of all files under a folder, without what lies under `except`; links are not followed.
fn size(folder: &Path, except: &[&Path]) -> u64 {
    let Ok(entries) = fs_err::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() && !except.contains(&entry.path().as_path()) => {
                size(&entry.path(), except)
            }
            Ok(kind) if kind.is_file() => entry.metadata().map_or(0, |facts| facts.len()),
            _ => 0,
        })
        .sum()
}

fn text(checks: &[Check], facts: &Facts, fine: bool) -> String {
    let mut text = String::new();
    let mut line = |mark: &str, name: &str, what: &str| {
        let _ = writeln!(text, "{mark:<8}{name:<12} {what}");
    };
    for check in checks {
        line(if check.ok { "ok" } else { "MISSING" }, &check.name, &check.what);
    }
    let gpus: Vec<String> = facts
        .gpus
        .iter()
        .map(|gpu| {
            format!("{} with {:.0} GiB, driver {}", gpu.name, gpu.memory_mib as f64 / 1024.0, gpu.driver)
        })
        .collect();
    line("", "GPU", &if gpus.is_empty() { "none found".to_owned() } else { gpus.join("; ") });
    let set: Vec<&str> = facts.keys.iter().filter(|(_, set)| **set).map(|(name, _)| name.as_str()).collect();
    let keys = if set.is_empty() { "none set, and none is needed".to_owned() } else { set.join(", ") };
    line("", "keys", &keys);
    for cache in &facts.caches {
        let size = format!("{:.2} GB", cache.bytes as f64 / 1e9);
        line("", "cache", &format!("{size:>9}  {} in {}", cache.what, cache.path.display()));
    }
    for sentence in &facts.leaves {
        line("", "network", sentence);
    }
    text.push_str(if fine { "Everything is here.\n" } else { "Something is missing; see above.\n" });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_count_each_file_once_and_follow_no_link() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b");
        fs_err::create_dir_all(&inner).unwrap();
        fs_err::write(root.path().join("one"), [0; 10]).unwrap();
        fs_err::write(inner.join("two"), [0; 5]).unwrap();
        std::os::unix::fs::symlink(root.path(), inner.join("loop")).unwrap();
        assert_eq!(size(root.path(), &[]), 15);
        assert_eq!(size(root.path(), &[&inner]), 10);
        assert_eq!(size(&root.path().join("nothing"), &[]), 0);
    }
}
