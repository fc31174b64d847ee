//! Means, deviations and percentiles of samples in f64.

/// A sorted sample.
#[derive(Clone, Debug, Default)]
pub struct Sample(Vec<f64>);

impl Sample {
    /// Sorts a sample; what is not a number is left out.
    #[must_use]
    pub fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// Size of the sample.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Least value; 0 of nothing.
    #[must_use]
    pub fn min(&self) -> f64 {
        self.0.first().copied().unwrap_or(0.0)
    }

    /// Greatest value; 0 of nothing.
    #[must_use]
    pub fn max(&self) -> f64 {
        self.0.last().copied().unwrap_or(0.0)
    }

    /// Mean; 0 of nothing.
    #[must_use]
    pub fn mean(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.iter().sum::<f64>() / self.0.len() as f64 }
    }

    /// Standard deviation of the sample as a population; 0 of nothing.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        Self(self.0.iter().map(|value| (value - mean) * (value - mean)).collect()).mean().sqrt()
    }

    /// Percentile by linear interpolation between the two nearest ranks, the first of which is 0; 0 of nothing.
    #[must_use]
    pub fn percentile(&self, percent: f64) -> f64 {
        let Some(last) = self.0.len().checked_sub(1) else { return 0.0 };
        let place = (percent / 100.0).clamp(0.0, 1.0) * last as f64;
        let (low, part) = (place.floor() as usize, place.fract());
        let high = (low + 1).min(last);
        self.0[low] + (self.0[high] - self.0[low]) * part
    }

    /// The value in the middle, or the mean of the two.
    #[must_use]
    pub fn median(&self) -> f64 {
        self.percentile(50.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_deviation_are_numpys() {
        let sample = Sample::new([0.011, 0.5, 0.02, 0.333, 0.07, f64::NAN]);
        let close = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-15, "{found} {wanted}");
        for (percent, wanted) in [(50.0, 0.07), (90.0, 0.4332), (99.0, 0.49332), (99.9, 0.499332), (100.0, 0.5)] {
            close(sample.percentile(percent), wanted);
        }
        close(sample.deviation(), 0.19587690011841621);
        close(Sample::default().percentile(99.0) + Sample::default().mean() + Sample::default().deviation(), 0.0);
        close(Sample::new([1.0, 2.0]).median(), 1.5);
    }
}
