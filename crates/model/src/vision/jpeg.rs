//! Whether a progressive JPEG is whole.
//!
//! A progressive picture comes in scans, each of which makes all of it sharper. The decoder shows what it has when the file
//! ends early, so that half a file looks like a blurred or half empty picture and not like an error. Only the end marker
//! tells; the walk below looks for it segment by segment, because thumbnails inside a segment have end markers of their own.

/// Marker of the start of a progressive frame.
const PROGRESSIVE_FRAME: u8 = 0xc2;
/// Marker of the end of the picture.
const END: u8 = 0xd9;

/// Whether `bytes` begin a progressive JPEG whose end is missing.
pub(super) fn is_cut_off(bytes: &[u8]) -> bool {
    let (mut at, mut progressive) = (2, false);
    while let Some((marker, next)) = next_marker(bytes, at) {
        match marker {
            END => return false,
            // Markers without a segment: restarts and the temporary one.
            0xd0..=0xd8 | 0x01 => at = next,
            // A scan's data follow its segment and are passed over on the way to the next marker.
            _ => {
                progressive |= marker == PROGRESSIVE_FRAME;
                let Some(length) = bytes.get(next..next + 2) else { break };
                at = next + usize::from(u16::from_be_bytes([length[0], length[1]])).max(2);
            }
        }
    }
    progressive
}

/// The next marker from `at` on and the place behind it. In the data of a scan, 0xff followed by 0 is a byte of data.
fn next_marker(bytes: &[u8], at: usize) -> Option<(u8, usize)> {
    let mut at = at;
    loop {
        at += bytes.get(at..)?.iter().position(|&b| b == 0xff)? + 1;
        match *bytes.get(at)? {
            0 | 0xff => {}
            marker => return Some((marker, at + 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture of one scan with the frame marker `frame`; its comment holds the end marker of a thumbnail.
    fn picture(frame: u8) -> Vec<u8> {
        let mut bytes = vec![0xff, 0xd8, 0xff, 0xfe, 0, 4, 0xff, END];
        bytes.extend([0xff, frame, 0, 3, 8, 0xff, 0xda, 0, 3, 1]);
        bytes.extend([1, 2, 0xff, 0, 3, 0xff, 0xd0, 4, 5, 0xff, END]);
        bytes
    }

    #[test]
    fn every_cut_of_a_progressive_picture_is_seen() {
        let whole = picture(PROGRESSIVE_FRAME);
        assert!(!is_cut_off(&whole));
        for length in 12..whole.len() {
            assert!(is_cut_off(&whole[..length]), "{length} bytes");
        }
        // The decoder itself refuses a sequential picture that is cut off, and one without an end marker may be complete.
        assert!((0..whole.len()).all(|length| !is_cut_off(&picture(0xc0)[..length])));
    }
}
