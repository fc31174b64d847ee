//! Products of many rows by cuBLASLt, loaded at run time.
//!
//! Beyond [`OWN_ROWS`] rows a product with plainly stored weights is the vendor's. A plan (the library's choice of a kernel) is
//! made once for a product and a class of row counts, powers of two, without a split of the columns. Then every kernel
//! sums the columns of an output in their order: on one NVIDIA H200 a row had the same bits in steps of 72 to 8192 rows,
//! whatever the plan. Where the library is missing the crate's own kernels do the work, more slowly.
//!
//! The library counts matrices by columns: our `y [rows, outputs]` is its `outputs x rows`.

#![allow(unsafe_code, reason = "the library's interface is C")]

use std::{
    collections::HashMap,
    ffi::c_void,
    panic::catch_unwind,
    path::{Path, PathBuf},
};

use cudarc::cublaslt::sys;

use crate::{
    backend::Cuda,
    compile::preload,
    device::Device,
    error::{CudaError, Result},
    graph::between_captures,
};

/// Most rows of a product by the crate's own kernels.
pub(crate) const OWN_ROWS: usize = 24;

/// Row counts of the smallest and the largest class.
const CLASSES: [usize; 2] = [64, 8192];

/// Kernels that the library is asked for, of which the first that sums in one piece is taken.
const CHOICES: usize = 8;

/// Scratch of a product.
const WORKSPACE: usize = 32 << 20;

/// Bytes to which every address and row is aligned.
const ALIGN: usize = 16;

/// What rows and weights are; sums are f32, and so are results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operand {
    Bf16,
    Half,
    /// Halves, of which results are halves again: infinite where they do not fit.
    HalfToHalf,
    Float,
}

impl Operand {
    fn size(self) -> usize {
        if self == Self::Float { 4 } else { 2 }
    }

    fn kind(self) -> sys::cudaDataType {
        match self {
            Self::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Self::Half | Self::HalfToHalf => sys::cudaDataType::CUDA_R_16F,
            Self::Float => sys::cudaDataType::CUDA_R_32F,
        }
    }

    /// What results are.
    fn result(self) -> Self {
        if self == Self::HalfToHalf { self } else { Self::Float }
    }
}

/// `y[row, out] = sum over columns of x[row] w[out]`, several of the kind side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub(crate) operand: Operand,
    pub(crate) outputs: usize,
    pub(crate) columns: usize,
    /// The weights are stored `[columns, outputs]`.
    pub(crate) across: bool,
    /// Elements from one stored row to the next of weights, rows and sums.
    pub(crate) pitches: [usize; 3],
    /// Products side by side.
    pub(crate) batch: usize,
    /// Elements from one of them to the next.
    pub(crate) strides: [usize; 3],
}

impl Product {
    /// Whether the library's kernels take these addresses of weights, rows and sums.
    pub(crate) fn aligned(&self, addresses: [u64; 3]) -> bool {
        let size = self.operand.size();
        let whole = |elements: usize, size: usize| (elements * size).is_multiple_of(ALIGN);
        addresses.iter().all(|address| address.is_multiple_of(ALIGN as u64))
            && (0..3).all(|i| {
                let size = if i == 2 { self.operand.result().size() } else { size };
                whole(self.pitches[i], size) && whole(self.strides[i], size)
            })
    }

    fn weights(&self) -> Result<Layout> {
        let [rows, columns] = if self.across { [self.outputs, self.columns] } else { [self.columns, self.outputs] };
        Layout::new(self.operand.kind(), [rows, columns, self.pitches[0]], self.batch, self.strides[0])
    }

    /// Layouts of rows and sums.
    fn sides(&self, rows: usize) -> Result<[Layout; 2]> {
        let x = Layout::new(self.operand.kind(), [self.columns, rows, self.pitches[1]], self.batch, self.strides[1])?;
        let sums = self.operand.result().kind();
        Ok([x, Layout::new(sums, [self.outputs, rows, self.pitches[2]], self.batch, self.strides[2])?])
    }
}

/// A product with all that it is given.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Call {
    pub(crate) product: Product,
    pub(crate) rows: usize,
    /// Addresses of weights, rows and sums.
    pub(crate) addresses: [u64; 3],
    /// What the sums are multiplied by, and what is kept of what the memory holds.
    pub(crate) factors: [f32; 2],
    /// Address of the workspace.
    pub(crate) workspace: u64,
}

/// The class of a number of rows: the number its plans are made for.
fn class(rows: usize) -> usize {
    rows.next_power_of_two().clamp(CLASSES[0], CLASSES[1])
}

/// Whether cuBLASLt is where it is looked for: beside the compiler library when one is named, in the loader's path, in the
/// toolkit's usual folder. Without it products of many rows take several times as long.
pub fn library_found(compiler: Option<&Path>) -> bool {
    const NAME: &str = "libcublasLt.so.13";
    // SAFETY: asks the loader for the library and calls nothing in it.
    let present = || catch_unwind(|| unsafe { sys::is_culib_present() }).unwrap_or(false);
    let beside = compiler.is_some_and(|path| preload(&path.with_file_name(NAME)));
    beside && present() || present() || preload(&PathBuf::from("/usr/local/cuda/lib64").join(NAME)) && present()
}

/// The library with its plans.
#[derive(Debug)]
pub(crate) struct Library {
    handle: sys::cublasLtHandle_t,
    /// None where the library has no kernel that sums in one piece.
    plans: HashMap<(Product, usize), Option<Plan>>,
}

// SAFETY: a handle may be used from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Library {}
// SAFETY: nothing is done with a shared reference.
unsafe impl Sync for Library {}

impl Drop for Library {
    fn drop(&mut self) {
        let _turn = between_captures();
        // SAFETY: nothing uses the handle any more; the library waits for its products.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

#[derive(Debug)]
struct Plan {
    description: Description,
    weights: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Library {
    /// Loads the library: from the folder of the compiler library when one is named, else through the loader's path and the
    /// toolkit's usual folder. `None` where it is not there.
    pub(crate) fn load(compiler: Option<&Path>) -> Option<Self> {
        if !library_found(compiler) {
            return None;
        }
        catch_unwind(|| {
            let mut handle = std::ptr::null_mut();
            let _turn = between_captures();
            // SAFETY: the library is present; the pointer is to a live local.
            let code = unsafe { sys::cublasLtCreate(&raw mut handle) };
            (code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS).then(|| Self { handle, plans: HashMap::new() })
        })
        .ok()
        .flatten()
    }

    /// Runs a product behind everything that the stream has been given: whether there is a kernel for it. What it calls is as for
    /// launches: it may be captured, and nobody notes it.
    ///
    /// # Errors
    /// What the library says.
    pub(crate) fn multiply(&mut self, device: &Device, call: &Call) -> Result<bool> {
        let Call { product, rows, addresses, factors: [scale, keep], workspace } = *call;
        device.bind()?;
        let handle = self.handle;
        let Some(plan) = self.plan(product, rows)? else { return Ok(false) };
        let [x_layout, y_layout] = product.sides(rows)?;
        let [w, x, y] = addresses.map(|address| address as *mut c_void);
        // SAFETY: descriptors are alive and describe memory that the launchers have checked; the workspace is as long as said.
        unsafe {
            let code = sys::cublasLtMatmul(
                handle,
                plan.description.0,
                (&raw const scale).cast(),
                w,
                plan.weights.0,
                x,
                x_layout.0,
                (&raw const keep).cast(),
                y,
                y_layout.0,
                y,
                y_layout.0,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                device.stream_for_launches().cast(),
            );
            check("cublasLtMatmul", code)?;
        }
        Ok(true)
    }

    /// The plan of a product for the class of `rows`, if there is one.
    fn plan(&mut self, product: Product, rows: usize) -> Result<Option<&Plan>> {
        let key = (product, class(rows));
        if !self.plans.contains_key(&key) {
            let plan = self.choose(product, key.1)?;
            self.plans.insert(key, plan);
        }
        Ok(self.plans.get(&key).and_then(Option::as_ref))
    }

    fn choose(&self, product: Product, rows: usize) -> Result<Option<Plan>> {
        let (description, weights) = (Description::new(!product.across)?, product.weights()?);
        let [x, y] = product.sides(rows)?;
        let preference = Preference::new()?;
        // SAFETY: plain numbers, for which no bits are invalid but the status, which is written before it is read.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CHOICES] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: all descriptors are alive; there is room for as many results as are asked for.
        let code = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                weights.0,
                x.0,
                y.0,
                y.0,
                preference.0,
                CHOICES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        if code == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(None);
        }
        check("cublasLtMatmulAlgoGetHeuristic", code)?;
        // The best first. Some exist only with their split.
        for result in &mut found[..(count.max(0) as usize).min(CHOICES)] {
            let mut algorithm = result.algo;
            if !whole_columns(&mut algorithm) {
                continue;
            }
            // SAFETY: as above; the result is written before anything is read from it.
            let code = unsafe {
                sys::cublasLtMatmulAlgoCheck(
                    self.handle,
                    description.0,
                    weights.0,
                    x.0,
                    y.0,
                    y.0,
                    &raw const algorithm,
                    &raw mut *result,
                )
            };
            if code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= WORKSPACE {
                return Ok(Some(Plan { description, weights, algorithm }));
            }
        }
        Ok(None)
    }
}

/// Takes a split of the columns out of a choice; whether that is possible. Asking for choices without one finds kernels of
/// older devices for some shapes, ten times slower.
fn whole_columns(algorithm: &mut sys::cublasLtMatmulAlgo_t) -> bool {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as What;
    [(What::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 1i32), (What::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 0)].iter().all(
        |(what, value)| {
            // SAFETY: the algorithm is one that the library gave; both attributes are 32 bits wide.
            let code = unsafe {
                let value = (&raw const *value).cast();
                sys::cublasLtMatmulAlgoConfigSetAttribute(&raw mut *algorithm, *what, value, size_of::<i32>())
            };
            code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
        },
    )
}

/// Runs a product of `rows` rows behind everything that the stream has been given: addresses are those of weights, rows and
/// sums, which are multiplied by the first factor and added to what is there times the second. `false` when the library is not
/// there or has no kernel for it, and nothing was done.
///
/// # Errors
/// What the library says.
pub(crate) fn product(
    cuda: &mut Cuda,
    rows: usize,
    product: Product,
    addresses: [u64; 3],
    factors: [f32; 2],
) -> glimmer_tensor::Result<bool> {
    if rows <= OWN_ROWS || cuda.library.is_none() || !product.aligned(addresses) {
        return Ok(false);
    }
    let workspace = cuda.scratch("workspace of products", WORKSPACE)?;
    let call = Call { product, rows, addresses, factors, workspace };
    cuda.kernels.settle()?;
    let Some(library) = &mut cuda.library else { return Ok(false) };
    if !library.multiply(&cuda.device, &call)? {
        return Ok(false);
    }
    cuda.kernels.took_product(call);
    Ok(true)
}

fn check(call: &'static str, code: sys::cublasStatus_t) -> Result<()> {
    if code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Driver { call, code: format!("{code:?}") })
}

/// Layout of an operand.
#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

// SAFETY: a description in memory, written only when it is made.
unsafe impl Send for Layout {}
// SAFETY: as above.
unsafe impl Sync for Layout {}

impl Layout {
    fn new(kind: sys::cudaDataType, [rows, columns, pitch]: [usize; 3], batch: usize, stride: usize) -> Result<Self> {
        use sys::cublasLtMatrixLayoutAttribute_t as What;
        let mut layout = std::ptr::null_mut();
        // SAFETY: the library is loaded; pointers to live locals of the sizes that the attributes have.
        unsafe {
            let code =
                sys::cublasLtMatrixLayoutCreate(&raw mut layout, kind, rows as u64, columns as u64, pitch as i64);
            check("cublasLtMatrixLayoutCreate", code)?;
            let layout = Self(layout);
            if batch > 1 {
                let (count, stride) = (batch as i32, stride as i64);
                let set = |what, value: *const c_void, size| {
                    let code = sys::cublasLtMatrixLayoutSetAttribute(layout.0, what, value, size);
                    check("cublasLtMatrixLayoutSetAttribute", code)
                };
                set(What::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), size_of_val(&count))?;
                set(
                    What::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    (&raw const stride).cast(),
                    size_of_val(&stride),
                )?;
            }
            Ok(layout)
        }
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by the library and not used again.
        unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What a product computes.
#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

// SAFETY: a description in memory, written only when it is made.
unsafe impl Send for Description {}
// SAFETY: as above.
unsafe impl Sync for Description {}

impl Description {
    /// f32 sums; the weights are turned or taken as they lie.
    fn new(turned: bool) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as What;
        let mut description = std::ptr::null_mut();
        let turned = i32::from(turned);
        // SAFETY: the library is loaded; pointers to live locals of the sizes that the attributes have.
        unsafe {
            let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
            let code = sys::cublasLtMatmulDescCreate(&raw mut description, compute, scale);
            check("cublasLtMatmulDescCreate", code)?;
            let description = Self(description);
            let code = sys::cublasLtMatmulDescSetAttribute(
                description.0,
                What::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const turned).cast(),
                size_of_val(&turned),
            );
            check("cublasLtMatmulDescSetAttribute", code)?;
            Ok(description)
        }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made by the library and not used again.
        unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// What a plan may use: the workspace, alignments.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self> {
        use sys::cublasLtMatmulPreferenceAttributes_t as What;
        let mut preference = std::ptr::null_mut();
        let (align, workspace) = (ALIGN as u32, WORKSPACE);
        // SAFETY: the library is loaded; pointers to live locals of the sizes that the attributes have.
        unsafe {
            check("cublasLtMatmulPreferenceCreate", sys::cublasLtMatmulPreferenceCreate(&raw mut preference))?;
            let preference = Self(preference);
            let set = |what, value: *const c_void, size| {
                let code = sys::cublasLtMatmulPreferenceSetAttribute(preference.0, what, value, size);
                check("cublasLtMatmulPreferenceSetAttribute", code)
            };
            set(
                What::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )?;
            for what in [
                What::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                What::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                What::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                What::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                set(what, (&raw const align).cast(), size_of_val(&align))?;
            }
            Ok(preference)
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by the library and not used again.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_powers_of_two_between_their_ends() {
        assert_eq!([25, 65, 128, 129, 300, 768, 8192, 20_000].map(class), [64, 128, 128, 256, 512, 1024, 8192, 8192]);
    }

    #[test]
    fn operands_that_are_not_aligned_are_left_to_the_own_kernels() {
        let product = Product {
            operand: Operand::Bf16,
            outputs: 100,
            columns: 64,
            across: false,
            pitches: [64, 64, 100],
            batch: 1,
            strides: [0; 3],
        };
        assert!(product.aligned([256, 512, 1024]));
        assert!(!product.aligned([256, 512, 1028]));
        assert!(!Product { pitches: [64, 64, 102], ..product }.aligned([256, 512, 1024]));
        assert!(Product { operand: Operand::Float, pitches: [4, 4, 4], ..product }.aligned([16, 16, 16]));
    }
}
