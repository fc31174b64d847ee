//! Results as text tables.

use comfy_table::{Cell, CellAlignment, LineStyle, Table, TableStyle};

use crate::acceptance::Acceptance;
use crate::demo::TaskPair;
use crate::evaluate::TaskResult;
use crate::kld::{Divergence, KLD_CAP};

/// Tasks by mode: one row each, one column of accuracies for each named model.
///
/// All models must have run the same tasks in the same order; a row that a model lacks is left blank.
#[must_use]
pub fn task_table(models: &[(&str, &[TaskResult])]) -> String {
    let mut header = vec!["task".to_owned(), "thinking".to_owned(), "items".to_owned()];
    for (name, _) in models {
        header.extend([format!("{name} right %"), "+-".to_owned(), "cut off".to_owned()]);
    }
    let mut rows = Vec::new();
    for (index, first) in models.first().map_or(&[][..], |(_, results)| results).iter().enumerate() {
        let mut row = vec![first.task.clone(), on_off(first.thinking).to_owned(), first.items.to_string()];
        for (_, results) in models {
            match results.get(index) {
                Some(r) => {
                    row.extend([format!("{:.1}", r.accuracy), format!("{:.1}", r.sigma), r.truncated.to_string()]);
                }
                None => row.extend(["".to_owned(), "".to_owned(), "".to_owned()]),
            }
        }
        rows.push(row);
    }
    table(&header, &rows, 2)
}

/// Accuracy of two models, one row a task.
pub(crate) fn pair_table(pairs: &[TaskPair]) -> String {
    let header = ["task", "thinking", "items", "BF16", "W4A16"].map(str::to_owned);
    let row = |pair: &TaskPair| {
        let percent = |accuracy: f64| format!("{accuracy:.1}");
        let mode = on_off(pair.thinking).to_owned();
        vec![pair.task.clone(), mode, pair.items.to_string(), percent(pair.bf16), percent(pair.w4a16)]
    };
    table(&header, &pairs.iter().map(row).collect::<Vec<_>>(), 2)
}

/// Divergences from one reference, one row for each named model.
#[must_use]
pub fn divergence_table(models: &[(&str, &Divergence)]) -> String {
    let capped = format!("KL capped {KLD_CAP}");
    let header = ["model", "KL mean", capped.as_str(), "median doc", "same top %", "NLL", "NLL ref", "tokens"];
    let row = |(name, d): &(&str, &Divergence)| {
        vec![
            (*name).to_owned(),
            format!("{:.3e}", d.mean),
            format!("{:.3e}", d.capped),
            format!("{:.3e}", d.median_document),
            format!("{:.2}", d.top1_agreement),
            format!("{:.4}", d.nll_model),
            format!("{:.4}", d.nll_reference),
            d.tokens.to_string(),
        ]
    };
    table(&header.map(str::to_owned), &models.iter().map(row).collect::<Vec<_>>(), 1)
}

/// Acceptance by position, one row for each named set.
#[must_use]
pub fn acceptance_table(sets: &[(&str, &Acceptance)]) -> String {
    let depth = sets.iter().map(|(_, acceptance)| acceptance.by_position.len()).max().unwrap_or(0);
    let mut header = vec!["set".to_owned(), "steps".to_owned()];
    header.extend((1..=depth).map(|position| format!("draft {position} %")));
    header.push("tokens a step".to_owned());
    let row = |(name, acceptance): &(&str, &Acceptance)| {
        let mut row = vec![(*name).to_owned(), acceptance.steps.to_string()];
        let rate = |position| {
            acceptance.by_position.get(position).map_or(String::new(), |rate| format!("{:.1}", 100.0 * rate))
        };
        row.extend((0..depth).map(rate));
        row.push(format!("{:.2}", acceptance.mean_length));
        row
    };
    table(&header, &sets.iter().map(row).collect::<Vec<_>>(), 1)
}

/// A table whose first `words` columns are text and the others numbers.
#[must_use]
pub fn plain_table(header: &[String], rows: &[Vec<String>], words: usize) -> String {
    table(header, rows, words)
}

fn on_off(thinking: bool) -> &'static str {
    if thinking { "on" } else { "off" }
}

/// A rule under the header and nothing else.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('\u{2500}').junction('\u{2500}'));

/// A table whose first `words` columns are text and the others numbers.
pub(crate) fn table(header: &[String], rows: &[Vec<String>], words: usize) -> String {
    let mut table = Table::new();
    table.load_style(STYLE);
    let align = |(index, text): (usize, &String)| {
        let side = if index < words { CellAlignment::Left } else { CellAlignment::Right };
        Cell::new(text).set_alignment(side)
    };
    table.set_header(header.iter().enumerate().map(align));
    for row in rows {
        table.add_row(row.iter().enumerate().map(align));
    }
    table.trim_fmt()
}
