//! An inspection as a page of text.

use std::fmt::{self, Write as _};

use super::{GroupSummary, Inspection, Storage};

/// Problems shown on a page; the JSON form holds all.
const SHOWN_PROBLEMS: usize = 20;

impl Inspection {
    /// The readable form.
    pub fn to_text(&self) -> String {
        let mut page = String::new();
        self.write(&mut page).expect("writing to a string cannot fail");
        page
    }

    fn write(&self, page: &mut String) -> fmt::Result {
        let m = &self.model;
        let storage = match self.storage {
            Storage::Bf16 => "BF16",
            Storage::Fp8 => "FP8 with block scales (read as BF16)",
            Storage::W4a16 => "W4A16 (routed experts INT4, the rest as in the source)",
        };
        writeln!(page, "{}", self.subject)?;
        let origin =
            if self.stored { format!("{} shards", self.shards) } else { "derived from config.json".to_owned() };
        writeln!(page, "  storage     {storage}, {origin}")?;
        let (parameters, active) = (billions(m.parameters), billions(m.active_parameters));
        writeln!(page, "  parameters  {parameters} in all, {active} met by a token in the layers")?;
        writeln!(
            page,
            "  layers      {}: {} linear and {} sparse attention; {} dense and {} expert MLPs; {} MTP",
            m.layers,
            m.kda_layers,
            m.dsa_layers,
            m.dense_mlp_layers,
            m.layers - m.dense_mlp_layers,
            m.mtp_layers,
        )?;
        writeln!(page, "  residual    {} streams of {}", m.streams, m.hidden_size)?;
        writeln!(
            page,
            "  experts     {} of width {}, {} a token, {} shared",
            m.experts, m.expert_width, m.experts_per_token, m.shared_experts
        )?;
        let shared = match m.shared_indexer_layers {
            0 => String::new(),
            n => format!(", {n} layers share a selection"),
        };
        writeln!(page, "  indexer     {} tokens in pools of {}{shared}", m.index_topk, m.index_kpool)?;
        writeln!(
            page,
            "  text        {} token ids, {} tokens of context, stops at {:?}",
            m.vocab_size, m.context_tokens, m.eos_token_ids
        )?;
        match &m.vision {
            Some(v) => writeln!(
                page,
                "  vision      {} blocks of {}, norm epsilon {:e} ({})",
                v.depth, v.hidden_size, v.block_norm_eps, v.block_norm_eps_origin
            )?,
            None => writeln!(page, "  vision      none")?,
        }
        writeln!(page)?;
        self.write_groups(page)?;
        if let Some(q) = &self.quantized {
            writeln!(
                page,
                "\nquantized: {} matrices, {} weights at {:.3} bits (scales included)",
                grouped(q.matrices),
                billions(q.weights),
                q.bits_per_weight
            )?;
        }
        match self.problems.as_slice() {
            [] if self.stored => writeln!(page, "\nno problems: every tensor is as config.json says"),
            [] => Ok(()),
            problems => {
                let noun = if problems.len() == 1 { "problem" } else { "problems" };
                writeln!(page, "\n{} {noun}:", problems.len())?;
                problems.iter().take(SHOWN_PROBLEMS).try_for_each(|problem| writeln!(page, "  {problem}"))?;
                match problems.len().saturating_sub(SHOWN_PROBLEMS) {
                    0 => Ok(()),
                    more => writeln!(page, "  and {more} more"),
                }
            }
        }
    }

    fn write_groups(&self, page: &mut String) -> fmt::Result {
        let row = |page: &mut String, name: &str, tensors: &str, bytes: &str, size: &str, rest: &str| {
            writeln!(page, "{}", format!("{name:<28} {tensors:>9} {bytes:>19} {size:>12}  {rest}").trim_end())
        };
        row(page, "group", "tensors", "bytes", "size", "types")?;
        for g in &self.groups {
            let GroupSummary { description, tensors, bytes, dtypes, .. } = g;
            let types: Vec<String> = dtypes.iter().map(|(dtype, n)| format!("{dtype} {}", grouped(*n))).collect();
            row(page, description, &grouped(*tensors), &grouped(*bytes), &binary(*bytes), &types.join(", "))?;
        }
        row(page, "total", &grouped(self.tensors), &grouped(self.bytes), &binary(self.bytes), "")
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text())
    }
}

/// Digits in groups of three.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn billions(n: u64) -> String {
    if n >= 1_000_000_000 { format!("{:.2} billion", n as f64 / 1e9) } else { format!("{:.2} million", n as f64 / 1e6) }
}

fn binary(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{:.1} KiB", bytes as f64 / f64::from(1 << 10)),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_in_groups() {
        assert_eq!([0, 999, 1000, 642_646_653_816].map(grouped), ["0", "999", "1,000", "642,646,653,816"]);
    }
}
