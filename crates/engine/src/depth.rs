//! How many drafts a step tries, by the number of sequences that it serves.
//!
//! Either fixed, or from a table, or measured: [`DepthController`] keeps the share `r_i` of verifications in which at least
//! `i` drafts stood and the time `t(batch, k)` of decoding steps, and takes the depth `k` with the most tokens a second,
//! `(1 + r_1 + .. + r_k) / t(batch, k)`. Batches that round up to the same power of two share their times; acceptance is a
//! property of the text and shared by all. There is no clock here: callers bring the time, so a run replays.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::EngineError;

/// Depths by ranges of batch sizes, as `[[low, high, depth], ..]`. Between ranges and above the last the depth of the range
/// before holds, below the first that of the first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<[usize; 3]>", into = "Vec<[usize; 3]>")]
pub struct DepthTable {
    ranges: Vec<[usize; 3]>,
}

impl DepthTable {
    /// A table of ranges `[low, high, depth]`, both ends included.
    ///
    /// # Errors
    /// [`EngineError::Setting`] unless there are ranges and each begins above the end of the one before.
    pub fn new(ranges: Vec<[usize; 3]>) -> Result<Self, EngineError> {
        let ordered = ranges.iter().all(|[low, high, _]| low <= high) && ranges.windows(2).all(|w| w[0][1] < w[1][0]);
        if ranges.is_empty() || !ordered {
            return Err(EngineError::Setting {
                setting: "depths by batch size",
                expected: "[[low, high, depth], ..] with ascending ranges that do not overlap".to_owned(),
                found: format!("{ranges:?}"),
            });
        }
        Ok(Self { ranges })
    }

    /// The depth for so many sequences.
    pub fn depth(&self, batch: usize) -> usize {
        let above = self.ranges.partition_point(|[low, ..]| *low <= batch);
        self.ranges[above.saturating_sub(1)][2]
    }

    /// The greatest depth in the table.
    pub fn most(&self) -> usize {
        self.ranges.iter().map(|range| range[2]).max().unwrap_or(0)
    }
}

impl TryFrom<Vec<[usize; 3]>> for DepthTable {
    type Error = EngineError;

    fn try_from(ranges: Vec<[usize; 3]>) -> Result<Self, EngineError> {
        Self::new(ranges)
    }
}

impl From<DepthTable> for Vec<[usize; 3]> {
    fn from(table: DepthTable) -> Self {
        table.ranges
    }
}

/// Where depths come from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DepthPolicy {
    /// Always the most that the engine has room for.
    #[default]
    Fixed,
    /// From a table.
    Table(DepthTable),
    /// What measures best.
    Adaptive,
}

/// A policy at work.
#[derive(Debug, Clone)]
pub struct DepthControl {
    most: usize,
    table: Option<DepthTable>,
    controller: Option<DepthController>,
}

impl DepthControl {
    /// A policy for depths up to `most`.
    ///
    /// # Errors
    /// [`EngineError::Setting`] when the table asks for more.
    pub fn new(policy: DepthPolicy, most: usize) -> Result<Self, EngineError> {
        let (table, controller) = match policy {
            DepthPolicy::Fixed => (None, None),
            DepthPolicy::Table(table) if table.most() > most => {
                return Err(EngineError::Setting {
                    setting: "depths by batch size",
                    expected: format!("depths up to {most}, the most that the engine has room for"),
                    found: table.most().to_string(),
                });
            }
            DepthPolicy::Table(table) => (Some(table), None),
            DepthPolicy::Adaptive => (None, Some(DepthController::new(most))),
        };
        Ok(Self { most, table, controller })
    }

    /// The depth of a step that serves `batch` sequences at `now` (seconds).
    pub fn depth(&mut self, batch: usize, now: f64) -> usize {
        match (&self.table, &mut self.controller) {
            (Some(table), _) => table.depth(batch),
            (None, Some(controller)) => controller.depth(batch, now),
            (None, None) => self.most,
        }
    }

    /// Books one verification: as [`DepthController::record`].
    pub fn record(&mut self, judged: usize, accepted: usize) {
        if let Some(controller) = &mut self.controller {
            controller.record(judged, accepted);
        }
    }

    /// Books the time of a step: as [`DepthController::observe`].
    pub fn observe(&mut self, batch: usize, depth: usize, seconds: f64, now: f64) {
        if let Some(controller) = &mut self.controller {
            controller.observe(batch, depth, seconds, now);
        }
    }
}

/// Steps between two decisions.
const WINDOW_STEPS: usize = 64;
/// Gain that a change of depth must promise.
const HYSTERESIS: f64 = 0.03;
/// Seconds between the end of a sweep and the next.
const SWEEP_SECONDS: f64 = 30.0;
/// Timed steps of a depth in a sweep: at least so many, and more of short ones, whose times waver most,
const SWEEP_STEPS: usize = 5;
/// until they have taken so many seconds
const SWEEP_DEPTH_SECONDS: f64 = 0.05;
/// or are so many.
const MEMORY_STEPS: usize = 25;
/// Seconds without a step behind which steps are slow for a while, and for how many.
const PAUSE_SECONDS: f64 = 1.0;
const COLD_SECONDS: f64 = 1.0;
/// Verifications that a sweep gives to depths beyond the present one, whose acceptance is not being measured.
const SWEEP_VERIFICATIONS: usize = 64;
/// Verifications that acceptance remembers.
const MEMORY_VERIFICATIONS: f64 = 4096.0;
/// Verifications to which the memory of an acceptance shrinks that nothing but a sweep measures, before it does.
const STALE_VERIFICATIONS: f64 = 16.0;
/// Seconds in which the weight of what was remembered halves.
const MEMORY_HALF_LIFE: f64 = 10.0;

/// Finds the best depth by measuring. Every 64 steps of a batch size it compares all depths by what is known and changes
/// when another promises 3 % more. Times and acceptance of depths that are not in use grow stale, so every 30 seconds it
/// sweeps over all of them, from 0 up, for a few steps each. Times are those of the last sweep alone: the machine is not as fast
/// at all times, so that times of different minutes say nothing about depths. Behind a pause the first steps are slow, those of
/// the depths that come first most, so no sweep begins within a second of it; where nothing is known yet one does, and
/// another follows behind that second.
#[derive(Debug, Clone)]
pub struct DepthController {
    most: usize,
    acceptance: Vec<Share>,
    aged_at: Option<f64>,
    batches: BTreeMap<usize, Batch>,
    /// Depth of the step before: the first step at a new depth verifies drafts made at the old one and is not timed.
    last_depth: Option<usize>,
    /// The last step.
    active_at: Option<f64>,
    /// When steps began behind the last pause.
    resumed_at: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Share {
    judged: f64,
    accepted: f64,
}

impl Share {
    /// Keeps the share and makes it weigh no more than so many verifications.
    fn limit(&mut self, judged: f64) {
        if self.judged > judged {
            self.accepted *= judged / self.judged;
            self.judged = judged;
        }
    }
}

/// What is known for one batch size.
#[derive(Debug, Clone)]
struct Batch {
    depth: usize,
    /// Times of each depth in the last sweep, seconds.
    times: Vec<Vec<f64>>,
    /// Steps since the last decision.
    steps: usize,
    sweep: Option<Sweep>,
    swept_at: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
struct Sweep {
    depth: usize,
    steps: usize,
    /// Of the timed steps of this depth.
    seconds: f64,
}

impl Sweep {
    fn of(depth: usize) -> Self {
        Self { depth, steps: 0, seconds: 0.0 }
    }
}

impl DepthController {
    /// A controller of depths from 0 to `most`.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            acceptance: vec![Share::default(); most],
            aged_at: None,
            batches: BTreeMap::new(),
            last_depth: None,
            active_at: None,
            resumed_at: 0.0,
        }
    }

    /// The depth of the next step, which serves `batch` sequences, at `now` (seconds).
    pub fn depth(&mut self, batch: usize, now: f64) -> usize {
        let most = self.most;
        if self.active_at.replace(now).is_none_or(|at| now - at > PAUSE_SECONDS) {
            self.resumed_at = now;
        }
        let warm_at = self.resumed_at + COLD_SECONDS;
        let batch = self.batches.entry(batch.next_power_of_two()).or_insert_with(|| Batch {
            depth: most,
            times: vec![Vec::new(); most + 1],
            steps: 0,
            sweep: None,
            swept_at: None,
        });
        let due = |at: f64| now >= warm_at && (at < warm_at || now - at >= SWEEP_SECONDS);
        if batch.sweep.is_none() && batch.swept_at.is_none_or(due) {
            batch.sweep = Some(Sweep::of(0));
            batch.times[0].clear();
        }
        batch.sweep.map_or(batch.depth, |sweep| sweep.depth)
    }

    /// Books one verification: `judged` drafts, of which the first `accepted` stood.
    pub fn record(&mut self, judged: usize, accepted: usize) {
        for (i, share) in self.acceptance.iter_mut().enumerate().take(judged) {
            share.limit(MEMORY_VERIFICATIONS - 1.0);
            share.judged += 1.0;
            share.accepted += f64::from(u8::from(i < accepted));
        }
    }

    /// Books a step of decoding rows alone, at the depth that [`DepthController::depth`] gave for it: it took `seconds` and
    /// ended at `now`. Steps that compute prompts are not for here.
    pub fn observe(&mut self, batch_size: usize, depth: usize, seconds: f64, now: f64) {
        self.age(now);
        self.active_at = Some(now);
        let timed = self.last_depth.replace(depth) == Some(depth);
        let Some(batch) = self.batches.get_mut(&batch_size.next_power_of_two()) else { return };
        batch.steps += 1;
        let mut decide = batch.steps >= WINDOW_STEPS;
        let mut bar = 1.0 + HYSTERESIS;
        if let Some(sweep) = &mut batch.sweep {
            decide = false;
            sweep.steps += 1;
            if let Some(times) = batch.times.get_mut(depth).filter(|_| timed && seconds > 0.0) {
                sweep.seconds += seconds;
                if times.len() == MEMORY_STEPS {
                    times.remove(0);
                }
                times.push(seconds);
            }
            // The deepest steps tell the acceptance of all depths at once.
            let unknown = depth == self.most && (batch.depth < depth || batch.swept_at.is_none());
            let verifications = if unknown { SWEEP_VERIFICATIONS } else { 0 };
            let more = sweep.seconds < SWEEP_DEPTH_SECONDS && sweep.steps <= MEMORY_STEPS;
            if !more && sweep.steps > SWEEP_STEPS.max(verifications.div_ceil(batch_size.max(1))) {
                *sweep = Sweep::of(sweep.depth + 1);
                if let Some(times) = batch.times.get_mut(sweep.depth) {
                    times.clear();
                    if sweep.depth == self.most {
                        self.acceptance.iter_mut().skip(batch.depth).for_each(|share| share.limit(STALE_VERIFICATIONS));
                    }
                } else {
                    batch.sweep = None;
                    decide = true;
                    if batch.swept_at.replace(now).is_none_or(|at| at < self.resumed_at + COLD_SECONDS) {
                        bar = 1.0;
                    }
                }
            }
        }
        if decide {
            batch.steps = 0;
            let rates: Vec<Option<f64>> = (0..=self.most).map(|k| rate(&self.acceptance, &batch.times, k)).collect();
            let present = rates[batch.depth].unwrap_or(0.0);
            let best =
                (0..=self.most).rev().max_by(|&a, &b| rates[a].unwrap_or(0.0).total_cmp(&rates[b].unwrap_or(0.0)));
            if let Some(best) = best.filter(|&best| rates[best].unwrap_or(0.0) > present * bar) {
                batch.depth = best;
            }
        }
    }

    /// Lets what is known of acceptance fade with time, so that a sweep after a long pause is believed.
    fn age(&mut self, now: f64) {
        let seconds = (now - self.aged_at.replace(now).unwrap_or(now)).max(0.0);
        let keep = 0.5f64.powf(seconds / MEMORY_HALF_LIFE);
        for share in &mut self.acceptance {
            share.judged *= keep;
            share.accepted *= keep;
        }
    }
}

/// Tokens a second of a sequence at depth `k`, when its time and acceptance are known.
fn rate(acceptance: &[Share], times: &[Vec<f64>], k: usize) -> Option<f64> {
    let mut tokens = 1.0;
    for share in &acceptance[..k] {
        if share.judged <= 0.0 {
            return None;
        }
        tokens += share.accepted / share.judged;
    }
    let mut times = times[k].clone();
    times.sort_unstable_by(f64::total_cmp);
    Some(tokens / times.get(times.len() / 2)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, uniform};

    /// A run against a table of step times.
    struct Run {
        controller: DepthController,
        now: f64,
        step: usize,
        depths: Vec<usize>,
    }

    impl Run {
        fn new(most: usize) -> Self {
            Self { controller: DepthController::new(most), now: 0.0, step: 0, depths: Vec::new() }
        }

        /// Steps for so many seconds at conditional acceptance `stands`, with 2 % of noise and a hiccup now and then.
        fn go(&mut self, seconds: f64, batch: usize, stands: f64, time: impl Fn(usize) -> f64) -> &[usize] {
            self.go_by(seconds, batch, time, |step, sequence| {
                (0..16).take_while(|i| uniform(sequence as u64, step * 16 + i, Purpose::Synthetic) < stands).count()
            })
        }

        /// The same; `stood` says how many drafts stand in a step and sequence, were there any number of them.
        fn go_by(
            &mut self,
            seconds: f64,
            batch: usize,
            time: impl Fn(usize) -> f64,
            stood: impl Fn(usize, usize) -> usize,
        ) -> &[usize] {
            let (end, from) = (self.now + seconds, self.depths.len());
            while self.now < end {
                let depth = self.controller.depth(batch, self.now);
                self.depths.push(depth);
                self.step += 1;
                for sequence in 0..batch {
                    self.controller.record(depth, stood(self.step, sequence).min(depth));
                }
                let noise = 1.0 + 0.02 * (uniform(99, self.step, Purpose::Token) - 0.5);
                let hiccup = if self.step.is_multiple_of(41) { 5.0 } else { 1.0 };
                let took = time(depth) * noise * hiccup;
                self.now += took;
                self.controller.observe(batch, depth, took, self.now);
            }
            &self.depths[from..]
        }
    }

    fn rate(stands: f64, time: impl Fn(usize) -> f64) -> impl Fn(usize) -> f64 {
        move |k| (0..=k as i32).map(|i| stands.powi(i)).sum::<f64>() / time(k)
    }

    /// Share of steps at a depth.
    fn share(depths: &[usize], depth: usize) -> f64 {
        depths.iter().filter(|&&d| d == depth).count() as f64 / depths.len() as f64
    }

    #[test]
    fn it_settles_at_the_best_depth_of_every_batch_size() {
        // A row costs much in a large batch and little in a small one.
        let time = |batch: usize| move |k: usize| 0.010 + 0.002 * k as f64 + 0.000_06 * (batch * (1 + k)) as f64;
        let mut seen = std::collections::BTreeSet::new();
        for (batch, stands) in [(1, 0.9), (1, 0.1), (8, 0.7), (64, 0.5), (256, 0.5), (256, 0.1)] {
            let rate = rate(stands, time(batch));
            let best = (0..=4).max_by(|&a, &b| rate(a).total_cmp(&rate(b))).unwrap();
            let mut run = Run::new(4);
            run.go(5.0, batch, stands, time(batch));
            let depths = run.go(20.0, batch, stands, time(batch)).to_vec();
            // Depths that are nearly as good are no reason to change; none that is worse may be kept.
            let most = (0..=4).max_by(|&a, &b| share(&depths, a).total_cmp(&share(&depths, b))).unwrap();
            assert!(share(&depths, most) > 0.9, "batch {batch}, acceptance {stands}: settles");
            assert!(rate(most) > 0.95 * rate(best), "batch {batch}, acceptance {stands}: at {most}, best is {best}");
            seen.insert(most);
        }
        assert!(seen.contains(&0) && seen.contains(&4) && seen.len() > 2, "the cases differ: {seen:?}");
    }

    #[test]
    fn a_small_gain_is_no_reason_to_change() {
        // Of 64 sequences 38 accept one draft and 23 of them two, always. Depth 1 is 1 % better than depth 2 at first, and
        // 1 % worse later; times waver by another.
        let stood = |_, sequence: usize| usize::from(sequence < 38) + usize::from(sequence < 23);
        let even = [1.0, 1.0 + 38.0 / 64.0, 1.0 + (38.0 + 23.0) / 64.0].map(|tokens| tokens / 100.0);
        let first = |k: usize| even[k] * [1.2, 1.0, 1.01][k];
        let later = |k: usize| even[k] * [1.2, 1.0, 0.99][k];
        let mut run = Run::new(2);
        run.go_by(5.0, 64, first, stood);
        assert_eq!(run.controller.batches[&64].depth, 1);
        for _ in 0..5 {
            run.go_by(40.0, 64, later, stood);
            assert_eq!(run.controller.batches[&64].depth, 1);
            run.go_by(40.0, 64, first, stood);
            assert_eq!(run.controller.batches[&64].depth, 1);
        }
        run.go_by(40.0, 64, |k| later(k) * [1.0, 1.0, 0.95][k], stood);
        assert_eq!(run.controller.batches[&64].depth, 2, "a greater gain is one");
    }

    #[test]
    fn drafts_come_back_after_they_were_switched_off() {
        let time = |k: usize| 0.010 + 0.003 * k as f64;
        for batch in [1, 16] {
            let mut run = Run::new(3);
            run.go(20.0, batch, 0.9, time);
            assert_eq!(run.controller.batches[&batch].depth, 3);
            run.go(40.0, batch, 0.02, time);
            assert!(share(run.go(15.0, batch, 0.02, time), 0) > 0.6, "useless drafts are switched off");
            assert_eq!(run.controller.batches[&batch].depth, 0);
            run.go(35.0, batch, 0.9, time);
            assert!(share(run.go(20.0, batch, 0.9, time), 3) > 0.8, "a sweep finds that they are good again");
        }
    }

    #[test]
    fn sweeps_come_every_thirty_seconds_from_depth_0_and_cost_little() {
        let time = |k: usize| 0.010 + 0.001 * k as f64;
        let mut run = Run::new(2);
        run.go(2.0, 8, 0.9, time);
        assert_eq!(run.controller.batches[&8].depth, 2);
        let depths = run.go(60.0, 8, 0.9, time);
        let sweeps = depths.windows(2).filter(|w| w[0] == 2 && w[1] == 0).count();
        assert_eq!(sweeps, 2, "62 seconds hold the first sweep and two more");
        assert!(share(depths, 2) > 0.99);
    }

    #[test]
    fn a_sweep_of_cold_steps_is_repeated_once_they_are_warm() {
        let time = |k: usize| 0.001 * (1.0 + 0.6 * k as f64);
        let mut run = Run::new(2);
        for pause in [0.0, 5.0, 100.0] {
            run.now += pause;
            let begun = run.depths.len();
            // The first steps take three times as long, and less from one to the next.
            for part in 0..60 {
                let slow = 3.0 - part as f64 / 30.0;
                run.go(0.003, 1, 0.5, |k| slow * time(k));
            }
            if pause > 0.0 {
                let cold = &run.depths[begun..];
                assert!(
                    cold.iter().all(|&depth| depth == 0),
                    "no sweep begins with cold steps when something is known"
                );
            } else {
                assert_ne!(run.controller.batches[&1].depth, 0, "cold steps mislead");
            }
            run.go(1.0, 1, 0.5, time);
            assert!(share(run.go(3.0, 1, 0.5, time), 0) > 0.9);
        }
    }

    #[test]
    fn a_slower_machine_is_no_reason_to_change() {
        let time = |k: usize| 0.010 * (1.0 + 0.4 * k as f64);
        let mut run = Run::new(3);
        run.go(10.0, 4, 0.5, time);
        assert_eq!(run.controller.batches[&4].depth, 1);
        assert!(run.go(10.0, 4, 0.5, |k| 1.5 * time(k)).iter().all(|&depth| depth == 1));
        assert!(run.go(5.0, 4, 0.5, time).iter().all(|&depth| depth == 1));
    }

    #[test]
    fn batch_sizes_that_alternate_do_not_hold_a_sweep_up() {
        let mut controller = DepthController::new(3);
        let mut now = 0.0;
        for step in 0..2000 {
            let batch = if step % 2 == 0 { 8 } else { 9 };
            let depth = controller.depth(batch, now);
            (0..batch).for_each(|_| controller.record(depth, depth));
            now += 0.01;
            controller.observe(batch, depth, 0.01, now);
        }
        assert!(controller.batches.values().all(|batch| batch.sweep.is_none() && batch.depth == 3));
    }

    #[test]
    fn tables_hold_their_depth_over_gaps() {
        let table = DepthTable::new(vec![[2, 8, 3], [16, 64, 2], [65, 128, 0]]).unwrap();
        let depths = [(1, 3), (2, 3), (8, 3), (12, 3), (16, 2), (64, 2), (65, 0), (1000, 0)];
        assert!(depths.iter().all(|&(batch, depth)| table.depth(batch) == depth));
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(text, "[[2,8,3],[16,64,2],[65,128,0]]");
        assert_eq!(serde_json::from_str::<DepthTable>(&text).unwrap(), table);
        for bad in [vec![], vec![[3, 2, 1]], vec![[1, 4, 1], [4, 8, 1]], vec![[5, 8, 1], [1, 2, 1]]] {
            assert!(DepthTable::new(bad).is_err());
        }
        assert!(DepthControl::new(DepthPolicy::Table(table.clone()), 2).is_err());
        let mut control = DepthControl::new(DepthPolicy::Table(table), 3).unwrap();
        assert_eq!(control.depth(20, 0.0), 2);
        assert_eq!(DepthControl::new(DepthPolicy::Fixed, 3).unwrap().depth(500, 0.0), 3);
    }
}
