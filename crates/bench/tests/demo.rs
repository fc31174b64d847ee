//! The demo's chain from end to end, on a part of its data.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use glimmer_bench::{DemoInput, DemoProgress, Document, Task, demo, read_documents, read_task};
use glimmer_quantize::gates::Status;
use glimmer_tensor::Cpu;
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn task(name: &str) -> Task {
    read_task(name, &std::fs::read_to_string(format!("{ROOT}/data/eval/{name}.jsonl")).unwrap()).unwrap()
}

fn documents(path: &str, count: usize) -> Vec<Document> {
    let text = std::fs::read_to_string(format!("{ROOT}/data/{path}.jsonl")).unwrap();
    read_documents(path, &text).unwrap().into_iter().take(count).collect()
}

#[derive(Default)]
struct Stages {
    names: Vec<String>,
    share: f64,
}

impl DemoProgress for Stages {
    fn stage(&mut self, name: &str) {
        self.names.push(name.to_owned());
        self.share = 0.0;
    }

    fn done(&mut self, share: f64) {
        assert!(share >= self.share && share <= 1.0, "{share} after {} in {:?}", self.share, self.names.last());
        self.share = share;
    }
}

#[test]
fn the_chain_yields_a_verified_artifact_that_answers() {
    let work = tempfile::tempdir().unwrap();
    let tasks: Vec<Task> = ["facts", "word_problem", "tools", "vision"].map(task).into_iter().collect();
    let (calibration, panel) = (documents("calib/calib", 24), documents("eval/documents", 6));
    let input = DemoInput {
        source: concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16").as_ref(),
        artifact: &work.path().join("artifact"),
        parity: &work.path().join("parity"),
        tasks: &tasks,
        calibration: &calibration,
        documents: &panel,
        items: 5,
        draft_depth: 2,
        batch: 4,
        threads: 2,
        scorers: 2,
    };
    let mut stages = Stages::default();
    let report = demo(&input, &|threads| Ok(Cpu::new(threads)), &mut stages).unwrap();

    assert!(report.verify.passed, "{}", report.verify.verdict);
    assert!(report.verify.verdict.gates.iter().all(|gate| gate.status == Status::Pass), "{}", report.verify.verdict);
    assert!(report.quantize.matrices > 0 && report.quantize.tokens > 0);
    let rows: Vec<_> = report.tasks.iter().map(|pair| (pair.task.as_str(), pair.thinking, pair.items)).collect();
    let expected =
        [("facts", false, 5), ("word_problem", true, 5), ("tools", true, 5), ("tools", false, 5), ("vision", false, 5)];
    assert_eq!(rows, expected);
    for pair in &report.tasks {
        assert!(pair.bf16 > 99.0 && pair.w4a16 > 99.0, "{pair:?}");
    }
    assert!(report.kld.default > 0.0 && report.kld.default < 2e-3, "{:?}", report.kld);
    assert!(report.kld.parity > 0.0 && report.kld.parity < 2e-3, "{:?}", report.kld);
    assert_eq!(report.mtp.acceptance.len(), 2);
    assert!(report.mtp.acceptance[0] > 0.8 && report.mtp.acceptance[1] <= report.mtp.acceptance[0]);

    let answers = &report.answers;
    assert_eq!(answers.len(), 3);
    assert!(answers.iter().all(|answer| answer.right), "{answers:?}");
    assert!(answers[0].reasoning.is_some() && answers[0].content.is_some());
    assert!(!answers[1].calls.is_empty() && !answers[1].tools.is_empty());
    assert!(answers[2].picture && answers[2].reasoning.is_none());

    let page = report.page();
    for needle in ["QUANTIZED", "passes", "word_problem", "llm-compressor", "tokens a step", "calls"] {
        assert!(page.contains(needle), "{page}");
    }
    let json: Value = serde_json::to_value(&report).unwrap();
    for pointer in [
        "/seconds",
        "/quantize/seconds",
        "/kld/default",
        "/kld/parity",
        "/mtp/acceptance/0",
        "/tasks/0/bf16",
        "/tasks/0/w4a16",
    ] {
        assert!(json.pointer(pointer).is_some_and(Value::is_number), "{pointer}");
    }
    assert_eq!(json.pointer("/verify/passed"), Some(&Value::Bool(true)));
    assert_eq!(json.pointer("/tasks/0/task"), Some(&Value::from("facts")));
    assert_eq!(json["answers"].as_array().map(Vec::len), Some(3));
    assert_eq!(stages.names.first().map(String::as_str), Some("quantize"));
    assert_eq!(report.stages.len(), stages.names.len());
}
