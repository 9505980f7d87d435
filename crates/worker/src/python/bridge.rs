//! The bridge's Python files, embedded in the program and written once to the user's cache.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fs_err as fs;
use tempfile::TempDir;

const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/bridge_files.rs"));

/// Every file of the bridge: name within the `autokernel` package, text.
pub fn bridge_files() -> &'static [(&'static str, &'static str)] {
    FILES
}

/// The folder that holds the embedded `autokernel` package; put it on `PYTHONPATH`.
///
/// It is written once and named after its contents, so that several versions of the program can
/// share a cache. Where the cache can't be written it is a private folder of this process.
pub fn bridge_dir() -> io::Result<PathBuf> {
    static PRIVATE: OnceLock<TempDir> = OnceLock::new();
    if let Some(cache) = user_folder("XDG_CACHE_HOME", ".cache")
        && let Ok(dir) = place(&cache.join("autokernel"), FILES)
    {
        return Ok(dir);
    }
    if let Some(dir) = PRIVATE.get() {
        return place(dir.path(), FILES);
    }
    let dir =
        tempfile::Builder::new().prefix(&format!("autokernel-{}-bridge-", std::process::id())).tempdir()?;
    place(PRIVATE.get_or_init(|| dir).path(), FILES)
}

/// A folder of the XDG convention: the variable when it is absolute, else the default below home.
pub(super) fn user_folder(variable: &str, below_home: &str) -> Option<PathBuf> {
    let absolute = |value: Option<std::ffi::OsString>| value.map(PathBuf::from).filter(|p| p.is_absolute());
    absolute(env::var_os(variable))
        .or_else(|| absolute(env::var_os("HOME")).map(|home| home.join(below_home)))
}

/// Makes sure that `parent/bridge-HASH/autokernel` holds exactly these texts.
pub(super) fn place(parent: &Path, files: &[(&str, &str)]) -> io::Result<PathBuf> {
    let dir = parent.join(format!("bridge-{}", digest(files)));
    if !dir.is_dir() {
        fs::create_dir_all(parent)?;
        let fresh = tempfile::Builder::new().prefix(".bridge-").tempdir_in(parent)?;
        fs::create_dir(fresh.path().join("autokernel"))?;
        for (name, text) in files {
            fs::write(fresh.path().join("autokernel").join(name), text)?;
        }
        // Losing this race is fine: the winner wrote the same texts, and they are verified below.
        if fs::rename(fresh.path(), &dir).is_ok() {
            drop(fresh.keep());
        }
    }
    repair(&dir.join("autokernel"), files)?;
    Ok(dir)
}

/// Rewrites what is missing or differs, and removes what could shadow a file of ours.
fn repair(package: &Path, files: &[(&str, &str)]) -> io::Result<()> {
    fs::create_dir_all(package)?;
    for (name, text) in files {
        let path = package.join(name);
        if fs::read(&path).is_ok_and(|found| found == text.as_bytes()) {
            continue;
        }
        let fresh = tempfile::NamedTempFile::new_in(package)?;
        fs::write(fresh.path(), text)?;
        fresh.persist(&path).map_err(|e| e.error)?;
    }
    for entry in fs::read_dir(package)? {
        let entry = entry?;
        let name = entry.file_name();
        let ours = files.iter().any(|(known, _)| name == *known);
        // Another process may be placing its temporary file just now; those start with a dot.
        if ours || name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let folder = entry.file_type()?.is_dir();
        if folder { fs::remove_dir_all(entry.path()) } else { fs::remove_file(entry.path()) }?;
    }
    Ok(())
}

fn digest(files: &[(&str, &str)]) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, text) in files {
        for part in [name, text] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: &[(&str, &str)] = &[("__init__.py", "x = 1\n"), ("wire.py", "y = 2\n")];

    #[test]
    fn every_python_file_is_embedded() {
        assert!(bridge_files().iter().any(|(name, _)| *name == "__init__.py"));
        assert!(bridge_files().iter().any(|(name, _)| *name == "probe.py"));
    }

    #[test]
    fn placed_once_and_repaired() {
        let cache = tempfile::tempdir().unwrap();
        let dir = place(cache.path(), TEXTS).unwrap();
        let file = dir.join("autokernel/wire.py");
        assert_eq!(fs::read_to_string(&file).unwrap(), "y = 2\n");
        fs::write(&file, "y = 3\n").unwrap();
        fs::write(dir.join("autokernel/torch.py"), "").unwrap();
        fs::remove_file(dir.join("autokernel/__init__.py")).unwrap();
        assert_eq!(place(cache.path(), TEXTS).unwrap(), dir);
        assert_eq!(fs::read_to_string(&file).unwrap(), "y = 2\n");
        assert!(dir.join("autokernel/__init__.py").exists());
        assert!(!dir.join("autokernel/torch.py").exists());
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1, "no temporary folder is left");
    }

    #[test]
    fn races_end_well() {
        let cache = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let runs: Vec<_> = (0..8).map(|_| scope.spawn(|| place(cache.path(), TEXTS).unwrap())).collect();
            for run in runs {
                assert!(run.join().unwrap().join("autokernel/wire.py").exists());
            }
        });
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1);
    }

    #[test]
    fn other_texts_go_elsewhere() {
        let cache = tempfile::tempdir().unwrap();
        let one = place(cache.path(), TEXTS).unwrap();
        let two = place(cache.path(), &TEXTS[..1]).unwrap();
        assert_ne!(one, two);
    }

    #[test]
    fn unwritable_cache_is_an_error() {
        let cache = tempfile::tempdir().unwrap();
        let file = cache.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(place(&file, TEXTS).is_err());
    }
}
