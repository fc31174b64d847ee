//! From what the scheduler decided to the [`Step`] that the model runs: tokens, segments, page tables, wanted logits and
//! features of every row. Pure: sequences and a decision in, plan out.
//!
//! A row wants logits when it is the newest known token's, a draft's, or one of a prompt whose log-probabilities were asked
//! for.

use glimmer_tensor::{FeatureRow, Segment, Step};

use crate::{
    schedule::{Decision, Work},
    sequence::{Cursor, Phase, Sequence},
};

/// Rows of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Index among the running sequences.
    pub index: usize,
    /// First row in the step.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Drafts among the rows (all but the first row of a decoding sequence).
    pub drafts: usize,
    /// Index of the first wanted logits among those of the step.
    pub logits: usize,
    /// Number of wanted logits: the last rows.
    pub wanted: usize,
    /// The newest known token is among the rows: its row and those of the drafts decide about tokens.
    pub newest: bool,
    /// The rows score the prompt.
    pub scored: bool,
}

impl Entry {
    /// Index of the newest known token's logits among those of the step; those of the drafts follow.
    pub fn first(&self) -> usize {
        self.logits + self.wanted - 1 - self.drafts
    }
}

/// A step and what its rows are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The step.
    pub step: Step,
    /// Its sequences, in row order.
    pub entries: Vec<Entry>,
    /// For each row of the feature buffer: running sequence and row of its features.
    pub features: Vec<(usize, usize)>,
}

impl Plan {
    /// The step that does the decision's work. The sequences of [`Decision::admit`] run by now, those of
    /// [`Decision::preempt`] no longer do, and every page table covers [`Work::pages_after`] pages; work of a sequence that
    /// is not there is left out.
    pub fn build(decision: &Decision, sequences: &[Sequence]) -> Self {
        let mut plan = Self::default();
        let mut cursor = Cursor::default();
        for work in &decision.work {
            if let Some(index) = cursor.find(sequences, work.id) {
                plan.add(index, &sequences[index], work);
            }
        }
        plan
    }

    /// Rows of prompts and rows of decoding sequences.
    pub fn rows_by_kind(&self, sequences: &[Sequence]) -> (usize, usize) {
        let mut kinds = (0, 0);
        for entry in &self.entries {
            match sequences[entry.index].phase {
                Phase::Prefill => kinds.0 += entry.rows,
                _ => kinds.1 += entry.rows,
            }
        }
        kinds
    }
}

impl Plan {
    fn add(&mut self, index: usize, sequence: &Sequence, work: &Work) {
        let Some((slot, pages)) = sequence.place() else { return };
        let step = &mut self.step;
        let (rows, drafts) = (work.rows, work.drafts);
        let (row, position) = (step.rows(), sequence.computed);
        let known = (rows - drafts).min(sequence.tokens.len() - position);
        step.tokens.extend(&sequence.tokens[position..position + known]);
        step.tokens.extend(sequence.drafts[..drafts].iter().map(|d| d.token));
        step.segments.push(Segment {
            slot,
            position: position as u32,
            rows: rows as u32,
            fold: sequence.fold as u32,
            commit: (rows - drafts) as u32,
            first_page: step.pages.len() as u32,
            pages: pages.len() as u32,
        });
        step.pages.extend(pages);

        let first = sequence.placeholders.partition_point(|&p| p < position);
        let last = sequence.placeholders.partition_point(|&p| p < position + known);
        for (feature, place) in (first..last).zip(&sequence.placeholders[first..last]) {
            step.features
                .push(FeatureRow { row: (row + place - position) as u32, feature: self.features.len() as u32 });
            self.features.push((index, feature));
        }

        let newest = (known > 0 && position + known == sequence.tokens.len()).then(|| row + known - 1);
        let wanted = if work.scored { Some(row) } else { newest };
        let start = step.logits.len();
        if let Some(first) = wanted {
            step.logits.extend((first..row + rows).map(|r| r as u32));
        }
        let wanted = step.logits.len() - start;
        let (newest, scored) = (newest.is_some(), work.scored);
        self.entries.push(Entry { index, row, rows, drafts, logits: start, wanted, newest, scored });
    }
}

#[cfg(test)]
mod tests {
    use glimmer_tensor::{CacheShape, PAGE_TOKENS};

    use super::*;
    use crate::{
        Request, SequenceId,
        policy::Policy,
        pools::{PageTable, Pools, need},
        rates::Rates,
        rows::{Answer, AnswerRules},
        schedule::{Resources, Views},
        sequence::Place,
        speculate::Draft,
    };

    const SLOTS: usize = 6;
    const DEPTH: usize = 3;
    const CONTEXT: usize = 400;

    fn shape() -> CacheShape {
        CacheShape {
            kda_layers: 1,
            kda_heads: 1,
            kda_head_dim: 8,
            conv_kernel: 4,
            dsa_layers: 1,
            latent: 8,
            index_dim: 8,
            kpool: 4,
            slots: SLOTS,
            pages: SLOTS * CONTEXT.div_ceil(PAGE_TOKENS),
            max_draft: DEPTH,
        }
    }

    /// A sequence of `prompt` tokens, every third one a picture's, of which `computed` are done, or with `output` tokens.
    fn sequence(pools: &Pools, prompt: usize, computed: usize, output: usize, drafts: usize) -> Sequence {
        let tokens: Vec<u32> = (0..(prompt + output) as u32).collect();
        let decoding = output > 0;
        let fold = if decoding { DEPTH.min(output - 1) } else { 0 };
        let request = Request::new(tokens[..prompt].to_vec(), (CONTEXT - prompt) as u32);
        let rules = AnswerRules { vocabulary: 1 << 16, context: CONTEXT, end_tokens: Vec::new(), reasoning_end: None };
        let answer = Answer::new(&request, &rules, None).unwrap();
        let mut table = PageTable::default();
        assert!(table.grow(pools, need(CONTEXT).pages));
        Sequence {
            place: Some(Place { slot: pools.slot().unwrap(), table }),
            computed: if decoding { prompt + output - 1 } else { computed },
            fold,
            drafts: (0..drafts as u32).map(|i| Draft { token: 9000 + i, drawn_from: None }).collect(),
            depth: DEPTH,
            phase: if decoding { Phase::Decode } else { Phase::Prefill },
            placeholders: (0..prompt).step_by(3).collect(),
            tokens,
            ..Sequence::new(SequenceId(prompt as u64), request, answer, 0.0)
        }
    }

    /// The plan of up to `rows` rows for sequences that hold all their pages and came in their order.
    fn schedule(running: &mut [Sequence], rows: usize) -> Plan {
        running.iter_mut().zip(0..).for_each(|(sequence, id)| sequence.id = SequenceId(id));
        let views: Vec<_> = running.iter().map(|sequence| sequence.view((0, 0), rows)).collect();
        let resources = Resources {
            rows,
            logits: SLOTS * (DEPTH + 1),
            free_slots: 0,
            free_pages: 0,
            all_pages: shape().pages,
            sequences: SLOTS,
            step: 0,
        };
        let (views, policy) =
            (Views { running: &views, waiting: &[] }, Policy { itl_target: None, ..Policy::default() });
        Plan::build(&crate::schedule::schedule(&views, &resources, &policy, &Rates::default(), 0.0), running)
    }

    #[test]
    fn decoding_rows_come_first_and_prompts_share_the_rest() {
        let pools = Pools::new(SLOTS, 0, shape().pages);
        let mut running =
            [sequence(&pools, 300, 0, 0, 0), sequence(&pools, 20, 0, 5, 2), sequence(&pools, 10, 4, 0, 0)];
        let plan = schedule(&mut running, 80);
        let rows: Vec<(usize, usize, usize)> = plan.entries.iter().map(|e| (e.index, e.row, e.rows)).collect();
        // Decoding: the newest token and two drafts. The long prompt stops at a page; the short one finds room.
        assert_eq!(rows, [(1, 0, 3), (0, 3, 64), (2, 67, 6)]);
        assert_eq!(plan.step.tokens[..3], [24, 9000, 9001]);
        assert_eq!(plan.step.segments[0].commit, 1);
        assert_eq!(plan.step.segments[0].fold, 3);
        assert_eq!(plan.step.logits, [0, 1, 2, 72], "all verifying rows and the last row of the finished prompt");
        assert_eq!(
            plan.entries.iter().map(|e| (e.logits, e.newest)).collect::<Vec<_>>(),
            [(0, true), (3, false), (3, true)]
        );
        assert_eq!(plan.rows_by_kind(&running), (70, 3));
        // Pictures: positions 0, 3, .. 63 of the long prompt, 6 and 9 of the short one.
        assert_eq!(plan.features.len(), 22 + 2);
        assert_eq!(plan.features[22..], [(2, 2), (2, 3)]);
        assert_eq!(plan.step.features[22], FeatureRow { row: 69, feature: 22 });
    }

    #[test]
    fn a_decision_becomes_a_step_in_its_own_order() {
        let pools = Pools::new(SLOTS, 0, shape().pages);
        let mut again = sequence(&pools, 30, 0, 5, 0);
        (again.computed, again.fold, again.phase) = (0, 0, Phase::Prefill);
        let running =
            [sequence(&pools, 300, 64, 0, 0), sequence(&pools, 20, 0, 5, 2), sequence(&pools, 90, 0, 0, 0), again];
        let work = |id: u64, rows: usize, drafts: usize, scored: bool| Work {
            id: SequenceId(id),
            rows,
            drafts,
            pages_after: need(300).pages,
            scored,
        };
        let work = vec![
            work(20, 2, 1, false),
            work(300, 64, 0, false),
            work(77, 5, 0, false),
            work(90, 10, 0, true),
            work(30, 35, 0, false),
        ];
        let plan = Plan::build(&Decision { work, ..Decision::default() }, &running);
        plan.step.validate(&shape()).unwrap();
        let places: Vec<(usize, usize, usize)> = plan.entries.iter().map(|e| (e.index, e.row, e.rows)).collect();
        assert_eq!(places, [(1, 0, 2), (0, 2, 64), (2, 66, 10), (3, 76, 35)], "who is gone is left out");
        // One of two drafts; no row of a chunk inside its prompt; every scored row; the newest token of who starts again.
        let wanted: Vec<_> = plan.entries.iter().map(|e| (e.drafts, e.logits, e.wanted)).collect();
        assert_eq!(wanted, [(1, 0, 2), (0, 2, 0), (0, 2, 10), (0, 12, 1)]);
        let rows: Vec<u32> = [0, 1].into_iter().chain(66..76).chain([110]).collect();
        assert_eq!(plan.step.logits, rows);
        assert_eq!((plan.step.tokens[1], plan.step.tokens[2], plan.step.tokens[110]), (9000, 64, 34));
    }

    #[test]
    fn nothing_to_do_is_an_empty_plan() {
        assert_eq!(schedule(&mut [], 10), Plan::default());
    }

    proptest::proptest! {
        #[test]
        fn plans_are_valid_and_always_advance(
            kinds in proptest::collection::vec((1usize..300, 0usize..300, 0usize..40, 0usize..=DEPTH), 1..=SLOTS),
            spare in 0usize..200,
        ) {
            let pools = Pools::new(SLOTS, 0, shape().pages);
            let mut running: Vec<Sequence> = kinds
                .iter()
                .map(|&(prompt, computed, output, drafts)| {
                    sequence(&pools, prompt, computed % prompt, output, if output > 0 { drafts } else { 0 })
                })
                .collect();
            let max_rows = SLOTS * (DEPTH + 1) + spare;
            let plan = schedule(&mut running, max_rows);
            proptest::prop_assert!(plan.step.validate(&shape()).is_ok());
            proptest::prop_assert!(plan.step.rows() <= max_rows && plan.step.rows() > 0);
            proptest::prop_assert!(plan.step.logits.len() <= SLOTS * (DEPTH + 1));
            for (index, s) in running.iter().enumerate() {
                let entry = plan.entries.iter().find(|e| e.index == index);
                if s.phase == Phase::Decode {
                    let rows = entry.map_or(0, |e| e.rows);
                    // Drafts may give way to a page of a prompt, the newest token does not.
                    let all = spare > PAGE_TOKENS || running.iter().all(|s| s.phase == Phase::Decode);
                    proptest::prop_assert!(rows >= 1 && rows <= 1 + s.drafts.len());
                    proptest::prop_assert!(!all || rows == 1 + s.drafts.len());
                    proptest::prop_assert_eq!(entry.map(|e| e.drafts), Some(rows - 1));
                }
            }
            // The oldest prompt advances, whatever else runs.
            if let Some(oldest) = running.iter().position(|s| s.phase == Phase::Prefill) {
                proptest::prop_assert!(plan.entries.iter().any(|e| e.index == oldest));
            }
            for entry in &plan.entries {
                let s = &running[entry.index];
                let end = s.computed + entry.rows;
                if s.phase == Phase::Prefill {
                    proptest::prop_assert!(end <= s.request.prompt.len());
                    proptest::prop_assert_eq!(entry.newest, end == s.request.prompt.len());
                }
            }
        }
    }
}
