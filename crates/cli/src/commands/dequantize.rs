//! `glimmer dequantize`: one tensor as numbers.

use std::{io::Write as _, path::Path, process::ExitCode};

use anyhow::bail;
use glimmer_checkpoint::{Checkpoint, DType, TensorData, int4};

use crate::{args::DequantizeArgs, open, output::OutputFile};

/// Prints a summary of a tensor, or writes all its values.
pub(crate) fn run(args: &DequantizeArgs) -> anyhow::Result<ExitCode> {
    if let Some(out) = args.out.as_deref().filter(|out| lies_in(out, &args.artifact)) {
        bail!(
            "--out {}: the artifact's own files must stay as they are; name a file in another directory",
            out.display()
        );
    }
    let file = OutputFile::prepare_optional(args.out.as_deref())?;
    let artifact = open::model(Some(&args.artifact))?;
    let (shape, values) = values(&artifact, &args.tensor)?;
    let mut out = anstream::stdout().lock();
    if let (Some(file), Some(path)) = (file, &args.out) {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        file.finish(&bytes)?;
        writeln!(out, "{}: {} values, shape {shape:?}, f32 little-endian", path.display(), values.len())?;
        return Ok(ExitCode::SUCCESS);
    }
    let count = values.len().max(1) as f64;
    let (mut low, mut high, mut sum, mut squares) = (f32::INFINITY, f32::NEG_INFINITY, 0.0f64, 0.0f64);
    for &x in &values {
        (low, high) = (low.min(x), high.max(x));
        sum += f64::from(x);
        squares += f64::from(x) * f64::from(x);
    }
    writeln!(out, "shape {shape:?}, {} values", values.len())?;
    writeln!(out, "range {low} to {high}, mean {:.6}, root mean square {:.6}", sum / count, (squares / count).sqrt())?;
    let first: Vec<String> = values.iter().take(8).map(ToString::to_string).collect();
    writeln!(out, "first {}", first.join(" "))?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a file is, or would be, in this very directory.
fn lies_in(file: &Path, directory: &Path) -> bool {
    let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let parent = file.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
    let real = |path: &Path| path.canonicalize().ok();
    parent.and_then(real).is_some_and(|parent| Some(parent) == real(directory))
}

/// Shape and values of a stored tensor, or of the matrix that a packed one stands for.
fn values(artifact: &Checkpoint, name: &str) -> anyhow::Result<(Vec<usize>, Vec<f32>)> {
    let base = name.strip_suffix("_packed").unwrap_or(name);
    let base = base.strip_suffix(".weight").unwrap_or(base);
    let packed = format!("{base}.weight_packed");
    if artifact.has(&packed) {
        let (packed, scale) = (artifact.tensor(&packed)?, artifact.tensor(&format!("{base}.weight_scale"))?);
        let [rows, words] = packed.shape[..] else { bail!("{}: expected two dimensions", packed.name) };
        let cols = words * 32 / int4::BITS as usize;
        let values = int4::dequantize_matrix(packed.bytes.as_slice(), scale.bytes.as_slice(), cols)?;
        return Ok((vec![rows, cols], values.into_iter().map(f32::from).collect()));
    }
    let stored = [name.to_owned(), format!("{base}.weight")].into_iter().find(|n| artifact.has(n));
    let Some(stored) = stored else {
        bail!("there is no tensor `{name}` here, packed or not; `glimmer inspect` lists the groups");
    };
    let tensor = artifact.tensor(&stored)?;
    Ok((tensor.shape.clone(), widen(&tensor)?))
}

fn widen(tensor: &TensorData) -> anyhow::Result<Vec<f32>> {
    let bytes = tensor.bytes.as_slice();
    Ok(match tensor.dtype {
        DType::Bf16 => {
            bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
        }
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        other => {
            bail!("{}: {other} tensors are not numbers to print; expected BF16, F32 or a packed matrix", tensor.name)
        }
    })
}
