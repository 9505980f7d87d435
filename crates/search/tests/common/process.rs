//! Compiles a kernel file with a main program around it and runs it in a process of its own.

use std::path::PathBuf;
use std::process::Command;

use autokernel_core::dtype::Dtype;
use autokernel_core::kernel_file::{HEADERS, KernelFile, Params};
use autokernel_core::plan::{Device, Plan, PlannedArg, PlannedLaunch, plan};
use autokernel_core::region::Region;

use super::interpreter::{Dense, read, run};
use super::{Random, close, rounded};

/// Whether there is a C++ compiler; says so when there is none.
pub(crate) fn compiler() -> bool {
    let found = Command::new("c++").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("SKIPPED: no c++ on this machine");
    }
    found
}

fn c_type(dtype: Dtype) -> (&'static str, usize) {
    match dtype {
        Dtype::F64 => ("double", 8),
        Dtype::F32 => ("float", 4),
        Dtype::Bf16 => ("bf16", 2),
        Dtype::F16 => ("f16", 2),
        Dtype::I64 => ("int64_t", 8),
        Dtype::I32 => ("int32_t", 4),
        Dtype::Bool => ("bool", 1),
        Dtype::U8 => ("uint8_t", 1),
        _ => panic!("no type for the test"),
    }
}

fn encode(value: f64, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F64 => value.to_le_bytes().to_vec(),
        Dtype::F32 => (value as f32).to_le_bytes().to_vec(),
        Dtype::Bf16 => ((((value as f32).to_bits()) >> 16) as u16).to_le_bytes().to_vec(),
        Dtype::F16 => half_bits(value).to_le_bytes().to_vec(),
        Dtype::I64 => (value as i64).to_le_bytes().to_vec(),
        Dtype::I32 => (value as i32).to_le_bytes().to_vec(),
        _ => vec![value as u8],
    }
}

/// Bits of a number that f16 holds exactly.
fn half_bits(value: f64) -> u16 {
    let bits = (value as f32).to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    if value == 0.0 {
        return sign;
    }
    let exponent = ((bits >> 23) & 0xff) as i32 - 127 + 15;
    if exponent <= 0 {
        return sign | (value.abs() * 2.0_f64.powi(24)) as u16;
    }
    sign | ((exponent as u16) << 10) | ((bits >> 13) & 0x3ff) as u16
}

fn decode(bytes: &[u8], dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        Dtype::Bf16 => {
            f64::from(f32::from_bits(u32::from(u16::from_le_bytes(bytes.try_into().unwrap())) << 16))
        }
        Dtype::F16 => {
            let bits = u16::from_le_bytes(bytes.try_into().unwrap());
            let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
            let (exponent, fraction) = (i32::from((bits >> 10) & 31), f64::from(bits & 0x3ff));
            sign * match exponent {
                0 => fraction * 2.0_f64.powi(-24),
                31 => {
                    if fraction == 0.0 {
                        f64::INFINITY
                    } else {
                        f64::NAN
                    }
                }
                _ => (1024.0 + fraction) * 2.0_f64.powi(exponent - 25),
            }
        }
        _ => f64::from(bytes[0]),
    }
}

/// A buffer with a guard of 64 bytes on both sides.
fn buffer(name: &str, dtype: Dtype, numel: u64) -> String {
    let (kind, size) = c_type(dtype);
    format!(
        "    char* raw_{name} = (char*)aligned_alloc(64, ({numel} * {size} + 191) / 64 * 64 + 64);\n    memset(raw_{name}, 0x5a, {numel} * {size} + 128);\n    {kind}* {name} = ({kind}*)(raw_{name} + 64);\n"
    )
}

/// Looks at the guards of a buffer after the calls.
fn guards(name: &str, dtype: Dtype, numel: u64) -> String {
    let size = c_type(dtype).1;
    format!(
        "    for (int i = 0; i < 64; ++i) if (raw_{name}[i] != 0x5a || raw_{name}[64 + {numel} * {size} + i] != 0x5a) return 3;\n"
    )
}

fn launch(launch: &PlannedLaunch) -> String {
    let args: Vec<String> = launch
        .args
        .iter()
        .map(|arg| match arg {
            PlannedArg::Input(n) => format!("in{n}"),
            PlannedArg::Output(n) => format!("out{n}"),
            PlannedArg::Scratch(n) => format!("scratch{n}"),
            PlannedArg::Prepared(n) => format!("prepared{n}"),
            PlannedArg::Int(value) => value.to_string(),
            PlannedArg::Threads => "atoi(argv[3])".to_owned(),
            PlannedArg::TensorMap { .. } => panic!("a tensor map on a CPU"),
        })
        .collect();
    format!("    {}({});\n", launch.entry, args.join(", "))
}

fn main_program(region: &Region, file: &KernelFile, plan: &Plan) -> String {
    let body = file.source.split_once("@*/").unwrap().1;
    let mut main = String::from("int main(int, char** argv) {\n    FILE* f = fopen(argv[1], \"rb\");\n");
    let mut checks = String::new();
    for (n, input) in region.inputs.iter().enumerate() {
        let size = c_type(input.meta.dtype).1;
        main += &buffer(&format!("in{n}"), input.meta.dtype, input.meta.extent());
        main += &format!("    if (fread(in{n}, {size}, {}, f) == 0) return 2;\n", input.meta.extent());
    }
    for (n, meta) in region.output_metas().into_iter().enumerate() {
        main += &buffer(&format!("out{n}"), meta.dtype, meta.extent());
        checks += &guards(&format!("out{n}"), meta.dtype, meta.extent());
    }
    for (n, scratch) in plan.scratch.iter().enumerate() {
        main += &buffer(&format!("scratch{n}"), scratch.dtype, scratch.numel);
        checks += &guards(&format!("scratch{n}"), scratch.dtype, scratch.numel);
    }
    for (n, step) in plan.prepare.iter().enumerate() {
        main += &buffer(&format!("prepared{n}"), step.dtype, step.numel);
        checks += &guards(&format!("prepared{n}"), step.dtype, step.numel);
        main += &launch(&step.launch);
    }
    plan.launches.iter().for_each(|planned| main += &launch(planned));
    main += "    f = fopen(argv[2], \"wb\");\n";
    for (n, meta) in region.output_metas().into_iter().enumerate() {
        main += &format!("    fwrite(out{n}, {}, {}, f);\n", c_type(meta.dtype).1, meta.extent());
    }
    main += &checks;
    format!(
        "{body}\n#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n{main}    fclose(f);\n    return 0;\n}}\n"
    )
}

/// Storage of every input: numbers that its type holds.
pub(crate) fn random_inputs(
    region: &Region,
    random: &mut Random,
    mut value: impl FnMut(&mut Random, Dtype) -> f64,
) -> Vec<Vec<f64>> {
    region
        .inputs
        .iter()
        .map(|input| {
            (0..input.meta.extent())
                .map(|_| rounded(value(random, input.meta.dtype), input.meta.dtype))
                .collect()
        })
        .collect()
}

pub(crate) fn normal(random: &mut Random, dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bool => f64::from(u8::from(random.unit() < 0.5)),
        Dtype::I64 | Dtype::I32 | Dtype::U8 => (random.next() % 50) as f64,
        _ => random.normal(),
    }
}

/// Runs a kernel file and compares with the interpreter; the error names the first element that differs.
pub(crate) fn check(
    region: &Region,
    file: &KernelFile,
    params: &Params,
    storage: &[Vec<f64>],
    threads: usize,
) -> Result<(), String> {
    let folder = tempfile();
    std::fs::create_dir_all(folder.join("autokernel")).unwrap();
    for (name, text) in HEADERS {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let device = Device { sms: 0, shared: 0, cores: threads as i64 };
    let plan = plan(file, region, params, &device).map_err(|error| error.to_string())?;
    std::fs::write(folder.join("kernel.cpp"), main_program(region, file, &plan)).unwrap();
    let mut input = vec![];
    for (values, meta) in storage.iter().zip(&region.inputs) {
        input.extend(values.iter().flat_map(|value| encode(*value, meta.meta.dtype)));
    }
    std::fs::write(folder.join("in"), input).unwrap();
    let mut command = Command::new("c++");
    command.current_dir(&folder).args([
        "-std=c++20",
        "-O1",
        "-march=native",
        "-fno-math-errno",
        "-ffp-contract=fast",
        "-fopenmp",
        "-w",
        "-I.",
    ]);
    command.args(params.iter().map(|(name, value)| format!("-D{name}={value}"))).args([
        "kernel.cpp",
        "-o",
        "run",
        "-lm",
    ]);
    let built = command.output().unwrap();
    if !built.status.success() {
        return Err(format!("{}\n{}", String::from_utf8_lossy(&built.stderr), file.source));
    }
    let status = Command::new(folder.join("run"))
        .current_dir(&folder)
        .args(["in", "out", &threads.to_string()])
        .status()
        .unwrap();
    if !status.success() {
        return Err(format!("ended with {status}\n{}", file.source));
    }
    let bytes = std::fs::read(folder.join("out")).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    compare(region, storage, &bytes).map_err(|error| format!("{error}\n{params:?}\n{}", file.source))
}

fn compare(region: &Region, storage: &[Vec<f64>], bytes: &[u8]) -> Result<(), String> {
    let inputs: Vec<Dense> =
        storage.iter().zip(&region.inputs).map(|(values, input)| read(values, &input.meta)).collect();
    let truth = run(region, &inputs);
    let mut start = 0;
    for (number, (meta, truth)) in region.output_metas().into_iter().zip(truth).enumerate() {
        let size = c_type(meta.dtype).1;
        let end = start + meta.extent() as usize * size;
        let values: Vec<f64> =
            bytes[start..end].chunks(size).map(|chunk| decode(chunk, meta.dtype)).collect();
        start = end;
        let ours = read(&values, meta);
        for (place, (a, b)) in ours.data.iter().zip(&truth.data).enumerate() {
            if !close(*a, *b, meta.dtype) {
                return Err(format!(
                    "output {number} ({}), element {place}: {a} instead of {b}",
                    region.op_names()[region.outputs[number]]
                ));
            }
        }
    }
    Ok(())
}

fn tempfile() -> PathBuf {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    std::env::temp_dir().join(format!(
        "autokernel-search-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ))
}
