//! To be written.

/// The child half of the program: `autokernel __worker ROLE`.
pub fn child_main(_args: &[String]) -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
