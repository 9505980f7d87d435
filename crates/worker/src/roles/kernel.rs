//! A loaded artefact inside a runner: its memory, its entries, its calls.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use autokernel_core::plan::{Plan, PlannedArg, PlannedLaunch};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::mm::{MapFlags, ProtFlags};

use super::invoke::{ARGUMENTS, Entry, invoke};
use crate::memory::Span;
use crate::runner::Call;
use crate::wire::Layout;

/// Alignment of buffers that prepare steps fill.
const ALIGN: usize = 64;
/// The least page size.
const PAGE: usize = 4096;

/// An arena mapped into this process; stays mapped until the process ends.
struct Map {
    base: *mut c_void,
    spans: Vec<Span>,
}

impl Map {
    fn new(file: &OwnedFd, layout: Layout, writable: bool) -> Result<Self, String> {
        let size = usize::try_from(layout.size).map_err(|e| e.to_string())?;
        if layout
            .spans
            .iter()
            .any(|span| span.offset.checked_add(span.bytes).is_none_or(|end| end > layout.size))
        {
            return Err("a buffer leaves its arena".to_owned());
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours; the
        // file is sealed against shrinking, so no access inside it can fault.
        let base = unsafe {
            // Populated now, so that no timed call pays for the first touch.
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size,
                protection,
                MapFlags::SHARED | MapFlags::POPULATE,
                file.as_fd(),
                0,
            )
        }
        .map_err(|e| format!("cannot map an arena: {e}"))?;
        Ok(Self { base, spans: layout.spans })
    }

    /// Address and length of a buffer.
    fn buffer(&self, index: usize) -> Result<(u64, u64), String> {
        let span = self.spans.get(index).ok_or_else(|| format!("no buffer {index}"))?;
        Ok((self.base as u64 + span.offset, span.bytes))
    }
}

/// One launch with all its arguments known.
struct Ready {
    entry: Entry,
    args: Vec<u64>,
}

/// What one call does: zero these ranges, then run these launches.
#[derive(Default)]
struct ReadyCall {
    zero: Vec<(u64, usize)>,
    launches: Vec<Ready>,
}

/// Memory for what prepare steps make, mapped before the last filter forbids mapping any.
struct Pool {
    base: *mut c_void,
    size: usize,
    used: usize,
}

impl Pool {
    /// Reserves addresses; pages come with their first touch.
    fn new(size: usize) -> Result<Self, String> {
        let size = size.max(1).next_multiple_of(PAGE);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, protection, flags) }
            .map_err(|e| format!("cannot map memory for prepared buffers: {e}"))?;
        Ok(Self { base, size, used: 0 })
    }

    /// Makes the whole pool zeros again, whoever wrote to it.
    fn clear(&mut self) -> Result<(), String> {
        self.used = 0;
        // SAFETY: the range is the mapping made above, into which no reference exists.
        unsafe { rustix::mm::madvise(self.base, self.size, rustix::mm::Advice::LinuxDontNeed) }
            .map_err(|e| format!("cannot clear prepared buffers: {e}"))
    }

    /// The address of `bytes` zeros.
    fn take(&mut self, bytes: u64) -> Result<u64, String> {
        let bytes = usize::try_from(bytes).map_err(|e| e.to_string())?;
        let end = self.used.checked_add(bytes).filter(|end| *end <= self.size);
        let start = std::mem::replace(
            &mut self.used,
            end.ok_or("more prepared buffers than inputs")?.next_multiple_of(ALIGN),
        );
        Ok(self.base as u64 + start as u64)
    }
}

/// Bytes of all that prepare steps can make: every step on every buffer of the inputs.
pub(super) fn prepared_bytes(plan: &Plan, inputs: usize) -> Result<usize, String> {
    let step = |numel: u64, size: u64| numel.checked_mul(size)?.checked_add(ALIGN as u64);
    plan.prepare
        .iter()
        .try_fold(0_u64, |sum, planned| {
            sum.checked_add(step(planned.numel, planned.dtype.size())?.checked_mul(inputs as u64)?)
        })
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| "prepared buffers are too large".to_owned())
}

/// A loaded artefact with its plan and memory.
pub(super) struct Kernel {
    plan: Plan,
    entries: HashMap<String, Entry>,
    inputs: Map,
    outputs: Map,
    threads: u64,
    pool: Pool,
    prepared: HashMap<(usize, Vec<usize>), u64>,
    ready: Vec<ReadyCall>,
}

impl Kernel {
    /// Maps the arenas and loads the artefact. No code of the candidate runs: admission has seen to
    /// it that there is none to run at load.
    pub(super) fn load(
        plan: Plan,
        threads: usize,
        artefact: &OwnedFd,
        inputs: (OwnedFd, Layout),
        outputs: (OwnedFd, Layout),
    ) -> Result<Self, String> {
        let inputs = Map::new(&inputs.0, inputs.1, false)?;
        let outputs = Map::new(&outputs.0, outputs.1, true)?;
        let path = format!("/proc/self/fd/{}", artefact.as_raw_fd());
        // SAFETY: the artefact was admitted: no constructors, no IFUNC, imports from a fixed list.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|e| e.to_string().replace('\n', " "))?;
        let mut entries = HashMap::new();
        for launch in plan.prepare.iter().map(|step| &step.launch).chain(&plan.launches) {
            if launch.args.len() > ARGUMENTS {
                return Err(format!("`{}` takes more than {ARGUMENTS} arguments", launch.entry));
            }
            // SAFETY: only the address is taken here; what it is called with is `invoke`'s concern.
            let symbol = unsafe { library.get::<*const c_void>(launch.entry.as_bytes()) };
            let address = symbol.map_err(|e| e.to_string())?.into_raw();
            if address.is_null() {
                return Err(format!("`{}` has no address", launch.entry));
            }
            entries.insert(launch.entry.clone(), Entry(address));
        }
        // Closing would unmap code that the entries point to.
        std::mem::forget(library);
        let pool = Pool::new(prepared_bytes(&plan, inputs.spans.len())?)?;
        Ok(Self {
            pool,
            plan,
            entries,
            inputs,
            outputs,
            threads: threads as u64,
            prepared: HashMap::new(),
            ready: vec![],
        })
    }

    /// Whether [`Kernel::prepare`] runs code of the candidate.
    pub(super) fn prepares(&self) -> bool {
        !self.plan.prepare.is_empty()
    }

    /// Resolves the arguments of these calls and runs their prepare steps.
    pub(super) fn prepare(&mut self, calls: &[Call]) -> Result<(), String> {
        // Inputs may have been edited since the last batch, so nothing prepared is kept.
        self.prepared.clear();
        self.pool.clear()?;
        self.ready.clear();
        for call in calls {
            for step in 0..self.plan.prepare.len() {
                self.run_prepare(step, call)?;
            }
            let mut ready = ReadyCall::default();
            for (index, scratch) in self.plan.scratch.iter().enumerate() {
                let buffer =
                    call.scratch.get(index).ok_or_else(|| format!("no buffer for scratch {index}"))?;
                let (address, bytes) = self.outputs.buffer(*buffer)?;
                let needed =
                    scratch.numel.checked_mul(scratch.dtype.size()).filter(|needed| *needed <= bytes);
                let needed = needed.ok_or_else(|| format!("the buffer of scratch {index} is too small"))?;
                if scratch.zero {
                    ready.zero.push((address, needed as usize));
                }
            }
            for launch in &self.plan.launches {
                ready.launches.push(self.resolve(launch, call)?);
            }
            self.ready.push(ready);
        }
        Ok(())
    }

    fn run_prepare(&mut self, step: usize, call: &Call) -> Result<(), String> {
        let planned = &self.plan.prepare[step];
        let key = (step, prepare_inputs(&planned.inputs, call)?);
        if self.prepared.contains_key(&key) {
            return Ok(());
        }
        let bytes =
            planned.numel.checked_mul(planned.dtype.size()).ok_or("a prepared buffer is too large")?;
        let address = self.pool.take(bytes)?;
        self.prepared.insert(key, address);
        let ready = self.resolve(&planned.launch, call)?;
        // SAFETY: an entry of the plan with the arguments that the plan gives it.
        unsafe { invoke(ready.entry, &ready.args) };
        Ok(())
    }

    fn resolve(&self, launch: &PlannedLaunch, call: &Call) -> Result<Ready, String> {
        let entry = *self.entries.get(&launch.entry).ok_or_else(|| format!("no entry `{}`", launch.entry))?;
        let args = launch.args.iter().map(|arg| self.argument(arg, call)).collect::<Result<_, _>>()?;
        Ok(Ready { entry, args })
    }

    fn argument(&self, arg: &PlannedArg, call: &Call) -> Result<u64, String> {
        let pick = |list: &[usize], index: usize, what: &str| {
            list.get(index).copied().ok_or_else(|| format!("no buffer for {what} {index}"))
        };
        match arg {
            PlannedArg::Input(i) => Ok(self.inputs.buffer(pick(&call.inputs, *i, "input")?)?.0),
            PlannedArg::Output(i) => Ok(self.outputs.buffer(pick(&call.outputs, *i, "output")?)?.0),
            PlannedArg::Scratch(i) => Ok(self.outputs.buffer(pick(&call.scratch, *i, "scratch")?)?.0),
            PlannedArg::Prepared(i) => {
                let step = self.plan.prepare.get(*i).ok_or_else(|| format!("no prepare step {i}"))?;
                let key = (*i, prepare_inputs(&step.inputs, call)?);
                self.prepared.get(&key).copied().ok_or_else(|| format!("prepare step {i} has not run"))
            }
            PlannedArg::Int(value) => Ok(value.cast_unsigned()),
            PlannedArg::Threads => Ok(self.threads),
            PlannedArg::TensorMap { .. } => Err("a tensor map needs a GPU".to_owned()),
        }
    }

    /// The timed part: nothing here but zeroing, which the plan asks for, and the calls.
    pub(super) fn run(&self) {
        for call in &self.ready {
            for (address, bytes) in &call.zero {
                // SAFETY: `prepare` took the range from a buffer inside the writable map.
                unsafe { std::ptr::write_bytes(*address as *mut u8, 0, *bytes) };
            }
            for launch in &call.launches {
                // SAFETY: an entry of the plan with the arguments that the plan gives it.
                unsafe { invoke(launch.entry, &launch.args) };
            }
        }
    }
}

fn prepare_inputs(inputs: &[usize], call: &Call) -> Result<Vec<usize>, String> {
    inputs
        .iter()
        .map(|index| call.inputs.get(*index).copied().ok_or_else(|| format!("no buffer for input {index}")))
        .collect()
}
