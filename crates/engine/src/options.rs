//! What a user asked for, validated once; nothing behind this sees raw flags.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Which model, and which inputs when the file does not say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// `file.py`, `file.py:Name`, `package.module:factory` or `program.pt2`; a file's path is absolute.
    pub spec: String,
    /// `1x128:int64` or `1x128:int64:0..512` for each input; `NAME=` before it for keyword arguments.
    pub inputs: Vec<String>,
}

impl ModelSpec {
    /// Makes the file's path absolute, so that a stored run means the same in any folder.
    pub fn new(spec: &str, inputs: Vec<String>) -> Self {
        let (file, name) = match spec.rsplit_once(':') {
            Some((file, name)) if !name.is_empty() && !name.contains('/') => (file, Some(name)),
            _ => (spec, None),
        };
        let absolute = std::fs::canonicalize(file).ok().filter(|path| path.is_file());
        let spec = match (absolute, name) {
            (Some(path), Some(name)) => format!("{}:{name}", path.display()),
            (Some(path), None) => path.display().to_string(),
            (None, _) => spec.to_owned(),
        };
        Self { spec, inputs }
    }

    /// The model's file, when it comes from one.
    pub(crate) fn file(&self) -> Option<&Path> {
        let file = match self.spec.rsplit_once(':') {
            Some((file, name)) if !name.contains('/') => file,
            _ => &self.spec,
        };
        Some(Path::new(file)).filter(|file| file.extension().is_some_and(|ending| ending == "py"))
    }

    /// A short name for runs and folders: `llama_block` for `examples/llama_block.py`.
    pub fn stem(&self) -> String {
        let program = Some(Path::new(&self.spec)).filter(|path| path.extension().is_some_and(|e| e == "pt2"));
        let stem = match self.file().or(program).and_then(Path::file_stem) {
            Some(stem) => &*stem.to_string_lossy(),
            None => self.spec.rsplit(['/', ':', '.']).next().unwrap_or("model"),
        };
        let clean: String = stem
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' })
            .collect();
        if clean.is_empty() { "model".to_owned() } else { clean.chars().take(40).collect() }
    }
}

/// Options of `optimize`; stored with the run, so that `resume` asks for the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizeOptions {
    /// The model.
    pub model: ModelSpec,
    /// Interpreter that the user named.
    pub python: Option<PathBuf>,
    /// Wall-clock budget of the search, in seconds. Package and gate come on top.
    pub budget_s: u64,
    /// Where the package goes.
    pub out: PathBuf,
    /// Threads of the model and of every kernel; the machine's cores by default.
    pub threads: usize,
    /// Seed of the model's factories.
    pub seed: u64,
}

impl OptimizeOptions {
    /// The budget as a duration.
    pub fn budget(&self) -> Duration {
        Duration::from_secs(self.budget_s)
    }
}

/// Parses a budget: `10m`, `90s`, `1h`, `600`, or a list such as `10m,2usd` of which the skeleton takes the time.
pub fn parse_budget(text: &str) -> Result<Duration, String> {
    let mut time = None;
    for part in text.split(',').map(str::trim) {
        let (number, unit) =
            part.split_at(part.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(part.len()));
        let value: f64 =
            number.parse().map_err(|_| format!("`{part}` is no amount; write 10m, 90s or 1h"))?;
        let seconds = match unit {
            "" | "s" => value,
            "m" => value * 60.0,
            "h" => value * 3600.0,
            "usd" => {
                return Err("a budget in dollars needs an agent that costs money; the search agent is free"
                    .to_owned());
            }
            other => return Err(format!("unknown unit `{other}`; write 10m, 90s or 1h")),
        };
        if time.replace(seconds).is_some() {
            return Err("the budget names a time twice".to_owned());
        }
    }
    match time {
        Some(seconds) if (1.0..=7.0 * 86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("the budget must lie between 1 second and 7 days".to_owned()),
    }
}

/// Element types that an `--input` may have.
const INPUT_TYPES: [&str; 10] =
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"];

/// Checks `[NAME=]1x128[:DTYPE[:LOW..HIGH]]`; the bridge reads it again where the tensors are made.
pub fn parse_input(text: &str) -> Result<String, String> {
    let (name, rest) = text.split_once('=').map_or((None, text), |(name, rest)| (Some(name), rest));
    let mut parts = rest.split(':');
    let (shape, dtype, range, more) =
        (parts.next().unwrap_or_default(), parts.next(), parts.next(), parts.next());
    let word = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
    let size = |size: &str| size.bytes().all(|b| b.is_ascii_digit()) && size.parse::<u32>().is_ok();
    if more.is_some() || !name.is_none_or(word) || !(shape.is_empty() || shape.split('x').all(size)) {
        return Err("write [NAME=]SHAPE[:DTYPE[:LOW..HIGH]], such as 1x128:int64:0..512".to_owned());
    }
    match dtype {
        Some(dtype) if !INPUT_TYPES.contains(&dtype) => {
            return Err(format!("unknown element type `{dtype}`; there are {}", INPUT_TYPES.join(", ")));
        }
        _ => {}
    }
    let number = |text: &str| text.parse::<f64>().ok().filter(|value| value.is_finite());
    let limits = range.map(|range| {
        let (low, high) = range.split_once("..")?;
        Some((number(low)?, number(high)?)).filter(|(low, high)| low < high)
    });
    match limits {
        Some(None) => Err("a range is LOW..HIGH with LOW below HIGH, which itself is left out".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets() {
        assert_eq!(parse_budget("10m"), Ok(Duration::from_mins(10)));
        assert_eq!(parse_budget("1.5h"), Ok(Duration::from_mins(90)));
        assert_eq!(parse_budget("45"), Ok(Duration::from_secs(45)));
        for bad in ["", "ten", "10x", "0", "1m,2m", "5m,2usd", "99999999h"] {
            assert!(parse_budget(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn inputs() {
        for good in
            ["1x128:int64", "1x128", ":float32", "mask=2x3:bool", "7", "2:int64:0..512", "2:float32:-0.5..1"]
        {
            assert_eq!(parse_input(good).as_deref(), Ok(good));
        }
        for bad in [
            "x",
            "1x",
            "1xa",
            "1x2:float31",
            "=2",
            "a b=2",
            "1,2",
            "99999999999",
            "2:int64:5..5",
            "2:int64:5",
            "2:int64:a..b",
            "2:int64:0..9:1",
        ] {
            assert!(parse_input(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn stems() {
        let stem = |spec: &str| ModelSpec { spec: spec.into(), inputs: vec![] }.stem();
        assert_eq!(stem("/a/llama_block.py"), "llama_block");
        assert_eq!(stem("/a/b c.py:Net"), "b_c");
        assert_eq!(stem("/home/u/.pyenv/m/net.v2.py:Net"), "net_v2");
        assert_eq!(stem("package.module:factory"), "factory");
        assert_eq!(stem("/a/exported.pt2"), "exported");
        assert_eq!(stem(""), "model");
    }
}
