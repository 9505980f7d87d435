//! The C++ compiler: find it, try it, run it confined on kernel files.
//!
//! A kernel's source is an attacker's text to a compiler, so the compiler runs in a builder child:
//! it reads the system's toolchain folders, writes one private folder, and has no network. It works
//! with relative paths inside that folder, so what it prints names no path of the machine.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use autokernel_core::kernel_file::{HEADERS, KernelFile, Params};
use rustix::fs::OFlags;

use crate::admission;
use compile::{Compiled, Run};

mod compile;
mod diagnostics;

/// Largest artefact.
const ARTEFACT_BYTES: u64 = 64 << 20;

/// How every kernel is compiled. Floating-point freedoms are those that keep each operation's own
/// rounding: no reassociation, no reciprocals, no "finite only".
const COMPILE: &[&str] = &[
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    // No unwinding, no type information, no guards: each would import something or need a start-up.
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-unwind-tables",
    "-fno-stack-protector",
    "-U_FORTIFY_SOURCE",
    "-fno-threadsafe-statics",
    "-fno-ident",
    "-g0",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-fdiagnostics-color=never",
    "-fmax-errors=20",
    "-iquote",
    "include",
    "-c",
    "kernel.cpp",
    "-o",
    "kernel.o",
];

/// How it is linked: in a step of its own, because `-fopenmp` would bring libgomp along even with
/// `-nostdlib`. The only library is the compiler's own static one, for wide integers and the like.
const LINK: &[&str] = &[
    "-shared",
    "-nostdlib",
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noexecstack",
    // Nothing but code where code can run: admission looks at all of it.
    "-Wl,-z,separate-code",
    "-Wl,--build-id=none",
    "kernel.o",
    "-o",
    "kernel.so",
    "-lgcc",
];

/// A kernel that uses what kernels use; a compiler that cannot build it is no use.
const TRIAL: &str = r#"/*@ autokernel 1
language = "c++"
[[launch]]
entry = "trial"
args = ["in0", "out0", "in0.numel", "threads"]
@*/
#include <cmath>
#include <cstdint>
#include <cstring>
extern "C" void trial(const float* in, float* out, int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) out[i] = std::exp(in[i]);
    std::memcpy(out, in, static_cast<std::size_t>(n != 0) * sizeof(float));
}
"#;

/// Limits of one build.
#[derive(Clone, Copy, Debug)]
pub struct BuildLimits {
    /// Wall-clock time after which the compiler and its helpers are killed.
    pub wall: Duration,
    /// Processor time of each compiler process.
    pub cpu: Duration,
    /// Size that no file it writes may exceed.
    pub file_bytes: u64,
}

impl Default for BuildLimits {
    fn default() -> Self {
        Self { wall: Duration::from_mins(2), cpu: Duration::from_mins(2), file_bytes: 256 << 20 }
    }
}

/// A compiler that has compiled and linked a trial kernel.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// Absolute path of the compiler.
    pub cxx: String,
    /// First line of what `--version` prints.
    pub version: String,
    /// What `-march=native` comes to here, such as `x86-64-v4`.
    pub isa: String,
}

/// What a build makes.
#[derive(Clone, Debug)]
pub struct Artefact {
    /// The shared object.
    pub bytes: Vec<u8>,
    /// BLAKE3 of the bytes, hexadecimal.
    pub id: String,
    /// What the compiler said, cleaned and capped.
    pub diagnostics: String,
    /// Wall-clock seconds that the build took.
    pub seconds: f64,
}

impl Artefact {
    /// One that was built before, from its bytes.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        let id = blake3::hash(&bytes).to_hex().to_string();
        Self { bytes, id, diagnostics: String::new(), seconds: 0.0 }
    }
}

/// Why there is no toolchain.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ToolchainError {
    #[error("no C++ compiler found (tried {})", tried.join(", "))]
    NotFound { tried: Vec<String> },
    #[error("no C++ compiler can build kernels: {}", failures.join("; "))]
    Unusable { failures: Vec<String> },
}

/// Why a build gave no artefact.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum BuildError {
    #[error("the compiler refused the kernel:\n{diagnostics}")]
    Compiler { diagnostics: String },
    #[error("the build took longer than {seconds} s")]
    Timeout { seconds: f64 },
    #[error("the compiler was ended by signal {signal}")]
    Crashed { signal: i32, diagnostics: String },
    #[error("the builder could not be confined: {what}")]
    Sandbox { what: String },
    #[error("a kernel in {0} is not for a C++ compiler")]
    Language(autokernel_core::kernel_file::Language),
    #[error("the parameters do not fit the kernel file")]
    Params(#[from] autokernel_core::kernel_file::ParamsError),
    #[error("the artefact is no plain file of at most {ARTEFACT_BYTES} bytes")]
    Artefact,
    #[error("cannot {what}")]
    Io { what: &'static str, source: std::io::Error },
}

impl Toolchain {
    /// Finds a compiler (`$CXX`, `c++`, `g++`, `clang++`) that can build a trial kernel.
    pub fn detect() -> Result<Self, ToolchainError> {
        let chosen = std::env::var("CXX").ok().filter(|name| !name.is_empty());
        let names = chosen.into_iter().chain(["c++", "g++", "clang++"].map(str::to_owned));
        let (mut tried, mut failures) = (vec![], vec![]);
        for name in names {
            match find_program(&name) {
                Some(path) => match Self::try_compiler(&path) {
                    Ok(toolchain) => return Ok(toolchain),
                    Err(why) => failures.push(format!("{name}: {why}")),
                },
                None => tried.push(name),
            }
        }
        if failures.is_empty() {
            Err(ToolchainError::NotFound { tried })
        } else {
            Err(ToolchainError::Unusable { failures })
        }
    }

    fn try_compiler(path: &Path) -> Result<Self, String> {
        let cxx = path.to_str().ok_or("its path is not UTF-8")?.to_owned();
        let limits = BuildLimits { wall: Duration::from_secs(30), ..BuildLimits::default() };
        let folder = build_folder().map_err(|e| e.to_string())?;
        let run =
            Run { program: path, args: vec!["--version".to_owned()], folder: folder.path(), limits: &limits };
        let Compiled { stdout, .. } = run.confined().map_err(|e| e.to_string())?;
        let version = stdout.lines().next().unwrap_or_default().trim().to_owned();
        let toolchain = Self { cxx, version, isa: isa().to_owned() };
        let trial = KernelFile::parse(TRIAL).map_err(|e| e.to_string())?;
        let artefact = toolchain.build(&trial, &Params::new(), &limits).map_err(|e| e.to_string())?;
        // A compiler with an OpenMP runtime of its own would bring a second pool of threads.
        admission::admit(&artefact.bytes, &["trial"]).map_err(|e| e.to_string())?;
        Ok(toolchain)
    }

    /// Compiles a kernel file with these parameter values, confined.
    pub fn build(
        &self,
        file: &KernelFile,
        params: &Params,
        limits: &BuildLimits,
    ) -> Result<Artefact, BuildError> {
        if file.language != autokernel_core::kernel_file::Language::Cpp {
            return Err(BuildError::Language(file.language));
        }
        file.check_params(params)?;
        let start = Instant::now();
        let folder = source_folder(file)?;
        let owned = |flags: &[&str]| flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>();
        let mut args = owned(COMPILE);
        args.extend(params.iter().map(|(name, value)| format!("-D{name}={value}")));
        let program = Path::new(&self.cxx);
        let compile = Run { program, args, folder: folder.path(), limits };
        let Compiled { mut diagnostics, .. } = compile.confined()?;
        let limits = &BuildLimits { wall: limits.wall.saturating_sub(start.elapsed()), ..*limits };
        let link = Run { program, args: owned(LINK), folder: folder.path(), limits };
        diagnostics.push_str(&link.confined()?.diagnostics);
        let bytes = read_artefact(&folder.path().join("kernel.so"))?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Artefact { diagnostics, seconds, ..Artefact::from_bytes(bytes) })
    }
}

fn source_folder(file: &KernelFile) -> Result<tempfile::TempDir, BuildError> {
    let io = |what| move |source| BuildError::Io { what, source };
    let folder = build_folder().map_err(io("make a build folder"))?;
    let include = folder.path().join("include");
    std::fs::create_dir_all(include.join("autokernel")).map_err(io("make a build folder"))?;
    for (name, text) in HEADERS {
        std::fs::write(include.join(name), text).map_err(io("write the vector headers"))?;
    }
    std::fs::write(folder.path().join("kernel.cpp"), &file.source).map_err(io("write the kernel"))?;
    Ok(folder)
}

/// A private folder. Its name begins like those of a command's own scratch folders, by which the next
/// command finds what a killed one left behind.
fn build_folder() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(&format!("autokernel-{}-build-", std::process::id())).tempdir()
}

/// Reads what the compiler wrote, trusting neither its kind nor its size.
fn read_artefact(path: &Path) -> Result<Vec<u8>, BuildError> {
    use std::io::Read;
    let io = |source| BuildError::Io { what: "read the artefact", source };
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(io)?;
    if !file.metadata().map_err(io)?.is_file() {
        return Err(BuildError::Artefact);
    }
    let mut bytes = vec![];
    file.take(ARTEFACT_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > ARTEFACT_BYTES { Err(BuildError::Artefact) } else { Ok(bytes) }
}

/// The first executable file of that name on the path.
fn find_program(name: &str) -> Option<PathBuf> {
    let runnable =
        |path: &PathBuf| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file();
    if name.contains('/') {
        return std::path::absolute(name).ok().filter(runnable);
    }
    std::env::split_paths(&std::env::var_os("PATH")?)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(runnable)
}

/// The psABI level of this processor.
#[cfg(target_arch = "x86_64")]
fn isa() -> &'static str {
    macro_rules! all {
        ($($feature:tt),*) => { $(std::arch::is_x86_feature_detected!($feature))&&* };
    }
    let v2 = all!("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt");
    let v3 = v2 && all!("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe");
    let v4 = v3 && all!("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl");
    match (v2, v3, v4) {
        (_, _, true) => "x86-64-v4",
        (_, true, _) => "x86-64-v3",
        (true, ..) => "x86-64-v2",
        _ => "x86-64",
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn isa() -> &'static str {
    "native"
}
