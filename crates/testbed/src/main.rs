//! Makes the tests' Python and prints its path, so that CI can do it as a step of its own:
//! `export AUTOKERNEL_TEST_PYTHON=$(cargo run -p autokernel-testbed)`.

use std::io::Write;

fn main() -> anyhow::Result<()> {
    let interpreter = autokernel_testbed::prepare()?;
    writeln!(std::io::stdout(), "{}", interpreter.path.display())?;
    Ok(())
}
