//! Findings of a check: problems and warnings, each with its path.

use std::cmp::Ordering;
use std::fmt;

/// Maximum number of problems in a report.
pub const MAX_PROBLEMS: usize = 100;

/// A problem or warning at a path of the document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path such as `routes[3].match.network`; empty for the document as a whole.
    pub path: String,
    /// The error and its remedy.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.path, self.message) }
    }
}

/// Findings so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Problem>,
    /// Paths of values that were reported as invalid. They are then removed from the document or replaced, and problems
    /// that follow from that are not reported.
    broken: Vec<String>,
}

impl Report {
    pub(super) fn problem(&mut self, path: impl Into<String>, message: impl Into<String>) {
        let path = path.into();
        if !self.is_full() && !self.is_broken(&path) {
            self.problems.push(Problem { path, message: message.into() });
        }
    }

    /// The report is full: further checks are skipped, so that the cost of a hostile document is bounded by its length.
    pub(super) fn is_full(&self) -> bool {
        self.problems.len() > MAX_PROBLEMS
    }

    pub(super) fn warning(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.warnings.push(Problem { path: path.into(), message: message.into() });
    }

    /// Reports an invalid value. A value that is missing because it was removed is not reported again.
    pub(super) fn invalid(&mut self, path: String, message: String) {
        if !self.is_full() && !self.is_broken(&path) {
            self.broken.push(path.clone());
            self.problems.push(Problem { path, message });
        }
    }

    /// True if a value at or below this path was removed, so that a problem with it would mislead.
    pub(super) fn is_broken(&self, path: &str) -> bool {
        !path.is_empty()
            && self.broken.iter().any(|broken| {
                broken.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
            })
    }

    /// The value of a result; an error is reported as a problem.
    pub(super) fn ok_or_report<T>(&mut self, path: impl FnOnce() -> String, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.problem(path(), message)).ok()
    }

    pub(super) fn into_problems(mut self) -> Vec<Problem> {
        self.problems.sort_by(by_place);
        self.problems.dedup();
        if self.is_full() {
            self.problems.truncate(MAX_PROBLEMS);
            let message = "too many problems; fix these first".to_owned();
            self.problems.push(Problem { path: String::new(), message });
        }
        self.problems
    }
}

/// Orders by section, then by element, then by discovery, which is the document's order.
pub(super) fn by_place(a: &Problem, b: &Problem) -> Ordering {
    fn place(path: &str) -> (usize, usize) {
        let sections = ["listeners", "routes", "upstreams", "policies"];
        let section = sections.iter().position(|name| path.starts_with(name)).map_or(0, |at| at + 1);
        let element = path.split(['[', ']']).nth(1).and_then(|at| at.parse().ok()).unwrap_or(0);
        (section, element)
    }
    place(&a.path).cmp(&place(&b.path))
}
