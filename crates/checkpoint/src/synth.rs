//! Random checkpoints for any configuration, BF16 or W4A16.
//!
//! A tensor's bytes depend on the seed, its name and its shape only: not on the shard size, not on the machine. The W4A16
//! checkpoint of a seed is the round-to-nearest quantization of the BF16 checkpoint of that seed. Memory use is bounded by one
//! expert matrix.
//!
//! Weights have standard deviation `1 / sqrt(inputs)`, norms are near 1, and the decay parameters of the linear attention lie
//! where trained ones do, so that activations stay in a sensible range through the whole network.

mod random;

use std::{fs, path::Path};

use half::bf16;
use serde_json::json;

use crate::{
    config::Config,
    data::DType,
    digest::Digest,
    error::Error,
    int4::{self, PackedMatrix, Quotient},
    inventory::{Group, Inventory, Sum, TensorSpec},
    manifest::{Manifest, SourceIdentity},
    scheme::{Scheme, quantization_config, with_quantization_config},
    sharding::plan_shards,
    shards::INDEX_FILE,
    writer::{DEFAULT_SHARD_BYTES, ShardWriter, TensorHeader, write_file, write_index},
};
use random::Stream;

const GENERATION_FILE: &str = "generation_config.json";

/// Elements made at a time; a multiple of the quantization group.
const CHUNK: usize = 1 << 16;

/// How a synthetic checkpoint is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SynthFormat {
    /// BF16, as a source.
    #[default]
    Bf16,
    /// W4A16, as an artifact.
    W4a16,
}

/// What to synthesize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SynthOptions {
    /// How it is stored.
    pub format: SynthFormat,
    /// Seed.
    pub seed: u64,
    /// Most bytes of tensors in a shard.
    pub shard_bytes: u64,
}

impl Default for SynthOptions {
    fn default() -> Self {
        Self { format: SynthFormat::Bf16, seed: 0, shard_bytes: DEFAULT_SHARD_BYTES }
    }
}

/// Writes a random checkpoint for the configuration `config_text` (a `config.json`) into `directory`, which must be empty or
/// absent. `progress` is told the bytes of tensors written so far, and all there are. `config.json` and the index come last, so
/// an interrupted run does not look finished. A W4A16 checkpoint has a manifest, as an artifact must.
///
/// # Errors
/// [`Error::Config`]; [`Error::Invalid`] when the directory is not empty or the model cannot be stored as W4A16;
/// [`Error::Io`].
pub fn synth(
    config_text: &str,
    directory: &Path,
    options: SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Sum, Error> {
    let config = Config::parse(config_text)?;
    let inventory = match options.format {
        SynthFormat::Bf16 => Inventory::bf16(&config),
        SynthFormat::W4a16 => Inventory::w4a16(&config)?,
    };
    let total = inventory.total();
    fs::create_dir_all(directory).map_err(|e| Error::io(directory, "create", e))?;
    let mut entries = fs::read_dir(directory).map_err(|e| Error::io(directory, "list the directory", e))?;
    if entries.next().is_some() {
        let remedy = "choose another directory or empty this one";
        return Err(Error::invalid(directory.display().to_string(), "an empty directory", "files in it", remedy));
    }

    let mut maker = Maker { seed: options.seed, values: vec![0.0; CHUNK], bytes: Vec::new(), packed: None };
    let (mut receipts, mut written) = (Vec::new(), 0);
    for shard in plan_shards(inventory.tensors(), options.shard_bytes) {
        let headers = shard.tensors.iter().map(TensorHeader::from).collect();
        let mut writer = ShardWriter::create(directory, &shard.file, headers)?;
        for spec in &shard.tensors {
            maker.write(spec, &mut writer)?;
            written += spec.bytes();
            progress(written, total.bytes);
        }
        receipts.push(writer.finish()?);
    }
    let generation = json!({
        "eos_token_id": config.text.eos_token_ids,
        "pad_token_id": config.text.pad_token_id,
        "temperature": 1.0,
        "top_p": 0.95,
    });
    let generation = format!("{generation:#}\n");
    write_file(directory, GENERATION_FILE, generation.as_bytes())?;
    write_index(directory, &receipts)?;
    let text = match options.format {
        SynthFormat::Bf16 => config_text.to_owned(),
        SynthFormat::W4a16 => with_quantization_config(config_text, &quantization_config(&config, Scheme::default()))?,
    };
    if options.format == SynthFormat::W4a16 {
        let mut manifest =
            Manifest::new(imagined_source(config_text, &config), json!({"method": "rtn", "synth_seed": options.seed}));
        receipts.iter().for_each(|receipt| manifest.add_shard(receipt));
        manifest.add_file(GENERATION_FILE, generation.as_bytes());
        let index = directory.join(INDEX_FILE);
        manifest.add_file(INDEX_FILE, &fs::read(&index).map_err(|e| Error::io(&index, "read", e))?);
        manifest.add_file("config.json", text.as_bytes());
        manifest.write(directory)?;
    }
    write_file(directory, "config.json", text.as_bytes())?;
    Ok(total)
}

/// The identity of the BF16 checkpoint of the same configuration and seed, which need not exist: its weights are not sampled.
fn imagined_source(config_text: &str, config: &Config) -> SourceIdentity {
    let total = Inventory::bf16(config).total();
    SourceIdentity {
        config_sha256: Digest::of(config_text.as_bytes()),
        index_sha256: None,
        tensors: total.tensors,
        tensor_bytes: total.bytes,
        sample_sha256: None,
        revision: None,
    }
}

/// Makes the bytes of tensors, chunk by chunk.
struct Maker {
    seed: u64,
    values: Vec<f32>,
    bytes: Vec<u8>,
    /// The matrix whose three tensors are being written, by the name of its `weight`.
    packed: Option<(String, PackedMatrix)>,
}

impl Maker {
    fn write(&mut self, spec: &TensorSpec, writer: &mut ShardWriter) -> Result<(), Error> {
        if spec.group == Group::MoeRouted {
            for (suffix, part) in [("_packed", 0), ("_scale", 1), ("_shape", 2)] {
                if let Some(weight) = spec.name.strip_suffix(suffix) {
                    return self.write_part(weight, part, spec, writer);
                }
            }
        }
        let law = Law::of(spec);
        let stream = Stream::new(self.seed, &spec.name);
        let elements = spec.elements();
        let mut first = 0;
        while first < elements {
            let count = usize::try_from(elements - first).map_or(CHUNK, |left| left.min(CHUNK));
            let values = &mut self.values[..count];
            law.fill(stream, first, values);
            self.bytes.resize(count * spec.dtype.size(), 0);
            if spec.dtype == DType::F32 {
                for (bytes, x) in self.bytes.as_chunks_mut().0.iter_mut().zip(values) {
                    *bytes = x.to_le_bytes();
                }
            } else {
                // The inventory holds nothing but BF16 and F32 apart from the packed parts above.
                for (bytes, x) in self.bytes.as_chunks_mut().0.iter_mut().zip(values) {
                    *bytes = bf16::from_f32(*x).to_le_bytes();
                }
            }
            writer.write(&self.bytes)?;
            first += count as u64;
        }
        Ok(())
    }

    /// Writes one of the three tensors of a quantized matrix. They follow each other, so the matrix is made once.
    fn write_part(
        &mut self,
        weight: &str,
        part: usize,
        spec: &TensorSpec,
        writer: &mut ShardWriter,
    ) -> Result<(), Error> {
        if self.packed.as_ref().is_none_or(|(name, _)| name != weight) {
            // The first of the three is `_packed` `[rows, cols / 8]`.
            let (rows, cols) = (spec.shape[0], spec.shape[1] * 8);
            self.packed = Some((weight.to_owned(), self.quantized(weight, rows, cols)?));
        }
        let matrix = &self.packed.as_ref().expect("set above").1;
        match part {
            0 => writer.write_named(&spec.name, &matrix.packed),
            1 => writer.write_named(&spec.name, &matrix.scale),
            _ => writer.write_named(&spec.name, &matrix.shape()),
        }
    }

    /// Round-to-nearest of the BF16 matrix of this name.
    fn quantized(&mut self, weight: &str, rows: usize, cols: usize) -> Result<PackedMatrix, Error> {
        let (law, stream) = (Law::matrix(cols), Stream::new(self.seed, weight));
        let mut matrix = PackedMatrix { rows, cols, packed: Vec::new(), scale: Vec::new() };
        let rows_at_once = (CHUNK / cols).max(1);
        let mut values = vec![0.0; rows_at_once * cols];
        for first in (0..rows).step_by(rows_at_once) {
            let values = &mut values[..rows_at_once.min(rows - first) * cols];
            law.fill(stream, (first * cols) as u64, values);
            values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            let mut part = PackedMatrix::round_to_nearest(values, cols, Quotient::F32)?;
            matrix.packed.append(&mut part.packed);
            matrix.scale.append(&mut part.scale);
        }
        Ok(matrix)
    }
}

/// Random bytes for a tensor, for measuring speed alone: elements have the distribution of [`synth`], but a block of them is
/// repeated over the whole tensor, and INT4 codes have nothing to do with any matrix. Equal specs give equal bytes.
pub fn dummy(spec: &TensorSpec, seed: u64) -> Vec<u8> {
    let stream = Stream::new(seed, &spec.name);
    let bytes = usize::try_from(spec.bytes()).unwrap_or(usize::MAX);
    let mut values = vec![0f32; CHUNK.min(usize::try_from(spec.elements()).unwrap_or(CHUNK))];
    let scale = spec.name.ends_with("weight_scale");
    let law = if scale {
        // Codes lie around 0 with a deviation of 4.6.
        let inputs = spec.shape.last().map_or(1, |groups| groups * int4::GROUP);
        let size = 0.2 / (inputs.max(1) as f32).sqrt();
        Law::Uniform { low: 0.5 * size, high: 1.5 * size }
    } else {
        Law::of(spec)
    };
    let block: Vec<u8> = match spec.dtype {
        DType::F32 => {
            law.fill(stream, 0, &mut values);
            values.iter().flat_map(|v| v.to_le_bytes()).collect()
        }
        DType::Bf16 => {
            law.fill(stream, 0, &mut values);
            values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()
        }
        _ => {
            Law::Uniform { low: 0.0, high: (1 << 24) as f32 }.fill(stream, 0, &mut values);
            values.iter().flat_map(|v| (*v as u32).wrapping_mul(0x9e37_79b1).to_le_bytes()).collect()
        }
    };
    let mut all = Vec::with_capacity(bytes);
    while all.len() < bytes {
        all.extend_from_slice(&block[..block.len().min(bytes - all.len())]);
    }
    all
}

/// The distribution of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Law {
    Normal { mean: f32, deviation: f32 },
    Uniform { low: f32, high: f32 },
}

impl Law {
    fn of(spec: &TensorSpec) -> Self {
        let name = spec.name.rsplit_once("self_attn.").map_or(spec.name.as_str(), |(_, tail)| tail);
        match (name, spec.shape.as_slice()) {
            // exp(A_log) is the steepness of the decay gate, dt_bias its offset: most channels remember for long.
            ("A_log", _) => Self::Uniform { low: 0.0, high: 1.5 },
            ("dt_bias", _) => Self::Uniform { low: -4.0, high: -1.0 },
            (name, _) if name.ends_with("embed_tokens.weight") => Self::Normal { mean: 0.0, deviation: 1.0 },
            (name, _) if name.ends_with("e_score_correction_bias") => Self::Normal { mean: 0.0, deviation: 0.01 },
            (name, _) if name.ends_with("_scale") => Self::Normal { mean: 1.0, deviation: 0.05 },
            (name, _) if name.ends_with("_base") => Self::Normal { mean: 0.0, deviation: 0.1 },
            (name, _) if name.ends_with("_ape") => Self::Normal { mean: 0.0, deviation: 0.1 },
            (name, [_]) if name.ends_with(".bias") => Self::Normal { mean: 0.0, deviation: 0.02 },
            (_, [_]) => Self::Normal { mean: 1.0, deviation: 0.1 },
            (_, shape) => Self::matrix(shape.iter().skip(1).product()),
        }
    }

    fn matrix(inputs: usize) -> Self {
        Self::Normal { mean: 0.0, deviation: 1.0 / (inputs.max(1) as f32).sqrt() }
    }

    fn fill(self, stream: Stream, first: u64, out: &mut [f32]) {
        match self {
            Self::Normal { mean, deviation } => stream.normal(first, mean, deviation, out),
            Self::Uniform { low, high } => stream.uniform(first, low, high, out),
        }
    }
}
