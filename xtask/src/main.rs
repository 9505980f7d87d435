//! Developer tasks. `cargo xtask tidy` checks the house rules; the same rules run as a test.

mod tidy;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let root = tidy::root()?;
    match std::env::args().nth(1).as_deref() {
        Some("tidy") => tidy::run(&root),
        other => bail!("unknown task {other:?}; there is: tidy"),
    }
}
