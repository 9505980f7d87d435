//! What a process is given to work on, call by call, over its whole life.
//!
//! No timed call meets inputs that its process has seen before: kept results are of no use, whether they
//! are found again by address, by content or by count. All of it follows from one secret seed, drawn
//! when everything that is compared has been built, so that evidence needs the seed to tell it again.
//!
//! The inputs of a region lie in *slots*, one a call, which stay where they are and get new content
//! before each batch: a set of the truth with an edit of its own ([`crate::edit`]) or, once in a life and
//! at a secret place, a set as it is, on which the right answer is known. Constant inputs are shared by
//! the slots of one *group* and change once, between two batches, since a kernel may prepare something
//! from them. They are those of the truth in most batches: a median is not moved by the others, should a
//! kernel know its model's weights by heart.
//!
//! A whole model draws its inputs itself. There a slot gets a fresh draw before each batch, and in a few
//! secret places one that the truth is known for.

use serde::{Deserialize, Serialize};

use crate::edit::word;
use crate::secret::Seed;

/// A set of the truth that is given as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The timed batch.
    pub batch: usize,
    /// The slot, counted as the process does: the first ones are for warming up.
    pub slot: usize,
    /// The set of the truth.
    pub set: usize,
}

/// When constant inputs change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// The first batch with the other ones.
    pub change: usize,
    /// Whether they are edited before that, or from then on.
    pub edited_first: bool,
}

/// The life of a process, the same for everyone in a round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Life {
    /// Everything below, the order of calls and all edits follow from it.
    pub seed: Seed,
    /// Slots that are not timed; for a region one of each group.
    pub warm: usize,
    /// Calls of a timed batch.
    pub calls: usize,
    /// Timed batches.
    pub batches: usize,
    /// For a region the set that each group's inputs are made of; empty for a whole model.
    pub sets: Vec<usize>,
    /// When constant inputs change; `None` where there are none.
    pub constants: Option<Constants>,
    /// Where a set of the truth is given as it is.
    pub truths: Vec<Place>,
}

impl Life {
    /// The life of a process that runs a region, before its calls are counted; `of` is the number of
    /// sets of the truth, `groups` how many of them are used.
    pub fn of_region(seed: Seed, of: usize, groups: usize, batches: usize, constants: bool) -> Self {
        let mut sets = seed.stream("sets").order(of);
        sets.truncate(groups.max(1));
        let mut stream = seed.stream("constants");
        // The edited ones are there in fewer than half of the batches.
        let edited = batches.saturating_sub(1) / 2;
        let edited_first = stream.below(2) == 0;
        let change = if edited_first { edited } else { batches - edited.min(batches) };
        let constants = (constants && edited > 0).then_some(Constants { change, edited_first });
        Self { seed, warm: sets.len(), calls: 0, batches, sets, constants, truths: vec![] }
    }

    /// The life of a process that runs a whole model, before its calls are counted.
    pub fn of_model(seed: Seed, warm: usize, batches: usize) -> Self {
        Self { seed, warm: warm.max(1), calls: 0, batches, sets: vec![], constants: None, truths: vec![] }
    }

    /// The same with so many calls a batch. `of` is the number of sets of the truth.
    #[must_use]
    pub fn with_calls(mut self, calls: usize, of: usize) -> Self {
        self.calls = calls.max(1);
        let mut stream = self.seed.stream("truths");
        // Only where constant inputs are those of the truth is its answer known.
        let fit: Vec<usize> = (0..self.batches).filter(|batch| !self.edited_constants(*batch)).collect();
        let batches: Vec<usize> = stream.order(fit.len()).into_iter().map(|i| fit[i]).collect();
        let order = stream.order(if self.sets.is_empty() { of } else { self.sets.len() });
        self.truths.clear();
        // A turn for each batch; then again, as long as a batch has room.
        for (index, chosen) in order.into_iter().enumerate() {
            let Some(batch) = batches.get(index % batches.len().max(1)).copied() else { break };
            if index / batches.len() >= self.calls {
                break;
            }
            let (set, slot) = if self.sets.is_empty() {
                let taken: Vec<usize> = self.truths_of(batch).map(|place| place.slot).collect();
                let free: Vec<usize> = self.timed_slots().filter(|slot| !taken.contains(slot)).collect();
                (chosen, free[stream.below(free.len())])
            } else {
                let groups = self.sets.len();
                let slots: Vec<usize> = self.timed_slots().filter(|slot| slot % groups == chosen).collect();
                (self.sets[chosen], slots[stream.below(slots.len())])
            };
            self.truths.push(Place { batch, slot, set });
        }
        self
    }

    /// Slots in all.
    pub fn slots(&self) -> usize {
        self.timed_slots().end
    }

    /// The slots that timed calls use: as many as calls, and for a region at least one of each group.
    fn timed_slots(&self) -> std::ops::Range<usize> {
        self.warm..self.warm + self.calls.max(self.sets.len())
    }

    /// The truth's sets that stand as they are in a batch.
    pub fn truths_of(&self, batch: usize) -> impl Iterator<Item = &Place> {
        self.truths.iter().filter(move |place| place.batch == batch)
    }

    /// The set that stands as it is in this slot of a batch.
    pub fn truth_at(&self, batch: usize, slot: usize) -> Option<usize> {
        self.truths_of(batch).find(|place| place.slot == slot).map(|place| place.set)
    }

    /// Whether constant inputs are edited in this batch.
    pub fn edited_constants(&self, batch: usize) -> bool {
        self.constants.is_some_and(|c| (batch < c.change) == c.edited_first)
    }

    /// The slots that the calls of a batch use, in order, each once.
    pub fn order(&self, batch: usize) -> Vec<usize> {
        let slots = self.timed_slots();
        let mut stream = self.seed.stream(&format!("order {batch}"));
        let mut order: Vec<usize> = stream.order(slots.len()).into_iter().map(|i| slots.start + i).collect();
        // Where there are more slots than calls, those with a known answer are among the called.
        for place in self.truths_of(batch) {
            let at = order.iter().position(|slot| *slot == place.slot).unwrap_or(0);
            if at >= self.calls {
                let other = (0..self.calls).find(|i| self.truth_at(batch, order[*i]).is_none());
                order.swap(at, other.unwrap_or(0));
            }
        }
        order.truncate(self.calls);
        order
    }

    /// The same calls in another order: positions in [`Self::order`].
    pub fn other_order(&self, batch: usize) -> Vec<usize> {
        self.seed.stream(&format!("again {batch}")).order(self.calls)
    }

    /// The key of the edit of one input in one slot; `None` for the warm-up.
    pub fn edit(&self, batch: Option<usize>, slot: usize, input: usize) -> u64 {
        let name = batch.map_or_else(|| "warm".to_owned(), |batch| format!("edit {batch}"));
        word(word(self.seed.stream(&name).next_u64(), slot as u64), input as u64)
    }

    /// The key of the edit of a constant input of one group.
    pub fn constant_edit(&self, group: usize, input: usize) -> u64 {
        word(word(self.seed.stream("edit constants").next_u64(), group as u64), input as u64)
    }

    /// How far the elements of an input are moved that holds no real numbers, of `numel`. Not the same
    /// twice in a life, unless there are fewer ways than calls.
    pub fn roll(&self, batch: Option<usize>, slot: usize, numel: u64) -> u64 {
        let ways = numel.saturating_sub(1).max(1);
        let each = self.slots().div_ceil(self.sets.len().max(1)) as u64;
        let group = slot % self.sets.len().max(1);
        let use_number =
            batch.map_or(0, |batch| 1 + batch as u64) * each + (slot / self.sets.len().max(1)) as u64;
        let start = word(self.seed.stream("roll").next_u64(), group as u64) % ways;
        if numel < 2 { 0 } else { 1 + (start + use_number % ways) % ways }
    }

    /// Seeds of a whole model's draws for the warm-up and for the slots of a batch. Below 2^62, which
    /// every generator takes.
    pub fn draw(&self, batch: Option<usize>, slot: usize) -> u64 {
        self.edit(batch, slot, 0) >> 2
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn region(calls: usize, groups: usize, batches: usize, constants: bool) -> Life {
        Life::of_region(Seed::from_os().unwrap(), 10, groups, batches, constants).with_calls(calls, 10)
    }

    #[test]
    fn a_life_follows_from_its_seed() {
        let life = region(60, 4, 5, true);
        let stored: Life = serde_json::from_str(&serde_json::to_string(&life).unwrap()).unwrap();
        assert_eq!(stored, life);
        assert_eq!(Life::of_region(life.seed, 10, 4, 5, true).with_calls(60, 10), life);
        assert_eq!(stored.order(3), life.order(3));
        assert_ne!(life.order(3), life.order(4));
        assert_ne!(life.other_order(3), region(60, 4, 5, true).other_order(3));
    }

    #[test]
    fn no_call_repeats_and_every_truth_is_called_once() {
        for (calls, groups, batches, constants) in [
            (1, 4, 5, true),
            (1, 4, 5, false),
            (3, 4, 5, true),
            (7, 2, 3, true),
            (60, 4, 5, false),
            (2, 1, 1, true),
        ] {
            for _ in 0..50 {
                let life = region(calls, groups, batches, constants);
                let mut keys = HashSet::new();
                for batch in 0..batches {
                    let order = life.order(batch);
                    assert_eq!(order.len(), calls);
                    assert_eq!(order.iter().collect::<HashSet<_>>().len(), calls, "a slot is called once");
                    for slot in order {
                        assert!((life.warm..life.slots()).contains(&slot));
                        assert!(keys.insert(life.edit(Some(batch), slot, 0)));
                    }
                    for place in life.truths_of(batch) {
                        assert!(life.order(batch).contains(&place.slot));
                        assert_eq!(life.sets[place.slot % groups], place.set, "constants are its group's");
                        assert!(!life.edited_constants(batch));
                    }
                }
                let sets: HashSet<usize> = life.truths.iter().map(|place| place.set).collect();
                assert_eq!(sets.len(), life.truths.len(), "a set is given as it is at most once");
                assert!(!life.truths.is_empty());
            }
        }
    }

    #[test]
    fn constants_change_once_and_are_mostly_the_truths() {
        let mut firsts = HashSet::new();
        for _ in 0..50 {
            let life = region(5, 4, 5, true);
            let edited: Vec<bool> = (0..5).map(|batch| life.edited_constants(batch)).collect();
            assert_eq!(edited.iter().filter(|e| **e).count(), 2);
            assert_eq!(edited.windows(2).filter(|w| w[0] != w[1]).count(), 1);
            firsts.insert(edited[0]);
        }
        assert_eq!(firsts.len(), 2, "nobody knows which come first");
        assert!((0..5).all(|batch| !region(5, 4, 5, false).edited_constants(batch)));
    }

    #[test]
    fn models_meet_each_known_draw_once() {
        for (calls, batches) in [(1, 16), (40, 16), (1, 2), (2, 1)] {
            let life = Life::of_model(Seed::from_os().unwrap(), 2, batches).with_calls(calls, 4);
            assert_eq!(life.truths.len(), 4.min(batches * calls));
            let places: HashSet<_> = life.truths.iter().map(|p| (p.batch, p.slot)).collect();
            assert_eq!(places.len(), life.truths.len());
            assert!(life.truths.iter().all(|p| life.order(p.batch).contains(&p.slot)));
            assert!(life.draw(Some(0), 2) < 1 << 62 && life.draw(Some(0), 2) != life.draw(Some(1), 2));
        }
    }

    #[test]
    fn rolls_differ_while_they_can() {
        let life = region(50, 4, 5, true);
        for group in 0..4 {
            let mut seen = HashSet::new();
            for batch in [None, Some(0), Some(1), Some(2), Some(3), Some(4)] {
                for slot in (0..life.slots()).filter(|slot| slot % 4 == group) {
                    let roll = life.roll(batch, slot, 4096);
                    assert!((1..4096).contains(&roll) && seen.insert(roll));
                }
            }
        }
        assert_eq!(life.roll(Some(0), 4, 1), 0);
    }
}
