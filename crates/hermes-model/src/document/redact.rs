//! Redacts secrets in a document, so that it may be shown.
//!
//! In: a document as JSON. Out: the same document without field values that may be secrets.
//! Paths of key files remain, because documents do not contain the keys.

use serde_json::Value;

/// Replacement for a secret.
pub const REDACTED: &str = "(left out)";

/// Keys with a map from names to values that this node writes: header fields, and the query of a rewrite, which may
/// hold API keys.
const SET_VALUES: [&str; 4] = ["headers", "set-headers", "add-headers", "set"];

/// Fields whose values are never secret. The value of any other field may be.
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

/// Prefix of the overlay's own fields: users, networks, services.
const OVERLAY: &str = "hermes-";

/// Substrings in the names of secret fields.
const SECRET_NAME_PARTS: [&str; 13] = [
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

/// Words in the names of secret fields; as substrings they occur in other names.
const SECRET_NAME_WORDS: [&str; 6] = ["sig", "sid", "otp", "pin", "pass", "pwd"];

/// True for fields whose values are secret by their name: credentials, cookies, keys, tokens, secrets, passwords.
/// Applies to fields that clients sent and that routes match; see `redact` for fields that are set.
pub fn is_secret(header: &str) -> bool {
    let name = header.to_ascii_lowercase();
    matches!(name.as_str(), "cookie" | "set-cookie")
        || SECRET_NAME_PARTS.iter().any(|part| name.contains(part))
        || name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| SECRET_NAME_WORDS.contains(&word))
}

/// Redacts all secrets of the document. A value that is set is redacted unless its name is known to be harmless. A
/// value that is matched is redacted if its name indicates a secret. URLs keep their host and path only.
pub fn redact(value: &mut Value) {
    redact_within(value, false);
}

fn redact_within(value: &mut Value, is_match: bool) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::Object(named) if SET_VALUES.contains(&key.as_str()) => redact_values(named, is_match),
                    Value::String(url) if key == "location" => *url = redact_url(url),
                    other => redact_within(other, is_match || key == "match"),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| redact_within(item, is_match)),
        _ => {}
    }
}

fn redact_values(named: &mut serde_json::Map<String, Value>, is_match: bool) {
    let is_redacted = |name: &str| {
        let name = name.to_ascii_lowercase();
        if is_match { is_secret(&name) } else { !SAFE.contains(&&*name) && !name.starts_with(OVERLAY) }
    };
    for (_, value) in named.iter_mut().filter(|(name, value)| is_redacted(name) && (is_match || has_text(value))) {
        *value = Value::from(REDACTED);
    }
}

/// True if a value has text besides placeholders, which reveal nothing.
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

/// Removes user information, query and fragment from a URL. A fragment may hold a token (RFC 6749, section 4.2.2). The
/// query remains if it is only `{query}`.
fn redact_url(url: &str) -> String {
    let (url, fragment) = match url.split_once('#') {
        Some((url, _)) => (url, format!("#{REDACTED}")),
        None => (url, String::new()),
    };
    let (rest, query) = match url.split_once('?') {
        Some((rest, "{query}")) => (rest, "?{query}".to_owned()),
        Some((rest, _)) => (rest, format!("?{REDACTED}")),
        None => (url, String::new()),
    };
    let authority = rest.find("//").map_or(0, |at| at + 2);
    let end = rest[authority..].find('/').map_or(rest.len(), |at| authority + at);
    let bare = match rest[authority..end].rfind('@') {
        Some(at) => format!("{}{REDACTED}{}", &rest[..authority], &rest[authority + at..]),
        None => rest.to_owned(),
    };
    bare + &query + &fragment
}
