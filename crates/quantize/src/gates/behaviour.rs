//! G17: the artifact behaves like its source. The figures come from whoever can run the model.

use std::time::Instant;

use super::verdict::{GateId::G17, Ledger, Status, Verdict};

/// Largest difference of draft acceptance between artifact and source: 2 points.
const MAX_ACCEPTANCE_LOSS: f64 = 0.02;

/// What running artifact and source on the same tokens gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Behaviour {
    /// Mean divergence (KL, nats a token) of the artifact's next-token distribution from the source's.
    pub divergence: f64,
    /// The divergence that is still accepted for this model.
    pub divergence_bound: f64,
    /// Share of accepted MTP drafts with the artifact as the target, by draft position from 0 to 1.
    pub acceptance: Vec<f64>,
    /// The same with the source as the target.
    pub source_acceptance: Vec<f64>,
}

impl Verdict {
    /// Judges G17, which [`super::verify`] leaves open, by the figures of `run`. An error of the run fails the gate too: an artifact that
    /// cannot be run is not proved to behave.
    pub fn judge_behaviour(&mut self, run: impl FnOnce() -> Result<Behaviour, String>) {
        let start = Instant::now();
        let mut ledger = Ledger::new();
        match run() {
            Ok(behaviour) => judge(&mut ledger, &behaviour),
            Err(e) => ledger.field(G17, "run", format!("expected figures, found {e}"), "mend what stopped the run"),
        }
        ledger.spend(G17, start.elapsed());
        let judged = ledger.finish().into_iter().find(|g| g.id == G17);
        if let (Some(gate), Some(judged)) = (self.gates.iter_mut().find(|g| g.id == G17), judged) {
            *gate = judged;
        }
        self.passed = self.gates.iter().all(|g| g.status != Status::Fail);
        self.seconds += start.elapsed().as_secs_f64();
    }
}

fn judge(ledger: &mut Ledger, behaviour: &Behaviour) {
    let remedy = "compare layer by layer with the source; quantize again with more calibration data";
    let Behaviour { divergence, divergence_bound, acceptance, source_acceptance } = behaviour;
    let mut good = 0;
    if divergence <= divergence_bound {
        good += 1;
    } else {
        let found = format!("expected at most {divergence_bound:.3e} nats a token, found {divergence:.3e}");
        ledger.field(G17, "divergence from the source", found, remedy);
    }
    if acceptance.len() != source_acceptance.len() {
        let found = format!("expected {} positions, found {}", source_acceptance.len(), acceptance.len());
        ledger.field(G17, "acceptance of drafts", found, "measure both with the same number of drafts");
    }
    for (position, (ours, theirs)) in acceptance.iter().zip(source_acceptance).enumerate() {
        if (ours - theirs).abs() <= MAX_ACCEPTANCE_LOSS {
            good += 1;
            continue;
        }
        let found = format!("expected {theirs:.3} within {MAX_ACCEPTANCE_LOSS}, found {ours:.3}");
        ledger.field(G17, &format!("acceptance of drafts, position {position}"), found, remedy);
    }
    ledger.count(G17, good, 1 + source_acceptance.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gates::GateReport;

    fn verdict() -> Verdict {
        let mut ledger = Ledger::new();
        ledger.skip(G17, "needs a run of the model");
        let gates: Vec<GateReport> = ledger.finish();
        Verdict { artifact: "dir".into(), source: None, passed: true, gates, seconds: 0.0 }
    }

    fn behaviour() -> Behaviour {
        Behaviour {
            divergence: 3e-4,
            divergence_bound: 4e-4,
            acceptance: vec![0.80, 0.61],
            source_acceptance: vec![0.81, 0.60],
        }
    }

    fn failed(behaviour: Result<Behaviour, String>) -> bool {
        let mut verdict = verdict();
        verdict.judge_behaviour(|| behaviour);
        assert_eq!(verdict.passed, verdict.failed().is_empty());
        verdict.failed() == [G17]
    }

    #[test]
    fn behaviour_is_bounded_in_each_figure() {
        let mut good = verdict();
        good.judge_behaviour(|| Ok(behaviour()));
        assert_eq!(good.gate(G17).map(|g| (g.status, g.counted, g.expected)), Some((Status::Pass, 3, 3)));
        assert!(failed(Ok(Behaviour { divergence: 5e-4, ..behaviour() })));
        assert!(failed(Ok(Behaviour { divergence: f64::NAN, ..behaviour() })));
        assert!(failed(Ok(Behaviour { acceptance: vec![0.80, 0.57], ..behaviour() })));
        assert!(failed(Ok(Behaviour { acceptance: vec![0.80], ..behaviour() })));
        assert!(failed(Err("out of memory".to_owned())));
    }
}
