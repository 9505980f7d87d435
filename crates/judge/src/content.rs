//! The inputs of a region's calls, written into a memory file while the processes stand still.
//!
//! One file serves all: each process copies it into its slots before a batch, from a descriptor that it
//! has only for that moment, and the runner that computes the same calls again maps it as its inputs. So
//! everyone works on the same bytes, and nobody could read them early.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use autokernel_core::region::{Region, RegionInput};
use autokernel_worker::memory::{Arena, BufferSpec};
use serde_json::{Value, json};

use crate::correctness::ALIGN;
use crate::edit::{self, Change};
use crate::error::JudgeError;
use crate::life::Life;
use crate::truth::{Truth, TruthError};

/// Bytes that are edited at once; a multiple of every element's size.
const PIECE: u64 = 256 << 10;

/// Most threads that write.
const THREADS: usize = 8;

/// The memory file with the inputs of one batch.
#[derive(Debug)]
pub(crate) struct Content<'a> {
    region: &'a Region,
    life: &'a Life,
    arena: Arena,
    /// The inputs of each group's set.
    files: Vec<Vec<File>>,
    /// Constant inputs, as indices into the region's, and the others.
    constant: Vec<usize>,
    own: Vec<usize>,
    slots: usize,
    /// Whether no input but constant ones holds real numbers.
    whole: bool,
    filled: Option<usize>,
}

/// A part of one buffer that is to be written.
struct Job<'f> {
    buffer: usize,
    from: u64,
    bytes: u64,
    file: &'f File,
    input: &'f RegionInput,
    change: Change,
}

impl<'a> Content<'a> {
    /// Room for as many slots.
    pub(crate) fn new(
        region: &'a Region,
        truth: &Truth,
        life: &'a Life,
        slots: usize,
    ) -> Result<Self, JudgeError> {
        let files = life.sets.iter().map(|set| open(region, truth, *set)).collect::<Result<Vec<_>, _>>()?;
        let places = |constant: bool| -> Vec<usize> {
            (0..region.inputs.len()).filter(|i| region.inputs[*i].constant == constant).collect()
        };
        let (constant, own) = (places(true), places(false));
        let spec = |i: &usize| BufferSpec { bytes: bytes(&region.inputs[*i]), align: ALIGN };
        let mut specs: Vec<BufferSpec> = life.sets.iter().flat_map(|_| constant.iter().map(spec)).collect();
        specs.extend((0..slots).flat_map(|_| own.iter().map(spec)));
        let arena = Arena::packed("content", &specs)?;
        let whole = !own.iter().any(|i| region.inputs[*i].meta.dtype.is_float());
        Ok(Self { region, life, arena, files, constant, own, slots, whole, filled: None })
    }

    /// The inputs of all calls, as a runner takes them.
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// A descriptor through which nobody can write.
    pub(crate) fn share(&self) -> Result<OwnedFd, JudgeError> {
        self.arena.read_only().map_err(|source| JudgeError::Share { source })
    }

    /// What a process needs to know to make slots.
    pub(crate) fn stage_body(&self) -> Value {
        json!({ "inputs": self.region.inputs, "groups": self.life.sets.len(), "slots": self.slots })
    }

    /// Bytes of one slot.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.own.iter().map(|i| bytes(&self.region.inputs[*i])).sum()
    }

    /// More calls than this can't all be given something of their own. Real numbers can always be edited;
    /// whole ones only change places.
    pub(crate) fn most_calls(&self) -> usize {
        let longest = self.own.iter().map(|i| self.region.inputs[*i].meta.extent()).max().unwrap_or(0);
        if self.whole && longest > 0 { self.life.sets.len() * longest as usize } else { usize::MAX }
    }

    /// Writes the content of the warm-up: the first slots, and constant inputs.
    pub(crate) fn fill_warm(&mut self) -> Result<(), JudgeError> {
        self.write(&self.constant_jobs(0))?;
        let jobs: Vec<Job<'_>> = (0..self.life.warm).flat_map(|slot| self.slot_jobs(None, slot)).collect();
        self.write(&jobs)?;
        self.filled = None;
        Ok(())
    }

    /// Writes the content of a batch, if it does not stand there already.
    pub(crate) fn fill(&mut self, batch: usize) -> Result<(), JudgeError> {
        if self.filled == Some(batch) {
            return Ok(());
        }
        let known = self.filled.map(|old| self.life.edited_constants(old));
        let mut jobs: Vec<Job<'_>> = vec![];
        if known != Some(self.life.edited_constants(batch)) {
            jobs.extend(self.constant_jobs(batch));
        }
        jobs.extend(self.life.order(batch).into_iter().flat_map(|slot| self.slot_jobs(Some(batch), slot)));
        self.write(&jobs)?;
        self.filled = Some(batch);
        Ok(())
    }

    /// The request that gives these slots what stands here.
    pub(crate) fn refresh_body(&self, slots: &[usize]) -> Value {
        let offsets: Vec<Vec<u64>> =
            slots.iter().map(|slot| self.offsets(&self.slot_buffers(*slot))).collect();
        json!({ "slots": slots, "offsets": offsets })
    }

    /// The request that gives all groups their constant inputs; `None` where there are none.
    pub(crate) fn constants_body(&self) -> Option<Value> {
        let groups: Vec<Vec<u64>> =
            (0..self.life.sets.len()).map(|group| self.offsets(&self.constant_buffers(group))).collect();
        let none: [usize; 0] = [];
        (!self.constant.is_empty()).then(|| json!({ "slots": none, "offsets": none, "constants": groups }))
    }

    /// The buffers of a call on this slot, one for each input of the region.
    pub(crate) fn buffers(&self, slot: usize) -> Vec<usize> {
        let (constant, own) = (self.constant_buffers(slot % self.life.sets.len()), self.slot_buffers(slot));
        let (mut constant, mut own) = (constant.into_iter(), own.into_iter());
        let next = |input: &RegionInput| if input.constant { constant.next() } else { own.next() };
        self.region.inputs.iter().filter_map(next).collect()
    }

    fn offsets(&self, buffers: &[usize]) -> Vec<u64> {
        buffers.iter().map(|buffer| self.arena.spans()[*buffer].offset).collect()
    }

    fn constant_buffers(&self, group: usize) -> Vec<usize> {
        let first = group * self.constant.len();
        (first..first + self.constant.len()).collect()
    }

    fn slot_buffers(&self, slot: usize) -> Vec<usize> {
        let first = self.life.sets.len() * self.constant.len() + slot * self.own.len();
        (first..first + self.own.len()).collect()
    }

    fn constant_jobs(&self, batch: usize) -> Vec<Job<'_>> {
        let edited = self.life.edited_constants(batch);
        let change = |group, input: usize| {
            if edited { Change::Scale(self.life.constant_edit(group, input)) } else { Change::None }
        };
        let groups = 0..self.life.sets.len();
        groups
            .flat_map(|group| {
                let places = self.constant_buffers(group).into_iter().zip(&self.constant);
                places.map(move |(buffer, input)| (buffer, group, *input, change(group, *input)))
            })
            .flat_map(|(buffer, group, input, change)| self.jobs(buffer, group, input, change))
            .collect()
    }

    fn slot_jobs(&self, batch: Option<usize>, slot: usize) -> Vec<Job<'_>> {
        let known = batch.is_some_and(|batch| self.life.truth_at(batch, slot).is_some());
        let places = self.slot_buffers(slot).into_iter().zip(&self.own);
        places
            .flat_map(|(buffer, input)| {
                let meta = &self.region.inputs[*input].meta;
                let change = match (known, self.whole) {
                    (true, _) => Change::None,
                    (false, true) => Change::Roll(self.life.roll(batch, slot, meta.extent())),
                    (false, false) => Change::Scale(self.life.edit(batch, slot, *input)),
                };
                self.jobs(buffer, slot % self.life.sets.len(), *input, change)
            })
            .collect()
    }

    /// The pieces of one buffer.
    fn jobs(&self, buffer: usize, group: usize, input: usize, change: Change) -> Vec<Job<'_>> {
        let file = &self.files[group][input];
        let input = &self.region.inputs[input];
        let bytes = bytes(input);
        let starts = (0..bytes).step_by(PIECE as usize);
        starts.map(|from| Job { buffer, from, bytes: PIECE.min(bytes - from), file, input, change }).collect()
    }

    /// Writes all jobs, on as many threads as there are processors: nothing is measured meanwhile.
    fn write(&self, jobs: &[Job<'_>]) -> Result<(), JudgeError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        let share = jobs.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let workers: Vec<_> = jobs
                .chunks(share)
                .map(|share| {
                    scope.spawn(|| {
                        let mut piece = vec![];
                        share.iter().try_for_each(|job| self.write_one(job, &mut piece))
                    })
                })
                .collect();
            workers
                .into_iter()
                .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    fn write_one(&self, job: &Job<'_>, piece: &mut Vec<u8>) -> Result<(), JudgeError> {
        piece.resize(job.bytes as usize, 0);
        let dtype = job.input.meta.dtype;
        let read = match job.change {
            Change::Roll(by) => read_around(job, by * dtype.size(), piece),
            Change::None | Change::Scale(_) => job.file.read_exact_at(piece, job.from),
        };
        read.map_err(|source| JudgeError::Share { source })?;
        if let Change::Scale(key) = job.change {
            edit::scale(dtype, key, job.from / dtype.size(), piece);
        }
        Ok(self.arena.write(job.buffer, job.from, piece)?)
    }
}

/// Reads from `by` bytes further on, around the end of the tensor.
fn read_around(job: &Job<'_>, by: u64, piece: &mut [u8]) -> io::Result<()> {
    let whole = bytes(job.input);
    let mut done = 0;
    while done < piece.len() {
        let at = (job.from + by + done as u64) % whole;
        let count = (whole - at).min((piece.len() - done) as u64) as usize;
        job.file.read_exact_at(&mut piece[done..done + count], at)?;
        done += count;
    }
    Ok(())
}

fn open(region: &Region, truth: &Truth, set: usize) -> Result<Vec<File>, JudgeError> {
    let inputs = &truth.sets()[set].inputs;
    if inputs.len() != region.inputs.len() {
        return Err(JudgeError::Inputs { set, got: inputs.len(), expected: region.inputs.len() });
    }
    let files = inputs.iter().zip(&region.inputs).enumerate().map(|(i, (tensor, input))| {
        if tensor.meta() != input.meta {
            return Err(JudgeError::Layout { set, input: i });
        }
        let failed = |source| TruthError::Io { path: tensor.file.clone(), source };
        let file = File::open(&tensor.file).map_err(failed)?;
        let (got, expected) = (file.metadata().map_err(failed)?.len(), bytes(input));
        if got != expected {
            return Err(JudgeError::Size { path: tensor.file.clone(), got, expected });
        }
        Ok(file)
    });
    files.collect()
}

fn bytes(input: &RegionInput) -> u64 {
    input.meta.extent() * input.meta.dtype.size()
}
