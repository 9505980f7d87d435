//! From TOML to a checked [`KernelFile`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use toml::Spanned;

use crate::plan::{Argument, Expr, ExprError, Mention, argument};
use crate::words::{clip, nearest};

use super::header::{Form, Header, line_of};
use super::names::{self, Role};
use super::raw::{RawHeader, RawLaunch, RawPrepare, RawScratch, Text};
use super::{
    HeaderError, KernelFile, KernelFileError, Language, Launch, LaunchArg, Prepare, Scratch, TensorMap,
    TensorName, caps,
};

type Result<T, E = KernelFileError> = std::result::Result<T, E>;

/// Reads the header and checks all that can be checked without a region.
pub(super) fn lower(text: &str, header: &Header<'_>) -> Result<KernelFile> {
    let raw: RawHeader = toml::from_str(header.toml).map_err(|error| {
        let line = error.span().map(|span| line_of(text, header.start + span.start));
        KernelFileError { line, kind: HeaderError::from_toml(error.message()) }
    })?;
    let language = *raw.language.get_ref();
    let mut lower = Lower { text, start: header.start, language, names: BTreeMap::new() };
    if !header.form.suits(language) {
        return lower
            .fail(raw.language.span(), HeaderError::Form { language, expected: Form::expected(language) });
    }
    let note = lower.note(raw.note)?;
    let params = lower.params(raw.params)?;
    lower.declare_buffers(&raw.scratch, &raw.prepare)?;
    let scratch = lower.scratch(raw.scratch)?;
    lower.cap("guards", raw.guard.len(), caps::GUARDS, raw.guard.last().map(Spanned::span))?;
    let guard = raw.guard.iter().map(|text| lower.expr("guard", text)).collect::<Result<_>>()?;
    lower.cap(
        "[[prepare]] tables",
        raw.prepare.len(),
        caps::LAUNCHES,
        raw.prepare.last().map(Spanned::span),
    )?;
    let mut made = BTreeSet::new();
    let prepare =
        raw.prepare.into_iter().map(|step| lower.prepare(step, &mut made)).collect::<Result<_>>()?;
    lower.cap("[[launch]] tables", raw.launch.len(), caps::LAUNCHES, raw.launch.last().map(Spanned::span))?;
    if raw.launch.is_empty() {
        return Err(KernelFileError { line: Some(line_of(text, header.start)), kind: HeaderError::NoLaunch });
    }
    let launches = raw
        .launch
        .into_iter()
        .map(|launch| {
            let span = launch.span();
            lower.launch(span, launch.into_inner())
        })
        .collect::<Result<_>>()?;
    Ok(KernelFile { language, note, params, scratch, guard, prepare, launches, source: text.to_owned() })
}

/// What a name of the header stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Param,
    Scratch,
    Prepared,
}

impl Meaning {
    const fn text(self) -> &'static str {
        match self {
            Self::Param => "a parameter",
            Self::Scratch => "a scratch buffer",
            Self::Prepared => "a prepared buffer",
        }
    }
}

struct Lower<'a> {
    text: &'a str,
    start: usize,
    language: Language,
    names: BTreeMap<String, Meaning>,
}

impl Lower<'_> {
    fn fail<T>(&self, span: Range<usize>, kind: HeaderError) -> Result<T> {
        Err(KernelFileError { line: Some(line_of(self.text, self.start + span.start)), kind })
    }

    fn cap(&self, what: &'static str, got: usize, most: usize, span: Option<Range<usize>>) -> Result<()> {
        if got <= most {
            return Ok(());
        }
        let line = span.map(|span| line_of(self.text, self.start + span.start));
        Err(KernelFileError { line, kind: HeaderError::TooMany { what, got, most } })
    }

    fn declare(&mut self, name: &Spanned<String>, role: Role, meaning: Meaning) -> Result<()> {
        let text = name.get_ref();
        names::check(text, role, self.language).or_else(|kind| self.fail(name.span(), kind))?;
        match self.names.insert(text.clone(), meaning) {
            Some(before) => {
                self.fail(name.span(), HeaderError::Taken { name: text.clone(), by: before.text() })
            }
            None => Ok(()),
        }
    }

    fn note(&self, raw: Option<Spanned<String>>) -> Result<String> {
        match raw {
            Some(note) if note.get_ref().len() > caps::NOTE_BYTES => {
                self.fail(note.span(), HeaderError::NoteTooLong { bytes: note.get_ref().len() })
            }
            note => Ok(note.map(Spanned::into_inner).unwrap_or_default()),
        }
    }

    fn params(&mut self, raw: BTreeMap<Spanned<String>, Vec<i64>>) -> Result<BTreeMap<String, Vec<i64>>> {
        self.cap("parameters", raw.len(), caps::PARAMS, raw.keys().next().map(Spanned::span))?;
        let mut params = BTreeMap::new();
        for (name, values) in raw {
            self.declare(&name, Role::Param, Meaning::Param)?;
            let span = name.span();
            self.cap("values of one parameter", values.len(), caps::VALUES, Some(span.clone()))?;
            let name = name.into_inner();
            if values.is_empty() {
                return self.fail(span, HeaderError::NoValues { name });
            }
            let mut seen = BTreeSet::new();
            if let Some(value) = values.iter().copied().find(|value| !seen.insert(*value)) {
                return self.fail(span, HeaderError::RepeatedValue { name, value });
            }
            params.insert(name, values);
        }
        Ok(params)
    }

    fn declare_buffers(
        &mut self,
        scratch: &BTreeMap<Spanned<String>, RawScratch>,
        prepare: &[Spanned<RawPrepare>],
    ) -> Result<()> {
        self.cap("scratch buffers", scratch.len(), caps::SCRATCH, scratch.keys().next().map(Spanned::span))?;
        for name in scratch.keys() {
            self.declare(name, Role::Buffer, Meaning::Scratch)?;
        }
        for step in prepare {
            self.declare(&step.get_ref().output, Role::Buffer, Meaning::Prepared)?;
        }
        Ok(())
    }

    fn scratch(&self, raw: BTreeMap<Spanned<String>, RawScratch>) -> Result<BTreeMap<String, Scratch>> {
        let lower = |(name, raw): (Spanned<String>, RawScratch)| {
            let size = self.expr("size", &raw.size)?;
            Ok((name.into_inner(), Scratch { dtype: raw.dtype, size, zero: raw.zero }))
        };
        raw.into_iter().map(lower).collect()
    }

    fn prepare(&self, step: Spanned<RawPrepare>, made: &mut BTreeSet<String>) -> Result<Prepare> {
        let span = step.span();
        let (output, dtype, size, launch) = step.into_inner().split();
        let size = self.expr("size", &size)?;
        let args_span = launch.args.span();
        let launch = self.launch(span, launch)?;
        made.insert(output.get_ref().clone());
        for arg in &launch.args {
            let what = match arg {
                LaunchArg::Tensor(TensorName::Input(_))
                | LaunchArg::TensorMap(TensorMap { tensor: TensorName::Input(_), .. })
                | LaunchArg::Int(_)
                | LaunchArg::Threads => continue,
                LaunchArg::Prepared(name) if made.contains(name) => continue,
                LaunchArg::Prepared(name) => format!("`{name}`, which a later step makes"),
                LaunchArg::Scratch(name) => format!("scratch (`{name}`)"),
                LaunchArg::Tensor(name) | LaunchArg::TensorMap(TensorMap { tensor: name, .. }) => {
                    format!("an output of the region (`{name}`)")
                }
            };
            return self.fail(args_span, HeaderError::PrepareArg { what });
        }
        let own = |arg: &LaunchArg| matches!(arg, LaunchArg::Prepared(name) if name == output.get_ref());
        if !launch.args.iter().any(own) {
            return self.fail(output.span(), HeaderError::PrepareOutput { output: output.into_inner() });
        }
        Ok(Prepare { output: output.into_inner(), dtype, size, launch })
    }

    fn launch(&self, span: Range<usize>, raw: RawLaunch) -> Result<Launch> {
        self.check_language(span, &raw)?;
        let entry = raw.entry.get_ref().clone();
        names::check(&entry, Role::Entry, self.language).or_else(|kind| self.fail(raw.entry.span(), kind))?;
        if self.names.get(&entry) == Some(&Meaning::Param) {
            return self.fail(raw.entry.span(), HeaderError::EntryIsParam { entry });
        }
        self.cap("arguments", raw.args.get_ref().len(), caps::ARGS, Some(raw.args.span()))?;
        let optional = |field, text: &Option<Spanned<Text>>| {
            text.as_ref().map(|text| self.expr(field, text)).transpose()
        };
        let args = raw.args.get_ref().iter().enumerate();
        Ok(Launch {
            entry,
            when: optional("when", &raw.when)?,
            grid: self.extents("grid", raw.grid)?,
            block: self.extents("block", raw.block)?,
            shared: optional("shared", &raw.shared)?,
            cluster: self.extents("cluster", raw.cluster)?,
            cooperative: raw.cooperative.is_some_and(Spanned::into_inner),
            args: args.map(|(index, text)| self.arg(index, text)).collect::<Result<_>>()?,
        })
    }

    /// C++ has no launch shape; Triton's compiler chooses the block and its shared memory.
    fn check_language(&self, span: Range<usize>, raw: &RawLaunch) -> Result<()> {
        let RawLaunch { grid, block, shared, cluster, cooperative, .. } = raw;
        let language = self.language;
        let present = [
            ("grid", grid.as_ref().map(Spanned::span)),
            ("block", block.as_ref().map(Spanned::span)),
            ("shared", shared.as_ref().map(Spanned::span)),
            ("cluster", cluster.as_ref().map(Spanned::span)),
            ("cooperative", cooperative.as_ref().map(Spanned::span)),
        ];
        let (refused, needed, advice): (&[&str], &[&'static str], _) = match language {
            Language::Cpp => (
                &["grid", "block", "shared", "cluster", "cooperative"],
                &[],
                "; pass `threads` as an argument and use num_threads(n)",
            ),
            Language::Cuda => (&[], &["grid", "block"], ""),
            Language::Triton => (&["block", "shared", "cluster"], &["grid"], ", its compiler chooses it"),
        };
        for (key, given) in present {
            match given {
                Some(span) if refused.contains(&key) => {
                    return self.fail(span, HeaderError::NotForLanguage { language, key, advice });
                }
                None if needed.contains(&key) => {
                    return self.fail(span, HeaderError::Required { language, key });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn extents(&self, key: &'static str, raw: Option<Spanned<Vec<Spanned<Text>>>>) -> Result<Vec<Expr>> {
        let Some(raw) = raw else { return Ok(vec![]) };
        let (got, most) = (raw.get_ref().len(), 3);
        if !(1..=most).contains(&got) {
            return self.fail(raw.span(), HeaderError::Extents { key, got, most });
        }
        raw.get_ref().iter().map(|text| self.expr(key, text)).collect()
    }

    fn arg(&self, index: usize, text: &Spanned<Text>) -> Result<LaunchArg> {
        let field = format!("args[{index}]");
        let source = &text.get_ref().0;
        let span = text.span();
        let only = |language, key| {
            if self.language == language {
                return Ok(());
            }
            self.fail(span.clone(), HeaderError::NotForLanguage { language: self.language, key, advice: "" })
        };
        match argument(source).or_else(|error| self.bad_expr(&field, text, error))? {
            Argument::Threads => only(Language::Cpp, "threads").map(|()| LaunchArg::Threads),
            Argument::TensorMap { tensor, extents, swizzle } => {
                only(Language::Cuda, "tensor_map")?;
                let most = 5;
                if extents.len() > most {
                    return self.fail(span, HeaderError::Extents { key: "box", got: extents.len(), most });
                }
                extents.iter().try_for_each(|expr| self.check_names(&field, &span, expr))?;
                let tensor = self.tensor(&field, &span, &tensor)?;
                Ok(LaunchArg::TensorMap(TensorMap { tensor, extents, swizzle }))
            }
            Argument::Expr(expr) => {
                if let Some(name) = expr.lone_name() {
                    match self.names.get(name) {
                        Some(Meaning::Scratch) => return Ok(LaunchArg::Scratch(name.to_owned())),
                        Some(Meaning::Prepared) => return Ok(LaunchArg::Prepared(name.to_owned())),
                        Some(Meaning::Param) => {}
                        None => return self.tensor(&field, &span, name).map(LaunchArg::Tensor),
                    }
                }
                self.check_names(&field, &span, &expr)?;
                Ok(LaunchArg::Int(expr))
            }
        }
    }

    fn expr(&self, field: &str, text: &Spanned<Text>) -> Result<Expr> {
        let expr = text.get_ref().0.parse().or_else(|error| self.bad_expr(field, text, error))?;
        self.check_names(field, &text.span(), &expr)?;
        Ok(expr)
    }

    fn bad_expr<T>(&self, field: &str, text: &Spanned<Text>, error: ExprError) -> Result<T> {
        let (field, source) = (field.to_owned(), Box::new(error));
        let kind = HeaderError::Expression { field, text: clip(&text.get_ref().0), source };
        self.fail(text.span(), kind)
    }

    fn check_names(&self, field: &str, span: &Range<usize>, expr: &Expr) -> Result<()> {
        let mut first = Ok(());
        expr.for_each_name(&mut |mention| {
            if first.is_ok() {
                first = match mention {
                    Mention::Param(name) => self.number(field, span, name),
                    Mention::Tensor(name) => self.tensor(field, span, name).map(|_| ()),
                };
            }
        });
        first
    }

    /// Checks that a name stands for a number.
    fn number(&self, field: &str, span: &Range<usize>, name: &str) -> Result<()> {
        let is = match self.names.get(name) {
            Some(Meaning::Param) => return Ok(()),
            Some(meaning) => meaning.text(),
            None if names::is_like_tensor(name) => "a tensor",
            None => return self.unknown(field, span, name),
        };
        self.fail(span.clone(), HeaderError::NotNumber { field: field.to_owned(), name: name.to_owned(), is })
    }

    /// The tensor of the region that a name stands for.
    fn tensor(&self, field: &str, span: &Range<usize>, name: &str) -> Result<TensorName> {
        if let Some(tensor) = TensorName::parse(name) {
            return Ok(tensor);
        }
        match self.names.get(name) {
            Some(meaning) => {
                let (field, name) = (field.to_owned(), name.to_owned());
                self.fail(span.clone(), HeaderError::NotTensor { field, name, is: meaning.text() })
            }
            None => self.unknown(field, span, name),
        }
    }

    fn unknown<T>(&self, field: &str, span: &Range<usize>, name: &str) -> Result<T> {
        let known = self.names.keys().map(String::as_str).chain(["in0", "out0", "threads"]);
        let nearest = nearest(name, known).map(str::to_owned);
        let (field, name) = (field.to_owned(), name.to_owned());
        self.fail(span.clone(), HeaderError::UnknownName { field, name, nearest })
    }
}
