//! When requests arrive.
//!
//! At an infinite rate all arrive at once. Else the gaps are gamma distributed with shape `burstiness` and the mean of the
//! rate (1 is a Poisson process, less is burstier, infinity is a metronome); without a ramp the whole is stretched to end
//! at exactly `count / rate`, so that seeds do not move the load.

use super::error::ServeBenchError;
use super::random::Mersenne;

/// How the rate grows over a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RampShape {
    /// By equal steps.
    Linear,
    /// By equal factors.
    Exponential,
}

/// A growing rate, in requests a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ramp {
    /// How it grows.
    pub shape: RampShape,
    /// Of the first request.
    pub from: f64,
    /// Of the last request.
    pub to: f64,
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// Requests a second; infinite sends all at once.
    pub rate: f64,
    /// Shape of the gaps' distribution.
    pub burstiness: f64,
    /// Replaces the rate.
    pub ramp: Option<Ramp>,
}

impl Traffic {
    /// Everything at once.
    pub const AT_ONCE: Self = Self { rate: f64::INFINITY, burstiness: 1.0, ramp: None };

    /// Whether this can be.
    ///
    /// # Errors
    /// [`ServeBenchError::Flag`].
    pub fn check(&self) -> Result<(), ServeBenchError> {
        if self.rate.is_nan() || self.rate <= 0.0 {
            let problem = format!("{} is not a number of requests a second; use inf to send all at once", self.rate);
            return Err(ServeBenchError::flag("--request-rate", problem));
        }
        if self.burstiness.is_nan() || self.burstiness <= 0.0 {
            let problem = format!("{} is not above 0; 1 is a Poisson process", self.burstiness);
            return Err(ServeBenchError::flag("--burstiness", problem));
        }
        let Some(ramp) = self.ramp else { return Ok(()) };
        if self.rate.is_finite() {
            let problem = "leave it out beside --ramp-up-strategy, which sets the rate";
            return Err(ServeBenchError::flag("--request-rate", problem));
        }
        let rises = ramp.from > 0.0 && ramp.to >= ramp.from && ramp.to.is_finite();
        if !rises {
            let problem = format!(
                "from {} to {} requests a second; expected a rate above 0 and one that is not smaller",
                ramp.from, ramp.to
            );
            return Err(ServeBenchError::flag("--ramp-up-start-rps", problem));
        }
        Ok(())
    }

    /// Seconds after the start at which each of `count` requests arrives.
    #[must_use]
    pub fn times(&self, count: usize, generator: &mut Mersenne) -> Vec<f64> {
        let mut now = 0.0;
        let mut times: Vec<f64> = (0..count)
            .map(|index| {
                now += self.gap(self.rate_at(index, count), generator);
                now
            })
            .collect();
        if self.ramp.is_none() && now > 0.0 {
            let stretch = (count as f64 / self.rate) / now;
            times.iter_mut().for_each(|time| *time *= stretch);
        }
        times
    }

    /// The rate when the request of this index arrives.
    #[must_use]
    pub fn rate_at(&self, index: usize, count: usize) -> f64 {
        let Some(ramp) = self.ramp else { return self.rate };
        let progress = index as f64 / count.saturating_sub(1).max(1) as f64;
        match ramp.shape {
            RampShape::Linear => ramp.from + (ramp.to - ramp.from) * progress,
            RampShape::Exponential => ramp.from * (ramp.to / ramp.from).powf(progress),
        }
    }

    fn gap(&self, rate: f64, generator: &mut Mersenne) -> f64 {
        if rate.is_infinite() {
            0.0
        } else if self.burstiness.is_infinite() {
            1.0 / rate
        } else {
            generator.gamma(self.burstiness, 1.0 / (rate * self.burstiness))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: &[f64], wanted: &[f64]) {
        assert_eq!(found.len(), wanted.len());
        assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}");
    }

    #[test]
    fn times_are_those_of_the_established_tool() {
        let times = |burstiness| Traffic { rate: 4.0, burstiness, ramp: None }.times(5, &mut Mersenne::numpy(0));
        close(&times(1.0), &[0.2306466500154486, 0.594618884530151, 0.8621715245662005, 1.090304611890903, 1.25]);
        close(&times(0.5), &[0.19660228914342684, 0.44123592001359624, 0.557310346948784, 0.6811448110156341, 1.25]);
        close(&times(3.0), &[0.3997272246854467, 0.6008047036912412, 1.0194512747866493, 1.100953919607937, 1.25]);
        close(&times(f64::INFINITY), &[0.25, 0.5, 0.75, 1.0, 1.25]);
        close(&Traffic::AT_ONCE.times(3, &mut Mersenne::numpy(0)), &[0.0; 3]);
    }

    #[test]
    fn ramps_rise_from_the_first_to_the_last_request() {
        let ramp = |shape| Traffic { ramp: Some(Ramp { shape, from: 1.0, to: 9.0 }), ..Traffic::AT_ONCE };
        let rates = |shape| (0..3).map(|index| ramp(shape).rate_at(index, 3)).collect::<Vec<_>>();
        close(&rates(RampShape::Linear), &[1.0, 5.0, 9.0]);
        close(&rates(RampShape::Exponential), &[1.0, 3.0, 9.0]);
        let even = Traffic { burstiness: f64::INFINITY, ..ramp(RampShape::Linear) };
        close(&even.times(3, &mut Mersenne::numpy(0)), &[1.0, 1.2, 1.2 + 1.0 / 9.0]);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let ramp = Some(Ramp { shape: RampShape::Exponential, from: 0.0, to: 3.0 });
        for (traffic, flag) in [
            (Traffic { rate: 0.0, ..Traffic::AT_ONCE }, "--request-rate"),
            (Traffic { rate: f64::NAN, ..Traffic::AT_ONCE }, "--request-rate"),
            (Traffic { burstiness: 0.0, ..Traffic::AT_ONCE }, "--burstiness"),
            (Traffic { ramp, ..Traffic::AT_ONCE }, "--ramp-up-start-rps"),
            (Traffic { rate: 2.0, ramp, ..Traffic::AT_ONCE }, "--request-rate"),
        ] {
            assert!(traffic.check().unwrap_err().to_string().starts_with(flag), "{traffic:?}");
        }
    }
}
