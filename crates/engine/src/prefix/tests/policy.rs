//! What the order in which states are evicted is worth: simulated conversations over the tree itself.

use super::super::*;

const CHECKPOINTS: usize = 64;

/// A deterministic source of numbers (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    fn one_of(&mut self, choices: [usize; 4]) -> usize {
        choices[self.below(4)]
    }

    fn tokens(&mut self, count: usize) -> impl Iterator<Item = u32> {
        let first = self.below(1 << 30) as u32;
        (0..count as u32).map(move |i| first + i)
    }
}

#[derive(Clone, Copy)]
struct Load {
    conversations: usize,
    /// Different beginnings (system prompts with their tools).
    beginnings: usize,
    /// Most turns of a conversation.
    turns: usize,
    /// Of 10 turns so many begin with a user's message, behind which the reasoning of earlier turns is dropped.
    parting: usize,
}

struct Conversation {
    tokens: Vec<u32>,
    /// Where its last user's message ended.
    asked: usize,
    left: usize,
}

/// Share of all prompt tokens that had to be computed.
fn computed(load: Load, tips: bool) -> f64 {
    let pools = Pools::new(1, CHECKPOINTS, 30_000);
    let mut tree = PrefixTree::new(&pools);
    let mut random = Numbers(7);
    let beginnings: Vec<Vec<u32>> = (0..load.beginnings)
        .map(|_| {
            let count = 1500 + random.below(3000);
            random.tokens(count).collect()
        })
        .collect();
    let begin = |random: &mut Numbers| Conversation {
        tokens: beginnings[random.below(load.beginnings)].clone(),
        asked: 0,
        left: 1 + random.below(load.turns),
    };
    let mut running: Vec<Conversation> = (0..load.conversations).map(|_| begin(&mut random)).collect();
    let (mut all, mut fresh) = (0, 0);
    for _ in 0..1500 {
        let conversation = &mut running[random.below(load.conversations)];
        let tokens = &mut conversation.tokens;
        let parts = conversation.asked > 0 && random.below(10) < load.parting;
        if parts {
            let kept = (tokens.len() - conversation.asked) / 2;
            tokens.truncate(conversation.asked);
            tokens.extend(random.tokens(kept));
        }
        let turn = tokens.len();
        let message = random.one_of([60, 200, 600, 1500]);
        tokens.extend(random.tokens(message));
        let prompt = tokens.len();
        if parts || conversation.asked == 0 {
            conversation.asked = prompt;
        }

        let mut keys = PageKeys::new(None, Vec::new());
        keys.extend(tokens);
        let (mut position, mut table) = (0, PageTable::default());
        if let Ok(hit) = tree.longest(&keys, prompt - 1) {
            (position, table) = (hit.position, hit.table);
        }
        all += prompt;
        fresh += prompt - position;
        let answer = random.one_of([40, 150, 500, 1000]);
        tokens.extend(random.tokens(answer));
        keys.extend(tokens);
        assert!(tree.grow(&mut table, tokens.len().div_ceil(PAGE_TOKENS)));
        tree.publish(&mut table, &keys, tokens.len());
        let stops = Stops::new(prompt, Some(turn));
        let ends = std::iter::successors(stops.after(position), |&stop| stops.after(stop));
        for end in ends.chain([tokens.len() / PAGE_TOKENS * PAGE_TOKENS]) {
            let Some(key) = keys.ending_at(end).filter(|key| tree.wants_state(key)) else { continue };
            let saved = SavedState { slot: tree.slot_for_state().unwrap(), fold: 0 };
            if tips && !stops.is_fork(end) {
                tree.save_tip(&key, saved)
            } else {
                tree.save_state(&key, saved)
            };
        }
        conversation.left -= 1;
        if conversation.left == 0 {
            *conversation = begin(&mut random);
        }
    }
    f64::from(fresh as u32) / f64::from(all as u32)
}

#[test]
fn passed_tips_first_saves_work_in_conversations_and_costs_none_elsewhere() {
    let agents = Load { conversations: 24, beginnings: 4, turns: 24, parting: 3 };
    for (load, most) in [
        (Load { parting: 0, ..agents }, 0.75),
        (agents, 0.9),
        (Load { parting: 10, ..agents }, 0.9),
        // Requests that only share their beginning.
        (Load { beginnings: 20, turns: 1, ..agents }, 1.0),
    ] {
        let (plain, tips) = (computed(load, false), computed(load, true));
        assert!(tips <= most * plain, "{tips:.3} of the tokens are computed, {plain:.3} in the order of last use");
    }
}
