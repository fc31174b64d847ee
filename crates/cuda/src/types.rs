//! What the backend keeps on the device: activations, weights, selections, routings.

use std::sync::atomic::{AtomicU64, Ordering};

use glimmer_tensor::{Error, Result};

use crate::memory::Memory;

/// Columns of an INT4 group, which share one scale.
pub(crate) const GROUP: usize = 128;

/// Rows of INT4 that lie together.
pub(crate) const INT4_ROWS: usize = 64;

/// Bytes of 8 rows by a group of columns in INT4: codes and scales.
pub(crate) const INT4_BLOCK_BYTES: usize = 8 * GROUP / 2 + 8 * 2;

/// Columns of a block that the tensor-core products take at once; BF16 rows are padded to whole blocks.
pub(crate) const BLOCK: usize = 32;

/// How the elements of a buffer are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// f32, `[rows, width]`.
    Float,
    /// Two planes `[rows, pitch]`, high and low, whose sum is the value: input of a product.
    Planes {
        /// IEEE halves (beside INT4 weights) rather than bf16.
        half: bool,
        /// Rows of a plane.
        rows: usize,
        /// Elements a row.
        pitch: usize,
    },
    /// In the slots of the work list, in scratch: input of the experts' second product (see `kernels/slots.cu`).
    Slots {
        /// One plane of IEEE halves (beside INT4 weights) rather than planes of bf16.
        half: bool,
        /// Slots of a piece of 64 columns.
        slots: usize,
    },
}

/// Activations `[rows, width]`.
#[derive(Debug)]
pub struct CudaBuffer {
    pub(crate) memory: Memory,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) format: Format,
}

impl CudaBuffer {
    /// The device's address of element (0, `column`).
    pub(crate) fn at(&self, column: usize) -> u64 {
        self.memory.address() + 4 * column as u64
    }

    /// Checks that the buffer holds `rows` rows of `width` columns at least, in f32.
    pub(crate) fn require(&self, what: &'static str, rows: usize, width: usize) -> Result<()> {
        require(what, rows, self.rows)?;
        require(what, width, self.width)
    }
}

/// A parameter vector in f32.
#[derive(Debug)]
pub struct CudaVector {
    pub(crate) memory: Memory,
    pub(crate) len: usize,
}

impl CudaVector {
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }
}

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// BF16, rows padded with zeros to `pitch`.
    Bf16,
    /// F32, rows without padding.
    F32,
    /// INT4 in the blocks of the products, scales inside (see `kernels/gemm.cu`).
    Int4,
}

/// A weight matrix `[out, columns]`.
#[derive(Debug)]
pub struct CudaMatrix {
    pub(crate) kind: Kind,
    pub(crate) out: usize,
    pub(crate) columns: usize,
    /// Elements from one row to the next.
    pub(crate) pitch: usize,
    pub(crate) data: Memory,
    /// Unique in the process.
    pub(crate) id: u64,
}

impl CudaMatrix {
    /// The same matrix in the same memory.
    pub(crate) fn view(&self) -> Self {
        Self { data: self.data.clone(), ..*self }
    }

    pub(crate) fn address(&self) -> u64 {
        self.data.address()
    }

    /// 1 for BF16, 0 for F32: the kernels' flag for a plainly stored matrix.
    ///
    /// # Errors
    /// [`Error::Weight`] for INT4.
    pub(crate) fn plain(&self, what: &'static str) -> Result<i32> {
        match self.kind {
            Kind::Bf16 => Ok(1),
            Kind::F32 => Ok(0),
            Kind::Int4 => Err(Error::Weight {
                name: what.to_owned(),
                expected: "BF16 or F32".to_owned(),
                found: "INT4 (only routed experts are quantized)".to_owned(),
            }),
        }
    }

    /// Whether the tensor-core products take the matrix.
    pub(crate) fn multiplies(&self) -> bool {
        match self.kind {
            Kind::Bf16 => self.columns >= BLOCK,
            Kind::F32 => false,
            Kind::Int4 => true,
        }
    }
}

/// Selected tokens of each row, ascending, `[rows, <= width]`.
#[derive(Debug)]
pub struct CudaSelection {
    pub(crate) tokens: Memory,
    pub(crate) lens: Memory,
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

/// Chosen experts of each row with their weights, `[rows, top]`, ascending.
#[derive(Debug)]
pub struct CudaRouting {
    pub(crate) experts: Memory,
    pub(crate) weights: Memory,
    pub(crate) rows: usize,
    pub(crate) top: usize,
    pub(crate) num_experts: usize,
    /// Unique in the process.
    pub(crate) id: u64,
}

/// A number that no other matrix or routing has.
pub(crate) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Checks `needed <= available`.
pub(crate) fn require(what: &'static str, needed: usize, available: usize) -> Result<()> {
    if needed <= available { Ok(()) } else { Err(Error::Capacity { what, needed, available }) }
}

/// Checks `needed == available`.
pub(crate) fn require_equal(what: &'static str, needed: usize, available: usize) -> Result<()> {
    if needed == available { Ok(()) } else { Err(Error::Capacity { what, needed, available }) }
}
