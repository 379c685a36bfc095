//! Properties of node documents, and of decisions under them.
//!
//! In: the text of a document. Out: nothing, or a panic. Never opens the files that a document names.

use std::path::Path;

use hermes_model::facts::{Facts, Kind};
use hermes_model::{Decision, DenyReason, Snapshot, decide, explain};

use crate::model::facts;

/// Maximum number of sessions for one document, to keep inputs fast.
const MAX_SESSIONS: usize = 48;

/// A rejected document has problems, each with a message. An accepted one can be printed; the printed text is accepted,
/// too, and has the same meaning. Decisions under it match a linear search through its routes.
pub fn check(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let base = Path::new("/nowhere");
    let checked = match hermes_model::check(text, base) {
        Ok(checked) => checked,
        Err(problems) => {
            assert!(!problems.is_empty());
            assert!(problems.iter().all(|problem| !problem.message.is_empty()), "{problems:?}");
            return;
        }
    };
    let shown = checked.snapshot.redacted.to_string();
    match hermes_model::check(&shown, base) {
        Ok(again) => assert_eq!(again.snapshot.redacted, checked.snapshot.redacted),
        Err(problems) => panic!("what /config shows is refused: {problems:?}\n{shown}"),
    }
    for session in sessions(text) {
        agree(&session, &checked.snapshot);
    }
}

/// Sessions made of the words of the document, so that they come close to its routes.
fn sessions(text: &str) -> Vec<Facts> {
    let words = || text.split([' ', '\n', '"', '\'', ',', '[', ']', '{', '}']).filter(|word| !word.is_empty());
    let filled: Vec<String> = words().map(|word| word.replace('*', "x")).collect();
    let named = filled.iter().filter(|word| word.len() > 1 && !word.ends_with(':'));
    let authorities: Vec<&str> = named.map(String::as_str).chain(["VIDEO"]).collect();
    let paths: Vec<&str> =
        filled.iter().map(String::as_str).filter(|word| word.starts_with('/')).chain(["/"]).collect();
    let mut sessions = Vec::new();
    for (at, authority) in authorities.iter().enumerate() {
        for kind in [Kind::Http, Kind::Tcp, Kind::Udp] {
            sessions.extend(facts(kind, authority, paths[at % paths.len()]));
        }
    }
    sessions.truncate(MAX_SESSIONS);
    sessions
}

/// The index finds the same route as a linear search.
fn agree(session: &Facts, snapshot: &Snapshot) {
    let explained = explain(session, snapshot, &|_| false);
    let walked = explained.routes.last().filter(|route| route.failed.is_none()).map(|route| route.name.as_str());
    match decide(session, snapshot) {
        Decision::Act(route) => assert_eq!(walked, Some(&*route.name), "{explained}"),
        Decision::Deny(deny) => match deny.reason {
            DenyReason::NoRoute { .. } => assert_eq!(walked, None, "{explained}"),
            DenyReason::WrongKind { route, .. } | DenyReason::OpenProxy { route } => {
                assert_eq!(walked, Some(&*route), "{explained}");
            }
            DenyReason::Loop { .. } | DenyReason::TooManyHops { .. } => {
                panic!("no session has a Via: {explained}")
            }
            DenyReason::DotSegment | DenyReason::Escape | DenyReason::AmbiguousPath => {}
        },
    }
}
