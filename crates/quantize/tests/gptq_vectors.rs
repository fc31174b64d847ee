//! llm-compressor's own solver on nine cases: scales and every code must be equal.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test")]

use glimmer_quantize::gptq::{DeadColumns, Factor, Order, Settings};
use glimmer_quantize::hessian::{Moments, Shrunk};
use glimmer_quantize::rtn;
use glimmer_quantize::scales::{ScaleRule, scales};
use half::bf16;
use safetensors::SafeTensors;
use serde_json::Value;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/vectors");

fn bf16s(file: &SafeTensors<'_>, name: &str) -> Vec<bf16> {
    let bytes = file.tensor(name).unwrap().data();
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    bf16s(file, name).iter().map(|x| x.to_f32()).collect()
}

fn codes(file: &SafeTensors<'_>, name: &str) -> Vec<i8> {
    file.tensor(name).unwrap().data().iter().map(|&b| b as i8).collect()
}

#[test]
fn every_scale_and_code_of_the_vectors_is_reproduced() {
    let bytes = std::fs::read(format!("{FOLDER}/gptq.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let text = std::fs::read_to_string(format!("{FOLDER}/gptq.json")).unwrap();
    let list: Value = serde_json::from_str(&text.replace("NaN", "null")).unwrap();
    // Cases that were made from the same inputs share them.
    let inputs: Value = serde_json::from_slice(&std::fs::read(format!("{FOLDER}/gptq_inputs.json")).unwrap()).unwrap();
    let mut cases = 0;
    for case in list["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let cols = case["cols"].as_u64().unwrap() as usize;
        let w = floats(&file, &format!("{name}.weight_in"));
        let rule = if case["observer"] == "mse" { ScaleRule::Mse } else { ScaleRule::Minmax };
        let s = scales(rule, &w, cols, 128, None);
        assert_eq!(s, bf16s(&file, &format!("{name}.scale")), "{name}: scales");
        let mut h = Moments::new(cols);
        let source = inputs["same_inputs"][name].as_str().unwrap_or(name);
        h.add(&floats(&file, &format!("{source}.x")), None).unwrap();
        let h = h.finish();
        let settings = Settings {
            order: if case["actorder"] == "static" { Order::Static } else { Order::None },
            damp: case["damp"].as_f64().unwrap(),
            dead: DeadColumns::Zero,
        };
        let factor = Factor::new(&Shrunk::own(&h), &settings, None);
        assert_eq!(factor.damp().is_none(), case["rtn_fallback"].as_bool().unwrap(), "{name}: fallback");
        assert_eq!(
            factor.dead() as u64,
            if factor.damp().is_none() { cols as u64 } else { case["dead"].as_array().unwrap().len() as u64 }
        );
        let solution = factor.solve(&w, &s, 128, None);
        let expected = codes(&file, &format!("{name}.q"));
        let wrong = solution.codes.iter().zip(&expected).filter(|(a, b)| a != b).count();
        assert_eq!(wrong, 0, "{name}: {wrong} of {} codes differ", expected.len());
        if h.tokens() > cols as u64 {
            let error = |codes: &[i8]| {
                let e: Vec<f32> = rtn::dequantize(codes, &s, 128).iter().zip(&w).map(|(q, w)| w - q).collect();
                h.energy(&e) / h.energy(&w)
            };
            let (gptq, rtn) = (error(&expected), error(&rtn::round(&w, &s, 128)));
            let stated = case["rel_err_gptq"].as_f64().unwrap();
            assert!((gptq - stated).abs() < 0.01 * stated, "{name}: {gptq} against {stated}");
            assert!(gptq < rtn);
        }
        cases += 1;
    }
    assert_eq!(cases, 9);
}
