//! The playbook: plain pages on writing kernels, found by relevance. Anyone can add pages in a folder
//! of their own.

use std::path::Path;

use crate::text::clean;

/// A page: the first line is its title, the second names its topics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Without the `#`.
    pub title: String,
    /// The whole page.
    pub text: String,
}

macro_rules! pages {
    ($($name:literal),* $(,)?) => { &[$(include_str!(concat!("../../../playbook/", $name))),*] };
}

const PAGES: &[&str] = pages![
    "cpu-memory.md",
    "cpu-simd.md",
    "matrix-products.md",
    "numerics.md",
    "reductions.md",
    "threads.md",
    "traps.md",
];

/// Most bytes of one page, and of a user's page that is read.
const PAGE_BYTES: usize = 12 << 10;

/// Pages of one answer.
const BEST: usize = 2;

/// The project's pages, then those of `folder` (its `*.md`, by name), where there is one.
pub fn pages(folder: Option<&Path>) -> Vec<Page> {
    let mut pages: Vec<Page> = PAGES.iter().map(|text| page(text)).collect();
    let mut own: Vec<_> = folder
        .and_then(|folder| std::fs::read_dir(folder).ok())
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "md") && path.is_file())
        .collect();
    own.sort();
    pages.extend(own.iter().filter_map(|path| std::fs::read_to_string(path).ok()).map(|text| page(&text)));
    pages
}

fn page(text: &str) -> Page {
    let title = text.lines().next().unwrap_or_default().trim_start_matches('#').trim().to_owned();
    Page { title: clean(&title, 200), text: clean(text, PAGE_BYTES) }
}

/// The pages that fit the words of `query` best, best first; none where no word occurs.
pub fn find<'a>(pages: &'a [Page], query: &str) -> Vec<&'a Page> {
    let words: Vec<String> = words(query).collect();
    let mut scored: Vec<(usize, &Page)> =
        pages.iter().map(|page| (score(page, &words), page)).filter(|(score, _)| *score > 0).collect();
    scored.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    scored.into_iter().take(BEST).map(|(_, page)| page).collect()
}

/// Title and topics count for more than the text, and a word counts once.
fn score(page: &Page, wanted: &[String]) -> usize {
    let head: Vec<String> = words(&page.text.lines().take(3).collect::<Vec<_>>().join(" ")).collect();
    let body: Vec<String> = words(&page.text).collect();
    let fits = |have: &[String], word: &String| have.iter().any(|known| known.starts_with(word.as_str()));
    wanted.iter().map(|word| if fits(&head, word) { 8 } else { usize::from(fits(&body, word)) }).sum()
}

fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| word.len() > 2).map(str::to_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_a_title_and_topics_and_fits_into_an_answer() {
        for page in pages(None) {
            assert!(!page.title.is_empty());
            assert!(
                page.text.lines().nth(2).is_some_and(|line| line.starts_with("Topics: ")),
                "{}",
                page.title
            );
            assert!(page.text.len() < PAGE_BYTES, "{}", page.title);
        }
    }

    #[test]
    fn a_page_is_found_by_its_topics() {
        let pages = pages(None);
        let best =
            |query: &str| find(&pages, query).first().map(|page| page.title.clone()).unwrap_or_default();
        assert!(best("softmax").to_lowercase().contains("reduction"), "{}", best("softmax"));
        assert!(best("gemm blocking").to_lowercase().contains("product"), "{}", best("gemm blocking"));
        assert!(find(&pages, "zzzz").is_empty());
    }

    #[test]
    fn a_folder_adds_pages_and_its_text_is_cleaned() {
        let folder = std::env::temp_dir().join(format!("autokernel-playbook-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("own.md"), "# Own \u{1b}[1mpage\n\nTopics: quaternions\n").unwrap();
        std::fs::write(folder.join("other.txt"), "no").unwrap();
        let found = pages(Some(&folder));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.len(), PAGES.len() + 1);
        assert_eq!(find(&found, "quaternions")[0].title, "Own [1mpage");
    }
}
