//! What the sections of a document are checked with: its directory, and the names that it declares.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::report::Report;
use crate::document::nearest::did_you_mean;
use crate::snapshot::Upstream;

/// What sections are built with.
pub(super) struct Context<'a> {
    pub(super) base: &'a Path,
    /// The document names a CA of the overlay.
    pub(super) has_identity: bool,
}

impl Context<'_> {
    /// A path of a file, taken from the document's directory.
    pub(super) fn file(&self, path: &str) -> PathBuf {
        self.base.join(path)
    }

    /// An optional path of a file; empty ones are problems.
    pub(super) fn optional_file(&self, at: &str, path: Option<&String>, report: &mut Report) -> Option<PathBuf> {
        match path {
            Some(path) if path.is_empty() => {
                report.problem(at, "the path is empty; name a file, or leave the key out");
                None
            }
            other => other.map(|path| self.file(path)),
        }
    }
}

/// What references are resolved in.
pub(super) struct Names<'a> {
    /// Of all listeners, those with problems included.
    pub(super) listeners: &'a [String],
    pub(super) upstreams: HashMap<&'a str, &'a Arc<Upstream>>,
    /// Of all upstreams, those with problems included.
    pub(super) upstream_names: &'a [String],
    /// The document names a directory for what outlives the process.
    pub(super) has_state: bool,
    pub(super) context: &'a Context<'a>,
}

/// A sentence about a name that refers to nothing.
pub(super) fn unresolved(what: &str, name: &str, known: &[String]) -> String {
    let hint = did_you_mean(name, known.iter().map(String::as_str));
    match known {
        [] => format!("there is no {what} {name:?}, nor any other; add it under {what}s"),
        _ if hint.is_empty() && known.len() <= 10 => {
            format!("there is no {what} {name:?}; there is {}", known.join(", "))
        }
        _ => format!("there is no {what} {name:?}{hint}"),
    }
}
