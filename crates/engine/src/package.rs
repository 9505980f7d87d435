//! Assembling a package: a folder that needs only torch.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use autokernel_core::kernel_file::{HEADERS, KernelFile, Params};
use autokernel_core::plan::Plan;
use autokernel_core::region::Region;
use autokernel_worker::python::bridge_files;
use autokernel_worker::toolchain::Artefact;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::EngineError;

/// The schema string of `manifest.json`.
pub const PACKAGE_SCHEMA: &str = "autokernel.package/1";

/// Bridge files that a package needs to run.
const RUNTIME: &[&str] = &[
    "__init__.py",
    "backend.py",
    "graph.py",
    "kernels.py",
    "loaded.py",
    "package.py",
    "region.py",
    "rewrite.py",
    "tensors.py",
];

/// The bridge file that becomes the package's own `__init__.py`.
const INIT: &str = "package_init.py";

/// A kernel that goes into a package.
#[derive(Clone, Debug)]
pub(crate) struct Winner {
    /// The region that it replaces.
    pub(crate) region: Region,
    /// Its kernel file.
    pub(crate) file: KernelFile,
    /// Chosen parameter values.
    pub(crate) params: Params,
    /// Its plan for the region's shapes.
    pub(crate) plan: Plan,
    /// What the builder made.
    pub(crate) artefact: Artefact,
    /// Threads that the plan was made for.
    pub(crate) threads: usize,
}

/// `manifest.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// `autokernel.package/1`.
    pub schema: String,
    /// The form that the gate chose.
    pub form: String,
    /// The torch that it was tuned with.
    pub torch: String,
    /// The kernels.
    pub regions: Vec<ManifestRegion>,
}

/// One kernel of a package.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestRegion {
    /// The pattern that it replaces.
    pub region: Region,
    /// The kernel file, relative to the package.
    pub file: String,
    /// The artefact, relative to the package.
    pub artefact: String,
    /// SHA-256 of the artefact: what Python can check before it loads it.
    pub artefact_sha256: String,
    /// Chosen parameter values.
    pub params: Params,
    /// Its launches for the region's shapes.
    pub plan: Plan,
    /// What the artefact relies on.
    pub guards: Guards,
}

/// Facts that the artefact relies on; where one does not hold, the original operators run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guards {
    /// Processor features of the tuned machine that change code generation.
    pub cpu_features: Vec<String>,
    /// Most threads that the plan was made for.
    pub threads: usize,
    /// Least alignment of every tensor in bytes, 1 for none.
    pub alignment: u64,
}

/// Features by which compilers choose instructions; a machine that lacks one can't run the artefact.
const CODE_FEATURES: &[&str] = &[
    // x86-64
    "abm",
    "adx",
    "aes",
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "amx_tile",
    "avx",
    "avx2",
    "avx512_4fmaps",
    "avx512_4vnniw",
    "avx512_bf16",
    "avx512_bitalg",
    "avx512_fp16",
    "avx512_vbmi2",
    "avx512_vnni",
    "avx512_vp2intersect",
    "avx512_vpopcntdq",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512er",
    "avx512f",
    "avx512ifma",
    "avx512pf",
    "avx512vbmi",
    "avx512vl",
    "avx_ifma",
    "avx_ne_convert",
    "avx_vnni",
    "avx_vnni_int8",
    "bmi1",
    "bmi2",
    "f16c",
    "fma",
    "fma4",
    "gfni",
    "movbe",
    "pclmulqdq",
    "popcnt",
    "rdseed",
    "sha_ni",
    "sse4_1",
    "sse4_2",
    "sse4a",
    "ssse3",
    "tbm",
    "vaes",
    "vpclmulqdq",
    "xop",
    // aarch64
    "asimd",
    "asimddp",
    "asimdfhm",
    "asimdhp",
    "asimdrdm",
    "atomics",
    "bf16",
    "crc32",
    "dcpop",
    "fcma",
    "flagm",
    "flagm2",
    "fphp",
    "frint",
    "i8mm",
    "ilrcpc",
    "jscvt",
    "lrcpc",
    "rcpc",
    "sb",
    "sve",
    "sve2",
    "svebf16",
    "svei8mm",
];

/// A folder beside `dir` in which a package can be made.
fn making_place(dir: &Path) -> Result<tempfile::TempDir, EngineError> {
    let parent = dir.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::create_dir_all(parent)?;
    Ok(tempfile::Builder::new().prefix(".autokernel-package-").tempdir_in(parent)?)
}

/// Whether a package could be written to `dir`.
pub(crate) fn check_place(dir: &Path) -> Result<(), EngineError> {
    let unusable = |error: &EngineError| {
        EngineError::Package(format!("no package can be written to {}: {error}", dir.display()))
    };
    making_place(dir).map(|_| ()).map_err(|error| unusable(&error))
}

/// Writes a package to `dir`, which must not exist: made beside under another name, then renamed,
/// so that a killed run leaves no half package.
pub(crate) fn assemble(
    dir: &Path,
    form: &str,
    torch: &str,
    features: &[String],
    winners: &[Winner],
    extra: &[(&str, String)],
) -> Result<PathBuf, EngineError> {
    let making = making_place(dir)?;
    let root = making.path();
    for folder in ["_runtime", "kernels", "artefacts", "include/autokernel"] {
        fs_err::create_dir_all(root.join(folder))?;
    }
    for (name, text) in bridge_files() {
        if RUNTIME.contains(name) {
            fs_err::write(root.join("_runtime").join(name), text)?;
        } else if *name == INIT {
            fs_err::write(root.join("__init__.py"), text)?;
        }
    }
    for (name, text) in HEADERS {
        fs_err::write(root.join("include").join(name), text)?;
    }

    let mut regions = vec![];
    for winner in winners {
        let file = format!("kernels/{}.{}", winner.region.id, winner.file.language.extension());
        let artefact = format!("artefacts/{}.so", &winner.artefact.id[..16.min(winner.artefact.id.len())]);
        fs_err::write(root.join(&file), &winner.file.source)?;
        fs_err::write(root.join(&artefact), &winner.artefact.bytes)?;
        regions.push(ManifestRegion {
            region: winner.region.clone(),
            file,
            artefact,
            artefact_sha256: base16(&Sha256::digest(&winner.artefact.bytes)),
            params: winner.params.clone(),
            plan: winner.plan.clone(),
            guards: Guards {
                cpu_features: features
                    .iter()
                    .filter(|name| CODE_FEATURES.contains(&name.as_str()))
                    .cloned()
                    .collect(),
                threads: winner.threads,
                alignment: 1,
            },
        });
    }
    let manifest = Manifest {
        schema: PACKAGE_SCHEMA.to_owned(),
        form: form.to_owned(),
        torch: torch.to_owned(),
        regions,
    };
    fs_err::write(root.join("manifest.json"), serde_json::to_string_pretty(&manifest)?)?;
    for (name, text) in extra {
        fs_err::write(root.join(name), text)?;
    }
    // The folder of a temporary directory is private; a package is as readable as any folder.
    open_to_readers(root)?;
    let made = making.keep();
    if let Err(error) = fs_err::rename(&made, dir) {
        let _ = fs_err::remove_dir_all(&made);
        return Err(error.into());
    }
    Ok(dir.to_owned())
}

fn base16(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn open_to_readers(path: &Path) -> Result<(), EngineError> {
    use std::os::unix::fs::PermissionsExt;
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Reads a package's manifest.
pub(crate) fn read_manifest(dir: &Path) -> Result<Manifest, EngineError> {
    let path = dir.join("manifest.json");
    let text = fs_err::read_to_string(&path).map_err(|_| {
        EngineError::Package(format!("{} is no package: it has no manifest.json", dir.display()))
    })?;
    let manifest: Manifest = serde_json::from_str(&text)
        .map_err(|error| EngineError::Package(format!("{} can't be read: {error}", path.display())))?;
    if manifest.schema == PACKAGE_SCHEMA {
        Ok(manifest)
    } else {
        Err(EngineError::Package(format!(
            "{} has schema `{}`, this program knows `{PACKAGE_SCHEMA}`",
            path.display(),
            manifest.schema
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_whole_or_not_there() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("deep/er/package");
        assemble(&dir, "compile", "2.15.0", &[], &[], &[("certificate.json", "{}".to_owned())]).unwrap();
        let manifest = read_manifest(&dir).unwrap();
        assert_eq!((manifest.form.as_str(), manifest.regions.len()), ("compile", 0));
        for name in RUNTIME {
            assert!(dir.join("_runtime").join(name).is_file(), "{name} is part of the bridge");
        }
        assert!(dir.join("__init__.py").is_file() && dir.join("certificate.json").is_file());

        // A second one does not overwrite the first, and leaves nothing beside it.
        assert!(assemble(&dir, "eager", "2.15.0", &[], &[], &[]).is_err());
        assert_eq!(read_manifest(&dir).unwrap().form, "compile");
        assert_eq!(fs_err::read_dir(dir.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_no_package_is_said() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_manifest(dir.path()).unwrap_err().to_string().contains("is no package"));
        fs_err::write(dir.path().join("manifest.json"), "{}").unwrap();
        assert!(read_manifest(dir.path()).unwrap_err().to_string().contains("can't be read"));
    }
}
