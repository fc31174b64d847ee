//! Device memory: blocks cut from large arenas, transfers, events.
//!
//! A model has tens of thousands of matrices and the driver's allocations are slow and coarse, so memory is cut from arenas
//! of 64 MiB; larger pieces get an arena of their own. An arena is freed when its last piece is dropped.

#![allow(unsafe_code, reason = "the driver's interface is C")]

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use cudarc::driver::sys;

use crate::{
    device::{Device, check},
    error::{CudaError, Result},
    graph::between_captures,
};

const ARENA_BYTES: usize = 64 << 20;

/// Alignment of every piece.
const ALIGN: usize = 256;

/// Where device memory comes from.
#[derive(Debug)]
pub(crate) struct Allocator {
    device: Device,
    open: Mutex<Option<(Arc<Arena>, usize)>>,
}

#[derive(Debug)]
struct Arena {
    device: Device,
    start: u64,
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            let _turn = between_captures();
            // SAFETY: no piece of the arena is left; freeing waits for kernels that use it.
            unsafe { sys::cuMemFree_v2(self.start) };
        }
    }
}

/// A piece of device memory.
#[derive(Debug, Clone)]
pub struct Memory {
    arena: Arc<Arena>,
    start: u64,
    bytes: usize,
}

impl Allocator {
    pub(crate) fn new(device: Device) -> Self {
        Self { device, open: Mutex::new(None) }
    }

    /// `bytes` bytes, aligned to 256, with any content.
    pub(crate) fn uninitialized(&self, what: &'static str, bytes: usize) -> Result<Memory> {
        let size = bytes.max(1).next_multiple_of(ALIGN);
        if size > ARENA_BYTES / 2 {
            let arena = self.arena(what, size)?;
            return Ok(Memory { start: arena.start, arena, bytes });
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((arena, used)) = open.as_mut()
            && *used + size <= ARENA_BYTES
        {
            let start = arena.start + *used as u64;
            *used += size;
            return Ok(Memory { arena: Arc::clone(arena), start, bytes });
        }
        let arena = self.arena(what, ARENA_BYTES)?;
        *open = Some((Arc::clone(&arena), size));
        Ok(Memory { start: arena.start, arena, bytes })
    }

    /// Memory of its own, not cut from an arena that others hold.
    pub(crate) fn alone(device: &Device, what: &'static str, bytes: usize) -> Result<Memory> {
        let arena = Self::new(device.clone()).arena(what, bytes.max(1))?;
        Ok(Memory { start: arena.start, arena, bytes })
    }

    /// `bytes` zero bytes.
    pub(crate) fn zeroed(&self, what: &'static str, bytes: usize) -> Result<Memory> {
        let memory = self.uninitialized(what, bytes.next_multiple_of(4))?;
        memory.fill(0)?;
        Ok(memory)
    }

    /// A copy of `values`.
    pub(crate) fn upload<T: Pod>(&self, what: &'static str, values: &[T]) -> Result<Memory> {
        let memory = self.uninitialized(what, size_of_val(values))?;
        memory.write(0, values)?;
        Ok(memory)
    }

    fn arena(&self, what: &'static str, bytes: usize) -> Result<Arc<Arena>> {
        self.device.bind()?;
        let mut start = 0;
        let turn = between_captures();
        // SAFETY: a pointer to a live local.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut start, bytes) };
        drop(turn);
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = self.device.free_memory()?;
            return Err(CudaError::OutOfMemory { what, needed: bytes, free, total });
        }
        check("cuMemAlloc", code)?;
        Ok(Arc::new(Arena { device: self.device.clone(), start }))
    }
}

impl Memory {
    /// The device's address.
    pub(crate) fn address(&self) -> u64 {
        self.start
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory as a matrix of bf16, `rows` rows of `columns` elements that start `pitch` elements apart, for the copy engine,
    /// which takes boxes of `box_rows` rows by 64 columns: rows of 128 bytes in shared memory, 16-byte pieces of row r at their
    /// number ^ (r % 8), zeros beyond the matrix. The words are what a kernel gives the engine; they must lie at a multiple of
    /// 64 bytes. Errors: the driver's, for a pitch that is no multiple of eight.
    pub(crate) fn boxes(&self, rows: usize, columns: usize, pitch: usize, box_rows: u32) -> Result<[u64; 16]> {
        use sys::{
            CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as BF16,
            CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as ZEROS,
            CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE as PLAIN,
            CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as TOGETHER,
            CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B as SWIZZLED,
        };
        if let Some(last) = rows.checked_sub(1) {
            self.inside(0, 2 * (last * pitch + columns));
        }
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, strides) = ([columns as u64, rows as u64], [2 * pitch as u64]);
        let (boxes, steps) = ([64, box_rows], [1, 1]);
        let start = self.start as *mut std::ffi::c_void;
        // SAFETY: all pointers but `start` are of live locals of the lengths that two dimensions have; `start` is not followed.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                BF16,
                2,
                start,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                PLAIN,
                SWIZZLED,
                TOGETHER,
                ZEROS,
            )
        };
        check("cuTensorMapEncodeTiled", code)?;
        Ok(map.opaque)
    }

    fn stream(&self) -> Result<sys::CUstream> {
        self.arena.device.bind()?;
        Ok(self.arena.device.stream())
    }

    fn inside(&self, offset: usize, bytes: usize) {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "a transfer lies inside its memory");
    }

    /// Sets every 32-bit word.
    pub(crate) fn fill(&self, word: u32) -> Result<()> {
        let stream = self.stream()?;
        // SAFETY: the words lie inside the piece.
        unsafe { check("cuMemsetD32Async", sys::cuMemsetD32Async(self.start, word, self.bytes / 4, stream)) }
    }

    /// Copies `values` to byte `offset`. The host's memory is free again on return.
    pub(crate) fn write<T: Pod>(&self, offset: usize, values: &[T]) -> Result<()> {
        let (bytes, stream) = (size_of_val(values), self.stream()?);
        self.inside(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        let to = self.start + offset as u64;
        // SAFETY: both ranges have `bytes` bytes; pageable host memory is staged before the call returns.
        unsafe { check("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(to, values.as_ptr().cast(), bytes, stream)) }
    }

    /// As [`Self::write`] for rows of `row` bytes that start `pitch` bytes apart on the device.
    pub(crate) fn write_rows(&self, bytes: &[u8], row: usize, pitch: usize) -> Result<()> {
        let (rows, stream) = (bytes.len() / row.max(1), self.stream()?);
        if row == pitch {
            return self.write(0, bytes);
        }
        self.inside(0, rows * pitch);
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST,
            srcHost: bytes.as_ptr().cast(),
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: row,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: self.start,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitch,
            WidthInBytes: row,
            Height: rows,
        };
        // SAFETY: `rows` rows of `row` bytes exist on both sides.
        unsafe { check("cuMemcpy2DAsync", sys::cuMemcpy2DAsync_v2(&raw const copy, stream)) }
    }

    /// Copies from byte `offset` and waits for it.
    pub(crate) fn read<T: Pod>(&self, offset: usize, values: &mut [T]) -> Result<()> {
        let (bytes, stream) = (size_of_val(values), self.stream()?);
        self.inside(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        let from = self.start + offset as u64;
        // SAFETY: both ranges have `bytes` bytes, and the values are not used before the wait.
        unsafe {
            check("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), from, bytes, stream))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(stream))
        }
    }

    /// Copies `bytes` bytes on the device.
    pub(crate) fn copy_from(&self, offset: usize, from: &Self, from_offset: usize, bytes: usize) -> Result<()> {
        let stream = self.stream()?;
        self.inside(offset, bytes);
        from.inside(from_offset, bytes);
        let (to, from) = (self.start + offset as u64, from.start + from_offset as u64);
        // SAFETY: both ranges lie inside their pieces.
        unsafe { check("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream)) }
    }
}

/// Pinned host memory that the device reads at its own pace.
#[derive(Debug)]
pub(crate) struct Pinned {
    device: Device,
    start: *mut u8,
    bytes: usize,
    /// Marks the end of the last copy from here.
    done: Event,
}

// SAFETY: the memory belongs to the value alone.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Self> {
        device.bind()?;
        let mut start = std::ptr::null_mut();
        let turn = between_captures();
        // SAFETY: a pointer to a live local; flags 0 is ordinary cached memory.
        unsafe { check("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut start, bytes.max(1), 0))? };
        drop(turn);
        let done = Event::new(device)?;
        Ok(Self { device: device.clone(), start: start.cast(), bytes, done })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Waits until the last copy is done, then copies `words` to `to` at byte `offset` without waiting for it.
    pub(crate) fn send(&self, words: &[u32], to: &Memory, offset: usize) -> Result<()> {
        self.send_in(self.device.stream(), bytemuck::cast_slice(words), to, offset)
    }

    /// As [`Self::send`], in another stream of the device.
    pub(crate) fn send_in(&self, stream: sys::CUstream, bytes: &[u8], to: &Memory, offset: usize) -> Result<()> {
        let count = bytes.len();
        assert!(count <= self.bytes, "a transfer fits its pinned memory");
        to.inside(offset, count);
        self.done.wait()?;
        // SAFETY: the last copy is done, so nothing reads the memory; the ranges have `count` bytes; the stream is alive.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, count);
            let address = to.start + offset as u64;
            check("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(address, self.start.cast(), count, stream))?;
            check("cuEventRecord", sys::cuEventRecord(self.done.event, stream))
        }
    }

    /// Copies `bytes` bytes of `from` here, and waits for it.
    pub(crate) fn fetch(&self, from: &Memory, offset: usize, bytes: usize) -> Result<()> {
        assert!(bytes <= self.bytes, "a transfer fits its pinned memory");
        from.inside(offset, bytes);
        self.done.wait()?;
        let (stream, address) = (from.stream()?, from.start + offset as u64);
        // SAFETY: the last copy from here is done; both ranges have `bytes` bytes.
        unsafe {
            check("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(self.start.cast(), address, bytes, stream))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(stream))
        }
    }

    /// Numbers that [`Self::fetch`] brought, from the `at`-th on.
    pub(crate) fn copy_out(&self, at: usize, values: &mut [f32]) {
        assert!(4 * (at + values.len()) <= self.bytes, "a transfer fits its pinned memory");
        // SAFETY: the range lies inside the memory, which nothing writes: `fetch` waits for its copy. Any bits are a number.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.start.add(4 * at),
                values.as_mut_ptr().cast::<u8>(),
                size_of_val(values),
            );
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.synchronize().is_ok() {
            let _turn = between_captures();
            // SAFETY: no copy is under way.
            unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}

/// A point in the stream.
#[derive(Debug)]
pub struct Event {
    device: Device,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that lies before everything.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Device) -> Result<Self> {
        device.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: a pointer to a live local.
        unsafe { check("cuEventCreate", sys::cuEventCreate(&raw mut event, 0))? };
        Ok(Self { device: device.clone(), event })
    }

    /// Moves the event to the end of what the stream has been given.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: event and stream are alive.
        unsafe { check("cuEventRecord", sys::cuEventRecord(self.event, self.device.stream())) }
    }

    /// Waits until the stream has reached the event.
    ///
    /// # Errors
    /// What went wrong before it.
    pub fn wait(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the event is alive.
        unsafe { check("cuEventSynchronize", sys::cuEventSynchronize(self.event)) }
    }

    /// Microseconds between two events that have been reached.
    ///
    /// # Errors
    /// What the driver says.
    pub fn micros_since(&self, earlier: &Self) -> Result<f64> {
        let mut ms = 0.0;
        // SAFETY: both events are alive.
        unsafe { check("cuEventElapsedTime", sys::cuEventElapsedTime_v2(&raw mut ms, earlier.event, self.event))? };
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: nothing uses the event any more.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
