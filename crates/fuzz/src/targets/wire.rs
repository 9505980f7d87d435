//! Messages between parent and runner: a hostile child writes what it likes.

use anyhow::Result;

use super::{Target, mutated};
use crate::mutate::Random;

/// The reader of messages.
pub(super) const WIRE: Target = Target { name: "wire", seeds, make, check };

const WORDS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "\"",
    ",",
    ":",
    "null",
    "true",
    "-1",
    "1e999",
    "18446744073709551616",
    "\\ud800",
    "\"done\"",
    "\"failed\"",
    "\"stage\"",
    "\"confine\"",
    "\"go\"",
    "\0\0\0\0",
    "\u{1}\0\0\0",
    "\0\0\0\u{1}",
];

#[expect(clippy::unnecessary_wraps, reason = "of one form with targets whose seeds have to be built")]
fn seeds() -> Result<Vec<Vec<u8>>> {
    let messages = [
        r#"{"ready":{"uid":65534,"landlock_abi":6}}"#,
        r#""loaded""#,
        r#"{"done":{"cpu_ns":1000,"control_ok":true,"threads":2}}"#,
        r#"{"failed":{"stage":"load","reason":"no entry"}}"#,
        r#"{"prepare":{"calls":[{"inputs":[0,1],"outputs":[0],"scratch":[]}]}}"#,
        r#""go""#,
    ];
    Ok(messages.map(framed).to_vec())
}

fn framed(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn make(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = random.pick(seeds).clone();
    for _ in 0..random.below(3) {
        bytes.extend(random.pick(seeds));
    }
    let mut body = mutated(&[bytes], WORDS, random);
    if random.below(2) == 0 && body.len() > 4 {
        // A length that is right again, so that the reader gets as far as the text.
        let length = (body.len() - 4) as u32;
        body[..4].copy_from_slice(&length.to_le_bytes());
    }
    body
}

fn check(input: &[u8]) -> Result<bool, String> {
    let (replies, requests) =
        autokernel_worker::fuzz::read_bytes(input).map_err(|error| error.to_string())?;
    Ok(replies + requests > 0)
}
