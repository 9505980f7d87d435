//! The Python that the tests run in: torch and what `fixtures/requirements-test.txt` lists.
//!
//! Every test that needs it asks here; the first one makes it, the others wait for a lock and find
//! it. So `cargo test` on a fresh machine needs no step before it, and no test is skipped because
//! something is not installed.
//!
//! Two layers: torch lies in the program's own environment, which users get too, and what only
//! tests need in a light environment over it, named after the hash of everything it depends on.

use std::env;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use autokernel_worker::python::{Interpreter, make_environment, own_environment, probe};
use fs_err as fs;

/// Names a Python with torch to use in place of the program's own environment.
pub const VARIABLE: &str = "AUTOKERNEL_TEST_PYTHON";
const REQUIREMENTS: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/requirements-test.txt"));
/// Holds the list in a finished environment of ours.
const MARKER: &str = "autokernel-test-requirements.txt";

/// The folder of the workspace.
pub fn workspace() -> &'static Path {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    crates.and_then(Path::parent).unwrap_or(Path::new("."))
}

/// The tests' interpreter.
///
/// # Panics
/// When it can't be made, with the reason: a test without its Python has failed.
pub fn interpreter() -> Interpreter {
    prepare().unwrap_or_else(|error| panic!("no Python for the tests: {error:#}"))
}

/// The tests' interpreter, made when it is not there yet.
pub fn prepare() -> Result<Interpreter> {
    let base = base()?;
    if finished(&base.prefix) {
        return Ok(base);
    }
    let cache = cache()?;
    let dir = cache.join(name(&base));
    if !finished(&dir) {
        fs::create_dir_all(&cache)?;
        let lock = std::fs::File::create(cache.join("test-env.lock"))?;
        lock.lock()?;
        // Another process may have made it while this one waited.
        if !finished(&dir) {
            say(&format!("making {}", dir.display()));
            make(&base, &cache, &dir)?;
        }
    }
    probe(&dir).with_context(|| format!("{} does not work", dir.display()))
}

/// The Python with torch below the tests' own packages.
fn base() -> Result<Interpreter> {
    if let Some(path) = env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return probe(Path::new(&path)).with_context(|| format!("{VARIABLE} names {}", path.display()));
    }
    let dir = own_environment().context("no home folder to put an environment in")?;
    // It gets its name when it is complete; only making it needs the lock and the full check.
    match probe(&dir) {
        Ok(found) => Ok(found),
        Err(_) => Ok(make_environment(&dir, &mut |line| say(line))?),
    }
}

fn finished(prefix: &Path) -> bool {
    fs::read_to_string(prefix.join(MARKER)).is_ok_and(|text| text == REQUIREMENTS)
}

fn cache() -> Result<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    Ok(cache.context("no home folder to put an environment in")?.join("autokernel"))
}

/// Everything that the environment depends on is in its name.
fn name(base: &Interpreter) -> String {
    let mut text = REQUIREMENTS.to_owned();
    let _ = write!(text, "{}\n{}\n{}\n", base.path.display(), base.python, base.torch);
    format!("test-env-{}", &blake3::hash(text.as_bytes()).to_hex()[..16])
}

/// Builds beside the final place and renames: what stands under the final name is complete.
fn make(base: &Interpreter, cache: &Path, dir: &Path) -> Result<()> {
    let fresh = tempfile::Builder::new().prefix(".test-env-").tempdir_in(cache)?;
    let path = fresh.path();
    step(Command::new(&base.path).args(["-I", "-m", "venv"]).arg(path))?;
    see_packages_of(base, path)?;
    let list = path.join("requirements.txt");
    fs::write(&list, REQUIREMENTS)?;
    let mut pip = Command::new(path.join("bin/python"));
    pip.args(["-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-deps", "-r"])
        .arg(&list);
    for name in ["PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"] {
        pip.env_remove(name);
    }
    step(&mut pip)?;
    fs::rename(&list, path.join(MARKER))?;
    // The folder of a `TempDir` is for its owner; children of root run as somebody else.
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    fs::rename(path, dir)?;
    // Its name is gone; nothing is left to remove.
    drop(fresh.keep());
    Ok(())
}

/// Lets the new environment import what the base has.
fn see_packages_of(base: &Interpreter, fresh: &Path) -> Result<()> {
    let site = base.torch_lib.ancestors().nth(2).context("torch has no site folder")?;
    for entry in fs::read_dir(fresh.join("lib"))? {
        let own = entry?.path().join("site-packages");
        if own.is_dir() {
            let line = format!("import site; site.addsitedir({:?})\n", site.display().to_string());
            return Ok(fs::write(own.join("autokernel-base.pth"), line)?);
        }
    }
    bail!("{} has no site-packages", fresh.display())
}

fn step(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    bail!("{command:?} failed:\n{text}")
}

/// Past the test harness, which would keep it until the end: this can take minutes.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "test environment: {line}");
}
