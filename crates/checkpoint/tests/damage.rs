//! Every rule of the container, broken one at a time: the fault is named, and nothing else is reported.

#![allow(clippy::unwrap_used, reason = "a test may unwrap")]

use glimmer_checkpoint::{Bytes, Checkpoint, Damage, Error, Fault, Shards, header::Header};
use proptest::prelude::*;
use serde_json::{Value, json};

const CONFIG: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16/config.json"));
const INDEX: &str = "model.safetensors.index.json";

/// A file from a header's text and the length of its data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.resize(bytes.len() + data, 7);
    bytes
}

fn fault(header: &str, data: usize) -> Fault {
    let damage = Header::parse("x.safetensors", &file(header, data)).unwrap_err();
    let message = damage.to_string();
    assert!(
        message.contains("`x.safetensors`") && message.contains("expected") && message.contains("found"),
        "{message}"
    );
    damage.fault
}

#[test]
fn sound_headers() {
    let parse = |header: &str, data| Header::parse("x.safetensors", &file(header, data)).unwrap();
    assert_eq!(parse("{}", 0).tensors, []);
    let header = parse(
        r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"I8","shape":[2,3],"data_offsets":[4,10]},"e":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   "#,
        10,
    );
    let names: Vec<_> = header.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "e", "b"], "in the order of their bytes");
    assert_eq!(header.tensors[2].range, header.data_start + 4..header.data_start + 10);
    assert_eq!(header.metadata, [("format".to_owned(), "pt".to_owned())]);
}

#[test]
fn length_field_and_json() {
    let fault_of = |bytes: &[u8]| Header::parse("x.safetensors", bytes).unwrap_err().fault;
    assert_eq!(fault_of(&[]), Fault::Truncated);
    assert_eq!(fault_of(&[2, 0, 0, 0, 0, 0, 0]), Fault::Truncated);
    assert_eq!(fault_of(&[3, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']), Fault::Truncated);
    assert_eq!(fault_of(&[0xff; 64]), Fault::HeaderLength);
    assert_eq!(fault_of(&file("", 0)), Fault::HeaderJson);
    assert_eq!(fault_of(&file("[]", 0)), Fault::HeaderJson);
    assert_eq!(fault_of(&file("{", 0)), Fault::HeaderJson);
    assert_eq!(fault_of(&file("{}x", 0)), Fault::HeaderJson);
    let mut not_text = file("{\"a\":0}", 0);
    not_text[10] = 0xff;
    assert_eq!(fault_of(&not_text), Fault::HeaderJson);
    assert_eq!(fault(r#"{"__metadata__":{"format":1}}"#, 0), Fault::HeaderJson);
}

#[test]
fn names_that_could_steer_a_terminal() {
    let text = r#"{"a\u001b[31m\n":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    assert_eq!(fault(text, 4), Fault::HeaderJson);
}

#[test]
fn entries() {
    let entry = |text: &str| fault(&format!("{{\"a\":{text}}}"), 4);
    for text in [
        "4",
        "{}",
        r#"{"dtype":"F32","shape":[1]}"#,
        r#"{"dtype":7,"shape":[1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":1,"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":0}"#,
        r#"{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}"#,
    ] {
        assert_eq!(entry(text), Fault::HeaderJson, "{text}");
    }
    assert_eq!(entry(r#"{"dtype":"F4_E2M1","shape":[1],"data_offsets":[0,4]}"#), Fault::UnknownDType);
    let huge = r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#;
    assert_eq!(entry(huge), Fault::SizeOverflow);
    let beyond_signed = r#"{"dtype":"F64","shape":[1152921504606846976],"data_offsets":[0,4]}"#;
    assert_eq!(entry(beyond_signed), Fault::SizeOverflow);
    assert_eq!(entry(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), Fault::RangeLength);
    assert_eq!(entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#), Fault::RangeLength);
    assert_eq!(entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,0]}"#), Fault::RangeLength);
    assert_eq!(
        fault(
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            4
        ),
        Fault::DuplicateName
    );
}

#[test]
fn coverage() {
    let two = |a: [usize; 2], b: [usize; 2]| {
        let entry =
            |[start, end]: [usize; 2]| json!({"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]});
        json!({"a": entry(a), "b": entry(b)}).to_string()
    };
    assert_eq!(fault(&two([0, 4], [3, 8]), 8), Fault::Overlap);
    assert_eq!(fault(&two([0, 4], [0, 4]), 4), Fault::Overlap);
    assert_eq!(fault(&two([0, 4], [5, 8]), 8), Fault::Gap);
    assert_eq!(fault(&two([1, 4], [4, 8]), 8), Fault::Gap);
    assert_eq!(fault(&two([0, 4], [4, 8]), 7), Fault::Truncated);
    assert_eq!(fault(&two([0, 4], [4, 8]), 9), Fault::Trailing);
    assert_eq!(fault("{}", 1), Fault::Trailing);
    assert!(Header::parse("x", &file(&two([4, 8], [0, 4]), 8)).is_ok());
}

/// One U8 tensor of 4 bytes for each name.
fn shard(names: &[&str]) -> Bytes {
    let entries = names.iter().enumerate().map(|(i, name)| {
        ((*name).to_owned(), json!({"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]}))
    });
    Bytes::new(file(&Value::Object(entries.collect()).to_string(), 4 * names.len()))
}

fn index(map: &[(&str, &str)]) -> Bytes {
    let map: serde_json::Map<String, Value> =
        map.iter().map(|(name, file)| ((*name).to_owned(), json!(file))).collect();
    Bytes::new(json!({"metadata": {"total_size": 8.0}, "weight_map": map}).to_string().into_bytes())
}

const ONE: &str = "model-00001-of-00002.safetensors";
const TWO: &str = "model-00002-of-00002.safetensors";

/// A sound checkpoint of two shards.
fn sound() -> Vec<(String, Bytes)> {
    vec![
        ("config.json".to_owned(), Bytes::new(CONFIG.as_bytes())),
        (ONE.to_owned(), shard(&["a"])),
        (TWO.to_owned(), shard(&["b"])),
        (INDEX.to_owned(), index(&[("a", ONE), ("b", TWO)])),
    ]
}

fn replaced(name: &str, bytes: Bytes) -> Vec<(String, Bytes)> {
    let mut files = sound();
    files.retain(|(n, _)| n != name);
    files.push((name.to_owned(), bytes));
    files
}

fn without(name: &str) -> Vec<(String, Bytes)> {
    let mut files = sound();
    files.retain(|(n, _)| n != name);
    files
}

/// The only damage of a set of files, which opening must refuse as well.
fn only(files: Vec<(String, Bytes)>) -> Damage {
    let mut damages = Shards::read(files.clone()).1;
    let damage = damages.pop().unwrap();
    assert_eq!(damages, [], "besides {damage}");
    let opened = Checkpoint::from_files(files);
    assert_eq!(opened.is_ok(), damage.is_tolerable(), "{damage}");
    if let Err(error) = opened {
        assert!(matches!(&error, Error::Damage(same) if *same == damage), "{error}");
    }
    damage
}

#[test]
fn sound_sets_of_files() {
    let checkpoint = Checkpoint::from_files(sound()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.shards().file_of("b"), Some(TWO));
    assert_eq!(checkpoint.shards().index_total_size(), Some(8));
    let single = vec![sound()[0].clone(), ("model.safetensors".to_owned(), shard(&["a", "b"]))];
    let checkpoint = Checkpoint::from_files(single).unwrap();
    assert!(!checkpoint.shards().is_indexed() && checkpoint.has("a") && !checkpoint.has("c"));
}

#[test]
fn sets_without_an_index() {
    assert_eq!(only(without(INDEX)).fault, Fault::NoIndex);
    assert_eq!(only(vec![sound()[0].clone()]).fault, Fault::NoIndex);
}

#[test]
fn missing_and_stray_files() {
    let damage = only(without(TWO));
    assert_eq!((damage.fault, damage.file.as_str()), (Fault::MissingShard, TWO));
    let damage = only(replaced("model.safetensors", shard(&["c"])));
    assert_eq!((damage.fault, damage.file.as_str()), (Fault::StrayShard, "model.safetensors"));
    let damage = only(replaced("golden.safetensors", shard(&["c"])));
    assert_eq!(damage.fault, Fault::StrayShard);
    assert!(damage.is_tolerable());
}

#[test]
fn index_against_shards() {
    for (map, fault, file, tensor) in [
        (&[("a", ONE), ("b", TWO), ("c", TWO)][..], Fault::MissingTensor, TWO, "c"),
        (&[("a", ONE), ("b", ONE), ("x", TWO)][..], Fault::WrongShard, TWO, "b"),
    ] {
        let damages = Shards::read(replaced(INDEX, index(map))).1;
        let damage = damages.iter().find(|d| d.fault == fault).unwrap();
        assert_eq!((damage.file.as_str(), damage.tensor.as_deref()), (file, Some(tensor)));
    }
    let damage = only(replaced(INDEX, index(&[("a", ONE), ("b", TWO), ("c", TWO)])));
    assert_eq!(damage.fault, Fault::MissingTensor);
    let damage = only(replaced(TWO, shard(&["b", "c"])));
    assert_eq!((damage.fault, damage.tensor.as_deref()), (Fault::UnindexedTensor, Some("c")));
    // The index names the second shard for `b` only, so a second `a` there is one damage, not two.
    let damage = only(replaced(TWO, shard(&["a", "b"])));
    assert_eq!((damage.fault, damage.tensor.as_deref()), (Fault::DuplicateTensor, Some("a")));
    let moved = vec![
        sound()[0].clone(),
        (ONE.to_owned(), shard(&["a", "b"])),
        (TWO.to_owned(), shard(&["c"])),
        (INDEX.to_owned(), index(&[("a", ONE), ("b", TWO), ("c", TWO)])),
    ];
    assert_eq!(only(moved).fault, Fault::WrongShard);
}

#[test]
fn damaged_index() {
    for text in [
        "",
        "[]",
        "{}",
        r#"{"weight_map": 3}"#,
        r#"{"weight_map": {}}"#,
        r#"{"weight_map": {"a": 3}}"#,
        r#"{"weight_map": {"a": "../x.safetensors"}}"#,
        r#"{"weight_map": {"a": "x.bin"}}"#,
        r#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#,
    ] {
        let damage = only(replaced(INDEX, Bytes::new(text.as_bytes().to_vec())));
        assert_eq!((damage.fault, damage.file.as_str()), (Fault::IndexJson, INDEX), "{text}");
    }
}

#[test]
fn damaged_shard_is_reported_once() {
    let whole = shard(&["b"]);
    let cut = whole.slice(0..whole.as_slice().len() - 1).unwrap();
    assert_eq!(only(replaced(TWO, cut)).fault, Fault::Truncated);
}

#[test]
fn a_directory_without_configuration() {
    let error = Checkpoint::from_files(without("config.json")).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");
    let error = Checkpoint::open("/nonexistent/model").unwrap_err();
    assert!(matches!(&error, Error::Io { .. }) && error.to_string().contains("/nonexistent/model"), "{error}");
}

/// A real header to damage.
fn real_header() -> Vec<u8> {
    let mut names: Vec<String> = (0..20).map(|i| format!("model.layers.{i}.weight")).collect();
    names.push("\u{e9}\"\\".to_owned());
    shard(&names.iter().map(String::as_str).collect::<Vec<_>>()).as_slice().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Random damage of a file never panics, and what is accepted keeps the promise of the header.
    #[test]
    fn damaged_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = real_header();
        for (at, value) in edits {
            let i = at.index(bytes.len());
            bytes[i] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(header) = Header::parse("x", &bytes) {
            let mut end = header.data_start;
            for tensor in &header.tensors {
                prop_assert_eq!(tensor.range.start, end);
                end = tensor.range.end;
            }
            prop_assert_eq!(end, bytes.len());
        }
    }

    /// So does damage of the JSON's structure: any text in place of any value.
    #[test]
    fn damaged_json_never_panics(
        text in r#"(\{|\}|\[|\]|:|,|"dtype"|"F32"|"shape"|"data_offsets"|-?[0-9]{1,20}|null|"[a-z]*"){0,24}"#,
        data in 0usize..16,
    ) {
        drop(Header::parse("x", &file(&text, data)));
        drop(Header::parse("x", &file(&format!("{{\"a\":{text}}}"), data)));
        drop(Shards::read([(INDEX.to_owned(), Bytes::new(text.into_bytes()))]));
    }

    /// The other reader accepts everything that this one accepts, and reads the same.
    #[test]
    fn accepted_files_agree_with_the_reference_reader(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3)) {
        let mut bytes = real_header();
        for (at, value) in edits {
            let i = at.index(bytes.len());
            bytes[i] = value;
        }
        if let Ok(header) = Header::parse("x", &bytes) {
            let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            prop_assert_eq!(reference.len(), header.tensors.len());
            for tensor in &header.tensors {
                let other = reference.tensor(&tensor.name).unwrap();
                prop_assert_eq!((other.shape(), other.data()), (tensor.shape.as_slice(), &bytes[tensor.range.clone()]));
            }
        }
    }
}
