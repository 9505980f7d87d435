//! From header, region, parameters and device to a plan.

use std::collections::BTreeSet;

use crate::graph::TensorMeta;
use crate::kernel_file::{
    KernelFile, Launch, LaunchArg, Params, ParamsError, Prepare, TensorMap, TensorName,
};
use crate::region::Region;

use super::{
    Device, EvalError, Expr, Mention, Plan, PlannedArg, PlannedLaunch, PlannedPrepare, Scope, ScratchBuffer,
};

/// The most elements of a scratch or prepared buffer.
pub const MAX_BUFFER_NUMEL: i64 = 1 << 40;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum PlanError {
    #[error(transparent)]
    Params(#[from] ParamsError),
    #[error("{place}: the region has no `{name}`, only {inputs} inputs and {outputs} outputs")]
    NoTensor { place: String, name: TensorName, inputs: usize, outputs: usize },
    #[error("no launch is given `{name}`, so nothing would write it")]
    OutputUnused { name: TensorName },
    #[error("the prepare step for `{output}` reads `{name}`, which the task does not call constant")]
    NotConstant { output: String, name: TensorName },
    #[error("guard `{expr}` does not hold")]
    Guard { expr: String },
    #[error("{place}: `{expr}`: {source}")]
    Evaluate { place: String, expr: String, source: EvalError },
    #[error("{place} has {numel} elements, it may have 0 to {MAX_BUFFER_NUMEL}")]
    BufferSize { place: String, numel: i64 },
    #[error("every launch is left out by its `when`")]
    NoLaunch,
    #[error("launch of `{entry}`: the prepare step for `{name}` is left out by its `when`")]
    NotPrepared { entry: String, name: String },
    #[error("{place} is {value}, it must be {low} to {high}")]
    Range { place: String, value: i64, low: i64, high: i64 },
    #[error("{place} is {value}, which the cluster's {cluster} does not divide")]
    Cluster { place: String, value: i64, cluster: i64 },
    #[error("{place}: the box has {got} extents, `{name}` has {rank} dimensions")]
    BoxRank { place: String, name: TensorName, got: usize, rank: usize },
}

/// The check for when a file is first read for a region, before parameters are chosen: every tensor
/// that the header names exists, every output is passed to a launch, and prepare steps read only
/// inputs that the task calls constant.
pub fn check_region(file: &KernelFile, region: &Region) -> Result<(), PlanError> {
    let check = Check { inputs: region.inputs.len(), outputs: region.outputs.len() };
    file.guard.iter().try_for_each(|expr| check.expr("guard", expr))?;
    for (name, scratch) in &file.scratch {
        check.expr(&format!("size of `{name}`"), &scratch.size)?;
    }
    for step in &file.prepare {
        check.expr(&format!("size of `{}`", step.output), &step.size)?;
        check.launch(&step.launch)?;
        for input in inputs_of(&step.launch) {
            if region.inputs.get(input).is_none_or(|input| !input.constant) {
                return Err(PlanError::NotConstant {
                    output: step.output.clone(),
                    name: TensorName::Input(input),
                });
            }
        }
    }
    file.launches.iter().try_for_each(|launch| check.launch(launch))?;
    check_outputs(check.outputs, file.launches.iter())
}

/// Evaluates a kernel file for a region.
pub fn plan(file: &KernelFile, region: &Region, params: &Params, device: &Device) -> Result<Plan, PlanError> {
    file.check_params(params)?;
    check_region(file, region)?;
    let inputs =
        region.inputs.iter().enumerate().map(|(index, input)| (TensorName::Input(index), &input.meta));
    let outputs = region.output_metas().into_iter().enumerate();
    let tensors: Vec<(String, TensorMeta)> = inputs
        .chain(outputs.map(|(index, meta)| (TensorName::Output(index), meta)))
        .map(|(name, meta)| (name.to_string(), meta.clone()))
        .collect();
    let planner = Planner { file, scope: Scope { tensors: &tensors, params, device } };
    for expr in &file.guard {
        if planner.value("guard", expr)? == 0 {
            return Err(PlanError::Guard { expr: expr.to_string() });
        }
    }
    let scratch = planner.scratch()?;
    let mut prepare: Vec<PlannedPrepare> = vec![];
    for step in &file.prepare {
        if planner.kept(&step.launch)? {
            let step = planner.prepare(step, &prepare)?;
            prepare.push(step);
        }
    }
    let mut kept: Vec<&Launch> = vec![];
    for launch in &file.launches {
        if planner.kept(launch)? {
            kept.push(launch);
        }
    }
    if kept.is_empty() {
        return Err(PlanError::NoLaunch);
    }
    check_outputs(region.outputs.len(), kept.iter().copied())?;
    let launches =
        kept.into_iter().map(|launch| planner.launch(launch, &prepare, None)).collect::<Result<_, _>>()?;
    Ok(Plan { scratch, prepare, launches })
}

/// The tensor that an argument points to.
fn tensor_of(arg: &LaunchArg) -> Option<TensorName> {
    match arg {
        LaunchArg::Tensor(name) | LaunchArg::TensorMap(TensorMap { tensor: name, .. }) => Some(*name),
        _ => None,
    }
}

/// The inputs that a launch is given, in order, each once.
fn inputs_of(launch: &Launch) -> BTreeSet<usize> {
    let tensors = launch.args.iter().filter_map(tensor_of);
    tensors.filter_map(|name| if let TensorName::Input(index) = name { Some(index) } else { None }).collect()
}

fn check_outputs<'a>(outputs: usize, launches: impl Iterator<Item = &'a Launch>) -> Result<(), PlanError> {
    let given: BTreeSet<TensorName> =
        launches.flat_map(|launch| &launch.args).filter_map(tensor_of).collect();
    match (0..outputs).map(TensorName::Output).find(|name| !given.contains(name)) {
        Some(name) => Err(PlanError::OutputUnused { name }),
        None => Ok(()),
    }
}

/// Whether the tensors that a header names exist.
struct Check {
    inputs: usize,
    outputs: usize,
}

impl Check {
    fn tensor(&self, place: &str, name: TensorName) -> Result<(), PlanError> {
        let exists = match name {
            TensorName::Input(index) => index < self.inputs,
            TensorName::Output(index) => index < self.outputs,
        };
        if exists {
            return Ok(());
        }
        Err(PlanError::NoTensor { place: place.to_owned(), name, inputs: self.inputs, outputs: self.outputs })
    }

    fn expr(&self, place: &str, expr: &Expr) -> Result<(), PlanError> {
        let mut first = Ok(());
        expr.for_each_name(&mut |mention| {
            if let Mention::Tensor(name) = mention
                && first.is_ok()
                && let Some(name) = TensorName::parse(name)
            {
                first = self.tensor(place, name);
            }
        });
        first
    }

    fn launch(&self, launch: &Launch) -> Result<(), PlanError> {
        let place = format!("launch of `{}`", launch.entry);
        let Launch { when, grid, block, shared, cluster, args, .. } = launch;
        let mut exprs: Vec<&Expr> =
            when.iter().chain(grid).chain(block).chain(shared).chain(cluster).collect();
        for arg in args {
            match arg {
                LaunchArg::Int(expr) => exprs.push(expr),
                LaunchArg::TensorMap(map) => exprs.extend(&map.extents),
                _ => {}
            }
            tensor_of(arg).map_or(Ok(()), |name| self.tensor(&place, name))?;
        }
        exprs.into_iter().try_for_each(|expr| self.expr(&place, expr))
    }
}

/// What hardware of every supported kind takes; the device may take less and says so at the launch.
mod most {
    pub(super) const GRID: [i64; 3] = [(1 << 31) - 1, 65_535, 65_535];
    pub(super) const BLOCK: [i64; 3] = [1024, 1024, 64];
    pub(super) const THREADS: i64 = 1024;
    pub(super) const CLUSTER: i64 = 16;
    pub(super) const BOX: i64 = 256;
}

struct Planner<'a> {
    file: &'a KernelFile,
    scope: Scope<'a>,
}

impl Planner<'_> {
    fn value(&self, place: &str, expr: &Expr) -> Result<i64, PlanError> {
        expr.evaluate(&self.scope).map_err(|source| PlanError::Evaluate {
            place: place.to_owned(),
            expr: expr.to_string(),
            source,
        })
    }

    fn numel(&self, name: &str, size: &Expr) -> Result<u64, PlanError> {
        let place = format!("size of `{name}`");
        let numel = self.value(&place, size)?;
        if !(0..=MAX_BUFFER_NUMEL).contains(&numel) {
            return Err(PlanError::BufferSize { place: format!("`{name}`"), numel });
        }
        Ok(numel as u64)
    }

    fn scratch(&self) -> Result<Vec<ScratchBuffer>, PlanError> {
        let buffers = self.file.scratch.iter();
        buffers
            .map(|(name, scratch)| {
                let numel = self.numel(name, &scratch.size)?;
                Ok(ScratchBuffer { name: name.clone(), dtype: scratch.dtype, numel, zero: scratch.zero })
            })
            .collect()
    }

    fn kept(&self, launch: &Launch) -> Result<bool, PlanError> {
        match &launch.when {
            Some(when) => Ok(self.value(&format!("`when` of `{}`", launch.entry), when)? != 0),
            None => Ok(true),
        }
    }

    fn prepare(&self, step: &Prepare, made: &[PlannedPrepare]) -> Result<PlannedPrepare, PlanError> {
        let mut inputs = inputs_of(&step.launch);
        // A step over an earlier step's buffer depends on what that one read.
        for arg in &step.launch.args {
            if let LaunchArg::Prepared(name) = arg
                && let Some(before) = made.iter().find(|before| before.name == *name)
            {
                inputs.extend(&before.inputs);
            }
        }
        Ok(PlannedPrepare {
            name: step.output.clone(),
            dtype: step.dtype,
            numel: self.numel(&step.output, &step.size)?,
            inputs: inputs.into_iter().collect(),
            launch: self.launch(&step.launch, made, Some(&step.output))?,
        })
    }

    /// `output` is the buffer that a prepare step is about to make; it follows those in `made`.
    fn launch(
        &self,
        launch: &Launch,
        made: &[PlannedPrepare],
        output: Option<&str>,
    ) -> Result<PlannedLaunch, PlanError> {
        let entry = &launch.entry;
        let grid = self.extents(entry, "grid", &launch.grid, most::GRID)?;
        let block = self.extents(entry, "block", &launch.block, most::BLOCK)?;
        in_range(|| format!("threads of a block of `{entry}`"), block.iter().product(), 1, most::THREADS)?;
        let shared = match &launch.shared {
            Some(expr) => {
                let place = format!("shared memory of `{entry}`");
                let value = self.value(&place, expr)?;
                in_range(|| place, value, 0, self.scope.device.shared.max(0))?
            }
            None => 0,
        };
        let args =
            launch.args.iter().map(|arg| self.arg(entry, arg, made, output)).collect::<Result<_, _>>()?;
        Ok(PlannedLaunch {
            entry: entry.clone(),
            grid,
            block,
            shared,
            cluster: self.cluster(launch, grid)?,
            cooperative: launch.cooperative,
            args,
        })
    }

    fn extents(
        &self,
        entry: &str,
        what: &str,
        exprs: &[Expr],
        most: [i64; 3],
    ) -> Result<[i64; 3], PlanError> {
        let mut extents = [1; 3];
        for (((extent, expr), high), axis) in extents.iter_mut().zip(exprs).zip(most).zip(["x", "y", "z"]) {
            let place = format!("{what} {axis} of `{entry}`");
            let value = self.value(&place, expr)?;
            *extent = in_range(|| place, value, 1, high)?;
        }
        Ok(extents)
    }

    fn cluster(&self, launch: &Launch, grid: [i64; 3]) -> Result<Option<[i64; 3]>, PlanError> {
        if launch.cluster.is_empty() {
            return Ok(None);
        }
        let entry = &launch.entry;
        let cluster = self.extents(entry, "cluster", &launch.cluster, [most::CLUSTER; 3])?;
        in_range(|| format!("blocks of a cluster of `{entry}`"), cluster.iter().product(), 1, most::CLUSTER)?;
        for ((value, cluster), axis) in grid.into_iter().zip(cluster).zip(["x", "y", "z"]) {
            if value % cluster != 0 {
                return Err(PlanError::Cluster {
                    place: format!("grid {axis} of `{entry}`"),
                    value,
                    cluster,
                });
            }
        }
        Ok(Some(cluster))
    }

    fn arg(
        &self,
        entry: &str,
        arg: &LaunchArg,
        made: &[PlannedPrepare],
        output: Option<&str>,
    ) -> Result<PlannedArg, PlanError> {
        Ok(match arg {
            LaunchArg::Tensor(TensorName::Input(index)) => PlannedArg::Input(*index),
            LaunchArg::Tensor(TensorName::Output(index)) => PlannedArg::Output(*index),
            // Names were resolved when the file was read, and scratch buffers are planned in the same order.
            LaunchArg::Scratch(name) => {
                PlannedArg::Scratch(self.file.scratch.keys().take_while(|known| *known != name).count())
            }
            LaunchArg::Prepared(name) => match made.iter().position(|step| step.name == *name) {
                Some(index) => PlannedArg::Prepared(index),
                None if output == Some(name.as_str()) => PlannedArg::Prepared(made.len()),
                None => return Err(PlanError::NotPrepared { entry: entry.to_owned(), name: name.clone() }),
            },
            LaunchArg::Int(expr) => PlannedArg::Int(self.value(&format!("argument of `{entry}`"), expr)?),
            LaunchArg::Threads => PlannedArg::Threads,
            LaunchArg::TensorMap(map) => self.tensor_map(entry, map)?,
        })
    }

    fn tensor_map(&self, entry: &str, map: &TensorMap) -> Result<PlannedArg, PlanError> {
        let place = format!("tensor map of `{entry}`");
        let name = map.tensor.to_string();
        let meta = self.scope.tensors.iter().find(|(known, _)| *known == name).map(|(_, meta)| meta.clone());
        let meta = meta.ok_or_else(|| PlanError::NoTensor {
            place: place.clone(),
            name: map.tensor,
            inputs: 0,
            outputs: 0,
        })?;
        if meta.shape.len() != map.extents.len() {
            let (got, rank) = (map.extents.len(), meta.shape.len());
            return Err(PlanError::BoxRank { place, name: map.tensor, got, rank });
        }
        let extents = map.extents.iter().map(|expr| {
            let value = self.value(&place, expr)?;
            in_range(|| format!("box of the {place}"), value, 1, most::BOX)
        });
        let extents = extents.collect::<Result<_, _>>()?;
        Ok(PlannedArg::TensorMap { tensor: map.tensor, meta, extents, swizzle: map.swizzle })
    }
}

fn in_range(place: impl FnOnce() -> String, value: i64, low: i64, high: i64) -> Result<i64, PlanError> {
    if (low..=high).contains(&value) {
        Ok(value)
    } else {
        Err(PlanError::Range { place: place(), value, low, high })
    }
}
