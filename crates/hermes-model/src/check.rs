//! Check: from the text of a node document to a snapshot, or to every problem that it has.
//!
//! In: YAML, and the directory that relative paths of files start from. Out: a snapshot and
//! warnings; or all problems at once, each with its place and its remedy.
//! Never: opens a file, resolves a name, or gives a snapshot of a document with a problem.
//!
//! Two passes. `read` turns the text into sections; where a value does not fit, it says so, takes
//! the value out and goes on. The other modules turn sections into parsed types, a section each.
//! What they say about something that `read` complained of already is left out.

mod context;
mod dns;
mod header;
pub(crate) mod identity_claims;
mod ip_listener;
mod listener;
mod node;
mod open_proxy;
pub(crate) mod packets;
mod policy;
pub mod position;
mod read;
mod report;
mod reverse_listener;
mod route;
pub mod section;
mod tree;
mod unreachable_routes;
mod upstream;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use crate::document::{Document, redact};
use crate::facts::Kind;
use crate::snapshot::{Action, Listener, Route, RouteIndex, Snapshot, Upstream};
use context::{Context, Names};
use read::Draft;
use report::{Report, by_place};

pub use report::{MAX_PROBLEMS, Problem};

/// A document without problems.
#[derive(Debug)]
pub struct Checked {
    /// What the node runs on.
    pub snapshot: Snapshot,
    /// What is legal, and probably not meant.
    pub warnings: Vec<Problem>,
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
    open_proxy::binds(head, &listeners, report);
    dns::among(&listeners, report);
    packets::among(&listeners, report);
    packets::pools(&routes, report);
    packets::own_addresses(&listeners, &routes, report);
    open_proxy::open_proxies(&listeners, &routes, report);
    reverse_listener::dials(&listeners, &names, report);
    reverse_listener::kept(&listeners, &upstreams, draft.listeners.len() == listeners.len(), report);
    unused_upstreams(draft, &upstreams, &routes, report);
    unserved_listeners(draft, &listeners, &routes, report);
    unreachable_routes::unreachable_routes(&routes, report);
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
