//! The demo's report as a page for people.

use glimmer_quantize::gates::Status;
use glimmer_text::python_json;
use serde_json::Value;

use super::{DemoAnswer, DemoReport};
use crate::kld::KLD_CAP;
use crate::report::{divergence_table, pair_table};

impl DemoReport {
    /// The report as a page for people.
    #[must_use]
    pub fn page(&self) -> String {
        let mut page = Vec::new();
        let q = &self.quantize;
        page.push(format!(
            "QUANTIZED  {} expert matrices to 4 bits in {:.1} s, calibrated on {} tokens; everything else is byte for byte the source's.",
            q.matrices, q.seconds, q.tokens
        ));
        let judged = self.verify.verdict.gates.iter().filter(|gate| gate.status != Status::Skipped).count();
        let verdict = if self.verify.passed { "passes" } else { "FAILS" };
        page.push(format!("VERIFIED   The artifact {verdict}: {judged} gates judged in {:.1} s.", self.verify.seconds));
        if !self.verify.passed {
            page.push(self.verify.verdict.to_string());
        }
        page.push("EVALUATED  Right answers in percent, before and after:".to_owned());
        page.push(pair_table(&self.tasks));
        let k = &self.kld;
        page.push(format!(
            "DIVERGENCE From the BF16 model over {} tokens, in nats a token (each capped at {KLD_CAP}):",
            k.default_detail.tokens
        ));
        page.push(divergence_table(&[
            ("this recipe", &k.default_detail),
            ("llm-compressor's defaults", &k.parity_detail),
        ]));
        let rates: Vec<String> = self.mtp.acceptance.iter().map(|rate| format!("{:.1} %", 100.0 * rate)).collect();
        page.push(format!(
            "DRAFTS     The draft layer's tokens are accepted at {} by position: {:.2} tokens a step.",
            rates.join(", "),
            self.mtp.mean_length
        ));
        page.push("ANSWERS    Of the quantized model:".to_owned());
        page.extend(self.answers.iter().map(answer_text));
        page.push(format!("Done in {:.1} s.", self.seconds));
        page.join("\n\n")
    }
}

fn answer_text(answer: &DemoAnswer) -> String {
    let mut lines = vec![format!("  question   {}{}", if answer.picture { "[picture] " } else { "" }, answer.question)];
    if !answer.tools.is_empty() {
        lines.push(format!("  tools      {}", answer.tools.join(", ")));
    }
    if let Some(reasoning) = &answer.reasoning {
        lines.push(format!("  reasoning  {reasoning}"));
    }
    for call in &answer.calls {
        lines.push(format!("  calls      {}({})", call.name, python_json(&Value::Object(call.arguments.clone()))));
    }
    if let Some(content) = &answer.content {
        lines.push(format!("  answer     {content}"));
    }
    let right = if answer.right { "right" } else { "wrong, expected" };
    let expected = if answer.right { String::new() } else { format!(" {}", python_json(&answer.expected)) };
    lines.push(format!("             ({right}{expected})"));
    lines.join("\n")
}
