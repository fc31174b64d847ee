//! Windows into a forward pass: goldens, calibration and drafters that tap hidden states.
//!
//! An observer is called between stages with the buffers as they are; it can read them, or copy rows with stages of its
//! own, but the pass does not depend on it. `()` observes nothing and costs nothing.

use glimmer_tensor::{Backend, Streams};

/// Where in the pass an observer is called.
#[derive(Debug)]
pub struct At<'a, B: Backend> {
    /// The backend, to read buffers or to run stages that copy them.
    pub backend: &'a mut B,
    /// Layer of the model (the draft layer comes after the decoder layers).
    pub layer: usize,
    /// Rows of the step.
    pub rows: usize,
}

impl<B: Backend> At<'_, B> {
    /// The first `width` columns of all rows of a buffer, `[rows, width]`.
    ///
    /// # Errors
    /// What the backend says when the buffer is narrower.
    pub fn read(&self, buffer: &B::Buffer, width: usize) -> glimmer_tensor::Result<Vec<f32>> {
        let mut values = vec![0.0; self.rows * width];
        for (row, out) in values.chunks_exact_mut(width.max(1)).enumerate() {
            self.backend.read(buffer, row, out)?;
        }
        Ok(values)
    }
}

/// One of the two hyper-connection sites of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SiteKind {
    /// Before attention.
    Attention,
    /// Before the MLP.
    Mlp,
}

/// Sees the buffers of a pass. Every method does nothing unless overridden.
pub trait Observer<B: Backend> {
    /// Whether it looks at all. A backend may run a step that nobody looks into as a whole.
    fn looks(&self) -> bool {
        true
    }

    /// The streams entering a layer, complete: `streams.x` `[rows, n * hidden]`. Called once more with the number of
    /// decoder layers after the last one. An external drafter's tap of layer `i` is the mean of these over the streams.
    fn streams(&mut self, _at: At<'_, B>, _streams: &Streams<B>) {}

    /// A mixer has been applied: `streams.post`, `streams.comb`, `streams.collapsed`, and the normed input `x`
    /// `[rows, hidden]` of the sub-block.
    fn site(&mut self, _at: At<'_, B>, _site: SiteKind, _streams: &Streams<B>, _x: &B::Buffer) {}

    /// Delta attention before its output projection: `core` `[rows, heads * dim]`.
    fn kda(&mut self, _at: At<'_, B>, _core: &B::Buffer) {}

    /// Sparse attention before its output projection: the normed query residual `[rows, q_lora]`, the selection and
    /// `core` `[rows, heads * v_dim]`.
    fn dsa(&mut self, _at: At<'_, B>, _q_residual: &B::Buffer, _selection: &B::Selection, _core: &B::Buffer) {}

    /// Output of the attention block `[rows, hidden]`, before it is added to the streams.
    fn attention(&mut self, _at: At<'_, B>, _out: &B::Buffer) {}

    /// The experts chosen by a layer's router.
    fn routing(&mut self, _at: At<'_, B>, _routing: &B::Routing) {}

    /// Output of the MLP `[rows, hidden]`, before it is added to the streams.
    fn mlp(&mut self, _at: At<'_, B>, _out: &B::Buffer) {}

    /// Output of the final norm `[rows, hidden]` (of the draft layer's own norm in a draft step).
    fn hidden(&mut self, _at: At<'_, B>, _hidden: &B::Buffer) {}

    /// Output of the draft layer's input projection `[rows, hidden]`.
    fn draft_input(&mut self, _at: At<'_, B>, _x: &B::Buffer) {}
}

impl<B: Backend> Observer<B> for () {
    fn looks(&self) -> bool {
        false
    }
}
