//! The tests of the Python bridge, run by its own test runner.

use std::process::Command;

use crate::program::run;

#[test]
fn python_tests_pass() {
    let mut command = Command::new(autokernel_testbed::interpreter().path);
    command
        .args(["-B", "-m", "unittest", "discover", "-s", "python/tests"])
        .current_dir(autokernel_testbed::workspace());
    let outcome = run(command).expect(0);
    assert!(outcome.stderr.contains("\nOK"), "{}", outcome.told());
}
