//! What tests outside of Rust need from it.
//!
//! Without an argument it makes the tests' Python and prints its path, so that CI can do it as a step
//! of its own: `export AUTOKERNEL_TEST_PYTHON=$(cargo run -p autokernel-testbed)`. With `partition` it reads
//! a JSON list of graphs on stdin and prints the regions that the search agent cuts them into.

use std::io::Write;

use anyhow::bail;
use autokernel_core::graph::Graph;
use autokernel_search::partition::partition;
use serde_json::json;

fn main() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match std::env::args().nth(1).as_deref() {
        None => writeln!(out, "{}", autokernel_testbed::prepare()?.path.display())?,
        Some("partition") => {
            let graphs: Vec<Graph> = serde_json::from_reader(std::io::stdin().lock())?;
            for graph in &graphs {
                graph.check()?;
            }
            let found = partition(&graphs);
            let regions: Vec<_> = found
                .regions
                .iter()
                .map(|(region, occurrences)| json!({ "region": region, "occurrences": occurrences }))
                .collect();
            writeln!(out, "{}", json!({ "regions": regions, "left": found.left }))?;
        }
        Some(other) => bail!("unknown argument `{other}`; there is: partition"),
    }
    Ok(())
}
