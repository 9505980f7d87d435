//! Waiting for a calm machine: a round that was measured beside somebody else's work is thrown away
//! as a whole and measured again, for as long as there is patience.
//!
//! Never single samples: which of a pair's samples to drop would be a choice that favours one side.

use std::time::{Duration, Instant};

use crate::lock::Contention;

/// How long a comparison waits for a calm machine, in all.
pub const PATIENCE: Duration = Duration::from_secs(45);

/// First and longest pause before a round is measured again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));

/// What is left of the time that may be spent on rounds that do not count.
pub struct Patience<'a> {
    left: Duration,
    pause: Duration,
    /// When the round that is being looked at began, at the latest.
    since: Instant,
    told: bool,
    say: &'a mut dyn FnMut(&str),
}

impl<'a> Patience<'a> {
    /// Waits up to `limit`; `say` gets a sentence when waiting begins and when it was in vain.
    pub fn new(limit: Duration, say: &'a mut dyn FnMut(&str)) -> Self {
        Self { left: limit, pause: PAUSES.0, since: Instant::now(), told: false, say }
    }

    /// Whether a round under this contention is to be thrown away and measured again. Pauses before
    /// it says so, without holding the machine.
    pub(crate) fn discards(&mut self, contention: Option<Contention>) -> bool {
        let spent = self.since.elapsed();
        self.since = Instant::now();
        let Some(contention) = contention.filter(Contention::unfit) else {
            self.pause = PAUSES.0;
            return false;
        };
        if self.left.is_zero() {
            return false;
        }
        if !std::mem::replace(&mut self.told, true) {
            let seconds = self.left.as_secs();
            (self.say)(&format!("the machine is busy ({contention}); waiting up to {seconds} s for it"));
        }
        let pause = self.pause.min(self.left);
        std::thread::sleep(pause);
        self.pause = (self.pause * 2).min(PAUSES.1);
        self.left = self.left.saturating_sub(spent + pause);
        self.since = Instant::now();
        if self.left.is_zero() {
            (self.say)("the machine stays busy; small differences can't be decided on it now");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: Contention = Contention { others: 0.5, ..Contention::CALM };

    #[test]
    fn patience_ends_and_says_so() {
        let mut said = vec![];
        let mut say = |what: &str| said.push(what.to_owned());
        let mut patience = Patience::new(Duration::from_millis(600), &mut say);
        assert!(!patience.discards(None) && !patience.discards(Some(Contention::CALM)));
        let start = Instant::now();
        let mut thrown = 0;
        while patience.discards(Some(BUSY)) {
            thrown += 1;
        }
        assert!(thrown >= 2, "{thrown}");
        assert!(start.elapsed() < Duration::from_secs(5));
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("50 %"), "{said:?}");
    }

    #[test]
    fn without_patience_nothing_is_thrown_away() {
        let mut say = |what: &str| panic!("{what}");
        assert!(!Patience::new(Duration::ZERO, &mut say).discards(Some(BUSY)));
    }
}
