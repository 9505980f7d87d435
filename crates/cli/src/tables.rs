//! Results as text for people.

use std::io::Write;

use autokernel_core::verdict::Interval;
use autokernel_engine::{
    BenchReport, DeviceReport, FormReport, OptimizeReport, ProfileReport, PutBackReport, RegionReport,
    Versions,
};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::progress::{short_ops, time};

/// Writes one line to stdout; a closed stdout (`| head`) is no error.
pub(crate) fn line(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

fn table<const N: usize>(header: [&str; N], right: &[usize]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(header);
    for column in right {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn ratio(interval: &Interval) -> String {
    format!("{:.2}x [{:.2}, {:.2}]", interval.value, interval.low, interval.high)
}

fn machine(device: &DeviceReport, versions: &Versions) -> String {
    format!(
        "{} ({} cores, {} threads), torch {}, Python {}",
        device.name, device.cores, device.threads, versions.torch, versions.python
    )
}

fn regions(rows: &[RegionReport]) -> Table {
    let mut out = table(
        ["region", "operations", "count", "share", "baseline", "reach", "best", "speedup", "verdict"],
        &[2, 3, 4, 5, 6],
    );
    for row in rows {
        out.add_row([
            row.id.clone(),
            short_ops(&row.ops),
            row.count.to_string(),
            format!("{:.1} %", row.share * 100.0),
            format!("{} ({})", time(row.baseline.us), row.baseline.name),
            time(row.reach_us),
            row.best_us.map_or_else(|| "-".to_owned(), time),
            row.speedup.as_ref().map_or_else(|| "-".to_owned(), ratio),
            row.verdict.clone(),
        ]);
    }
    out
}

fn forms(rows: &[FormReport], chosen: Option<&str>) -> Table {
    let mut out = table(["form", "one call", "95 % interval", ""], &[1]);
    for row in rows {
        let mark = match (&row.reason, chosen == Some(row.form.as_str())) {
            (Some(reason), _) => reason.clone(),
            (None, true) => "chosen".to_owned(),
            (None, false) => String::new(),
        };
        out.add_row([
            row.form.clone(),
            time(row.us.median),
            format!("{} to {}", time(row.us.low), time(row.us.high)),
            mark,
        ]);
    }
    out
}

/// The result of `optimize`.
pub(crate) fn optimize(report: &OptimizeReport) {
    line(&machine(&report.device, &report.versions));
    if !report.regions.is_empty() {
        line(&format!("\n{}", regions(&report.regions)));
    }
    line(&format!("\n{}", forms(&report.model.forms, report.model.chosen.as_deref())));
    let ours = report.model.chosen.as_deref().is_some_and(|form| form.starts_with("ours"));
    if let Some(speedup) = &report.model.speedup {
        line(&format!(
            "\n{}: {} over eager, {} over the best without our kernels",
            report.model.name,
            ratio(&speedup.vs_eager),
            ratio(&speedup.vs_best_plain)
        ));
    }
    if !ours {
        line(
            "Nothing of ours helps this model on this machine; the package gives back the best form that PyTorch has by itself.",
        );
    }
    line(&format!(
        "Stopped: {}; {} candidates built, {} judged, {:.0} s in all. At most {:.2}x could be won in these regions.",
        report.stopped,
        report.candidates.built,
        report.candidates.judged,
        report.seconds.total,
        report.model.winnable
    ));
    if let Some(package) = &report.package {
        line(&format!(
            "\nPackage: {package}\n  use it:    import sys; sys.path.insert(0, {:?}); import {}; model = {}.load(model)",
            parent(package),
            stem(package),
            stem(package)
        ));
        line(&format!("  check it:  autokernel bench {package}"));
    }
}

fn parent(path: &str) -> String {
    std::path::Path::new(path).parent().map_or_else(|| ".".to_owned(), |path| path.display().to_string())
}

fn stem(path: &str) -> String {
    std::path::Path::new(path)
        .file_name()
        .map_or_else(|| path.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The result of `profile`.
pub(crate) fn profile(report: &ProfileReport) {
    line(&machine(&report.device, &report.versions));
    line(&format!(
        "{}: {} graph(s), {} break(s), eager {}",
        report.model.name,
        report.model.graphs,
        report.model.breaks.len(),
        time(report.eager_us)
    ));
    for found in &report.model.breaks {
        let place = found
            .file
            .as_ref()
            .map(|file| format!(" at {file}:{}", found.line.unwrap_or(0)))
            .unwrap_or_default();
        line(&format!("  break{place}: {}", found.reason));
    }
    if report.regions.is_empty() {
        line("\nNo region here can be made faster by a kernel of ours.");
    } else {
        line(&format!("\n{}", regions(&report.regions)));
    }
    let mut left = table(["left as it is", "share", "why"], &[1]);
    for row in report.left.iter().filter(|row| row.share >= 0.001).take(12) {
        left.add_row([row.op.clone(), format!("{:.1} %", row.share * 100.0), row.reason.clone()]);
    }
    line(&format!("\n{left}"));
    line(&format!("\nAt most {:.2}x can be won in these regions.", report.model.winnable));
    if let Some(found) = &report.put_back {
        put_back(found);
    }
}

fn put_back(found: &PutBackReport) {
    let outputs = if found.same { "outputs are the model's" } else { "OUTPUTS DIFFER" };
    let gradients = match found.same_gradients {
        None => "it has no gradients",
        Some(true) => "gradients too",
        Some(false) => "GRADIENTS DIFFER",
    };
    line(&format!(
        "Put back: matched {} of {} regions, {outputs} (error {:.1e}), {gradients}.",
        found.matched, found.regions, found.max_relative_error
    ));
    for reason in &found.fallbacks {
        line(&format!("  a graph runs as it was: {reason}"));
    }
}

/// The result of `bench`.
pub(crate) fn bench(report: &BenchReport) {
    line(&machine(&report.device, &report.versions));
    line(&format!("\n{}", forms(&report.forms, Some(&report.form))));
    let mut out = table(["claim", "then", "now", "holds"], &[]);
    for claim in &report.claims {
        out.add_row([
            claim.what.clone(),
            ratio(&claim.claimed),
            ratio(&claim.measured),
            if claim.holds { "yes".into() } else { "NO".to_owned() },
        ]);
    }
    line(&format!("\n{out}"));
}
