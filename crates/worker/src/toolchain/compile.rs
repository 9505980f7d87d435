//! One confined run of a compiler.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::thread::JoinHandle;

use super::{BuildError, BuildLimits, diagnostics};
use crate::child::{self, End, Group};
use crate::roles::{NOT_CONFINED, NOT_CONFINED_TEXT};
use crate::sandbox::{Confinement, Domain, launch_command};

/// Bytes kept of what a compiler prints; the rest is read and dropped.
const OUTPUT: usize = 64 * 1024;
/// The signal for "processor time used up".
const SIGXCPU: i32 = 24;

/// A compiler to run in a folder.
pub(super) struct Run<'a> {
    pub(super) program: &'a Path,
    pub(super) args: Vec<String>,
    pub(super) folder: &'a Path,
    pub(super) limits: &'a BuildLimits,
}

/// What a successful run printed.
#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) stdout: String,
    pub(super) diagnostics: String,
}

impl Run<'_> {
    /// Runs it in a builder child.
    pub(super) fn confined(&self) -> Result<Compiled, BuildError> {
        let io = |what| move |source| BuildError::Io { what, source };
        let confinement = Confinement {
            write: vec![self.folder.to_owned()],
            cpu_seconds: Some(self.limits.cpu.as_secs().max(1)),
            file_bytes: Some(self.limits.file_bytes),
            ..Confinement::new(Domain::Builder)
        };
        let mut command =
            launch_command(&confinement, self.program).map_err(|e| BuildError::Sandbox { what: e.what })?;
        command.args(&self.args).current_dir(self.folder);
        // A relative TMPDIR, because the folders above may be closed to the builder's user.
        command.env("PATH", search_path(self.program)).env("LANG", "C").env("TMPDIR", ".");
        command.env("CCACHE_DISABLE", "1");
        // Nothing is ever written to standard input: its end is how the builder learns of ours.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut started = child::spawn(command).map_err(io("start the builder"))?;
        let mut group = Group::new(&started).map_err(io("start the builder"))?;
        let (out, err) = (started.stdout.take().map(collect), started.stderr.take().map(collect));
        let end = group.wait(self.limits.wall);
        // With the whole group gone nothing holds the pipes open.
        group.kill();
        let (stdout, stderr) = (text(out), text(err));
        let timeout = BuildError::Timeout { seconds: self.limits.wall.as_secs_f64() };
        match end {
            None | Some(End::Signal(SIGXCPU)) => Err(timeout),
            Some(End::Code(0)) => Ok(Compiled { stdout, diagnostics: diagnostics::clean(&stderr) }),
            Some(End::Code(code))
                if code == i32::from(NOT_CONFINED) && stderr.contains(NOT_CONFINED_TEXT) =>
            {
                Err(BuildError::Sandbox { what: stderr.replace(NOT_CONFINED_TEXT, "").trim().to_owned() })
            }
            // The driver reports the end of the compiler proper in words only.
            Some(End::Code(_)) if stderr.contains("CPU time limit exceeded") => Err(timeout),
            Some(End::Code(_)) => Err(BuildError::Compiler { diagnostics: diagnostics::clean(&stderr) }),
            Some(End::Signal(signal)) => {
                Err(BuildError::Crashed { signal, diagnostics: diagnostics::clean(&stderr) })
            }
        }
    }
}

/// The compiler's own folder first: a toolchain outside the system finds its assembler there.
fn search_path(program: &Path) -> String {
    let own = program.parent().and_then(Path::to_str).unwrap_or("/usr/bin");
    format!("{own}:/usr/local/bin:/usr/bin:/bin")
}

fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut kept, mut chunk) = (vec![], [0; 4096]);
        loop {
            match pipe.read(&mut chunk) {
                Ok(0) => return kept,
                Ok(n) => {
                    let room = OUTPUT - kept.len();
                    kept.extend(&chunk[..n.min(room)]);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return kept,
            }
        }
    })
}

fn text(reader: Option<JoinHandle<Vec<u8>>>) -> String {
    let bytes = reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
