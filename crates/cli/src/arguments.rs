//! The command line as data.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

/// Makes a PyTorch model faster, with proof.
#[derive(Debug, Parser)]
#[command(name = "autokernel", version, arg_required_else_help = true, propagate_version = true)]
pub(crate) struct Arguments {
    /// How results are printed; progress always goes to stderr.
    #[arg(long, value_enum, default_value = "text", global = true)]
    pub(crate) format: Format,
    /// Print no progress.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables for people.
    Text,
    /// One JSON document on stdout, nothing else; see docs/json.md.
    Json,
}

/// Which Python runs the model.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PythonArguments {
    /// Interpreter that can import the model; default: $AUTOKERNEL_PYTHON, the active environment, .venv, python3.
    #[arg(long, value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
    /// Make an own environment with torch when no usable one is found (about 1.5 GB on disk with a CPU build, which is
    /// tried first where there is no NVIDIA device; about 6 GB otherwise).
    #[arg(long)]
    pub(crate) yes: bool,
    /// A package that the model needs, as pip names it; repeatable. It is put into a light environment over the
    /// interpreter, which itself is not changed.
    #[arg(long, value_name = "PACKAGE", value_parser = requirement)]
    pub(crate) with: Vec<String>,
}

fn requirement(text: &str) -> Result<String, String> {
    let known = autokernel_worker::python::is_requirement(text);
    known.then(|| text.to_owned()).ok_or_else(|| "name a package, such as timm or timm==1.0".to_owned())
}

/// Which model.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModelArguments {
    /// `file.py` (with Model, get_inputs and get_init_inputs, or build()), `file.py:Name`, `package.module:factory`,
    /// or `program.pt2` of torch.export.
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// An input's shape, element type and range of values, such as 1x128:int64:0..512; once for each input, in order,
    /// or by name as in mask=1x128:bool.
    #[arg(long = "input", value_name = "[NAME=]SHAPE[:DTYPE[:LOW..HIGH]]", value_parser = autokernel_engine::parse_input)]
    pub(crate) inputs: Vec<String>,
    /// Threads of the model and of every kernel [default: all cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Seed of the model's factories.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) python: PythonArguments,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a model faster: find the costly parts, write and measure kernels, give back a package.
    Optimize {
        #[command(flatten)]
        model: ModelArguments,
        /// Where it runs; this version knows the CPU.
        #[arg(long, value_enum, default_value = "cpu")]
        device: Device,
        /// Who writes kernels; this version has the search agent.
        #[arg(long, value_enum, default_value = "auto")]
        agent: Agent,
        /// Time for the search, such as 10m, 90s, 1h; measuring the whole model comes on top.
        #[arg(long, default_value = "10m", value_parser = autokernel_engine::parse_budget, value_name = "TIME")]
        budget: std::time::Duration,
        /// Folder of the package [default: packages/RUN]; must not exist.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Show where a model's time goes and what could be won.
    Profile {
        #[command(flatten)]
        model: ModelArguments,
        /// Also put every region back as its own operators, and see whether outputs and gradients are the model's.
        #[arg(long)]
        check: bool,
    },
    /// Measure every claim of a package again, side by side, on this machine.
    Bench {
        /// Folder of the package.
        #[arg(value_name = "PACKAGE")]
        package: PathBuf,
        /// The model, when its file is no longer where it was.
        #[arg(long, value_name = "MODEL")]
        model: Option<String>,
        #[command(flatten)]
        python: PythonArguments,
    },
    /// Print what an agent is given for one region.
    Brief {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN")]
        run: String,
        /// A region's hash, the beginning of it, or its rank from 0.
        #[arg(value_name = "REGION")]
        region: String,
    },
    /// List the regions of a run: what can be won where, and what is won.
    Tasks {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN", default_value = "last")]
        run: String,
    },
    /// Search the parameters of one kernel file by measurement, then judge the best point.
    Sweep {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN")]
        run: String,
        /// A region's hash, the beginning of it, or its rank from 0.
        #[arg(value_name = "REGION")]
        region: String,
        /// The kernel file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Time for the search; the verdict comes on top.
        #[arg(long, default_value = "60s", value_parser = autokernel_engine::parse_budget, value_name = "TIME")]
        budget: std::time::Duration,
        #[command(flatten)]
        python: PythonArguments,
    },
    /// Tell what was tried on one region and what came of it.
    History {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN")]
        run: String,
        /// A region's hash, the beginning of it, or its rank from 0.
        #[arg(value_name = "REGION")]
        region: String,
    },
    /// Print what is known about writing fast and correct kernels.
    Playbook {
        /// Words to look for, such as `softmax`; without any, the titles of all pages.
        #[arg(value_name = "WORD")]
        query: Vec<String>,
    },
    /// Put the winners of a run into its package and measure the whole model, without searching further.
    Finish {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN", default_value = "last")]
        run: String,
        /// Folder of the package [default: the run's]; must not exist.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        #[command(flatten)]
        python: PythonArguments,
    },
    /// Serve the desk of a run to a coding agent over the Model Context Protocol, on stdin and stdout.
    Mcp {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN", default_value = "last")]
        run: String,
        /// The name under which its kernels are stored.
        #[arg(long, value_name = "NAME", default_value = "mcp")]
        name: String,
        #[command(flatten)]
        python: PythonArguments,
    },
    /// Put one kernel file before the judge, or decide a stored verdict again.
    Judge {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN", required_unless_present = "replay")]
        run: Option<String>,
        /// A region's hash, the beginning of it, or its rank from 0.
        #[arg(value_name = "REGION", required_unless_present = "replay")]
        region: Option<String>,
        /// The kernel file.
        #[arg(value_name = "FILE", required_unless_present = "replay")]
        file: Option<PathBuf>,
        /// Decide again from stored evidence alone: a file, the hash that `judge` printed, or RUN/REGION for a region's newest.
        #[arg(long, value_name = "VERDICT", conflicts_with_all = ["run", "region", "file"])]
        replay: Option<String>,
        #[command(flatten)]
        python: PythonArguments,
    },
    /// List runs.
    Runs,
    /// Go on with a run that was stopped or killed.
    Resume {
        /// A run's name, the beginning of it, or `last`.
        #[arg(value_name = "RUN", default_value = "last")]
        run: String,
        #[command(flatten)]
        python: PythonArguments,
    },
    /// Check this machine: Python, torch, compiler, confinement, cores and rates.
    Doctor {
        #[command(flatten)]
        python: PythonArguments,
    },
}

/// Where a model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The processor.
    Cpu,
}

/// Who writes kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Agent {
    /// The search agent.
    Auto,
    /// The search agent.
    Search,
}
