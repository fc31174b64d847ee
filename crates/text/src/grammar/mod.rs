//! Grammars: the shape that a request asks for, as masks over the tokens of one tokenizer.
//!
//! Every shape becomes a grammar of the `llguidance` library, a lexer of regular expressions under an Earley parser that
//! walks the tree of all tokens' bytes. [`GrammarCompiler`] is made once for a process; it holds that tree and remembers
//! the grammars compiled last. Two invariants hold for whatever a client sends:
//!
//! * Text never becomes a control token. Added tokens (`<tool_call>`, `<|user|>`) take part in a grammar by their id only;
//!   their literals inside a schema, a choice or a string are ordinary text.
//! * A grammar costs a bounded amount of time and memory, when it is compiled and at every mask; beyond that it is an error
//!   of its own request.

mod ebnf;
mod json;
mod lark;
mod matcher;
mod place;
mod tag;
mod tools;
mod vocabulary;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use glimmer_engine::constraint::{Constraint, ConstraintError, Grammars};
use glimmer_engine::request::Structure;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use toktrie::{InferenceCapabilities, TokEnv};

use crate::error::TextError;
use crate::tokenizer::Tokenizer;
use matcher::Follower;
use vocabulary::Vocabulary;

/// Compiled grammars that are remembered.
const REMEMBERED: usize = 64;

/// Longest description of a shape, in bytes; of a list of tools, of each.
const MOST_BYTES: usize = 1 << 18;
/// Longest list of tools, in bytes.
const MOST_BYTES_OF_TOOLS: usize = 1 << 21;
/// Stack for compiling: what any description needs, and what each byte of it may add. The library descends once for every
/// reference in a chain of them, and the shortest link takes about eight bytes.
const STACK_BYTES: usize = 8 << 20;
const STACK_BYTES_A_BYTE: usize = 2 << 10;

/// What a grammar may cost. Fuel and items bound the work of a mask to some milliseconds; the states of the lexer, at
/// one or two kilobytes each, bound the memory of one request.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 50_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Makes the constraints of one model.
pub struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    /// The grammars compiled last, the newest in front. An entry is there before it is compiled, so that requests that
    /// come together compile one schema once.
    remembered: Mutex<Vec<(Structure, Arc<Compiled>)>>,
}

/// The start of a grammar, or why there is none.
type Compiled = OnceLock<Result<Mutex<Matcher>, ConstraintError>>;

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler for answers in this tokenizer's tokens that end with one of `ends`, the model's own end tokens. Builds
    /// the tree of tokens, which takes about half a second for 150,000 of them.
    ///
    /// # Errors
    /// [`TextError::Grammar`] if `ends` is empty or names a token that the tokenizer does not have.
    pub fn new(tokenizer: &Tokenizer, ends: &[u32]) -> Result<Self, TextError> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer, ends)?);
        let environment: TokEnv = Arc::clone(&vocabulary) as TokEnv;
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .map_err(|error| TextError::Grammar { problem: brief(&error) })?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { vocabulary, factory, remembered: Mutex::default() })
    }

    /// How many grammars are remembered; for tests and reports.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn entry(&self, structure: &Structure) -> Arc<Compiled> {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let found = remembered.iter().position(|(known, _)| known == structure);
        let entry = match found {
            Some(index) => remembered.remove(index),
            None => (structure.clone(), Arc::default()),
        };
        let compiled = Arc::clone(&entry.1);
        remembered.insert(0, entry);
        remembered.truncate(REMEMBERED);
        compiled
    }

    fn grammar(&self, structure: &Structure) -> Result<TopLevelGrammar, ConstraintError> {
        let lark = match structure {
            Structure::JsonObject => return Ok(TopLevelGrammar::from_json_schema(json::any_object())),
            Structure::JsonSchema(text) => {
                let schema = json::parse("json_schema", text)?;
                return Ok(TopLevelGrammar::from_json_schema(json::prepared(schema, json::Lenience::Strict)));
            }
            Structure::Regex(pattern) => lark::of_regex(pattern)?,
            Structure::Choice(choices) => lark::of_choices(choices)?,
            Structure::Grammar(text) if ebnf::is_ebnf(text) => ebnf::to_lark(text)?,
            Structure::Grammar(text) => text.clone(),
            Structure::StructuralTag(text) => tag::to_lark(text, &self.vocabulary)?,
            Structure::ToolCalls { tools, only, single } => {
                let tools = tools::Tools::new(tools, only.as_deref(), &self.vocabulary)?;
                tools.to_lark(*single, &|schema| self.start(TopLevelGrammar::from_json_schema(schema)).map(drop))?
            }
        };
        Ok(TopLevelGrammar::from_lark(lark))
    }

    fn start(&self, grammar: TopLevelGrammar) -> Result<Matcher, ConstraintError> {
        let parser = self.factory.create_parser(grammar).map_err(|error| ConstraintError(brief(&error)))?;
        if !parser.parser.grammar().lexer_spec().can_rollback() {
            let problem = "the attributes max_tokens and stop cannot be taken back and are not supported; \
                           use max_tokens of the request, and suffix in place of stop";
            return Err(ConstraintError(problem.to_owned()));
        }
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            Some(problem) => Err(ConstraintError(problem)),
            None => Ok(matcher),
        }
    }

    fn compile_new(&self, structure: &Structure) -> Result<Mutex<Matcher>, ConstraintError> {
        let (longest, total) = size(structure);
        let most = if matches!(structure, Structure::ToolCalls { .. }) { MOST_BYTES_OF_TOOLS } else { MOST_BYTES };
        if longest > MOST_BYTES || total > most {
            return Err(ConstraintError(format!(
                "the description of the answer's shape has {total} bytes; at most {most} are supported, \
                 and {MOST_BYTES} for one tool"
            )));
        }
        let stack = STACK_BYTES + STACK_BYTES_A_BYTE * longest;
        std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name("grammar".to_owned()).stack_size(stack);
            let compiling = builder.spawn_scoped(scope, || self.compile_here(structure));
            let compiling = compiling.map_err(|error| ConstraintError(format!("no thread to compile on: {error}")))?;
            compiling.join().map_err(|_| ConstraintError("compiling the shape of the answer failed".to_owned()))?
        })
    }

    fn compile_here(&self, structure: &Structure) -> Result<Mutex<Matcher>, ConstraintError> {
        let error = match self.grammar(structure).and_then(|grammar| self.start(grammar)) {
            Ok(mut matcher) => {
                // A grammar that cannot even begin is better refused now than in the middle of an answer.
                matcher.compute_mask().map_err(|error| ConstraintError(cannot_begin(&error)))?;
                return Ok(Mutex::new(matcher));
            }
            Err(error) => error,
        };
        let Structure::JsonSchema(text) = structure else { return Err(error) };
        let Ok(schema) = json::parse("json_schema", text) else { return Err(error) };
        let place = place::of_problem(&json::prepared(schema, json::Lenience::Strict), &error.0, &|schema| {
            self.start(TopLevelGrammar::from_json_schema(schema)).err().map(|error| error.0)
        });
        Err(ConstraintError(format!("json_schema{place}: {}", error.0)))
    }
}

impl Grammars for GrammarCompiler {
    fn compile(&self, structure: &Structure) -> Result<Box<dyn Constraint>, ConstraintError> {
        let entry = self.entry(structure);
        match entry.get_or_init(|| self.compile_new(structure)) {
            Ok(matcher) => {
                // A copy of its own: what one answer adds to the lexer is freed with it and bounded for it alone.
                let matcher = matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
                Ok(Box::new(Follower::new(matcher, Arc::clone(&self.vocabulary))))
            }
            Err(error) => Err(error.clone()),
        }
    }
}

/// Bytes of the longest text in a description, and of all.
fn size(structure: &Structure) -> (usize, usize) {
    match structure {
        Structure::JsonObject => (0, 0),
        Structure::JsonSchema(text)
        | Structure::Regex(text)
        | Structure::Grammar(text)
        | Structure::StructuralTag(text) => (text.len(), text.len()),
        Structure::Choice(texts) | Structure::ToolCalls { tools: texts, .. } => {
            (texts.iter().map(String::len).max().unwrap_or(0), texts.iter().map(String::len).sum())
        }
    }
}

fn cannot_begin(error: &impl std::fmt::Display) -> String {
    let problem = brief(error);
    let problem = if problem.starts_with("NoExtension") { "no text has it".to_owned() } else { problem };
    format!("the shape of the answer: {problem}")
}

/// Longest message, in characters: the library quotes what it does not like.
const LONGEST_MESSAGE: usize = 600;

/// The library's message without what is of use to its developers only.
fn brief(error: &impl std::fmt::Display) -> String {
    // The alternate form is the whole chain of causes.
    let text = format!("{error:#}");
    let text = text.split("\n<backtrace>").next().unwrap_or_default().replace("<non-verbose/>", "");
    match text.trim().char_indices().nth(LONGEST_MESSAGE) {
        Some((cut, _)) => format!("{} ...", &text.trim()[..cut]),
        None => text.trim().to_owned(),
    }
}
