//! The verbs of a desk as data: names, schemas and arguments, the same at every door.

use std::collections::BTreeMap;

use schemars::{JsonSchema, schema_for};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::desk::{Answer, Attempt, Desk, DeskError, Proof};

/// Most bytes of a kernel file.
pub const SOURCE_BYTES: usize = 256 << 10;

/// Longest sweep.
pub const SWEEP_SECONDS: u64 = 600;

/// A verb as a client sees it.
#[derive(Clone, Debug)]
pub struct Verb {
    /// Its name.
    pub name: &'static str,
    /// What it does.
    pub description: &'static str,
    /// JSON Schema of its arguments, an object.
    pub schema: Map<String, Value>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfRegion {
    /// A region's hash, the beginning of it, or its rank from 0.
    region: Word,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct JudgeArguments {
    /// A region's hash, the beginning of it, or its rank from 0.
    region: Word,
    /// The whole kernel file, header included.
    source: String,
    /// Values for the names under [params]; the first of each list where left out.
    #[serde(default)]
    params: BTreeMap<String, i64>,
    /// Whether a correct kernel is compared with PyTorch's best, which takes most of a minute.
    #[serde(default)]
    proof: ProofWord,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SweepArguments {
    /// A region's hash, the beginning of it, or its rank from 0.
    region: Word,
    /// The whole kernel file, header included.
    source: String,
    /// Time for the search over [params]; the verdict of the best point comes on top.
    #[serde(default = "a_minute")]
    seconds: u64,
    /// Whether the best point is compared with PyTorch's best.
    #[serde(default)]
    proof: ProofWord,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PlaybookArguments {
    /// Words to look for, such as "softmax reduction"; empty lists all pages.
    #[serde(default)]
    query: String,
}

/// Clients write ranks as numbers as often as they write them as words.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Word {
    Text(String),
    Rank(u32),
}

impl Word {
    fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Rank(rank) => rank.to_string(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ProofWord {
    #[default]
    IfBest,
    Always,
    Never,
}

impl From<ProofWord> for Proof {
    fn from(word: ProofWord) -> Self {
        match word {
            ProofWord::IfBest => Self::IfBest,
            ProofWord::Always => Self::Always,
            ProofWord::Never => Self::Never,
        }
    }
}

const fn a_minute() -> u64 {
    60
}

/// All verbs, in the order in which a mind would use them.
pub fn verbs() -> Vec<Verb> {
    vec![
        verb::<Nothing>(
            "tasks",
            "List the regions of the run: rank, share of the model's time, what PyTorch takes, what good code would take, what is won so far.",
        ),
        verb::<OfRegion>(
            "brief",
            "Everything needed to write a kernel for one region: the function as PyTorch, shapes, limits, the kernel file's format, the best kernel so far.",
        ),
        verb::<JudgeArguments>(
            "judge",
            "Build, check and time one kernel file. Says what is wrong (never the data), how fast it is, and how far from reach; a good one is compared with PyTorch's best.",
        ),
        verb::<SweepArguments>(
            "sweep",
            "Search the values under [params] of one kernel file by measurement, then compare the best point with PyTorch's best. Structure is yours, numbers are the sweep's.",
        ),
        verb::<OfRegion>("history", "What was tried on a region, how fast it was, why it was rejected."),
        verb::<PlaybookArguments>("playbook", "Pages on writing fast and correct kernels, by relevance."),
        verb::<Nothing>(
            "finish",
            "Put all winners into a package and measure the whole model. Takes a minute or more; once at the end.",
        ),
    ]
}

fn verb<A: JsonSchema>(name: &'static str, description: &'static str) -> Verb {
    let schema = match schema_for!(A).to_value() {
        Value::Object(mut schema) => {
            schema.remove("$schema");
            schema.remove("title");
            // A client may insist on it, also where there is nothing to say.
            schema.entry("properties").or_insert_with(|| Value::Object(Map::new()));
            schema
        }
        _ => Map::new(),
    };
    Verb { name, description, schema }
}

/// Calls the verb `name` with JSON arguments.
pub fn call(desk: &mut dyn Desk, name: &str, arguments: Value) -> Result<Answer, DeskError> {
    match name {
        "tasks" => parse::<Nothing>(name, arguments).and_then(|_| desk.tasks()),
        "brief" => desk.brief(&parse::<OfRegion>(name, arguments)?.region.text()),
        "judge" => {
            let JudgeArguments { region, source, params, proof } = parse(name, arguments)?;
            desk.judge(&attempt(region, source, params, proof)?)
        }
        "sweep" => {
            let SweepArguments { region, source, seconds, proof } = parse(name, arguments)?;
            let attempt = attempt(region, source, BTreeMap::new(), proof)?;
            desk.sweep(&attempt, seconds.clamp(1, SWEEP_SECONDS))
        }
        "history" => desk.history(&parse::<OfRegion>(name, arguments)?.region.text()),
        "playbook" => desk.playbook(&parse::<PlaybookArguments>(name, arguments)?.query),
        "finish" => parse::<Nothing>(name, arguments).and_then(|_| desk.finish()),
        _ => {
            let known: Vec<&str> = verbs().iter().map(|verb| verb.name).collect();
            Err(DeskError::Request(format!("no verb `{name}`; there are: {}", known.join(", "))))
        }
    }
}

fn attempt(
    region: Word,
    source: String,
    params: BTreeMap<String, i64>,
    proof: ProofWord,
) -> Result<Attempt, DeskError> {
    if source.len() > SOURCE_BYTES {
        let kib = SOURCE_BYTES >> 10;
        return Err(DeskError::Request(format!(
            "the kernel file has {} bytes; at most {kib} KiB",
            source.len()
        )));
    }
    Ok(Attempt { region: region.text(), source, params, proof: proof.into() })
}

fn parse<A: DeserializeOwned>(name: &str, arguments: Value) -> Result<A, DeskError> {
    let arguments = if arguments.is_null() { Value::Object(Map::new()) } else { arguments };
    serde_json::from_value(arguments)
        .map_err(|error| DeskError::Request(format!("arguments of `{name}`: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Says back what it was asked.
    #[derive(Default)]
    struct Echo(Vec<String>);

    impl Echo {
        fn say(&mut self, what: &str) -> Answer {
            self.0.push(what.to_owned());
            Answer::new(what, Value::Null)
        }
    }

    impl Desk for Echo {
        fn tasks(&mut self) -> Result<Answer, DeskError> {
            Ok(self.say("tasks"))
        }
        fn brief(&mut self, region: &str) -> Result<Answer, DeskError> {
            Ok(self.say(&format!("brief {region}")))
        }
        fn judge(&mut self, attempt: &Attempt) -> Result<Answer, DeskError> {
            Ok(self.say(&format!("judge {attempt:?}")))
        }
        fn sweep(&mut self, attempt: &Attempt, seconds: u64) -> Result<Answer, DeskError> {
            Ok(self.say(&format!("sweep {} {seconds}", attempt.region)))
        }
        fn history(&mut self, region: &str) -> Result<Answer, DeskError> {
            Ok(self.say(&format!("history {region}")))
        }
        fn playbook(&mut self, query: &str) -> Result<Answer, DeskError> {
            Ok(self.say(&format!("playbook {query}")))
        }
        fn finish(&mut self) -> Result<Answer, DeskError> {
            Ok(self.say("finish"))
        }
    }

    #[test]
    fn every_verb_is_reached_with_the_arguments_its_schema_asks_for() {
        for verb in verbs() {
            let wanted = verb.schema.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
            let arguments: Map<String, Value> =
                wanted.iter().filter_map(Value::as_str).map(|name| (name.to_owned(), json!("0"))).collect();
            let answer = call(&mut Echo::default(), verb.name, Value::Object(arguments)).unwrap();
            assert!(answer.text.starts_with(verb.name), "{}", answer.text);
            assert_eq!(verb.schema["type"], "object", "{}", verb.name);
        }
    }

    #[test]
    fn what_can_not_be_understood_is_named() {
        let mut desk = Echo::default();
        let told = |desk: &mut Echo, verb: &str, arguments: Value| {
            call(desk, verb, arguments).unwrap_err().to_string()
        };
        assert!(told(&mut desk, "judge", json!({ "region": "0" })).contains("source"));
        assert!(told(&mut desk, "brief", json!({ "region": "0", "secret": 1 })).contains("secret"));
        assert!(told(&mut desk, "peek", json!({})).contains("brief"));
        let long = "x".repeat(SOURCE_BYTES + 1);
        assert!(told(&mut desk, "judge", json!({ "region": 0, "source": long })).contains("256 KiB"));
        assert!(desk.0.is_empty());
    }

    #[test]
    fn ranks_may_be_numbers_and_sweeps_end() {
        let mut desk = Echo::default();
        assert_eq!(call(&mut desk, "history", json!({ "region": 3 })).unwrap().text, "history 3");
        let sweep = json!({ "region": "ab", "source": "", "seconds": 1_000_000 });
        assert_eq!(call(&mut desk, "sweep", sweep).unwrap().text, "sweep ab 600");
        assert_eq!(call(&mut desk, "tasks", Value::Null).unwrap().text, "tasks");
    }
}
