//! The protocol over simulated processes, honest and not.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::rc::Rc;

use autokernel_core::contract::{Contract, Limits};
use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;
use autokernel_core::stats::Schedule;
use autokernel_core::verdict::Verdict;

use super::*;
use crate::decide::decide;
use crate::evidence::{Evidence, Facts};
use crate::patience::Patience;
use crate::source::Source as _;
use crate::timed::fits;
use crate::truth::{RawSet, TensorFile};
use crate::verdict::{compare, race};

const SHAPE: [u64; 2] = [64, 64];
const SETS: usize = 6;

/// Seed of the draw that is the first set of the truth.
const FIRST: u64 = 100;

/// How a simulated contestant behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Honest,
    Zeros,
    /// Right until the warm-up is over.
    LaterZeros,
    Dies,
    Hangs,
    FewOutputs,
    WrongShape,
    WildStride,
    Wavering,
}

#[derive(Clone)]
struct World {
    /// Outputs of every set, f32.
    outputs: Rc<Vec<Vec<u8>>>,
    /// Children that are not frozen.
    awake: Rc<Cell<i32>>,
    ticks: Rc<Cell<u64>>,
}

struct FakeZygote {
    world: World,
    kind: Kind,
    us: f64,
}

struct FakeChild {
    world: World,
    kind: Kind,
    us: f64,
    /// Seed of the draw in each slot.
    staged: Vec<u64>,
    /// Of all draws so far, to see that none comes twice.
    drawn: HashSet<u64>,
    batches: usize,
    frozen: Cell<bool>,
    memory: RefCell<Vec<Vec<u8>>>,
    replied: Vec<Vec<RemoteTensor>>,
}

impl Zygote for FakeZygote {
    fn fork(&mut self) -> Result<Box<dyn Child>, PeerError> {
        self.world.awake.set(self.world.awake.get() + 1);
        Ok(Box::new(FakeChild {
            world: self.world.clone(),
            kind: self.kind,
            us: self.us,
            staged: vec![],
            drawn: HashSet::new(),
            batches: 0,
            frozen: Cell::new(false),
            memory: RefCell::new(vec![]),
            replied: vec![],
        }))
    }
}

impl Drop for FakeChild {
    fn drop(&mut self) {
        if !self.frozen.get() {
            self.world.awake.set(self.world.awake.get() - 1);
        }
    }
}

impl FakeChild {
    fn output(&self, seed: u64) -> Vec<u8> {
        let mut bytes = match seed.checked_sub(FIRST).map(|set| set as usize) {
            Some(set) if set < SETS => self.world.outputs[set].clone(),
            _ => (0..SHAPE[0] * SHAPE[1]).flat_map(|i| ((seed ^ i) as f32).to_le_bytes()).collect(),
        };
        match self.kind {
            Kind::Zeros => bytes.fill(0),
            Kind::LaterZeros if self.batches > 4 => bytes.fill(0),
            Kind::Wavering if self.world.ticks.get().is_multiple_of(2) => bytes[0] ^= 1,
            _ => {}
        }
        bytes
    }
}

impl Child for FakeChild {
    fn stage(&mut self, body: Value, _: Duration) -> Result<Staged, PeerError> {
        self.staged = body["draws"].as_array().unwrap().iter().map(|seed| seed.as_u64().unwrap()).collect();
        Ok(Staged { bytes: 1 << 10, seconds: 1e-6 })
    }

    fn refresh(
        &mut self,
        body: Value,
        content: Option<BorrowedFd<'_>>,
        _: Duration,
    ) -> Result<(), PeerError> {
        assert!(!self.frozen.get(), "a frozen child can't answer");
        assert!(content.is_none(), "a model draws its inputs itself");
        let list = |name: &str| body[name].as_array().unwrap().clone();
        for ((slot, seed), plain) in list("slots").iter().zip(list("seeds")).zip(list("plain")) {
            let seed = seed.as_u64().unwrap();
            assert_eq!(plain.as_bool().unwrap(), (FIRST..FIRST + SETS as u64).contains(&seed));
            assert!(self.drawn.insert(seed), "no draw comes twice in a life");
            self.staged[slot.as_u64().unwrap() as usize] = seed;
        }
        Ok(())
    }

    fn batch(&mut self, calls: &[usize], timeout: Duration) -> Result<Duration, PeerError> {
        assert!(!self.frozen.get(), "a frozen child can't run");
        assert_eq!(self.world.awake.get(), 1, "only one child runs at a time");
        self.world.ticks.set(self.world.ticks.get() + 1);
        self.batches += 1;
        match self.kind {
            Kind::Dies => return Err(PeerError::Died { exit: None, stderr: String::new() }),
            Kind::Hangs => {
                return Err(PeerError::Timeout {
                    op: "batch".into(),
                    seconds: timeout.as_secs_f64(),
                    stderr: String::new(),
                });
            }
            _ => {}
        }
        let mut memory = self.memory.borrow_mut();
        memory.clear();
        let mut outputs = vec![];
        for call in calls {
            let bytes = self.output(self.staged[*call]);
            let mut tensor = RemoteTensor {
                address: (memory.len() as u64) << 32,
                bytes: bytes.len() as u64,
                dtype: Dtype::F32,
                shape: SHAPE.to_vec(),
                stride: vec![SHAPE[1], 1],
            };
            match self.kind {
                Kind::WrongShape => tensor.shape = vec![32, 128],
                Kind::WildStride => tensor.stride = vec![u64::MAX, u64::MAX],
                _ => {}
            }
            memory.push(bytes);
            outputs.push(vec![tensor]);
        }
        if self.kind == Kind::FewOutputs {
            outputs.pop();
        }
        let noise = 1.0 + 0.004 * ((self.world.ticks.get() * 7919 % 101) as f64 / 101.0 - 0.5);
        self.replied = outputs;
        Ok(Duration::from_secs_f64(self.us * noise * calls.len() as f64 * 1e-6))
    }

    fn outputs(&mut self, _: Duration) -> Result<Vec<Vec<RemoteTensor>>, PeerError> {
        assert!(!self.frozen.get(), "a frozen child can't answer");
        Ok(self.replied.clone())
    }

    fn release(&mut self, _: Duration) -> Result<(), PeerError> {
        assert!(!self.frozen.get(), "a frozen child can't answer");
        self.memory.borrow_mut().clear();
        self.replied.clear();
        Ok(())
    }

    fn freeze(&self) -> Result<(), PeerError> {
        assert!(!self.frozen.replace(true));
        self.world.awake.set(self.world.awake.get() - 1);
        Ok(())
    }

    fn thaw(&self) -> Result<(), PeerError> {
        assert!(self.frozen.replace(false));
        self.world.awake.set(self.world.awake.get() + 1);
        Ok(())
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        assert!(self.frozen.get(), "outputs are read from a frozen child");
        self.memory.borrow()[(address >> 32) as usize].read_at(address & 0xffff_ffff, bytes)
    }

    fn pid(&self) -> i32 {
        i32::MAX
    }
}

fn setup(dir: &Path, deterministic: bool) -> (Truth, World) {
    let numel = (SHAPE[0] * SHAPE[1]) as usize;
    let (mut raw, mut outputs) = (vec![], vec![]);
    for set in 0..SETS {
        let values: Vec<f64> = (0..numel).map(|i| ((i * 31 + set * 977) as f64).sin() * 3.1).collect();
        let file = |name: &str, dtype, bytes: &[u8]| {
            let file = dir.join(format!("{name}{set}"));
            fs_err::write(&file, bytes).unwrap();
            TensorFile { file, dtype, shape: SHAPE.to_vec(), stride: vec![SHAPE[1], 1] }
        };
        let wide: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let narrow: Vec<u8> = values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect();
        raw.push(RawSet {
            family: format!("draw{set}"),
            inputs: vec![],
            truth: vec![file("r", Dtype::F64, &wide)],
            baseline: vec![file("b", Dtype::F32, &narrow)],
            noise: vec![],
            own_types: false,
        });
        outputs.push(narrow);
    }
    let contract = Contract { limits: vec![Limits::for_dtype(Dtype::F32, 1)], deterministic };
    let world =
        World { outputs: Rc::new(outputs), awake: Rc::new(Cell::new(0)), ticks: Rc::new(Cell::new(0)) };
    (Truth::prepare(contract, raw).unwrap(), world)
}

fn contestant(world: &World, name: &str, kind: Kind, us: f64, checked: bool) -> Contestant {
    Contestant { name: name.into(), zygote: Box::new(FakeZygote { world: world.clone(), kind, us }), checked }
}

fn contest(truth: &Truth) -> Contest<'_> {
    let seeds = (0..SETS as u64).map(|set| FIRST + set).collect();
    Contest {
        truth,
        staging: Staging::Draws(seeds),
        protocol: Protocol { batch_ms: 1.0, ..Protocol::default() },
    }
}

fn judge(kind: Kind, us: f64, deterministic: bool) -> Evidence {
    let dir = tempfile::tempdir().unwrap();
    let (truth, world) = setup(dir.path(), deterministic);
    let mut baselines = [
        contestant(&world, "eager", Kind::Zeros, 100.0, false),
        contestant(&world, "inductor", Kind::Honest, 80.0, false),
        contestant(&world, "broken", Kind::Dies, 10.0, false),
    ];
    let mut candidate = contestant(&world, "ours", kind, us, false);
    let facts = Facts { subject: "model".into(), ..Facts::default() };
    let mut say = |_: &str| {};
    let mut patience = Patience::new(Duration::ZERO, &mut say);
    let evidence = compare(
        &contest(&truth),
        &mut baselines,
        &mut candidate,
        (Schedule::confirm(), 1),
        facts,
        &mut patience,
    )
    .unwrap();
    assert_eq!(world.awake.get(), 0, "no child is left behind");
    evidence
}

fn stage(kind: Kind) -> Option<Stage> {
    match decide(&judge(kind, 60.0, true)).unwrap().verdict {
        Verdict::Rejected { stage, .. } => Some(stage),
        _ => None,
    }
}

#[test]
fn the_best_baseline_is_the_one_to_beat() {
    for (us, name) in [(60.0, "faster"), (80.0, "same"), (90.0, "slower")] {
        let evidence = judge(Kind::Honest, us, true);
        assert_eq!(evidence.baseline, "inductor");
        assert!(evidence.baselines.iter().find(|b| b.name == "broken").unwrap().us.is_none());
        let decided = decide(&evidence).unwrap();
        assert_eq!(decided.verdict.name(), name, "{decided:?}");
        assert!(
            evidence.rounds.len() >= 6 && evidence.rounds.iter().all(|round| round.processes[1].checked >= 2)
        );
        assert!(
            evidence.rounds.windows(2).all(|w| w[0].life.calls <= w[1].life.calls)
                && evidence.rounds[0].life.calls >= 10
        );
        let stored: Evidence = serde_json::from_str(&serde_json::to_string(&evidence).unwrap()).unwrap();
        assert_eq!(decide(&stored).unwrap(), decided);
    }
}

#[test]
fn dishonest_candidates_are_turned_away() {
    assert_eq!(stage(Kind::Zeros), Some(Stage::Timed));
    assert_eq!(stage(Kind::LaterZeros), Some(Stage::Timed));
    assert_eq!(stage(Kind::Dies), Some(Stage::Run));
    assert_eq!(stage(Kind::Hangs), Some(Stage::Run));
    assert_eq!(stage(Kind::FewOutputs), Some(Stage::Timed));
    assert_eq!(stage(Kind::WrongShape), Some(Stage::Timed));
    assert_eq!(stage(Kind::WildStride), Some(Stage::Timed));
    assert_eq!(stage(Kind::Wavering), Some(Stage::Determinism));
}

#[test]
fn a_model_may_waver_within_its_limits() {
    assert_eq!(decide(&judge(Kind::Wavering, 60.0, false)).unwrap().verdict.name(), "faster");
}

#[test]
fn a_race_ranks_and_names_who_is_out() {
    let dir = tempfile::tempdir().unwrap();
    let (truth, world) = setup(dir.path(), true);
    let mut forms = [
        contestant(&world, "eager", Kind::Honest, 100.0, true),
        contestant(&world, "compile", Kind::LaterZeros, 30.0, true),
        contestant(&world, "ours", Kind::Honest, 70.0, true),
    ];
    let mut say = |_: &str| {};
    let mut patience = Patience::new(Duration::ZERO, &mut say);
    let race = race(&contest(&truth), &mut forms, 10, Facts::default(), &mut patience).unwrap();
    assert_eq!(race.ranking(), ["ours", "eager"]);
    assert_eq!(race.failures.len(), 1);
    assert_eq!((race.failures[0].contestant.as_str(), race.failures[0].stage), ("compile", Stage::Timed));
    assert_eq!(race.pairs("eager", "ours").differences().len(), 10);
    let us = race.us("ours").unwrap();
    assert!(us.low <= us.value && us.value <= us.high && (us.value - 70.0).abs() < 1.0);
    assert_eq!(race.worst.keys().collect::<Vec<_>>(), ["eager", "ours"]);
}

#[test]
fn wild_layouts_do_not_fit() {
    let meta = |stride: Vec<u64>| TensorMeta { dtype: Dtype::F32, shape: vec![4, 4], stride };
    assert!(fits(&meta(vec![4, 1]), 64));
    assert!(!fits(&meta(vec![4, 1]), 63));
    assert!(!fits(&meta(vec![u64::MAX, 1]), u64::MAX));
    assert!(!fits(&meta(vec![1 << 40, 1]), u64::MAX));
}
