//! A small model, its artifact, and ways to damage it: everything in memory until a directory is asked for.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::OnceLock,
};

use glimmer_checkpoint::{
    Checkpoint, Config, DType, Digest, ExpertMatrix, Inventory, Manifest,
    int4::{PackedMatrix, Quotient},
    manifest::{MANIFEST_FILE, SourceIdentity, TensorRecord},
    scheme::{IgnoreStyle, Scheme, quantization_config, with_quantization_config},
    sharding::shard_name,
    shards::INDEX_FILE,
};
use half::bf16;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Files of a directory by name.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A checkpoint before it is written.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) shards: Vec<(String, Vec<Tensor>)>,
    /// Everything but shards, index and manifest.
    pub(crate) files: Files,
}

impl Plan {
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        let all = self.shards.iter_mut().flat_map(|(_, tensors)| tensors);
        all.into_iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub(crate) fn remove(&mut self, name: &str) -> Tensor {
        for (_, tensors) in &mut self.shards {
            if let Some(i) = tensors.iter().position(|t| t.name == name) {
                return tensors.remove(i);
            }
        }
        panic!("no tensor {name}");
    }

    pub(crate) fn add(&mut self, shard: usize, name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) {
        let tensor = Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes };
        self.shards[shard].1.push(tensor);
    }

    pub(crate) fn swap(&mut self, a: &str, b: &str) {
        let bytes = self.tensor(a).bytes.clone();
        let other = std::mem::replace(&mut self.tensor(b).bytes, bytes);
        self.tensor(a).bytes = other;
    }

    pub(crate) fn copy(&mut self, from: &str, to: &str) {
        self.tensor(to).bytes = self.tensor(from).bytes.clone();
    }

    /// Replaces a BF16 matrix by a packed triple.
    pub(crate) fn quantize(&mut self, base: &str) {
        let name = format!("{base}.weight");
        let i = self.shards.iter().position(|(_, t)| t.iter().any(|t| t.name == name)).expect("a shard holds it");
        let weight = self.remove(&name);
        self.shards[i].1.extend(triple(base, &weight));
    }

    /// Changes `config.json`.
    pub(crate) fn config(&mut self, change: impl FnOnce(&mut Value)) {
        let text = self.files.get_mut("config.json").expect("a config");
        let mut value: Value = serde_json::from_slice(text).expect("JSON");
        change(&mut value);
        *text = serde_json::to_vec_pretty(&value).expect("JSON");
    }

    /// Shards, index and the other files, without a manifest.
    pub(crate) fn render(&self) -> Files {
        let mut files = self.files.clone();
        let mut map = serde_json::Map::new();
        let mut total = 0;
        for (file, tensors) in &self.shards {
            for tensor in tensors {
                map.insert(tensor.name.clone(), file.clone().into());
                total += tensor.bytes.len();
            }
            files.insert(file.clone(), shard(tensors));
        }
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        files.insert(INDEX_FILE.to_owned(), serde_json::to_vec_pretty(&index).expect("JSON"));
        files
    }

    /// The same with a manifest of exactly these files.
    pub(crate) fn render_with_manifest(&self) -> Files {
        self.render_with_origin(identity())
    }

    /// The same, made from another source.
    pub(crate) fn render_with_origin(&self, source: &SourceIdentity) -> Files {
        let mut files = self.render();
        let mut manifest = Manifest::new(source.clone(), json!({ "method": "rtn" }));
        for (name, content) in &files {
            manifest.add_file(name, content);
        }
        for (file, tensors) in &self.shards {
            for tensor in tensors {
                let record = TensorRecord { file: file.clone(), sha256: Digest::of(&tensor.bytes) };
                manifest.tensors.insert(tensor.name.clone(), record);
            }
        }
        files.insert(MANIFEST_FILE.to_owned(), serde_json::to_vec_pretty(&manifest).expect("JSON"));
        files
    }
}

/// A safetensors file.
pub(crate) fn shard(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        let entry = json!({
            "dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [start, data.len()],
        });
        header.insert(tensor.name.clone(), entry);
    }
    join_shard(&Value::Object(header).to_string(), &data)
}

/// Removes the last byte of a file.
pub(crate) fn cut(file: &mut Vec<u8>) {
    file.pop().expect("a file that is not empty");
}

pub(crate) fn join_shard(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// Header text and data of a shard.
pub(crate) fn split_shard(file: &[u8]) -> (String, Vec<u8>) {
    let length = u64::from_le_bytes(*file.first_chunk::<8>().expect("8 bytes"));
    let (header, data) = file[8..].split_at(usize::try_from(length).expect("small"));
    (String::from_utf8(header.to_vec()).expect("text"), data.to_vec())
}

pub(crate) fn write(directory: &Path, files: &Files) {
    for (name, content) in files {
        fs::write(directory.join(name), content).expect("a writable temporary directory");
    }
}

pub(crate) fn triple(base: &str, weight: &Tensor) -> [Tensor; 3] {
    let values: Vec<f32> = weight.bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
    let &[rows, cols] = &weight.shape[..] else { panic!("not a matrix") };
    let packed = PackedMatrix::round_to_nearest(&values, cols, Quotient::F32).expect("whole groups");
    let tensor = |suffix: &str, dtype, shape: Vec<usize>, bytes| Tensor {
        name: format!("{base}.{suffix}"),
        dtype,
        shape,
        bytes,
    };
    [
        tensor("weight_packed", DType::I32, vec![rows, cols / 8], packed.packed.clone()),
        tensor("weight_scale", DType::Bf16, vec![rows, cols / 128], packed.scale.clone()),
        tensor("weight_shape", DType::I64, vec![2], packed.shape().to_vec()),
    ]
}

/// Three layers (dense, then two with four experts), an MTP layer and a vision tower of one block.
pub(crate) fn config_text() -> String {
    r#"{
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "dtype": "bfloat16",
    "image_token_id": 60, "video_token_id": 61, "image_start_token_id": 56, "image_end_token_id": 57,
    "video_start_token_id": 58, "video_end_token_id": 59,
    "text_config": {
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "moe_intermediate_size": 128,
        "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 0, "v_head_dim": 16,
        "linear_num_heads": 2, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "index_kpool": 4,
        "indexer_types": ["full", "full", "full"],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "hc_mult": 2, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "mhc": true, "mla_use_nope": true,
        "swiglu_limit": 10.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
        "hidden_act": "silu", "attention_bias": false, "eos_token_id": [0], "pad_token_id": 0,
        "dtype": "bfloat16"
    },
    "vision_config": {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256,
        "projection_intermediate_size": 32, "patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "in_channels": 3, "hidden_act": "silu", "attention_bias": true, "swiglu_limit": 10.0, "rms_norm_eps": 1e-5
    }
}"#
    .to_owned()
}

pub(crate) fn config() -> Config {
    Config::parse(&config_text()).expect("the test's configuration is sound")
}

/// Standard normal numbers that depend on the name alone.
fn normal(name: &str, n: usize) -> impl Iterator<Item = f32> {
    let mut state =
        name.bytes().fold(0x9e37_79b9_7f4a_7c15_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut uniform = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
    };
    (0..n).map(move |_| {
        let (a, b) = (uniform(), uniform());
        (-2.0 * (1.0 - a).ln()).sqrt() * (std::f32::consts::TAU * b).cos()
    })
}

fn companions() -> Files {
    let files = [
        ("config.json", config_text()),
        ("generation_config.json", r#"{"temperature": 1.0, "top_p": 0.95, "eos_token_id": [0]}"#.to_owned()),
        ("tokenizer.json", r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}"#.to_owned()),
        ("tokenizer_config.json", r#"{"model_max_length": 1024}"#.to_owned()),
        ("preprocessor_config.json", r#"{"patch_size": 2}"#.to_owned()),
        ("chat_template.jinja", "[gMASK]<sop>{{ messages }}".to_owned()),
        ("LICENSE", "MIT".to_owned()),
        ("README.md", "A model.".to_owned()),
    ];
    files.into_iter().map(|(name, text)| (name.to_owned(), text.into_bytes())).collect()
}

/// The BF16 checkpoint, in two shards.
pub(crate) fn source() -> Plan {
    let mut shards = vec![
        ("model-00001-of-00002.safetensors".to_owned(), Vec::new()),
        ("model-00002-of-00002.safetensors".to_owned(), Vec::new()),
    ];
    for (i, spec) in Inventory::bf16(&config()).tensors().iter().enumerate() {
        let n = spec.shape.iter().product();
        let values = normal(&spec.name, n).map(|x| 0.08 * x);
        let bytes = match spec.dtype {
            DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
            _ => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        };
        let tensor = Tensor { name: spec.name.clone(), dtype: spec.dtype, shape: spec.shape.clone(), bytes };
        shards[i % 2].1.push(tensor);
    }
    Plan { shards, files: companions() }
}

/// The artifact of [`source`].
pub(crate) fn artifact() -> Plan {
    rounded(source(), IgnoreStyle::Regex)
}

/// Round-to-nearest: trunk, one shard for each layer with experts, MTP layer with vision tower.
pub(crate) fn rounded(source: Plan, ignore: IgnoreStyle) -> Plan {
    let text = std::str::from_utf8(&source.files["config.json"]).expect("text");
    let config = Config::parse(text).expect("a sound configuration");
    let quantized: BTreeMap<String, ExpertMatrix> = config.text.quantized_matrices().map(|m| (m.weight(), m)).collect();
    let layers: BTreeSet<usize> = quantized.values().map(|m| m.layer).collect();
    let mtp = config.text.mtp_layer().map(|layer| format!(".layers.{layer}.")).expect("an MTP layer");
    let count = layers.len() + 2;
    let mut shards: Vec<(String, Vec<Tensor>)> = (1..=count).map(|i| (shard_name(i, count), Vec::new())).collect();
    for tensor in source.shards.into_iter().flat_map(|(_, tensors)| tensors) {
        match quantized.get(&tensor.name) {
            Some(matrix) => {
                let place = 1 + layers.iter().position(|l| *l == matrix.layer).expect("a layer of the list");
                shards[place].1.extend(triple(&matrix.base(), &tensor));
            }
            None if tensor.name.contains(&mtp) || tensor.name.contains(".visual.") => shards[count - 1].1.push(tensor),
            None => shards[0].1.push(tensor),
        }
    }
    let mut files = source.files;
    let block = quantization_config(&config, Scheme { static_order: true, ignore });
    let text = std::str::from_utf8(&files["config.json"]).expect("text");
    let text = with_quantization_config(text, &block).expect("an object");
    files.insert("config.json".to_owned(), text.into_bytes());
    Plan { shards, files }
}

/// A checkpoint of the repository.
pub(crate) fn read(directory: &Path) -> Plan {
    let checkpoint = Checkpoint::open(directory).expect("a sound checkpoint");
    let tensor = |name: &str| {
        let data = checkpoint.tensor(name).expect("a tensor of the checkpoint");
        let bytes = data.bytes.as_slice().to_vec();
        Tensor { name: data.name, dtype: data.dtype, shape: data.shape, bytes }
    };
    let tensors = checkpoint.names().map(tensor).collect();
    let content = |name: &str| checkpoint.file(name).expect("a file of the checkpoint").as_slice().to_vec();
    let files = checkpoint.files().filter(|f| *f != INDEX_FILE).map(|f| (f.to_owned(), content(f))).collect();
    Plan { shards: vec![(shard_name(1, 1), tensors)], files }
}

/// The source on disk, written once for all tests of this binary.
pub(crate) fn source_directory() -> &'static Path {
    static DIRECTORY: OnceLock<TempDir> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a temporary directory");
        write(directory.path(), &source().render());
        directory
    });
    directory.path()
}

fn identity() -> &'static SourceIdentity {
    static IDENTITY: OnceLock<SourceIdentity> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let checkpoint = Checkpoint::open(source_directory()).expect("a sound source");
        SourceIdentity::of(&checkpoint).expect("its config.json is there")
    })
}

/// The good artifact, built once.
pub(crate) fn good() -> &'static Plan {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    PLAN.get_or_init(artifact)
}

/// Its files with their manifest.
pub(crate) fn good_files() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| good().render_with_manifest())
}
