//! Lists the Python files of the bridge, so that the program carries all of them.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../../python/autokernel");
    let folder = folder.canonicalize()?;
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut files = fs::read_dir(&folder)?
        .map(|entry| entry.map(|e| e.path()))
        .filter(|path| path.as_ref().map_or(true, |p| p.extension().is_some_and(|e| e == "py")))
        .collect::<Result<Vec<_>, _>>()?;
    files.sort();
    let mut code = String::from("&[\n");
    for path in &files {
        println!("cargo::rerun-if-changed={}", path.display());
        let name = path.file_name().and_then(|n| n.to_str()).ok_or("a file name is not UTF-8")?;
        let path = path.to_str().ok_or("a path is not UTF-8")?;
        writeln!(code, "    ({name:?}, include_str!({path:?})),")?;
    }
    code.push(']');
    fs::write(Path::new(&env::var("OUT_DIR")?).join("bridge_files.rs"), code)?;
    Ok(())
}
