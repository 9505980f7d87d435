//! What must become of every file of the corpus: `fixtures/corpus.toml`, typed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use autokernel_core::kernel_file::{KernelFile, Language};
use autokernel_core::verdict::Stage;
use serde::Deserialize;

/// The version of the manifest.
const SCHEMA: &str = "autokernel.corpus/1";

/// Rows of the catalogue of exploits, `E01` to `E64`.
pub const ROWS: u32 = 64;

/// `fixtures/corpus.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// `autokernel.corpus/1`.
    pub schema: String,
    /// Files of `fixtures/exploits`, by name without its ending; a name begins with its row.
    pub exploits: BTreeMap<String, Exploit>,
    /// Files of `fixtures/honest`, likewise without a row.
    pub honest: BTreeMap<String, Honest>,
    /// Rows that no kernel file can be, and why.
    pub absent: BTreeMap<String, String>,
}

/// How far the judge has to go before it can see that a file is wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Depth {
    /// Parse, build, admission and the checked batches.
    #[default]
    Checked,
    /// The timed batches of the screen.
    Screened,
    /// The comparison of the packaged operator with the best baseline.
    Verdict,
}

/// A file that must be turned away.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exploit {
    /// The model of `fixtures/tasks` that it claims to compute.
    pub task: String,
    /// The stages of which one must turn it away. `slower` files have none: the clock must see them.
    #[serde(default)]
    pub stages: Vec<Stage>,
    /// How far the judge has to go.
    #[serde(default)]
    pub depth: Depth,
    /// It is right, and a fake of speed: any verdict but `faster` turns it away.
    #[serde(default)]
    pub fake_speed: bool,
    /// Another language than C++: skipped aloud, until there is a judge for it.
    #[serde(default)]
    pub language: Option<Language>,
    /// The only architecture that it is written for; skipped aloud elsewhere.
    #[serde(default)]
    pub arch: Option<String>,
    /// What the judge lacks to catch it. Such a file is run and counted apart; it fails nothing.
    #[serde(default)]
    pub open: Option<String>,
}

/// A file that must pass.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Honest {
    /// The model of `fixtures/tasks` that it computes.
    pub task: String,
    /// What the judge wrongly holds against it. Such a file is run and counted apart; it fails nothing.
    #[serde(default)]
    pub open: Option<String>,
}

impl Manifest {
    /// Reads the manifest of a workspace.
    pub fn read(root: &Path) -> Result<Self> {
        let path = root.join("fixtures/corpus.toml");
        let manifest: Self = toml::from_str(&fs_err::read_to_string(&path)?)
            .with_context(|| format!("{} is not a manifest", path.display()))?;
        ensure!(manifest.schema == SCHEMA, "{} has schema {}", path.display(), manifest.schema);
        Ok(manifest)
    }

    /// Everything that does not fit: files without an entry, entries without a file, rows that nothing
    /// accounts for or that two things do, and models that are not there.
    pub fn faults(&self, root: &Path) -> Result<Vec<String>> {
        let mut faults = vec![];
        let exploits = self.exploits.iter().map(|(name, entry)| exploit_file(name, entry));
        compare(&root.join("fixtures/exploits"), exploits.collect(), &mut faults)?;
        let honest = self.honest.keys().map(|name| format!("{name}.cpp"));
        compare(&root.join("fixtures/honest"), honest.collect(), &mut faults)?;
        let mut rows: BTreeMap<String, bool> = self.absent.keys().map(|row| (row.clone(), false)).collect();
        for (name, exploit) in &self.exploits {
            let row = row_of(name);
            if rows.insert(row.clone(), true) == Some(false) && self.absent.contains_key(&row) {
                faults.push(format!("{row} is called absent, and `{name}` is there"));
            }
            let path = root.join("fixtures/exploits").join(exploit_file(name, exploit));
            if exploit.language.is_some() && path.is_file() {
                // Nothing runs it here; at least its header must be one.
                if let Err(error) = KernelFile::parse(&fs_err::read_to_string(path)?) {
                    faults.push(format!("`{name}`: {error}"));
                }
            }
            if exploit.stages.is_empty() != exploit.fake_speed {
                faults.push(format!("`{name}`: either stages, or fake_speed"));
            }
        }
        let wanted: BTreeSet<String> = (1..=ROWS).map(|row| format!("E{row:02}")).collect();
        faults.extend(
            wanted.iter().filter(|row| !rows.contains_key(*row)).map(|row| format!("{row} is missing")),
        );
        faults.extend(rows.keys().filter(|row| !wanted.contains(*row)).map(|row| format!("{row} is no row")));
        let tasks = self.exploits.values().map(|e| &e.task).chain(self.honest.values().map(|h| &h.task));
        for task in tasks.collect::<BTreeSet<_>>() {
            if !task_file(root, task).is_file() {
                faults.push(format!("there is no model `{task}`"));
            }
        }
        Ok(faults)
    }
}

/// The row of an exploit: what its name begins with.
pub fn row_of(name: &str) -> String {
    name.split('_').next().unwrap_or_default().to_uppercase()
}

/// The name of an exploit's file.
pub fn exploit_file(name: &str, exploit: &Exploit) -> String {
    format!("{name}.{}", exploit.language.unwrap_or(Language::Cpp).extension())
}

/// The model of a task.
pub fn task_file(root: &Path, task: &str) -> PathBuf {
    root.join("fixtures/tasks").join(format!("{task}.py"))
}

fn compare(folder: &Path, mut named: BTreeSet<String>, faults: &mut Vec<String>) -> Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !named.remove(&name) {
            faults.push(format!("{}/{name} is not in the manifest", folder.display()));
        }
    }
    faults.extend(named.into_iter().map(|name| format!("{}/{name} does not exist", folder.display())));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(text: &str) -> Manifest {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let root = autokernel_testbed::workspace();
        let mut good = Manifest::read(root).unwrap();
        assert_eq!(good.faults(root).unwrap(), Vec::<String>::new());
        good.absent.remove("E08");
        good.absent.insert("E65".into(), "no such row".into());
        good.honest.insert("not_there".into(), Honest { task: "nor_this".into(), open: None });
        let faults = good.faults(root).unwrap().join("\n");
        for part in ["E08 is missing", "E65 is no row", "not_there.cpp does not exist", "no model `nor_this`"]
        {
            assert!(faults.contains(part), "{part}\n{faults}");
        }
    }

    #[test]
    fn rows_come_from_names() {
        assert_eq!(row_of("e20_cache_below_the_stack"), "E20");
        let text = "schema = \"autokernel.corpus/1\"\n[exploits]\ne02_a = { task = \"t\", stages = [\"run\"], depth = \"screened\" }\n[honest]\n[absent]\n";
        let exploit = &manifest(text).exploits["e02_a"];
        assert_eq!((exploit.depth, exploit.stages.as_slice()), (Depth::Screened, &[Stage::Run][..]));
        assert_eq!(exploit_file("e02_a", exploit), "e02_a.cpp");
    }
}
