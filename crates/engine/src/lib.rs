//! Sequences, cache pools, sampling and speculation: from prompts of tokens to streams of tokens, for one process.
//!
//! | file | idea |
//! |---|---|
//! | [`generate`] | [`Generator`]: drives a model over several sequences at once |
//! | [`request`] | [`Request`] and [`TokenEvent`]: what is asked and what comes back, plain data |
//! | [`rules`] | which requests can be served at all |
//! | [`sequence`] | the life of a sequence |
//! | [`schedule`] | who is admitted, preempted, refused, and which rows the next step computes; pure |
//! | [`policy`] | the choices behind it: order, pace, lanes |
//! | [`rates`] | how fast steps have been |
//! | [`plan`] | from the decision to the step |
//! | [`pools`] | slots and pages with guards; one function says what a sequence needs |
//! | [`prefix`] | reuse of pages and states of equal beginnings |
//! | [`features`] | features of pictures seen lately |
//! | [`sampling`] | logits to a token |
//! | [`speculate`] | which drafts stand; exact |
//! | [`rows`] | [`Answer`]: the rows of a step to the tokens of an answer |
//! | [`thinking`] | where reasoning ends, and how a budget ends it |
//! | [`logprobs`] | log-probabilities, ranks and the best tokens of a row |
//! | `best` | the best tokens of a row without sorting it |
//! | `softmax` | weights of logits, many at a time |
//! | [`depth`] | how many drafts a step tries: fixed, by table, or as measured |
//! | [`synthetic`] | acceptance by decree, for benches |
//! | [`constraint`] | the seam to grammars: which tokens may come next |
//! | `draft` | the draft layer's schedule |
//! | [`random`] | draws keyed by seed, position and purpose |
//! | [`settings`] | sizes and choices |
//! | [`record`] | a run as a log that replays |
//! | `clock` | the engine's clock |
//! | [`worker`] | a generator on a thread of its own, for front ends |
//! | [`stats`] | what was done, how fast, how many drafts were right |
//!
//! Invariants: greedy output does not depend on the draft depth; what a sequence yields depends on its request alone,
//! neither on other sequences nor on how its prompt was cut; every slot and page that a sequence holds comes back when it
//! ends.
#![forbid(unsafe_code)]

mod best;
mod clock;
pub mod constraint;
pub mod depth;
mod draft;
mod error;
pub mod features;
pub mod generate;
pub mod logprobs;
pub mod plan;
pub mod policy;
pub mod pools;
pub mod prefix;
pub mod random;
pub mod rates;
pub mod record;
pub mod request;
pub mod rows;
pub mod rules;
pub mod sampling;
pub mod schedule;
pub mod sequence;
pub mod settings;
mod softmax;
pub mod speculate;
pub mod stats;
pub mod synthetic;
pub mod thinking;
pub mod worker;

pub use error::EngineError;
pub use generate::{Generator, Sink};
pub use pools::{Need, Page, PageTable, Pools, Slot};
pub use prefix::{PageKeys, PrefixTree};
pub use record::{Recorded, ReplayError, Replayed, replay};
pub use request::{FinishReason, Output, Request, Sampling, TokenEvent};
pub use rows::{Answer, AnswerRules, Judged, RowJudge, RowMask};
pub use rules::Rules;
pub use sampling::{Distribution, Sampler};
pub use sequence::{Flow, SequenceId};
pub use settings::{DraftSampling, IndexSharing, Settings};
pub use stats::{Counters, DraftCounts, Snapshot, Stats};
pub use worker::{EventSink, Facts, Refused, Worker, WorkerSettings};
