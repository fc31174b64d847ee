//! The choices behind [`crate::schedule`]: order, pace, lanes, reserves.

use serde::{Deserialize, Serialize};

use crate::EngineError;

/// In which order requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Smaller [`crate::schedule::View::priority`] first, then first come.
    Priority,
}

/// How steps are filled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// Order of requests.
    pub order: Order,
    /// Seconds that a step should take while sequences decode: what is left of them behind decoding goes to prompts.
    /// `None` gives prompts every row.
    pub itl_target: Option<f64>,
    /// Most prompt rows of a step where the target leaves none. Prompts cannot starve: a step may become half longer than the
    /// target (than decoding alone, if that takes longer) for them, and so many rows at most go into that time.
    pub min_quantum: usize,
    /// Prompts with more tokens to compute than this are long.
    pub long_prompt: usize,
    /// Long prompts that advance at once. Several would finish no sooner together, only all of them late.
    pub long_prefills: usize,
    /// Most rows of one long prompt in a step unless it is alone, at least a page; `None` is no limit.
    pub long_prefill_tokens: Option<usize>,
    /// Share of all pages that admission leaves free for sequences to grow into.
    pub watermark: f64,
    /// While sequences decode, prompts are admitted and advance only in every so many-th step.
    pub interval: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            order: Order::Fcfs,
            itl_target: Some(0.1),
            min_quantum: 512,
            long_prompt: 8192,
            long_prefills: 1,
            long_prefill_tokens: None,
            watermark: 0.01,
            interval: 1,
        }
    }
}

impl Policy {
    /// Checks the choices.
    ///
    /// # Errors
    /// [`EngineError::Setting`] names the first one that cannot work.
    pub fn validate(&self) -> Result<(), EngineError> {
        let bad = |setting, expected: &str, found: String| {
            Err(EngineError::Setting { setting, expected: expected.to_owned(), found })
        };
        if let Some(target) = self.itl_target.filter(|t| !(*t > 0.0 && t.is_finite())) {
            return bad("itl_target", "more than 0 seconds, or none", target.to_string());
        }
        if self.min_quantum == 0 {
            return bad("min_quantum", "at least one row", "0".to_owned());
        }
        if self.long_prefills == 0 {
            return bad("long_prefills", "at least one", "0".to_owned());
        }
        if self.long_prefill_tokens == Some(0) {
            return bad("long_prefill_tokens", "at least one row, or none", "0".to_owned());
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return bad("watermark", "a share of the pages, 0 or more and less than 1", self.watermark.to_string());
        }
        if self.interval == 0 {
            return bad("interval", "at least 1 step", "0".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_works_and_each_bad_choice_is_named() {
        assert!(Policy::default().validate().is_ok());
        let refused = |name: &str, damage: fn(&mut Policy)| {
            let mut policy = Policy::default();
            damage(&mut policy);
            let message = policy.validate().unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}`")), "{message}");
        };
        refused("itl_target", |p| p.itl_target = Some(0.0));
        refused("itl_target", |p| p.itl_target = Some(f64::NAN));
        refused("min_quantum", |p| p.min_quantum = 0);
        refused("long_prefills", |p| p.long_prefills = 0);
        refused("long_prefill_tokens", |p| p.long_prefill_tokens = Some(0));
        refused("watermark", |p| p.watermark = 1.0);
        refused("watermark", |p| p.watermark = f64::NAN);
        refused("interval", |p| p.interval = 0);
    }
}
