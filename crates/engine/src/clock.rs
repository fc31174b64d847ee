//! The engine's clock: seconds since loading, read at fixed places, so that a recorded run can be given the same readings.

use std::{collections::VecDeque, time::Instant};

/// Where readings come from.
#[derive(Debug)]
pub(crate) struct Clock {
    source: Source,
    /// Readings since they were last taken, when they are kept.
    readings: Option<Vec<f64>>,
}

#[derive(Debug)]
enum Source {
    Real(Instant),
    /// Readings of a recorded run, then the last one for ever.
    Recorded {
        ahead: VecDeque<f64>,
        last: f64,
    },
}

impl Clock {
    /// A clock that starts now.
    pub(crate) fn real() -> Self {
        Self { source: Source::Real(Instant::now()), readings: None }
    }

    /// A clock without readings, which [`Clock::feed`] gives it.
    pub(crate) fn recorded() -> Self {
        Self { source: Source::Recorded { ahead: VecDeque::new(), last: 0.0 }, readings: None }
    }

    /// Adds readings to those of a recorded run.
    pub(crate) fn feed(&mut self, readings: impl IntoIterator<Item = f64>) {
        if let Source::Recorded { ahead, .. } = &mut self.source {
            ahead.extend(readings);
        }
    }

    /// Keeps readings from now on.
    pub(crate) fn keep(&mut self) {
        self.readings = Some(Vec::new());
    }

    /// Takes the readings kept since the last call.
    pub(crate) fn take(&mut self) -> Vec<f64> {
        self.readings.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Seconds since loading.
    pub(crate) fn read(&mut self) -> f64 {
        let now = match &mut self.source {
            Source::Real(began) => began.elapsed().as_secs_f64(),
            Source::Recorded { ahead, last } => {
                *last = ahead.pop_front().unwrap_or(*last);
                *last
            }
        };
        if let Some(readings) = &mut self.readings {
            readings.push(now);
        }
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_clock_repeats_its_readings() {
        let mut clock = Clock::recorded();
        clock.feed([1.5, 2.5]);
        clock.keep();
        assert_eq!([clock.read(), clock.read(), clock.read()].map(f64::to_bits), [1.5, 2.5, 2.5].map(f64::to_bits));
        assert_eq!(clock.take().len(), 3);
        assert!(clock.take().is_empty());
    }
}
