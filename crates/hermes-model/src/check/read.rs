//! Reads: from text to sections, going on behind each value that does not fit.

use serde::de::DeserializeOwned;

use super::report::{MAX_PROBLEMS, Problem, Report};
use super::tree::{Fault, Misfit, Step, Tree, read};
use crate::document::Document;
use crate::document::listener::Listener;
use crate::document::nearest::nearest;
use crate::document::route::Route;
use crate::document::upstream::Upstream;
use crate::scalar::EMPTY_LIST;

/// The longest document, in bytes. 10,000 routes have two or three million.
const MAX_DOCUMENT: usize = 64 * 1024 * 1024;

/// Documents of one stream.
const MAX_STREAM: usize = 200_000;

/// Keys and values, in the document's order.
pub(super) type Entries = Vec<(String, Tree)>;

/// What stands for a name that is missing, so that the rest of its section can be checked.
const UNNAMED: &str = "(unnamed)";

/// The sections of a document that could be read.
#[derive(Debug)]
pub(super) struct Draft {
    /// Everything but the three lists.
    pub(super) head: Document,
    /// With their positions in the document.
    pub(super) listeners: Vec<(usize, Listener)>,
    pub(super) routes: Vec<(usize, Route)>,
    pub(super) upstreams: Vec<(usize, Upstream)>,
    /// Names of all, also of those that could not be read.
    pub(super) listener_names: Vec<String>,
    pub(super) upstream_names: Vec<String>,
    /// Routes of the document, also those that could not be read.
    pub(super) route_count: usize,
}

impl Draft {
    /// A document that was made rather than read.
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

/// Reads a document as far as it can be read; `None` where nothing can.
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
    bounded(text)?;
    match serde_saphyr::from_str_with_options(text, options()) {
        Ok(Tree::Section(entries)) => Ok(entries),
        Ok(Tree::Nothing) => Err(whole("the document is empty; it needs at least `node: NAME`".to_owned())),
        Ok(_) => Err(whole("a node document is a section of keys; begin with `node: NAME`".to_owned())),
        Err(error) => Err(whole(syntax(&error))),
    }
}

/// Parses a stream of documents, each into a tree.
pub(super) fn stream(text: &str) -> Result<Vec<Tree>, Problem> {
    bounded(text)?;
    let read = serde_saphyr::from_multiple_with_options(text, stream_options());
    read.map_err(|error| Problem { path: String::new(), message: syntax(&error) })
}

fn bounded(text: &str) -> Result<(), Problem> {
    if text.len() > MAX_DOCUMENT {
        let message = format!("the document has {} bytes; at most {MAX_DOCUMENT} are read", text.len());
        return Err(Problem { path: String::new(), message });
    }
    Ok(())
}

/// Bounds for a document of [`MAX_DOCUMENT`] bytes. Aliases may stand for what a person would
/// repeat by hand, and nobody nests more than ten levels.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 100_000 },
        budget: serde_saphyr::budget! {
            // The second is read so far that it can be told from a large first one.
            max_documents: 2,
            max_events: 32_000_000,
            max_nodes: 16_000_000,
            max_depth: 32,
            max_recorded_anchor_events: 100_000,
        },
    }
}

/// The same limits, for a stream of documents.
pub(super) fn stream_options() -> serde_saphyr::Options {
    let mut options = options();
    if let Some(budget) = &mut options.budget {
        budget.max_documents = MAX_STREAM;
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
            format!("the key {key:?} stands here a second time; keep one")
        }
        Error::MultipleDocuments { .. } => "a second document begins here; a node has one".to_owned(),
        Error::Budget { .. } | Error::AliasReplayLimitExceeded { .. } => {
            "the document is too deep or too large, or its aliases stand for too much; write less".to_owned()
        }
        other => {
            let text = other.to_string();
            let told = text.rfind(" at line ").map_or(text.as_str(), |at| &text[..at]);
            format!("this is no YAML: {told}")
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
            report.misfit(key.to_owned(), format!("{key} is a list; write each element behind a dash, or [] for none"));
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

/// Reads a section. What does not fit is reported and taken out, until the rest fits; `None`
/// where something is missing without which nothing can be said.
pub(super) fn fit<T: DeserializeOwned>(mut tree: Tree, at: &str, report: &mut Report) -> Option<T> {
    // Each round takes out a value, so that this ends; a section with more slips is no section.
    for _ in 0..MAX_PROBLEMS {
        let misfit = match read(&tree) {
            Ok(section) => return Some(section),
            Err(misfit) => misfit,
        };
        if let Fault::MissingField(field) = misfit.fault {
            report.misfit(join(&join_all(at, &misfit.path), field), missing(field));
            stand_in(&mut tree, &misfit.path, field)?;
        } else {
            report.misfit(join_all(at, &misfit.path), message(&misfit, at));
            tree.remove(&misfit.path)?;
        }
    }
    None
}

fn missing(field: &str) -> String {
    match field {
        "node" => "every document names its node; add node: NAME".to_owned(),
        "name" => "this has no name; add name: and a word of its own".to_owned(),
        _ => format!("{field} is missing; add it"),
    }
}

/// Puts something in the place of what is missing: a name, so that the rest can be checked, or
/// nothing at all instead of an incomplete section.
fn stand_in(tree: &mut Tree, path: &[Step], field: &str) -> Option<()> {
    match (field, tree) {
        ("name" | "node", Tree::Section(entries)) if path.is_empty() => {
            entries.push((field.to_owned(), Tree::Text(UNNAMED.to_owned())));
            Some(())
        }
        (_, tree) => tree.remove(path),
    }
}

/// The sentence for a fault.
fn message(misfit: &Misfit, at: &str) -> String {
    match &misfit.fault {
        Fault::UnknownField { expected } => {
            let name = match misfit.path.last() {
                Some(Step::Key(key)) => key.as_str(),
                _ => "",
            };
            unknown_field(name, &section(at, &misfit.path), expected)
        }
        Fault::UnknownVariant { found, expected } => match nearest(found, expected.iter().copied()) {
            Some(near) => format!("{found:?} is not known here; did you mean {near}?"),
            None => format!("{found:?} is not known here; write one of {}", expected.join(", ")),
        },
        Fault::WrongType { found, .. } if found == "nothing" => {
            "there is nothing behind the colon; write a value (or {} for a section of defaults), or leave the key out"
                .to_owned()
        }
        Fault::WrongType { found, expected } if expected.starts_with("a text") => {
            format!("{found} stands where {expected} belongs; quote it if it is one")
        }
        Fault::WrongType { found, expected } => {
            let remedy = switched(misfit.path.last(), found).unwrap_or_default();
            format!("{found} stands where {expected} belongs{remedy}")
        }
        // An upstream without endpoints is none: here the key cannot be left out.
        Fault::Said(sentence) if sentence == EMPTY_LIST && is_key(misfit.path.last(), "endpoints") => {
            "the list is empty; name at least one".to_owned()
        }
        Fault::Said(sentence) => sentence.clone(),
        Fault::MissingField(field) => missing(field),
    }
}

/// Sections that can be had with all their defaults.
const OPTIONAL: [&str; 6] = ["custody", "cache", "pace", "retrieve", "tls", "health"];

/// What to write where somebody has switched a section on or off.
fn switched(step: Option<&Step>, found: &str) -> Option<String> {
    let Some(Step::Key(key)) = step else { return None };
    let is_one = OPTIONAL.contains(&key.as_str());
    match found {
        "the boolean true" if is_one => Some(format!("; write {key}: {{}} for its defaults")),
        "the boolean false" if is_one => Some(format!("; leave {key} out")),
        _ => None,
    }
}

fn is_key(step: Option<&Step>, name: &str) -> bool {
    matches!(step, Some(Step::Key(key)) if key == name)
}

/// Keys of later versions, by section.
const LATER: [(&str, &[&str]); 4] = [
    ("", &["relay", "channels", "objectives"]),
    ("listeners", &["mtu"]),
    ("routes", &["relay", "broadcast", "policy"]),
    ("routes.terminate", &["ndn"]),
];

/// What a route has, and nobody else.
const OF_ROUTES: [&str; 4] = ["custody", "cache", "pace", "retrieve"];

/// Where something is that is looked for elsewhere.
fn elsewhere(name: &str, section: &str) -> Option<String> {
    Some(match (section, name) {
        ("" | "listeners" | "upstreams", name) if OF_ROUTES.contains(&name) => {
            format!("{name} belongs to a route: write it there, at routes[N].{name}")
        }
        ("" | "routes", "dns") => {
            "DNS is what a listener speaks: write {name: dns, protocol: dns, ...} at listeners".to_owned()
        }
        ("listeners", "dns") => "write protocol: dns".to_owned(),
        ("listeners", "h3" | "quic") => "write http3: true beside protocol: http".to_owned(),
        ("upstreams", "http3" | "h3" | "quic") => "write protocol: h3".to_owned(),
        _ => return None,
    })
}

fn unknown_field(name: &str, section: &str, expected: &[&str]) -> String {
    if LATER.iter().any(|(of, names)| *of == section && names.contains(&name)) {
        return format!("{name} is not in this version of Hermes; leave it out");
    }
    if let Some(remedy) = elsewhere(name, section) {
        return format!("{name:?} is no key here; {remedy}");
    }
    match nearest(name, expected.iter().copied()) {
        Some(near) => format!("{name:?} is no key here; did you mean {near}?"),
        None if expected.is_empty() => format!("{name:?} is no key here; leave it out"),
        None => format!("{name:?} is no key here; keys are {}", expected.join(", ")),
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
