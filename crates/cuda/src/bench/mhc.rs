//! Hyper-connections: a site, from the output of the sub-block in front to the normed input of the next.

use glimmer_tensor::{Backend, MhcWeights, Norm, Result, Streams};

use super::{Contents, Row, Unit, fill, random_matrix, timed};
use crate::{backend::Cuda, types::CudaVector};

const HIDDEN: usize = 4096;
const STREAMS: usize = 4;
const COEFFICIENTS: usize = 2 * STREAMS + STREAMS * STREAMS;
/// Sites in turn: as many as a forward pass has, so that their matrices come from memory.
const SITES: usize = 90;
/// Bytes of streams in turn at many rows.
const ROTATION: usize = 512 << 20;

fn mixer(cuda: &Cuda) -> Result<MhcWeights<Cuda>> {
    let small = |len| -> Result<CudaVector> {
        Ok(CudaVector { memory: cuda.memory.upload("random parameters", &vec![0.01f32; len])?, len })
    };
    Ok(MhcWeights {
        mix: random_matrix(cuda, COEFFICIENTS, STREAMS * HIDDEN)?,
        base: small(COEFFICIENTS)?,
        scale: small(3)?,
        streams: STREAMS,
        rms_eps: 1e-5,
        eps: 1e-6,
        sinkhorn_iters: 20,
    })
}

/// All numbers of rows; few rows meet a matrix from memory and streams from the second-level cache, as in a step.
pub(super) fn rows(cuda: &mut Cuda, report: &mut dyn FnMut(Row)) -> Result<()> {
    let mixers = (0..SITES).map(|_| mixer(cuda)).collect::<Result<Vec<_>>>()?;
    let weight = cuda.memory.uninitialized("random parameters", 4 * HIDDEN)?;
    fill(cuda, &weight, Contents::Floats)?;
    let norm = Norm { weight: CudaVector { memory: weight, len: HIDDEN }, bias: None, eps: 1e-5 };
    for rows in [1, 3, 8, 24, 96, 256, 768, 2048, 8192] {
        // Streams, y, u and x of a set.
        let bytes = 4 * rows * HIDDEN * (STREAMS + 3);
        let count = if rows < 96 { 1 } else { ROTATION.div_ceil(bytes).clamp(1, 8) };
        let mut sets = Vec::new();
        for _ in 0..count {
            let streams: Streams<Cuda> = Streams {
                x: cuda.buffer(rows, STREAMS * HIDDEN)?,
                post: cuda.buffer(rows, STREAMS)?,
                comb: cuda.buffer(rows, STREAMS * STREAMS)?,
                collapsed: cuda.buffer(rows, HIDDEN)?,
            };
            // Coefficients that keep repeated merges bounded.
            streams.post.memory.write(0, &vec![0.1f32; rows * STREAMS])?;
            streams.comb.memory.write(0, &vec![0.2f32; rows * STREAMS * STREAMS])?;
            let y = cuda.buffer(rows, HIDDEN)?;
            fill(cuda, &streams.x.memory, Contents::Floats)?;
            fill(cuda, &y.memory, Contents::Floats)?;
            sets.push((streams, y, cuda.buffer(rows, HIDDEN)?));
        }
        let calls = if rows < 96 { SITES } else { 2 * count.max(4) };
        let micros = timed(cuda, calls, |cuda, i| {
            let (streams, y, x) = &mut sets[i % count];
            cuda.mhc(rows, &mixers[i % SITES], &norm, Some(y), streams, x)
        })?;
        // Matrix in BF16; streams read and written, y, u and x, all f32.
        let bytes = 2 * COEFFICIENTS * STREAMS * HIDDEN + 4 * rows * HIDDEN * (2 * STREAMS + 3);
        report(Row {
            kernel: "mHC site".to_owned(),
            rows,
            micros,
            bytes: bytes as f64,
            flops: (rows * HIDDEN * (2 * COEFFICIENTS * STREAMS + 2 * STREAMS * (STREAMS + 3))) as f64,
            unit: Unit::Tensor,
        });
    }
    Ok(())
}
