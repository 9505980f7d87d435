//! The child half of the program and nothing else: what this crate's tests re-execute.

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().collect();
    autokernel_worker::child_main(&args)
}
