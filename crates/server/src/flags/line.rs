//! From arguments to flags: spellings, negations, dotted keys, values behind `=` or in the next argument.

use serde_json::Value;

use super::FlagError;
use super::table::{FLAGS, Flag, Kind, find};
use super::value::{accepted, boolean, value_of, wrong};

/// A flag as it stands on the command line.
pub(super) struct Given {
    pub(super) value: Value,
    /// Keys behind the flag's name, `--flag.a.b`.
    pub(super) path: Option<Vec<String>>,
}

/// All flags in their order; the model, wherever it stands, comes last.
///
/// # Errors
/// [`FlagError::Usage`].
pub(super) fn command_line(arguments: &[String]) -> Result<Vec<(&'static Flag, Given)>, FlagError> {
    let mut given = Vec::new();
    let mut model = None;
    let mut rest = arguments.iter().map(String::as_str).peekable();
    while let Some(argument) = rest.next() {
        if !argument.starts_with('-') || argument == "-" {
            if model.is_some() {
                return Err(FlagError::Usage(format!("unexpected argument {argument:?}: the model is given already")));
            }
            model = Some(argument.to_owned());
            continue;
        }
        if let Some(level) = argument.strip_prefix("-O").filter(|level| !level.is_empty()) {
            let flag = find("optimization-level").expect("the table has it");
            given.push((flag, Given { value: value_of(flag, level.trim_start_matches('='))?, path: None }));
            continue;
        }
        let (spelled, inline) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (argument, None),
        };
        let Found { flag, negated, path } = lookup(spelled)?;
        if flag.kind == Kind::Switch {
            let value = match inline {
                None => !negated,
                Some(text) => boolean(text).ok_or_else(|| wrong(flag, text))? != negated,
            };
            given.push((flag, Given { value: value.into(), path: None }));
            continue;
        }
        let mut next = || inline.or_else(|| rest.next_if(|value| is_value(value)));
        let Some(first) = next() else {
            return Err(FlagError::Usage(format!("{spelled} needs a value: {}", accepted(flag.kind))));
        };
        let value = match (&path, flag.kind) {
            (Some(_), _) => serde_json::from_str(first).unwrap_or_else(|_| first.into()),
            (None, Kind::Texts) => {
                let mut texts = vec![Value::from(first)];
                while let Some(more) = rest.next_if(|value| inline.is_none() && is_value(value)) {
                    texts.push(more.into());
                }
                Value::Array(texts)
            }
            (None, _) => value_of(flag, first)?,
        };
        given.push((flag, Given { value, path }));
    }
    if let (Some(model), Some(flag)) = (model, find("model")) {
        given.push((flag, Given { value: model.into(), path: None }));
    }
    Ok(given)
}

/// Negative numbers are values, not flags.
fn is_value(argument: &str) -> bool {
    !argument.starts_with('-') || argument.parse::<f64>().is_ok()
}

struct Found {
    flag: &'static Flag,
    negated: bool,
    path: Option<Vec<String>>,
}

fn lookup(spelled: &str) -> Result<Found, FlagError> {
    let (head, path) = match spelled.split_once('.') {
        Some((head, keys)) => (head, Some(keys.split('.').map(str::to_owned).collect::<Vec<_>>())),
        None => (spelled, None),
    };
    let named = |flag: &&'static Flag, name: &str| flag.name == name || flag.aliases.contains(&head);
    let name = head.strip_prefix("--").unwrap_or(head).replace('_', "-");
    let dashed = format!("--{name}");
    let direct = FLAGS.iter().find(|flag| {
        (head.starts_with("--") && named(flag, &name))
            || flag.aliases.contains(&head)
            || flag.aliases.contains(&dashed.as_str())
    });
    let found = match direct {
        Some(flag) => Some((flag, false)),
        None => {
            let positive = name.strip_prefix("no-").filter(|_| head.starts_with("--"));
            positive.and_then(find).filter(|flag| flag.kind == Kind::Switch).map(|flag| (flag, true))
        }
    };
    match found {
        Some((flag, negated)) if path.is_none() || flag.kind == Kind::Json => Ok(Found { flag, negated, path }),
        Some((flag, _)) => Err(FlagError::Usage(format!("{spelled}: --{} takes no keys", flag.name))),
        None => {
            let near = FLAGS.iter().map(|flag| flag.name).filter(|known| known.starts_with(&name) && !name.is_empty());
            let near: Vec<String> = near.map(|known| format!("--{known}")).collect();
            let hint = if near.is_empty() { String::new() } else { format!("; did you mean {}?", near.join(" or ")) };
            Err(FlagError::Usage(format!("unknown flag {spelled}{hint}")))
        }
    }
}
