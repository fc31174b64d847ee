//! Where in a schema a problem is.
//!
//! The library names the problem but rarely its place. The place is the innermost subschema that, taken alone, has the same
//! problem: each of them is compiled until one does not. Only a schema that was refused pays for it, and the number of
//! attempts is bounded.

use serde_json::Value;

use super::json::{Lenience, children, prepared, with_definitions};

/// Most subschemas that are tried.
const ATTEMPTS: usize = 200;

/// JSON pointer to the innermost part of a schema with this problem, empty for the schema itself. `problem_of` compiles a
/// schema and says what is wrong with it.
pub(super) fn of_problem(schema: &Value, problem: &str, problem_of: &dyn Fn(Value) -> Option<String>) -> String {
    let cause = cause(problem);
    let mut attempts = ATTEMPTS;
    let (mut place, mut here) = (String::new(), schema);
    loop {
        let mut parts = children(here);
        // Definitions count only where something refers to them, so what is used comes first.
        parts.sort_by_key(|(pointer, _)| pointer.starts_with("/$defs") || pointer.starts_with("/definitions"));
        let deeper = parts.into_iter().find(|(_, part)| {
            if attempts == 0 {
                return false;
            }
            attempts -= 1;
            let alone = prepared(with_definitions(part, schema), Lenience::Strict);
            problem_of(alone).is_some_and(|found| self::cause(&found) == cause)
        });
        let Some((pointer, part)) = deeper else { return place };
        place += &pointer;
        here = part;
    }
}

/// What is behind the remarks on how the library came upon it.
fn cause(problem: &str) -> &str {
    problem.lines().next().unwrap_or_default().rsplit(": Unsatisfiable schema: ").next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_innermost_part_with_the_problem_is_named() {
        let problem_of = |schema: Value| schema.to_string().contains("bad").then(|| "bad".to_owned());
        let schema = json!({"type": "object", "properties": {
            "fine": {"type": "string"},
            "a/b": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"bad": 1}}]}}});
        assert_eq!(of_problem(&schema, "bad", &problem_of), "/properties/a~1b/anyOf/1/items");
        assert_eq!(of_problem(&json!({"bad": 1}), "bad", &problem_of), "");
    }
}
