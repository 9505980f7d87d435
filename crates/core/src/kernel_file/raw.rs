//! The header as TOML has it, before names and expressions are looked at.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use toml::Spanned;

use crate::dtype::Dtype;

use super::Language;

/// The text of an expression. A bare whole number is taken too: `shared = 0` is what people write.
#[derive(Clone, Debug)]
pub(super) struct Text(pub(super) String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl Visitor<'_> for TextVisitor {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an expression in quotes or a whole number")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}

type Texts = Spanned<Vec<Spanned<Text>>>;

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawHeader {
    pub(super) language: Spanned<Language>,
    #[serde(default)]
    pub(super) note: Option<Spanned<String>>,
    #[serde(default)]
    pub(super) guard: Vec<Spanned<Text>>,
    #[serde(default)]
    pub(super) params: BTreeMap<Spanned<String>, Vec<i64>>,
    #[serde(default)]
    pub(super) scratch: BTreeMap<Spanned<String>, RawScratch>,
    #[serde(default)]
    pub(super) prepare: Vec<Spanned<RawPrepare>>,
    #[serde(default)]
    pub(super) launch: Vec<Spanned<RawLaunch>>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawScratch {
    pub(super) dtype: Dtype,
    pub(super) size: Spanned<Text>,
    #[serde(default)]
    pub(super) zero: bool,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLaunch {
    pub(super) entry: Spanned<String>,
    pub(super) when: Option<Spanned<Text>>,
    pub(super) grid: Option<Texts>,
    pub(super) block: Option<Texts>,
    pub(super) shared: Option<Spanned<Text>>,
    pub(super) cluster: Option<Texts>,
    pub(super) cooperative: Option<Spanned<bool>>,
    pub(super) args: Texts,
}

/// A launch and its output. Written out, since serde refuses `flatten` beside `deny_unknown_fields`.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPrepare {
    pub(super) output: Spanned<String>,
    pub(super) dtype: Dtype,
    pub(super) size: Spanned<Text>,
    pub(super) entry: Spanned<String>,
    pub(super) when: Option<Spanned<Text>>,
    pub(super) grid: Option<Texts>,
    pub(super) block: Option<Texts>,
    pub(super) shared: Option<Spanned<Text>>,
    pub(super) cluster: Option<Texts>,
    pub(super) cooperative: Option<Spanned<bool>>,
    pub(super) args: Texts,
}

impl RawPrepare {
    /// The output's part and the launch's part.
    pub(super) fn split(self) -> (Spanned<String>, Dtype, Spanned<Text>, RawLaunch) {
        let Self { output, dtype, size, entry, when, grid, block, shared, cluster, cooperative, args } = self;
        (output, dtype, size, RawLaunch { entry, when, grid, block, shared, cluster, cooperative, args })
    }
}
