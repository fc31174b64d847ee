//! What is sent: prompts and how many tokens are asked for.
//!
//! Random prompts are runs of consecutive token ids: prompt `i` is `allowed[(offset_i + i + j) mod |allowed|]` for
//! `j = 0..length_i`, where `allowed` are the ids of the vocabulary that are not special. All input lengths are drawn
//! first, then all output lengths, then all offsets, then the shared prefix, from one generator. Text made of arbitrary
//! tokens rarely encodes to the same number of tokens, so each prompt is decoded, encoded again and cut or lengthened, at
//! most ten times. Lengths, offsets and texts are equal to those of the established tool for the same seed.

use glimmer_text::{ChatFormat, ChatInput, Message, Role, Tokenizer};
use serde_json::Value;

use super::error::ServeBenchError;
use super::random::{Mersenne, Pcg64};

/// One request to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// Its length in tokens, as the client counts.
    pub tokens: usize,
    /// Tokens of the answer that are asked for.
    pub output_tokens: u32,
    /// Id of the request, sent as `x-request-id`.
    pub id: Option<String>,
    /// What the answer should contain, where the file says so.
    pub answer: Option<String>,
    /// Seed of the answer; none leaves it to the server.
    pub seed: Option<u32>,
}

/// Lengths of random prompts, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomShape {
    /// Mean length of a prompt without the prefix.
    pub input: u32,
    /// Mean length of an answer.
    pub output: u32,
    /// Length of the prefix that all prompts share.
    pub prefix: u32,
    /// Half width of the range of input lengths, relative to the mean, in [0, 1).
    pub input_ratio: f64,
    /// The same of output lengths.
    pub output_ratio: f64,
}

/// The largest total length of one prompt that is made up.
const LONGEST: u32 = 1 << 24;

impl RandomShape {
    fn check(&self) -> Result<(), ServeBenchError> {
        for ratio in [self.input_ratio, self.output_ratio] {
            if !(0.0..1.0).contains(&ratio) {
                return Err(ServeBenchError::flag(
                    "--random-range-ratio",
                    format!("{ratio} is not in [0, 1); 0.2 makes lengths vary by a fifth to either side"),
                ));
            }
        }
        if self.input.max(self.output).max(self.prefix) > LONGEST {
            return Err(ServeBenchError::flag(
                "--random-input-len",
                format!("lengths may not exceed {LONGEST} tokens"),
            ));
        }
        if self.prefix + range(self.input, self.input_ratio).0 == 0 {
            return Err(ServeBenchError::flag(
                "--random-input-len",
                "the shortest prompt would be empty; lengthen the input or the prefix, or lower --random-range-ratio",
            ));
        }
        Ok(())
    }
}

/// Least and greatest length of a range.
fn range(mean: u32, ratio: f64) -> (u32, u32) {
    let mean = f64::from(mean);
    ((mean * (1.0 - ratio)).floor() as u32, (mean * (1.0 + ratio)).ceil() as u32)
}

/// Random prompts; ids are `prefix` and the index.
///
/// # Errors
/// [`ServeBenchError::Flag`] for lengths that cannot be, [`ServeBenchError::Text`] if a prompt cannot be encoded.
pub fn random_prompts(
    tokenizer: &Tokenizer,
    shape: &RandomShape,
    count: usize,
    seed: u32,
    id_prefix: &str,
) -> Result<Vec<Prompt>, ServeBenchError> {
    shape.check()?;
    let vocabulary = vocabulary(tokenizer);
    let mut generator = Pcg64::new(seed);
    let (low, high) = range(shape.input, shape.input_ratio);
    let inputs = generator.integers(low, high, count);
    let (low, high) = range(shape.output, shape.output_ratio);
    let outputs = generator.integers(low.max(1), high.max(1), count);
    let offsets = generator.integers(0, vocabulary - 1, count);
    let allowed: Vec<u32> = (0..vocabulary).filter(|&id| !tokenizer.is_special(id)).collect();
    let ways = allowed.len();
    let mut prefix = Vec::new();
    if shape.prefix > 0 {
        let drawn = generator.integers(0, ways as u32 - 1, shape.prefix as usize);
        prefix.extend(drawn.into_iter().map(|index| allowed[index as usize]));
    }
    let mut prompts = Vec::with_capacity(count);
    for index in 0..count {
        let first = offsets[index] as usize + index;
        let length = inputs[index] as usize;
        let ids: Vec<u32> = prefix.iter().copied().chain((0..length).map(|at| allowed[(first + at) % ways])).collect();
        let wanted = ids.len();
        let more = |generator: &mut Pcg64, missing| generator.integers(0, vocabulary - 1, missing);
        let (text, ids) = settle(tokenizer, ids, wanted, |missing| more(&mut generator, missing))?;
        prompts.push(Prompt {
            text,
            tokens: ids.len(),
            output_tokens: outputs[index],
            id: Some(format!("{id_prefix}{index}")),
            answer: None,
            seed: None,
        });
    }
    Ok(prompts)
}

/// Ids of the vocabulary proper, without added tokens.
fn vocabulary(tokenizer: &Tokenizer) -> u32 {
    u32::try_from(tokenizer.base_vocab_size()).unwrap_or(u32::MAX)
}

/// Text whose encoding has `wanted` tokens, if that can be had in ten tries, and that encoding.
fn settle(
    tokenizer: &Tokenizer,
    mut ids: Vec<u32>,
    wanted: usize,
    mut more: impl FnMut(usize) -> Vec<u32>,
) -> Result<(String, Vec<u32>), ServeBenchError> {
    const TRIES: usize = 10;
    let mut tries = 0;
    loop {
        let text = tokenizer.decode(&ids, false);
        ids = tokenizer.encode(&text)?;
        if ids.len() == wanted || tries == TRIES {
            return Ok((text, ids));
        }
        if ids.len() < wanted {
            ids.extend(more(wanted - ids.len()));
        }
        ids.truncate(wanted);
        tries += 1;
    }
}

/// Lengths of prompts with few different prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepetitionShape {
    /// Tokens of each prefix.
    pub prefix: u32,
    /// Tokens of each suffix.
    pub suffix: u32,
    /// Different prefixes.
    pub prefixes: u32,
    /// Tokens asked for.
    pub output: u32,
}

/// Prompts of a repeated prefix and a suffix of their own, shuffled. As many for each prefix as fit into `count`.
///
/// The first generator draws the tokens and, later, the arrival times; it is taken as seeded.
///
/// # Errors
/// [`ServeBenchError::Flag`] if there are more prefixes than prompts or nothing to send.
pub fn repetition_prompts(
    tokenizer: &Tokenizer,
    shape: &RepetitionShape,
    count: usize,
    generator: &mut Mersenne,
    seed: u32,
) -> Result<Vec<Prompt>, ServeBenchError> {
    let prefixes = shape.prefixes as usize;
    if prefixes == 0 || count < prefixes {
        let problem = format!("{prefixes} prefixes for {count} prompts; at least one prompt a prefix is needed");
        return Err(ServeBenchError::flag("--prefix-repetition-num-prefixes", problem));
    }
    if shape.prefix + shape.suffix == 0 || shape.prefix.max(shape.suffix) > LONGEST {
        let problem = format!("prefix and suffix must have 1 to {LONGEST} tokens together");
        return Err(ServeBenchError::flag("--prefix-repetition-prefix-len", problem));
    }
    let vocabulary = vocabulary(tokenizer);
    let mut piece = |length: u32| {
        let length = length as usize;
        let ids = generator.below(vocabulary, length);
        Ok::<_, ServeBenchError>(settle(tokenizer, ids, length, |missing| generator.below(vocabulary, missing))?.1)
    };
    let mut prompts = Vec::with_capacity(count);
    for _ in 0..prefixes {
        let prefix = piece(shape.prefix)?;
        for _ in 0..count / prefixes {
            let mut ids = prefix.clone();
            ids.extend(piece(shape.suffix)?);
            let text = tokenizer.decode(&ids, false);
            let output_tokens = shape.output;
            prompts.push(Prompt { text, tokens: ids.len(), output_tokens, id: None, answer: None, seed: None });
        }
    }
    Mersenne::python(seed).shuffle(&mut prompts);
    Ok(prompts)
}

/// How prompts of a file become requests.
#[derive(Clone, Debug)]
pub struct CustomOptions {
    /// Tokens asked for where a line does not say.
    pub output: u32,
    /// Leave the order of the file.
    pub in_order: bool,
    /// Render each prompt as a user's message with the model's template.
    pub template: bool,
    /// Template variables.
    pub variables: serde_json::Map<String, Value>,
}

/// Prompts of a JSONL file: `{"prompt": "...", "output_tokens": 100, "answer": "..."}`, all but the first optional.
///
/// The file is shuffled by `seed`; where `count` is larger, prompts are drawn again from it. A `count` of 0 takes all.
///
/// # Errors
/// [`ServeBenchError::Line`] naming the line, [`ServeBenchError::Text`] if the template fails.
pub fn custom_prompts(
    format: &ChatFormat,
    file: &str,
    text: &str,
    options: &CustomOptions,
    count: usize,
    seed: u32,
    id_prefix: &str,
) -> Result<Vec<Prompt>, ServeBenchError> {
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |problem: String| ServeBenchError::Line { file: file.to_owned(), line: index + 1, problem };
        let value: Value = serde_json::from_str(line).map_err(|error| wrong(format!("not JSON: {error}")))?;
        let Some(prompt) = value["prompt"].as_str() else {
            return Err(wrong("expected an object with the text `prompt`".to_owned()));
        };
        let output = match &value["output_tokens"] {
            Value::Null => options.output,
            given => given
                .as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .filter(|&n| n > 0)
                .ok_or_else(|| wrong(format!("output_tokens: expected a whole number from 1, found {given}")))?,
        };
        let answer = match &value["answer"] {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        lines.push((prompt.to_owned(), output, answer));
    }
    if lines.is_empty() {
        let problem = "no prompts; expected one JSON object with `prompt` a line".to_owned();
        return Err(ServeBenchError::Line { file: file.to_owned(), line: 1, problem });
    }
    if !options.in_order {
        Mersenne::python(seed).shuffle(&mut lines);
    }
    let count = if count == 0 { lines.len() } else { count };
    let mut prompts = Vec::with_capacity(count);
    for (index, (prompt, output_tokens, answer)) in lines.into_iter().take(count).enumerate() {
        let text = if options.template { rendered(format, &prompt, options)? } else { prompt };
        let tokens = format.tokenizer().encode(&text)?.len();
        let id = Some(format!("{id_prefix}{index}"));
        prompts.push(Prompt { text, tokens, output_tokens, id, answer, seed: None });
    }
    let known = prompts.len();
    for (index, again) in (known..).zip(Mersenne::python(seed).choices(known, count - known)) {
        prompts.push(Prompt { id: Some(format!("{id_prefix}{index}")), ..prompts[again].clone() });
    }
    Ok(prompts)
}

fn rendered(format: &ChatFormat, prompt: &str, options: &CustomOptions) -> Result<String, ServeBenchError> {
    let messages = [Message::text(Role::User, prompt)];
    let input = ChatInput {
        messages: &messages,
        variables: Some(&options.variables),
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    Ok(format.prompt(&input)?.text)
}
