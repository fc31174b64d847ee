//! Random weights for any configuration, made in memory: for measuring speed at full width without a checkpoint.

use std::collections::HashMap;
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use glimmer_checkpoint::{Bytes, Config, Inventory, TensorData, TensorSpec, dummy};
use glimmer_model::Error;
use glimmer_model::weights::Source;
use serde_json::Value;

use crate::error::BenchError;

/// A source of random weights. Tensors whose names differ in numbers alone (layers, experts) share one copy on the host.
#[derive(Debug)]
pub struct DummySource {
    /// The text of `config`.
    text: String,
    config: Config,
    seed: u64,
    inventory: Inventory,
    made: Mutex<HashMap<String, Bytes>>,
    /// What INT4 codes are, in turn, and where the next ones begin.
    codes: Option<(Bytes, AtomicUsize)>,
}

impl DummySource {
    /// Weights for a `config.json`, of the first `layers` layers and the draft layer; `int4` quantizes the routed experts.
    ///
    /// # Errors
    /// A configuration that is wrong, or cannot be quantized.
    pub fn new(config: &str, layers: Option<usize>, int4: bool) -> Result<Self, BenchError> {
        let failed = |error: &dyn std::fmt::Display| BenchError::model("the configuration", error.to_string());
        let text = match layers {
            Some(layers) => shortened(config, layers).map_err(|error| failed(&error))?,
            None => config.to_owned(),
        };
        let config = Config::parse(&text).map_err(|error| failed(&error))?;
        let inventory = if int4 { Inventory::w4a16(&config) } else { Ok(Inventory::bf16(&config)) };
        let inventory = inventory.map_err(|error| failed(&error))?;
        Ok(Self { inventory, text, config, seed: 0, made: Mutex::default(), codes: None })
    }

    /// Other weights: equal seeds give equal ones.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// The `config.json` of what is made: layers beyond the wanted ones are cut.
    pub fn config_text(&self) -> &str {
        &self.text
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.inventory.tensors().iter().map(TensorSpec::bytes).sum()
    }

    /// Takes INT4 codes from `bytes`, other ones for every tensor as long as there are: a mapped file shows how fast a checkpoint
    /// is read.
    #[must_use]
    pub fn with_codes(mut self, bytes: Bytes) -> Self {
        self.codes = Some((bytes, AtomicUsize::new(0)));
        self
    }

    /// The next `len` bytes of the codes; from the beginning again where they end.
    fn next_codes(&self, len: usize) -> Option<Bytes> {
        let (bytes, next) = self.codes.as_ref()?;
        let places = bytes.as_slice().len() / len.max(1);
        let place = next.fetch_add(1, Ordering::Relaxed) % places.max(1);
        bytes.slice(place * len..(place + 1) * len)
    }

    /// Decoder layers.
    pub fn layers(&self) -> usize {
        self.config.text.num_hidden_layers
    }

    /// Makes everything now, so that loading measures nothing but loading.
    ///
    /// # Errors
    /// None that a configuration's own tensors could cause.
    pub fn make(&self) -> glimmer_model::Result<()> {
        self.inventory.tensors().iter().try_for_each(|spec| self.tensor(&spec.name).map(drop))
    }

    /// Its tensors.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }
}

/// The configuration with the first `layers` layers only. Lists with an entry a layer are cut, lists of layers filtered.
fn shortened(config: &str, layers: usize) -> Result<String, serde_json::Error> {
    let mut whole: Value = serde_json::from_str(config)?;
    let text = if whole["text_config"].is_object() { &mut whole["text_config"] } else { &mut whole };
    let all = text["num_hidden_layers"].as_u64().unwrap_or(0);
    cut(text, usize::try_from(all).unwrap_or(usize::MAX), layers);
    text["num_hidden_layers"] = layers.into();
    if text["first_k_dense_replace"].as_u64().is_some_and(|dense| dense > layers as u64) {
        text["first_k_dense_replace"] = layers.into();
    }
    serde_json::to_string(&whole)
}

fn cut(value: &mut Value, all: usize, layers: usize) {
    for (name, entry) in value.as_object_mut().into_iter().flatten() {
        match entry {
            Value::Object(_) => cut(entry, all, layers),
            Value::Array(list) if list.len() == all => list.truncate(layers),
            Value::Array(list) if name.ends_with("_layers") => {
                list.retain(|layer| layer.as_u64().is_some_and(|l| l < layers as u64));
            }
            _ => {}
        }
    }
}

impl Source for DummySource {
    fn config(&self) -> &Config {
        &self.config
    }

    fn has(&self, name: &str) -> bool {
        self.inventory.find(name).is_some()
    }

    fn tensor(&self, name: &str) -> glimmer_model::Result<TensorData> {
        let missing = || Error::Missing { name: name.to_owned(), expected: "a tensor of the configuration".to_owned() };
        let spec = self.inventory.find(name).ok_or_else(missing)?;
        let of = |bytes| TensorData { name: name.to_owned(), dtype: spec.dtype, shape: spec.shape.clone(), bytes };
        if name.ends_with("weight_packed")
            && let Some(codes) = usize::try_from(spec.bytes()).ok().and_then(|len| self.next_codes(len))
        {
            return Ok(of(codes));
        }
        let kind: String =
            name.chars().filter(|c| !c.is_ascii_digit()).chain(format!("{:?}", spec.shape).chars()).collect();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = made.entry(kind).or_insert_with(|| Bytes::new(dummy(spec, self.seed))).clone();
        Ok(of(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELEASED: &str = include_str!("../../../data/glm-5.3-flash/config.json");

    #[test]
    fn a_configuration_is_cut_to_its_first_layers() {
        let source = DummySource::new(RELEASED, Some(5), true).unwrap();
        let text = &source.config().text;
        assert_eq!((text.num_hidden_layers, text.kda_layers().count(), text.dsa_layers().count()), (5, 4, 1));
        assert!(text.mtp_layer().is_some());
        assert!(source.has("model.language_model.layers.4.mlp.experts.287.up_proj.weight_packed"));
        assert!(!source.has("model.language_model.layers.6.mlp.experts.0.up_proj.weight"));
        // Fewer layers than are dense.
        assert_eq!(DummySource::new(RELEASED, Some(1), true).unwrap().layers(), 1);
    }

    #[test]
    fn given_codes_are_taken_in_turn_and_again() {
        let source = DummySource::new(RELEASED, Some(5), true).unwrap();
        let name = |expert| format!("model.language_model.layers.4.mlp.experts.{expert}.up_proj.weight_packed");
        let len = source.tensor(&name(0)).unwrap().bytes.as_slice().len();
        let given: Vec<u8> = (0..2 * len + 5).map(|i| if i < len { 1 } else { 2 }).collect();
        let source = source.with_codes(Bytes::new(given));
        let first = |expert| source.tensor(&name(expert)).unwrap().bytes.as_slice()[0];
        assert_eq!([first(0), first(1), first(2)], [1, 2, 1]);
        let few = DummySource::new(RELEASED, Some(5), true).unwrap().with_codes(Bytes::new(vec![1; 8]));
        assert_eq!(few.tensor(&name(0)).unwrap().bytes.as_slice().len(), len, "too few codes: made ones");
    }

    #[test]
    fn experts_share_one_copy_of_bytes_that_fit_their_shape() {
        let source = DummySource::new(RELEASED, Some(5), true).unwrap();
        let name = |expert| format!("model.language_model.layers.4.mlp.experts.{expert}.up_proj.weight_scale");
        let (a, b) = (source.tensor(&name(0)).unwrap(), source.tensor(&name(7)).unwrap());
        assert_eq!(
            (a.bytes.as_slice().as_ptr(), a.elements() * 2),
            (b.bytes.as_slice().as_ptr(), a.bytes.as_slice().len())
        );
    }
}
