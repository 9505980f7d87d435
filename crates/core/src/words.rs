//! Small helpers for messages: guesses at misspelt words, and quotes of untrusted text that stay short.

/// The candidate nearest to `word`, where it is near enough to be what was meant.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const LONGEST: usize = 64;
    if word.len() > LONGEST {
        return None;
    }
    let allowed = (word.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .filter(|candidate| candidate.len() <= LONGEST && *candidate != word)
        .map(|candidate| (distance(&word.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= allowed && *distance < candidate.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Edits (insert, delete, replace, swap of neighbours) from one word to the other.
fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows = vec![vec![0; to.len() + 1]; from.len() + 1];
    for i in 0..=from.len() {
        for j in 0..=to.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
                let edited = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                let swapped = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
                if swapped { edited.min(rows[i - 2][j - 2] + 1) } else { edited }
            };
        }
    }
    rows[from.len()][to.len()]
}

/// The first line of a text, at most 80 characters of it, without control characters.
pub(crate) fn clip(text: &str) -> String {
    clip_to(text, 80)
}

/// The first line of a text, at most `longest` characters of it, without control characters.
pub(crate) fn clip_to(text: &str, longest: usize) -> String {
    let line = text.lines().next().unwrap_or_default();
    let mut clipped: String = line.chars().filter(|c| !c.is_control()).take(longest).collect();
    if clipped.len() < line.len() || line.len() < text.trim_end().len() {
        clipped.push('…');
    }
    clipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses() {
        let known = ["grid", "block", "shared", "args"];
        assert_eq!(nearest("gird", known), Some("grid"));
        assert_eq!(nearest("Blocks", known), Some("block"));
        assert_eq!(nearest("frobnicate", known), None);
        assert_eq!(nearest("x", known), None);
        assert_eq!(nearest(&"g".repeat(100_000), known), None);
    }

    #[test]
    fn quotes_stay_short() {
        assert_eq!(clip("a + b"), "a + b");
        assert_eq!(clip("a\u{1b}[31m"), "a[31m…");
        assert_eq!(clip("a\nb"), "a…");
        assert_eq!(clip(&"é".repeat(500)).chars().count(), 81);
    }
}
