//! The house rules that a compiler does not check. Each has its reason in CONTRIBUTING.md.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Longest file; beyond it a module has more than one subject.
const MOST_LINES: usize = 600;

/// Which crates of ours each crate may name.
const EDGES: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("search", &["core"]),
    ("store", &[]),
    ("worker", &["core"]),
    ("judge", &["core", "worker"]),
    ("agent", &["core"]),
    ("engine", &["core", "search", "store", "worker", "judge", "agent"]),
    ("cli", &["core", "store", "engine", "worker", "agent"]),
    ("testbed", &["core", "search", "worker"]),
    ("corpus", &["core", "engine", "worker", "testbed"]),
    ("fuzz", &["core", "worker", "judge"]),
];

/// Names of layers and models: a search agent that knows one is a list of patterns, not a compiler.
const LAYERS: &[&str] = &[
    "rmsnorm",
    "rms_norm",
    "layernorm",
    "swiglu",
    "geglu",
    "llama",
    "gpt",
    "bert",
    "resnet",
    "rotary",
    "rope",
];

/// The folder of the workspace.
pub(crate) fn root() -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(manifest.parent().context("xtask stands in the workspace")?.to_owned())
}

/// Checks every rule; the error lists all that is broken.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut broken = vec![];
    let files = sources(root)?;
    for (path, text) in &files {
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        check_file(&name, text, &mut broken);
    }
    check_edges(root, &mut broken)?;
    if broken.is_empty() {
        Ok(())
    } else {
        bail!("{} house rules are broken:\n{}", broken.len(), broken.join("\n"))
    }
}

fn check_file(name: &str, text: &str, broken: &mut Vec<String>) {
    let is = |ending: &str| Path::new(name).extension().is_some_and(|found| found == ending);
    let lines = text.lines().count();
    if lines > MOST_LINES {
        broken.push(format!("{name}: {lines} lines, at most {MOST_LINES}; split it by subject"));
    }
    if is("rs") && !text.trim_start().starts_with("//!") {
        broken.push(format!("{name}: begins without `//!` that says what it is for"));
    }
    if is("py") && !text.trim_start().starts_with("\"\"\"") && !text.trim().is_empty() {
        broken.push(format!("{name}: begins without a docstring that says what it is for"));
    }
    let unsafe_word = ["unsafe", " {"].concat();
    if is("rs") && text.contains(&unsafe_word) && !name.starts_with("crates/worker/") {
        broken.push(format!("{name}: unsafe code outside crates/worker"));
    }
    if name.starts_with("crates/search/src") {
        let lower = text.to_lowercase();
        // An operator of ATen is no layer of somebody's model.
        let lower = lower.replace("native_layer_norm", "").replace("aten.layer_norm", "");
        for layer in LAYERS {
            if lower.match_indices(layer).any(|(at, _)| is_word(&lower, at, layer.len())) {
                broken.push(format!("{name}: names the layer or model `{layer}`"));
            }
        }
    }
}

fn is_word(text: &str, at: usize, length: usize) -> bool {
    let letter = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    !letter(text[..at].chars().next_back()) && !letter(text[at + length..].chars().next())
}

fn check_edges(root: &Path, broken: &mut Vec<String>) -> Result<()> {
    let allowed: BTreeMap<&str, &[&str]> = EDGES.iter().copied().collect();
    for entry in fs::read_dir(root.join("crates"))? {
        let folder = entry?.path();
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let Some(allowed) = allowed.get(name.as_str()) else {
            broken.push(format!("crates/{name}: not in the table of edges of xtask/src/tidy.rs"));
            continue;
        };
        let manifest: toml::Table = toml::from_str(&fs::read_to_string(folder.join("Cargo.toml"))?)?;
        let Some(dependencies) = manifest.get("dependencies").and_then(|table| table.as_table()) else {
            continue;
        };
        for dependency in dependencies.keys().filter_map(|key| key.strip_prefix("autokernel-")) {
            if !allowed.contains(&dependency) {
                broken.push(format!("crates/{name}: may not depend on `{dependency}`"));
            }
        }
    }
    Ok(())
}

fn sources(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut found = vec![];
    let mut folders: Vec<PathBuf> =
        ["crates", "xtask", "python", "examples", "fixtures"].iter().map(|name| root.join(name)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("failed to read {}", folder.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                if path.file_name().is_none_or(|name| name != "target" && name != "__pycache__") {
                    folders.push(path);
                }
            } else if path
                .extension()
                .is_some_and(|ext| ["rs", "py", "h", "cpp"].iter().any(|known| ext == *known))
            {
                let text = fs::read_to_string(&path)?;
                found.push((path, text));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_house_is_tidy() {
        let root = super::root().unwrap();
        if let Err(error) = super::run(&root) {
            panic!("{error}");
        }
    }

    #[test]
    fn each_rule_finds_what_it_is_for() {
        let broken_by = |name: &str, text: &str| {
            let mut broken = vec![];
            super::check_file(name, text, &mut broken);
            broken.len()
        };
        assert_eq!(broken_by("crates/core/src/a.rs", "//! Docs."), 0);
        assert_eq!(broken_by("crates/core/src/a.rs", "fn f() {}"), 1);
        assert_eq!(broken_by("crates/core/src/a.rs", &format!("//! Docs.\n{}", "\n".repeat(700))), 1);
        assert_eq!(
            broken_by("crates/core/src/a.rs", &["//! Docs.\nfn f() { unsafe", " { g() } }"].concat()),
            1
        );
        assert_eq!(broken_by("crates/search/src/a.rs", "//! The swiglu case."), 1);
        assert_eq!(
            broken_by("crates/search/src/a.rs", "//! Scope, properties of `aten.native_layer_norm`."),
            0
        );
        assert_eq!(broken_by("python/autokernel/a.py", "import torch"), 1);
    }
}
