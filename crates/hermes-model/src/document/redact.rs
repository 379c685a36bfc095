//! Leaves secrets out of a document, so that it may be shown.
//!
//! In: a document as JSON. Out: the same, with values of headers that look like secrets replaced.
//! Key files are named, not held, in documents; their paths stay.

use serde_json::Value;

/// What stands instead of a secret.
pub const LEFT_OUT: &str = "(left out)";

/// Keys whose value is a map from names to values: headers, and the query of a rewrite, since
/// keys of APIs stand there as well.
const NAMED_VALUES: [&str; 4] = ["headers", "set-headers", "add-headers", "set"];

/// True for headers whose values are secrets, by name: credentials, cookies, and whatever calls
/// itself a key, token, secret or password.
pub fn is_secret(header: &str) -> bool {
    let name = header.to_ascii_lowercase();
    matches!(name.as_str(), "cookie" | "set-cookie")
        || ["auth", "key", "token", "secret", "password", "passwd", "credential"].iter().any(|word| name.contains(word))
}

/// Replaces secrets everywhere in the document.
pub fn redact(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::Object(named) if NAMED_VALUES.contains(&key.as_str()) => leave_out(named),
                    other => redact(other),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact),
        _ => {}
    }
}

fn leave_out(named: &mut serde_json::Map<String, Value>) {
    for (_, value) in named.iter_mut().filter(|(name, _)| is_secret(name)) {
        *value = Value::from(LEFT_OUT);
    }
}
