//! The released model's shapes, as one of several ranks holds them.

use glimmer_checkpoint::{Config, TextConfig};
use glimmer_tensor::{Error, Result};

const RELEASED: &str = include_str!("../../../../data/glm-5.3-flash/config.json");

/// Numbers of ranks that are measured.
pub(crate) const RANKS: [usize; 3] = [1, 2, 4];

/// Numbers of rows of a step that are measured.
pub(super) const ROWS: [usize; 9] = [1, 3, 8, 24, 96, 256, 768, 2048, 8192];

/// The released configuration with everything that ranks share divided among them: heads, inner widths, the vocabulary. What each
/// rank holds whole (streams, low ranks, the indexer, the router) stays.
///
/// # Errors
/// None that the configuration within the program could cause.
pub(crate) fn slice(ranks: usize) -> Result<Config> {
    let mut config = Config::parse(RELEASED).map_err(|error| Error::Device(Box::new(error)))?;
    let text = &mut config.text;
    for shared in [
        &mut text.kda.num_heads,
        &mut text.mla.num_heads,
        &mut text.intermediate_size,
        &mut text.moe.intermediate_size,
        &mut text.vocab_size,
    ] {
        *shared = shared.div_ceil(ranks.max(1));
    }
    Ok(config)
}

/// What stands in a kernel's name for the slice of one of several ranks.
pub(super) fn of_ranks(ranks: usize) -> String {
    format!("TP={ranks}")
}

/// Sequences and rows of each for a number of rows: a token, or a token and two drafts, or one prompt.
pub(super) fn sequences(rows: usize) -> [usize; 2] {
    match rows {
        3 | 24 | 96 | 768 => [rows / 3, 3],
        1 | 8 | 256 => [rows, 1],
        _ => [1, rows],
    }
}

/// Width of a rank's channels of delta attention.
pub(super) fn kda_width(text: &TextConfig) -> usize {
    text.kda.num_heads * text.kda.head_dim
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_what_the_plan_of_kernels_says() {
        let width = |ranks: usize| {
            let text = slice(ranks).unwrap().text;
            let joint = 3 * kda_width(&text) + text.kda.num_heads + 2 * text.kda.head_dim;
            [joint, text.mla.num_heads * text.mla.v_head_dim, text.moe.intermediate_size, text.vocab_size]
        };
        assert_eq!(width(1), [24_896, 16_384, 2048, 154_880]);
        assert_eq!(width(2), [12_576, 8192, 1024, 77_440]);
        assert_eq!(width(4), [6416, 4096, 512, 38_720]);
        let text = slice(4).unwrap().text;
        assert_eq!((text.hidden_size, text.indexer.num_heads, text.moe.num_experts), (4096, 32, 288));
    }

    #[test]
    fn rows_are_sequences_of_equal_rows() {
        for rows in ROWS {
            let [sequences, each] = sequences(rows);
            assert_eq!(sequences * each, rows);
            assert!(each <= 3 || sequences == 1);
        }
    }
}
