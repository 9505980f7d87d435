//! NVIDIA devices as `nvidia-smi` tells them; nothing of CUDA is loaded.

use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use crate::python::Exit;
use crate::python::process::run;

/// How long the driver may take to wake its devices.
const LIMIT: Duration = Duration::from_secs(20);

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// The product's name.
    pub name: String,
    /// Its memory in MiB.
    pub memory_mib: u64,
    /// The driver's version.
    pub driver: String,
}

/// The machine's devices; none where `nvidia-smi` is absent, fails or does not answer.
pub fn nvidia_devices() -> Vec<Gpu> {
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]);
    let mut out = Vec::new();
    let exit = run(command, LIMIT, &mut |stream, bytes| {
        if stream == 1 && out.len() < 1 << 16 {
            out.extend_from_slice(bytes);
        }
    });
    match exit {
        Ok(Some(Exit::Code(0))) => parse(&String::from_utf8_lossy(&out)),
        _ => vec![],
    }
}

fn parse(text: &str) -> Vec<Gpu> {
    let device = |line: &str| {
        let mut fields = line.rsplit(',').map(str::trim);
        let (driver, memory, name) = (fields.next()?, fields.next()?, fields.next()?);
        Some(Gpu { name: name.to_owned(), memory_mib: memory.parse().ok()?, driver: driver.to_owned() })
    };
    text.lines().filter_map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_noise_is_not() {
        let found =
            parse("NVIDIA H200, 143771, 580.65.06\nNVIDIA L4, 23034, 580.65.06\nNo devices were found\n");
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].name.as_str(), found[0].memory_mib), ("NVIDIA H200", 143_771));
        assert_eq!(found[1].driver, "580.65.06");
        assert_eq!(parse(""), vec![]);
    }
}
