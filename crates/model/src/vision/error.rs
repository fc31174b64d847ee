//! What can go wrong with a picture or a clip.

/// An error of picture decoding or preprocessing.
#[derive(Debug, thiserror::Error)]
pub enum VisionError {
    /// The bytes are of no supported format.
    #[error(
        "image: the bytes are not PNG, JPEG, WebP, GIF or BMP (they begin with {begin}); send one of these formats"
    )]
    UnknownFormat {
        /// The first bytes in hexadecimal.
        begin: String,
    },
    /// The bytes claim a supported format and cannot be decoded.
    #[error("image: damaged {format} data: {reason}")]
    Damaged {
        /// Format of the picture.
        format: String,
        /// What the decoder says.
        reason: String,
    },
    /// The picture is larger than the limit.
    #[error(
        "image: {width} x {height} pixels in {frames} frame(s) exceed the limit of {limit} pixels; scale the picture down"
    )]
    TooLarge {
        /// Width in pixels.
        width: u64,
        /// Height in pixels.
        height: u64,
        /// Frames decoded up to here.
        frames: u64,
        /// Most pixels, over all frames.
        limit: u64,
    },
    /// A picture without pixels, or pixel bytes that do not fit the dimensions.
    #[error("image: {width} x {height} needs {expected} bytes of RGB and at least one pixel, found {found} bytes")]
    Dimensions {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// Bytes that the dimensions need.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A clip without frames, or with frames of different sizes.
    #[error("video: {reason}")]
    Clip {
        /// What is wrong and what was expected.
        reason: String,
    },
    /// A processor file cannot be used.
    #[error("{file}: `{field}`: expected {expected}, found {found}")]
    Settings {
        /// File name.
        file: &'static str,
        /// Path of the field.
        field: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
}
