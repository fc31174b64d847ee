//! Sending the requests of a run: at their times, so many at once.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::client::Client;
use super::counters::Counters;
use super::dataset::Prompt;
use super::exchange::{Ask, Outcome};

/// Requests of a run.
#[derive(Clone, Debug)]
pub struct Load {
    /// What is sent.
    pub prompts: Vec<Prompt>,
    /// Seconds after the start at which each arrives, ascending.
    pub times: Vec<f64>,
    /// Most requests under way; the others wait for their turn in order.
    pub concurrency: Option<usize>,
    /// Single-token requests a second beside the others, to see how long they take meanwhile; 0 for none.
    pub probe_rate: f64,
}

/// What a run brought.
#[derive(Clone, Debug)]
pub struct Run {
    /// One outcome a prompt, in the order of the prompts.
    pub outcomes: Vec<Outcome>,
    /// Outcomes of the probes.
    pub probes: Vec<Outcome>,
    /// The server's counters before the first request.
    pub before: Option<Counters>,
    /// The server's counters at the end.
    pub after: Option<Counters>,
    /// Whether it was stopped.
    pub stopped: bool,
}

/// A server and how to ask it.
#[derive(Clone, Debug)]
pub struct Target {
    /// The server.
    pub client: Arc<Client>,
    /// What all requests have in common.
    pub ask: Arc<Ask>,
}

impl Target {
    /// Sends the first prompt again and again until it is answered, or until `limit` is over.
    ///
    /// # Errors
    /// The last failure.
    pub async fn ready(&self, prompt: &Prompt, limit: Duration) -> Result<(), String> {
        const PAUSE: Duration = Duration::from_secs(5);
        let origin = Instant::now();
        loop {
            let outcome = self.ask.send(&self.client, prompt, origin, Instant::now()).await;
            let Some(error) = outcome.error else { return Ok(()) };
            if origin.elapsed() + PAUSE > limit {
                return Err(error);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Sends one prompt `count` times; returns the failures.
    pub async fn warm_up(&self, prompt: &Prompt, count: usize, concurrency: Option<usize>) -> Vec<String> {
        let load = Load { prompts: vec![prompt.clone(); count], times: vec![0.0; count], concurrency, probe_rate: 0.0 };
        let outcomes = self.send_all(&load, &mut |_| (), std::future::pending()).await.0;
        outcomes.into_iter().filter_map(|outcome| outcome.error).collect()
    }

    /// Runs a load. `done` sees every outcome as it comes; when `stop` is ready, what has not ended counts as failed.
    pub async fn run(&self, load: &Load, done: &mut dyn FnMut(&Outcome), stop: impl Future<Output = ()>) -> Run {
        let before = Counters::read(&self.client).await;
        let probing = self.probe(load.probe_rate);
        let (outcomes, stopped) = self.send_all(load, done, stop).await;
        let probes = match probing {
            None => Vec::new(),
            Some((over, probes)) => {
                // Probes that have gone already are no reason to lose the run.
                let _gone = over.send(());
                probes.await.unwrap_or_default()
            }
        };
        let after = Counters::read(&self.client).await;
        Run { outcomes, probes, before, after, stopped }
    }

    async fn send_all(
        &self,
        load: &Load,
        done: &mut dyn FnMut(&Outcome),
        stop: impl Future<Output = ()>,
    ) -> (Vec<Outcome>, bool) {
        let turns = load.concurrency.map(|most| Arc::new(Semaphore::new(most)));
        let origin = Instant::now();
        let moment = |time: f64| origin + Duration::from_secs_f64(time);
        let mut running = JoinSet::new();
        let mut outcomes: Vec<Option<Outcome>> = vec![None; load.prompts.len()];
        let mut take = |(index, outcome): (usize, Outcome)| {
            done(&outcome);
            outcomes[index] = Some(outcome);
        };
        let mut stop = std::pin::pin!(stop);
        let mut waiting = load.prompts.iter().zip(&load.times).enumerate().peekable();
        let stopped = loop {
            while let Some((index, (prompt, _))) = waiting.next_if(|(_, (_, time))| moment(**time) <= Instant::now()) {
                let (target, turns, prompt) = (self.clone(), turns.clone(), prompt.clone());
                running.spawn(async move {
                    let queued = Instant::now();
                    // The semaphore is never closed, and serves in order.
                    let _turn = match &turns {
                        Some(turns) => turns.acquire().await.ok(),
                        None => None,
                    };
                    (index, target.ask.send(&target.client, &prompt, origin, queued).await)
                });
            }
            let due = waiting.peek().map(|(_, (_, time))| moment(**time).into());
            if due.is_none() && running.is_empty() {
                break false;
            }
            tokio::select! {
                biased;
                () = &mut stop => break true,
                Some(ended) = running.join_next(), if !running.is_empty() => {
                    if let Ok(ended) = ended {
                        take(ended);
                    }
                }
                () = tokio::time::sleep_until(due.unwrap_or_else(tokio::time::Instant::now)), if due.is_some() => {}
            }
        };
        running.abort_all();
        let now = origin.elapsed().as_secs_f64();
        let lost = |prompt: &Prompt| Outcome {
            start: now,
            end: now,
            prompt_tokens: prompt.tokens,
            error: Some("stopped before the answer was there".to_owned()),
            ..Outcome::default()
        };
        let whole = outcomes.into_iter().zip(&load.prompts);
        (whole.map(|(outcome, prompt)| outcome.unwrap_or_else(|| lost(prompt))).collect(), stopped)
    }

    /// Starts sending single-token requests, each a pause after the last one.
    fn probe(&self, rate: f64) -> Option<(tokio::sync::oneshot::Sender<()>, tokio::task::JoinHandle<Vec<Outcome>>)> {
        if rate <= 0.0 {
            return None;
        }
        let target = self.clone();
        let (over, mut ended) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(async move {
            let text = "Hi".to_owned();
            let prompt = Prompt { text, tokens: 1, output_tokens: 1, id: None, answer: None, seed: None };
            let (origin, mut outcomes) = (Instant::now(), Vec::new());
            loop {
                outcomes.push(target.ask.send(&target.client, &prompt, origin, Instant::now()).await);
                tokio::select! {
                    _ = &mut ended => return outcomes,
                    () = tokio::time::sleep(Duration::from_secs_f64(1.0 / rate)) => {}
                }
            }
        });
        Some((over, task))
    }
}
