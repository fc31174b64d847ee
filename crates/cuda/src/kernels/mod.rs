//! The kernels and their launchers: `<op>.cu` stands beside `<op>.rs`. The definition of a stage is the CPU backend's.
//!
//! The head of a `.cu` says its maths, layout and limits, its launcher what is taken when. Versions that were tried, with their
//! times, are in `benches/records/`, all stages side by side in `h200-kernels.md`:
//!
//! | stage | files | versions and times |
//! |---|---|---|
//! | products with BF16 weights: up to 24 rows; 9 to 96 rows of large matrices; up to 128 columns; beyond, the library's (`wide.rs`), or without it | `few.cu`; `several.cu`; `narrow.cu`; `gemm.cu` | `h200-dense.md`, `h200-step.md` |
//! | experts in INT4, up to 16 tokens of an item and beyond | `experts_few.cu`, `experts.cu` | `h200-experts.md` |
//! | experts in BF16, up to 128 rows and beyond | `experts_bf16.cu`, `experts_bf16_many.cu` | `h200-experts.md` |
//! | work list, tokens in slots, weighted sum | `slots.cu`, `moe.cu` | `h200-experts.md` |
//! | router | `router.cu` | `h200-step.md` |
//! | delta attention row after row (decoding, drafts); in chunks | `kda.cu`; `kda_chunk.cu` with `kda_*.cuh` | `h200-kda.md` |
//! | hyper-connection site; its parts | `mhc_site.cu`; `mhc.cu` | `h200-kda.md` |
//! | sparse attention: caches written, pools scored and chosen | `dsa.cu`, `index.cu`, `choose.cu` | `h200-attention.md` |
//! | sparse attention: absorption and values; attention over the chosen, of halves and of f32 | `heads.cu`; `sparse.cu`, `mla.cu` | `h200-attention.md` |
//! | tokens: the largest logit, draws of few rows, draws | `sampler.cu`, `draw.cu`, `stream.cu` | `h200-sampler.md` |
//! | attention of pictures | `vision.cu` | `h200-kernels.md` |
//! | embedding, norms, copies, planes of activations | `dense.cu` | `h200-kernels.md` |

pub(crate) mod dense;
pub(crate) mod dsa;
pub(crate) mod experts;
pub(crate) mod experts_bf16;
pub(crate) mod few;
pub(crate) mod gemm;
pub(crate) mod heads;
pub(crate) mod index;
pub(crate) mod kda;
pub(crate) mod kda_chunk;
pub(crate) mod mhc;
pub(crate) mod mla;
pub(crate) mod moe;
pub(crate) mod narrow;
pub(crate) mod router;
pub(crate) mod sampler;
pub(crate) mod several;
pub(crate) mod slots;
pub(crate) mod sparse;
pub(crate) mod vision;
pub(crate) mod wide;
