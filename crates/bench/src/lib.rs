//! Evaluation: task files and their graders, the token panel, acceptance of drafts, and reports; a load generator.
//!
//! The harness knows models only through two traits: an [`Answerer`] answers conversations, a [`Scorer`] gives the
//! distribution of the next token at every position of a document. Everything in a report is a plain count or an f64 sum
//! taken in a fixed order, so two runs on the same model print the same numbers.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::needless_pass_by_value, reason = "test helpers take JSON literals by value"))]

mod acceptance;
mod behaviour;
mod calibration;
mod demo;
pub mod dummy;
mod engine;
mod error;
mod evaluate;
pub mod exactness;
mod exponential;
mod jsonl;
mod kld;
mod local;
mod panel;
mod panel_scorer;
pub mod parity;
mod pictures;
mod prefix_cost;
mod public;
mod remote;
mod report;
pub mod serve;
pub mod soak;
pub mod steps;
mod tasks;
mod under_way;

pub use acceptance::Acceptance;
pub use behaviour::behaviour;
pub use calibration::{calibration_samples, read_calibration};
pub use demo::{
    DemoAnswer, DemoDevice, DemoInput, DemoProgress, DemoReport, KldSummary, MtpSummary, QuantizeSummary, StageTime,
    TaskPair, VerifySummary, demo,
};
pub use engine::EngineCompleter;
pub use error::BenchError;
pub use evaluate::{Answerer, EvalOptions, Finish, Question, Reply, ReplySink, TaskResult, evaluate};
pub use kld::{Divergence, KLD_CAP, RowSink, Scorer, ScorerSet, divergence, divergences, divergences_on_threads};
pub use local::{Completer, Completion, CompletionSink, LocalAnswerer, ModelText, PromptSource, Prompted};
pub use panel::{Document, read_documents};
pub use panel_scorer::PanelScorer;
pub use pictures::{PictureEncoder, PictureReader};
pub use prefix_cost::{PrefixCost, PrefixCostPlan, Ratios, prefix_cost};
pub use public::read_questions;
pub use remote::{
    Entry, PassResult, RemoteOptions, RemoteReply, RemoteResult, evaluate_remote, questions_digest, remote_table,
};
pub use report::{acceptance_table, divergence_table, plain_table, task_table};
pub use tasks::{Call, Grader, Item, Task, body, grade, read_task};
