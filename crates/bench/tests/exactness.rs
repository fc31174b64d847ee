//! A part of the exactness matrix that every run of the tests can afford: a few prompts of each kind, the corners of each axis.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use glimmer_bench::{
    ModelText, PictureReader, PrefixCostPlan, Task,
    exactness::{Base, Case, CaseKind, Cell, Comparison, agents, cases, matrix},
    prefix_cost, read_documents, read_task,
};
use glimmer_checkpoint::Checkpoint;
use glimmer_engine::Settings;
use glimmer_tensor::Cpu;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn checkpoint() -> Checkpoint {
    Checkpoint::open(format!("{ROOT}/models/micro-bf16")).unwrap()
}

fn data(name: &str) -> String {
    std::fs::read_to_string(format!("{ROOT}/data/eval/{name}.jsonl")).unwrap()
}

fn tasks(names: &[&str]) -> Vec<Task> {
    names.iter().map(|name| read_task(name, &data(name)).unwrap()).collect()
}

fn base(text: &ModelText, context: usize) -> Base {
    let settings = Settings {
        real_vocab: Some(text.format.tokenizer().vocab_size()),
        state_checkpoints: 16,
        ..Settings::default()
    };
    Base { settings, context, seed: 3 }
}

/// The first greedy case of each kind, and the first drawn one.
fn few(all: Vec<Case>) -> Vec<Case> {
    let mut seen: Vec<(CaseKind, bool)> = Vec::new();
    let mut new = |case: &Case| {
        let drawn = case.sampling.temperature > 0.0;
        let group = (if drawn { CaseKind::Text } else { case.kind }, drawn);
        let new = !seen.contains(&group);
        seen.push(group);
        new
    };
    all.into_iter().filter(|case| new(case)).map(|case| Case { max_tokens: case.max_tokens.min(40), ..case }).collect()
}

fn all_hold(comparisons: &[Comparison]) {
    for comparison in comparisons {
        assert!(comparison.holds(), "{}: {:?}", comparison.condition, comparison.differences);
    }
}

#[test]
fn answers_are_the_same_in_the_corners_of_the_matrix() {
    let checkpoint = checkpoint();
    let text = ModelText::read(&checkpoint).unwrap();
    let pictures = PictureReader::load(&checkpoint).unwrap();
    let tasks = tasks(&["text", "tools_final", "vision", "recall"]);
    let documents = read_documents("documents", &data("documents")).unwrap();
    let base = base(&text, 600);
    let cases = few(cases(&text, pictures.as_ref(), &tasks, &documents, 24, base.context).unwrap());
    let kinds: Vec<CaseKind> = cases.iter().map(|case| case.kind).collect();
    assert!([CaseKind::Text, CaseKind::Tools, CaseKind::Picture].iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
    let longest = cases.iter().map(|case| case.ids.len()).max().unwrap();
    assert!(longest > 256 && cases.iter().any(|case| case.sampling.temperature > 0.0), "{longest}");
    let corner = |cell: &Cell| cell.depth != 2 && cell.chunk != Some(256);
    let cells: Vec<Cell> = Cell::all().into_iter().filter(corner).collect();
    assert_eq!(cells.len(), 24);
    let comparisons = matrix(&mut || Ok(Cpu::new(2)), &checkpoint, &cases, &cells, &base, &mut |_| {}).unwrap();
    all_hold(&comparisons);
    for (cell, comparison) in cells.iter().zip(&comparisons) {
        assert_eq!(comparison.cached_tokens > 0, cell.prefix, "{}", comparison.condition);
        assert_eq!(comparison.accepted_drafts > 0, cell.depth > 0, "{}", comparison.condition);
    }
}

#[test]
fn agents_compute_what_is_new_and_at_most_a_page() {
    let checkpoint = checkpoint();
    let text = ModelText::read(&checkpoint).unwrap();
    let mut tools = tasks(&["tools"]);
    tools[0].items.truncate(10);
    let comparison = agents(&mut || Ok(Cpu::new(2)), &checkpoint, &text, &tools, &base(&text, 4096)).unwrap();
    all_hold(std::slice::from_ref(&comparison));
    // Ten turns of the user, and those of the tools.
    assert!(comparison.answers > 10 && comparison.accepted_drafts > 0, "{comparison:?}");
}

#[test]
fn the_cost_of_the_cache_is_measured_where_nothing_hits() {
    let checkpoint = checkpoint();
    let text = ModelText::read(&checkpoint).unwrap();
    let settings = Settings { rows: 64, pages: Some(6), ..base(&text, 512).settings };
    let plan = PrefixCostPlan { sequences: 2, prompt_tokens: 130, tokens: 4, depth: 1, rounds: 3 };
    let mut reading = 0.0;
    // A clock that advances by one between two readings: every engine takes equally long.
    let mut clock = || {
        reading += 1.0;
        reading
    };
    let mut rounds = Vec::new();
    let mut backend = || Ok(Cpu::new(1));
    let cost = prefix_cost(&mut backend, &checkpoint, &settings, &plan, &mut clock, &mut |round| rounds.push(round));
    let cost = cost.unwrap();
    assert_eq!(rounds, [1, 2, 3, 4, 5, 6], "three rounds to warm up, three that count");
    assert_eq!(cost.looked_up, 6 * 2 * 129);
    assert!(cost.pages >= 4, "the full pages of the last two prompts are there: {cost:?}");
    for ratios in [cost.cache, cost.control] {
        assert!((ratios.median - 1.0).abs() < 1e-12 && (ratios.upper - ratios.lower).abs() < 1e-12, "{ratios:?}");
    }
}
