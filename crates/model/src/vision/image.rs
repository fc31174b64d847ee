//! Picture bytes to 8-bit RGB.
//!
//! The dimensions are read and checked against [`DecodeLimits`] before a pixel is decoded, so a small file cannot claim
//! much memory. Transparency is dropped, not blended (Pillow's `convert("RGB")`), and the orientation that a camera
//! recorded is applied.

use std::io::Cursor;

use image::{AnimationDecoder as _, DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits};

use super::{VisionError, jpeg::is_cut_off};

/// An 8-bit RGB picture.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    width: usize,
    height: usize,
    /// `[height, width, 3]`.
    pixels: Vec<u8>,
}

impl std::fmt::Debug for RgbImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RgbImage({} x {})", self.width, self.height)
    }
}

/// Bounds on what a picture may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Most pixels of a picture, or of all frames of an animation together.
    pub max_pixels: u64,
}

impl Default for DecodeLimits {
    /// 100 million pixels: 300 MB of RGB.
    fn default() -> Self {
        Self { max_pixels: 100_000_000 }
    }
}

impl RgbImage {
    /// A picture from `[height, width, 3]` bytes.
    ///
    /// # Errors
    /// [`VisionError::Dimensions`] when a side is zero or the byte count differs.
    pub fn new(width: usize, height: usize, pixels: Vec<u8>) -> Result<Self, VisionError> {
        let expected = width.checked_mul(height).and_then(|n| n.checked_mul(3)).unwrap_or(usize::MAX);
        if expected == 0 || expected != pixels.len() {
            return Err(VisionError::Dimensions { width, height, expected, found: pixels.len() });
        }
        Ok(Self { width, height, pixels })
    }

    /// Decodes PNG, JPEG, WebP, GIF or BMP; of an animation the first frame.
    ///
    /// # Errors
    /// [`VisionError::UnknownFormat`], [`VisionError::Damaged`] or [`VisionError::TooLarge`].
    pub fn decode(bytes: &[u8], limits: DecodeLimits) -> Result<Self, VisionError> {
        let format = format_of(bytes)?;
        let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
        reader.limits(decoder_limits(limits));
        let damaged = |e: ImageError| damaged(format, &e);
        let mut decoder = reader.into_decoder().map_err(damaged)?;
        let (width, height) = decoder.dimensions();
        check_pixels(u64::from(width), u64::from(height), 1, limits)?;
        if format == ImageFormat::Jpeg && is_cut_off(bytes) {
            let reason = "the file ends before the picture does: it is incomplete, fetch it again".to_owned();
            return Err(VisionError::Damaged { format: name(format), reason });
        }
        let orientation = decoder.orientation().map_err(damaged)?;
        let mut picture = DynamicImage::from_decoder(decoder).map_err(damaged)?;
        picture.apply_orientation(orientation);
        Self::from_dynamic(picture)
    }

    /// Width in pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height in pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// `[height, width, 3]`.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    fn from_dynamic(picture: DynamicImage) -> Result<Self, VisionError> {
        let rgb = picture.into_rgb8();
        let (width, height) = rgb.dimensions();
        Self::new(width as usize, height as usize, rgb.into_raw())
    }
}

/// Frames of an animation with the time at which each begins.
#[derive(Debug, Clone, PartialEq)]
pub struct Animation {
    /// Frames of one size.
    pub frames: Vec<RgbImage>,
    /// Length of the animation in seconds (sum of the frames' delays).
    pub seconds: f64,
}

impl Animation {
    /// Decodes all frames of a GIF or an animated WebP.
    ///
    /// # Errors
    /// As [`RgbImage::decode`]; [`VisionError::Clip`] for a picture that is not an animation.
    pub fn decode(bytes: &[u8], limits: DecodeLimits) -> Result<Self, VisionError> {
        let format = format_of(bytes)?;
        let damaged = |e: ImageError| damaged(format, &e);
        let cursor = Cursor::new(bytes);
        let (size, frames) = match format {
            ImageFormat::Gif => {
                let mut decoder = image::codecs::gif::GifDecoder::new(cursor).map_err(damaged)?;
                decoder.set_limits(decoder_limits(limits)).map_err(damaged)?;
                (decoder.dimensions(), decoder.into_frames())
            }
            ImageFormat::WebP => {
                let mut decoder = image::codecs::webp::WebPDecoder::new(cursor).map_err(damaged)?;
                decoder.set_limits(decoder_limits(limits)).map_err(damaged)?;
                if !decoder.has_animation() {
                    return Err(VisionError::Clip {
                        reason: "expected an animated GIF or WebP, found a still WebP picture".to_owned(),
                    });
                }
                (decoder.dimensions(), decoder.into_frames())
            }
            other => {
                return Err(VisionError::Clip {
                    reason: format!("expected an animated GIF or WebP, found {}", name(other)),
                });
            }
        };
        let (width, height) = (u64::from(size.0), u64::from(size.1));
        check_pixels(width, height, 1, limits)?;
        let mut animation = Self { frames: Vec::new(), seconds: 0.0 };
        for frame in frames {
            let frame = frame.map_err(damaged)?;
            check_pixels(width, height, animation.frames.len() as u64 + 1, limits)?;
            let (numerator, denominator) = frame.delay().numer_denom_ms();
            animation.seconds += f64::from(numerator) / f64::from(denominator.max(1)) / 1000.0;
            animation.frames.push(RgbImage::from_dynamic(DynamicImage::ImageRgba8(frame.into_buffer()))?);
        }
        if animation.frames.is_empty() {
            return Err(VisionError::Clip { reason: "the animation has no frames".to_owned() });
        }
        Ok(animation)
    }
}

fn format_of(bytes: &[u8]) -> Result<ImageFormat, VisionError> {
    match image::guess_format(bytes) {
        Ok(
            format @ (ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Gif | ImageFormat::Bmp),
        ) => Ok(format),
        _ => {
            let begin: Vec<String> = bytes.iter().take(8).map(|b| format!("{b:02x}")).collect();
            Err(VisionError::UnknownFormat {
                begin: if begin.is_empty() { "nothing".to_owned() } else { begin.join(" ") },
            })
        }
    }
}

fn decoder_limits(limits: DecodeLimits) -> Limits {
    let mut bounds = Limits::default();
    // The widest decoder output is 16-bit RGBA; a frame buffer and a canvas may live at once.
    bounds.max_alloc = Some(limits.max_pixels.saturating_mul(16).saturating_add(1 << 20));
    bounds
}

fn check_pixels(width: u64, height: u64, frames: u64, limits: DecodeLimits) -> Result<(), VisionError> {
    if width.saturating_mul(height).saturating_mul(frames) > limits.max_pixels {
        return Err(VisionError::TooLarge { width, height, frames, limit: limits.max_pixels });
    }
    Ok(())
}

fn damaged(format: ImageFormat, error: &ImageError) -> VisionError {
    VisionError::Damaged { format: name(format), reason: error.to_string() }
}

fn name(format: ImageFormat) -> String {
    format!("{format:?}").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut out = Cursor::new(Vec::new());
        picture.write_to(&mut out, format).unwrap();
        out.into_inner()
    }

    fn gradient(width: u32, height: u32) -> image::RgbImage {
        image::RgbImage::from_fn(width, height, |x, y| image::Rgb([(x * 7) as u8, (y * 5) as u8, (x * y) as u8]))
    }

    #[test]
    fn lossless_formats_give_the_pixels_back() {
        let picture = gradient(13, 9);
        for format in [ImageFormat::Png, ImageFormat::Bmp, ImageFormat::WebP] {
            let bytes = encode(&DynamicImage::ImageRgb8(picture.clone()), format);
            let decoded = RgbImage::decode(&bytes, DecodeLimits::default()).unwrap();
            assert_eq!((decoded.width(), decoded.height()), (13, 9), "{format:?}");
            assert_eq!(decoded.pixels(), picture.as_raw(), "{format:?}");
        }
    }

    #[test]
    fn jpeg_and_gif_decode_to_the_right_size() {
        let picture = DynamicImage::ImageRgb8(gradient(16, 8));
        for format in [ImageFormat::Jpeg, ImageFormat::Gif] {
            let bytes = encode(&picture, format);
            let decoded = RgbImage::decode(&bytes, DecodeLimits::default()).unwrap();
            assert_eq!((decoded.width(), decoded.height()), (16, 8), "{format:?}");
        }
    }

    /// A progressive picture of 8 x 8 grey pixels: a scan of its mean, a scan of everything else (nothing).
    fn progressive() -> Vec<u8> {
        let mut bytes = vec![0xff, 0xd8, 0xff, 0xdb, 0, 67, 0];
        bytes.extend([8; 64]);
        bytes.extend([0xff, 0xc2, 0, 11, 8, 0, 8, 0, 8, 1, 1, 0x11, 0]);
        // One code of one bit each: a mean of 6 bits, and the end of a block.
        for (class, symbol) in [(0x00, 6), (0x10, 0)] {
            bytes.extend([0xff, 0xc4, 0, 20, class, 1]);
            bytes.extend([0; 15]);
            bytes.push(symbol);
        }
        bytes.extend([0xff, 0xda, 0, 8, 1, 1, 0x00, 0, 0, 0, 0x7f]);
        bytes.extend([0xff, 0xda, 0, 8, 1, 1, 0x00, 1, 63, 0, 0x7f, 0xff, 0xd9]);
        bytes
    }

    #[test]
    fn half_a_progressive_jpeg_is_no_picture() {
        let whole = progressive();
        let decoded = RgbImage::decode(&whole, DecodeLimits::default()).unwrap();
        assert!(decoded.pixels().iter().all(|&p| (188..=194).contains(&p)), "{:?}", decoded.pixels());
        for length in 1..whole.len() {
            assert!(RgbImage::decode(&whole[..length], DecodeLimits::default()).is_err(), "{length} bytes");
        }
        // Behind its first scan, where the decoder itself has a picture already.
        let error = RgbImage::decode(&whole[..whole.len() - 14], DecodeLimits::default()).unwrap_err();
        assert!(error.to_string().contains("it is incomplete, fetch it again"), "{error}");
    }

    #[test]
    fn transparency_is_dropped_and_grey_is_spread() {
        let rgba = image::RgbaImage::from_pixel(2, 1, image::Rgba([200, 100, 50, 0]));
        let bytes = encode(&DynamicImage::ImageRgba8(rgba), ImageFormat::Png);
        let decoded = RgbImage::decode(&bytes, DecodeLimits::default()).unwrap();
        assert_eq!(decoded.pixels(), [200, 100, 50, 200, 100, 50]);
        let grey = image::GrayImage::from_pixel(1, 1, image::Luma([77]));
        let bytes = encode(&DynamicImage::ImageLuma8(grey), ImageFormat::Png);
        assert_eq!(RgbImage::decode(&bytes, DecodeLimits::default()).unwrap().pixels(), [77, 77, 77]);
    }

    #[test]
    fn the_limit_is_checked_before_decoding() {
        let bytes = encode(&DynamicImage::ImageRgb8(gradient(20, 20)), ImageFormat::Png);
        let error = RgbImage::decode(&bytes, DecodeLimits { max_pixels: 399 }).unwrap_err();
        assert!(matches!(error, VisionError::TooLarge { width: 20, height: 20, limit: 399, .. }), "{error}");
        // A header that claims 60000 x 60000 pixels, with no data behind it.
        let mut bomb = encode(&DynamicImage::ImageRgb8(gradient(1, 1)), ImageFormat::Bmp);
        bomb[18..22].copy_from_slice(&60_000u32.to_le_bytes());
        bomb[22..26].copy_from_slice(&60_000u32.to_le_bytes());
        let error = RgbImage::decode(&bomb, DecodeLimits::default()).unwrap_err();
        assert!(matches!(error, VisionError::TooLarge { .. } | VisionError::Damaged { .. }), "{error}");
    }

    #[test]
    fn other_bytes_are_refused_with_what_they_begin_with() {
        let error = RgbImage::decode(b"%PDF-1.7", DecodeLimits::default()).unwrap_err();
        assert!(error.to_string().contains("25 50 44 46"), "{error}");
        assert!(matches!(RgbImage::decode(&[], DecodeLimits::default()), Err(VisionError::UnknownFormat { .. })));
    }

    #[test]
    fn an_animation_has_all_frames_and_its_length() {
        let mut bytes = Vec::new();
        {
            let mut encoder = image::codecs::gif::GifEncoder::new(&mut bytes);
            for shade in [0u8, 120, 240] {
                let pixel = image::Rgba([shade, shade, shade, 255]);
                let frame = image::Frame::from_parts(
                    image::RgbaImage::from_pixel(4, 3, pixel),
                    0,
                    0,
                    image::Delay::from_numer_denom_ms(200, 1),
                );
                encoder.encode_frame(frame).unwrap();
            }
        }
        let animation = Animation::decode(&bytes, DecodeLimits::default()).unwrap();
        assert_eq!(animation.frames.len(), 3);
        assert!((animation.seconds - 0.6).abs() < 1e-9);
        assert_eq!(animation.frames[2].pixels()[..3], [240, 240, 240]);
        let error = Animation::decode(&bytes, DecodeLimits { max_pixels: 24 }).unwrap_err();
        assert!(matches!(error, VisionError::TooLarge { frames: 3, .. }), "{error}");
        let still = encode(&DynamicImage::ImageRgb8(gradient(2, 2)), ImageFormat::Png);
        assert!(matches!(Animation::decode(&still, DecodeLimits::default()), Err(VisionError::Clip { .. })));
    }

    proptest::proptest! {
        #[test]
        fn damaged_pictures_never_panic(index in 0usize..400, value: u8, cut in 0usize..400, which in 0usize..5) {
            let formats =
                [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Bmp];
            let mut bytes = encode(&DynamicImage::ImageRgb8(gradient(9, 7)), formats[which]);
            let len = bytes.len();
            bytes[index % len] = value;
            bytes.truncate(len - cut % len);
            let limits = DecodeLimits { max_pixels: 1_000_000 };
            let _still = RgbImage::decode(&bytes, limits);
            let _frames = Animation::decode(&bytes, limits);
        }
    }
}
