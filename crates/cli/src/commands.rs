//! One function a command: arguments to engine, result to stdout.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use autokernel_agent::mcp::serve_stdio;
use autokernel_agent::{Answer, Attempt, Desk, DeskError, Proof};
use autokernel_engine::{
    Brief, DeskSession, ModelSpec, OptimizeOptions, PutBackReport, PythonChoice, Tools, bench, brief, doctor,
    is_running, judge_file, optimize, playbook, profile, replay, resume,
};
use autokernel_store::{RunStatus, Store};
use serde::Serialize;
use serde_json::json;

use crate::arguments::{Arguments, Command, Format, ModelArguments, PythonArguments};
use crate::exit::Failure;
use crate::progress::{Lines, stop_on_signal};
use crate::tables::{self, line};

/// Runs the command.
pub(crate) fn run(arguments: Arguments) -> Result<(), Failure> {
    let format = arguments.format;
    let mut lines = Lines::new(arguments.quiet);
    match arguments.command {
        Command::Optimize { model, budget, out, .. } => {
            let out = package_folder(out)?;
            let choice = choice(&model.python);
            let tools = Tools::find(&choice, model.threads.map(usize::from), &mut lines)?;
            let options = OptimizeOptions {
                model: spec(&model),
                // With packages on top the run belongs to the environment that has them.
                python: if choice.with.is_empty() {
                    model.python.python.clone()
                } else {
                    Some(tools.interpreter.path.clone())
                },
                budget_s: budget.as_secs(),
                out,
                threads: tools.threads,
                seed: model.seed,
            };
            let mut store = open_store()?;
            stop_on_signal();
            let report = optimize(&tools, &options, &mut store, &mut lines)?;
            show(format, &report, tables::optimize)
        }
        Command::Resume { run, python } => {
            let mut store = open_store()?;
            stop_on_signal();
            let report = resume(&choice(&python), &mut store, &run, &mut lines)?;
            show(format, &report, tables::optimize)
        }
        Command::Profile { model, check } => {
            let tools = Tools::find(&choice(&model.python), model.threads.map(usize::from), &mut lines)?;
            let report = profile(&tools, &spec(&model), model.seed, check, &mut lines)?;
            let holds = report.put_back.as_ref().is_none_or(PutBackReport::holds);
            show(format, &report, tables::profile)?;
            if holds { Ok(()) } else { Err(Failure::not_confirmed()) }
        }
        Command::Bench { package, model, python } => {
            let tools = Tools::find(&choice(&python), None, &mut lines)?;
            let report = bench(tools, &package, model.as_deref(), &mut lines)?;
            let holds = report.claims.iter().all(|claim| claim.holds);
            show(format, &report, tables::bench)?;
            if holds { Ok(()) } else { Err(Failure::not_confirmed()) }
        }
        Command::Brief { run, region } => {
            let report = brief(&open_store()?, &run, &region)?;
            show(format, &report, |report: &Brief| line(report.text.trim_end()))
        }
        Command::Judge { replay: Some(wanted), .. } => {
            let report = replay(&open_store()?, &wanted)?;
            let agrees = report.agrees;
            show(format, &report, |report| line(report.text.trim_end()))?;
            if agrees { Ok(()) } else { Err(Failure::not_confirmed()) }
        }
        Command::Judge { run, region, file, python, .. } => {
            // The argument parser asks for all three.
            let (run, region) = (run.unwrap_or_default(), region.unwrap_or_default());
            let text = read_kernel_file(&file.unwrap_or_default())?;
            let mut store = open_store()?;
            let report = judge_file(&choice(&python), &mut store, &run, &region, &text, &mut lines)?;
            let faster = report.verdict == "faster";
            show(format, &report, |report| line(report.text.trim_end()))?;
            if faster { Ok(()) } else { Err(Failure::not_confirmed()) }
        }
        command @ (Command::Tasks { .. }
        | Command::History { .. }
        | Command::Playbook { .. }
        | Command::Finish { .. }
        | Command::Sweep { .. }
        | Command::Mcp { .. }) => at_the_desk(command, format, lines),
        Command::Runs => runs(format),
        Command::Doctor { python } => {
            let report = doctor(&choice(&python));
            let fine = report.fine;
            show(format, &report, |report| line(report.text.trim_end()))?;
            if fine { Ok(()) } else { Err(Failure::not_confirmed()) }
        }
    }
}

/// What an agent does, as commands.
fn at_the_desk(command: Command, format: Format, lines: Lines) -> Result<(), Failure> {
    match command {
        Command::Tasks { run } => ask(format, lines, &run, None, Desk::tasks),
        Command::History { run, region } => ask(format, lines, &run, None, |desk| desk.history(&region)),
        Command::Playbook { query } => {
            let answer = playbook(&query.join(" "));
            show(format, &answer.data, |_| line(answer.text.trim_end()))
        }
        Command::Finish { run, out, python } => {
            let out = out.map(|out| package_folder(Some(out))).transpose()?;
            ask(format, lines, &run, Some(&python), |desk| desk.finish_at(out))
        }
        Command::Sweep { run, region, file, budget, python } => {
            let source = read_kernel_file(&file)?;
            let attempt = Attempt { region, source, params: BTreeMap::new(), proof: Proof::Always };
            let mut faster = false;
            ask(format, lines, &run, Some(&python), |desk| {
                let answer = desk.sweep(&attempt, budget.as_secs())?;
                faster = answer.data["verdict"] == "faster";
                Ok(answer)
            })?;
            if faster { Ok(()) } else { Err(Failure::not_confirmed()) }
        }
        Command::Mcp { run, name, python } => {
            // A run that isn't there is said at once, and not to the first request.
            open_store()?.run(&run)?;
            let (choice, quiet) = (choice(&python), lines.quiet());
            serve_stdio(move || {
                let seat = open_store().and_then(|store| {
                    let lines = Box::new(Lines::new(quiet));
                    Ok(DeskSession::new(store, &run, &name, choice, lines)?)
                });
                seat.map(|desk| Box::new(desk) as Box<dyn Desk>)
                    .map_err(|failure| failure.message().to_owned())
            })
            .map_err(|error| {
                Failure::usage(error.to_string(), "start it from a client of the Model Context Protocol")
            })
        }
        _ => Ok(()),
    }
}

fn show<T: Serialize>(format: Format, report: &T, text: impl FnOnce(&T)) -> Result<(), Failure> {
    match format {
        Format::Json => line(&serde_json::to_string_pretty(report)?),
        Format::Text => text(report),
    }
    Ok(())
}

/// One request at the desk of a run.
fn ask(
    format: Format,
    lines: Lines,
    run: &str,
    python: Option<&PythonArguments>,
    request: impl FnOnce(&mut DeskSession) -> Result<Answer, DeskError>,
) -> Result<(), Failure> {
    let choice = python.map(choice).unwrap_or_default();
    stop_on_signal();
    let mut desk = DeskSession::new(open_store()?, run, "person", choice, Box::new(lines))?;
    let answer = request(&mut desk)?;
    show(format, &answer.data, |_| line(answer.text.trim_end()))
}

fn open_store() -> Result<Store, Failure> {
    Ok(Store::open(&Store::default_root())?)
}

fn choice(python: &PythonArguments) -> PythonChoice {
    PythonChoice { explicit: python.python.clone(), may_make: python.yes, with: python.with.clone() }
}

fn spec(model: &ModelArguments) -> ModelSpec {
    ModelSpec::new(&model.model, model.inputs.clone())
}

/// Where the package goes; an empty path means "named after the run".
fn package_folder(out: Option<PathBuf>) -> Result<PathBuf, Failure> {
    match out {
        Some(path) if path.exists() => Err(Failure::usage(
            format!("{} exists already", path.display()),
            "name a folder that does not exist; nothing is overwritten",
        )),
        Some(path) => Ok(std::path::absolute(&path).unwrap_or(path)),
        None => Ok(PathBuf::new()),
    }
}

fn read_kernel_file(path: &Path) -> Result<String, Failure> {
    let bytes =
        fs_err::read(path).map_err(|error| Failure::usage(error.to_string(), "name a kernel file"))?;
    String::from_utf8(bytes).map_err(|_| {
        Failure::usage(format!("{} is not UTF-8 text", path.display()), "a kernel file is source text")
    })
}

fn runs(format: Format) -> Result<(), Failure> {
    let store = open_store()?;
    let rows = store.runs()?;
    if format == Format::Json {
        let list: Vec<_> = rows
            .iter()
            .map(|run| {
                json!({
                    "run": run.id, "created": run.created, "status": run.status,
                    "model": run.options.get("model"), "chosen": run.result.as_ref().and_then(|result| result.pointer("/model/chosen")),
                    "speedup": run.result.as_ref().and_then(|result| result.pointer("/model/speedup")),
                    "package": run.result.as_ref().and_then(|result| result.get("package")),
                })
            })
            .collect();
        line(&serde_json::to_string_pretty(&json!({ "schema": "autokernel.runs/1", "runs": list }))?);
        return Ok(());
    }
    if rows.is_empty() {
        line("No runs yet. `autokernel optimize MODEL` makes one.");
    }
    for run in rows {
        let status = match run.status {
            RunStatus::Running if is_running(&store, &run.id) => "running",
            RunStatus::Running => "killed; `autokernel resume` goes on with it",
            RunStatus::Finished => "finished",
            RunStatus::Interrupted => "interrupted",
            RunStatus::Failed => "failed",
        };
        let speedup = run
            .result
            .as_ref()
            .and_then(|result| result.pointer("/model/speedup/vs_eager/value"))
            .and_then(serde_json::Value::as_f64)
            .map(|value| format!("  {value:.2}x over eager"))
            .unwrap_or_default();
        line(&format!("{}  {}  {status}{speedup}", run.id, run.created));
    }
    Ok(())
}
