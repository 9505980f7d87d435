//! The measured search over kernel files and their parameters, as a pure state machine.
//!
//! It asks for one point at a time and is told a time or a failure: guesses for every file, then the
//! files that are clearly behind are dropped, then moves around the best point until none helps, then
//! the leaders once more, since a screen is noisy. It does no I/O and reads no clock.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;

use autokernel_core::kernel_file::{KernelFile, Params};

/// A point to be screened.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trial {
    /// Index of the kernel file.
    pub file: usize,
    /// A value for each of its parameters.
    pub params: Params,
}

/// What screening a point gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// Microseconds of one call.
    Time(f64),
    /// It did not build, run or compute the right thing.
    Failed,
}

/// Points in all, unless told otherwise.
const LIMIT: usize = 32;
/// Guesses for one file.
const GUESSES: usize = 6;
/// A file this far behind after its guesses is dropped.
const BEHIND: f64 = 1.3;
/// What a move must win to be followed.
const STEP: f64 = 0.99;
/// Leaders that are measured again, and how often.
const LEADERS: usize = 3;
const AGAIN: usize = 2;
/// Lines of [`Search::surface`].
const LINES: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Guesses,
    Moves,
    Again,
    Done,
}

/// The search; see the module's text.
#[derive(Debug)]
pub struct Search {
    files: Vec<KernelFile>,
    queue: VecDeque<Trial>,
    results: BTreeMap<Trial, Vec<f64>>,
    phase: Phase,
    /// The point that the current moves start from, and its time then.
    around: Option<(Trial, f64)>,
    left: usize,
    failed: usize,
}

impl Search {
    /// A search over kernel files, best guess first.
    pub fn new(files: Vec<KernelFile>) -> Self {
        Self::with_limit(files, LIMIT)
    }

    /// A search that asks for at most `limit` measurements.
    pub fn with_limit(files: Vec<KernelFile>, limit: usize) -> Self {
        let mut queue = VecDeque::new();
        let guesses: Vec<Vec<Trial>> =
            files.iter().enumerate().map(|(number, file)| guesses(number, file)).collect();
        // Round by round, so that a small limit still sees every file.
        for round in 0..GUESSES {
            queue.extend(guesses.iter().filter_map(|list| list.get(round).cloned()));
        }
        Self {
            files,
            queue,
            results: BTreeMap::new(),
            phase: Phase::Guesses,
            around: None,
            left: limit,
            failed: 0,
        }
    }

    /// The kernel files, in the order of [`Trial::file`].
    pub fn files(&self) -> &[KernelFile] {
        &self.files
    }

    /// The next point to screen, or `None` at the end.
    #[expect(clippy::should_implement_trait, reason = "what comes next depends on what is reported between")]
    pub fn next(&mut self) -> Option<Trial> {
        loop {
            if self.left == 0 || self.phase == Phase::Done {
                return None;
            }
            while let Some(trial) = self.queue.pop_front() {
                let again = self.phase == Phase::Again;
                if again || !self.results.contains_key(&trial) {
                    self.left -= 1;
                    return Some(trial);
                }
            }
            self.advance();
        }
    }

    /// What came of a point.
    pub fn report(&mut self, trial: Trial, outcome: Outcome) {
        let times = self.results.entry(trial).or_default();
        match outcome {
            Outcome::Time(us) if us.is_finite() => times.push(us),
            _ => self.failed += 1,
        }
    }

    /// The fastest point so far. Noise only adds to a time, so a point counts by its smallest.
    pub fn best(&self) -> Option<(&Trial, f64)> {
        self.ranking().into_iter().next()
    }

    fn ranking(&self) -> Vec<(&Trial, f64)> {
        let mut ranking: Vec<(&Trial, f64)> =
            self.results.iter().filter_map(|(trial, times)| Some((trial, smallest(times)?))).collect();
        ranking.sort_by(|a, b| a.1.total_cmp(&b.1));
        ranking
    }

    fn advance(&mut self) {
        let Some((best, time)) = self.best().map(|(trial, time)| (trial.clone(), time)) else {
            self.phase = Phase::Done;
            return;
        };
        match self.phase {
            Phase::Guesses => {
                self.phase = Phase::Moves;
                let rivals: Vec<Trial> = self.leaders_of_files(time * BEHIND);
                for rival in rivals.into_iter().rev() {
                    self.queue.extend(moves(&rival, &self.files));
                }
                self.around = Some((best, time));
            }
            Phase::Moves => {
                let improved = self.around.as_ref().is_none_or(|(_, before)| time < before * STEP);
                if improved {
                    let from = self.around.take().map(|(trial, _)| trial);
                    self.queue.extend(self.combined(&best, from.as_ref()));
                    self.queue.extend(moves(&best, &self.files));
                    self.around = Some((best, time));
                } else {
                    self.phase = Phase::Again;
                    let leaders: Vec<Trial> =
                        self.ranking().into_iter().take(LEADERS).map(|(trial, _)| trial.clone()).collect();
                    for _ in 0..AGAIN {
                        self.queue.extend(leaders.iter().cloned());
                    }
                }
            }
            Phase::Again | Phase::Done => self.phase = Phase::Done,
        }
    }

    /// The best point of each file that is not too far behind, the leader last.
    fn leaders_of_files(&self, limit: f64) -> Vec<Trial> {
        let mut leaders: Vec<Trial> = vec![];
        for (trial, time) in self.ranking() {
            if time <= limit && leaders.iter().all(|leader| leader.file != trial.file) {
                leaders.push(trial.clone());
            }
        }
        leaders.reverse();
        leaders
    }

    /// All single moves from `from` that helped, made at once: they rarely depend on each other.
    fn combined(&self, best: &Trial, from: Option<&Trial>) -> Option<Trial> {
        let from = from?;
        let start = smallest(self.results.get(from)?)?;
        if from.file != best.file {
            return None;
        }
        let mut combined = best.clone();
        for (name, values) in &self.files.get(best.file)?.params {
            let at = |value: i64| {
                let mut moved = from.clone();
                moved.params.insert(name.clone(), value);
                smallest(self.results.get(&moved)?)
                    .filter(|time| *time < start * STEP)
                    .map(|time| (time, value))
            };
            let chosen = values.iter().filter_map(|value| at(*value)).min_by(|a, b| a.0.total_cmp(&b.0));
            if let Some((_, value)) = chosen {
                combined.params.insert(name.clone(), value);
            }
        }
        Some(combined)
    }

    /// What was learned, in at most ten lines.
    pub fn surface(&self) -> String {
        let mut lines = vec![];
        let space: u64 = self.files.iter().map(KernelFile::space).fold(0, u64::saturating_add);
        lines.push(format!("tried {} of {space} points, {} failed", self.results.len(), self.failed));
        if let Some((best, time)) = self.best() {
            let note = self.files.get(best.file).map_or("", |file| file.note.as_str());
            lines.push(format!("best {time:.1} us: {} ({note})", text(&best.params)));
            for (number, file) in self.files.iter().enumerate().filter(|(number, _)| *number != best.file) {
                let other = self.ranking().into_iter().find(|(trial, _)| trial.file == number);
                lines.push(match other {
                    Some((_, time)) => format!("{time:.1} us: {}", file.note),
                    None => format!("failed: {}", file.note),
                });
            }
            for name in best.params.keys() {
                lines.push(self.effect(best, name));
            }
        }
        lines.truncate(LINES);
        lines.join("\n")
    }

    /// Best time at each value of one parameter, everything else free.
    fn effect(&self, best: &Trial, name: &str) -> String {
        let mut times: BTreeMap<i64, f64> = BTreeMap::new();
        for (trial, time) in self.ranking() {
            if let Some(value) = trial.params.get(name)
                && trial.file == best.file
            {
                times.entry(*value).or_insert(time);
            }
        }
        let mut line = format!("{name}:");
        for (value, time) in times {
            let _ = write!(line, " {value} → {time:.1} us,");
        }
        line.trim_end_matches(',').to_owned()
    }
}

fn smallest(times: &[f64]) -> Option<f64> {
    times.iter().copied().min_by(f64::total_cmp)
}

fn text(params: &Params) -> String {
    params.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

/// The first guess, then the same with each parameter at its second value.
fn guesses(number: usize, file: &KernelFile) -> Vec<Trial> {
    let start = Trial { file: number, params: file.default_params() };
    let mut guesses = vec![start.clone()];
    for (name, values) in &file.params {
        if let Some(second) = values.get(1) {
            let mut guess = start.clone();
            guess.params.insert(name.clone(), *second);
            guesses.push(guess);
        }
    }
    guesses.truncate(GUESSES);
    guesses
}

/// Every point that differs from `trial` in one parameter.
fn moves(trial: &Trial, files: &[KernelFile]) -> Vec<Trial> {
    let mut moves = vec![];
    for (name, values) in files.get(trial.file).map(|file| &file.params).into_iter().flatten() {
        for value in values.iter().filter(|value| trial.params.get(name) != Some(value)) {
            let mut moved = trial.clone();
            moved.params.insert(name.clone(), *value);
            moves.push(moved);
        }
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(note: &str) -> KernelFile {
        let text = format!(
            "/*@ autokernel 1\nlanguage = \"c++\"\nnote = \"{note}\"\n[params]\nA = [1, 2, 4, 8]\nB = [0, 1]\nC = [3, 5, 7]\n\
             [[launch]]\nentry = \"region\"\nargs = [\"in0\", \"out0\", \"threads\"]\n@*/\n\
             extern \"C\" void region(const float*, float*, long) {{}}\n"
        );
        KernelFile::parse(&text).unwrap()
    }

    fn time(trial: &Trial) -> f64 {
        let at = |name: &str| trial.params[name] as f64;
        let bowl = (at("A") - 4.0).abs() + 3.0 * (1.0 - at("B")) + (at("C") - 7.0).abs();
        100.0 + 5.0 * bowl + 60.0 * trial.file as f64
    }

    #[test]
    fn finds_the_optimum_and_drops_the_slow_file() {
        let mut search = Search::new(vec![file("quick"), file("slow")]);
        let mut asked = vec![];
        while let Some(trial) = search.next() {
            let outcome = Outcome::Time(time(&trial));
            asked.push(trial.clone());
            search.report(trial, outcome);
        }
        let (best, us) = search.best().unwrap();
        assert_eq!((best.file, best.params["A"], best.params["B"], best.params["C"]), (0, 4, 1, 7));
        assert!((us - 100.0).abs() < 1e-9);
        assert!(asked.iter().filter(|trial| trial.file == 1).count() <= GUESSES);
        assert!(asked.len() <= LIMIT);
        assert!(search.surface().lines().count() <= LINES);
    }

    #[test]
    fn ends_when_everything_fails_and_when_the_limit_is_reached() {
        let mut search = Search::with_limit(vec![file("broken")], 30);
        let mut count = 0;
        while let Some(trial) = search.next() {
            search.report(trial, Outcome::Failed);
            count += 1;
        }
        assert!(count <= GUESSES && search.best().is_none());
        let mut search = Search::with_limit(vec![file("a"), file("b"), file("c")], 5);
        assert_eq!(std::iter::from_fn(|| search.next()).count(), 5);
    }
}
