//! Does a kernel keep anything between calls? What a correct one computes depends on its inputs alone: not
//! on where they lie, on what lay there before, on what it was asked last, or on how often.
//!
//! The inputs lie in two places that the kernel learns as it goes. Sets whose outputs were found right are
//! written into them in turn while the process stands still, and every answer must have the bits that are
//! known. An edit of one element has no known answer; there a process that has seen nothing else says
//! what it is.

use std::time::{Duration, Instant};

use autokernel_core::graph::TensorMeta;
use autokernel_core::plan::Plan;
use autokernel_core::verdict::Stage;
use autokernel_worker::memory::{Arena, BufferSpec, Pattern};
use autokernel_worker::runner::{Call, Runner};
use autokernel_worker::toolchain::Artefact;

use crate::correctness::{ALIGN, Judge, JudgedTask, Stop, blame, copy_in};
use crate::edit;
use crate::error::JudgeError;
use crate::metrics::{Digest, digest};
use crate::secret::Stream;
use crate::source::{ArenaBuffer, Tensor};

/// Equal calls over different poison.
const REPEATS: usize = 20;

/// Fewest of them, where a call takes long.
const FEWEST_REPEATS: usize = 4;

/// Time after which no further repetition starts.
const BUDGET: Duration = Duration::from_millis(200);

/// What each place holds, in the words of a reason.
const WHERE: [&str; 2] = ["the first place", "another place"];

/// One process with two places for inputs and one for outputs.
struct Battery<'a> {
    task: &'a JudgedTask,
    runner: Runner,
    inputs: Arena,
    outputs: Arena,
    metas: Vec<TensorMeta>,
}

/// Runs the battery; `known` are the digests of all sets' outputs.
pub(crate) fn stale(
    judge: &Judge,
    task: &JudgedTask,
    artefact: &Artefact,
    plan: &Plan,
    known: &[Vec<Digest>],
    stream: &mut Stream,
) -> Result<(), Stop> {
    // Without a promise of equal bits there is nothing to hold an answer against but limits, and those
    // have been tried on every set.
    if !task.truth.contract().deterministic || task.region.inputs.is_empty() {
        return Ok(());
    }
    let sets = stream.order(known.len());
    let (a, b) = (sets[0], sets[1 % sets.len()]);
    let mut battery = Battery::start(judge, task, artefact, plan)?;
    let mut asked = |place: usize, set: usize, story: &str| -> Result<(), Stop> {
        battery.write(place, set)?;
        let got = battery.call(place, Pattern::Random(stream.next_u64()))?;
        if got == known[set] { Ok(()) } else { Err(rejected(place, story)) }
    };
    asked(0, a, "it was given there first")?;
    asked(0, b, "it took the place of others")?;
    asked(1, b, "it had been elsewhere before")?;
    asked(0, a, "it came back after others")?;
    asked(1, a, "it had been elsewhere before")?;
    one_element(judge, &mut battery, artefact, plan, a, stream)?;
    battery.write(0, b)?;
    repeat(&mut battery, &known[b], stream)
}

fn rejected(place: usize, story: &str) -> Stop {
    let reason = format!(
        "equal inputs gave unequal bits: the kernel answers from something that it kept ({}, where {story})",
        WHERE[place]
    );
    Stop::Rejected(Stage::Determinism, reason)
}

/// One number is changed where it lies: an answer that is found again by a few samples of the inputs, or by
/// their place, is the old one.
fn one_element(
    judge: &Judge,
    battery: &mut Battery<'_>,
    artefact: &Artefact,
    plan: &Plan,
    set: usize,
    stream: &mut Stream,
) -> Result<(), Stop> {
    let numbers = |input: &usize| {
        let meta = &battery.task.region.inputs[*input].meta;
        meta.dtype.is_float() && meta.extent() > 0
    };
    let candidates: Vec<usize> = (0..battery.task.region.inputs.len()).filter(numbers).collect();
    if candidates.is_empty() {
        return Ok(());
    }
    let input = candidates[stream.below(candidates.len())];
    let element = stream.below(battery.task.region.inputs[input].meta.extent() as usize) as u64;
    let key = stream.next_u64();
    for place in [0, 1] {
        battery.write(place, set)?;
        battery.edit(place, input, element, key)?;
    }
    let mut fresh = Battery::start(judge, battery.task, artefact, plan)?;
    fresh.write(1, set)?;
    fresh.edit(1, input, element, key)?;
    let wanted = fresh.call(1, Pattern::Nan)?;
    for place in [0, 1] {
        if battery.call(place, Pattern::Random(stream.next_u64()))? != wanted {
            return Err(rejected(place, "one number was changed"));
        }
    }
    Ok(())
}

/// The same call again and again, each time over other rests of memory.
fn repeat(battery: &mut Battery<'_>, known: &[Digest], stream: &mut Stream) -> Result<(), Stop> {
    let start = Instant::now();
    for done in 0..REPEATS {
        if done >= FEWEST_REPEATS && start.elapsed() > BUDGET {
            break;
        }
        if battery.call(0, Pattern::Random(stream.next_u64()))? != known {
            return Err(rejected(0, "nothing was changed but what outputs and scratch held before"));
        }
    }
    Ok(())
}

impl<'a> Battery<'a> {
    fn start(judge: &Judge, task: &'a JudgedTask, artefact: &Artefact, plan: &Plan) -> Result<Self, Stop> {
        let spec = |bytes: u64| BufferSpec { bytes, align: ALIGN };
        let metas: Vec<TensorMeta> = task.region.output_metas().into_iter().cloned().collect();
        let inputs: Vec<BufferSpec> = [(); 2]
            .iter()
            .flat_map(|()| task.region.inputs.iter().map(|i| spec(i.meta.extent() * i.meta.dtype.size())))
            .collect();
        let outputs: Vec<BufferSpec> = metas
            .iter()
            .map(|meta| spec(meta.extent() * meta.dtype.size()))
            .chain(plan.scratch.iter().map(|s| spec(s.numel * s.dtype.size())))
            .collect();
        let (inputs, outputs) = (Arena::create("inputs", &inputs)?, Arena::create("outputs", &outputs)?);
        let mut runner = Runner::spawn(&judge.runner).map_err(|e| Stop::Failed(JudgeError::Runner(e)))?;
        runner.load(artefact, plan, &inputs, &outputs).map_err(|e| blame(Stage::Load, e))?;
        Ok(Self { task, runner, inputs, outputs, metas })
    }

    fn buffer(&self, place: usize, input: usize) -> usize {
        place * self.task.region.inputs.len() + input
    }

    /// Puts a set's inputs in a place.
    fn write(&self, place: usize, set: usize) -> Result<(), JudgeError> {
        let files = self.task.truth.all()[set].inputs.iter().zip(&self.task.region.inputs).enumerate();
        for (index, (tensor, input)) in files {
            let bytes = input.meta.extent() * input.meta.dtype.size();
            copy_in(&self.inputs, self.buffer(place, index), &tensor.file, bytes)?;
        }
        Ok(())
    }

    /// Changes one number, so that it is another afterwards wherever its type lets it.
    fn edit(&self, place: usize, input: usize, element: u64, key: u64) -> Result<(), JudgeError> {
        let dtype = self.task.region.inputs[input].meta.dtype;
        let (buffer, size) = (self.buffer(place, input), dtype.size());
        let mut bytes = vec![0; size as usize];
        self.inputs.read(buffer, element * size, &mut bytes)?;
        let before = bytes.clone();
        for attempt in 0..8 {
            edit::scale(dtype, key.wrapping_add(attempt), 0, &mut bytes);
            if bytes != before {
                break;
            }
        }
        Ok(self.inputs.write(buffer, element * size, &bytes)?)
    }

    /// One call on the inputs of a place; the digests of its outputs.
    fn call(&mut self, place: usize, poison: Pattern) -> Result<Vec<Digest>, Stop> {
        for buffer in 0..self.outputs.spans().len() {
            let pattern = match poison {
                Pattern::Random(seed) => Pattern::Random(seed.wrapping_add(buffer as u64)),
                other => other,
            };
            self.outputs.poison(buffer, pattern)?;
        }
        let inputs = self.task.region.inputs.len();
        let call = Call {
            inputs: (place * inputs..(place + 1) * inputs).collect(),
            outputs: (0..self.metas.len()).collect(),
            scratch: (self.metas.len()..self.outputs.spans().len()).collect(),
        };
        self.runner.batch(&[call], self.task.timeout(1)).map_err(|e| blame(Stage::Run, e))?;
        let digests = self.metas.iter().enumerate().map(|(buffer, meta)| {
            let source = ArenaBuffer { arena: &self.outputs, buffer };
            digest(Tensor { source: &source, meta })
        });
        Ok(digests.collect::<Result<_, _>>()?)
    }
}
