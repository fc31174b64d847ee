//! From arguments to settings with their origins.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::line::{Given, command_line};
use super::table::{ENVIRONMENT, FLAGS, Flag, Kind, find};
use super::value::{value_of, wrong};
use super::{FlagError, yaml};

/// Where a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// An environment variable.
    Environment(String),
    /// The configuration file.
    File(String),
    /// The command line.
    CommandLine,
    /// It follows from something else.
    Derived(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::File(path) => write!(f, "file {path}"),
            Self::CommandLine => f.write_str("command line"),
            Self::Derived(reason) => f.write_str(reason),
        }
    }
}

/// The value of a flag.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The value; null is none.
    pub value: Value,
    /// Where it comes from.
    pub origin: Origin,
}

/// All settings, by the names of their flags.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings(BTreeMap<&'static str, Setting>);

impl Settings {
    /// Reads arguments (without the name of the program), a configuration file that they name, and the environment.
    ///
    /// # Errors
    /// [`FlagError::Usage`] naming the flag and what it takes.
    pub fn parse(
        arguments: &[String],
        environment: &dyn Fn(&str) -> Option<String>,
        read_file: &dyn Fn(&str) -> std::io::Result<String>,
    ) -> Result<Self, FlagError> {
        let mut settings = Self::defaults();
        let given = command_line(arguments)?;
        for &(variable, name) in ENVIRONMENT.iter().rev() {
            // An empty key is a mistake that has to be seen; other empty variables are as good as unset.
            let text = environment(variable).filter(|text| !text.is_empty() || name == "api-key");
            if let Some((flag, text)) = find(name).zip(text) {
                let value = match flag.kind {
                    Kind::Texts => Value::Array(vec![text.into()]),
                    _ => value_of(flag, &text)?,
                };
                settings.set(flag, value, Origin::Environment(variable.to_owned()));
            }
        }
        let file = given.iter().rev().find(|(flag, _)| flag.name == "config");
        if let Some(path) = file.and_then(|(_, given)| given.value.as_str().map(str::to_owned)) {
            let text =
                read_file(&path).map_err(|error| FlagError::Usage(format!("--config: cannot read {path}: {error}")))?;
            for (key, value) in yaml::parse(&text).map_err(|error| FlagError::Usage(format!("{path}: {error}")))? {
                settings.take_from_file(&key, value, &path)?;
            }
        }
        for (flag, given) in given {
            settings.apply(flag, given)?;
        }
        Ok(settings)
    }

    fn defaults() -> Self {
        let default = |flag: &Flag| {
            let value = serde_json::from_str(flag.default).expect("the table's defaults are JSON");
            (flag.name, Setting { value, origin: Origin::Default })
        };
        Self(FLAGS.iter().map(default).collect())
    }

    /// The value of a flag of the table.
    #[must_use]
    pub fn value(&self, name: &str) -> &Value {
        self.0.get(name).map_or(&Value::Null, |setting| &setting.value)
    }

    /// A setting of the table.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Setting> {
        self.0.get(name)
    }

    /// Whether somebody set the flag.
    #[must_use]
    pub fn is_given(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|setting| !matches!(setting.origin, Origin::Default | Origin::Derived(_)))
    }

    /// Replaces a default by what follows from something else; what somebody set stays.
    pub fn derive(&mut self, name: &str, value: impl Into<Value>, reason: &'static str) {
        if let (false, Some(flag)) = (self.is_given(name), find(name)) {
            self.set(flag, value.into(), Origin::Derived(reason));
        }
    }

    /// Answers are taken apart unless somebody said otherwise: all models that are served here write them in one way.
    pub fn derive_parsers(&mut self) {
        const REASON: &str = "the model family's";
        self.derive("reasoning-parser", "glm45", REASON);
        self.derive("tool-call-parser", "glm47", REASON);
        let parsed = !matches!(self.value("tool-call-parser").as_str(), Some("" | "none"));
        self.derive("enable-auto-tool-choice", parsed, REASON);
    }

    /// One line for each setting: flag, value, origin.
    #[must_use]
    pub fn describe(&self) -> String {
        let width = self.0.keys().map(|name| name.len()).max().unwrap_or(0) + 2;
        let mut text = String::new();
        for flag in FLAGS {
            let Some(setting) = self.0.get(flag.name) else { continue };
            // Keys are secrets, also in a log.
            let value = match (&setting.value, flag.name) {
                (Value::Array(keys), "api-key") => format!("({} keys)", keys.len()),
                (Value::Null, _) => "none".to_owned(),
                (Value::String(text), _) => format!("{text:?}"),
                (value, _) => value.to_string(),
            };
            let name = format!("--{}", flag.name);
            text.push_str(&format!("{name:width$}  {value}  ({})\n", setting.origin));
        }
        text
    }

    fn set(&mut self, flag: &'static Flag, value: Value, origin: Origin) {
        self.0.insert(flag.name, Setting { value, origin });
    }

    fn take_from_file(&mut self, key: &str, value: Value, path: &str) -> Result<(), FlagError> {
        let name = key.replace('_', "-");
        let name = if name == "model-tag" { "model".to_owned() } else { name };
        let spelled = format!("--{name}");
        let flag = find(&name).or_else(|| FLAGS.iter().find(|flag| flag.aliases.contains(&spelled.as_str())));
        let Some(flag) = flag else {
            return Err(FlagError::Usage(format!("{path}: unknown flag {key:?}; see --help for those there are")));
        };
        let value = match (flag.kind, value) {
            (Kind::Switch, value @ Value::Bool(_)) => value,
            (Kind::Json, value @ Value::Object(_)) => value,
            (Kind::Texts | Kind::JsonTexts, Value::Array(items)) => {
                let text = |item: Value| Value::String(item.as_str().map_or_else(|| item.to_string(), str::to_owned));
                Value::Array(items.into_iter().map(text).collect())
            }
            (Kind::Texts, Value::String(text)) => Value::Array(vec![text.into()]),
            (_, Value::String(text)) => value_of(flag, &text)?,
            (Kind::Switch, other) => return Err(wrong(flag, &other.to_string())),
            (_, other) => value_of(flag, &other.to_string())?,
        };
        self.set(flag, value, Origin::File(path.to_owned()));
        Ok(())
    }

    fn apply(&mut self, flag: &'static Flag, given: Given) -> Result<(), FlagError> {
        let value = match (given.path, flag.kind) {
            (Some(path), _) => {
                // Parts of an object add to what is there, unless that is the default.
                let before = if self.is_given(flag.name) { self.value(flag.name).clone() } else { Value::Null };
                let mut object = before.as_object().cloned().unwrap_or_default();
                set_path(&mut object, &path, given.value);
                Value::Object(object)
            }
            // Repeated keys are all valid.
            (None, Kind::Texts) if flag.name == "api-key" => {
                let from_line = self.get(flag.name).is_some_and(|setting| setting.origin == Origin::CommandLine);
                let before = if from_line { self.value(flag.name).as_array().cloned() } else { None };
                let mut keys = before.unwrap_or_default();
                keys.extend(given.value.as_array().cloned().unwrap_or_default());
                Value::Array(keys)
            }
            (None, _) => given.value,
        };
        self.set(flag, value, Origin::CommandLine);
        Ok(())
    }
}

fn set_path(object: &mut Map<String, Value>, path: &[String], value: Value) {
    match path {
        [] => {}
        [key] => {
            object.insert(key.clone(), value);
        }
        [key, rest @ ..] => {
            let inner = object.entry(key.clone()).or_insert_with(|| Value::Object(Map::new()));
            if !inner.is_object() {
                *inner = Value::Object(Map::new());
            }
            if let Value::Object(inner) = inner {
                set_path(inner, rest, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<Settings, FlagError> {
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Settings::parse(&arguments, &|_| None, &|_| Err(std::io::ErrorKind::NotFound.into()))
    }

    #[test]
    fn spellings_of_one_flag() {
        for arguments in [
            &["--max-num-seqs", "8"][..],
            &["--max_num_seqs=8"],
            &["--max-num-seqs=8", "m"],
            &["m", "--max_num_seqs", "8"],
        ] {
            assert_eq!(parse(arguments).unwrap().value("max-num-seqs"), 8, "{arguments:?}");
        }
        assert_eq!(parse(&["-tp", "4"]).unwrap().value("tensor-parallel-size"), 4);
        assert_eq!(parse(&["--kv-cache-memory", "1G"]).unwrap().value("kv-cache-memory-bytes"), 1 << 30);
        assert_eq!(parse(&["--kv_cache_memory", "7"]).unwrap().value("kv-cache-memory-bytes"), 7);
        assert_eq!(parse(&["-O3"]).unwrap().value("optimization-level"), 3);
        assert_eq!(parse(&["--no-enable-prefix-caching"]).unwrap().value("enable-prefix-caching"), false);
        assert_eq!(parse(&["--enable-expert-parallel", "m"]).unwrap().value("model"), "m");
        assert_eq!(parse(&["a", "--model", "b"]).unwrap().value("model"), "a");
        let names = parse(&["--served-model-name", "a", "b", "--port", "1"]).unwrap();
        assert_eq!(names.value("served-model-name"), &json!(["a", "b"]));
        let keys = parse(&["--api-key", "a", "--api-key", "b"]).unwrap();
        assert_eq!(keys.value("api-key"), &json!(["a", "b"]));
        assert!(!keys.describe().contains("\"a\""), "keys are not printed");
    }

    #[test]
    fn objects_whole_and_in_parts() {
        let whole = parse(&["--speculative-config", r#"{"method":"mtp","num_speculative_tokens":2}"#]).unwrap();
        let parts =
            parse(&["--speculative-config.method", "mtp", "--speculative_config.num_speculative_tokens=2"]).unwrap();
        assert_eq!(whole.value("speculative-config"), parts.value("speculative-config"));
        assert!(parse(&["--port.x", "1"]).is_err());
    }

    #[test]
    fn wrong_flags_name_themselves_and_what_they_take() {
        for (arguments, needle) in [
            (&["--nonsense"][..], "unknown flag --nonsense"),
            (&["--max-num"], "did you mean --max-num-seqs or --max-num-batched-tokens"),
            (&["--port"], "--port needs a value: a whole number, 1 to 65535"),
            (&["--port", "0"], "--port: expected a whole number, 1 to 65535, found \"0\""),
            (&["--gpu-memory-utilization", "0"], "expected a number above 0 and up to 1"),
            (&["--kv-cache-dtype", "int4"], "one of auto, bfloat16, fp8, fp8_e4m3"),
            (&["--reasoning-parser", "qwen3"], "--reasoning-parser: expected one of glm45, glm47, none"),
            (&["--tool-call-parser", "hermes"], "--tool-call-parser: expected one of"),
            (&["--speculative-config", "[1]"], "expected a JSON object"),
            (&["--default-chat-template-kwargs", "{"], "expected a JSON object"),
            (&["--dtype", "float16"], "one of auto, bfloat16"),
            (&["--no-port"], "unknown flag --no-port"),
            (&["a", "b"], "unexpected argument \"b\""),
            (&["--config", "x.yaml"], "cannot read x.yaml"),
        ] {
            let error = parse(arguments).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(needle), "{error}");
        }
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_the_environment() {
        let arguments = ["--config", "f.yaml", "--port", "1"].map(str::to_owned);
        let environment = |name: &str| (name == "VLLM_API_KEY").then(|| "k".to_owned());
        let file =
            "port: 2\nhost: \"h\"\nenable_prefix_caching: false\nserved-model-name: [a, b]\nmax-model-len: 64k\n";
        let settings = Settings::parse(&arguments, &environment, &|_| Ok(file.to_owned())).unwrap();
        let shown: Vec<(Value, String)> =
            ["port", "host", "enable-prefix-caching", "served-model-name", "max-model-len", "api-key", "seed"]
                .iter()
                .map(|name| settings.get(name).map(|s| (s.value.clone(), s.origin.to_string())).unwrap())
                .collect();
        let file = "file f.yaml";
        let expected = [
            (json!(1), "command line"),
            (json!("h"), file),
            (json!(false), file),
            (json!(["a", "b"]), file),
            (json!(64_000), file),
            (json!(["k"]), "environment VLLM_API_KEY"),
            (json!(0), "default"),
        ];
        assert_eq!(shown, expected.map(|(value, origin)| (value, origin.to_owned())));
        let unknown = Settings::parse(&arguments, &|_| None, &|_| Ok("nonsense: 1".to_owned())).unwrap_err();
        assert!(unknown.to_string().contains("f.yaml: unknown flag \"nonsense\""), "{unknown}");
    }
}
