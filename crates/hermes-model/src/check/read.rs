//! Parsing: from text to sections. An invalid value is reported and removed, so that parsing continues.

use serde::de::DeserializeOwned;

use super::report::{MAX_PROBLEMS, Problem, Report};
use super::tree::{Fault, FieldError, Step, Tree, read};
use crate::document::Document;
use crate::document::did_you_mean::nearest;
use crate::document::listener::Listener;
use crate::document::route::Route;
use crate::document::upstream::Upstream;
use crate::scalar::EMPTY_LIST;

/// Maximum size of a document, in bytes. 10,000 routes take two or three million.
const MAX_DOCUMENT_BYTES: usize = 64 * 1024 * 1024;

/// Maximum number of documents in a stream.
const MAX_STREAM_DOCUMENTS: usize = 200_000;

/// Keys and values, in the document's order.
pub(super) type Entries = Vec<(String, Tree)>;

/// Placeholder for a missing name, so that the rest of its section can be checked.
const UNNAMED: &str = "(unnamed)";

/// The sections of a document that could be parsed.
#[derive(Debug)]
pub(super) struct Draft {
    /// All keys except the three lists.
    pub(super) head: Document,
    /// Sections, each with its position in the document.
    pub(super) listeners: Vec<(usize, Listener)>,
    pub(super) routes: Vec<(usize, Route)>,
    pub(super) upstreams: Vec<(usize, Upstream)>,
    /// Names of all sections, including those that could not be parsed.
    pub(super) listener_names: Vec<String>,
    pub(super) upstream_names: Vec<String>,
    /// Number of routes, including those that could not be parsed.
    pub(super) route_count: usize,
}

impl Draft {
    /// A document that was built by code rather than parsed.
    pub(super) fn whole(mut document: Document) -> Self {
        let listeners: Vec<_> = std::mem::take(&mut document.listeners).into_iter().enumerate().collect();
        let routes: Vec<_> = std::mem::take(&mut document.routes).into_iter().enumerate().collect();
        let upstreams: Vec<_> = std::mem::take(&mut document.upstreams).into_iter().enumerate().collect();
        Self {
            head: document,
            listener_names: listeners.iter().map(|(_, listener)| listener.name.clone()).collect(),
            upstream_names: upstreams.iter().map(|(_, upstream)| upstream.name.clone()).collect(),
            route_count: routes.len(),
            listeners,
            routes,
            upstreams,
        }
    }
}

/// Parses as much of a document as possible; `None` if nothing could be parsed.
pub(super) fn draft(text: &str, report: &mut Report) -> Option<Draft> {
    let mut map = match parse(text) {
        Ok(map) => map,
        Err(problem) => {
            report.problems.push(problem);
            return None;
        }
    };
    let listeners = list(&mut map, "listeners", report);
    let routes = list(&mut map, "routes", report);
    let upstreams = list(&mut map, "upstreams", report);
    Some(Draft {
        head: fit(Tree::Section(map), "", report)?,
        listener_names: names(&listeners),
        upstream_names: names(&upstreams),
        route_count: routes.len(),
        listeners: elements(listeners, "listeners", report),
        routes: elements(routes, "routes", report),
        upstreams: elements(upstreams, "upstreams", report),
    })
}

/// Parses YAML into a tree.
fn parse(text: &str) -> Result<Entries, Problem> {
    let whole = |message: String| Problem { path: String::new(), message };
    check_size(text)?;
    match serde_saphyr::from_str_with_options(text, options()) {
        Ok(Tree::Section(entries)) => Ok(entries),
        Ok(Tree::Nothing) => Err(whole("empty document; write at least `node: NAME`".to_owned())),
        Ok(_) => Err(whole("invalid document: expected a mapping; begin with `node: NAME`".to_owned())),
        Err(error) => Err(whole(syntax(&error))),
    }
}

/// Parses a stream of documents, each into a tree.
pub(super) fn stream(text: &str) -> Result<Vec<Tree>, Problem> {
    check_size(text)?;
    let read = serde_saphyr::from_multiple_with_options(text, stream_options());
    read.map_err(|error| Problem { path: String::new(), message: syntax(&error) })
}

fn check_size(text: &str) -> Result<(), Problem> {
    if text.len() > MAX_DOCUMENT_BYTES {
        let message = format!("document too large: {} bytes; the maximum is {MAX_DOCUMENT_BYTES}", text.len());
        return Err(Problem { path: String::new(), message });
    }
    Ok(())
}

/// Bounds for a document of [`MAX_DOCUMENT_BYTES`]. The limits of aliases and of depth exceed every document written by
/// hand.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 100_000 },
        budget: serde_saphyr::budget! {
            // A second document is parsed as well, to tell it from a large first one.
            max_documents: 2,
            max_events: 32_000_000,
            max_nodes: 16_000_000,
            max_depth: 32,
            max_recorded_anchor_events: 100_000,
        },
    }
}

/// The same bounds, for a stream of documents.
pub(super) fn stream_options() -> serde_saphyr::Options {
    let mut options = options();
    if let Some(budget) = &mut options.budget {
        budget.max_documents = MAX_STREAM_DOCUMENTS;
    }
    options
}

fn syntax(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error;
    if let Error::AliasError { error, .. } = error {
        return syntax(error);
    }
    let place = match error.location() {
        Some(at) if at.line() > 0 => format!("line {}, column {}: ", at.line(), at.column()),
        _ => String::new(),
    };
    let message = match error {
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("duplicate key {key:?}; keep one")
        }
        Error::MultipleDocuments { .. } => "second document; a node has only one".to_owned(),
        Error::Budget { .. } | Error::AliasReplayLimitExceeded { .. } => {
            "document too deep or too large, or its aliases expand to too much; shorten it".to_owned()
        }
        other => {
            let text = other.to_string();
            let reason = text.rfind(" at line ").map_or(text.as_str(), |at| &text[..at]);
            format!("invalid YAML: {reason}")
        }
    };
    format!("{place}{message}")
}

/// Takes a list out of the document.
fn list(entries: &mut Entries, key: &str, report: &mut Report) -> Vec<Tree> {
    let taken = entries.iter().position(|(name, _)| name == key).map(|at| entries.remove(at).1);
    match taken {
        None => Vec::new(),
        Some(Tree::List(items)) => items,
        Some(_) => {
            report.invalid(
                key.to_owned(),
                format!("invalid value: {key} must be a list; begin each entry with a dash, or use [] for none"),
            );
            Vec::new()
        }
    }
}

fn names(items: &[Tree]) -> Vec<String> {
    items.iter().filter_map(|item| item.get("name")?.as_text()).map(str::to_owned).collect()
}

fn elements<T: DeserializeOwned>(items: Vec<Tree>, key: &str, report: &mut Report) -> Vec<(usize, T)> {
    let mut elements = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        if report.is_full() {
            break;
        }
        elements.extend(fit(item, &format!("{key}[{at}]"), report).map(|element| (at, element)));
    }
    elements
}

/// Parses a section. Invalid values are reported and removed until the rest is valid. `None` if a required value is
/// missing.
pub(super) fn fit<T: DeserializeOwned>(mut tree: Tree, at: &str, report: &mut Report) -> Option<T> {
    // Each round removes a value, so the loop ends.
    for _ in 0..MAX_PROBLEMS {
        let error = match read(&tree) {
            Ok(section) => return Some(section),
            Err(error) => error,
        };
        if let Fault::MissingField(field) = error.fault {
            report.invalid(join(&join_all(at, &error.path), field), missing(field));
            replace_missing(&mut tree, &error.path, field)?;
        } else {
            report.invalid(join_all(at, &error.path), message(&error, at));
            tree.remove(&error.path)?;
        }
    }
    None
}

fn missing(field: &str) -> String {
    match field {
        "node" => "missing node name; add node: NAME".to_owned(),
        "name" => "missing name; add name: NAME".to_owned(),
        _ => format!("missing key {field:?}"),
    }
}

/// Replaces a missing value: a placeholder for a name, so that the rest can be checked. For any other value the
/// incomplete section is removed.
fn replace_missing(tree: &mut Tree, path: &[Step], field: &str) -> Option<()> {
    match (field, tree) {
        ("name" | "node", Tree::Section(entries)) if path.is_empty() => {
            entries.push((field.to_owned(), Tree::Text(UNNAMED.to_owned())));
            Some(())
        }
        (_, tree) => tree.remove(path),
    }
}

/// The message for a fault.
fn message(error: &FieldError, at: &str) -> String {
    match &error.fault {
        Fault::UnknownField { expected } => {
            let name = match error.path.last() {
                Some(Step::Key(key)) => key.as_str(),
                _ => "",
            };
            unknown_field(name, &section(at, &error.path), expected)
        }
        Fault::UnknownVariant { found, expected } => match nearest(found, expected.iter().copied()) {
            Some(near) => format!("unknown value {found:?} (did you mean {near:?}?)"),
            None => format!("unknown value {found:?}; expected one of: {}", expected.join(", ")),
        },
        Fault::WrongType { found, .. } if found == "nothing" => {
            "missing value after the colon; add a value ({} for a section of defaults), or remove the key".to_owned()
        }
        Fault::WrongType { found, expected } if expected.starts_with("a string") => {
            format!("invalid value: expected {expected}, found {found}; quote it if it is a string")
        }
        Fault::WrongType { found, expected } => {
            let remedy = switched(error.path.last(), found).unwrap_or_default();
            format!("invalid value: expected {expected}, found {found}{remedy}")
        }
        // An upstream needs endpoints, so the remedy cannot be to omit the key.
        Fault::Message(sentence) if sentence == EMPTY_LIST && is_key(error.path.last(), "endpoints") => {
            "empty list; add an entry".to_owned()
        }
        Fault::Message(sentence) => sentence.clone(),
        Fault::MissingField(field) => missing(field),
    }
}

/// Sections for which `KEY: {}` enables all defaults.
const OPTIONAL_SECTIONS: [&str; 6] = ["custody", "cache", "upstream-rate-limit", "resume", "tls", "health"];

/// The remedy for a section that was set to true or false.
fn switched(step: Option<&Step>, found: &str) -> Option<String> {
    let Some(Step::Key(key)) = step else { return None };
    let is_one = OPTIONAL_SECTIONS.contains(&key.as_str());
    match found {
        "boolean true" if is_one => Some(format!("; use {key}: {{}} for its defaults")),
        "boolean false" if is_one => Some(format!("; remove {key}")),
        _ => None,
    }
}

fn is_key(step: Option<&Step>, name: &str) -> bool {
    matches!(step, Some(Step::Key(key)) if key == name)
}

/// Keys of later versions, by section.
const FUTURE_KEYS: [(&str, &[&str]); 4] = [
    ("", &["relay", "channels", "objectives"]),
    ("listeners", &["mtu"]),
    ("routes", &["relay", "broadcast", "policy"]),
    ("routes.terminate", &["ndn"]),
];

/// Keys that only routes have.
const ROUTE_KEYS: [&str; 4] = ["custody", "cache", "upstream-rate-limit", "resume"];

/// Keys that had another name in builds before 0.1.0: the old name and the new one.
const RENAMED_KEYS: [(&str, &str); 11] = [
    ("certificate-life", "certificate-lifetime"),
    ("contact", "contact-plan"),
    ("inner", "dnat"),
    ("pace", "upstream-rate-limit"),
    ("quic-largest-mtu", "quic-max-mtu"),
    ("rest", "ejection-time"),
    ("retrievals", "resume-pending"),
    ("retrieve", "resume"),
    ("retry-floor", "min-retry-concurrency"),
    ("stale", "stale-if-error"),
    ("unread", "receive-buffer"),
];

/// The remedy for a key that belongs elsewhere.
fn remedy_elsewhere(name: &str, section: &str) -> Option<String> {
    Some(match (section, name) {
        ("" | "listeners" | "upstreams", name) if ROUTE_KEYS.contains(&name) => {
            format!("it belongs to a route: move it to routes[N].{name}")
        }
        ("" | "routes", "dns") => {
            "DNS is a listener protocol: add {name: dns, protocol: dns, ...} to listeners".to_owned()
        }
        ("listeners", "dns") => "use protocol: dns".to_owned(),
        ("listeners", "h3" | "quic") => "use protocol: http with http3: true".to_owned(),
        ("upstreams", "http3" | "h3" | "quic") => "use protocol: h3".to_owned(),
        _ => return None,
    })
}

fn unknown_field(name: &str, section: &str, expected: &[&str]) -> String {
    if FUTURE_KEYS.iter().any(|(of, names)| *of == section && names.contains(&name)) {
        return format!("key {name:?} is not supported by this version of Hermes; remove it");
    }
    if let Some(remedy) = remedy_elsewhere(name, section) {
        return format!("unknown key {name:?}; {remedy}");
    }
    if let Some((_, new)) = RENAMED_KEYS.iter().find(|(old, new)| *old == name && expected.contains(new)) {
        return format!("unknown key {name:?}; it is now {new:?}");
    }
    match nearest(name, expected.iter().copied()) {
        Some(near) => format!("unknown key {name:?} (did you mean {near:?}?)"),
        None if expected.is_empty() => format!("unknown key {name:?}; remove it"),
        None => format!("unknown key {name:?}; expected one of: {}", expected.join(", ")),
    }
}

/// The path of a section without positions and without its last key: `routes.terminate`.
fn section(at: &str, path: &[Step]) -> String {
    let list = at.split('[').next().unwrap_or("");
    let keys = path.iter().take(path.len().saturating_sub(1)).filter_map(|step| match step {
        Step::Key(key) => Some(key.as_str()),
        Step::Index(_) => None,
    });
    std::iter::once(list).filter(|list| !list.is_empty()).chain(keys).collect::<Vec<_>>().join(".")
}

fn join_all(at: &str, path: &[Step]) -> String {
    path.iter().fold(at.to_owned(), |joined, step| match step {
        Step::Key(key) => join(&joined, key),
        Step::Index(index) => format!("{joined}[{index}]"),
    })
}

fn join(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}
