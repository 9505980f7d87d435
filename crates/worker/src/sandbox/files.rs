//! The filesystem as a child sees it: landlock rules.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::{Confinement, Domain, SandboxError};

/// What every landlock has; a kernel without it is refused. The gaps of the first versions
/// (truncation, signals) are closed by system-call filters.
const REQUIRED: ABI = ABI::V1;
/// What is used where the kernel has it.
const WANTED: ABI = ABI::V7;

/// Where compilers, interpreters and their libraries live on a Linux system.
const SYSTEM: [&str; 8] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store"];
/// What the dynamic loader and the C library read.
const LOADER: [&str; 5] =
    ["/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives"];
/// What Python and torch read besides.
const PYTHON: [&str; 11] = [
    "/etc/localtime",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/self",
    "/proc/sys/vm",
    "/sys/devices/system",
];
/// The device that a compiler needs; an endless one would be an endless include.
const NOTHING: [&str; 1] = ["/dev/null"];
/// Devices that hold nothing.
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// A ruleset with its paths opened, to be enforced after the user has changed: opening needs the
/// rights of the old user.
pub(super) struct Files(RulesetCreated);

impl Files {
    pub(super) fn prepare(confinement: &Confinement) -> Result<Self, SandboxError> {
        let fail = |e: landlock::RulesetError| SandboxError::new("prepare landlock", &e);
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::from_all(REQUIRED))
            .map_err(fail)?
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(WANTED))
            .map_err(fail)?
            .scope(Scope::from_all(WANTED))
            .map_err(fail)?
            .create()
            .map_err(fail)?;
        let mut files = Self(ruleset);
        if confinement.domain != Domain::Runner {
            let read = AccessFs::from_read(WANTED);
            let write = AccessFs::from_all(WANTED);
            let mut known: Vec<&str> = [&SYSTEM[..], &LOADER[..]].concat();
            if confinement.domain == Domain::Deployment {
                known.extend(PYTHON);
            }
            for path in known {
                files.allow(Path::new(path), read, false)?;
            }
            let devices = if confinement.domain == Domain::Builder { &NOTHING[..] } else { &DEVICES[..] };
            for path in devices {
                files.allow(Path::new(path), AccessFs::ReadFile | AccessFs::WriteFile, false)?;
            }
            for path in &confinement.read {
                files.allow(path, read, true)?;
            }
            for path in &confinement.write {
                files.allow(path, write, true)?;
            }
        }
        Ok(files)
    }

    fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>, required: bool) -> Result<(), SandboxError> {
        let fail = |e: &dyn std::fmt::Display| SandboxError::new(&format!("allow `{}`", path.display()), e);
        let metadata = match std::fs::metadata(path) {
            Err(e) if required => return Err(fail(&e)),
            Err(_) => return Ok(()),
            Ok(metadata) => metadata,
        };
        // Rights on folders make no sense on a file, and landlock refuses them.
        let access = if metadata.is_dir() { access } else { access & AccessFs::from_file(WANTED) };
        let opened = PathFd::new(path).map_err(|e| fail(&e))?;
        let rule = PathBeneath::new(opened, access).set_compatibility(CompatLevel::BestEffort);
        (&mut self.0).add_rule(rule).map_err(|e| fail(&e))?;
        Ok(())
    }

    /// Enforces the rules on this thread; gives the version of landlock's interface.
    pub(super) fn enforce(self) -> Result<u32, SandboxError> {
        let status = self.0.restrict_self().map_err(|e| SandboxError::new("enforce landlock", &e))?;
        match (status.ruleset, status.landlock) {
            (RulesetStatus::NotEnforced, _) => {
                Err(SandboxError { what: "landlock enforces nothing".to_owned() })
            }
            (_, LandlockStatus::Available { effective_abi, kernel_abi }) => {
                Ok(kernel_abi.unwrap_or(effective_abi as i32).unsigned_abs())
            }
            _ => Err(SandboxError { what: "landlock is not there".to_owned() }),
        }
    }
}

/// The parts of a program's installation: beside its own folder, never the folder above itself,
/// which may be a home, and no data folders.
pub(super) fn installation(program: &Path) -> Vec<PathBuf> {
    let Some(prefix) = program.parent().and_then(Path::parent) else { return vec![] };
    let mut parts: Vec<PathBuf> = ["bin", "lib", "lib32", "lib64", "libexec", "include", "pyvenv.cfg"]
        .iter()
        .map(|name| prefix.join(name))
        .filter(|path| path.exists())
        .collect();
    // Cross-style toolchains keep headers and binaries in a folder named after the target.
    let target = format!("{}-", std::env::consts::ARCH);
    for entry in std::fs::read_dir(prefix).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&target)) && entry.path().is_dir() {
            parts.push(entry.path());
        }
    }
    parts
}
