//! Controls: can the check of a task tell wrong from right?
//!
//! The oracle derives wrong forms of the region from its graph (`python/autokernel/mutants.py`) and
//! computes their outputs on the task's own sets; the very predicate that candidates face decides
//! whether each is killed on at least one set. A task on which too many survive is refused: there an
//! accepted kernel would mean little.
//!
//! A mutant that is no other function (a mask that masks nothing here, an epsilon below every value)
//! can't be killed and must not count. It is called equivalent only if both hold on every set: its
//! fp64 form moves no output by more than half of what honest rounding does, so that it differs from
//! the truth by less than kernels that are right differ from each other; and its outputs in the
//! region's own types, where shortcuts show that are exact in theory, are as good as honest ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use autokernel_core::region::Region;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::JudgeError;
use crate::metrics::{Comparer, Metrics, displacement};
use crate::source::Tensor;
use crate::truth::{TensorFile, Truth, TruthError};

/// Share of the mutants that a task has to kill.
pub const LEAST_KILLED: f64 = 0.95;

/// Mutants of a task, at most. Small graphs have fewer.
const MOST: usize = 96;

/// New mutants are taken up for this long at most, once there are [`LEAST`]: a task of large tensors has to
/// make do with fewer.
const PATIENCE: Duration = Duration::from_secs(8);

/// Mutants that every task tries if it has them.
const LEAST: usize = 32;

/// Bytes of outputs that the oracle writes for one request.
const REQUEST_BYTES: u64 = 256 << 20;

/// An fp64 form that moves no further than this many honest errors is the same function.
const SAME: f64 = 0.5;

/// What honest outputs in the region's own types stay below, as a share of the limits.
const HONEST_SHARE: f64 = 0.25;

/// Survivors that are named.
const NAMED: usize = 12;

/// What the controls of a task came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Controls {
    /// Wrong forms whose outputs were judged.
    pub mutants: usize,
    /// Of these: rejected on at least one set.
    pub killed: usize,
    /// Of these: no other function on any set, and so not counted.
    pub equivalent: usize,
    /// The others: accepted on all sets although they are wrong; a dozen by name.
    pub survivors: Vec<String>,
    /// Families of inputs that were added to kill survivors of the usual ones.
    pub added: Vec<String>,
}

impl Controls {
    /// Share killed of those that count; 1 where none does.
    pub fn share(&self) -> f64 {
        let counted = self.mutants.saturating_sub(self.equivalent);
        if counted == 0 { 1.0 } else { self.killed as f64 / counted as f64 }
    }

    /// Whether enough are killed.
    pub fn fit(&self) -> bool {
        self.share() >= LEAST_KILLED
    }

    /// Refuses a task on whose inputs too many wrong forms pass.
    pub fn sufficient(self) -> Result<Self, JudgeError> {
        if self.fit() {
            return Ok(self);
        }
        let of = self.mutants - self.equivalent;
        Err(JudgeError::Blind { killed: self.killed, of, survivors: self.survivors })
    }
}

/// One mutant as the oracle names it.
#[derive(Clone, Debug, Deserialize)]
struct Mutant {
    name: String,
}

#[derive(Deserialize)]
struct Listed {
    mutants: Vec<Mutant>,
}

#[derive(Deserialize)]
struct Made {
    made: Vec<Outputs>,
}

#[derive(Deserialize)]
struct Outputs {
    mutant: usize,
    /// `None` where the change does not exist on these shapes.
    outputs: Option<Vec<TensorFile>>,
}

/// A question to the oracle: operation and body.
pub type Ask<'a, E> = &'a mut dyn FnMut(&'static str, Value) -> Result<Value, E>;

/// The examination of one task. It may go on with more sets for those that are still alive.
pub struct Examination<'a> {
    region: &'a Region,
    folder: PathBuf,
    seed: u64,
    mutants: Vec<Mutant>,
    fates: Vec<Fate>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Not run yet, or not at all for want of time.
    Unknown,
    /// There is no such form of this region.
    Unsuited,
    Killed,
    Equivalent,
    Alive,
}

impl<'a> Examination<'a> {
    /// Asks for the list of mutants. `folder` is for their outputs, and is emptied as they are read.
    pub fn begin<E: From<JudgeError>>(
        region: &'a Region,
        folder: &Path,
        seed: u64,
        ask: Ask<'_, E>,
    ) -> Result<Self, E> {
        let reply = ask("region_mutants", json!({ "region": region, "most": MOST, "seed": seed }))?;
        let mutants = understood::<Listed>(reply)?.mutants;
        let fates = vec![Fate::Unknown; mutants.len()];
        Ok(Self { region, folder: folder.to_owned(), seed, mutants, fates })
    }

    /// Runs what is not killed yet on every set of `truth`.
    pub fn run<E: From<JudgeError>>(&mut self, truth: &Truth, ask: Ask<'_, E>) -> Result<(), E> {
        let start = Instant::now();
        // Random sets first: the model's own activations are the kindest.
        let (own, random): (Vec<usize>, Vec<usize>) =
            (0..truth.all().len()).partition(|set| truth.all()[*set].family.starts_with("captured"));
        let sets: Vec<usize> = random.into_iter().chain(own).collect();
        let mut alive: BTreeMap<usize, Comparer<'_>> = (0..self.mutants.len())
            .filter(|i| matches!(self.fates[*i], Fate::Unknown | Fate::Alive | Fate::Equivalent))
            .map(|i| (i, Comparer::new(truth)))
            .collect();
        for set in &sets {
            let wanted: Vec<usize> = alive.keys().copied().collect();
            let mut tried = 0;
            for wanted in wanted.chunks(self.at_once()) {
                if set == &sets[0] && tried >= LEAST && start.elapsed() > PATIENCE {
                    alive.retain(|i, _| !wanted.contains(i));
                    continue;
                }
                tried += wanted.len();
                for Outputs { mutant, outputs } in self.outputs(truth, *set, wanted, false, ask)? {
                    let Some(comparer) = alive.get_mut(&mutant) else { continue };
                    let fate = match outputs {
                        None => Fate::Unsuited,
                        Some(files) if differs(comparer, *set, &files)? => Fate::Killed,
                        Some(_) => Fate::Alive,
                    };
                    self.fates[mutant] = fate;
                    if fate != Fate::Alive {
                        alive.remove(&mutant);
                    }
                }
            }
        }
        let honest: Vec<usize> =
            alive.into_iter().filter(|(_, comparer)| honest(comparer)).map(|(mutant, _)| mutant).collect();
        self.equivalents(truth, &sets, honest, ask)
    }

    /// Which of these are the same function on every set.
    fn equivalents<E: From<JudgeError>>(
        &mut self,
        truth: &Truth,
        sets: &[usize],
        mut same: Vec<usize>,
        ask: Ask<'_, E>,
    ) -> Result<(), E> {
        for set in sets {
            for wanted in same.clone().chunks(self.at_once()) {
                for Outputs { mutant, outputs } in self.outputs(truth, *set, wanted, true, ask)? {
                    let moved = match outputs {
                        None => true,
                        Some(files) => moves(truth, *set, &files)?,
                    };
                    if moved {
                        same.retain(|i| *i != mutant);
                    }
                }
            }
        }
        for mutant in same {
            self.fates[mutant] = Fate::Equivalent;
        }
        Ok(())
    }

    fn outputs<E: From<JudgeError>>(
        &self,
        truth: &Truth,
        set: usize,
        wanted: &[usize],
        wide: bool,
        ask: Ask<'_, E>,
    ) -> Result<Vec<Outputs>, E> {
        let sets = truth.all();
        let baseline = |set: usize| sets[set % sets.len()].outputs.iter().map(|o| &o.baseline);
        // With one set only there are no other outputs, and a stale one is the right one.
        let others: Vec<Vec<&TensorFile>> = [set + 1, set + 2].map(|set| baseline(set).collect()).into();
        let body = json!({
            "region": self.region, "most": MOST, "seed": self.seed, "wanted": wanted, "wide": wide,
            "inputs": sets[set].inputs, "others": others, "dir": self.folder,
        });
        let made = understood::<Made>(ask("mutant_outputs", body)?)?.made;
        if made.iter().map(|made| made.mutant).collect::<BTreeSet<_>>() != wanted.iter().copied().collect() {
            let reason = "other mutants were made than wanted".to_owned();
            return Err(JudgeError::Controls { reason }.into());
        }
        Ok(made)
    }

    /// Mutants of one request.
    fn at_once(&self) -> usize {
        let bytes: u64 = self.region.output_metas().iter().map(|meta| meta.bytes()).sum();
        (REQUEST_BYTES / bytes.max(1)).clamp(1, MOST as u64) as usize
    }

    /// What it came to so far.
    pub fn result(&self) -> Controls {
        let count = |fate| self.fates.iter().filter(|f| **f == fate).count();
        let alive = self.mutants.iter().zip(&self.fates).filter(|(_, fate)| **fate == Fate::Alive);
        Controls {
            mutants: count(Fate::Killed) + count(Fate::Equivalent) + count(Fate::Alive),
            killed: count(Fate::Killed),
            equivalent: count(Fate::Equivalent),
            survivors: alive.map(|(mutant, _)| mutant.name.clone()).take(NAMED).collect(),
            added: vec![],
        }
    }
}

fn understood<T: serde::de::DeserializeOwned>(reply: Value) -> Result<T, JudgeError> {
    serde_json::from_value(reply).map_err(|error| JudgeError::Controls { reason: error.to_string() })
}

/// Whether the judge rejects these outputs; they are deleted.
fn differs(comparer: &mut Comparer<'_>, set: usize, files: &[TensorFile]) -> Result<bool, JudgeError> {
    let mut rejected = false;
    for (output, file) in files.iter().enumerate() {
        if !rejected {
            let failed = |source| TruthError::Io { path: file.file.clone(), source };
            let source = File::open(&file.file).map_err(failed)?;
            let meta = file.meta();
            rejected =
                comparer.compare(set, output, Tensor { source: &source, meta: &meta })?.fault.is_some();
        }
        remove(file)?;
    }
    Ok(rejected)
}

/// Whether the fp64 form moves any output by more than honest kernels do; the files are deleted.
fn moves(truth: &Truth, set: usize, files: &[TensorFile]) -> Result<bool, JudgeError> {
    let mut moved = false;
    for (output, file) in truth.all()[set].outputs.iter().zip(files) {
        if !moved && let Some(Metrics { ratio, element, .. }) = displacement(output, file)? {
            moved = !(ratio <= SAME && element <= SAME);
        }
        remove(file)?;
    }
    Ok(moved)
}

fn remove(file: &TensorFile) -> Result<(), JudgeError> {
    std::fs::remove_file(&file.file)
        .map_err(|source| TruthError::Io { path: file.file.clone(), source }.into())
}

/// Whether the worst of what passed is what right kernels give, too.
fn honest(comparer: &Comparer<'_>) -> bool {
    let limits = &comparer.truth().contract().limits;
    comparer.worst().iter().zip(limits).all(|(worst, limits)| {
        limits.is_none_or(|limits| {
            worst.ratio <= (HONEST_SHARE * limits.ratio).max(1.5)
                && worst.element <= HONEST_SHARE * limits.element
        })
    })
}

#[cfg(test)]
mod tests;
