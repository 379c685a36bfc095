//! Check: turns the text of a node document into a snapshot, or into a list of all problems.
//!
//! In: YAML, and the base directory of relative file paths.
//! Out: a snapshot and warnings, or all problems at once, each with its path and its remedy.
//! Never: opened files, name resolution, or a snapshot of an invalid document.
//!
//! There are two passes. `read` parses the text into sections; it reports and removes invalid values, then continues.
//! The other modules turn each section into parsed types. Their problems with values that `read` removed are
//! suppressed.

mod context;
mod dns;
mod header;
pub(crate) mod identity_claims;
mod ip_listener;
mod listener;
mod node;
mod open_proxy;
mod overload;
pub(crate) mod packets;
mod policy;
mod read;
mod relay;
mod report;
mod reverse_listener;
mod rina;
mod route;
pub mod section;
mod tree;
mod unreachable_routes;
mod upstream;
pub mod yaml_position;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use crate::document::{Document, redact};
use crate::facts::Kind;
use crate::snapshot::{Listener, Route, RouteIndex, Snapshot, Upstream};
use context::{Context, Names};
use read::Draft;
use report::{Report, by_place};

pub use report::{MAX_PROBLEMS, Problem};

/// A document without problems.
#[derive(Debug)]
pub struct Checked {
    /// Configuration of the node.
    pub snapshot: Snapshot,
    /// Valid settings that are probably not intended.
    pub warnings: Vec<Problem>,
}

/// Checks the text of a node document; `base` is the directory of its relative file paths.
///
/// # Errors
/// All problems, up to [`MAX_PROBLEMS`], in the order of the document's sections.
pub fn check(text: &str, base: &Path) -> Result<Checked, Vec<Problem>> {
    let mut report = Report::default();
    let draft = read::draft(text, &mut report);
    finish(draft, base, report)
}

/// Checks a document from a controller: JSON, which parses many times faster than YAML. Any other text is parsed as
/// YAML, so that its problems are reported in the same form.
///
/// # Errors
/// As for [`check`], or the text is not UTF-8.
pub fn check_json(bytes: &[u8], base: &Path) -> Result<Checked, Vec<Problem>> {
    if let Ok(document) = serde_json::from_slice(bytes) {
        return check_document(document, base);
    }
    let problem = |_| Problem { path: String::new(), message: "invalid document: not UTF-8".to_owned() };
    check(std::str::from_utf8(bytes).map_err(|error| vec![problem(error)])?, base)
}

/// Checks a document that was built by code, as a controller does.
///
/// # Errors
/// The same as for [`check`].
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
        node: &head.node,
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
    reverse_listener::accepting(&listeners, &upstreams, draft.listeners.len() == listeners.len(), report);
    unused_upstreams(draft, &upstreams, &routes, report);
    unserved_listeners(draft, &listeners, &routes, report);
    unreachable_routes::unreachable_routes(&routes, report);
    if draft.routes.is_empty() && !report.is_broken("routes") {
        report.warning("routes", "no routes: every session is denied with 404");
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

/// Builds each section. Invalid sections are left out; the others keep their positions.
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
                format!("duplicate name {name:?}, also used by {list}[{earlier}]; choose unique names"),
            ),
            None => _ = first.insert(name, at),
        }
        if name.is_empty() || name.len() > 255 || name.chars().any(char::is_control) {
            report.problem(format!("{list}[{at}].name"), "invalid name; use 1 to 255 bytes without control characters");
        }
    }
}

fn unused_upstreams(
    draft: &Draft,
    upstreams: &[(usize, Arc<Upstream>)],
    routes: &[(usize, Arc<Route>)],
    report: &mut Report,
) {
    // An invalid route may be the one that uses the upstream.
    if routes.len() < draft.route_count {
        return;
    }
    let used: Vec<&str> =
        routes.iter().flat_map(|(_, route)| route.action.upstreams()).map(|upstream| &*upstream.name).collect();
    let dialled = draft.listeners.iter().filter_map(|(_, listener)| listener.dial.as_deref());
    let used: HashSet<&str> = used.into_iter().chain(dialled).collect();
    for (at, upstream) in upstreams.iter().filter(|(_, upstream)| !used.contains(&*upstream.name)) {
        report.warning(
            format!("upstreams[{at}]"),
            format!("no route uses upstream {}; add one, or remove the upstream", upstream.name),
        );
    }
}

/// Warns about listeners whose sessions cannot match any route.
fn unserved_listeners(
    draft: &Draft,
    listeners: &[(usize, Arc<Listener>)],
    routes: &[(usize, Arc<Route>)],
    report: &mut Report,
) {
    // An invalid route may be the missing one. A document without any route has a warning of its own.
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
                "no route matches sessions of kind {kind} from listener {name}, so all of them are denied; \
                 add one with `match: {{kind: {kind}}}`"
            );
            report.warning(format!("listeners[{at}]"), message);
        }
    }
}

/// The document as JSON without secrets. Serialisation cannot fail, because all keys are strings. Sections are
/// serialised one by one: a tree of the whole document would take more memory than the rest of a reload.
fn redacted(draft: &Draft) -> String {
    let mut shown = shown(&draft.head);
    for (key, sections) in [
        ("listeners", all_shown(&draft.listeners)),
        ("routes", all_shown(&draft.routes)),
        ("upstreams", all_shown(&draft.upstreams)),
    ] {
        if !sections.is_empty() {
            // Replace the closing brace.
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
