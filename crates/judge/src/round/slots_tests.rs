//! A region's verdict over simulated processes that keep results of earlier calls in every way there is.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;
use autokernel_core::graph::{Arg, Value as NodeValue};
use autokernel_core::region::{Operand, REGION_SCHEMA, RegionId, RegionInput, RegionNode};
use autokernel_core::stats::Schedule;
use autokernel_core::verdict::Verdict;
use autokernel_worker::memory::Arena;
use autokernel_worker::runner::{Call, RunnerError};

use super::*;
use crate::decide::decide;
use crate::evidence::{Evidence, Facts};
use crate::patience::Patience;
use crate::source::Source as _;
use crate::truth::{RawSet, TensorFile};
use crate::verdict::compare;

const ROWS: u64 = 32;
const COLS: u64 = 33;
const NUMEL: usize = (ROWS * COLS) as usize;
const SETS: usize = 6;

/// `x * w` and `x + w`, over a constant `w`.
fn right(x: &[f32], w: &[f32]) -> [Vec<f32>; 2] {
    [x.iter().zip(w).map(|(x, w)| x * w).collect(), x.iter().zip(w).map(|(x, w)| x + w).collect()]
}

/// How a simulated kernel behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Honest,
    /// Prepares from the constant input, and again when that was written to.
    Prepares,
    /// Keeps what it prepared.
    PreparesOnce,
    /// Answers what it once gave for this address.
    ByAddress,
    /// Answers what it once gave for inputs with these signs.
    ByFingerprint,
    /// Answers what it once gave for a product of all elements up to their size.
    BySum,
    /// Works for so many calls, then gives the last results again.
    FirstCalls(usize),
    /// Goes on with the inputs that it had first.
    OldInputs,
    /// One element of one call in a hundred is off by the least amount.
    OneBit,
    /// Gives all calls of a batch the first one's results.
    OncePerBatch,
    /// Computes the last output only once.
    LastOutputOnce,
    /// Rounds to bf16 wherever it is not looked at by a runner.
    Sloppy,
}

#[derive(Clone)]
struct World {
    region: Region,
}

struct FakeZygote {
    kind: Kind,
    us: f64,
}

#[derive(Default)]
struct Slot {
    x: Vec<f32>,
    old: Option<Vec<f32>>,
    kept: Option<[Vec<f32>; 2]>,
}

struct FakeChild {
    kind: Kind,
    us: f64,
    slots: Vec<Slot>,
    groups: Vec<Vec<f32>>,
    prepared: Vec<Option<Vec<f32>>>,
    calls: usize,
    seen: Vec<(Vec<bool>, [Vec<f32>; 2])>,
    last: Option<[Vec<f32>; 2]>,
    results: Vec<[Vec<f32>; 2]>,
    memory: Vec<Vec<u8>>,
}

impl Zygote for FakeZygote {
    fn fork(&mut self) -> Result<Box<dyn Child>, PeerError> {
        Ok(Box::new(FakeChild {
            kind: self.kind,
            us: self.us,
            slots: vec![],
            groups: vec![],
            prepared: vec![],
            calls: 0,
            seen: vec![],
            last: None,
            results: vec![],
            memory: vec![],
        }))
    }
}

fn floats(file: &File, offset: u64) -> Vec<f32> {
    let mut bytes = vec![0; NUMEL * 4];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect()
}

impl FakeChild {
    fn call(&mut self, slot: usize) -> [Vec<f32>; 2] {
        self.calls += 1;
        let group = slot % self.groups.len();
        let w = match self.kind {
            Kind::Prepares | Kind::PreparesOnce => {
                self.prepared[group].get_or_insert_with(|| self.groups[group].clone()).clone()
            }
            _ => self.groups[group].clone(),
        };
        let x = match self.kind {
            Kind::OldInputs => self.slots[slot].old.clone().unwrap(),
            _ => self.slots[slot].x.clone(),
        };
        let mut result = right(&x, &w);
        let fingerprint: Vec<bool> = match self.kind {
            Kind::ByFingerprint => x[..16].iter().map(|v| *v > 0.0).collect(),
            // Edits move a sum of magnitudes by a few hundredths only.
            Kind::BySum => {
                let size = x.iter().map(|v| v.abs()).sum::<f32>().log2().floor() as i32;
                (0..16).map(|bit| size >> bit & 1 == 1).collect()
            }
            _ => vec![],
        };
        match self.kind {
            Kind::ByAddress => result = self.slots[slot].kept.get_or_insert(result).clone(),
            Kind::ByFingerprint | Kind::BySum => {
                match self.seen.iter().find(|(known, _)| *known == fingerprint) {
                    Some((_, kept)) => result = kept.clone(),
                    None => self.seen.push((fingerprint, result.clone())),
                }
            }
            Kind::FirstCalls(count) if self.calls > count => result = self.last.clone().unwrap(),
            Kind::OneBit if self.calls.is_multiple_of(100) => {
                result[1][NUMEL - 1] = f32::from_bits(result[1][NUMEL - 1].to_bits() ^ 1);
            }
            Kind::OncePerBatch if !self.results.is_empty() => result = self.results[0].clone(),
            Kind::LastOutputOnce => {
                let kept = self.slots[slot].kept.get_or_insert_with(|| result.clone());
                result[1].clone_from(&kept[1]);
            }
            Kind::Sloppy => {
                for v in result.iter_mut().flatten() {
                    *v = f32::from_bits(v.to_bits() & 0xffff_0000);
                }
            }
            _ => {}
        }
        self.last = Some(result.clone());
        result
    }
}

impl Child for FakeChild {
    fn stage(&mut self, body: Value, _: Duration) -> Result<Staged, PeerError> {
        let groups = body["groups"].as_u64().unwrap() as usize;
        self.groups.resize(groups, vec![]);
        self.prepared.resize(groups, None);
        self.slots.resize_with(body["slots"].as_u64().unwrap() as usize, Slot::default);
        Ok(Staged::default())
    }

    fn refresh(
        &mut self,
        body: Value,
        content: Option<BorrowedFd<'_>>,
        _: Duration,
    ) -> Result<(), PeerError> {
        let file = File::from(content.unwrap().try_clone_to_owned().unwrap());
        assert!(file.write_all_at(&[0], 0).is_err(), "nobody can write to what others will read");
        for (slot, offsets) in numbers(&body["slots"]).iter().zip(body["offsets"].as_array().unwrap()) {
            let x = floats(&file, numbers(offsets)[0]);
            let slot = &mut self.slots[*slot as usize];
            assert_ne!(slot.x, x, "content is new");
            slot.old.get_or_insert_with(|| x.clone());
            slot.x = x;
        }
        for (group, offsets) in body["constants"].as_array().into_iter().flatten().enumerate() {
            self.groups[group] = floats(&file, numbers(offsets)[0]);
            if self.kind == Kind::Prepares {
                self.prepared[group] = None;
            }
        }
        Ok(())
    }

    fn batch(&mut self, calls: &[usize], _: Duration) -> Result<Duration, PeerError> {
        self.results.clear();
        for slot in calls {
            let result = self.call(*slot);
            self.results.push(result);
        }
        let noise = 1.0 + 0.002 * ((self.calls * 7919 % 101) as f64 / 101.0 - 0.5);
        Ok(Duration::from_secs_f64(self.us * noise * calls.len() as f64 * 1e-6))
    }

    fn outputs(&mut self, _: Duration) -> Result<Vec<Vec<RemoteTensor>>, PeerError> {
        self.memory = self.results.iter().flatten().map(|values| bytes(values)).collect();
        let tensor = |address: usize| RemoteTensor {
            address: (address as u64) << 32,
            bytes: NUMEL as u64 * 4,
            dtype: Dtype::F32,
            shape: vec![ROWS, COLS],
            stride: vec![COLS, 1],
        };
        Ok((0..self.results.len()).map(|call| vec![tensor(2 * call), tensor(2 * call + 1)]).collect())
    }

    fn release(&mut self, _: Duration) -> Result<(), PeerError> {
        self.results.clear();
        Ok(())
    }

    fn freeze(&self) -> Result<(), PeerError> {
        Ok(())
    }

    fn thaw(&self) -> Result<(), PeerError> {
        Ok(())
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.memory[(address >> 32) as usize].read_at(address & 0xffff_ffff, bytes)
    }

    fn pid(&self) -> i32 {
        i32::MAX
    }
}

/// The kernel in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Alone {
    Right,
    Crashes,
    CannotStart,
}

impl Rerun for Alone {
    fn scratch(&self) -> Vec<u64> {
        vec![8]
    }

    fn run(&self, calls: &[Call], inputs: &Arena, outputs: &Arena, _: Duration) -> Result<(), RunnerError> {
        match self {
            Self::Right => {}
            Self::Crashes => return Err(RunnerError::Crashed { signal: 11 }),
            Self::CannotStart => return Err(RunnerError::Spawn { what: "no room".into() }),
        }
        for call in calls {
            let read = |buffer: usize| {
                let mut bytes = vec![0; NUMEL * 4];
                inputs.read(buffer, 0, &mut bytes).unwrap();
                bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()
            };
            let results = right(&read(call.inputs[0]), &read(call.inputs[1]));
            for (buffer, values) in call.outputs.iter().zip(&results) {
                outputs.write(*buffer, 0, &bytes(values)).unwrap();
            }
            assert_eq!(call.scratch.len(), 1);
        }
        Ok(())
    }
}

fn world() -> World {
    let meta = TensorMeta::contiguous(Dtype::F32, &[ROWS, COLS]);
    let node = |op: &str| RegionNode {
        op: op.into(),
        args: vec![Arg::Ref(Operand::Input(0)), Arg::Ref(Operand::Input(1))],
        kwargs: vec![],
        value: NodeValue::Tensor(meta.clone()),
    };
    let input = |constant| RegionInput { meta: meta.clone(), constant };
    World {
        region: Region {
            schema: REGION_SCHEMA.into(),
            id: RegionId("test".into()),
            inputs: vec![input(false), input(true)],
            nodes: vec![node("test.mul"), node("test.add")],
            outputs: vec![0, 1],
        },
    }
}

fn truth(dir: &Path) -> Truth {
    let write = |name: String, dtype, bytes: &[u8]| {
        let file = dir.join(name);
        fs_err::write(&file, bytes).unwrap();
        TensorFile { file, dtype, shape: vec![ROWS, COLS], stride: vec![COLS, 1] }
    };
    let sets = (0..SETS).map(|set| {
        let values = |salt: usize| -> Vec<f32> {
            (0..NUMEL).map(|i| ((i * 31 + set * 977 + salt) as f32).sin() * 3.1).collect()
        };
        let (x, w) = (values(0), values(50_000));
        let wide = |f: fn(f64, f64) -> f64| -> Vec<u8> {
            x.iter().zip(&w).flat_map(|(x, w)| f(f64::from(*x), f64::from(*w)).to_le_bytes()).collect()
        };
        let narrow = right(&x, &w);
        RawSet {
            family: format!("set{set}"),
            inputs: vec![
                write(format!("x{set}"), Dtype::F32, &bytes(&x)),
                write(format!("w{set}"), Dtype::F32, &bytes(&w)),
            ],
            truth: vec![
                write(format!("r{set}"), Dtype::F64, &wide(|x, w| x * w)),
                write(format!("s{set}"), Dtype::F64, &wide(|x, w| x + w)),
            ],
            baseline: vec![
                write(format!("b{set}"), Dtype::F32, &bytes(&narrow[0])),
                write(format!("c{set}"), Dtype::F32, &bytes(&narrow[1])),
            ],
            noise: vec![],
            own_types: false,
        }
    });
    let limits = vec![Limits::for_dtype(Dtype::F32, 1); 2];
    Truth::prepare(Contract { limits, deterministic: true }, sets.collect()).unwrap()
}

fn judge(kind: Kind, alone: Alone, batch_ms: f64) -> Result<Evidence, JudgeError> {
    let (dir, world) = (tempfile::tempdir().unwrap(), world());
    let truth = truth(dir.path());
    let protocol = Protocol { batch_ms, warm_ms: 0.1, ..Protocol::default() };
    let staging = Staging::Slots { region: &world.region, rerun: &alone };
    let contest = Contest { truth: &truth, staging, protocol };
    let contestant = |name: &str, kind, us| Contestant {
        name: name.into(),
        zygote: Box::new(FakeZygote { kind, us }),
        checked: false,
    };
    let mut baselines = [contestant("eager", Kind::Honest, 100.0)];
    let mut candidate = contestant("ours", kind, 50.0);
    let mut say = |_: &str| {};
    let mut patience = Patience::new(Duration::ZERO, &mut say);
    compare(
        &contest,
        &mut baselines,
        &mut candidate,
        (Schedule::confirm(), 1),
        Facts::default(),
        &mut patience,
    )
}

fn verdict(kind: Kind, batch_ms: f64) -> Verdict {
    decide(&judge(kind, Alone::Right, batch_ms).unwrap()).unwrap().verdict
}

#[test]
fn honest_kernels_are_faster() {
    for kind in [Kind::Honest, Kind::Prepares] {
        for batch_ms in [1.0, 0.04] {
            let evidence = judge(kind, Alone::Right, batch_ms).unwrap();
            assert_eq!(decide(&evidence).unwrap().verdict.name(), "faster", "{kind:?}");
            for round in &evidence.rounds {
                let [baseline, candidate] = &round.processes[..] else { panic!("two processes") };
                assert_eq!((candidate.checked, candidate.us.len()), (5, 5), "every timed batch is checked");
                assert_eq!((candidate.digests.len(), baseline.checked), (5, 0));
                let calls = if batch_ms < 0.1 { 1..=1 } else { 19..=21 };
                assert!(calls.contains(&round.life.calls), "{}", round.life.calls);
                assert!(!round.life.truths.is_empty() && round.life.constants.is_some());
                let again =
                    Life::of_region(round.life.seed, SETS, 4, 5, true).with_calls(round.life.calls, SETS);
                assert_eq!(again, round.life, "all of it follows from the seed");
            }
            let digests: Vec<_> = evidence.rounds.iter().flat_map(|r| &r.processes[1].digests).collect();
            let distinct: std::collections::HashSet<_> = digests.iter().collect();
            assert!(batch_ms < 0.1 || distinct.len() == digests.len(), "no batch has the outputs of another");
            let stored: Evidence = serde_json::from_str(&serde_json::to_string(&evidence).unwrap()).unwrap();
            assert_eq!(stored, evidence);
        }
    }
}

#[test]
fn kept_results_are_found_out() {
    for kind in [
        Kind::PreparesOnce,
        Kind::ByAddress,
        Kind::ByFingerprint,
        Kind::BySum,
        Kind::FirstCalls(0),
        Kind::FirstCalls(12),
        Kind::FirstCalls(60),
        Kind::OldInputs,
        Kind::OneBit,
        Kind::LastOutputOnce,
        Kind::Sloppy,
    ] {
        let kind = if kind == Kind::FirstCalls(0) { Kind::FirstCalls(1) } else { kind };
        // Batches of twenty calls, and of a single one.
        for batch_ms in [1.0, 0.04] {
            match verdict(kind, batch_ms) {
                Verdict::Rejected { stage: Stage::Timed, reason } => {
                    let known = reason.contains("fresh process") || reason.contains("on inputs `set");
                    assert!(known, "{kind:?}: {reason}");
                }
                // A single call a batch: too few in a life.
                other => assert!(
                    batch_ms < 0.1 && matches!(kind, Kind::OneBit | Kind::FirstCalls(60)),
                    "{kind:?} at {batch_ms}: {other:?}"
                ),
            }
        }
    }
    assert!(matches!(verdict(Kind::OncePerBatch, 1.0), Verdict::Rejected { stage: Stage::Timed, .. }));
}

#[test]
fn a_fresh_process_that_fails_is_the_kernels_fault_or_ours() {
    let crashed = judge(Kind::Honest, Alone::Crashes, 1.0).unwrap();
    match decide(&crashed).unwrap().verdict {
        Verdict::Rejected { stage: Stage::Timed, reason } => {
            assert!(reason.contains("signal 11"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(judge(Kind::Honest, Alone::CannotStart, 1.0), Err(JudgeError::Runner(_))));
}
