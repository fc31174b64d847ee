//! The server's own counters, read before and after a run.

use std::collections::BTreeMap;

use super::client::Client;

/// What `/metrics` says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    /// Counters of speculation; none if the server has none.
    pub speculation: Option<Speculation>,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: f64,
    /// Prompt tokens found there.
    pub prefix_hits: f64,
    /// Answers that the server has finished: falls when the server is another one.
    pub finished: f64,
    /// When the server's process started, in seconds since 1970, where it says so.
    pub started: Option<f64>,
}

/// Counters of speculative decoding.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speculation {
    /// Verified drafts.
    pub drafts: f64,
    /// Tokens in them.
    pub draft_tokens: f64,
    /// Accepted ones.
    pub accepted: f64,
    /// Accepted ones by their place in the draft, from 0.
    pub by_position: BTreeMap<usize, f64>,
}

/// Speculative decoding over a run.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SpeculationRun {
    /// Accepted of drafted tokens, in percent.
    pub acceptance_rate: f64,
    /// Tokens a verification, its own token included.
    pub acceptance_length: f64,
    /// Verified drafts.
    pub drafts: u64,
    /// Tokens in them.
    pub draft_tokens: u64,
    /// Accepted ones.
    pub accepted_tokens: u64,
    /// Share of the drafts that were accepted up to this place.
    pub by_position: Vec<f64>,
}

impl Counters {
    /// Reads `/metrics`; none if the server has no such page.
    pub async fn read(client: &Client) -> Option<Self> {
        client.text("/metrics").await.ok().map(|text| Self::parse(&text))
    }

    /// Reads Prometheus' text format. Several engines' counters are added up.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut counters = Self::default();
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
            let (name, labels, value) = match (line.find('{'), line.rfind('}')) {
                (Some(open), Some(close)) if open < close => {
                    (&line[..open], &line[open + 1..close], line[close + 1..].trim())
                }
                _ => line.split_once(' ').map_or((line, "", ""), |(name, value)| (name, "", value.trim())),
            };
            let Some(value) = value.split(' ').next().and_then(|value| value.parse::<f64>().ok()) else { continue };
            counters.add(name, labels, value);
        }
        counters
    }

    fn add(&mut self, name: &str, labels: &str, value: f64) {
        match name {
            "vllm:prefix_cache_queries_total" => self.prefix_queries += value,
            "vllm:prefix_cache_hits_total" => self.prefix_hits += value,
            "vllm:request_success_total" => self.finished += value,
            "process_start_time_seconds" => self.started = Some(value),
            _ => {}
        }
        let Some(name) = name.strip_prefix("vllm:spec_decode_num_").and_then(|name| name.strip_suffix("_total")) else {
            return;
        };
        let found = self.speculation.get_or_insert_default();
        match name {
            "drafts" => found.drafts += value,
            "draft_tokens" => found.draft_tokens += value,
            "accepted_tokens" => found.accepted += value,
            "accepted_tokens_per_pos" => {
                let position = labels.split("position=\"").nth(1).and_then(|rest| rest.split('"').next());
                if let Some(position) = position.and_then(|text| text.parse().ok()) {
                    *found.by_position.entry(position).or_default() += value;
                }
            }
            _ => {}
        }
    }

    /// Speculation between two readings; none if nothing was drafted in between.
    #[must_use]
    pub fn speculation_since(&self, before: &Self) -> Option<SpeculationRun> {
        let (now, before) = (self.speculation.as_ref()?, before.speculation.as_ref()?);
        let drafts = now.drafts - before.drafts;
        let (drafted, accepted) = (now.draft_tokens - before.draft_tokens, now.accepted - before.accepted);
        if drafted <= 0.0 || drafts <= 0.0 {
            return None;
        }
        let share = |(position, count): (&usize, &f64)| {
            (count - before.by_position.get(position).copied().unwrap_or(0.0)) / drafts
        };
        Some(SpeculationRun {
            acceptance_rate: 100.0 * accepted / drafted,
            acceptance_length: 1.0 + accepted / drafts,
            drafts: drafts as u64,
            draft_tokens: drafted as u64,
            accepted_tokens: accepted.max(0.0) as u64,
            by_position: now.by_position.iter().map(share).collect(),
        })
    }

    /// Share of the prompt tokens between two readings that the prefix cache held; none if none were looked up.
    #[must_use]
    pub fn prefix_hits_since(&self, before: &Self) -> Option<f64> {
        let queries = self.prefix_queries - before.prefix_queries;
        (queries > 0.0).then(|| (self.prefix_hits - before.prefix_hits) / queries)
    }

    /// Whether this can be a later reading of the same process.
    #[must_use]
    pub fn continues(&self, before: &Self) -> bool {
        let same_start = match (self.started, before.started) {
            (Some(now), Some(before)) => (now - before).abs() < 1.0,
            _ => true,
        };
        same_start && self.finished >= before.finished && self.prefix_queries >= before.prefix_queries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "# HELP vllm:spec_decode_num_drafts x\n\
        vllm:spec_decode_num_drafts_total{model_name=\"m } x\",engine=\"0\"} 10.0\n\
        vllm:spec_decode_num_draft_tokens_total{engine=\"0\"} 20\n\
        vllm:spec_decode_num_accepted_tokens_total{engine=\"0\"} 12\n\
        vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"0\"} 8\n\
        vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"1\"} 4\n\
        vllm:spec_decode_num_drafts_created{engine=\"0\"} 1.7e9\n\
        vllm:prefix_cache_queries_total{engine=\"0\"} 100\nvllm:prefix_cache_hits_total{engine=\"0\"} 5\n\
        vllm:request_success_total{finished_reason=\"stop\"} 3\nvllm:request_success_total{finished_reason=\"length\"} 4\n\
        process_start_time_seconds 1.5\n";

    #[test]
    fn a_run_is_the_difference_of_two_readings() {
        let before = Counters::parse(BEFORE);
        assert_eq!((before.finished, before.started), (7.0, Some(1.5)));
        let now = BEFORE.replace("} 10.0", "} 110").replace("} 20\n", "} 220\n").replace("} 12\n", "} 118\n");
        let now =
            now.replace("position=\"0\"} 8", "position=\"0\"} 78").replace("position=\"1\"} 4", "position=\"1\"} 40");
        let now = Counters::parse(&now.replace("} 100\n", "} 300\n").replace("} 5\n", "} 55\n"));
        let run = now.speculation_since(&before).unwrap();
        assert_eq!((run.drafts, run.draft_tokens, run.accepted_tokens), (100, 200, 106));
        assert!((run.acceptance_rate - 53.0).abs() < 1e-12 && (run.acceptance_length - 2.06).abs() < 1e-12);
        assert_eq!(run.by_position, [0.7, 0.36]);
        assert_eq!(now.prefix_hits_since(&before), Some(0.25));
        assert_eq!((now.speculation_since(&now), now.prefix_hits_since(&now)), (None, None));
        assert!(now.continues(&before) && !before.continues(&now));
        assert_eq!(Counters::parse("").speculation, None);
    }
}
