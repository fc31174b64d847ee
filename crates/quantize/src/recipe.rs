//! What a quantization does to the weights: everything that the artifact's bytes depend on besides source and calibration.

use glimmer_checkpoint::IgnoreStyle;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::gptq::{DeadColumns, Order, Settings};
use crate::scales::ScaleRule;

/// How codes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Second-order error compensation over calibration data.
    Gptq,
    /// Round to nearest; no calibration.
    Rtn,
}

/// Which tokens an expert is calibrated on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CalibratedExperts {
    /// Those that the router sends to it.
    Routed,
    /// All.
    All,
}

/// How much a calibration token counts for an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenWeights {
    /// All alike.
    Equal,
    /// By the square of its routing weight: an error of the expert enters the layer's output times that weight. On the micro
    /// model this takes a fifth off the capped divergence.
    Affinity,
}

/// With which gate and up matrices the inputs of a down projection are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DownInputs {
    /// The source's.
    Original,
    /// The quantized ones: what the down projection meets when the artifact runs.
    Quantized,
}

/// The recipe. [`Recipe::default`] is the recommended one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// How codes are found.
    pub method: Method,
    /// Order of the columns.
    pub order: Order,
    /// How scales are chosen.
    pub scales: ScaleRule,
    /// Tokens' worth of the layer's Hessian mixed into each expert's; `None`: as many as the matrix has columns.
    pub shrink: Option<f64>,
    /// Dampening, as a share of the mean diagonal.
    pub damp: f64,
    /// Which tokens an expert is calibrated on.
    pub experts: CalibratedExperts,
    /// How much a token counts; calibration on all tokens knows only equal ones.
    pub weights: TokenWeights,
    /// Columns whose input is always zero.
    pub dead: DeadColumns,
    /// Inputs of down projections.
    pub down_inputs: DownInputs,
    /// How config.json says what is not quantized.
    pub ignore_style: IgnoreStyle,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            method: Method::Gptq,
            order: Order::Static,
            scales: ScaleRule::Imse,
            shrink: None,
            damp: 0.01,
            experts: CalibratedExperts::Routed,
            weights: TokenWeights::Affinity,
            dead: DeadColumns::Keep,
            down_inputs: DownInputs::Quantized,
            ignore_style: IgnoreStyle::Regex,
        }
    }
}

impl Recipe {
    /// What llm-compressor does by default.
    pub fn parity() -> Self {
        Self {
            scales: ScaleRule::Minmax,
            shrink: Some(0.0),
            experts: CalibratedExperts::All,
            weights: TokenWeights::Equal,
            dead: DeadColumns::Zero,
            down_inputs: DownInputs::Original,
            ..Self::default()
        }
    }

    /// Round to nearest over plainly searched scales.
    pub fn rtn() -> Self {
        Self { method: Method::Rtn, ..Self::default() }
    }

    /// Checks the ranges of the numbers.
    ///
    /// # Errors
    /// [`Error::Setting`].
    pub fn validate(&self) -> Result<()> {
        if !(self.damp.is_finite() && (0.0..=1.0).contains(&self.damp)) {
            return Err(Error::Setting { field: "damp", expected: "a share of 0 to 1", found: self.damp.to_string() });
        }
        if let Some(k) = self.shrink.filter(|k| !(k.is_finite() && *k >= 0.0)) {
            return Err(Error::Setting {
                field: "shrink",
                expected: "a number of tokens from 0 up",
                found: k.to_string(),
            });
        }
        Ok(())
    }

    /// Parameters of the solver.
    pub fn settings(&self) -> Settings {
        Settings { order: self.order, damp: self.damp, dead: self.dead }
    }

    /// Tokens' worth of the layer's Hessian for a matrix of `cols` columns.
    pub fn shrink_for(&self, cols: usize) -> f64 {
        match self.experts {
            CalibratedExperts::All => 0.0,
            CalibratedExperts::Routed => self.shrink.unwrap_or(cols as f64),
        }
    }
}
