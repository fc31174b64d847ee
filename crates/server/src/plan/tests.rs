use glimmer_checkpoint::Config;

use super::*;
use crate::flags::Settings;

fn made(arguments: &str) -> Result<Report, FlagError> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/glm-5.3-flash/config.json");
    let config = Config::from_file(path).expect("the model's configuration");
    let arguments: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
    let (request, rest) = PlanRequest::take(&arguments)?;
    let settings = Settings::parse(&rest, &|_| None, &|_| Err(std::io::Error::other("no files")))?;
    plan(&config, &request, settings)
}

const MTP: &str = r#"--speculative-config {"method":"mtp","num_speculative_tokens":2}"#;

#[test]
fn one_card_is_too_small_and_four_fit() {
    let one = made("--as-w4a16 --device cuda").expect("a plan");
    assert!(!one.fits());
    let text = one.to_text();
    assert!(
        text.contains("does not fit: weights, activations, scratch and reserve take")
            && text.contains("--tensor-parallel-size"),
        "{text}"
    );
    let four = made(&format!("--as-w4a16 -tp 4 --max-num-seqs 256 --max-model-len 262144 {MTP}")).expect("a plan");
    let Fit::Fits { sequences, checkpoints, pages, capacity_tokens, concurrency, .. } = four.fit else {
        panic!("{}", four.to_text())
    };
    assert_eq!((sequences, checkpoints, capacity_tokens), (256, 64, pages * 64));
    assert!(concurrency >= 1.0);
    let used = four.needs.fixed()
        + four.reserve_bytes
        + four.scratch_bytes
        + (sequences + checkpoints) * four.needs.slot.total()
        + pages * four.needs.page;
    assert!(used <= four.usable_bytes && four.usable_bytes - used < four.needs.page);
    assert_eq!(four.to_json()["fit"]["pages"], pages);
    assert_eq!(four.to_json()["scratch_bytes"], four.scratch_bytes);
}

/// What stages take for a prompt of 8192 rows is gigabytes; left out, the cache would be given them and the first such prompt
/// would find no memory.
#[test]
fn scratch_is_planned_as_the_server_plans_it() {
    let report = made(&format!("--as-w4a16 -tp 4 --max-num-batched-tokens 8192 {MTP}")).expect("a plan");
    assert!(
        report.scratch_bytes > 1 << 30 && report.to_text().contains("scratch of the stages"),
        "{}",
        report.to_text()
    );
    let fewer =
        made(&format!("--as-w4a16 -tp 4 --max-num-seqs 64 --max-num-batched-tokens 256 {MTP}")).expect("a plan");
    let blind =
        made(&format!("--as-w4a16 -tp 4 --max-num-batched-tokens 8192 --language-model-only {MTP}")).expect("a plan");
    assert!(fewer.scratch_bytes < report.scratch_bytes && blind.scratch_bytes < report.scratch_bytes);
    let host = made("--as-w4a16 --device cpu --device-memory 400 --max-model-len 8192").expect("a plan");
    assert_eq!(host.scratch_bytes, 0);
    // One device: the server's budget is the plan's.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16/config.json");
    let config = Config::from_file(path).expect("the model's configuration");
    let flags: Vec<String> = ["--device", "cuda", "--gpu-memory-utilization", "0.5"].map(str::to_owned).to_vec();
    let parse = || Settings::parse(&flags, &|_| None, &|_| Err(std::io::Error::other("no files"))).expect("flags");
    let request = PlanRequest { device_bytes: Some(80 << 30), ..PlanRequest::default() };
    let planned = plan(&config, &request, parse()).expect("a plan");
    let (mut settings, text) = (parse(), &config.text);
    let mut serve = ServeConfig::new(&settings).expect("flags");
    let device = Device::Cuda { memory_gib: 80.0, count: 1 };
    serve.resolve(&mut settings, &ModelShape::of_text(text), device).expect("flags");
    let memory = (80 << 30, 80 << 30);
    let (budget, _) = device_budget(&config, &serve, 0, memory, gpu_elements(text, true)).expect("a budget");
    assert_eq!(budget, planned.cache_bytes);
}

#[test]
fn what_the_flags_ask_changes_the_plan() {
    let base = made("--as-w4a16 -tp 4").expect("a plan");
    let drafts = made(&format!("--as-w4a16 -tp 4 {MTP}")).expect("a plan");
    assert!(
        drafts.needs.weights_total() > base.needs.weights_total()
            && drafts.needs.slot.records > base.needs.slot.records
    );
    let text_only = made("--as-w4a16 -tp 4 --language-model-only").expect("a plan");
    assert!(text_only.needs.weights_total() < base.needs.weights_total());
    let fewer_rows = made("--as-w4a16 -tp 4 --max-num-batched-tokens 1024").expect("a plan");
    assert!(fewer_rows.needs.activations < base.needs.activations / 4);
    let wide = made("--as-w4a16 -tp 4 --kv-cache-dtype float32").expect("a plan");
    assert_eq!(wide.needs.page, 2 * base.needs.page);
    let halves = made("--as-w4a16 -tp 4 --kv-cache-dtype bfloat16").expect("a plan");
    assert_eq!(halves.needs.page, base.needs.page);
    let no_prefixes = made("--as-w4a16 -tp 4 --no-enable-prefix-caching").expect("a plan");
    assert!(matches!(no_prefixes.fit, Fit::Fits { checkpoints: 0, .. }), "{}", no_prefixes.to_text());
    let small = made("--as-w4a16 -tp 4 --kv-cache-memory-bytes 2G --max-model-len auto").expect("a plan");
    let Fit::Fits { sequences, pages, .. } = small.fit else { panic!("{}", small.to_text()) };
    assert!(sequences < small.max_num_seqs && pages * 64 >= small.max_model_len, "{}", small.to_text());
    assert!(small.to_text().contains("fits; --max-num-seqs 1024: the cache holds"), "{}", small.to_text());
    let short = made("--as-w4a16 -tp 4 --kv-cache-memory-bytes 1G --max-model-len 1000000").expect("a plan");
    assert!(short.to_text().contains("the longest that fits is about"), "{}", short.to_text());
    let long = made("--as-w4a16 --device cpu --device-memory 400 --max-model-len 2M --kv-cache-memory-bytes 100G")
        .expect("a plan");
    assert!(long.to_text().contains("1048576 tokens, which count instead"), "{}", long.to_text());
    let host = made("--as-w4a16 --device cpu --device-memory 400 --max-model-len 8192").expect("a plan");
    assert!(host.fits() && host.cache_bytes == 4 << 30 && host.ranks == 1, "{}", host.to_text());
    let much = made("--as-w4a16 -tp 4 --kv-cache-memory-bytes 500G").expect("a plan");
    assert!(much.to_text().contains("is more than what is left"), "{}", much.to_text());
}

#[test]
fn wrong_arguments_are_named() {
    for (arguments, part) in [
        ("--device-memory", "--device-memory takes a number from 0 up, found nothing"),
        ("--device-memory -3", "--device-memory takes a number from 0 up, found -3"),
        ("--block-bytes x", "--block-bytes takes a number from 0 up, found x"),
        ("-tp 3", "must divide"),
        ("--max-model-len 2M -tp 4", "--max-model-len 2097152 is above the model's 1048576 tokens"),
        ("--no-such-flag", "no-such-flag"),
    ] {
        let error = made(arguments).expect_err(arguments);
        assert!(error.to_string().contains(part), "{arguments}: {error}");
    }
}

#[test]
fn published_pools_come_out_of_the_flags() {
    // Bytes of the cache, flags, blocks, reported tokens.
    let rows = [
        (82_177_708_032_u64, format!("-tp 4 --max-model-len 262144 --no-enable-prefix-caching {MTP}"), 5624, 6_194_528),
        (35_411_292_672, format!("-tp 2 --max-model-len 262144 --no-enable-prefix-caching {MTP}"), 1283, 2_567_410),
        (36_791_311_872, format!("-tp 2 --max-model-len 1048576 --no-enable-prefix-caching {MTP}"), 1333, 2_840_958),
        (101_317_762_560, format!("-tp 8 --max-model-len 262144 --no-enable-prefix-caching {MTP}"), 12_481, 7_790_045),
        (41_267_850_624, "-tp 4 --max-model-len 1048576".to_owned(), 3081, 3_511_589),
        (
            3 << 30,
            "-tp 2 --max-model-len 262144 --no-enable-prefix-caching --drafter-blocks 49 --block-bytes 13830000 \
             --speculative-config {\"method\":\"dflash\",\"model\":\"drafter\",\"num_speculative_tokens\":7}"
                .to_owned(),
            232,
            310_292,
        ),
    ];
    for (bytes, flags, blocks, tokens) in rows {
        let report = made(&format!("--as-w4a16 --like-vllm --kv-cache-memory-bytes {bytes} {flags}")).expect("a plan");
        let vllm = report.like_vllm.expect("asked for");
        assert_eq!((vllm.blocks, vllm.reported_tokens), (blocks, tokens), "{flags}");
        assert!(report.to_text().contains(&tokens.to_string()));
    }
}

#[test]
fn on_the_cpu_the_default_cache_and_what_is_free_are_told() {
    let arguments: Vec<String> = ["--max-model-len", "4096"].map(str::to_owned).to_vec();
    let planned = |free: u64, further: &[&str]| {
        let arguments: Vec<String> = arguments.iter().cloned().chain(further.iter().map(|&a| a.to_owned())).collect();
        let (mut request, rest) = PlanRequest::take(&arguments).expect("arguments");
        request.host_bytes = Some((64 << 30, free));
        let settings = Settings::parse(&rest, &|_| None, &|_| Err(std::io::Error::other("no files"))).expect("flags");
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16/config.json");
        plan(&Config::from_file(path).expect("a configuration"), &request, settings).expect("a plan")
    };
    let report = planned(40 << 30, &[]);
    assert_eq!((report.usable_bytes, report.cache_bytes, report.cache_by_default), (40 << 30, 4 << 30, true));
    let text = report.to_text();
    assert!(text.contains("cache (the CPU's default)") && text.contains("on the CPU the cache takes 4 GiB"), "{text}");
    assert!(!text.contains("reserve") && !text.contains("usable"), "{text}");
    let asked = planned(40 << 30, &["--kv-cache-memory-bytes", "1G"]);
    assert!(!asked.cache_by_default && !asked.to_text().contains("CPU's default"), "{}", asked.to_text());
    let short = planned(1 << 20, &[]);
    let text = short.to_text();
    assert!(!short.fits() && text.contains("of this machine are free") && !text.contains("tensor-parallel"), "{text}");
}
