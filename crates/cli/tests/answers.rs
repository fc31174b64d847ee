//! The program answers: what a person sees on the terminal.

use std::process::{Command, Output};

fn glimmer(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_glimmer")).args(arguments).output().expect("the program starts")
}

fn printed(arguments: &[&str]) -> String {
    let output = glimmer(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn data(path: &str) -> String {
    format!("{}/../../data/{path}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_question_is_answered_whole_with_its_reasoning() {
    let text = printed(&["generate", "What is 47 + 85?"]);
    assert_eq!(text, "7+5=12, 4+8+1=13 so 47 + 85 = 132.\n47 + 85 = 132\n");
}

#[test]
fn the_draft_depth_does_not_change_an_answer() {
    let ask = |depth: &str| printed(&["generate", "--draft-depth", depth, "What is 386 - 158?"]);
    let plain = ask("0");
    assert!(plain.contains("228"), "{plain}");
    assert_eq!(plain, ask("1"));
    assert_eq!(plain, ask("3"));
}

#[test]
fn a_tool_call_is_printed_whole() {
    let folder = tempfile::tempdir().expect("a directory");
    let tools = folder.path().join("tools.json");
    let tool = r#"[{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]"#;
    std::fs::write(&tools, tool).expect("written");
    let text = printed(&["generate", "--tools", &tools.to_string_lossy(), "Tell me the weather in Ankara."]);
    assert!(text.ends_with("call get_weather({\"city\": \"Ankara\"})\n"), "{text}");
}

#[test]
fn a_picture_is_seen() {
    let image = data("goldens/micro/image_direct.png");
    let text = printed(&["generate", "--no-thinking", "--image", &image, "What color is the circle?"]);
    assert_eq!(text, "purple\n");
}

#[test]
fn a_seed_gives_the_same_answer_again() {
    let ask =
        || printed(&["generate", "--temperature", "1.5", "--seed", "7", "--max-tokens", "24", "Tell me a story."]);
    assert_eq!(ask(), ask());
}

#[test]
fn a_conversation_goes_on() {
    use std::{io::Write as _, process::Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_glimmer"))
        .args(["chat", "--no-thinking"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let input = b"What is the capital of France?\n/nonsense\n/image /does/not/exist\nWhat is the capital of Italy?\n";
    child.stdin.take().expect("piped").write_all(input).expect("written");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("Paris") && text.contains("Rome"), "{text}");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains("/nonsense") && errors.contains("/does/not/exist"), "{errors}");
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let text = printed(&["eval", "--kld-against", "--limit", "4"]);
    assert!(text.contains("0.000e0"), "{text}");
    assert!(text.contains("100.00"), "{text}");
}

#[test]
fn a_task_is_evaluated() {
    let text = printed(&["eval", "--task", "facts", "--limit", "4", "--thinking", "off"]);
    assert!(text.contains("facts") && text.contains("100.0"), "{text}");
}

#[test]
fn the_behaviour_of_an_artifact_is_judged_on_request() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (artifact, documents) = (path("artifact"), path("documents.jsonl"));
    let source = data("../models/micro-bf16");
    let all = std::fs::read_to_string(data("eval/documents.jsonl")).expect("documents");
    let few: Vec<&str> = all.lines().take(12).collect();
    std::fs::write(&documents, few.join("\n")).expect("written");
    printed(&["quantize", "--source", &source, "--method", "rtn", "--out", &artifact]);
    let judge = |bound: &str| {
        glimmer(&[
            "verify",
            "--artifact",
            &artifact,
            "--source",
            &source,
            "--run",
            "--documents",
            &documents,
            "--max-divergence",
            bound,
        ])
    };
    let good = judge("0.01");
    let text = String::from_utf8_lossy(&good.stdout).into_owned();
    assert_eq!(good.status.code(), Some(0), "{text}");
    assert!(text.lines().any(|line| line.starts_with("G17") && line.contains("pass")), "{text}");
    let bad = judge("1e-5");
    let text = String::from_utf8_lossy(&bad.stdout).into_owned();
    assert_eq!(bad.status.code(), Some(1), "{text}");
    assert!(text.contains("FAILED: G17") && text.contains("divergence from the source"), "{text}");
}
