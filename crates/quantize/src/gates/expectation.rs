//! What an artifact must contain: derived from the configuration and the source, never from the artifact.

use std::collections::{BTreeMap, HashSet};

use glimmer_checkpoint::{Config, DType, ExpertMatrix, Inventory, Projection, int4};

use super::{directory::Source, matcher::Modules};

/// The part of the model that a plain tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Decoder, embedding, head.
    Trunk,
    /// The vision tower.
    Vision,
    /// The MTP layer.
    Mtp,
}

/// Form of a plain tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) part: Part,
}

impl Spec {
    /// What is wrong with a tensor of this form. A vector may also be stored as `[1, 1, n, 1]`, a form in which `A_log` occurs.
    pub(super) fn problem(&self, dtype: DType, shape: &[usize]) -> Option<String> {
        let vector = matches!((&self.shape[..], shape), ([n], [1, 1, m, 1]) if n == m);
        let same = self.dtype == dtype && (self.shape == shape || vector);
        (!same).then(|| format!("expected {} {:?}, found {dtype} {shape:?}", self.dtype, self.shape))
    }
}

/// A matrix that must be packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Matrix {
    /// Name without `.weight`.
    pub(super) base: String,
    pub(super) layer: usize,
    pub(super) expert: usize,
    pub(super) projection: Projection,
    /// Output features.
    pub(super) rows: usize,
    /// Input features.
    pub(super) cols: usize,
    /// Columns that share a scale.
    pub(super) group: usize,
}

impl Matrix {
    pub(super) fn weight(&self) -> String {
        format!("{}.weight", self.base)
    }

    pub(super) fn packed(&self) -> String {
        format!("{}.weight_packed", self.base)
    }

    pub(super) fn scale(&self) -> String {
        format!("{}.weight_scale", self.base)
    }

    /// Names, dtypes and shapes of `weight_packed`, `weight_scale` and `weight_shape`.
    pub(super) fn triple(&self) -> [(String, DType, Vec<usize>); 3] {
        let shape = format!("{}.weight_shape", self.base);
        [
            (self.packed(), DType::I32, vec![self.rows, int4::words(self.cols, int4::BITS)]),
            (self.scale(), DType::Bf16, vec![self.rows, self.cols / self.group]),
            (shape, DType::I64, vec![2]),
        ]
    }
}

/// Everything that must be in an artifact.
#[derive(Debug)]
pub(super) struct Expectation {
    /// The matrices to be packed, by layer, expert, projection.
    pub(super) matrices: Vec<Matrix>,
    /// Names of their tensors.
    pub(super) packed: HashSet<String>,
    /// All other tensors.
    pub(super) plain: BTreeMap<String, Spec>,
    /// What loaders may count as linear layers.
    pub(super) modules: Modules,
    mtp: Option<String>,
}

impl Expectation {
    /// Derives the matrices from the configuration, and the other tensors from the source or else from the
    /// configuration as well.
    ///
    /// # Errors
    /// When the configuration's expert matrices are not whole groups wide, or the source lacks one of them.
    pub(super) fn new(config: &Config, source: Option<&Source>) -> Result<Self, String> {
        let matrix = |m: ExpertMatrix| Matrix {
            base: m.base(),
            layer: m.layer,
            expert: m.expert,
            projection: m.projection,
            rows: m.rows,
            cols: m.cols,
            group: int4::GROUP,
        };
        let matrices: Vec<Matrix> = config.text.quantized_matrices().map(matrix).collect();
        if let Some(m) = matrices.iter().find(|m| !m.cols.is_multiple_of(m.group)) {
            return Err(format!("`{}`: expected a multiple of {} columns, found {}", m.base, m.group, m.cols));
        }
        let inventory = Inventory::bf16(config);
        let mtp = config.text.mtp_layer().map(|layer| format!("model.language_model.layers.{layer}."));
        let quantized: HashSet<String> = matrices.iter().map(Matrix::weight).collect();
        let mut plain = BTreeMap::new();
        let mut add = |name: &str, dtype, shape: &[usize]| {
            if !quantized.contains(name) {
                let spec = Spec { dtype, shape: shape.to_vec(), part: part(name, mtp.as_deref()) };
                plain.insert(name.to_owned(), spec);
            }
        };
        match source {
            Some(source) => {
                for name in source.names() {
                    if let Some((dtype, shape)) = source.checkpoint().describe(name) {
                        add(name, dtype, shape);
                    }
                }
                if let Some(m) = matrices.iter().find(|m| !source.checkpoint().has(&m.weight())) {
                    return Err(format!("the source lacks `{}`, which its config.json implies", m.weight()));
                }
            }
            None => inventory.tensors().iter().for_each(|t| add(&t.name, t.dtype, &t.shape)),
        }
        let packed = matrices.iter().flat_map(|m| m.triple().map(|(name, ..)| name)).collect();
        Ok(Self { packed, plain, modules: modules(config, &inventory, &matrices), matrices, mtp })
    }

    /// The part that a name belongs to.
    pub(super) fn part_of(&self, name: &str) -> Part {
        part(name, self.mtp.as_deref())
    }
}

fn part(name: &str, mtp: Option<&str>) -> Part {
    if name.starts_with("model.visual.") {
        Part::Vision
    } else if mtp.is_some_and(|prefix| name.starts_with(prefix)) {
        Part::Mtp
    } else {
        Part::Trunk
    }
}

/// Every matrix with a `.weight` name but the embedding: linear layers and routers.
fn modules(config: &Config, inventory: &Inventory, matrices: &[Matrix]) -> Modules {
    let linear = inventory.tensors().iter().filter(|t| t.shape.len() == 2).filter_map(|t| {
        let base = t.name.strip_suffix(".weight")?;
        (!base.ends_with("embed_tokens")).then(|| base.to_owned())
    });
    Modules {
        linear: linear.collect(),
        quantized: matrices.iter().map(|m| m.base.clone()).collect(),
        mtp_layer: config.text.mtp_layer(),
    }
}
