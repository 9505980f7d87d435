//! Zygotes of everything that is timed: PyTorch's own forms unconfined as the user's own code,
//! whatever holds a kernel of ours confined.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use autokernel_core::region::Region;
use autokernel_judge::{Child, Contestant, Zygote};
use autokernel_worker::python::{self, Peer, PeerError};
use autokernel_worker::sandbox::{Confinement, Domain, Wall};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::EngineError;
use crate::options::ModelSpec;
use crate::session::{Tools, beside, spawn_trusted};

/// Longest wait for imports, construction and compilation of one form.
const PREPARE_TIMEOUT: Duration = Duration::from_mins(20);

/// The forms of a whole model on a CPU, plain ones first.
pub(crate) const PLAIN_FORMS: [&str; 2] = ["eager", "compile"];
/// The forms that hold kernels of ours.
pub(crate) const OUR_FORMS: [&str; 2] = ["ours+eager", "ours+inductor"];

/// What a zygote holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Subject<'a> {
    /// A region under `eager` or `inductor`.
    Baseline { region: &'a Region, how: &'a str },
    /// The packaged operator of a region.
    Packaged {
        region: &'a Region,
        package: &'a Path,
        /// The folder of the task's inputs; its answers lie elsewhere, out of the child's reach.
        inputs: &'a Path,
    },
    /// A whole model without kernels of ours.
    Plain { model: &'a ModelSpec, seed: u64, form: &'a str },
    /// A whole model with them.
    Ours { model: &'a ModelSpec, seed: u64, form: &'a str, package: &'a Path },
}

impl Subject<'_> {
    fn body(&self, ahead: bool) -> Value {
        let mut body = self.fields();
        body["ahead"] = ahead.into();
        body
    }

    /// For a subject with code that nobody trusts, all that its child may read besides Python itself:
    /// no right answer lies in any of these. `None` for PyTorch's own forms.
    fn readable(&self) -> Option<Vec<PathBuf>> {
        match self {
            Self::Baseline { .. } | Self::Plain { .. } => None,
            Self::Packaged { package, inputs, .. } => Some(vec![(*package).to_owned(), (*inputs).to_owned()]),
            Self::Ours { package, model, .. } => {
                Some([(*package).to_owned()].into_iter().chain(model_folder(model)).collect())
            }
        }
    }

    /// What stands around its children once they are about to run; `None` for PyTorch's own forms.
    const fn wall(&self) -> Option<Wall> {
        match self {
            Self::Baseline { .. } | Self::Plain { .. } => None,
            Self::Packaged { .. } => Some(Wall::Operator),
            Self::Ours { .. } => Some(Wall::Model),
        }
    }

    fn fields(&self) -> Value {
        match self {
            Self::Baseline { region, how } => json!({ "kind": "region", "region": region, "how": how }),
            Self::Packaged { region, package, .. } => {
                json!({ "kind": "region", "region": region, "how": "package", "package": package })
            }
            Self::Plain { model, seed, form } => {
                json!({ "kind": "model", "model": model.spec, "inputs": model.inputs, "seed": seed, "form": form })
            }
            Self::Ours { model, seed, form, package } => json!({
                "kind": "model", "model": model.spec, "inputs": model.inputs, "seed": seed, "form": form, "package": package,
            }),
        }
    }
}

/// A zygote that is ready to fork.
pub(crate) struct Prepared {
    pub(crate) zygote: Shared,
    pub(crate) compile_s: f64,
    /// For a model with kernels of ours: in how many places each region was found.
    pub(crate) places: Option<BTreeMap<String, usize>>,
}

/// A zygote's answer to `prepare`.
#[derive(Deserialize)]
struct Ready {
    compile_seconds: f64,
    #[serde(default)]
    places: Option<BTreeMap<String, usize>>,
}

/// Starts a zygote and compiles its subject; nothing of it has run afterwards.
///
/// Where compiling itself runs kernels (and so leaves OpenMP threads, beside which nothing can fork),
/// a new zygote leaves the compiling to its children's warm-up.
pub(crate) fn prepare(tools: &Tools, subject: &Subject<'_>, scratch: &Path) -> Result<Prepared, EngineError> {
    match prepare_once(tools, subject, scratch, true) {
        Err(EngineError::Peer(PeerError::Remote { kind, .. })) if kind == "threads_alive" => {
            prepare_once(tools, subject, scratch, false)
        }
        prepared => prepared,
    }
}

fn prepare_once(
    tools: &Tools,
    subject: &Subject<'_>,
    scratch: &Path,
    ahead: bool,
) -> Result<Prepared, EngineError> {
    let _beside = beside()?;
    let mut peer = match subject.readable() {
        None => spawn_trusted(tools, "zygote", scratch)?,
        Some(read) => spawn_confined(tools, read, scratch)?,
    };
    if let Some(wall) = subject.wall() {
        peer.wall_children(wall);
    }
    let ready = compile(&mut peer, tools, subject, ahead)?;
    Ok(Prepared { zygote: Shared::new(peer), compile_s: ready.compile_seconds, places: ready.places })
}

fn compile(peer: &mut Peer, tools: &Tools, subject: &Subject<'_>, ahead: bool) -> Result<Ready, EngineError> {
    let reply = peer.request(
        "prepare",
        json!({ "subject": subject.body(ahead), "threads": tools.threads }),
        PREPARE_TIMEOUT,
    )?;
    Ok(serde_json::from_value(reply)?)
}

/// The folder of a model's file, which a confined child has to read.
fn model_folder(model: &ModelSpec) -> Option<PathBuf> {
    model.file()?.parent().filter(|folder| folder.is_absolute()).map(Path::to_owned)
}

/// A Python child for code that nobody trusts. What it compiles goes to a folder of its own, which
/// no trusted process ever reads.
fn spawn_confined(tools: &Tools, read: Vec<PathBuf>, scratch: &Path) -> Result<Peer, EngineError> {
    let own = tempfile::Builder::new().prefix("deploy-").tempdir_in(scratch)?.keep();
    let mut confinement = Confinement::new(Domain::Deployment);
    confinement.read = read;
    confinement.write = vec![own.clone()];
    let env: Vec<(OsString, OsString)> = vec![
        ("TORCHINDUCTOR_CACHE_DIR".into(), own.join("inductor").into_os_string()),
        ("TRITON_CACHE_DIR".into(), own.join("triton").into_os_string()),
        ("TMPDIR".into(), own.clone().into_os_string()),
        ("HOME".into(), own.clone().into_os_string()),
        ("XDG_CACHE_HOME".into(), own.clone().into_os_string()),
    ];
    Ok(python::spawn(&tools.interpreter, "zygote", Some(&confinement), &own, &env)?)
}

/// A zygote that outlives the comparison that it takes part in.
#[derive(Clone, Debug)]
pub(crate) struct Shared(Rc<RefCell<Peer>>);

impl Shared {
    pub(crate) fn new(peer: Peer) -> Self {
        Self(Rc::new(RefCell::new(peer)))
    }

    pub(crate) fn alive(&self) -> bool {
        self.0.borrow().alive()
    }

    /// Gives it another subject.
    pub(crate) fn prepare(&self, tools: &Tools, subject: &Subject<'_>) -> Result<(), EngineError> {
        let _beside = beside()?;
        compile(&mut self.0.borrow_mut(), tools, subject, true).map(|_| ())
    }

    /// As one who runs.
    pub(crate) fn contestant(&self, name: &str, checked: bool) -> Contestant {
        Contestant { name: name.to_owned(), zygote: Box::new(self.clone()), checked }
    }
}

impl Zygote for Shared {
    fn fork(&mut self) -> Result<Box<dyn Child>, PeerError> {
        Ok(Box::new(self.0.borrow_mut().fork()?))
    }
}

/// What evidence says of the surroundings.
pub(crate) fn environment(tools: &Tools) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("device".to_owned(), tools.device.name.clone()),
        ("cores".to_owned(), tools.device.cores.to_string()),
        ("threads".to_owned(), tools.threads.to_string()),
        ("torch".to_owned(), tools.interpreter.torch.clone()),
        ("python".to_owned(), tools.interpreter.python.clone()),
        ("compiler".to_owned(), tools.toolchain.version.clone()),
        ("grad_mode".to_owned(), "no_grad".to_owned()),
        ("autokernel".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        // A result made without confinement would be marked here.
        ("sandbox".to_owned(), tools.confinement.clone()),
        ("kernel".to_owned(), kernel_release()),
        ("shared_core".to_owned(), shared_core(tools)),
    ])
}

/// The operating system's version, as it names itself.
fn kernel_release() -> String {
    let text = fs_err::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    if text.trim().is_empty() { "unknown".to_owned() } else { text.trim().to_owned() }
}

/// How much two threads slow each other, in words.
pub(crate) fn shared_core(tools: &Tools) -> String {
    match tools.device.together {
        Some(factor) => format!("{factor:.2}"),
        None => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use autokernel_core::region::{REGION_SCHEMA, RegionId};

    use super::*;

    #[test]
    fn a_child_with_a_candidate_reads_inputs_and_never_answers() {
        let region = Region {
            schema: REGION_SCHEMA.to_owned(),
            id: RegionId(String::new()),
            inputs: vec![],
            nodes: vec![],
            outputs: vec![],
        };
        let (package, task) = (Path::new("/s/verdict-1/package"), Path::new("/s/task-1"));
        let inputs = task.join("inputs");
        let packaged = Subject::Packaged { region: &region, package, inputs: &inputs };
        let read = packaged.readable().unwrap();
        let answers = task.join("answers/set0-truth0");
        assert!(read.iter().any(|folder| inputs.join("set0-in0").starts_with(folder)));
        assert!(!read.iter().any(|folder| answers.starts_with(folder)), "{read:?}");

        let model = ModelSpec { spec: "/home/u/.pyenv/m/model.py:Net".to_owned(), inputs: vec![] };
        let ours = Subject::Ours { model: &model, seed: 0, form: "ours+eager", package };
        assert_eq!(ours.readable().unwrap(), [package, Path::new("/home/u/.pyenv/m")]);
        assert!(Subject::Plain { model: &model, seed: 0, form: "eager" }.readable().is_none());
    }
}
