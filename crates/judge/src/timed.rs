//! Checking what timed calls gave, while their process stands still.
//!
//! A region's calls are all held against those of a fresh process on the same bytes, and against the
//! truth where a set of it stands unedited. A model's are held against the truth where it is known.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use autokernel_core::graph::TensorMeta;
use autokernel_core::verdict::Stage;

use crate::content::Content;
use crate::error::JudgeError;
use crate::evidence::Failure;
use crate::life::Life;
use crate::metrics::{Comparer, Digest, digest};
use crate::rerun::Again;
use crate::round::{Child, RemoteTensor, RoundStop};
use crate::source::{Logical, Source, Tensor};
use crate::truth::{CHUNK, Truth, TruthError};

/// What is known of one contestant across rounds.
pub(crate) struct Record<'a> {
    pub(crate) comparer: Comparer<'a>,
    /// Hashes of outputs that were verified in full, by set.
    verified: HashMap<usize, Vec<Digest>>,
}

impl<'a> Record<'a> {
    pub(crate) fn new(truth: &'a Truth) -> Self {
        Self { comparer: Comparer::new(truth), verified: HashMap::new() }
    }
}

/// A timed batch whose outputs lie in a frozen process.
pub(crate) struct Timed<'t> {
    pub(crate) child: &'t dyn Child,
    /// Which contestant it is, for blame.
    pub(crate) index: usize,
    pub(crate) name: &'t str,
    pub(crate) life: &'t Life,
    pub(crate) batch: usize,
    /// By call and output.
    pub(crate) outputs: &'t [Vec<RemoteTensor>],
}

/// The memory of a frozen child from an address on.
struct Remote<'a> {
    child: &'a dyn Child,
    tensor: &'a RemoteTensor,
}

impl Source for Remote<'_> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.tensor.bytes);
        let address = self.tensor.address.checked_add(offset).filter(|_| end.is_some());
        self.child.read(address.ok_or(io::ErrorKind::UnexpectedEof)?, buf)
    }
}

impl Timed<'_> {
    pub(crate) fn out(&self, stage: Stage, reason: String) -> RoundStop {
        RoundStop::Out {
            index: self.index,
            failure: Failure { contestant: self.name.to_owned(), stage, reason },
        }
    }

    /// Checks a region's batch: every call against one in a fresh process (where equal inputs must give
    /// equal bits), and those on sets of the truth against it. Returns the hash of all outputs in the
    /// order of the calls.
    pub(crate) fn check_all(
        &self,
        content: &Content<'_>,
        again: &mut Again<'_>,
        record: &mut Record<'_>,
        timeout: Duration,
    ) -> Result<Digest, RoundStop> {
        self.check_shapes(record.comparer.truth(), |_| Some(0))?;
        // First what tells most.
        self.check_known(record)?;
        if !record.comparer.truth().contract().deterministic {
            return self.hash();
        }
        if let Err(error) = again.run(content, self.life, self.batch, timeout)? {
            let reason = format!("in a fresh process on the inputs of a timed batch: {error}");
            return Err(self.out(Stage::Timed, reason));
        }
        let (mut hasher, mut ours, mut theirs) = (blake3::Hasher::new(), vec![], vec![]);
        for (call, outputs) in self.outputs.iter().enumerate() {
            for (output, tensor) in outputs.iter().enumerate() {
                let meta = tensor.meta();
                let remote = Remote { child: self.child, tensor };
                let (source, expected) = again.output(call, output);
                let unreadable = |e| self.unreadable(output, &e);
                let mine = Logical::new(Tensor { source: &remote, meta: &meta }).map_err(unreadable)?;
                let wanted = Logical::new(Tensor { source: &source, meta: expected }).map_err(share)?;
                let mut start = 0;
                while start < meta.numel() {
                    let count = CHUNK.min(meta.numel() - start) as usize;
                    mine.read(start, count, &mut ours).map_err(unreadable)?;
                    wanted.read(start, count, &mut theirs).map_err(share)?;
                    if ours != theirs {
                        return Err(self.differs(output, start, &ours, &theirs, &meta));
                    }
                    hasher.update(&ours);
                    start += count as u64;
                }
            }
        }
        Ok(*hasher.finalize().as_bytes())
    }

    /// Checks a model's batch on those of its draws that the truth is known for, and returns the hash of
    /// all outputs.
    pub(crate) fn check_draws(&self, record: &mut Record<'_>) -> Result<Digest, RoundStop> {
        let order = self.life.order(self.batch);
        self.check_shapes(record.comparer.truth(), |call| self.life.truth_at(self.batch, order[call]))?;
        self.check_known(record)?;
        self.hash()
    }

    fn unreadable(&self, output: usize, error: &io::Error) -> RoundStop {
        self.out(Stage::Timed, format!("output {output} can't be read: {error}"))
    }

    fn differs(&self, output: usize, start: u64, ours: &[u8], theirs: &[u8], meta: &TensorMeta) -> RoundStop {
        let size = meta.dtype.size() as usize;
        let pairs = ours.chunks(size).zip(theirs.chunks(size));
        let element = start + pairs.enumerate().find(|(_, (a, b))| a != b).map_or(0, |(i, _)| i as u64);
        let place = crate::fault::Place::of(element, &meta.shape);
        let reason = format!(
            "output {output}: a timed call's outputs are not what the same kernel computes from the same inputs \
             in a fresh process; first difference in rows {}..{} of {}, columns {}..{} of {}",
            place.rows.0, place.rows.1, place.of_rows, place.columns.0, place.columns.1, place.of_columns
        );
        self.out(Stage::Timed, reason)
    }

    /// The reply is the child's word: sizes are compared before anything is allocated for them. `set_of`
    /// names the set that a call's outputs are like; those of other draws of a model may differ.
    fn check_shapes(&self, truth: &Truth, set_of: impl Fn(usize) -> Option<usize>) -> Result<(), RoundStop> {
        let count = truth.contract().limits.len();
        if self.outputs.len() != self.life.calls || self.outputs.iter().any(|call| call.len() != count) {
            let reason = "the batch did not return every output of every call".to_owned();
            return Err(self.out(Stage::Timed, reason));
        }
        for (call, outputs) in self.outputs.iter().enumerate() {
            let expected = set_of(call).map(|set| &truth.sets()[set].outputs);
            for (output, tensor) in outputs.iter().enumerate() {
                let meta = tensor.meta();
                let same = expected
                    .map(|outputs| &outputs[output].meta)
                    .is_none_or(|wanted| meta.dtype == wanted.dtype && meta.shape == wanted.shape);
                if !same || meta.stride.len() != meta.shape.len() || !fits(&meta, tensor.bytes) {
                    let reason = format!("output {output} has another element type, shape or layout");
                    return Err(self.out(Stage::Timed, reason));
                }
            }
        }
        Ok(())
    }

    /// Compares the calls on sets of the truth with it.
    fn check_known(&self, record: &mut Record<'_>) -> Result<(), RoundStop> {
        let order = self.life.order(self.batch);
        for place in self.life.truths_of(self.batch) {
            let Some(call) = order.iter().position(|slot| *slot == place.slot) else { continue };
            self.compare(place.set, &self.outputs[call], record)?;
        }
        Ok(())
    }

    fn compare(
        &self,
        set: usize,
        outputs: &[RemoteTensor],
        record: &mut Record<'_>,
    ) -> Result<(), RoundStop> {
        let deterministic = record.comparer.truth().contract().deterministic;
        let known = record.verified.get(&set);
        let mut digests = Vec::with_capacity(outputs.len());
        for (output, tensor) in outputs.iter().enumerate() {
            let (source, meta) = (Remote { child: self.child, tensor }, tensor.meta());
            let candidate = Tensor { source: &source, meta: &meta };
            let known = known.map(|digests| digests[output]);
            if known.is_some() && digest(candidate).ok() == known {
                digests.extend(known);
                continue;
            }
            let comparison = match record.comparer.compare(set, output, candidate) {
                Err(TruthError::Candidate(e)) => return Err(self.unreadable(output, &e)),
                other => other?,
            };
            if let Some(fault) = comparison.fault {
                return Err(self.out(Stage::Timed, fault.to_string()));
            }
            if deterministic && known.is_some() {
                let reason = format!("output {output}: equal inputs gave unequal bits");
                return Err(self.out(Stage::Determinism, reason));
            }
            digests.push(comparison.digest);
        }
        record.verified.insert(set, digests);
        Ok(())
    }

    fn hash(&self) -> Result<Digest, RoundStop> {
        let (mut hasher, mut bytes) = (blake3::Hasher::new(), vec![]);
        for (output, tensor) in self.outputs.iter().flat_map(|call| call.iter().enumerate()) {
            let (source, meta) = (Remote { child: self.child, tensor }, tensor.meta());
            let unreadable = |e| self.unreadable(output, &e);
            let logical = Logical::new(Tensor { source: &source, meta: &meta }).map_err(unreadable)?;
            let mut start = 0;
            while start < meta.numel() {
                let count = CHUNK.min(meta.numel() - start) as usize;
                logical.read(start, count, &mut bytes).map_err(unreadable)?;
                hasher.update(&bytes);
                start += count as u64;
            }
        }
        Ok(*hasher.finalize().as_bytes())
    }
}

fn share(source: io::Error) -> JudgeError {
    JudgeError::Share { source }
}

/// Whether the strides stay inside `bytes`, in arithmetic that can't wrap, and storage is not
/// absurdly larger than the tensor.
pub(crate) fn fits(meta: &TensorMeta, bytes: u64) -> bool {
    if meta.numel() == 0 {
        return true;
    }
    let reach = meta
        .shape
        .iter()
        .zip(&meta.stride)
        .try_fold(1_u64, |sum, (n, s)| sum.checked_add((n - 1).checked_mul(*s)?))
        .and_then(|extent| extent.checked_mul(meta.dtype.size()));
    reach.is_some_and(|reach| reach <= bytes && reach <= meta.bytes().saturating_mul(8))
}
