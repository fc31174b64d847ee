//! The task files of the repository: every reference answer is right, and the harness counts what it is given.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use glimmer_bench::{
    Acceptance, Answerer, BenchError, Call, Divergence, EvalOptions, Finish, Grader, Question, Reply, ReplySink, Task,
    acceptance_table, divergence_table, evaluate, grade, read_documents, read_task, task_table,
};
use glimmer_engine::DraftCounts;
use serde_json::Value;

const EVAL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/eval");
const TASKS: [&str; 10] = [
    "arithmetic",
    "arithmetic_beyond",
    "arithmetic_hard",
    "facts",
    "recall",
    "text",
    "tools",
    "tools_final",
    "vision",
    "word_problem",
];

fn file(name: &str) -> String {
    std::fs::read_to_string(format!("{EVAL}/{name}.jsonl")).unwrap()
}

fn task(name: &str) -> Task {
    read_task(name, &file(name)).unwrap()
}

fn reference(line: &Value) -> (String, Vec<Call>) {
    let reference = &line["reference"];
    let call = |call: &Value| Call {
        name: call["name"].as_str().unwrap().to_owned(),
        arguments: call["arguments"].as_object().unwrap().clone(),
    };
    (
        reference["content"].as_str().unwrap().to_owned(),
        reference["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
    )
}

#[test]
fn every_reference_answer_is_right_and_its_neighbours_is_not() {
    for name in TASKS {
        let task = task(name);
        assert_eq!((task.items.len(), task.name.as_str()), (200, name));
        let lines: Vec<Value> = file(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let mut crossed = 0;
        for (index, item) in task.items.iter().enumerate() {
            let (content, calls) = reference(&lines[index]);
            assert!(grade(item, content.trim(), &calls), "{}", item.id);
            assert!(!grade(item, "", &[]), "{}", item.id);
            let other = &lines[(index + 1) % lines.len()];
            let (content, calls) = reference(other);
            crossed += usize::from(grade(item, &content, &calls) && other["answer"] != lines[index]["answer"]);
        }
        // Answers to other questions are right only by accident: a word inside another word.
        assert!(crossed <= 2, "{name}: {crossed}");
    }
}

/// Answers from the references, backwards, with some answers spoiled.
struct Scripted {
    lines: Vec<Value>,
    spoil: fn(usize) -> bool,
}

impl Answerer for Scripted {
    fn answer(&mut self, questions: &[Question<'_>], done: &mut ReplySink<'_>) -> Result<(), BenchError> {
        for (index, question) in questions.iter().enumerate().rev() {
            let line = self.lines.iter().find(|line| line["id"] == question.id).unwrap();
            let (content, calls) = reference(line);
            // Only the first items of a task come with their reasoning, which no grader sees.
            let thought = line["reference"]["reasoning"].as_str().unwrap_or("I know the answer.");
            let text = if question.thinking { format!("{thought}</think> {content}\n") } else { content };
            let spoiled = (self.spoil)(index);
            let text = if spoiled { "no idea".to_owned() } else { text };
            let finish = if spoiled { Finish::Length } else { Finish::Stop };
            let calls = if spoiled { Vec::new() } else { calls };
            assert_eq!(question.max_tokens, 192);
            done(index, Reply { text, calls, finish, tokens: 10 });
        }
        Ok(())
    }
}

fn run(names: &[&str], options: &EvalOptions, spoil: fn(usize) -> bool) -> Vec<glimmer_bench::TaskResult> {
    let lines = names.iter().flat_map(|name| file(name).lines().map(str::to_owned).collect::<Vec<_>>());
    let lines = lines.map(|line| serde_json::from_str(&line).unwrap()).collect();
    let tasks: Vec<Task> = names.iter().map(|name| task(name)).collect();
    let mut seen = 0;
    let results = evaluate(&mut Scripted { lines, spoil }, &tasks, options, &mut |done, all| {
        seen += 1;
        assert!(done == seen && done <= all);
    });
    results.unwrap()
}

#[test]
fn tasks_run_with_reasoning_and_without_where_items_allow_it() {
    let results = run(&["arithmetic", "arithmetic_hard", "tools", "text"], &EvalOptions::default(), |_| false);
    let rows: Vec<_> = results.iter().map(|r| (r.task.as_str(), r.thinking, r.items)).collect();
    let expected = [
        ("arithmetic", true, 200),
        ("arithmetic", false, 64),
        ("arithmetic_hard", true, 200),
        ("tools", true, 200),
        ("tools", false, 200),
        ("text", true, 200),
        ("text", false, 200),
    ];
    assert_eq!(rows, expected);
    assert!(results.iter().all(|r| r.correct == r.items && r.truncated == 0 && r.wrong.is_empty()));
    let hard: Vec<_> = results[0].levels.iter().map(|l| (l.level.as_str(), l.items, l.correct)).collect();
    assert_eq!(hard, [("hard", 102, 102), ("easy", 98, 98)]);
}

#[test]
fn wrong_and_truncated_answers_are_counted() {
    let options = EvalOptions { limit: Some(40), thinking_off: false, ..EvalOptions::default() };
    let results = run(&["facts"], &options, |index| index % 4 == 0);
    let result = &results[0];
    assert_eq!((result.items, result.correct, result.truncated, result.tokens), (40, 30, 10, 400));
    assert!((result.accuracy - 75.0).abs() < 1e-9);
    assert!((result.sigma - 100.0 * (0.75_f64 * 0.25 / 40.0).sqrt()).abs() < 1e-9);
    assert_eq!(result.wrong[1], "facts-004");
}

#[test]
fn an_answerer_that_forgets_a_question_is_an_error() {
    struct Silent;
    impl Answerer for Silent {
        fn answer(&mut self, _: &[Question<'_>], _: &mut ReplySink<'_>) -> Result<(), BenchError> {
            Ok(())
        }
    }
    let error = evaluate(&mut Silent, &[task("facts")], &EvalOptions::default(), &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("facts-000"), "{error}");
}

#[test]
fn graders_appear_as_the_files_have_them() {
    let graders: Vec<Grader> = task("text").items.iter().map(|item| item.grader).collect();
    assert_eq!(graders.iter().filter(|&&grader| grader == Grader::Json).count(), 54);
}

#[test]
fn the_panel_and_the_calibration_set_read() {
    let documents = read_documents("documents", &file("documents")).unwrap();
    assert_eq!(documents.len(), 200);
    let compared: usize = documents.iter().map(|document| document.ids.len() - 1).sum();
    assert_eq!(compared, 36_073);
    let calibration = std::fs::read_to_string(format!("{EVAL}/../calib/calib.jsonl")).unwrap();
    let samples = read_documents("calib", &calibration).unwrap();
    assert_eq!(samples.len(), 256);
    assert!(samples.iter().any(|sample| sample.images.iter().any(|image| image.starts_with(b"\x89PNG"))));
}

#[test]
fn tables_hold_the_numbers() {
    let results = run(&["facts"], &EvalOptions { limit: Some(8), ..EvalOptions::default() }, |index| index == 0);
    let table = task_table(&[("BF16", &results), ("W4A16", &results)]);
    assert!(table.contains("BF16 right %") && table.contains("87.5") && table.contains("100.0"), "{table}");
    let mut counts = DraftCounts::default();
    counts.record(2, 1);
    let table = acceptance_table(&[("all", &Acceptance::from(&counts))]);
    assert!(table.contains("draft 2 %") && table.contains("2.00"), "{table}");
    let divergence = Divergence {
        documents: 1,
        tokens: 4_472,
        mean: 9.32e-4,
        capped: 8e-4,
        median_document: 1e-4,
        max: 1.0,
        top1_agreement: 91.0,
        nll_reference: 0.9694,
        nll_model: 0.9657,
    };
    let table = divergence_table(&[("RTN", &divergence)]);
    assert!(table.contains("9.320e-4") && table.contains("0.9657") && table.contains("91.00"), "{table}");
}
