//! Pictures and clips against goldens: patches of the released processor, every stage of the tower.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use glimmer_checkpoint::{Checkpoint, Config, TensorData};
use glimmer_model::{
    vision::{DecodeLimits, Patches, Processor, Processors, RgbImage, TowerStage, VisionTower},
    weights::Source,
};
use glimmer_tensor::{Backend as _, PatchGrid, cpu::Cpu};
use safetensors::SafeTensors;

fn repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

fn bytes(path: &str) -> Vec<u8> {
    std::fs::read(repository(path)).unwrap()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn integers(file: &SafeTensors<'_>, name: &str) -> Vec<usize> {
    let words = file.tensor(name).unwrap();
    words.data().as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b) as usize).collect()
}

fn close(name: &str, ours: &[f32], golden: &[f32], bound: f32) {
    assert_eq!(ours.len(), golden.len(), "{name}");
    let top = golden.iter().fold(0.0f32, |m, g| m.max(g.abs()));
    let worst = ours.iter().zip(golden).map(|(a, b)| (a - b).abs()).fold(0.0, |m: f32, d| if d <= m { m } else { d });
    assert!(worst <= bound * top, "{name}: {worst:.2e} of absmax {top}");
}

#[test]
fn patches_equal_the_released_processor() {
    let data = bytes("data/goldens/tiny/preproc.safetensors");
    let file = SafeTensors::deserialize(&data).unwrap();
    for k in [0, 3, 4] {
        let size = integers(&file, &format!("img{k}.size"));
        let (h, w) = (size[0], size[1]);
        // The pictures are a formula: three planes of ramps and products.
        let mut pixels = Vec::with_capacity(h * w * 3);
        for y in 0..h {
            for x in 0..w {
                let blue = (255 + 2 * y + 256 * w - x) % 256;
                pixels.extend([(x * 7 + y * 3) % 256, (x * y / 5 + 31) % 256, blue].map(|v| v as u8));
            }
        }
        let picture = RgbImage::new(w, h, pixels).unwrap();
        let max_tokens = integers(&file, &format!("img{k}.max_image_tokens"))[0];
        let processor = Processor { max_tokens, ..Processor::default() };
        let patches = processor.image(&picture);
        let grid = integers(&file, &format!("img{k}.grid_thw"));
        assert_eq!(patches.grid, PatchGrid { frames: grid[0], height: grid[1], width: grid[2] }, "img{k}");
        // Pixel bytes of all patches, one below the other; both frames of a patch are equal.
        let golden = image::open(repository(&format!("data/goldens/tiny/img{k}.png"))).unwrap().into_rgb8();
        assert_eq!((golden.width(), golden.height() as usize), (14, 14 * patches.rows()), "img{k}");
        let normal = |v: u8, c: usize| (f32::from(v) / 255.0 - processor.mean[c]) / processor.std[c];
        let area = 14 * 14;
        for (i, patch) in golden.as_raw().chunks_exact(3 * area).enumerate() {
            let ours = &patches.values[i * patches.width..][..patches.width];
            for (c, plane) in ours.chunks_exact(2 * area).enumerate() {
                for (pixel, value) in plane.iter().enumerate() {
                    let v = patch[3 * (pixel % area) + c];
                    assert!(normal(v, c).to_bits() == value.to_bits(), "img{k} patch {i} channel {c} pixel {pixel}");
                }
            }
        }
        let values = floats(&file, &format!("img{k}.pixel_values"));
        assert_eq!(patches.values[..values.len()], values, "img{k}: equal to the bit");
    }
}

#[test]
fn tiny_tower_matches_every_stage_for_images_and_video() {
    let data = bytes("data/goldens/tiny/golden.safetensors");
    let file = SafeTensors::deserialize(&data).unwrap();
    let checkpoint = Checkpoint::open(repository("data/goldens/tiny")).unwrap();
    let mut backend = Cpu::new(1);
    let mut tower = VisionTower::load(&backend, &checkpoint).unwrap().unwrap();
    let (hidden, out) = (64, 128);
    for (pass, pixels, grids) in
        [("image", "in.pixel_values", "in.image_grid_thw"), ("video", "in.pixel_values_videos", "in.video_grid_thw")]
    {
        let pixels = floats(&file, pixels);
        let width = file.tensor(if pass == "image" { "in.pixel_values" } else { "in.pixel_values_videos" });
        let width = width.unwrap().shape()[1];
        let mut seen: Vec<(TowerStage, Vec<f32>)> = Vec::new();
        let (mut features, mut first) = (Vec::new(), 0);
        for grid in integers(&file, grids).chunks_exact(3) {
            let grid = PatchGrid { frames: grid[0], height: grid[1], width: grid[2] };
            let rows = grid.frames * grid.height * grid.width;
            let values = pixels[first * width..(first + rows) * width].to_vec();
            first += rows;
            let patches = Patches { grid, width, merge: 2, values };
            let result = tower.forward_seen(&mut backend, &patches, &mut |stage, backend, rows, buffer| {
                let columns = if matches!(stage, TowerStage::Downsample | TowerStage::Features) { out } else { hidden };
                let mut values = vec![0.0; rows * columns];
                for (row, values) in values.chunks_exact_mut(columns).enumerate() {
                    backend.read(buffer, row, values).unwrap();
                }
                match seen.iter_mut().find(|(s, _)| *s == stage) {
                    Some((_, all)) => all.extend(values),
                    None => seen.push((stage, values)),
                }
            });
            features.extend(result.unwrap());
        }
        assert_eq!(first * width, pixels.len());
        assert_eq!(seen.len(), 6);
        for (stage, values) in seen {
            let key = match stage {
                TowerStage::PatchEmbed => "patch_embed".to_owned(),
                TowerStage::Block(b) => format!("block{b}"),
                TowerStage::PostNorm => "post_norm".to_owned(),
                TowerStage::Downsample => "downsample".to_owned(),
                TowerStage::Features => "merged".to_owned(),
            };
            let key = format!("{pass}.vis.{key}");
            close(&key, &values, &floats(&file, &key), 2e-5);
        }
        let key = format!("{pass}.vis.merged");
        close(&key, &features, &floats(&file, &key), 2e-5);
    }
}

#[test]
fn micro_picture_from_png_to_features() {
    let data = bytes("data/goldens/micro/image_direct.safetensors");
    let file = SafeTensors::deserialize(&data).unwrap();
    let checkpoint = Checkpoint::open(repository("models/micro-bf16")).unwrap();
    let vision = checkpoint.config().vision.clone().unwrap();
    let nested = checkpoint.file("processor_config.json");
    let flat = checkpoint.file("preprocessor_config.json");
    let settings =
        Processors::from_files(&vision, nested.as_ref().map(|b| b.as_slice()), flat.as_ref().map(|b| b.as_slice()));
    let settings = settings.unwrap();
    assert_eq!(settings.image.max_tokens, 36);
    let png = bytes("data/goldens/micro/image_direct.png");
    let picture = RgbImage::decode(&png, DecodeLimits::default()).unwrap();
    let patches = settings.image.image(&picture);
    assert_eq!(patches.grid, PatchGrid { frames: 1, height: 8, width: 12 });
    let pixels = floats(&file, "pixel_values");
    assert!(!pixels.is_empty() && patches.values.starts_with(&pixels), "equal to the bit");

    for threads in [1, 2] {
        let mut backend = Cpu::new(threads);
        let mut tower = VisionTower::load(&backend, &checkpoint).unwrap().unwrap();
        let features = tower.forward(&mut backend, &patches).unwrap();
        close("vision.tokens", &features, &floats(&file, "vision.tokens"), 2e-5);
        // A tower that has seen another picture gives the same bits.
        let small = settings.image.image(&RgbImage::new(30, 90, vec![128; 30 * 90 * 3]).unwrap());
        tower.forward(&mut backend, &small).unwrap();
        assert_eq!(tower.forward(&mut backend, &patches).unwrap(), features);
    }
}

/// A checkpoint whose vision tower is clamped elsewhere.
struct Clamped(Checkpoint, Config);

impl Source for Clamped {
    fn config(&self) -> &Config {
        &self.1
    }

    fn has(&self, name: &str) -> bool {
        Source::has(&self.0, name)
    }

    fn tensor(&self, name: &str) -> glimmer_model::Result<TensorData> {
        Source::tensor(&self.0, name)
    }
}

/// What the tiny tower's stages give for a picture of noise, by their order.
fn tower_stages(limit: Option<f32>) -> Vec<(TowerStage, Vec<f32>)> {
    let checkpoint = Checkpoint::open(repository("data/goldens/tiny")).unwrap();
    let mut config = checkpoint.config().clone();
    let vision = config.vision.as_mut().unwrap();
    vision.swiglu_limit = limit.unwrap_or(vision.swiglu_limit);
    let (hidden, out) = (vision.hidden_size, vision.out_hidden_size);
    let width = vision.in_channels * vision.temporal_patch_size * vision.patch_size * vision.patch_size;
    let grid = PatchGrid { frames: 1, height: 4, width: 6 };
    let values = (0..24 * width).map(|i| (i * 7919 % 1009) as f32 / 250.0 - 2.0).collect();
    let mut backend = Cpu::new(1);
    let mut tower = VisionTower::load(&backend, &Clamped(checkpoint, config)).unwrap().unwrap();
    let mut seen = Vec::new();
    let patches = Patches { grid, width, merge: 2, values };
    let see = &mut |stage, backend: &Cpu, rows, buffer: &_| {
        let columns = if matches!(stage, TowerStage::Downsample | TowerStage::Features) { out } else { hidden };
        let mut values = vec![0.0; rows * columns];
        for (row, values) in values.chunks_exact_mut(columns).enumerate() {
            backend.read(buffer, row, values).unwrap();
        }
        seen.push((stage, values));
    };
    tower.forward_seen(&mut backend, &patches, see).unwrap();
    seen
}

#[test]
fn the_clamp_applies_to_the_vision_mlp_and_the_merger() {
    let clamped = tower_stages(None);
    let free = tower_stages(Some(1e9));
    let stage = |stages: &[(TowerStage, Vec<f32>)], wanted| {
        stages.iter().find(|(stage, _)| *stage == wanted).map(|(_, values)| values.clone()).unwrap()
    };
    let both = |wanted| (stage(&clamped, wanted), stage(&free, wanted));
    let (a, b) = both(TowerStage::PatchEmbed);
    assert_eq!(a, b);
    // The only clamp between the patches and the end of the first block is that of its MLP.
    let (a, b) = both(TowerStage::Block(0));
    assert_ne!(a, b);

    // The merger in f64 from what enters it.
    let checkpoint = Checkpoint::open(repository("data/goldens/tiny")).unwrap();
    let limit = f64::from(checkpoint.config().vision.as_ref().unwrap().swiglu_limit);
    let merger = |name: &str| -> Vec<f64> {
        let tensor = checkpoint.tensor(&format!("model.visual.merger.{name}")).unwrap();
        let values = tensor.bytes.as_slice().as_chunks::<2>().0;
        values.iter().map(|b| f64::from(half::bf16::from_le_bytes(*b).to_f32())).collect()
    };
    let product = |matrix: &str, x: &[f64]| -> Vec<f64> {
        merger(matrix).chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    let (weight, bias) = (merger("post_projection_norm.weight"), merger("post_projection_norm.bias"));
    let features = stage(&clamped, TowerStage::Features);
    let mut changed = 0;
    for (y, feature) in stage(&clamped, TowerStage::Downsample).chunks(weight.len()).zip(features.chunks(weight.len()))
    {
        let y: Vec<f64> = y.iter().map(|&v| f64::from(v)).collect();
        let x = product("proj.weight", &y);
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
        let z: Vec<f64> = x
            .iter()
            .zip(weight.iter().zip(&bias))
            .map(|(v, (w, b))| gelu((v - mean) / (variance + 1e-5).sqrt() * w + b))
            .collect();
        let (gate, up) = (product("gate_proj.weight", &z), product("up_proj.weight", &z));
        changed += gate.iter().filter(|g| **g > limit).count() + up.iter().filter(|u| u.abs() > limit).count();
        let act: Vec<f64> = gate
            .iter()
            .zip(&up)
            .map(|(g, u)| {
                // One-sided on the gate.
                let g = g.min(limit);
                g / (1.0 + (-g).exp()) * u.clamp(-limit, limit)
            })
            .collect();
        let expected: Vec<f32> = product("down_proj.weight", &act).iter().map(|&v| v as f32).collect();
        close("feature", feature, &expected, 2e-5);
    }
    assert!(changed > 0, "the limit is reached in the merger");
}

/// `x/2 (1 + erf(x / sqrt 2))`, the error function as its series.
fn gelu(x: f64) -> f64 {
    let t = x / std::f64::consts::SQRT_2;
    let (mut term, mut sum) = (t, t);
    for n in 1..200 {
        term *= -t * t / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    x / 2.0 * (1.0 + sum * std::f64::consts::FRAC_2_SQRT_PI)
}

#[test]
fn patches_of_another_width_are_refused() {
    let checkpoint = Checkpoint::open(repository("models/micro-bf16")).unwrap();
    let mut backend = Cpu::new(1);
    let mut tower = VisionTower::load(&backend, &checkpoint).unwrap().unwrap();
    let grid = PatchGrid { frames: 1, height: 2, width: 2 };
    let wrong = Patches { grid, width: 96, merge: 2, values: vec![0.0; 4 * 96] };
    assert!(tower.forward(&mut backend, &wrong).unwrap_err().to_string().contains("patch vector"));
    let short = Patches { grid, width: 1176, merge: 2, values: vec![0.0; 1176] };
    assert!(tower.forward(&mut backend, &short).is_err());
}
