//! A worker on the micro model: events, aborts, limits, the end, and death with a reason.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../../server/tests/support/hollow.rs"]
mod hollow;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
};

use glimmer_checkpoint::Checkpoint;
use glimmer_engine::{
    EngineError, EventSink, FinishReason, Generator, Output, Refused, Request, Settings, Snapshot, TokenEvent, Worker,
    WorkerSettings,
    request::{Collector, RequestError},
};
use glimmer_tensor::cpu::Cpu;

struct Events(Sender<TokenEvent>);

impl EventSink for Events {
    fn send(&self, event: TokenEvent) -> bool {
        self.0.send(event).is_ok()
    }
}

fn load(sequences: usize) -> Result<Generator<Cpu>, EngineError> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"));
    let settings =
        Settings { sequences, depth: 1, context: Some(512), real_vocab: Some(3235), rows: 64, ..Settings::default() };
    Generator::load(Cpu::new(1), &Checkpoint::open(path).unwrap(), &settings)
}

fn request(length: u32, new: u32) -> Request {
    Request::new((1..=length).map(|t| 20 + t * 7 % 900).collect::<Vec<_>>(), new).ignoring_eos()
}

fn submit(worker: &Worker, request: Request) -> (u64, Receiver<TokenEvent>) {
    let (sink, events) = channel();
    (worker.submit(request, None, Box::new(Events(sink))).unwrap(), events)
}

/// Waits until the worker says that one sequence runs and nothing is left of prompts.
fn until_decoding(worker: &Worker) {
    let decoding = |s: &Snapshot| (s.running, s.waiting_capacity, s.backlog_tokens) == (1, 0, 0);
    while !decoding(&worker.snapshot()) {
        std::thread::yield_now();
    }
}

fn collect(events: &Receiver<TokenEvent>) -> Output {
    let mut collector = Collector::default();
    let output = events.iter().find_map(|event| collector.take(event)).unwrap();
    assert!(events.recv().is_err(), "nothing follows the end");
    output
}

#[test]
fn answers_equal_those_of_the_generator_and_everything_is_counted() {
    let (worker, facts) = Worker::spawn(|| load(2), WorkerSettings::default()).unwrap();
    assert_eq!((facts.sequences, facts.rules.context, facts.rules.depth), (2, 512, 1));
    let streams: Vec<_> = (0..5).map(|i| submit(&worker, request(10 + i * 30, 6 + i)).1).collect();
    let mut alone = load(1).unwrap();
    for (i, events) in (0..).zip(&streams) {
        let expected = alone.generate(request(10 + i * 30, 6 + i), &mut |_| glimmer_engine::Flow::Continue).unwrap();
        let output = collect(events);
        assert_eq!((output.tokens, output.finish), (expected.tokens, FinishReason::Length));
        let cost = output.cost;
        assert!(cost.queue_seconds >= 0.0 && cost.prefill_seconds > 0.0 && cost.decode_seconds > 0.0, "{cost:?}");
    }
    worker.shutdown();
    let snapshot = worker.snapshot();
    assert_eq!((snapshot.running, snapshot.waiting_capacity, snapshot.backlog_tokens), (0, 0, 0));
    assert!(snapshot.counters.steps.iter().sum::<u64>() > 0 && snapshot.counters.drafts.steps() > 0);
    assert!(!snapshot.stuck && snapshot.dead.is_some());
    let refused = worker.submit(request(3, 3), None, Box::new(Events(channel().0)));
    assert!(matches!(refused, Err(Refused::Dead(_))), "{refused:?}");
}

#[test]
fn aborts_and_deaf_sinks_free_their_place_and_shutdown_ends_the_rest() {
    let (worker, _) = Worker::spawn(|| load(1), WorkerSettings::default()).unwrap();
    let (first, events) = submit(&worker, request(20, 450));
    let (second, waiting) = submit(&worker, request(20, 450));
    events.recv().unwrap();
    worker.abort(second);
    worker.abort(first);
    worker.abort(first);
    assert_eq!(collect(&events).finish, FinishReason::Abort);
    assert_eq!(collect(&waiting).finish, FinishReason::Abort);
    let (_, deaf) = submit(&worker, request(20, 450));
    deaf.recv().unwrap();
    drop(deaf);
    // The single slot comes back: this one is served.
    let (_, events) = submit(&worker, request(5, 3));
    assert_eq!(collect(&events).tokens.len(), 3);
    let (_, last) = submit(&worker, request(5, 500));
    let also = submit(&worker, request(5, 500)).1;
    worker.shutdown();
    worker.shutdown();
    assert_eq!((collect(&last).finish, collect(&also).finish), (FinishReason::Abort, FinishReason::Abort));
}

#[test]
fn limits_refuse_at_once_and_bad_requests_say_their_field() {
    let settings = WorkerSettings { queued_requests: Some(2), queued_tokens: Some(100), ..WorkerSettings::default() };
    let (worker, _) = Worker::spawn(|| load(1), settings).unwrap();
    let (_, _running) = submit(&worker, request(20, 450));
    until_decoding(&worker);
    // One runs and its prompt is computed; a prompt beyond the limit is taken when nothing else waits.
    let (_, _large) = submit(&worker, request(150, 5));
    let refused = |request| worker.submit(request, None, Box::new(Events(channel().0))).unwrap_err();
    let busy = refused(request(1, 5));
    assert!(
        matches!(&busy, Refused::Overloaded { limit, retry_seconds } if limit.contains("100") && *retry_seconds > 0)
    );
    let invalid = refused(Request::new(vec![1], 0));
    assert!(matches!(invalid, Refused::Invalid { field: "max_tokens", .. }), "{invalid:?}");
    let invalid = refused(Request::new(vec![9999], 1));
    assert!(matches!(invalid, Refused::Invalid { field: "prompt", .. }), "{invalid:?}");
    worker.shutdown();

    let settings = WorkerSettings { queued_requests: Some(1), ..WorkerSettings::default() };
    let (worker, _) = Worker::spawn(|| load(1), settings).unwrap();
    let (_, _running) = submit(&worker, request(20, 450));
    until_decoding(&worker);
    let (_, _waiting) = submit(&worker, request(20, 5));
    let busy = worker.submit(request(1, 5), None, Box::new(Events(channel().0))).unwrap_err();
    assert!(matches!(&busy, Refused::Overloaded { limit, .. } if limit.contains('1')), "{busy:?}");
    worker.shutdown();
}

/// A sink that panics stands for any defect on the worker's thread.
#[test]
fn a_panic_ends_every_request_with_the_reason() {
    struct Broken;
    impl EventSink for Broken {
        fn send(&self, event: TokenEvent) -> bool {
            assert!(event.finish.is_some(), "a defect for this test");
            true
        }
    }
    let (worker, _) = Worker::spawn(|| load(2), WorkerSettings::default()).unwrap();
    let (_, events) = submit(&worker, request(20, 450));
    events.recv().unwrap();
    worker.submit(request(5, 5), None, Box::new(Broken)).unwrap();
    let end = collect(&events).finish;
    assert!(
        matches!(&end, FinishReason::Error(RequestError::Internal(text)) if text.contains("a defect for this test")),
        "{end:?}"
    );
    assert!(worker.snapshot().dead.unwrap().contains("a defect for this test"));
    worker.shutdown();
}

/// A device that is lost in a step ends what runs and what waits with the reason, and takes nothing new.
#[test]
fn an_error_of_a_step_ends_every_request_with_the_reason() {
    let mut steps = 0;
    let begin = move || {
        steps += 1;
        let lost = "the device was lost (cuStreamSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE)";
        if steps < 20 { Ok(()) } else { Err(glimmer_tensor::Error::Device(lost.into())) }
    };
    let load = move || {
        let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/micro-bf16"));
        let settings = Settings { sequences: 1, context: Some(512), ..Settings::default() };
        Generator::load(hollow::Hollow(Box::new(begin)), &Checkpoint::open(path).unwrap(), &settings)
    };
    let (worker, _) = Worker::spawn(load, WorkerSettings::default()).unwrap();
    let (_, running) = submit(&worker, request(20, 450));
    running.recv().unwrap();
    // The only slot is taken: this one waits. Where the device is lost already, it is refused.
    let (sink, waiting) = channel();
    let taken = worker.submit(request(5, 5), None, Box::new(Events(sink)));
    let lost = |finish: &FinishReason| matches!(finish, FinishReason::Error(RequestError::Internal(text)) if text.contains("ECC_UNCORRECTABLE"));
    assert!(lost(&collect(&running).finish));
    match taken {
        Ok(_) => assert!(lost(&collect(&waiting).finish)),
        Err(refused) => assert!(matches!(refused, Refused::Dead(_)), "{refused:?}"),
    }
    let reason = worker.snapshot().dead.unwrap();
    assert!(reason.contains("the device was lost"), "{reason}");
    let refused = worker.submit(request(5, 5), None, Box::new(Events(channel().0))).unwrap_err();
    assert!(matches!(&refused, Refused::Dead(text) if text.contains("the device was lost")), "{refused:?}");
    // What the thread left behind does not keep anyone.
    worker.shutdown();
}

#[test]
fn a_load_that_fails_or_panics_is_an_error() {
    let failed = Worker::spawn(|| load(0), WorkerSettings::default());
    assert!(matches!(failed, Err(EngineError::Setting { setting: "sequences", .. })));
    let panicked = Worker::spawn::<Cpu, _>(|| panic!("for this test"), WorkerSettings::default());
    assert!(matches!(panicked, Err(EngineError::Thread(_))));
}

#[test]
fn no_progress_with_work_pending_is_stuck() {
    struct Slow(Arc<std::sync::Barrier>);
    impl EventSink for Slow {
        fn send(&self, _: TokenEvent) -> bool {
            self.0.wait();
            self.0.wait();
            false
        }
    }
    let settings = WorkerSettings { step_timeout: std::time::Duration::ZERO, ..WorkerSettings::default() };
    let (worker, _) = Worker::spawn(|| load(1), settings).unwrap();
    assert!(!worker.snapshot().stuck, "an idle worker is not stuck");
    let barrier = Arc::new(std::sync::Barrier::new(2));
    worker.submit(request(3, 3), None, Box::new(Slow(Arc::clone(&barrier)))).unwrap();
    barrier.wait();
    assert!(worker.snapshot().stuck, "a step that does not end");
    barrier.wait();
    worker.shutdown();
    assert!(!worker.snapshot().stuck);
}
