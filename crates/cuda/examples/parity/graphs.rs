//! Steps repeated as graphs against the same steps launched kernel by kernel: all results equal bit for bit.

use glimmer_cuda::Cuda;
use glimmer_model::{ChainStep, HiddenSource, Limits, Model, MtpStep, Options};
use glimmer_tensor::Step;

use crate::{
    harness::{Goldens, Sequence, argmax},
    micro::{Rounded, bits, draft_logits, logits},
};

const TOKENS: usize = 640;
const SEQUENCES: u32 = 3;
const ROUNDS: usize = 24;

fn limits() -> Limits {
    Limits { max_logits: 64, ..Limits::for_sequences(5, TOKENS, 300, 3) }
}

/// Everything that can be read of a step: logits, hidden states, and those of draft steps with their selections.
#[derive(Default, PartialEq)]
struct Seen(Vec<(String, Vec<Vec<u32>>)>);

impl Seen {
    fn trunk(&mut self, name: String, model: &Model<Cuda>, step: &Step) {
        let hidden = model.config().hidden_size;
        let mut all: Vec<_> = (0..step.logits.len()).map(|i| bits(&logits(model, i))).collect();
        for row in 0..step.rows() {
            let mut values = vec![0.0; hidden];
            model.hidden(row, &mut values).unwrap();
            all.push(bits(&values));
        }
        self.0.push((name, all));
    }

    fn draft(&mut self, name: String, model: &Model<Cuda>, draft: &MtpStep) {
        let hidden = model.config().hidden_size;
        let mut all: Vec<_> = (0..draft.step.logits.len()).map(|i| bits(&draft_logits(model, i))).collect();
        for row in 0..draft.step.rows() {
            let mut values = vec![0.0; hidden];
            model.draft_hidden(row, &mut values).unwrap();
            all.push(bits(&values));
            all.push(model.draft_selection(row));
        }
        self.0.push((name, all));
    }
}

/// Prompts, then rounds of verification with one to three accepted rows and of drafts; slots move and a long chunk comes between.
fn script(model: &mut Model<Cuda>, tokens: &[u32]) -> Seen {
    let mut seen = Seen::default();
    let mut sequences: Vec<Sequence> = (0..SEQUENCES).map(|slot| Sequence::new(&limits(), slot)).collect();
    for (i, sequence) in sequences.iter_mut().enumerate() {
        for chunk in tokens[..130 + 71 * i].chunks(100) {
            let step = sequence.step(chunk, 1);
            model.forward(&step, &mut ()).unwrap();
            seen.trunk(format!("prompt {i}"), model, &step);
        }
    }
    for round in 0..ROUNDS {
        if round == ROUNDS / 2 {
            // A larger step than any before moves scratch; another slot takes over a sequence.
            let mut other = Sequence::new(&limits(), 4);
            model.forward(&other.step(&tokens[..300], 1), &mut ()).unwrap();
            model.copy_slot(1, 3).unwrap();
            sequences[1].slot = 3;
        }
        // As many rows each time, shared out in turn: steps of one key that differ in all that a key leaves open.
        let rows_of = |i: usize| if round % 4 == 3 { 1 } else { 1 + (round + i) % 3 };
        let mut step = Step::default();
        for (i, sequence) in sequences.iter().enumerate() {
            let (at, rows) = (sequence.position, rows_of(i));
            sequence.add(&mut step, at, &tokens[at..at + rows], 1, rows);
        }
        model.forward(&step, &mut ()).unwrap();
        seen.trunk(format!("round {round}"), model, &step);

        let mut first = MtpStep { step: Step::default(), from: HiddenSource::Trunk, source: Vec::new(), shared: None };
        let mut chain = MtpStep { from: HiddenSource::Draft, ..first.clone() };
        let (mut given, mut before) = (Vec::new(), 0);
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let (at, accepted) = (sequence.position, (round / 3 + i) % rows_of(i) + 1);
            let unfolded = Sequence { fold: 0, ..sequence.clone() };
            let row = first.step.rows();
            unfolded.add(&mut first.step, at, &tokens[at + 1..=at + accepted], accepted, 1);
            first.source.extend((0..accepted).map(|k| (before + k) as u32));
            before += rows_of(i);
            unfolded.add(&mut chain.step, at + accepted, &[0], 1, 1);
            chain.source.push((row + accepted - 1) as u32);
            given.push((row + accepted - 1) as u32);
            sequence.position += accepted;
            sequence.fold = accepted - 1;
        }
        model.draft(&first, &mut ()).unwrap();
        seen.draft(format!("round {round}, drafts"), model, &first);
        for (i, token) in chain.step.tokens.iter_mut().enumerate() {
            *token = argmax(&draft_logits(model, i));
        }
        if round % 2 == 0 {
            chain.shared = Some(given);
        }
        model.draft(&chain, &mut ()).unwrap();
        seen.draft(format!("round {round}, chain"), model, &chain);

        // The same without anybody looking.
        let mut read = chain.step.tokens.clone();
        read.extend((0..chain.step.logits.len()).map(|i| argmax(&draft_logits(model, i))));
        chain.step.tokens.fill(0);
        let taken = (0..chain.step.rows() as u32).collect();
        let mut unseen = Vec::new();
        model.draft_chain(&first, &[ChainStep { step: chain, taken }], &mut unseen).unwrap();
        let equal = unseen.iter().copied().eq(read.into_iter().map(Some));
        seen.0.push((format!("round {round}, unseen chain"), vec![vec![u32::from(equal)]]));
    }
    for slot in [0, 2, 3] {
        let states = (0..model.shape().kda_layers).map(|layer| bits(&model.state(layer, slot).unwrap())).collect();
        seen.0.push((format!("states of slot {slot}"), states));
    }
    seen
}

/// Steps of so many rows that the library's products are in them.
fn many_rows(open: &dyn Fn() -> Cuda, tokens: &[u32]) -> usize {
    const WIDE: u32 = 9;
    let limits = Limits { max_logits: 64, ..Limits::for_sequences(WIDE as usize, 256, 300, 3) };
    let source = Rounded(crate::harness::micro());
    let run = |eager: bool| {
        let mut cuda = open();
        cuda.set_eager(eager);
        let mut model = Model::load(cuda, &source, limits, Options::default()).unwrap();
        let mut seen = Seen::default();
        let mut sequences: Vec<Sequence> = (0..WIDE).map(|slot| Sequence::new(&limits, slot)).collect();
        for round in 0..6 {
            let mut step = Step::default();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                let at = sequence.position;
                sequence.add(&mut step, at, &tokens[at + i..at + i + 3], 3, 3);
                sequence.position += 3;
            }
            model.forward(&step, &mut ()).unwrap();
            seen.trunk(format!("many rows {round}"), &model, &step);
        }
        (seen, model.backend().repeated().0, model.backend().has_library())
    };
    let ((expected, none, _), (found, repeated, library)) = (run(true), run(false));
    println!("graphs, 27 rows, library {library}: {repeated} of 6 steps repeated, equal {}", expected == found);
    // The first step makes scratch grow, which forgets notes; two are compared, the rest repeated.
    usize::from(none != 0) + usize::from(repeated < 3) + usize::from(expected != found)
}

/// The number of failures.
pub(crate) fn check(open: &dyn Fn() -> Cuda) -> usize {
    let mut goldens = Goldens::open("data/goldens/micro/recall_400.safetensors");
    let mut tokens = goldens.tokens("input_ids");
    tokens.extend(goldens.tokens("decode.tokens"));
    let wide = many_rows(open, &tokens);
    let source = Rounded(crate::harness::micro());
    let run = |eager: bool| {
        let mut cuda = open();
        cuda.set_eager(eager);
        let mut model = Model::load(cuda, &source, limits(), Options::default()).unwrap();
        let free = |model: &Model<Cuda>| model.backend().device().free_memory().unwrap().0;
        let before = free(&model);
        // A step is noted, kept, repeated.
        let seen = [(); 3].map(|()| script(&mut model, &tokens));
        let library = model.backend().has_library();
        let taken = before.saturating_sub(free(&model)) >> 10;
        println!("graphs, eager {eager}, library {library}: {taken} KiB less free than before");
        (seen, model.backend().repeated())
    };
    let (expected, (none, _)) = run(true);
    let (found, (repeated, nodes)) = run(false);
    let mut failures = wide + usize::from(none != 0) + usize::from(repeated == 0);
    for (pass, (expected, found)) in expected.iter().zip(&found).enumerate() {
        for ((name, a), (_, b)) in expected.0.iter().zip(&found.0) {
            if a != b {
                println!("graphs, pass {pass}: {name}: {} of {} rows differ", differing(a, b), a.len());
                failures += 1;
            }
        }
    }
    for (name, _) in
        found.iter().flat_map(|seen| &seen.0).filter(|(n, rows)| n.ends_with("unseen chain") && rows[0] != [1])
    {
        println!("graphs: {name}: other drafts than those of the chain that was read");
        failures += 1;
    }
    // An unseen chain is two steps.
    let steps: usize = found.iter().map(|seen| seen.0.len() - 3 + ROUNDS).sum();
    println!("graphs: {repeated} of {steps} steps repeated, {nodes} nodes in the last, {failures} failures");
    failures
}

fn differing(a: &[Vec<u32>], b: &[Vec<u32>]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a != b).count()
}
