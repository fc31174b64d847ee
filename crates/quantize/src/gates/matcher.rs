//! How loaders read `targets` and `ignore`: would any of them build a wrong layer?
//!
//! A `quantization_config` names modules by patterns, and each loader applies them to its own spelling of the names. Three
//! readers are simulated:
//!
//! * *compressed-tensors* on the checkpoint's names: `re:` + a pattern anchored at the start but not at the end, an exact
//!   module name, or the class name `Linear`; ignore wins over target;
//! * *vLLM, main model*: `gate_proj` and `up_proj` are one module `gate_up_proj`, exact entries are renamed with the
//!   model's prefix mapping (patterns and entries without a dot are not), and a fused name is looked up through a packed
//!   mapping of which three versions exist; expert 0 decides for a whole layer;
//! * *vLLM, MTP drafter*: a model class of its own, `model.layers.N`, with neither renaming nor packed mapping.
//!
//! Each reader is run over the entries as written, and over two weaker readings: one that looks at `ignore` alone (as if
//! the target were `Linear`), and one that looks at the targets alone. A good block is right under all of them, so
//! that no reader depends on the other guard. A block whose target is a class name leans on `ignore` by design and is
//! spared the last reading.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use regex::Regex;

/// An entry that cannot be read as a pattern.
#[derive(Debug, thiserror::Error)]
#[error("entry {entry:?} is not a valid pattern ({reason}); correct the regular expression after `re:`")]
pub struct PatternError {
    /// The entry as written.
    pub entry: String,
    /// What the parser says.
    pub reason: String,
}

/// The modules of a model as the matcher sees them.
#[derive(Debug, Clone, Default)]
pub struct Modules {
    /// Checkpoint names (without `.weight`) of everything that a loader may count as a linear layer.
    pub linear: Vec<String>,
    /// Those of `linear` that are quantized.
    pub quantized: BTreeSet<String>,
    /// Index of the MTP layer.
    pub mtp_layer: Option<usize>,
}

/// A module that a reader builds wrongly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongLayer {
    /// Which reader, with which reading.
    pub reader: String,
    /// The module under the reader's name.
    pub module: String,
    /// What the reader does and what it should do.
    pub problem: String,
}

/// Version of vLLM's packed mapping for `gate_up_proj`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedMapping {
    /// No entry.
    Empty,
    /// `gate_up_proj` stands for itself (inherited from an older model).
    Identity,
    /// `gate_up_proj` stands for `gate_proj` and `up_proj`.
    Shards,
}

impl PackedMapping {
    /// All versions.
    pub const ALL: [Self; 3] = [Self::Empty, Self::Identity, Self::Shards];

    /// Names of the shards of a fused module, if the mapping knows it.
    fn shards(self, name: &str) -> Option<Vec<String>> {
        let stem = name.strip_suffix(FUSED)?;
        match self {
            Self::Empty => None,
            Self::Identity => Some(vec![name.to_owned()]),
            Self::Shards => Some(vec![format!("{stem}gate_proj"), format!("{stem}up_proj")]),
        }
    }
}

const FUSED: &str = "gate_up_proj";
const CLASS: &str = "Linear";

/// Prefix mapping of vLLM's main model: checkpoint prefix, module prefix.
const PREFIXES: [(&str, &str); 3] = [
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
];

/// `targets` and `ignore`, parsed.
#[derive(Debug, Clone)]
pub struct Rules {
    targets: Vec<Pattern>,
    ignore: Vec<Pattern>,
}

#[derive(Debug, Clone)]
enum Pattern {
    /// Shared: a clone of a `Regex` would build its caches anew.
    Regex(Arc<Regex>),
    Literal(String),
}

impl Pattern {
    fn parse(entry: &str) -> Result<Self, PatternError> {
        let Some(pattern) = entry.strip_prefix("re:") else { return Ok(Self::Literal(entry.to_owned())) };
        match Regex::new(&format!("^(?:{pattern})")) {
            Ok(regex) => Ok(Self::Regex(Arc::new(regex))),
            Err(e) => Err(PatternError { entry: entry.to_owned(), reason: e.to_string().replace('\n', " ") }),
        }
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Regex(regex) => regex.is_match(name),
            Self::Literal(literal) => literal == name,
        }
    }

    fn is_class(&self) -> bool {
        matches!(self, Self::Literal(l) if !l.contains('.'))
    }

    /// The entry after the prefix mapping of vLLM's main model.
    fn renamed(&self) -> Self {
        match self {
            Self::Literal(l) if l.contains('.') => Self::Literal(rename(l)),
            other => other.clone(),
        }
    }
}

fn rename(name: &str) -> String {
    for (from, to) in PREFIXES {
        if let Some(rest) = name.strip_prefix(from) {
            return format!("{to}{rest}");
        }
    }
    name.to_owned()
}

/// What a reader makes of one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// Built unquantized because of `ignore`.
    Ignored,
    /// Built unquantized because no target matches.
    Unmatched,
    /// Built quantized.
    Quantized,
    /// The reader stops: the shards of a fused module disagree.
    Torn,
}

impl Rules {
    /// Parses the entries of a block.
    ///
    /// # Errors
    /// [`PatternError`] for a `re:` entry that is not a regular expression.
    pub fn new<'a>(
        targets: impl IntoIterator<Item = &'a str>,
        ignore: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, PatternError> {
        let parse = |entries: Vec<&'a str>| entries.into_iter().map(Pattern::parse).collect::<Result<Vec<_>, _>>();
        Ok(Self { targets: parse(targets.into_iter().collect())?, ignore: parse(ignore.into_iter().collect())? })
    }

    fn renamed(&self) -> Self {
        let rename = |entries: &[Pattern]| entries.iter().map(Pattern::renamed).collect();
        Self { targets: rename(&self.targets), ignore: rename(&self.ignore) }
    }

    /// compressed-tensors' reading of a linear module.
    pub fn plain(&self, name: &str) -> Reading {
        let hit = |p: &Pattern| p.matches(name) || matches!(p, Pattern::Literal(l) if l == CLASS);
        if self.ignore.iter().any(hit) {
            Reading::Ignored
        } else if self.targets.iter().any(hit) {
            Reading::Quantized
        } else {
            Reading::Unmatched
        }
    }

    /// vLLM's reading of a module, by its own name and class. Entries must have been renamed before.
    fn vllm(&self, name: &str, class: &str, mapping: PackedMapping) -> Reading {
        let any = |entries: &[Pattern], name: &str| entries.iter().any(|p| p.matches(name));
        let shards = mapping.shards(name);
        if any(&self.ignore, name) {
            return Reading::Ignored;
        }
        if let Some(shards) = &shards {
            let ignored = shards.iter().filter(|s| any(&self.ignore, s)).count();
            if ignored == shards.len() {
                return Reading::Ignored;
            } else if ignored > 0 {
                return Reading::Torn;
            }
        }
        let class = class.to_lowercase();
        let by_class = |p: &Pattern| matches!(p, Pattern::Literal(l) if class.contains(&l.to_lowercase()));
        let by_shards = |shards: &Vec<String>| shards.iter().all(|s| any(&self.targets, s));
        if any(&self.targets, name) || shards.as_ref().is_some_and(by_shards) || self.targets.iter().any(by_class) {
            Reading::Quantized
        } else {
            Reading::Unmatched
        }
    }
}

/// A module of vLLM that receives the quantization config.
#[derive(Debug, Clone, PartialEq, Eq)]
struct VllmModule {
    /// The module, and the names it is asked by (three for routed experts, else its own).
    name: String,
    asked: Vec<String>,
    class: &'static str,
    quantized: bool,
}

/// Modules of vLLM, main model and drafter, from the checkpoint's names.
fn vllm_modules(modules: &Modules) -> (Vec<VllmModule>, Vec<VllmModule>) {
    let mut main = BTreeMap::new();
    let mut draft = BTreeMap::new();
    let mtp = modules.mtp_layer.map(|l| format!(".layers.{l}."));
    for name in &modules.linear {
        let quantized = modules.quantized.contains(name);
        let (own, list) = match mtp.as_ref().and_then(|m| name.split_once(m.as_str()).map(|(_, rest)| (m, rest))) {
            Some((m, rest)) => (format!("model{m}{rest}"), &mut draft),
            None if name == "lm_head" => ("language_model.lm_head".to_owned(), &mut main),
            None => (rename(name), &mut main),
        };
        let Some((module, asked, class)) = vllm_module(&own) else { continue };
        let entry = list.entry(module.clone());
        let entry = entry.or_insert_with(|| VllmModule { name: module, asked: Vec::new(), class, quantized });
        if !entry.asked.contains(&asked) {
            entry.asked.push(asked);
        }
    }
    (main.into_values().collect(), draft.into_values().collect())
}

/// Module, name it is asked by and class for a leaf under vLLM's prefix; `None` for what is always built unquantized.
fn vllm_module(leaf: &str) -> Option<(String, String, &'static str)> {
    if leaf == "language_model.lm_head" {
        return Some((leaf.to_owned(), leaf.to_owned(), "ParallelLMHead"));
    }
    if let Some((layer, rest)) = leaf.split_once(".mlp.experts.") {
        let (expert, _) = rest.split_once('.')?;
        // The class stands for the alias that a literal `Linear` target gets.
        return (expert == "0").then(|| (format!("{layer}.mlp.experts"), leaf.to_owned(), "RoutedExperts(Linear)"));
    }
    let (parent, last) = leaf.rsplit_once('.')?;
    if !leaf.contains(".layers.") || !(parent.ends_with(".mlp") || parent.ends_with(".mlp.shared_experts")) {
        return None;
    }
    match last {
        "gate_proj" | "up_proj" => {
            let fused = format!("{parent}.{FUSED}");
            Some((fused.clone(), fused, "MergedColumnParallelLinear"))
        }
        "down_proj" => Some((leaf.to_owned(), leaf.to_owned(), "RowParallelLinear")),
        _ => None,
    }
}

/// vLLM's reading of a module: the names it is asked by must agree.
fn read(rules: &Rules, module: &VllmModule, mapping: PackedMapping) -> Reading {
    let mut readings = module.asked.iter().map(|name| rules.vllm(name, module.class, mapping));
    let first = readings.next().unwrap_or(Reading::Unmatched);
    let quantized = |r: Reading| r == Reading::Quantized;
    if readings.any(|r| r == Reading::Torn || quantized(r) != quantized(first)) { Reading::Torn } else { first }
}

/// Every module that some reader would build wrongly, in a fixed order.
pub fn wrong_layers(rules: &Rules, modules: &Modules) -> Vec<WrongLayer> {
    let linear = vec![Pattern::Literal(CLASS.to_owned())];
    let mut readings = vec![("as written", rules.clone())];
    readings.push(("looking at `ignore` alone", Rules { targets: linear, ignore: rules.ignore.clone() }));
    if !rules.targets.iter().any(Pattern::is_class) {
        readings.push(("looking at the targets alone", Rules { targets: rules.targets.clone(), ignore: Vec::new() }));
    }
    let (main, draft) = vllm_modules(modules);
    let mut wrong = Vec::new();
    for (how, rules) in &readings {
        for name in &modules.linear {
            let should = modules.quantized.contains(name);
            judge(&mut wrong, &format!("compressed-tensors, {how}"), name, rules.plain(name), should);
        }
        let renamed = rules.renamed();
        for mapping in PackedMapping::ALL {
            for module in &main {
                let reader = format!("vLLM ({mapping:?} packed mapping), {how}");
                judge(&mut wrong, &reader, &module.name, read(&renamed, module, mapping), module.quantized);
            }
        }
        for module in &draft {
            let reader = format!("vLLM's MTP drafter, {how}");
            judge(&mut wrong, &reader, &module.name, read(rules, module, PackedMapping::Empty), module.quantized);
        }
    }
    wrong
}

fn judge(wrong: &mut Vec<WrongLayer>, reader: &str, module: &str, reading: Reading, quantized: bool) {
    let problem = match (reading, quantized) {
        (Reading::Quantized, true) | (Reading::Ignored | Reading::Unmatched, false) => return,
        (Reading::Quantized, false) => "is built quantized, but its weight is stored in BF16",
        (Reading::Ignored, true) => "is built in BF16 because `ignore` matches it, but its weight is packed",
        (Reading::Unmatched, true) => "is built in BF16 because no target matches it, but its weight is packed",
        (Reading::Torn, _) => "is refused: its parts are matched differently",
    };
    wrong.push(WrongLayer { reader: reader.to_owned(), module: module.to_owned(), problem: problem.to_owned() });
}
