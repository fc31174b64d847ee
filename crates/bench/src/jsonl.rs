//! Lines of JSON.

use serde::de::DeserializeOwned;

/// Reads a line that is one JSON object; the error says what is wrong, and where in the line.
pub(crate) fn object<T: DeserializeOwned>(line: &str) -> Result<T, String> {
    if !line.trim_start().starts_with('{') {
        let found: String = line.trim().chars().take(20).collect();
        return Err(format!("expected one JSON object, found `{found}`"));
    }
    // The line number within the line would only be taken for the file's.
    serde_json::from_str(line).map_err(|error| error.to_string().replace(" at line 1 column ", " at column "))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value};

    use super::object;

    #[test]
    fn errors_name_the_place_in_the_line() {
        let read = object::<Map<String, Value>>;
        assert_eq!(read(r#" {"a": 1}"#).unwrap().len(), 1);
        assert_eq!(read("[1, 2]").unwrap_err(), "expected one JSON object, found `[1, 2]`");
        assert_eq!(read("{\"a\"").unwrap_err(), "EOF while parsing an object at column 4");
    }
}
