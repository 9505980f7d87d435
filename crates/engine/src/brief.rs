//! What an agent is given: everything needed to write a kernel for one region, and nothing else.

use std::fmt::Write;

use autokernel_core::contract::Limits;
use autokernel_core::readable;
use autokernel_core::task::Task;
use autokernel_core::verdict::Verdict;
use autokernel_judge::Controls;
use autokernel_store::{Candidate, Store};
use serde::Serialize;

use crate::error::EngineError;

/// `autokernel.brief/1`.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Brief {
    pub schema: String,
    pub run: String,
    pub task: Task,
    /// How many wrong forms of the region its inputs tell from it; `None` before it was worked on.
    pub controls: Option<Controls>,
    /// The same for a reader.
    pub text: String,
}

/// The brief of one region of a run.
pub fn brief(store: &Store, run: &str, region: &str) -> Result<Brief, EngineError> {
    let run = store.run(run)?;
    let row = store.task(&run.id, region)?;
    let task: Task = serde_json::from_value(row.body)?;
    let controls = row.outcome.and_then(|outcome| {
        serde_json::from_value(outcome.get("report")?.get("controls")?.clone()).ok().flatten()
    });
    let candidates = store.candidates(&run.id, &row.region)?;
    let best = best_candidate(&candidates);
    let source = match best {
        Some(candidate) => Some(String::from_utf8_lossy(&store.get_file(&candidate.source)?).into_owned()),
        None => None,
    };
    let text = render(&task, controls.as_ref(), &candidates, best.zip(source.as_deref()));
    Ok(Brief { schema: "autokernel.brief/1".to_owned(), run: run.id, task, controls, text })
}

/// The candidate that a verdict calls fastest, else the best of the screen.
fn best_candidate(candidates: &[Candidate]) -> Option<&Candidate> {
    let speedup = |candidate: &Candidate| match serde_json::from_value(candidate.verdict.clone()?).ok()? {
        Verdict::Faster { speedup } => Some(speedup.value),
        _ => None,
    };
    let judged = candidates
        .iter()
        .filter_map(|c| speedup(c).map(|value| (value, c)))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let screened =
        candidates.iter().filter_map(|c| screen_us(c).map(|us| (us, c))).min_by(|a, b| a.0.total_cmp(&b.0));
    judged.or(screened).map(|(_, candidate)| candidate)
}

/// Microseconds that the screen gave a candidate.
pub(crate) fn screen_us(candidate: &Candidate) -> Option<f64> {
    candidate.screen.as_ref()?.get("us")?.as_f64()
}

fn render(
    task: &Task,
    controls: Option<&Controls>,
    candidates: &[Candidate],
    best: Option<(&Candidate, &str)>,
) -> String {
    let mut text = format!("# Region {}\n\n", task.region.id);
    let _ = writeln!(
        text,
        "It stands {} time(s) in the model and takes {:.1} % of its time. PyTorch's own operators take {:.0} us for one; \
         good code would take about {:.0} us ({} bytes at the machine's copy rate, and the call).\n",
        task.occurrences.len(),
        task.share * 100.0,
        task.eager_us,
        task.reach_us,
        task.region.bytes(),
    );
    let _ = writeln!(text, "```python\n{}```\n", readable::python(&task.region));
    text.push_str("## Contract\n\nTruth is the same function in 64-bit on the same inputs (`r`); `b` is PyTorch's result, `c` yours.\n\n");
    for (index, limits) in task.contract.limits.iter().enumerate() {
        let _ = writeln!(text, "- out{index}: {}", describe_limits(limits.as_ref()));
    }
    if task.contract.deterministic {
        text.push_str("- Equal inputs must give equal bits. Inputs must not be written. Nothing outside the outputs may be written.\n");
    }
    text.push_str(
        "- Inputs are the model's own activations and random ones of other scale, sign and spread. NaN, infinities, zeros of \
         both signs, denormals and the type's largest numbers count: NaN and infinities must stand where PyTorch puts them.\n\
         - Tensors may begin at any multiple of their element's size.\n",
    );
    if let Some(controls) = controls {
        let _ = writeln!(
            text,
            "- Of {} wrong forms of this region {} are told from it ({} are no other function here).",
            controls.mutants, controls.killed, controls.equivalent
        );
    }
    text.push('\n');
    text.push_str(FORMAT);
    if !candidates.is_empty() {
        let _ = writeln!(text, "## What was tried\n\n{}", history(candidates));
    }
    if let Some((candidate, source)) = best {
        let _ = writeln!(
            text,
            "## The best so far (by {}, with {})\n\n```c++\n{}```",
            candidate.agent, candidate.params, source
        );
    }
    text
}

fn describe_limits(limits: Option<&Limits>) -> String {
    limits.map_or_else(
        || "equal bit for bit".to_owned(),
        |limits| {
            format!(
                "rms(c-r) at most {} times max(rms(b-r), 0.4 u rms(r), rms(s)); each element within {} times u|r| + the larger of its own s and the row's max(rms(b-r), rms(s)), s being how far roundings move the truth; rms(c-r) at most {:.1e} of std(r)",
                limits.ratio, limits.element, limits.centred
            )
        },
    )
}

/// At most twelve lines: the fastest by the screen, then how many fell where.
fn history(candidates: &[Candidate]) -> String {
    let mut ranked: Vec<(f64, &Candidate)> =
        candidates.iter().filter_map(|c| screen_us(c).map(|us| (us, c))).collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut text = String::new();
    for (us, candidate) in ranked.iter().take(8) {
        let _ = writeln!(
            text,
            "- {us:.1} us in the screen: {} {} ({})",
            &candidate.source.0[..8],
            candidate.params,
            candidate.agent
        );
    }
    let mut fell: std::collections::BTreeMap<String, usize> = std::collections::BTreeMap::new();
    for candidate in candidates {
        if let Some(Ok(Verdict::Rejected { stage, .. })) =
            candidate.verdict.clone().map(serde_json::from_value)
        {
            *fell.entry(stage.name().to_owned()).or_default() += 1;
        }
    }
    for (stage, count) in fell {
        let _ = writeln!(text, "- {count} rejected at {stage}");
    }
    text
}

const FORMAT: &str = r#"## The kernel file

One C++20 source that begins with a header:

```c++
/*@ autokernel 1
language = "c++"
note     = "one line: the idea"
[params]                        # compile-time constants; the sweep chooses among the values
UNROLL = [1, 2, 4]
[[launch]]
entry = "kernel"
args  = ["in0", "in1", "out0", "in0.size(0)", "in0.size(1)", "threads"]
@*/
#include "autokernel/vec.h"
extern "C" void kernel(const float* x, const float* w, float* out, int64_t rows, int64_t columns, int64_t threads) { ... }
```

Arguments are tensors (pointers to their first element, with the strides shown above), entries of `[scratch]`
(`partial = { dtype = "f32", size = "in0.size(0) * 8" }`) and integer expressions. Use `#pragma omp parallel num_threads(threads)`.
A kernel is leaf code: no includes but `autokernel/vec.h` and the C++ headers that need no library, no statics that are
written, no constructors, no system calls. `guard = ["in0.size(1) % 16 == 0"]` may narrow where it applies.

"#;
