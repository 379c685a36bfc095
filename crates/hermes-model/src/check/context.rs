//! Context of the checks: the document's directory, and the names that it declares.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::report::Report;
use crate::document::did_you_mean::did_you_mean;
use crate::snapshot::Upstream;

/// Context of all sections.
pub(super) struct Context<'a> {
    pub(super) base: &'a Path,
    /// The document has a CA of the overlay.
    pub(super) has_identity: bool,
}

impl Context<'_> {
    /// Resolves the path of a file relative to the document's directory.
    pub(super) fn file(&self, path: &str) -> PathBuf {
        self.base.join(path)
    }

    /// Resolves an optional path of a file; an empty path is a problem.
    pub(super) fn optional_file(&self, at: &str, path: Option<&String>, report: &mut Report) -> Option<PathBuf> {
        match path {
            Some(path) if path.is_empty() => {
                report.problem(at, "empty path; add a file name, or remove the key");
                None
            }
            other => other.map(|path| self.file(path)),
        }
    }
}

/// Names that references resolve to.
pub(super) struct Names<'a> {
    /// The name of this node.
    pub(super) node: &'a str,
    /// Names of all listeners, including invalid ones.
    pub(super) listeners: &'a [String],
    pub(super) upstreams: HashMap<&'a str, &'a Arc<Upstream>>,
    /// Names of all upstreams, including invalid ones.
    pub(super) upstream_names: &'a [String],
    /// The document has a state directory.
    pub(super) has_state: bool,
    pub(super) context: &'a Context<'a>,
}

/// Message for a reference to an unknown name.
pub(super) fn unresolved(what: &str, name: &str, known: &[String]) -> String {
    let hint = did_you_mean(name, known.iter().map(String::as_str));
    match known {
        [] => format!("unknown {what} {name:?}; none is configured; add it to {what}s"),
        _ if hint.is_empty() && known.len() <= 10 => {
            format!("unknown {what} {name:?}; configured: {}", known.join(", "))
        }
        _ => format!("unknown {what} {name:?}{hint}"),
    }
}
