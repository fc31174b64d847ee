use std::path::PathBuf;

use super::{vllm::*, *};

fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn flash() -> Config {
    Config::from_file(data("data/glm-5.3-flash/config.json")).expect("the model's configuration")
}

fn wish<'a>(config: &'a Config, inventory: &'a Inventory, count: usize, whole_experts: bool) -> Wish<'a> {
    Wish {
        config,
        inventory,
        ranks: Ranks { count, whole_experts },
        draft_layer: true,
        vision: true,
        max_rows: 8192,
        max_logits: 768,
        max_draft: 2,
        elements: Elements::F32,
    }
}

/// Six published pools: ranks, drafts, own drafter, prefix cache, longest request, drafter's blocks; then state, page, block
/// (`None`: not from the layout), blocks of a request, blocks, reported tokens.
#[test]
fn published_pools_are_reproduced() {
    let config = flash().text;
    let row = |ranks, drafts, own_drafter, prefix_caching, tokens, drafter_blocks| Setup {
        ranks,
        drafts,
        own_drafter,
        prefix_caching,
        tokens,
        drafter_blocks,
        block_bytes: None,
    };
    const SHORT: u64 = 262_144;
    const LONG: u64 = 1_048_576;
    let rows = [
        (row(4, 2, true, false, SHORT, 0), 1_110_016, 1152, 14_611_968, 238, 5624, "76.534", 6_194_528),
        (row(2, 2, true, false, SHORT, 0), 2_220_032, 2176, 27_600_384, 131, 1283, "32.979", 2_567_410),
        (row(2, 2, true, false, LONG, 0), 2_220_032, 2176, 27_600_384, 492, 1333, "34.265", 2_840_958),
        (row(8, 2, true, false, SHORT, 0), 555_008, 640, 8_117_760, 420, 12_481, "94.360", 7_790_045),
        (row(4, 0, false, true, LONG, 0), 1_085_440, 1152, 13_394_304, 920, 3081, "38.434", 3_511_589),
    ];
    for (setup, state, page, block, request, blocks, gib, tokens) in rows {
        let pool = Pool::of(&config, &setup);
        let found = (pool.state_bytes, pool.page_tokens, pool.block_bytes, pool.request_blocks);
        assert_eq!(found, (state, page, block, request), "{setup:?}");
        let bytes = blocks * block;
        assert_eq!((pool.blocks(bytes), pool.blocks(bytes - 1)), (blocks, blocks - 1));
        assert_eq!(format!("{:.3}", bytes as f64 / f64::from(1 << 30)), gib);
        assert_eq!(pool.reported_tokens(blocks, setup.tokens), tokens, "{setup:?}");
    }
    // The sixth has a separate drafter. Its block's bytes are known from its pool only.
    for (tokens, gib, request, blocks, reported) in [(SHORT, 3, 196, 232, 310_292), (LONG, 9, 538, 698, 1_360_420)] {
        let setup = Setup { block_bytes: Some(13_830_000), ..row(2, 7, false, false, tokens, 49) };
        let pool = Pool::of(&config, &setup);
        assert_eq!((pool.state_bytes, pool.page_tokens, pool.request_blocks), (2_342_912, 2304, request));
        assert_eq!(pool.blocks(gib << 30), blocks);
        assert_eq!(pool.reported_tokens(blocks, tokens), reported);
    }
}

#[test]
fn ranks_hold_all_weights_together() {
    let config = flash();
    let inventory = Inventory::w4a16(&config).expect("whole groups");
    let one = Needs::of(&wish(&config, &inventory, 1, false));
    let stored = inventory.total().bytes;
    // Vectors are widened, shapes of packed matrices are left out: both are small.
    assert!(one.weights_total().abs_diff(stored) < stored / 1000, "{} {stored}", one.weights_total());
    for count in [2, 4, 8] {
        for whole_experts in [false, true] {
            let many = Needs::of(&wish(&config, &inventory, count, whole_experts));
            let replicated = |group: Group| {
                let of = |needs: &Needs| needs.weights.iter().find(|(g, _)| *g == group).map_or(0, |&(_, bytes)| bytes);
                (of(&many) * count as u64).saturating_sub(of(&one))
            };
            for group in [Group::MoeRouted, Group::MtpRouted, Group::DenseMlp] {
                assert_eq!(replicated(group), 0, "{group:?}");
            }
            // What every rank has whole, the embedding aside, is known to be less than 2 % of a model.
            let twice = many.weights_total() * count as u64 - one.weights_total();
            let each = twice / (count as u64 - 1);
            let embedding = inventory.find("model.language_model.embed_tokens.weight").expect("an embedding").bytes();
            assert!((embedding..embedding + one.weights_total() / 50).contains(&each), "{count}: {each}");
        }
    }
    // Published: 45.25 GiB on each of four GPUs and 89.5 GiB on each of two. There the embedding is shared, too.
    let gib = |count| Needs::of(&wish(&config, &inventory, count, false)).weights_total() as f64 / f64::from(1 << 30);
    assert!((gib(4) - 45.25).abs() < 1.5, "{}", gib(4));
    assert!((gib(2) - 89.5).abs() < 1.5, "{}", gib(2));
}

#[test]
fn a_slot_is_its_state_and_its_rings() {
    let config = flash();
    let inventory = Inventory::w4a16(&config).expect("whole groups");
    let mut wish = wish(&config, &inventory, 4, false);
    wish.elements = Elements { state: 4, ring: 2, page: 2 };
    let needs = Needs::of(&wish);
    assert_eq!(needs.slot.state, 34 * (64 / 4 * 128 * 128 * 4));
    assert_eq!(needs.slot.records, 34 * (64 / 4 * 3 * 3 * 128 * 2));
    assert_eq!(needs.slot.columns, 34 * (64 / 4 * 6 * 3 * 128 * 2));
    assert_eq!(needs.slot.tails, 12 * (4 + 2) * 2 * 128 * 2);
    // Latents and pool keys of a token are 1024 and 64 bytes a layer, on every rank.
    assert_eq!(needs.page, 12 * 64 * (1024 + 64));
    wish.ranks.count = 1;
    assert_eq!(Needs::of(&wish).page, needs.page);
}

#[test]
fn slots_and_pages_are_those_of_the_caches() {
    let config = Config::from_file(data("models/micro-bf16/config.json")).expect("a configuration");
    let inventory = Inventory::bf16(&config);
    for max_draft in [0, 3] {
        let wish = Wish { max_draft, ..wish(&config, &inventory, 1, false) };
        let limits = Limits { max_rows: 1, max_logits: 1, slots: 1, pages: 1, max_draft, features: 0 };
        let shape = cache_shape(&config.text, &limits);
        let needs = Needs::of(&wish);
        assert_eq!(needs.slot.total(), glimmer_tensor::cpu::CpuCache::slot_bytes(&shape) as u64);
        assert_eq!(needs.page, glimmer_tensor::cpu::CpuCache::page_bytes(&shape) as u64);
    }
}
