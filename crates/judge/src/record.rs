//! What is kept of a verdict: the decision, the evidence, and a digest over both.
//!
//! The digest finds what a disk, a copy or an editor did to the text. It is no signature: who can
//! write a store can compute it, and a decision that does not follow from the evidence is found by
//! deciding again.

use serde::{Deserialize, Serialize};

use crate::decide::{Decided, EvidenceError, decide};
use crate::evidence::Evidence;

/// The schema string of a [`Record`].
pub const RECORD_SCHEMA: &str = "autokernel.verdict/1";

/// What the digest is made for: the same bytes elsewhere have another one.
const CONTEXT: &str = "autokernel 2026 digest of a verdict's record";

/// A decided comparison as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// `autokernel.verdict/1`.
    pub schema: String,
    /// What was decided from the evidence.
    pub decided: Decided,
    /// All that it rests on.
    pub evidence: Evidence,
    /// BLAKE3 over decision and evidence, in hexadecimal.
    pub digest: String,
}

/// A text that is no intact record.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RecordError {
    #[error("this is no stored verdict: {0}")]
    Text(#[source] serde_json::Error),
    #[error("the schema is `{0}`, expected `{RECORD_SCHEMA}`: another version wrote it")]
    Schema(String),
    #[error("the stored verdict ends too early, at line {line}, column {column}")]
    Truncated { line: usize, column: usize },
    #[error("the stored verdict was changed: its digest is {found}, it was stored with {stored}")]
    Digest { stored: String, found: String },
}

impl Record {
    /// Decides and seals.
    pub fn new(evidence: Evidence) -> Result<Self, EvidenceError> {
        let decided = decide(&evidence)?;
        let digest = digest(&decided, &evidence);
        Ok(Self { schema: RECORD_SCHEMA.to_owned(), decided, evidence, digest })
    }

    /// Reads a stored record and checks that nothing of it was changed.
    pub fn parse(text: &[u8]) -> Result<Self, RecordError> {
        #[derive(Deserialize)]
        struct Head {
            schema: String,
        }
        let unreadable = |error: serde_json::Error| {
            let lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
            let end = error.line() == lines.len() && error.column() >= lines[lines.len() - 1].len();
            // A number cut in two is no end of file to the parser.
            let at_end = error.is_syntax() && end;
            if error.is_eof() || at_end {
                RecordError::Truncated { line: error.line(), column: error.column() }
            } else {
                RecordError::Text(error)
            }
        };
        // The version first: another one may well have other fields.
        let head: Head = serde_json::from_slice(text).map_err(unreadable)?;
        if head.schema != RECORD_SCHEMA {
            return Err(RecordError::Schema(head.schema));
        }
        let record: Self = serde_json::from_slice(text).map_err(unreadable)?;
        let found = digest(&record.decided, &record.evidence);
        if found == record.digest {
            Ok(record)
        } else {
            Err(RecordError::Digest { stored: record.digest, found })
        }
    }

    /// The text to store.
    pub fn print(&self) -> String {
        // Strings, numbers and maps with text keys: nothing that JSON can refuse.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Decides again from the evidence alone.
    pub fn replay(&self) -> Result<Decided, EvidenceError> {
        decide(&self.evidence)
    }
}

fn digest(decided: &Decided, evidence: &Evidence) -> String {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    // Writing into a hasher can't fail; field order is that of the declarations.
    let _ = serde_json::to_writer(&mut hasher, &(decided, evidence));
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::decide::tests::{any_evidence, evidence};

    fn record() -> Record {
        Record::new(evidence(10, 1.2)).unwrap()
    }

    #[test]
    fn a_record_is_read_as_it_was_stored() {
        let record = record();
        let again = Record::parse(record.print().as_bytes()).unwrap();
        assert_eq!(again, record);
        assert_eq!(again.replay().unwrap(), record.decided);
        // Another layout of the same document is the same document.
        let pretty = serde_json::to_string_pretty(&record).unwrap();
        assert_eq!(Record::parse(pretty.as_bytes()).unwrap(), record);
    }

    #[test]
    fn a_changed_record_is_refused() {
        let text = record().print();
        for (from, to) in [("\"faster\"", "\"slower\""), ("\"calls\":50", "\"calls\":51"), ("100.", "101.")] {
            assert!(text.contains(from), "{from}");
            let changed = text.replacen(from, to, 1);
            assert!(
                matches!(Record::parse(changed.as_bytes()), Err(RecordError::Digest { .. })),
                "{from} to {to}"
            );
        }
        let added = text.replacen("\"decided\"", "\"note\":1,\"decided\"", 1);
        assert!(matches!(Record::parse(added.as_bytes()), Err(RecordError::Text(_))));
        let other = text.replacen(RECORD_SCHEMA, "autokernel.verdict/9", 1);
        assert!(matches!(Record::parse(other.as_bytes()), Err(RecordError::Schema(_))));
    }

    #[test]
    fn every_beginning_of_a_record_is_refused() {
        let text = record().print();
        for end in (0..text.len()).step_by(97).chain([text.len() - 1]) {
            assert!(matches!(Record::parse(&text.as_bytes()[..end]), Err(RecordError::Truncated { .. })));
        }
    }

    #[test]
    fn a_decision_that_does_not_follow_is_found() {
        let mut forged = record();
        forged.decided.pairs = 32;
        forged.digest = digest(&forged.decided, &forged.evidence);
        let read = Record::parse(forged.print().as_bytes()).unwrap();
        assert_ne!(read.replay().unwrap(), read.decided);
    }

    proptest! {
        #[test]
        fn what_was_decided_is_decided_again(evidence in any_evidence()) {
            if let Ok(record) = Record::new(evidence) {
                let again = Record::parse(record.print().as_bytes()).unwrap();
                prop_assert_eq!(again.replay().unwrap(), record.decided);
            }
        }

        #[test]
        fn damaged_text_is_an_error_and_never_a_panic(
            evidence in any_evidence(),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        ) {
            if let Ok(record) = Record::new(evidence) {
                let mut bytes = record.print().into_bytes();
                for (at, byte) in &damage {
                    let at = at.index(bytes.len());
                    bytes[at] = *byte;
                }
                // Damage may hit the same bytes again or a number's last, insignificant digit.
                if let Ok(read) = Record::parse(&bytes) {
                    prop_assert_eq!(read, record);
                }
            }
        }

        #[test]
        fn evidence_of_any_kind_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Record::parse(&bytes);
        }
    }
}
