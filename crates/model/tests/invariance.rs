//! What a row computes depends on its sequence alone, to the last bit: on the trained micro model, every layer.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use std::collections::HashMap;

use glimmer_model::{HiddenSource, Limits, Model, MtpStep, Options};
use glimmer_tensor::{
    KdaForm, Step,
    cpu::{Cpu, Isa},
};
use harness::{Goldens, Sequence, argmax, close, draft_hidden, load, logits, micro};
use proptest::prelude::*;

const DEPTH: usize = 3;
const TOKENS: usize = 320;

/// A real prompt, long enough that pools are dropped and pages change, and its greedy continuation.
fn text() -> Vec<u32> {
    let mut goldens = Goldens::open("data/goldens/micro/recall_400.safetensors");
    let mut tokens = goldens.tokens("input_ids");
    let skip = tokens.len() - 200;
    tokens.drain(..skip);
    tokens.extend(goldens.tokens("decode.tokens"));
    tokens
}

fn limits() -> Limits {
    Limits { max_logits: 280, ..Limits::for_sequences(4, TOKENS, 280, DEPTH) }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn rows_of(model: &Model<Cpu>, rows: usize) -> Vec<Vec<u32>> {
    (0..rows).map(|row| bits(&logits(model, row))).collect()
}

fn states(model: &Model<Cpu>, slot: u32) -> Vec<Vec<u32>> {
    (0..model.shape().kda_layers).map(|layer| bits(&model.state(layer, slot).unwrap())).collect()
}

/// Logits of every row and the final states, in chunks of the given sizes (the last one takes the rest).
fn in_chunks(model: &mut Model<Cpu>, tokens: &[u32], slot: u32, sizes: &[usize]) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let mut sequence = Sequence::new(&limits(), slot);
    let mut all = Vec::new();
    let mut rest = tokens;
    for &size in sizes.iter().chain([&usize::MAX]) {
        let (chunk, after) = rest.split_at(size.min(rest.len()));
        rest = after;
        if !chunk.is_empty() {
            model.forward(&sequence.step(chunk, chunk.len()), &mut ()).unwrap();
            all.extend(rows_of(model, chunk.len()));
        }
    }
    (all, states(model, slot))
}

#[test]
fn any_chunking_of_a_prompt_equals_one_shot() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    let whole = in_chunks(&mut model, &tokens, 0, &[]);
    // Inside a pool, at a pool's end, at a page's end, single rows.
    for sizes in [&[1, 2, 3][..], &[8, 56, 64], &[61, 1, 1, 1, 1], &[100, 100]] {
        assert!(in_chunks(&mut model, &tokens, 1, sizes) == whole, "{sizes:?}");
    }
}

#[test]
fn plain_decoding_equals_one_shot() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    let whole = in_chunks(&mut model, &tokens, 0, &[]);
    let single = [&[200][..], &[1; 63]].concat();
    assert!(in_chunks(&mut model, &tokens, 3, &single) == whole);
}

#[test]
fn a_row_alone_equals_the_row_in_a_mixed_batch() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    // Three sequences at different places: one decodes, one is inside a chunked prompt, one begins.
    let texts = [&tokens[..], &tokens[40..], &tokens[7..90]];
    let starts = [230, 75, 0];
    let counts = [1, 50, 83];
    let mut alone = Vec::new();
    let mut alone_states = Vec::new();
    for (i, text) in texts.iter().enumerate() {
        let mut sequence = Sequence::new(&limits(), 0);
        if starts[i] > 0 {
            model.forward(&sequence.step(&text[..starts[i]], 0), &mut ()).unwrap();
        }
        model.forward(&sequence.step(&text[starts[i]..starts[i] + counts[i]], counts[i]), &mut ()).unwrap();
        alone.extend(rows_of(&model, counts[i]));
        alone_states.push(states(&model, 0));
    }
    let mut sequences: Vec<Sequence> = [2, 0, 3].iter().map(|&slot| Sequence::new(&limits(), slot)).collect();
    for (i, sequence) in sequences.iter_mut().enumerate() {
        if starts[i] > 0 {
            model.forward(&sequence.step(&texts[i][..starts[i]], 0), &mut ()).unwrap();
        }
    }
    let mut step = Step::default();
    for (i, sequence) in sequences.iter().enumerate() {
        sequence.add(&mut step, starts[i], &texts[i][starts[i]..starts[i] + counts[i]], counts[i], counts[i]);
    }
    model.forward(&step, &mut ()).unwrap();
    assert!(rows_of(&model, step.rows()) == alone);
    for (sequence, expected) in sequences.iter().zip(&alone_states) {
        assert!(&states(&model, sequence.slot) == expected);
    }
}

/// Decodes `tokens[from..]` in verify steps: each round checks some of the following tokens as drafts, of which the first
/// `right` are the true ones and the others wrong. Returns the logits of every true row.
fn verify(model: &mut Model<Cpu>, tokens: &[u32], from: usize, slot: u32, rounds: &[(usize, usize)]) -> Vec<Vec<u32>> {
    let vocab = model.config().vocab_size as u32;
    let mut sequence = Sequence::new(&limits(), slot);
    model.forward(&sequence.step(&tokens[..from], 1), &mut ()).unwrap();
    let mut all = vec![bits(&logits(model, 0))];
    let mut rounds = rounds.iter().cycle();
    while sequence.position < tokens.len() {
        let &(drafts, right) = rounds.next().unwrap();
        let at = sequence.position;
        let drafts = drafts.min(tokens.len() - at - 1);
        let right = right.min(drafts);
        let mut rows = tokens[at..=at + drafts].to_vec();
        for wrong in &mut rows[right + 1..] {
            *wrong = (*wrong + 17) % vocab;
        }
        let mut step = Step::default();
        sequence.add(&mut step, at, &rows, 1, rows.len());
        model.forward(&step, &mut ()).unwrap();
        all.extend(rows_of(model, right + 1));
        // Row 0 is in the state; the accepted drafts are records to fold in the next step.
        sequence.position = at + 1 + right;
        sequence.fold = right;
    }
    all
}

#[test]
fn verifying_drafts_and_folding_equals_plain_decoding() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    let from = 200;
    let plain = in_chunks(&mut model, &tokens, 0, &[from]).0;
    for rounds in [&[(3, 3)][..], &[(3, 0)], &[(3, 2), (1, 1), (0, 0), (2, 0), (3, 1)]] {
        let ours = verify(&mut model, &tokens, from, 1, rounds);
        assert!(ours == plain[from - 1..], "{rounds:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_pattern_of_acceptance_equals_plain_decoding(
        rounds in prop::collection::vec((0..=DEPTH, 0..=DEPTH), 1..12),
        from in 1usize..80,
    ) {
        let checkpoint = micro();
        let tokens = &text()[..110];
        let mut model = load(&checkpoint, limits());
        let plain = in_chunks(&mut model, tokens, 0, &[]).0;
        let ours = verify(&mut model, tokens, from, 2, &rounds);
        prop_assert!(ours == plain[from - 1..]);
    }
}

#[test]
fn draft_rows_do_not_depend_on_chunks_or_on_drafts_made_before() {
    let (checkpoint, tokens) = (micro(), text());
    let tokens = &tokens[..150];
    let mut model = load(&checkpoint, limits());
    let mut whole = Sequence::new(&limits(), 0);
    model.forward(&whole.step(&tokens[..149], 0), &mut ()).unwrap();
    model.draft(&whole.draft(0, &tokens[1..], HiddenSource::Trunk, 0, 0), &mut ()).unwrap();
    let expected: Vec<_> = (0..149).map(|row| bits(&draft_hidden(&model, row))).collect();

    let mut pieces = Sequence::new(&limits(), 1);
    let mut ours = Vec::new();
    for size in [70, 1, 1, 1, 5, 71] {
        let at = pieces.position;
        model.forward(&pieces.step(&tokens[at..at + size], 0), &mut ()).unwrap();
        model.draft(&pieces.draft(at, &tokens[at + 1..at + 1 + size], HiddenSource::Trunk, 0, 0), &mut ()).unwrap();
        ours.extend((0..size).map(|row| bits(&draft_hidden(&model, row))));
        // A chain that goes wrong: its cache entries must not matter.
        let mut source = size - 1;
        for k in 0..DEPTH {
            let junk = [3 + k as u32];
            model.draft(&pieces.draft(at + size + k, &junk, HiddenSource::Draft, source, 0), &mut ()).unwrap();
            source = 0;
        }
    }
    assert!(ours == expected);
}

#[test]
fn a_draft_row_alone_equals_the_row_in_a_mixed_batch() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    let texts = [&tokens[..150], &tokens[60..131]];
    let mut alone = Vec::new();
    for text in texts {
        let rows = text.len() - 1;
        let mut sequence = Sequence::new(&limits(), 0);
        model.forward(&sequence.step(&text[..rows], 0), &mut ()).unwrap();
        model.draft(&sequence.draft(0, &text[1..], HiddenSource::Trunk, 0, 0), &mut ()).unwrap();
        alone.extend((0..rows).map(|row| bits(&draft_hidden(&model, row))));
    }
    let (mut forward, mut draft) = (Step::default(), Step::default());
    for (slot, text) in [3, 1].into_iter().zip(texts) {
        let sequence = Sequence::new(&limits(), slot);
        sequence.add(&mut forward, 0, &text[..text.len() - 1], text.len() - 1, 0);
        sequence.add(&mut draft, 0, &text[1..], text.len() - 1, 0);
    }
    model.forward(&forward, &mut ()).unwrap();
    model.draft(&MtpStep::after_trunk(draft, 0), &mut ()).unwrap();
    let together: Vec<_> = (0..alone.len()).map(|row| bits(&draft_hidden(&model, row))).collect();
    assert!(together == alone);
}

#[test]
fn every_instruction_set_computes_the_same_bits() {
    let (checkpoint, tokens) = (micro(), text());
    let mut results = HashMap::new();
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
        for threads in [1, 2] {
            let device = Cpu::with_isa(threads, isa);
            let used = format!("{:?}", device.isa());
            let mut model = Model::load(device, &checkpoint, limits(), Options::default()).unwrap();
            let result = in_chunks(&mut model, &tokens[..90], 0, &[70, 1]);
            results.insert((used, threads), result);
        }
    }
    let expected = &results[&("Scalar".to_owned(), 1)];
    for (which, result) in &results {
        assert!(result == expected, "{which:?}");
    }
}

#[test]
fn a_copied_slot_continues_like_its_original() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    let whole = in_chunks(&mut model, &tokens, 0, &[]).0;
    let mut original = Sequence::new(&limits(), 1);
    model.forward(&original.step(&tokens[..133], 0), &mut ()).unwrap();
    model.copy_slot(1, 2).unwrap();
    // The original goes elsewhere; its pages are shared up to the copy, so it stays before that point.
    let mut other = Sequence::new(&limits(), 3);
    model.forward(&other.step(&tokens[5..60], 0), &mut ()).unwrap();
    model.copy_slot(3, 1).unwrap();
    let mut copy = Sequence { slot: 2, ..original };
    model.forward(&copy.step(&tokens[133..], tokens.len() - 133), &mut ()).unwrap();
    assert!(rows_of(&model, tokens.len() - 133) == whole[133..]);
}

#[test]
fn the_chunked_form_agrees_with_the_recurrent_one() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    let run = |model: &mut Model<Cpu>| {
        let mut sequence = Sequence::new(&limits(), 0);
        model.forward(&sequence.step(&tokens, tokens.len()), &mut ()).unwrap();
        let all: Vec<f32> = (0..tokens.len()).flat_map(|row| logits(model, row)).collect();
        let states: Vec<f32> = (0..model.shape().kda_layers).flat_map(|l| model.state(l, 0).unwrap()).collect();
        (all, states)
    };
    let recurrent = run(&mut model);
    model.set_kda_form(KdaForm::Chunked);
    let chunked = run(&mut model);
    close("logits", &chunked.0, &recurrent.0, 2e-5);
    close("states", &chunked.1, &recurrent.1, 1e-4);
    assert!(chunked.1 != recurrent.1, "the chunked form did not run");
    let vocab = model.config().vocab_size;
    for (a, b) in chunked.0.chunks(vocab).zip(recurrent.0.chunks(vocab)) {
        assert_eq!(argmax(a), argmax(b));
    }
}

#[test]
fn the_chunked_form_gives_the_same_bits_for_prompts_cut_at_multiples_of_its_chunk() {
    let (checkpoint, tokens) = (micro(), text());
    let mut model = load(&checkpoint, limits());
    model.set_kda_form(KdaForm::Chunked);
    let whole = in_chunks(&mut model, &tokens, 0, &[]);
    for sizes in [&[64][..], &[128, 64], &[64, 64, 64, 64]] {
        assert!(in_chunks(&mut model, &tokens, 1, sizes) == whole, "{sizes:?}");
    }
}
