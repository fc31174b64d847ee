//! Tensor data by reference: a dtype, a shape and bytes that live in a mapped file, in the binary or in memory.

use std::{fmt, ops::Range, sync::Arc};

/// Element types that occur in checkpoints of this family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// IEEE double.
    F64,
    /// FP8 with 4 exponent bits, no infinities (`F8_E4M3`).
    F8E4M3,
    /// FP8 with 5 exponent bits (`F8_E5M2`).
    F8E5M2,
    /// Signed 8-bit.
    I8,
    /// Signed 16-bit.
    I16,
    /// Signed 32-bit.
    I32,
    /// Signed 64-bit.
    I64,
    /// Unsigned 8-bit.
    U8,
    /// Unsigned 16-bit.
    U16,
    /// Unsigned 32-bit.
    U32,
    /// Unsigned 64-bit.
    U64,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// All element types.
    pub const ALL: [Self; 15] = [
        Self::Bf16,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::Bool,
    ];

    /// The type of a safetensors name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F8E4M3 | Self::F8E5M2 | Self::I8 | Self::U8 | Self::Bool => 1,
            Self::Bf16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The safetensors name (`BF16`, `F8_E4M3`, ...).
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::F64 => "F64",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::I8 => "I8",
            Self::I16 => "I16",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::U8 => "U8",
            Self::U16 => "U16",
            Self::U32 => "U32",
            Self::U64 => "U64",
            Self::Bool => "BOOL",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Who keeps bytes alive.
pub(crate) trait Owner: Send + Sync {
    /// All bytes.
    fn bytes(&self) -> &[u8];

    /// The bytes in `range` will not be read soon.
    fn release(&self, _range: Range<usize>) {}
}

struct Held<T>(T);

impl<T: AsRef<[u8]> + Send + Sync> Owner for Held<T> {
    fn bytes(&self) -> &[u8] {
        self.0.as_ref()
    }
}

/// Bytes with an owner: a mapped file, a static slice or a vector. Cloning shares the owner.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Owner>,
    range: Range<usize>,
}

impl Bytes {
    /// All bytes of `owner`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::owned(Held(owner))
    }

    pub(crate) fn owned(owner: impl Owner + 'static) -> Self {
        let len = owner.bytes().len();
        Self { owner: Arc::new(owner), range: 0..len }
    }

    /// Says that these bytes will not be read soon, so that pages of a mapped file stop counting as this process's memory.
    /// They stay readable: a later read fetches them again.
    pub fn release(&self) {
        self.owner.release(self.range.clone());
    }

    /// The part `range` (relative to this value); `None` when it reaches beyond the end.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        (start <= end && end <= self.range.end).then(|| Self { owner: Arc::clone(&self.owner), range: start..end })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.owner.bytes()[self.range.clone()]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.range.len())
    }
}

/// A tensor of a checkpoint: name, dtype, shape and bytes (little-endian, row-major, possibly unaligned).
#[derive(Debug, Clone)]
pub struct TensorData {
    /// Name in the checkpoint (for messages).
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// `dtype.size() * product(shape)` bytes.
    pub bytes: Bytes,
}

impl TensorData {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}
