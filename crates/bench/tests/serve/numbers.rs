//! The definitions on a timeline known to the millisecond, the table letter for letter, the keys of the JSON.

use glimmer_bench::serve::arrival::{Ramp, RampShape, Traffic};
use glimmer_bench::serve::counters::Counters;
use glimmer_bench::serve::epochs::{Epoch, Quality};
use glimmer_bench::serve::exchange::Outcome;
use glimmer_bench::serve::load::Run;
use glimmer_bench::serve::report::{Report, Settings, prompts_hash};
use glimmer_bench::serve::summary::{Goodput, Metric, Summary};
use glimmer_bench::serve::table::table;
use serde_json::{Value, json};

use crate::support::prompt;

fn outcome(start: f64, events: &[f64], output_tokens: Option<usize>) -> Outcome {
    Outcome {
        start,
        end: start + events.last().copied().unwrap_or(0.0) + 0.5,
        queue: 0.25,
        events: events.to_vec(),
        prompt_tokens: 100,
        output_tokens,
        text: "a b c".to_owned(),
        ..Outcome::default()
    }
}

/// Three whole answers and two failures.
fn timeline() -> Vec<Outcome> {
    vec![
        // Two drafts accepted with the second event: five tokens in three events.
        outcome(1.0, &[0.5, 0.7, 1.3], Some(5)),
        outcome(1.0, &[1.0, 1.25], Some(2)),
        // One token; the server does not count, so the client does.
        outcome(2.3, &[0.2], None),
        Outcome { error: Some("HTTP 503".to_owned()), end: 9.0, ..outcome(3.0, &[0.1, 0.2], Some(9)) },
        Outcome { error: Some("late".to_owned()), timed_out: true, end: 4.0, ..outcome(3.0, &[], None) },
    ]
}

fn close(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 1e-12, "{found} is not {wanted}");
}

#[test]
fn quantities_are_what_their_definitions_say() {
    let limits = Goodput { ttft: Some(500.0), tpot: Some(200.0), e2el: None };
    let s = Summary::new(&timeline(), Some(&limits), &|text| text.split(' ').count() - 2);
    assert_eq!((s.completed, s.failed, s.timed_out), (3, 2, 1));
    assert_eq!((s.input_tokens, s.output_tokens), (300, 8));
    assert_eq!(s.output_lengths, [5, 2, 1, 0, 0]);
    // From the first send at 1.0 to the last end at 9.0.
    close(s.duration, 8.0);
    close(s.request_throughput(), 3.0 / 8.0);
    close(s.output_throughput(), 1.0);
    close(s.total_throughput(), 308.0 / 8.0);
    // The second is late; an answer of one token has no time per output token, so it keeps that limit.
    assert_eq!(s.good, Some(2));
    close(s.goodput().unwrap(), 0.25);
    let ttft = s.sample(Metric::Ttft);
    close(ttft.mean(), 1.7 / 3.0);
    close(ttft.median(), 0.5);
    close(ttft.percentile(99.0), 0.5 + 0.98 * 0.5);
    let tpot = s.sample(Metric::Tpot);
    assert_eq!(tpot.len(), 2);
    close(tpot.mean(), (0.8 / 4.0 + 0.25) / 2.0);
    let itl = s.sample(Metric::Itl);
    assert_eq!(itl.len(), 3, "one gap for each event behind the first");
    close(itl.mean(), (0.2 + 0.6 + 0.25) / 3.0);
    close(s.sample(Metric::E2el).max(), 1.3);
    close(s.sample(Metric::Queue).mean(), 0.25);
    close(s.sample(Metric::QueuedE2el).max(), 1.55);
    // Events at 1.5 1.7 2.3, 2.0 2.25, 2.5: seconds from 1.0 on hold 2 and 4.
    assert_eq!(s.peak_events, 4);
    // [1.0, 2.3), [1.0, 2.25), [2.3, 2.5): the third begins when the first has ended.
    assert_eq!(s.peak_requests, 2);
}

#[test]
fn nothing_at_all_is_zeros() {
    for outcomes in [Vec::new(), timeline().split_off(3)] {
        let s = Summary::new(&outcomes, None, &str::len);
        assert_eq!((s.completed, s.failed, s.good), (0, outcomes.len(), None));
        close(s.request_throughput() + s.output_throughput() + s.sample(Metric::Ttft).percentile(99.0), 0.0);
    }
}

fn counters(drafts: u32) -> Counters {
    let line = |name: &str, value: u32| format!("vllm:spec_decode_num_{name}_total{{engine=\"0\"}} {value}\n");
    let place = |position: u32, value: u32| {
        format!("vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"{position}\"}} {value}\n")
    };
    let text = [
        line("drafts", drafts),
        line("draft_tokens", 2 * drafts),
        line("accepted_tokens", drafts + drafts / 4),
        place(0, drafts - drafts / 4),
        place(1, drafts / 2),
    ];
    Counters::parse(&text.concat())
}

fn report() -> Report {
    let settings = Settings {
        backend: "openai".to_owned(),
        label: None,
        model: "models/micro".to_owned(),
        tokenizer: "models/micro".to_owned(),
        num_prompts: 5,
        traffic: Traffic { rate: 4.0, ..Traffic::AT_ONCE },
        concurrency: Some(2),
        metrics: vec![Metric::Ttft, Metric::Tpot, Metric::Itl, Metric::Queue],
        percentiles: vec![50.0, 99.0, 99.9],
        goodput: Some(Goodput { ttft: Some(500.0), tpot: Some(200.0), e2el: None }),
        metadata: vec![("hardware".to_owned(), "two cores".to_owned())],
        environment: json!({"server_version": "1"}).as_object().unwrap().clone(),
    };
    let probes = vec![outcome(0.0, &[0.125], Some(1)), timeline().remove(4)];
    let (before, after) = (Some(counters(8)), Some(counters(108)));
    let run = Run { outcomes: timeline(), probes, before, after, stopped: false };
    Report::new(settings, run, &|_| 1)
}

const TABLE: &str = "\
============ Serving Benchmark Result ============
Successful requests:                     3         
Failed requests:                         2         
Maximum request concurrency:             2         
Request rate configured (RPS):           4.00      
Benchmark duration (s):                  8.00      
Total input tokens:                      300       
Total generated tokens:                  8         
Request throughput (req/s):              0.38      
Request goodput (req/s):                 0.25      
Output token throughput (tok/s):         1.00      
Peak output token throughput (tok/s):    4.00      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          38.50     
------------------Probe Requests------------------
Probe requests completed:                1         
Probe requests failed:                   1         
Median probe E2EL (ms):                  125.00    
P99 probe E2EL (ms):                     125.00    
Max probe E2EL (ms):                     125.00    
---------------Time to First Token----------------
Mean TTFT (ms):                          566.67    
Median TTFT (ms):                        500.00    
P50 TTFT (ms):                           500.00    
P99 TTFT (ms):                           990.00    
P99.9 TTFT (ms):                         999.00    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          225.00    
Median TPOT (ms):                        225.00    
P50 TPOT (ms):                           225.00    
P99 TPOT (ms):                           249.50    
P99.9 TPOT (ms):                         249.95    
---------------Inter-token Latency----------------
Mean ITL (ms):                           350.00    
Median ITL (ms):                         250.00    
P50 ITL (ms):                            250.00    
P99 ITL (ms):                            593.00    
P99.9 ITL (ms):                          599.30    
---------------Client-side Queueing---------------
Mean Client Queue Time (ms):             250.00    
Median Client Queue Time (ms):           250.00    
P50 Client Queue Time (ms):              250.00    
P99 Client Queue Time (ms):              250.00    
P99.9 Client Queue Time (ms):            250.00    
---------------Speculative Decoding---------------
Acceptance rate (%):                     62.50     
Acceptance length:                       2.25      
Drafts:                                  100       
Draft tokens:                            200       
Accepted tokens:                         125       
Per-position acceptance (%):
  Position 0:                            75.00     
  Position 1:                            50.00     
==================================================
";

#[test]
fn the_table_is_the_established_one() {
    assert_eq!(table(&report()), TABLE);
}

#[test]
fn right_answers_come_last_where_they_are_known() {
    let mut report = report();
    let epoch = |epoch, right| Epoch { epoch, items: 4, completed: 4, truncated: 1, right, score: 25.0 * right as f64 };
    let epochs = vec![epoch(0, 2), epoch(1, 1)];
    report.quality = Some(Quality { epochs, score: 37.5, sigma: 17.116, truncated: 2 });
    let found = table(&report);
    let wanted = "\
------------------Right Answers-------------------
Epoch 0 (%):                             50.00     
Epoch 1 (%):                             25.00     
All epochs (%):                          37.50     
Standard deviation (%):                  17.12     
Answers cut off:                         2         
==================================================
";
    assert!(found.ends_with(wanted), "{found}");
    let json = report.json(false);
    assert_eq!((&json["score"], &json["truncated"]), (&json!(37.5), &json!(2)));
    assert_eq!(json["epochs"][1]["right"], json!(1));
}

#[test]
fn the_json_has_the_established_keys() {
    let mut report = report();
    let plain = report.json(false);
    let keys: Vec<&str> = plain.keys().map(String::as_str).collect();
    let wanted = "date endpoint_type backend label model_id tokenizer_id num_prompts hardware request_rate burstiness \
        max_concurrency duration completed failed timed_out total_input_tokens total_output_tokens request_throughput \
        request_goodput output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests \
        probe_completed probe_failed probe_median_e2el_ms probe_p99_e2el_ms probe_max_e2el_ms \
        spec_decode_acceptance_rate spec_decode_acceptance_length spec_decode_num_drafts spec_decode_draft_tokens \
        spec_decode_accepted_tokens spec_decode_per_position_acceptance_rates \
        mean_ttft_ms median_ttft_ms std_ttft_ms p50_ttft_ms p99_ttft_ms p99.9_ttft_ms \
        mean_tpot_ms median_tpot_ms std_tpot_ms p50_tpot_ms p99_tpot_ms p99.9_tpot_ms \
        mean_itl_ms median_itl_ms std_itl_ms p50_itl_ms p99_itl_ms p99.9_itl_ms \
        mean_client_queue_time_ms median_client_queue_time_ms std_client_queue_time_ms p50_client_queue_time_ms \
        p99_client_queue_time_ms p99.9_client_queue_time_ms environment";
    assert_eq!(keys, wanted.split_whitespace().collect::<Vec<_>>());
    assert_eq!(
        (&plain["request_rate"], &plain["label"], &plain["max_concurrency"]),
        (&json!(4.0), &Value::Null, &json!(2))
    );
    assert_eq!(plain["spec_decode_per_position_acceptance_rates"], json!([0.75, 0.5]));
    let detailed = report.json(true);
    assert_eq!(detailed["output_lens"], json!([5, 2, 1, 0, 0]));
    assert_eq!(detailed["errors"], json!(["", "", "", "HTTP 503", "late"]));
    assert_eq!(detailed["itls"].as_array().unwrap().len(), 5);
    let missing = ["input_lens", "ttfts", "latencies", "start_times", "generated_texts"]
        .iter()
        .find(|key| !detailed.contains_key(**key));
    assert_eq!(missing, None);
    report.date = 951_827_696;
    assert_eq!(report.file_name(), "openai-4.0qps-concurrency2-micro-20000229-123456.json");
    report.settings.traffic = Traffic::AT_ONCE;
    report.settings.concurrency = None;
    assert_eq!(report.json(false)["request_rate"], json!("inf"));
    assert!(!report.json(false).contains_key("mean_client_queue_time_ms"), "nothing queues without a limit");
    assert_eq!(report.file_name(), "openai-infqps-micro-20000229-123456.json");
    report.settings.traffic.ramp = Some(Ramp { shape: RampShape::Linear, from: 1.0, to: 4.0 });
    assert_eq!(report.file_name(), "openai-ramp-up-linear-1qps-4qps-micro-20000229-123456.json");
}

#[test]
fn the_hash_of_prompts_sees_texts_lengths_and_order() {
    let (a, b) = (prompt("a", 1), prompt("b", 1));
    let hashes = [
        prompts_hash(&[a.clone(), b.clone()]),
        prompts_hash(&[b, a.clone()]),
        prompts_hash(&[prompt("ab", 1)]),
        prompts_hash(&[prompt("a", 2)]),
        prompts_hash(&[a]),
    ];
    assert!(hashes.iter().enumerate().all(|(index, hash)| hash.len() == 64 && !hashes[..index].contains(hash)));
}
