//! The chat template: the checkpoint's own Jinja text, run as Python would run it.
//!
//! Settings are those of the reference implementation: `trim_blocks` and `lstrip_blocks` on, no escaping, undefined
//! values print as nothing, plus the shims of the `shims` module. A template comes from a checkpoint and is not trusted to
//! end, so each render has a budget of instructions.

use std::error::Error as _;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use crate::error::TextError;
use crate::shims::{self, Refusal};

/// Instructions that one render may take: seconds of work, far above any real conversation.
const FUEL: u64 = 100_000_000;

const NAME: &str = "chat_template";

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    fuel: u64,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja` of a model directory.
    ///
    /// # Errors
    /// [`TextError::Read`] or [`TextError::TemplateSyntax`].
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("chat_template.jinja");
        let source = std::fs::read_to_string(&path).map_err(|source| TextError::Read { path, source })?;
        Self::new(&source)
    }

    /// Parses the text of a template.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] with the line.
    pub fn new(source: &str) -> Result<Self, TextError> {
        Self::with_fuel(source, FUEL)
    }

    /// Parses the text of a template and sets the number of instructions a render may take.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] with the line.
    pub fn with_fuel(source: &str, fuel: u64) -> Result<Self, TextError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|error| syntax_error(&error))?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_fuel(Some(fuel));
        shims::install(&mut env);
        env.add_template_owned(NAME, shims::without_generation_blocks(source)).map_err(|error| syntax_error(&error))?;
        Ok(Self { env, source: source.to_owned(), fuel })
    }

    /// Text of the template.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders the template over a JSON object of variables (`messages`, `tools`, `add_generation_prompt`, ...).
    ///
    /// # Errors
    /// [`TextError::TemplateRefused`] if the template raised, [`TextError::TemplateFuel`] if it ran too long, else
    /// [`TextError::TemplateRender`] with the line.
    pub fn render(&self, variables: &serde_json::Map<String, serde_json::Value>) -> Result<String, TextError> {
        let template = self.env.get_template(NAME).map_err(|error| self.render_error(&error))?;
        template.render(Value::from(Serde(variables))).map_err(|error| self.render_error(&error))
    }

    fn render_error(&self, error: &Error) -> TextError {
        let mut cause: Option<&dyn std::error::Error> = error.source();
        while let Some(inner) = cause {
            if let Some(Refusal(message)) = inner.downcast_ref() {
                return TextError::TemplateRefused { message: message.clone() };
            }
            if inner.downcast_ref::<Error>().is_some_and(|inner| inner.kind() == ErrorKind::OutOfFuel) {
                return TextError::TemplateFuel { fuel: self.fuel };
            }
            cause = inner.source();
        }
        if error.kind() == ErrorKind::OutOfFuel {
            return TextError::TemplateFuel { fuel: self.fuel };
        }
        TextError::TemplateRender { line: error.line().unwrap_or(0), problem: describe(error) }
    }
}

fn syntax_error(error: &Error) -> TextError {
    TextError::TemplateSyntax { line: error.line().unwrap_or(0), problem: describe(error) }
}

fn describe(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{:?}: {detail}", error.kind()),
        None => format!("{:?}", error.kind()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, variables: serde_json::Value) -> Result<String, TextError> {
        ChatTemplate::new(source)?.render(variables.as_object().unwrap())
    }

    #[test]
    fn null_is_not_iterable() {
        let source = "{{ x is iterable }} {{ y is iterable }} {{ z is iterable }}";
        assert_eq!(render(source, json!({"x": null, "y": [], "z": "s"})).unwrap(), "False True True");
    }

    #[test]
    fn blocks_are_trimmed_and_nothing_is_escaped() {
        let source = "a\n  {% if true %}\n<&{{ x }}\n  {% endif %}\nb\n";
        assert_eq!(render(source, json!({"x": "<\"'>"})).unwrap(), "a\n<&<\"'>\nb");
    }

    #[test]
    fn strip_is_pythons() {
        let source = "[{{ x.strip() }}][{{ x.lstrip() }}][{{ x.rstrip() }}][{{ 'xxaxx'.strip('x') }}]";
        let rendered = render(source, json!({"x": "\u{1f} \u{2003}a\u{200b}\u{1c}\n"})).unwrap();
        assert_eq!(rendered, "[a\u{200b}][a\u{200b}\u{1c}\n][\u{1f} \u{2003}a\u{200b}][a]");
    }

    #[test]
    fn tojson_takes_pythons_arguments() {
        let source = "{{ x | tojson }}|{{ x | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=true) }}|\
                      {{ x | tojson(indent=1) }}";
        let rendered = render(source, json!({"x": {"b": "\u{e9}<", "a": 1.0}})).unwrap();
        let expected =
            "{\"b\": \"\u{e9}<\", \"a\": 1.0}|{\"a\":1.0,\"b\":\"\\u00e9<\"}|{\n \"b\": \"\u{e9}<\",\n \"a\": 1.0\n}";
        assert_eq!(rendered, expected);
    }

    #[test]
    fn a_raised_exception_keeps_the_templates_words() {
        let error = render("{% if true %}{{ raise_exception('no tools here') }}{% endif %}", json!({})).unwrap_err();
        assert!(matches!(error, TextError::TemplateRefused { message } if message == "no tools here"));
        let in_macro = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}";
        let error = render(in_macro, json!({})).unwrap_err();
        assert!(matches!(error, TextError::TemplateRefused { message } if message == "deep"));
    }

    #[test]
    fn a_template_that_does_not_end_runs_out_of_fuel() {
        let source = "{% for i in range(9000) %}{% for j in range(9000) %}{{ i * j }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::with_fuel(source, 10_000).unwrap();
        let error = template.render(&serde_json::Map::new()).unwrap_err();
        assert!(matches!(error, TextError::TemplateFuel { fuel: 10_000 }), "{error}");
    }

    #[test]
    fn syntax_errors_name_the_line() {
        let error = ChatTemplate::new("a\nb\n{% if %}").unwrap_err();
        assert!(matches!(error, TextError::TemplateSyntax { line: 3, .. }), "{error}");
    }

    #[test]
    fn generation_blocks_render_their_contents() {
        let source = "{% for m in ms %}\n{% generation %}\n{{ m }}\n{% endgeneration %}\n{% endfor %}";
        assert_eq!(render(source, json!({"ms": ["a", "b"]})).unwrap(), "a\nb\n");
    }
}
