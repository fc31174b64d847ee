//! From `config.json` to [`Config`]: both forms, all aliases, the few defaults, and every rule that the rest relies on.
//!
//! Two forms exist: nested (`text_config`, `vision_config`) and flat (text-only, the text keys at top level). Unknown keys
//! are ignored, since engines add their own; a key that would change the mathematics is checked even if only one value is
//! supported.

use std::{collections::BTreeSet, path::Path};

use serde_json::Value;

use super::{
    AttentionKind, Config, ConfigError, IndexerConfig, IndexerKind, KdaConfig, MediaTokens, MhcConfig, MlaConfig,
    MlpKind, MoeConfig, NormEpsOrigin, TextConfig, VisionConfig,
    object::{MAX_COUNT, MAX_WIDTH, Object},
};
use crate::scheme::QUANTIZATION_KEY;

/// Most decoder layers of an acceptable file.
const MAX_LAYERS: usize = 1 << 10;
/// Most embedding rows of an acceptable file.
const MAX_VOCABULARY: usize = 1 << 26;
/// Longest context of an acceptable file.
const MAX_CONTEXT: usize = 1 << 30;
/// Most residual streams and most pixels, frames or patches a side of an acceptable file.
const MAX_SMALL: usize = 1 << 6;

/// Patches of a token, each way: the order of patches and their positions are made for it.
const MERGE: usize = 2;

const UNSUPPORTED: &str = "this program implements no other value";
const INCONSISTENT: &str = "the file contradicts itself: take both values from the model's own config";

impl Config {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] naming the key, what was expected and what was found.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_str(text).map_err(|e| ConfigError::Json { found: e.to_string() })?;
        Self::from_value(&value)
    }

    /// Reads a `config.json`, or the one in a directory.
    ///
    /// # Errors
    /// As [`Config::parse`], and [`ConfigError::Read`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = std::fs::read_to_string(&file).map_err(|source| ConfigError::Read { path: file, source })?;
        Self::parse(&text)
    }

    /// Reads a parsed `config.json`.
    ///
    /// # Errors
    /// As [`Config::parse`].
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let Value::Object(map) = value else {
            return Err(ConfigError::Json { found: "another JSON value".to_owned() });
        };
        let root = Object::root(map);
        let nested = root.object("text_config")?;
        match root.text("model_type")? {
            Some("glm5_next") => {}
            Some("glm5_next_text") if nested.is_none() => {}
            Some(other) => {
                return Err(root.invalid(
                    "model_type",
                    "`glm5_next`",
                    format!("`{other}`"),
                    "this program serves GLM-5.3-Flash and models of exactly its architecture",
                ));
            }
            None => return Err(root.missing("model_type", "`glm5_next`")),
        }
        root.only_bool("tie_word_embeddings", false, UNSUPPORTED)?;
        let source = nested.as_ref().unwrap_or(&root);
        let text = text_config(source, &root)?;
        let vision = match root.object("vision_config")? {
            Some(object) => Some(vision_config(&object, &text)?),
            None => None,
        };
        let media = match vision {
            Some(_) => Some(media_tokens(&root, text.vocab_size)?),
            None => None,
        };
        for object in [&root, source] {
            object.object(QUANTIZATION_KEY)?;
        }
        let quantization = root.value(QUANTIZATION_KEY).or_else(|| source.value(QUANTIZATION_KEY)).cloned();
        Ok(Self { text, vision, media, quantization })
    }
}

fn text_config(o: &Object<'_>, root: &Object<'_>) -> Result<TextConfig, ConfigError> {
    if let Some(kind) = o.text("model_type")?
        && !kind.starts_with("glm5_next")
    {
        return Err(o.invalid("model_type", "`glm5_next_text`", format!("`{kind}`"), UNSUPPORTED));
    }
    for dtype in ["dtype", "torch_dtype"] {
        o.only_text(dtype, "bfloat16", "this program reads BF16 checkpoints (and FP8 or INT4 ones made from them)")?;
    }
    o.only_bool("tie_word_embeddings", false, UNSUPPORTED)?;
    o.only_text("hidden_act", "silu", UNSUPPORTED)?;
    o.only_bool("attention_bias", false, UNSUPPORTED)?;
    o.only_bool("mhc", true, UNSUPPORTED)?;

    let layers = o.count("num_hidden_layers", MAX_LAYERS)?;
    let linear = o.object("linear_attn_config")?;
    let attention = attention_kinds(o, linear.as_ref(), layers)?;
    let eos_token_ids = match o.tokens("eos_token_id")? {
        Some(ids) => ids,
        None => root.tokens("eos_token_id")?.ok_or_else(|| o.missing("eos_token_id", "the stop token ids"))?,
    };
    let pad_token_id = match o.token("pad_token_id")? {
        Some(id) => Some(id),
        None => root.token("pad_token_id")?,
    };
    let vocab_size = o.count("vocab_size", MAX_VOCABULARY)?;
    for &id in &eos_token_ids {
        inside_vocabulary(o, "eos_token_id", id, vocab_size)?;
    }
    let mla = mla_config(o)?;
    let indexer = indexer_config(o, &attention)?;
    Ok(TextConfig {
        hidden_size: o.width("hidden_size")?,
        intermediate_size: o.width("intermediate_size")?,
        num_hidden_layers: layers,
        num_nextn_predict_layers: o
            .integer("num_nextn_predict_layers", 0, 1)?
            .ok_or_else(|| o.missing("num_nextn_predict_layers", "0 or 1"))?,
        mlp: mlp_kinds(o, layers)?,
        kda: kda_config(o, linear.as_ref())?,
        mla,
        indexer,
        moe: moe_config(o)?,
        mhc: MhcConfig {
            streams: o.count("hc_mult", MAX_SMALL)?,
            eps: o.positive("hc_eps")?,
            sinkhorn_iters: o.count("hc_sinkhorn_iters", MAX_COUNT)?,
        },
        swiglu_limit: o.positive("swiglu_limit")?,
        rms_norm_eps: o.positive("rms_norm_eps")?,
        vocab_size,
        max_position_embeddings: o.count("max_position_embeddings", MAX_CONTEXT)?,
        eos_token_ids,
        pad_token_id,
        attention,
    })
}

/// `layer_types`, or the two index lists of `linear_attn_config`; where both are given they must agree.
fn attention_kinds(
    o: &Object<'_>,
    linear: Option<&Object<'_>>,
    layers: usize,
) -> Result<Vec<AttentionKind>, ConfigError> {
    let named = match o.texts("layer_types")? {
        Some(names) => {
            right_length(o, "layer_types", names.len(), layers)?;
            let kinds = names.iter().map(|name| match *name {
                "linear_attention" => Ok(AttentionKind::Kda),
                "deepseek_sparse_attention" | "indexed_attention" | "full_attention" => Ok(AttentionKind::Dsa),
                other => Err(o.invalid(
                    "layer_types",
                    "`linear_attention`, `deepseek_sparse_attention`, `indexed_attention` or `full_attention`",
                    format!("`{other}`"),
                    UNSUPPORTED,
                )),
            });
            Some(kinds.collect::<Result<Vec<_>, _>>()?)
        }
        None => None,
    };
    let listed = match linear {
        Some(linear) => match (linear.indices("kda_layers")?, linear.indices("full_attn_layers")?) {
            (Some(kda), Some(dsa)) => {
                let (kda, dsa): (BTreeSet<_>, BTreeSet<_>) = (kda.into_iter().collect(), dsa.into_iter().collect());
                let every = kda.union(&dsa).copied().eq(0..layers);
                if !every || !kda.is_disjoint(&dsa) {
                    return Err(linear.invalid(
                        "kda_layers",
                        format!("each of the layers 0..{layers} once, here or in full_attn_layers"),
                        format!("{} and {} distinct indices", kda.len(), dsa.len()),
                        INCONSISTENT,
                    ));
                }
                let kind = |l| if kda.contains(&l) { AttentionKind::Kda } else { AttentionKind::Dsa };
                Some((0..layers).map(kind).collect::<Vec<_>>())
            }
            _ => None,
        },
        None => None,
    };
    match (named, listed) {
        (Some(named), Some(listed)) => match named.iter().zip(&listed).position(|(a, b)| a != b) {
            None => Ok(named),
            Some(l) => Err(o.invalid(
                "layer_types",
                format!("layer {l} as in linear_attn_config ({:?})", listed[l]),
                format!("{:?}", named[l]),
                INCONSISTENT,
            )),
        },
        (Some(kinds), None) | (None, Some(kinds)) => Ok(kinds),
        (None, None) => Err(o.missing("layer_types", "one attention type for each layer")),
    }
}

/// `mlp_layer_types` or `first_k_dense_replace`; where both are given they must agree.
fn mlp_kinds(o: &Object<'_>, layers: usize) -> Result<Vec<MlpKind>, ConfigError> {
    let dense_first = o.integer("first_k_dense_replace", 0, layers)?;
    let by_count =
        |k: usize| (0..layers).map(|l| if l < k { MlpKind::Dense } else { MlpKind::Sparse }).collect::<Vec<_>>();
    let Some(names) = o.texts("mlp_layer_types")? else {
        return dense_first.map(by_count).ok_or_else(|| o.missing("mlp_layer_types", "one MLP type for each layer"));
    };
    right_length(o, "mlp_layer_types", names.len(), layers)?;
    let kinds = names.iter().map(|name| match *name {
        "dense" => Ok(MlpKind::Dense),
        "sparse" => Ok(MlpKind::Sparse),
        other => Err(o.invalid("mlp_layer_types", "`dense` or `sparse`", format!("`{other}`"), UNSUPPORTED)),
    });
    let kinds = kinds.collect::<Result<Vec<_>, _>>()?;
    match dense_first {
        Some(k) if by_count(k) != kinds => Err(o.invalid(
            "first_k_dense_replace",
            "the number of leading dense layers in mlp_layer_types, all others sparse",
            k,
            INCONSISTENT,
        )),
        _ => Ok(kinds),
    }
}

fn kda_config(o: &Object<'_>, linear: Option<&Object<'_>>) -> Result<KdaConfig, ConfigError> {
    // The nested block wins; the flattened spelling is what newer libraries write.
    let (from, heads, dim, taps, bound) = match linear {
        Some(l) => (l, "num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound"),
        None => (o, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "linear_lower_bound"),
    };
    let gate_lower_bound = from.number(bound)?;
    if gate_lower_bound >= 0.0 {
        return Err(from.invalid(
            bound,
            "a number below 0 (a bound on a log-decay)",
            gate_lower_bound,
            "correct the value",
        ));
    }
    Ok(KdaConfig {
        num_heads: from.count(heads, MAX_COUNT)?,
        head_dim: from.width(dim)?,
        conv_kernel: from.count(taps, MAX_SMALL)?,
        gate_lower_bound,
    })
}

fn mla_config(o: &Object<'_>) -> Result<MlaConfig, ConfigError> {
    o.only_bool("mla_use_nope", true, "the model has no rotary part")?;
    let num_heads = o.count("num_attention_heads", MAX_COUNT)?;
    if let Some(kv) = o.count_or_none("num_key_value_heads", MAX_COUNT)?
        && kv != num_heads
    {
        return Err(o.invalid("num_key_value_heads", format!("num_attention_heads ({num_heads})"), kv, UNSUPPORTED));
    }
    let rope = o
        .integer("qk_rope_head_dim", 0, MAX_WIDTH)?
        .ok_or_else(|| o.missing("qk_rope_head_dim", "0 (the model has no rotary part)"))?;
    if rope != 0 {
        return Err(o.invalid("qk_rope_head_dim", "0", rope, "the model has no rotary part"));
    }
    let nope = o.width("qk_nope_head_dim")?;
    if let Some(qk) = o.count_or_none("qk_head_dim", MAX_WIDTH)?
        && qk != nope + rope
    {
        let expected = format!("qk_nope_head_dim + qk_rope_head_dim ({})", nope + rope);
        return Err(o.invalid("qk_head_dim", expected, qk, INCONSISTENT));
    }
    Ok(MlaConfig {
        num_heads,
        q_lora_rank: o.count_or_none("q_lora_rank", MAX_WIDTH)?.ok_or_else(|| {
            o.missing("q_lora_rank", "the rank of the query projection (a full-rank query is not supported)")
        })?,
        kv_lora_rank: o.width("kv_lora_rank")?,
        qk_nope_head_dim: nope,
        v_head_dim: o.width("v_head_dim")?,
    })
}

fn indexer_config(o: &Object<'_>, attention: &[AttentionKind]) -> Result<IndexerConfig, ConfigError> {
    o.only_bool("index_kpool_compress", true, UNSUPPORTED)?;
    o.only_bool("index_kpool_always_select_tail", true, "a query must see the tokens after the last complete pool")?;
    let kpool = o.count_or_none("index_kpool", MAX_COUNT)?.ok_or_else(|| {
        o.missing("index_kpool", "the number of tokens in a pool (released model: 4, library default: 16)")
    })?;
    let topk = o.width("index_topk")?;
    if !topk.is_multiple_of(kpool) {
        return Err(o.invalid("index_topk", format!("a multiple of index_kpool ({kpool})"), topk, INCONSISTENT));
    }
    let kinds = indexer_kinds(o, attention.len())?;
    let first = attention.iter().position(|&kind| kind == AttentionKind::Dsa);
    if let Some(l) = first
        && kinds[l] == IndexerKind::Shared
    {
        return Err(o.invalid(
            "indexer_types",
            format!("`full` at layer {l}, the first sparse-attention layer"),
            "`shared`",
            "a shared indexer needs an earlier layer whose selection it can reuse",
        ));
    }
    Ok(IndexerConfig {
        num_heads: o.count("index_n_heads", MAX_COUNT)?,
        head_dim: o.width("index_head_dim")?,
        topk,
        kpool,
        kinds,
        share_for_mtp: o.bool_or_none("index_share_for_mtp_iteration")?.unwrap_or(false),
    })
}

/// `indexer_types`, else `index_topk_pattern` (string or list of F/S), else the frequency rule: layer `i` is full when
/// `max(i - offset + 1, 0) % frequency == 0` with offset 2 and frequency 1 unless given.
fn indexer_kinds(o: &Object<'_>, layers: usize) -> Result<Vec<IndexerKind>, ConfigError> {
    let kind = |key: &str, name: &str| match name {
        "full" | "F" => Ok(IndexerKind::Full),
        "shared" | "S" => Ok(IndexerKind::Shared),
        other => Err(o.invalid(key, "`full` or `shared` (`F` or `S`)", format!("`{other}`"), UNSUPPORTED)),
    };
    let from_list = |key: &str, names: &[&str]| {
        right_length(o, key, names.len(), layers)?;
        names.iter().map(|name| kind(key, name)).collect::<Result<Vec<_>, _>>()
    };
    if let Some(names) = o.texts("indexer_types")? {
        return from_list("indexer_types", &names);
    }
    match o.value("index_topk_pattern") {
        Some(Value::String(pattern)) => {
            let letters: Vec<String> = pattern.chars().map(String::from).collect();
            from_list("index_topk_pattern", &letters.iter().map(String::as_str).collect::<Vec<_>>())
        }
        Some(_) => from_list("index_topk_pattern", &o.texts("index_topk_pattern")?.unwrap_or_default()),
        None => {
            let offset = o.integer("index_skip_topk_offset", 0, MAX_COUNT)?.unwrap_or(2);
            let frequency = o.count_or_none("index_topk_freq", MAX_COUNT)?.unwrap_or(1);
            let full = |i: usize| (i + 1).saturating_sub(offset).is_multiple_of(frequency);
            Ok((0..layers).map(|i| if full(i) { IndexerKind::Full } else { IndexerKind::Shared }).collect())
        }
    }
}

fn moe_config(o: &Object<'_>) -> Result<MoeConfig, ConfigError> {
    o.only_text("scoring_func", "sigmoid", UNSUPPORTED)?;
    o.only_text("topk_method", "noaux_tc", UNSUPPORTED)?;
    o.only_text("moe_router_dtype", "float32", "a router of lower precision chooses other experts")?;
    let num_experts = o.count("n_routed_experts", MAX_COUNT)?;
    let experts_per_token = o.count("num_experts_per_tok", MAX_COUNT)?;
    let num_groups = o.count_or_none("n_group", MAX_COUNT)?.unwrap_or(1);
    let topk_groups = o.count_or_none("topk_group", MAX_COUNT)?.unwrap_or(1);
    if !num_experts.is_multiple_of(num_groups) {
        let expected = format!("a divisor of n_routed_experts ({num_experts})");
        return Err(o.invalid("n_group", expected, num_groups, INCONSISTENT));
    }
    if topk_groups > num_groups {
        return Err(o.invalid("topk_group", format!("at most n_group ({num_groups})"), topk_groups, INCONSISTENT));
    }
    let reachable = num_experts / num_groups * topk_groups;
    if experts_per_token > reachable {
        let expected = format!("at most the {reachable} experts of the kept groups");
        return Err(o.invalid("num_experts_per_tok", expected, experts_per_token, INCONSISTENT));
    }
    Ok(MoeConfig {
        num_experts,
        experts_per_token,
        num_shared: o.count("n_shared_experts", MAX_SMALL)?,
        intermediate_size: o.width("moe_intermediate_size")?,
        num_groups,
        topk_groups,
        normalize: o.bool_or_none("norm_topk_prob")?.unwrap_or(true),
        routed_scaling_factor: o.positive("routed_scaling_factor")?,
    })
}

fn vision_config(o: &Object<'_>, text: &TextConfig) -> Result<VisionConfig, ConfigError> {
    o.only_text("hidden_act", "silu", UNSUPPORTED)?;
    o.only_bool("attention_bias", true, UNSUPPORTED)?;
    let depth = o.count("depth", MAX_LAYERS)?;
    let hidden_size = o.width("hidden_size")?;
    let num_heads = o.count("num_heads", MAX_COUNT)?;
    if !hidden_size.is_multiple_of(4 * num_heads) {
        let expected =
            format!("a divisor of hidden_size / 4 ({hidden_size} / 4): the 2-D rotary embedding splits a head in four");
        return Err(o.invalid("num_heads", expected, num_heads, INCONSISTENT));
    }
    let out_hidden_size = o.width("out_hidden_size")?;
    if out_hidden_size != text.hidden_size {
        let expected = format!("text_config.hidden_size ({})", text.hidden_size);
        return Err(o.invalid("out_hidden_size", expected, out_hidden_size, INCONSISTENT));
    }
    let spatial_merge_size = o.count("spatial_merge_size", MAX_SMALL)?;
    if spatial_merge_size != MERGE {
        return Err(o.invalid("spatial_merge_size", MERGE.to_string(), spatial_merge_size, UNSUPPORTED));
    }
    let rms_norm_eps = o.positive("rms_norm_eps")?;
    let (block_norm_eps, block_norm_eps_origin) = if depth == 24 && hidden_size == 1024 {
        (1e-6, NormEpsOrigin::ReleasedTower)
    } else {
        (rms_norm_eps, NormEpsOrigin::Config)
    };
    Ok(VisionConfig {
        depth,
        hidden_size,
        num_heads,
        intermediate_size: o.width("intermediate_size")?,
        out_hidden_size,
        projection_intermediate_size: o.width("projection_intermediate_size")?,
        patch_size: o.count("patch_size", MAX_SMALL)?,
        temporal_patch_size: o.count("temporal_patch_size", MAX_SMALL)?,
        spatial_merge_size,
        in_channels: o.count("in_channels", MAX_SMALL)?,
        swiglu_limit: o.positive("swiglu_limit")?,
        rms_norm_eps,
        block_norm_eps,
        block_norm_eps_origin,
    })
}

fn media_tokens(root: &Object<'_>, vocab_size: usize) -> Result<MediaTokens, ConfigError> {
    let token = |key: &str| {
        let id = root.token(key)?.ok_or_else(|| root.missing(key, "a token id (the file has a vision_config)"))?;
        inside_vocabulary(root, key, id, vocab_size)?;
        Ok(id)
    };
    Ok(MediaTokens {
        image: token("image_token_id")?,
        video: token("video_token_id")?,
        image_start: token("image_start_token_id")?,
        image_end: token("image_end_token_id")?,
        video_start: token("video_start_token_id")?,
        video_end: token("video_end_token_id")?,
    })
}

fn inside_vocabulary(o: &Object<'_>, key: &str, id: u32, vocab_size: usize) -> Result<(), ConfigError> {
    if (id as usize) < vocab_size {
        return Ok(());
    }
    Err(o.invalid(key, format!("an id below vocab_size ({vocab_size})"), id, INCONSISTENT))
}

fn right_length(o: &Object<'_>, key: &str, found: usize, layers: usize) -> Result<(), ConfigError> {
    if found == layers {
        return Ok(());
    }
    Err(o.invalid(key, format!("{layers} entries (num_hidden_layers)"), format!("{found} entries"), INCONSISTENT))
}
