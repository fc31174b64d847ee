//! An engine that gives tokens by the clock and remembers when.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use glimmer_engine::request::{Cost, Finish, FinishReason, Request, Token, TokenEvent};
use glimmer_server::engine::{Asked, Counters, Engine, EventSender, Refusal, Status, Ticket};

use crate::now;

/// Times at which the tokens of each request were handed over.
pub(crate) type Times = Arc<Mutex<HashMap<String, Vec<u64>>>>;

/// How the engine gives tokens.
#[derive(Clone, Copy)]
pub(crate) struct Schedule {
    pub(crate) token: u32,
    /// Time of a step; zero is as fast as it goes.
    pub(crate) pace: Duration,
    /// Tokens of a stream in a step.
    pub(crate) burst: usize,
    /// Parts of a step, each with its share of the streams.
    pub(crate) slots: usize,
}

/// An engine on a thread of its own.
pub(crate) struct Stepping {
    inbox: Mutex<mpsc::Sender<(Request, EventSender)>>,
}

struct Running {
    request: Request,
    events: EventSender,
    slot: usize,
    sent: Vec<u64>,
}

impl Stepping {
    pub(crate) fn start(schedule: Schedule, times: Times) -> Self {
        let (inbox, arrivals) = mpsc::channel::<(Request, EventSender)>();
        thread::spawn(move || {
            let mut running: Vec<Running> = Vec::new();
            let (mut next, mut slot, mut arrived) = (Instant::now(), 0, 0);
            let mut enter = |(request, events): (Request, EventSender)| {
                arrived += 1;
                Running { request, events, slot: arrived % schedule.slots, sent: Vec::new() }
            };
            loop {
                if running.is_empty() {
                    match arrivals.recv() {
                        Ok(new) => running.push(enter(new)),
                        Err(_) => return,
                    }
                }
                running.extend(arrivals.try_iter().map(&mut enter));
                running.retain_mut(|stream| stream.slot != slot || stream.step(schedule, &times));
                slot = (slot + 1) % schedule.slots;
                if !schedule.pace.is_zero() {
                    next += schedule.pace / u32::try_from(schedule.slots).unwrap();
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            }
        });
        Self { inbox: Mutex::new(inbox) }
    }
}

impl Running {
    /// Gives the stream its tokens; false at its end.
    fn step(&mut self, schedule: Schedule, times: &Times) -> bool {
        for _ in 0..schedule.burst {
            self.sent.push(now());
            let last = self.sent.len() == self.request.limits.max_tokens as usize;
            let finish = last.then(|| Finish { reason: FinishReason::Length, cost: Cost::default() });
            let tokens = vec![Token { id: schedule.token, logprobs: None }];
            let open = self.events.send(TokenEvent { tokens, finish, prompt_logprobs: None });
            if last || !open {
                times.lock().unwrap().insert(self.request.id.clone(), std::mem::take(&mut self.sent));
                return false;
            }
        }
        true
    }
}

impl Engine for Stepping {
    fn submit(&self, asked: Asked, events: EventSender) -> Result<Ticket, Refusal> {
        self.inbox.lock().unwrap().send((asked.request, events)).map_err(|_| Refusal::Dead)?;
        Ok(Ticket::new(|| {}))
    }

    fn status(&self) -> Status {
        Status::default()
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}
