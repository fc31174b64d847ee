//! The quality of answers over several independent passes over the same items.
//!
//! A pass (epoch) sends every item with the seed of its number. Answers that were cut off at their limit of tokens are
//! counted by themselves: a low score of cut answers says that the limit was too low. The pooled score is the share of right
//! answers among all, its deviation the binomial one: the epochs repeat the items, so it says how sure the score on these items
//! is, not on others.

use serde::{Deserialize, Serialize};

use super::dataset::Prompt;
use super::exchange::Outcome;

/// One pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Epoch {
    /// Its number, which is its seed.
    pub epoch: u32,
    /// Items with an expected answer.
    pub items: usize,
    /// Of these, answered whole.
    pub completed: usize,
    /// Of these, cut off at the limit of tokens.
    pub truncated: usize,
    /// Right answers.
    pub right: usize,
    /// Right answers in percent of the items.
    pub score: f64,
}

/// All passes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Each pass.
    pub epochs: Vec<Epoch>,
    /// Right answers of all passes, in percent.
    pub score: f64,
    /// Its standard deviation, in percent.
    pub sigma: f64,
    /// Answers cut off at the limit of tokens.
    pub truncated: usize,
}

/// Repeats prompts for as many epochs, each with its seed.
#[must_use]
pub fn repeat(prompts: Vec<Prompt>, epochs: u32) -> Vec<Prompt> {
    if epochs == 0 {
        return prompts;
    }
    let of = |epoch: u32| {
        prompts.iter().map(move |prompt| {
            let id = prompt.id.as_ref().map(|id| format!("{id}-{epoch}"));
            Prompt { id, seed: Some(epoch), ..prompt.clone() }
        })
    };
    (0..epochs).flat_map(of).collect()
}

/// Judges the answers; none if no prompt says what is right.
#[must_use]
pub fn quality(prompts: &[Prompt], outcomes: &[Outcome]) -> Option<Quality> {
    let mut epochs: Vec<Epoch> = Vec::new();
    for (prompt, outcome) in prompts.iter().zip(outcomes) {
        let Some(answer) = &prompt.answer else { continue };
        let number = prompt.seed.unwrap_or(0);
        let place = epochs.iter().position(|epoch| epoch.epoch == number).unwrap_or_else(|| {
            epochs.push(Epoch { epoch: number, items: 0, completed: 0, truncated: 0, right: 0, score: 0.0 });
            epochs.len() - 1
        });
        let epoch = &mut epochs[place];
        epoch.items += 1;
        if outcome.succeeded() {
            epoch.completed += 1;
            epoch.truncated += usize::from(outcome.finish.as_deref() == Some("length"));
            epoch.right += usize::from(is_right(&outcome.content, answer));
        }
    }
    for epoch in &mut epochs {
        epoch.score = 100.0 * epoch.right as f64 / epoch.items as f64;
    }
    let (right, items) = epochs.iter().fold((0, 0), |(r, n), epoch| (r + epoch.right, n + epoch.items));
    let share = right as f64 / items as f64;
    let truncated = epochs.iter().map(|epoch| epoch.truncated).sum();
    let sigma = 100.0 * (share * (1.0 - share) / items as f64).sqrt();
    (items > 0).then_some(Quality { epochs, score: 100.0 * share, sigma, truncated })
}

/// Whether an answer is right, reasoning left out: a number must be the last number of the answer, anything else must occur
/// in it.
fn is_right(text: &str, answer: &str) -> bool {
    let body = text.rsplit("</think>").next().unwrap_or(text).trim();
    match answer.trim().parse::<f64>() {
        Ok(wanted) => last_number(body).is_some_and(|found| (found - wanted).abs() <= 1e-9 * wanted.abs().max(1.0)),
        Err(_) => !answer.trim().is_empty() && body.contains(answer.trim()),
    }
}

/// The last number of a text; commas between digits are those of thousands.
fn last_number(text: &str) -> Option<f64> {
    let characters: Vec<char> = text.chars().collect();
    let digit = |at: usize| characters.get(at).is_some_and(char::is_ascii_digit);
    let end = (0..characters.len()).rev().find(|&at| digit(at))?;
    let mut start = end;
    while start > 0
        && (digit(start - 1) || (matches!(characters[start - 1], '.' | ',') && start > 1 && digit(start - 2)))
    {
        start -= 1;
    }
    let mut number: String = characters[start..=end].iter().filter(|&&c| c != ',').collect();
    let before = |back: usize| start.checked_sub(back).map(|at| characters[at]);
    // A minus behind a digit or a letter is a dash.
    if before(1) == Some('-') && !before(2).is_some_and(char::is_alphanumeric) {
        number.insert(0, '-');
    }
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_or_the_text_decides() {
        for (text, answer, right) in [
            ("7</think> 3 + 4 = 7", "7", true),
            ("7</think> 3 + 4 = 8", "7", false),
            ("It is 1,234.50 dollars.", "1234.5", true),
            ("x = -5", "-5", true),
            ("from 3-5", "5", true),
            ("12 of 13", "12", false),
            ("Paris is it", "Paris", true),
            ("paris", "Paris", false),
            ("Paris</think>Rome", "Paris", false),
            ("", "7", false),
            ("anything", " ", false),
        ] {
            assert_eq!(is_right(text, answer), right, "{text} / {answer}");
        }
    }

    #[test]
    fn epochs_are_scored_each_and_together() {
        let prompt = |answer: Option<&str>| Prompt {
            text: "q".to_owned(),
            tokens: 1,
            output_tokens: 9,
            id: Some("i".to_owned()),
            answer: answer.map(str::to_owned),
            seed: None,
        };
        let prompts = repeat(vec![prompt(Some("1")), prompt(Some("2")), prompt(None)], 2);
        assert_eq!(prompts.iter().map(|prompt| prompt.seed).collect::<Vec<_>>()[2..4], [Some(0), Some(1)]);
        assert_eq!(prompts[3].id.as_deref(), Some("i-1"));
        let said = |content: &str, finish: &str| Outcome {
            content: content.to_owned(),
            finish: Some(finish.to_owned()),
            ..Outcome::default()
        };
        let failed = Outcome { error: Some("x".to_owned()), ..said("2", "stop") };
        let outcomes =
            [said("1", "stop"), said("1", "length"), said("", "stop"), said("so 1", "stop"), failed, said("", "stop")];
        let found = quality(&prompts, &outcomes).unwrap();
        let row = |epoch: &Epoch| (epoch.items, epoch.completed, epoch.truncated, epoch.right);
        assert_eq!(found.epochs.iter().map(row).collect::<Vec<_>>(), [(2, 2, 1, 1), (2, 1, 0, 1)]);
        assert_eq!(found.truncated, 1);
        assert!((found.score - 50.0).abs() < 1e-12 && (found.sigma - 25.0).abs() < 1e-12);
        assert_eq!(quality(&prompts[2..3], &outcomes[2..3]), None);
    }
}
