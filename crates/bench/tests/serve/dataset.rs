//! Prompts are those of the established tool: vectors made with NumPy and transformers' tokenizer of the micro model.

use glimmer_bench::serve::ServeBenchError;
use glimmer_bench::serve::dataset::{CustomOptions, Prompt, RandomShape, RepetitionShape};
use glimmer_bench::serve::workload::Workload;
use sha2::{Digest as _, Sha256};

use crate::support::format;

fn shape(input: u32, output: u32, ratio: f64, prefix: u32) -> RandomShape {
    RandomShape { input, output, prefix, input_ratio: ratio, output_ratio: ratio }
}

fn made(workload: &Workload, count: usize, seed: u32) -> Vec<Prompt> {
    workload.prompts(&format(), count, seed, "x-").unwrap().0
}

/// Hash of all texts with a zero byte between them.
fn hash(prompts: &[Prompt]) -> String {
    let texts: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
    Sha256::digest(texts.join("\0")).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn random_prompts_have_the_lengths_and_texts_of_the_established_tool() {
    let cases = [
        (
            shape(16, 8, 0.0, 0),
            0,
            vec![16; 4],
            vec![8; 4],
            "b552706dc20c554b1c332b6fa92ab43aecb3f5b7b8c9c1c5e53d0a3655d0422d",
        ),
        (
            shape(24, 10, 0.5, 0),
            0,
            vec![33, 27, 24, 18, 19, 13],
            vec![5, 5, 6, 13, 12, 15],
            "a0f5c26690f7929bc0b37e025af55998f161551635166fbca911d87ac4e019ae",
        ),
        (
            shape(40, 12, 0.3, 6),
            7,
            vec![57, 49, 51, 56, 48],
            vec![14, 15, 10, 8, 10],
            "2f8067a7bce057d757c0b8acc3ccedd117224511a0125e0972211d00f16a345e",
        ),
    ];
    for (shape, seed, inputs, outputs, digest) in cases {
        let prompts = made(&Workload::Random(shape), inputs.len(), seed);
        assert_eq!(prompts.iter().map(|prompt| prompt.tokens).collect::<Vec<_>>(), inputs);
        assert_eq!(prompts.iter().map(|prompt| prompt.output_tokens).collect::<Vec<_>>(), outputs);
        assert_eq!(prompts[2].id.as_deref(), Some("x-2"));
        assert_eq!(hash(&prompts), digest, "{shape:?}");
    }
    assert_eq!(made(&Workload::Random(shape(16, 8, 0.0, 0)), 4, 0)[0].text, "OEPWQIQWRCRQTMTTTXUDWSYIZGd");
}

#[test]
fn repeated_prefixes_are_those_of_the_established_tool() {
    let shape = RepetitionShape { prefix: 12, suffix: 9, prefixes: 2, output: 5 };
    let prompts = made(&Workload::Repetition(shape), 7, 3);
    assert_eq!(prompts.len(), 6, "as many for each prefix");
    assert!(prompts.iter().all(|prompt| prompt.tokens == 21 && prompt.output_tokens == 5));
    assert_eq!(hash(&prompts), "e92d4efa6c7e8f8949724a6fc51ef527a98e0077a2ee17b1178f88e479890dc0");
}

fn custom(text: &str, in_order: bool, template: bool) -> Workload {
    let variables = serde_json::Map::new();
    let options = CustomOptions { output: 9, in_order, template, variables };
    Workload::Custom { file: "p.jsonl".to_owned(), text: text.to_owned(), options }
}

#[test]
fn a_file_is_shuffled_rendered_and_drawn_from_again() {
    let lines: Vec<String> = (0..12).map(|n| format!("{{\"prompt\": \"p{n}\"}}")).collect();
    let texts = |prompts: &[Prompt]| prompts.iter().map(|prompt| prompt.text.clone()).collect::<Vec<_>>();
    let all = made(&custom(&lines.join("\n"), false, false), 0, 0);
    let order = [1, 9, 8, 5, 10, 2, 3, 7, 4, 0, 11, 6];
    assert_eq!(texts(&all), order.map(|n| format!("p{n}")));
    let ten = lines[..10].join("\n\n");
    let more = made(&custom(&ten, true, false), 16, 0);
    assert_eq!(texts(&more[10..]), [8, 7, 4, 2, 5, 4].map(|n| format!("p{n}")));
    assert_eq!((more[15].id.as_deref(), more[15].output_tokens), (Some("x-15"), 9));
    let line = r#"{"prompt": "Hi", "output_tokens": 3, "answer": 5}"#;
    let rendered = made(&custom(line, true, true), 1, 0).remove(0);
    assert!(rendered.text.contains("<|user|>") && rendered.text.contains("<|assistant|>"), "{}", rendered.text);
    assert_eq!((rendered.output_tokens, rendered.answer.as_deref()), (3, Some("5")));
    assert!(rendered.tokens >= 3);
}

#[test]
fn what_cannot_be_sent_is_refused_by_name() {
    let refused = |workload: &Workload, count: usize| match workload.prompts(&format(), count, 0, "") {
        Err(error @ (ServeBenchError::Flag { .. } | ServeBenchError::Line { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let random = |input, ratio, prefix| Workload::Random(shape(input, 8, ratio, prefix));
    let repeated = |prefixes, prefix| Workload::Repetition(RepetitionShape { prefix, suffix: 0, prefixes, output: 1 });
    for (workload, count, needle) in [
        (random(8, 1.0, 0), 1, "--random-range-ratio: 1 is not in [0, 1)"),
        (random(1, 0.5, 0), 1, "--random-input-len: the shortest prompt would be empty"),
        (random(u32::MAX, 0.0, 0), 1, "--random-input-len: lengths may not exceed"),
        (random(8, 0.0, 0), 0, "--num-prompts: 0 prompts"),
        (repeated(3, 5), 2, "--prefix-repetition-num-prefixes: 3 prefixes for 2 prompts"),
        (repeated(1, 0), 2, "--prefix-repetition-prefix-len: "),
        (custom("\n", true, false), 1, "p.jsonl, line 1: no prompts"),
        (custom("{\"prompt\": \"a\"}\n{\"text\": \"b\"}", true, false), 1, "p.jsonl, line 2: expected an object with"),
        (custom("{\"prompt\": \"a\", \"output_tokens\": 0}", true, false), 1, "line 1: output_tokens: expected"),
        (custom("[", true, false), 1, "line 1: not JSON"),
    ] {
        let error = refused(&workload, count);
        assert!(error.contains(needle), "{error}");
    }
}
