//! Pictures and clips against goldens: patches of the released processor, every stage of the tower.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use glimmer_checkpoint::Checkpoint;
use glimmer_model::vision::{DecodeLimits, Patches, Processor, Processors, RgbImage, TowerStage, VisionTower};
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
    let top = golden.iter().fold(1.0f32, |m, g| m.max(g.abs()));
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
        // Pixel bytes of all patches; both frames of a patch are equal.
        let golden = file.tensor(&format!("img{k}.pixels")).unwrap();
        let normal = |v: u8, c: usize| (f32::from(v) / 255.0 - processor.mean[c]) / processor.std[c];
        let area = 14 * 14;
        for (i, patch) in golden.data().chunks_exact(3 * area).enumerate() {
            let ours = &patches.values[i * patches.width..][..patches.width];
            for (c, plane) in patch.chunks_exact(area).enumerate() {
                for frame in 0..2 {
                    let ours = &ours[(2 * c + frame) * area..][..area];
                    assert!(
                        plane.iter().zip(ours).all(|(&v, &o)| normal(v, c).to_bits() == o.to_bits()),
                        "img{k} patch {i} channel {c}"
                    );
                }
            }
        }
        assert_eq!(golden.shape()[0], patches.rows(), "img{k}");
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
