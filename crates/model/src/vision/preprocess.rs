//! A picture on its canvas, cut into patches.
//!
//! The canvas is the smallest rectangle of whole tokens around the picture. A token covers `factor x factor` pixels
//! (`factor = patch * merge * expand`). Pictures below the least token count are enlarged, pictures above the greatest are
//! scaled down; the aspect ratio is kept and the rest of the canvas stays black, *before* normalisation. Sizes are computed
//! in integers and f64, pixels in f32: `(v / 255 - mean) / std`.
//!
//! Invariant: patches come in merge-block order (block row, block column, row and column inside the block), so that
//! `merge * merge` consecutive patches make one token.

use glimmer_tensor::PatchGrid;

use super::{Processor, RgbImage, VisionError, resize};

/// Size of a canvas and of the picture on it (top left), in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Canvas {
    /// Canvas height.
    pub height: usize,
    /// Canvas width.
    pub width: usize,
    /// Height of the picture.
    pub content_height: usize,
    /// Width of the picture.
    pub content_width: usize,
}

/// Patches of one image or clip.
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// Frame pairs, patch rows, patch columns.
    pub grid: PatchGrid,
    /// Width of a patch vector: `channels * temporal * patch * patch`.
    pub width: usize,
    /// Patches a token, each way.
    pub merge: usize,
    /// `[frames * height * width, width]`, a patch vector ordered (channel, frame, row, column).
    pub values: Vec<f32>,
}

impl Patches {
    /// Number of patches.
    pub fn rows(&self) -> usize {
        self.grid.frames * self.grid.height * self.grid.width
    }

    /// Tokens that the placeholder expands to, over all frame pairs.
    pub fn tokens(&self) -> usize {
        self.grid.frames * self.frame_tokens()
    }

    /// Tokens of one frame pair.
    pub fn frame_tokens(&self) -> usize {
        self.grid.height * self.grid.width / (self.merge * self.merge)
    }
}

impl Processor {
    /// Pixels of a token, each way.
    fn factor(&self) -> usize {
        self.patch_size * self.merge_size * self.patch_expand_factor
    }

    /// Canvas of a picture of `height x width` pixels in `frames` frames (an image counts as one patch depth of frames).
    ///
    /// # Panics
    /// When a side is zero; [`RgbImage`] excludes that.
    pub fn canvas(&self, height: usize, width: usize, frames: usize) -> Canvas {
        assert!(height > 0 && width > 0, "sides are positive");
        let factor = self.factor();
        let up = |v: usize| v.div_ceil(factor) * factor;
        let depth = self.temporal_patch_size;
        let unit = depth * factor * factor;
        let (least, most) = (self.min_tokens * unit, self.max_tokens * unit);
        let deep = depth.max((frames as f64 / depth as f64).round_ties_even() as usize * depth);
        let pixels = |h: usize, w: usize, f: usize| f.saturating_mul(h).saturating_mul(w);
        let given = pixels(height, width, frames);

        let (mut tall, mut wide) = (up(height), up(width));
        if pixels(tall, wide, deep) < least {
            let scale = (least as f64 / given as f64).sqrt();
            let grow = |v: usize| up(((v as f64 * scale).ceil() as usize).max(1));
            (tall, wide) = (grow(height), grow(width));
        }
        if pixels(tall, wide, deep) > most {
            (tall, wide) = (factor, factor);
            let (mut low, mut high) = (1, height);
            while low <= high {
                let middle = (low + high) / 2;
                let content = (width * middle / height).max(1);
                if pixels(up(middle), up(content), deep) <= most {
                    (tall, wide) = (up(middle), up(content));
                    low = middle + 1;
                } else {
                    high = middle - 1;
                }
            }
        }
        let mut scale = (tall as f64 / height as f64).min(wide as f64 / width as f64);
        if given >= least {
            scale = scale.min(1.0);
        }
        let fit = |v: usize, bound: usize| ((v as f64 * scale) as usize).min(bound).max(1);
        Canvas { height: tall, width: wide, content_height: fit(height, tall), content_width: fit(width, wide) }
    }

    /// Patches of one image; its single frame fills the patch's depth.
    pub fn image(&self, picture: &RgbImage) -> Patches {
        let canvas = self.canvas(picture.height(), picture.width(), self.temporal_patch_size);
        self.cut(canvas, 1, |_| vec![Self::lay_out(canvas, picture)])
    }

    /// Patches of the frames of a clip, `temporal_patch_size` consecutive frames a patch.
    ///
    /// # Errors
    /// [`VisionError::Clip`] when there is no frame, the count is not a multiple of the patch depth, or sizes differ.
    pub fn clip(&self, frames: &[&RgbImage]) -> Result<Patches, VisionError> {
        let Some(first) = frames.first() else {
            return Err(VisionError::Clip { reason: "expected at least one frame, found none".to_owned() });
        };
        if !frames.len().is_multiple_of(self.temporal_patch_size) {
            return Err(VisionError::Clip {
                reason: format!("expected a multiple of {} frames, found {}", self.temporal_patch_size, frames.len()),
            });
        }
        let size = (first.height(), first.width());
        if let Some((i, odd)) = frames.iter().enumerate().find(|(_, f)| (f.height(), f.width()) != size) {
            return Err(VisionError::Clip {
                reason: format!(
                    "expected every frame to be {} x {} pixels (width x height) as the first, frame {i} is {} x {}",
                    size.1,
                    size.0,
                    odd.width(),
                    odd.height()
                ),
            });
        }
        let canvas = self.canvas(size.0, size.1, frames.len());
        let depth = self.temporal_patch_size;
        Ok(self.cut(canvas, frames.len() / depth, |pair| {
            frames[pair * depth..(pair + 1) * depth].iter().map(|frame| Self::lay_out(canvas, frame)).collect()
        }))
    }

    /// Fits one frame on the canvas: `[height, width, 3]` bytes.
    fn lay_out(canvas: Canvas, picture: &RgbImage) -> Vec<u8> {
        let (h, w) = (canvas.content_height, canvas.content_width);
        let content = resize::bicubic_rgb(picture.pixels(), picture.height(), picture.width(), h, w);
        let mut out = vec![0u8; canvas.height * canvas.width * 3];
        for (to, from) in out.chunks_exact_mut(canvas.width * 3).zip(content.chunks_exact(w * 3)) {
            to[..w * 3].copy_from_slice(from);
        }
        out
    }

    /// Cuts `pairs` patch depths; `layers(i)` lays out the frames of depth `i` (a single one stands for all of them).
    fn cut(&self, canvas: Canvas, pairs: usize, layers: impl Fn(usize) -> Vec<Vec<u8>>) -> Patches {
        let (patch, depth, merge) = (self.patch_size, self.temporal_patch_size, self.merge_size);
        let grid = PatchGrid { frames: pairs, height: canvas.height / patch, width: canvas.width / patch };
        let width = 3 * depth * patch * patch;
        // A byte has 256 values: normalising is a table.
        let table: [[f32; 256]; 3] = std::array::from_fn(|c| {
            std::array::from_fn(|v| ((v as f64 * self.rescale) as f32 - self.mean[c]) / self.std[c])
        });
        let mut values = Vec::with_capacity(pairs * grid.height * grid.width * width);
        for pair in 0..pairs {
            let layers = layers(pair);
            for block_row in 0..grid.height / merge {
                for block_column in 0..grid.width / merge {
                    for inner in 0..merge * merge {
                        let top = (block_row * merge + inner / merge) * patch;
                        let left = (block_column * merge + inner % merge) * patch;
                        for (channel, table) in table.iter().enumerate() {
                            for d in 0..depth {
                                let layer = &layers[d.min(layers.len() - 1)];
                                for y in top..top + patch {
                                    let start = (y * canvas.width + left) * 3;
                                    let pixels = layer[start..start + patch * 3].as_chunks::<3>().0;
                                    values.extend(pixels.iter().map(|p| table[usize::from(p[channel])]));
                                }
                            }
                        }
                    }
                }
            }
        }
        Patches { grid, width, merge, values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canvas_table() {
        let p = Processor::default();
        // height, width, canvas, content, tokens
        let cases = [
            (1, 1, (112, 112), (112, 112), 16),
            (27, 500, (28, 504), (27, 500), 18),
            (56, 84, (112, 140), (93, 140), 20),
            (199, 301, (224, 308), (199, 301), 88),
            (768, 1024, (784, 1036), (768, 1024), 1036),
            (1080, 1920, (1092, 1932), (1080, 1920), 2691),
            (2160, 3840, (1876, 3332), (1874, 3332), 7973),
            (4000, 3000, (2884, 2156), (2874, 2156), 7931),
            (5000, 5000, (2492, 2492), (2492, 2492), 7921),
        ];
        for (h, w, (ch, cw), (ph, pw), tokens) in cases {
            let canvas = p.canvas(h, w, 2);
            let want = Canvas { height: ch, width: cw, content_height: ph, content_width: pw };
            assert_eq!(canvas, want, "{h} x {w}");
            assert_eq!(ch * cw / (28 * 28), tokens);
        }
    }

    #[test]
    fn canvas_of_clips() {
        let p = Processor { max_tokens: Processor::VIDEO_TOKENS, ..Processor::default() };
        let tokens = |c: Canvas, frames: usize| c.height * c.width / (28 * 28) * frames / 2;
        let short = p.canvas(720, 1280, 16);
        assert_eq!((short.height, short.width, tokens(short, 16)), (728, 1288, 9_568));
        let frames = p.max_frames;
        let long = p.canvas(1080, 1920, frames);
        assert_eq!((long.height, long.width, tokens(long, frames)), (308, 560, 225_280));
    }

    #[test]
    fn padding_is_black_before_normalisation() {
        let p = Processor::default();
        let picture = RgbImage::new(500, 27, vec![255; 500 * 27 * 3]).unwrap();
        let patches = p.image(&picture);
        assert_eq!((patches.rows(), patches.tokens()), (72, 18));
        let black = (0.0 - p.mean[0]) / p.std[0];
        let white = (1.0 - p.mean[0]) / p.std[0];
        // Patch 2 (row 1, column 0): its last pixel row is row 27 of the canvas, which is padding.
        let patch = &patches.values[2 * patches.width..3 * patches.width];
        assert_eq!([patch[12 * 14], patch[13 * 14]].map(f32::to_bits), [white, black].map(f32::to_bits));
        // Both frames of a still picture are equal.
        assert_eq!(patch[..14 * 14], patch[14 * 14..2 * 14 * 14]);
    }

    #[test]
    fn a_clip_keeps_its_frames_apart() {
        let p = Processor::default();
        let frames: Vec<RgbImage> =
            (0..4u8).map(|v| RgbImage::new(112, 112, vec![v; 112 * 112 * 3]).unwrap()).collect();
        let patches = p.clip(&frames.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!((patches.grid.frames, patches.rows(), patches.tokens()), (2, 128, 32));
        let value = |v: f32, c: usize| (v / 255.0 - p.mean[c]) / p.std[c];
        let (first, last) = (&patches.values[..patches.width], &patches.values[127 * patches.width..]);
        assert_eq!((first[0], first[14 * 14], first[2 * 14 * 14]), (value(0.0, 0), value(1.0, 0), value(0.0, 1)));
        assert_eq!((last[0], last[14 * 14]), (value(2.0, 0), value(3.0, 0)));
        assert!(matches!(p.clip(&[&frames[0]]), Err(VisionError::Clip { .. })));
        assert!(matches!(p.clip(&[]), Err(VisionError::Clip { .. })));
        let other = RgbImage::new(1, 1, vec![0; 3]).unwrap();
        assert!(p.clip(&[&frames[0], &other]).unwrap_err().to_string().contains("frame 1 is 1 x 1"));
    }

    proptest::proptest! {
        #[test]
        fn the_canvas_holds_the_picture_and_keeps_the_limits(h in 1usize..6000, w in 1usize..6000) {
            let p = Processor::default();
            let c = p.canvas(h, w, 2);
            proptest::prop_assert!(c.height % 28 == 0 && c.width % 28 == 0);
            proptest::prop_assert!((1..=c.height).contains(&c.content_height));
            proptest::prop_assert!((1..=c.width).contains(&c.content_width));
            let tokens = c.height / 28 * (c.width / 28);
            proptest::prop_assert!(tokens <= p.max_tokens);
        }

        /// The picture on the canvas has the shape of the original, to the part of a pixel that rounding costs.
        #[test]
        fn the_aspect_ratio_is_kept(h in 1usize..6000, w in 1usize..6000) {
            let c = Processor::default().canvas(h, w, 2);
            // A side of `n` pixels may come from any scale in an interval; one scale must fit both sides.
            let scales = |content: usize, side: usize| {
                let least = if content == 1 { 0.0 } else { content as f64 / side as f64 };
                least - 1e-9..(content + 1) as f64 / side as f64
            };
            let (tall, wide) = (scales(c.content_height, h), scales(c.content_width, w));
            proptest::prop_assert!(tall.start < wide.end && wide.start < tall.end, "{c:?}");
        }
    }
}
