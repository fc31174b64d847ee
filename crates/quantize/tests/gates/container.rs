//! Damage to files and to the index: G10 and G11.

use glimmer_checkpoint::shards::INDEX_FILE;
use glimmer_quantize::gates::GateId::{G10, G11};
use serde_json::{Value, json};

use crate::{
    artifact::{Files, cut, join_shard, split_shard},
    harness::{later, made, run},
};

const FIRST: &str = "model-00001-of-00004.safetensors";
const SECOND: &str = "model-00002-of-00004.safetensors";
const NORM: &str = "model.language_model.norm.weight";

fn file<'a>(files: &'a mut Files, name: &str) -> &'a mut Vec<u8> {
    files.get_mut(name).expect("a file of the good artifact")
}

/// Changes the header of the second shard as JSON; the data stay.
fn header(files: &mut Files, change: impl FnOnce(&mut Value, &mut Vec<u8>)) {
    let shard = file(files, SECOND);
    let (text, mut data) = split_shard(shard);
    let mut value = serde_json::from_str(&text).expect("JSON");
    change(&mut value, &mut data);
    *shard = join_shard(&value.to_string(), &data);
}

/// Moves the offsets of a header's entries from the `n`th on.
fn shift(header: &mut Value, n: usize, by: i64) {
    for entry in header.as_object_mut().expect("an object").values_mut().skip(n) {
        for offset in entry["data_offsets"].as_array_mut().expect("a list") {
            *offset = json!(offset.as_i64().expect("an integer") + by);
        }
    }
}

fn index(files: &mut Files, change: impl FnOnce(&mut Value)) {
    let text = file(files, INDEX_FILE);
    let mut value = serde_json::from_slice(text).expect("JSON");
    change(&mut value);
    *text = serde_json::to_vec_pretty(&value).expect("JSON");
}

#[test]
fn damaged_headers_are_g10s() {
    run(&[
        later("a byte missing at the end", &[G10], |f| cut(file(f, SECOND))),
        later("half of the file missing", &[G10], |f| {
            let n = file(f, FIRST).len();
            file(f, FIRST).truncate(n / 2);
        }),
        later("empty file", &[G10], |f| file(f, FIRST).clear()),
        later("a byte too many", &[G10], |f| file(f, SECOND).push(0)),
        later("length field too large", &[G10], |f| file(f, SECOND)[7] = 0x7f),
        later("length field beyond the file", &[G10], |f| file(f, SECOND)[3] = 1),
        later("header no JSON", &[G10], |f| file(f, SECOND)[8] = b'['),
        later("header not UTF-8", &[G10], |f| file(f, SECOND)[12] = 0xff),
        later("tensors overlapping", &[G10], |f| {
            header(f, |h, data| {
                shift(h, 1, -2);
                data.pop();
                data.pop();
            });
        }),
        later("a gap between tensors", &[G10], |f| {
            header(f, |h, data| {
                shift(h, 1, 2);
                data.extend([0, 0]);
            });
        }),
        later("offsets beyond the file", &[G10], |f| header(f, |h, _| shift(h, 0, 1 << 40))),
        later("offsets beyond 64 bits", &[G10], |f| {
            header(f, |h, _| {
                let entry = h.as_object_mut().expect("an object").values_mut().next().expect("an entry");
                entry["shape"] = json!([u64::MAX, u64::MAX]);
            });
        }),
        later("range against the shape", &[G10], |f| {
            header(f, |h, _| {
                let entry = h.as_object_mut().expect("an object").values_mut().next().expect("an entry");
                entry["shape"] = json!([1, 1]);
            });
        }),
        later("unknown dtype", &[G10], |f| {
            header(f, |h, _| {
                let entry = h.as_object_mut().expect("an object").values_mut().next().expect("an entry");
                entry["dtype"] = json!("I4");
            });
        }),
        later("a name twice in a header", &[G10], |f| {
            let (text, data) = split_shard(file(f, SECOND));
            let (name, _) = text[2..].split_once('"').expect("a name");
            let entry = json!({ "dtype": "I32", "shape": [0], "data_offsets": [0, 0] });
            let text = format!("{{\"{name}\":{entry},{}", &text[1..]);
            *file(f, SECOND) = join_shard(&text, &data);
        }),
    ]);
}

#[test]
fn stray_missing_and_misnamed_files_are_g10s() {
    run(&[
        later("a stray shard", &[G10], |f| {
            let copy = f[SECOND].clone();
            f.insert("model-00005-of-00005.safetensors".to_owned(), copy);
        }),
        later("a single-file model beside the index", &[G10], |f| {
            let copy = f[FIRST].clone();
            f.insert("model.safetensors".to_owned(), copy);
        }),
        later("a stray adapter", &[G10], |f| {
            f.insert("adapter_model.safetensors".to_owned(), join_shard("{}", &[]));
        }),
        later("a stray file that is no safetensors file", &[G10], |f| {
            f.insert("consolidated.safetensors".to_owned(), b"<html>".to_vec());
        }),
        later("a shard missing", &[G10], |f| drop(f.remove(SECOND))),
        later("all shards missing", &[G10], |f| f.retain(|name, _| !name.ends_with(".safetensors"))),
        made("shards with names of their own", &[G10], |p| {
            for (i, (file, _)) in p.shards.iter_mut().enumerate() {
                *file = format!("layers-{i}.safetensors");
            }
        }),
        made("shard numbers with four digits", &[G10], |p| {
            p.shards[1].0 = "model-0002-of-0004.safetensors".to_owned();
        }),
        made("shards counted from zero", &[G10], |p| {
            for (i, (file, _)) in p.shards.iter_mut().enumerate() {
                *file = format!("model-{i:05}-of-00004.safetensors");
            }
        }),
        later("a tensor in two shards", &[G10], |f| {
            let (text, data) = split_shard(&f[FIRST]);
            let first: Value = serde_json::from_str(&text).expect("JSON");
            let span = |i: usize| usize::try_from(first[NORM]["data_offsets"][i].as_u64().expect("an offset"));
            let bytes = data[span(0).expect("small")..span(1).expect("small")].to_vec();
            header(f, |h, data| {
                let start = data.len();
                data.extend(bytes);
                h[NORM] =
                    json!({ "dtype": "BF16", "shape": first[NORM]["shape"], "data_offsets": [start, data.len()] });
            });
        }),
    ]);
}

#[test]
fn an_index_that_disagrees_is_g11s() {
    run(&[
        later("an entry without a tensor", &[G11], |f| {
            index(f, |i| i["weight_map"]["model.language_model.layers.0.ghost"] = SECOND.into());
        }),
        later("a tensor without an entry", &[G11], |f| {
            index(f, |i| drop(i["weight_map"].as_object_mut().expect("an object").remove(NORM)));
        }),
        later("an entry moved to another shard", &[G11], |f| index(f, |i| i["weight_map"][NORM] = SECOND.into())),
        later("an entry moved to a shard that does not exist", &[G11], |f| {
            index(f, |i| i["weight_map"][NORM] = "model-00009-of-00009.safetensors".into());
        }),
        later("a wrong total", &[G11], |f| {
            index(f, |i| i["metadata"]["total_size"] = (i["metadata"]["total_size"].as_u64().unwrap_or(0) + 1).into());
        }),
        later("no total", &[G11], |f| index(f, |i| i["metadata"] = json!({}))),
        later("an index that is no JSON", &[G11], |f| cut(file(f, INDEX_FILE))),
        later("an index without a map", &[G11], |f| {
            index(f, |i| drop(i.as_object_mut().expect("an object").remove("weight_map")));
        }),
        later("no index", &[G11], |f| drop(f.remove(INDEX_FILE))),
    ]);
}
