//! The token panel on the micro model, against figures measured with another implementation.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use glimmer_bench::{Document, PanelScorer, Scorer, divergence, read_documents};
use glimmer_checkpoint::int4::{PackedMatrix, Quotient, dequantize_matrix};
use glimmer_checkpoint::{Bytes, Checkpoint, Config, DType, TensorData};
use glimmer_model::weights::Source;
use glimmer_tensor::Cpu;
use glimmer_text::Tokenizer;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn documents(count: usize) -> Vec<Document> {
    let text = std::fs::read_to_string(format!("{ROOT}/data/eval/documents.jsonl")).unwrap();
    read_documents("documents", &text).unwrap().into_iter().take(count).collect()
}

fn scorer(source: &dyn Source) -> PanelScorer<Cpu> {
    let tokenizer = Tokenizer::from_dir(format!("{ROOT}/models/micro-bf16").as_ref()).unwrap();
    let longest = documents(usize::MAX).iter().map(|document| document.ids.len()).max().unwrap();
    PanelScorer::load(Cpu::new(2), source, tokenizer.vocab_size(), longest).unwrap()
}

/// The checkpoint with its routed experts rounded to INT4 and back.
struct Rounded(Checkpoint);

impl Source for Rounded {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn has(&self, name: &str) -> bool {
        self.0.has(name)
    }

    fn tensor(&self, name: &str) -> glimmer_model::Result<TensorData> {
        let mut tensor = self.0.tensor(name)?;
        let draft = format!("layers.{}.", self.config().text.num_hidden_layers);
        if !name.contains(".mlp.experts.") || name.contains(&draft) {
            return Ok(tensor);
        }
        assert_eq!(tensor.dtype, DType::Bf16);
        let columns = tensor.shape[1];
        let half = |pair: &[u8]| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
        let weights: Vec<f32> = tensor.bytes.as_slice().chunks_exact(2).map(half).collect();
        let matrix = PackedMatrix::round_to_nearest(&weights, columns, Quotient::F32).unwrap();
        let rounded = dequantize_matrix(&matrix.packed, &matrix.scale, columns).unwrap();
        tensor.bytes = Bytes::new(rounded.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        Ok(tensor)
    }
}

#[test]
fn divergence_of_rounded_experts_is_as_measured_elsewhere() {
    let documents = documents(30);
    let checkpoint = Checkpoint::open(format!("{ROOT}/models/micro-bf16")).unwrap();
    let mut reference = scorer(&checkpoint);
    let mut rounded = scorer(&Rounded(checkpoint));
    let result = divergence(&mut reference, &mut rounded, &documents, &mut |_, _| {}).unwrap();
    // Measured for this model over these 4,472 tokens with another program: NLL 0.9694 and 0.9657, KL 9.0e-4, same top
    // token 91.0 %. (Over all 200 documents: KL 9.32e-4.)
    assert_eq!((result.documents, result.tokens), (30, 4_472));
    assert!((result.nll_reference - 0.9694).abs() < 5e-5, "{result:?}");
    assert!((result.nll_model - 0.9657).abs() < 1e-4, "{result:?}");
    assert!((result.mean - 9.0e-4).abs() < 5e-6, "{result:?}");
    assert!((result.top1_agreement - 91.0).abs() < 0.05, "{result:?}");
}

#[test]
fn scores_do_not_depend_on_earlier_documents_and_images_are_refused() {
    let checkpoint = Checkpoint::open(format!("{ROOT}/models/micro-bf16")).unwrap();
    let mut model = scorer(&checkpoint);
    let documents = documents(3);
    let mut score = |document: &Document| {
        let mut rows = Vec::new();
        model.score(document, &mut |_, row| rows.extend_from_slice(row)).unwrap();
        rows
    };
    let alone = score(&documents[2]);
    score(&documents[1]);
    assert!(score(&documents[2]) == alone);
    let with_image = Document { images: vec![Vec::new()], ..documents[0].clone() };
    assert!(model.score(&with_image, &mut |_, _| {}).is_err());
}
