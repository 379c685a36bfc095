//! Leaves secrets out of a document, so that it may be shown.
//!
//! In: a document as JSON. Out: the same, with values of headers that look like secrets replaced.
//! Key files are named, not held, in documents; their paths stay.

use serde_json::Value;

/// What stands instead of a secret.
pub const LEFT_OUT: &str = "(left out)";

/// Keys whose value is a map from names to values that this node writes: headers, and the query of a rewrite, which may
/// hold API keys as well.
const SET_VALUES: [&str; 4] = ["headers", "set-headers", "add-headers", "set"];

/// Fields whose values hold no secret. The value of any other field may be one.
const SAFE: [&str; 38] = [
    "accept",
    "accept-encoding",
    "accept-language",
    "access-control-allow-credentials",
    "access-control-allow-headers",
    "access-control-allow-methods",
    "access-control-allow-origin",
    "access-control-expose-headers",
    "access-control-max-age",
    "age",
    "allow",
    "alt-svc",
    "cache-control",
    "cdn-cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "date",
    "expires",
    "forwarded",
    "host",
    "pragma",
    "priority",
    "retry-after",
    "server",
    "strict-transport-security",
    "timing-allow-origin",
    "traceparent",
    "user-agent",
    "vary",
    "via",
    "x-content-type-options",
    "x-frame-options",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
];

/// The prefix of the overlay's own fields: users, networks, services.
const OVERLAY: &str = "hermes-";

/// Parts of names of secrets.
const SECRET: [&str; 13] = [
    "auth",
    "key",
    "token",
    "secret",
    "password",
    "passwd",
    "credential",
    "jwt",
    "dpop",
    "bearer",
    "session",
    "signature",
    "assertion",
];

/// Whole words of names of secrets; as parts of words they occur in other names.
const SECRET_WORDS: [&str; 6] = ["sig", "sid", "otp", "pin", "pass", "pwd"];

/// True for headers whose values are secrets, by name: credentials, cookies, and whatever calls
/// itself a key, token, secret or password. For what clients sent and what routes match; see `redact` for what is set.
pub fn is_secret(header: &str) -> bool {
    let name = header.to_ascii_lowercase();
    matches!(name.as_str(), "cookie" | "set-cookie")
        || SECRET.iter().any(|part| name.contains(part))
        || name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| SECRET_WORDS.contains(&word))
}

/// Replaces secrets everywhere in the document: values that are set, unless their names are known to hold none; values
/// that are matched, if their names tell of a secret; and the parts of URLs beside host and path.
pub fn redact(value: &mut Value) {
    redact_within(value, false);
}

fn redact_within(value: &mut Value, is_match: bool) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::Object(named) if SET_VALUES.contains(&key.as_str()) => leave_out(named, is_match),
                    Value::String(url) if key == "location" => *url = without_secrets(url),
                    other => redact_within(other, is_match || key == "match"),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| redact_within(item, is_match)),
        _ => {}
    }
}

fn leave_out(named: &mut serde_json::Map<String, Value>, is_match: bool) {
    let is_left_out = |name: &str| {
        let name = name.to_ascii_lowercase();
        if is_match { is_secret(&name) } else { !SAFE.contains(&&*name) && !name.starts_with(OVERLAY) }
    };
    for (_, value) in named.iter_mut().filter(|(name, value)| is_left_out(name) && (is_match || has_text(value))) {
        *value = Value::from(LEFT_OUT);
    }
}

/// True if a value has more than placeholders, which reveal nothing of the document.
fn has_text(value: &Value) -> bool {
    match value {
        Value::String(template) => {
            let bare = template.replace("{{", "").replace("}}", "");
            let outside = bare.split('{').enumerate();
            let mut texts =
                outside.map(|(at, part)| if at == 0 { part } else { part.split_once('}').unwrap_or(("", part)).1 });
            texts.any(|text| text.contains(char::is_alphanumeric))
        }
        Value::Array(items) => items.iter().any(has_text),
        _ => true,
    }
}

/// A URL without its user information, its query, unless that is the request's own, and its fragment, which may hold a
/// token as well (RFC 6749, section 4.2.2).
fn without_secrets(url: &str) -> String {
    let (url, fragment) = match url.split_once('#') {
        Some((url, _)) => (url, format!("#{LEFT_OUT}")),
        None => (url, String::new()),
    };
    let (rest, query) = match url.split_once('?') {
        Some((rest, "{query}")) => (rest, "?{query}".to_owned()),
        Some((rest, _)) => (rest, format!("?{LEFT_OUT}")),
        None => (url, String::new()),
    };
    let authority = rest.find("//").map_or(0, |at| at + 2);
    let end = rest[authority..].find('/').map_or(rest.len(), |at| authority + at);
    let bare = match rest[authority..end].rfind('@') {
        Some(at) => format!("{}{LEFT_OUT}{}", &rest[..authority], &rest[authority + at..]),
        None => rest.to_owned(),
    };
    bare + &query + &fragment
}
