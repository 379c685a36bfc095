//! Check: from the text of a node document to a snapshot, or to every problem that it has.
//!
//! In: YAML, and the directory that relative paths of files start from. Out: a snapshot and
//! warnings; or all problems at once, each with its place and its remedy.
//! Never: opens a file, resolves a name, or gives a snapshot of a document with a problem.
//!
//! Two passes. `read` turns the text into sections; where a value does not fit, it says so, takes
//! the value out and goes on. The other modules turn sections into parsed types, a section each.
//! What they say about something that `read` complained of already is left out.

mod carried;
mod dns;
mod exposure;
mod header;
mod listener;
mod node;
pub(crate) mod packets;
pub mod position;
pub(crate) mod proof;
mod read;
mod route;
pub mod section;
mod shadow;
mod treatment;
mod tree;
mod uplink;
mod upstream;

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::document::nearest::did_you_mean;
use crate::document::{Document, redact};
use crate::facts::Kind;
use crate::snapshot::RouteIndex;
use crate::snapshot::{Action, Listener, Route, Snapshot, Upstream};
use read::Draft;

/// No more problems than this are told at once.
pub const MAX_PROBLEMS: usize = 100;

/// A document without problems.
#[derive(Debug)]
pub struct Checked {
    /// What the node runs on.
    pub snapshot: Snapshot,
    /// What is legal, and probably not meant.
    pub warnings: Vec<Problem>,
}

/// Something that is wrong at a place of the document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Such as `routes[3].match.network`; empty for the document as a whole.
    pub path: String,
    /// What is wrong, and what to do about it.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.path, self.message) }
    }
}

/// Checks the text of a node document. Relative paths of files in it are taken from `base`.
///
/// # Errors
/// Every problem, up to [`MAX_PROBLEMS`], in the order of the document's sections.
pub fn check(text: &str, base: &Path) -> Result<Checked, Vec<Problem>> {
    let mut report = Report::default();
    let draft = read::draft(text, &mut report);
    finish(draft, base, report)
}

/// Checks a document that a controller has written: JSON, which is read many times faster than YAML. What cannot be read so is
/// read as any other, so that the same is said of it.
///
/// # Errors
/// As [`check`]; and where it is no UTF-8.
pub fn check_json(bytes: &[u8], base: &Path) -> Result<Checked, Vec<Problem>> {
    if let Ok(document) = serde_json::from_slice(bytes) {
        return check_document(document, base);
    }
    let problem = |_| Problem { path: String::new(), message: "the document is no UTF-8".to_owned() };
    check(std::str::from_utf8(bytes).map_err(|error| vec![problem(error)])?, base)
}

/// Checks a document that was made rather than read, as a controller does.
///
/// # Errors
/// As [`check`].
pub fn check_document(document: Document, base: &Path) -> Result<Checked, Vec<Problem>> {
    finish(Some(Draft::whole(document)), base, Report::default())
}

fn finish(draft: Option<Draft>, base: &Path, mut report: Report) -> Result<Checked, Vec<Problem>> {
    let snapshot = draft.map(|draft| build(&draft, base, &mut report));
    match snapshot {
        Some(snapshot) if report.problems.is_empty() => {
            report.warnings.sort_by(by_place);
            Ok(Checked { snapshot, warnings: report.warnings })
        }
        _ => Err(report.into_problems()),
    }
}

/// What is found on the way.
#[derive(Debug, Default)]
struct Report {
    problems: Vec<Problem>,
    warnings: Vec<Problem>,
    /// Paths whose values did not fit and were taken out.
    broken: Vec<String>,
}

impl Report {
    fn problem(&mut self, path: impl Into<String>, message: impl Into<String>) {
        let path = path.into();
        if !self.is_full() && !self.is_broken(&path) {
            self.problems.push(Problem { path, message: message.into() });
        }
    }

    /// There are more problems than anybody reads: what follows is not looked into, so that a
    /// hostile document costs no more than its length.
    fn is_full(&self) -> bool {
        self.problems.len() > MAX_PROBLEMS
    }

    fn warning(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.warnings.push(Problem { path: path.into(), message: message.into() });
    }

    /// A value that did not fit. What is missing only because it was taken out is no new problem.
    fn misfit(&mut self, path: String, message: String) {
        if !self.is_full() && !self.is_broken(&path) {
            self.broken.push(path.clone());
            self.problems.push(Problem { path, message });
        }
    }

    /// Something at or below this path was taken out, so that what is said of it would mislead.
    fn is_broken(&self, path: &str) -> bool {
        !path.is_empty()
            && self.broken.iter().any(|broken| {
                broken.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
            })
    }

    /// The value of a result, or its sentence as a problem.
    fn take<T>(&mut self, path: impl FnOnce() -> String, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.problem(path(), message)).ok()
    }

    fn into_problems(mut self) -> Vec<Problem> {
        self.problems.sort_by(by_place);
        self.problems.dedup();
        if self.is_full() {
            self.problems.truncate(MAX_PROBLEMS);
            let message = "there are more problems; mend these first".to_owned();
            self.problems.push(Problem { path: String::new(), message });
        }
        self.problems
    }
}

/// Sections in their usual order, elements by number; within one, the order of being found, which
/// is the document's.
fn by_place(a: &Problem, b: &Problem) -> Ordering {
    fn place(path: &str) -> (usize, usize) {
        let sections = ["listeners", "routes", "upstreams", "policies"];
        let section = sections.iter().position(|name| path.starts_with(name)).map_or(0, |at| at + 1);
        let element = path.split(['[', ']']).nth(1).and_then(|at| at.parse().ok()).unwrap_or(0);
        (section, element)
    }
    place(&a.path).cmp(&place(&b.path))
}

/// What sections are built with.
struct Context<'a> {
    base: &'a Path,
    /// The document names a CA of the overlay.
    has_identity: bool,
}

impl Context<'_> {
    /// A path of a file, taken from the document's directory.
    fn file(&self, path: &str) -> PathBuf {
        self.base.join(path)
    }

    /// An optional path of a file; empty ones are problems.
    fn optional_file(&self, at: &str, path: Option<&String>, report: &mut Report) -> Option<PathBuf> {
        match path {
            Some(path) if path.is_empty() => {
                report.problem(at, "the path is empty; name a file, or leave the key out");
                None
            }
            other => other.map(|path| self.file(path)),
        }
    }
}

fn build(draft: &Draft, base: &Path, report: &mut Report) -> Snapshot {
    let head = &draft.head;
    let context = Context { base, has_identity: head.identity.is_some() || report.is_broken("identity") };
    let node = node::build(head, &context, report);
    let listeners: Vec<(usize, Arc<Listener>)> = built(&draft.listeners, |at, section| {
        listener::build(section, &format!("listeners[{at}]"), &context, report).map(Arc::new)
    });
    let upstreams: Vec<(usize, Arc<Upstream>)> = built(&draft.upstreams, |at, section| {
        upstream::build(section, &format!("upstreams[{at}]"), &context, report).map(Arc::new)
    });
    let names = Names {
        listeners: &draft.listener_names,
        upstreams: upstreams.iter().map(|(_, upstream)| (&*upstream.name, upstream)).collect(),
        upstream_names: &draft.upstream_names,
        has_state: head.state.is_some(),
        context: &context,
    };
    let routes: Vec<(usize, Arc<Route>)> = built(&draft.routes, |at, section| {
        route::build(section, &format!("routes[{at}]"), &names, report).map(Arc::new)
    });
    unique_names(draft, report);
    exposure::binds(head, &listeners, report);
    dns::among(&listeners, report);
    packets::among(&listeners, report);
    packets::pools(&routes, report);
    packets::own_addresses(&listeners, &routes, report);
    exposure::open_proxies(&listeners, &routes, report);
    uplink::dials(&listeners, &names, report);
    uplink::kept(&listeners, &upstreams, draft.listeners.len() == listeners.len(), report);
    unused_upstreams(draft, &upstreams, &routes, report);
    unserved_listeners(draft, &listeners, &routes, report);
    shadow::unreachable_routes(&routes, report);
    if draft.routes.is_empty() && !report.is_broken("routes") {
        report.warning("routes", "there is no route; every session is denied with 404");
    }
    let routes: Vec<Arc<Route>> = routes.into_iter().map(|(_, route)| route).collect();
    Snapshot {
        index: RouteIndex::build(&routes),
        redacted: redacted(draft),
        listeners: listeners.into_iter().map(|(_, listener)| listener).collect(),
        upstreams: upstreams.into_iter().map(|(_, upstream)| upstream).collect(),
        routes,
        ..node
    }
}

/// Builds each section; those with problems are left out, and the others keep their positions.
fn built<S, T>(sections: &[(usize, S)], mut build: impl FnMut(usize, &S) -> Option<T>) -> Vec<(usize, T)> {
    sections.iter().filter_map(|(at, section)| Some((*at, build(*at, section)?))).collect()
}

/// What references are resolved in.
struct Names<'a> {
    /// Of all listeners, those with problems included.
    listeners: &'a [String],
    upstreams: HashMap<&'a str, &'a Arc<Upstream>>,
    /// Of all upstreams, those with problems included.
    upstream_names: &'a [String],
    /// The document names a directory for what outlives the process.
    has_state: bool,
    context: &'a Context<'a>,
}

fn unique_names(draft: &Draft, report: &mut Report) {
    let listeners = draft.listeners.iter().map(|(at, section)| (*at, &*section.name));
    unique("listeners", listeners, report);
    unique("routes", draft.routes.iter().map(|(at, section)| (*at, &*section.name)), report);
    unique("upstreams", draft.upstreams.iter().map(|(at, section)| (*at, &*section.name)), report);
}

fn unique<'a>(list: &str, names: impl Iterator<Item = (usize, &'a str)>, report: &mut Report) {
    let mut first: HashMap<&str, usize> = HashMap::new();
    for (at, name) in names {
        match first.get(name) {
            Some(earlier) => report.problem(
                format!("{list}[{at}].name"),
                format!("{name:?} is the name of {list}[{earlier}] already; give each its own"),
            ),
            None => _ = first.insert(name, at),
        }
        if name.is_empty() || name.len() > 255 || name.chars().any(char::is_control) {
            report.problem(
                format!("{list}[{at}].name"),
                "a name has 1 to 255 bytes and no control characters; write a short word",
            );
        }
    }
}

fn unused_upstreams(
    draft: &Draft,
    upstreams: &[(usize, Arc<Upstream>)],
    routes: &[(usize, Arc<Route>)],
    report: &mut Report,
) {
    // A route with problems may be the one that uses it.
    if routes.len() < draft.route_count {
        return;
    }
    let used: Vec<&str> = routes
        .iter()
        .filter_map(|(_, route)| match &route.action {
            Action::Upstream(upstream) => Some(&*upstream.name),
            _ => None,
        })
        .collect();
    let dialled = draft.listeners.iter().filter_map(|(_, listener)| listener.dial.as_deref());
    let used: HashSet<&str> = used.into_iter().chain(dialled).collect();
    for (at, upstream) in upstreams.iter().filter(|(_, upstream)| !used.contains(&*upstream.name)) {
        report.warning(
            format!("upstreams[{at}]"),
            format!("no route uses upstream {}; add one, or leave the upstream out", upstream.name),
        );
    }
}

/// Warns of listeners whose sessions no route can be for, whatever else it asks of them.
fn unserved_listeners(
    draft: &Draft,
    listeners: &[(usize, Arc<Listener>)],
    routes: &[(usize, Arc<Route>)],
    report: &mut Report,
) {
    // A route with problems may be theirs. Where there is none, that is told of all.
    if routes.len() < draft.route_count || routes.is_empty() {
        return;
    }
    for kind in [Kind::Tcp, Kind::Udp, Kind::Ip] {
        let mut served: HashSet<Option<&str>> = HashSet::new();
        for (_, route) in routes.iter().filter(|(_, route)| route.serves(kind)) {
            let named = route.matcher.listeners.iter().map(|name| Some(&**name));
            served.extend(named.chain(route.matcher.listeners.is_empty().then_some(None)));
        }
        let is_served = |listener: &Listener| served.contains(&None) || served.contains(&Some(&*listener.name));
        for (at, listener) in listeners.iter().filter(|(_, one)| one.only_kind() == Some(kind) && !is_served(one)) {
            let (name, kind) = (&listener.name, kind.as_str());
            let message = format!(
                "no route takes sessions of kind {kind} from listener {name}, so that all of them are denied; \
                 add one with `match: {{kind: {kind}}}`"
            );
            report.warning(format!("listeners[{at}]"), message);
        }
    }
}

/// The document as it may be shown, as JSON. A document always serialises: its keys are strings. One section after the
/// other, since a tree of all of them would take more memory than anything else of a reload.
fn redacted(draft: &Draft) -> String {
    let mut shown = shown(&draft.head);
    for (key, sections) in [
        ("listeners", all_shown(&draft.listeners)),
        ("routes", all_shown(&draft.routes)),
        ("upstreams", all_shown(&draft.upstreams)),
    ] {
        if !sections.is_empty() {
            // In place of the closing brace.
            shown.truncate(shown.len() - 1);
            shown.push_str(&format!(",\"{key}\":[{sections}]}}"));
        }
    }
    shown.shrink_to_fit();
    shown
}

fn all_shown<S: serde::Serialize>(sections: &[(usize, S)]) -> String {
    let mut all = String::new();
    for (_, section) in sections {
        let comma = if all.is_empty() { "" } else { "," };
        all.push_str(comma);
        all.push_str(&shown(section));
    }
    all
}

fn shown(section: &impl serde::Serialize) -> String {
    let mut shown = serde_json::to_value(section).unwrap_or_default();
    redact::redact(&mut shown);
    shown.to_string()
}

/// A sentence about a name that refers to nothing.
fn unresolved(what: &str, name: &str, known: &[String]) -> String {
    let hint = did_you_mean(name, known.iter().map(String::as_str));
    match known {
        [] => format!("there is no {what} {name:?}, nor any other; add it under {what}s"),
        _ if hint.is_empty() && known.len() <= 10 => {
            format!("there is no {what} {name:?}; there is {}", known.join(", "))
        }
        _ => format!("there is no {what} {name:?}{hint}"),
    }
}
