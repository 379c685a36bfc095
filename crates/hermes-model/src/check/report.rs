//! What a check finds: problems and warnings, each with its place.

use std::cmp::Ordering;
use std::fmt;

/// No more problems than this are told at once.
pub const MAX_PROBLEMS: usize = 100;

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

/// What is found on the way.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Problem>,
    /// Paths whose values did not fit and were taken out.
    broken: Vec<String>,
}

impl Report {
    pub(super) fn problem(&mut self, path: impl Into<String>, message: impl Into<String>) {
        let path = path.into();
        if !self.is_full() && !self.is_broken(&path) {
            self.problems.push(Problem { path, message: message.into() });
        }
    }

    /// There are more problems than anybody reads: what follows is not looked into, so that a
    /// hostile document costs no more than its length.
    pub(super) fn is_full(&self) -> bool {
        self.problems.len() > MAX_PROBLEMS
    }

    pub(super) fn warning(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.warnings.push(Problem { path: path.into(), message: message.into() });
    }

    /// A value that did not fit. What is missing only because it was taken out is no new problem.
    pub(super) fn invalid(&mut self, path: String, message: String) {
        if !self.is_full() && !self.is_broken(&path) {
            self.broken.push(path.clone());
            self.problems.push(Problem { path, message });
        }
    }

    /// Something at or below this path was taken out, so that what is said of it would mislead.
    pub(super) fn is_broken(&self, path: &str) -> bool {
        !path.is_empty()
            && self.broken.iter().any(|broken| {
                broken.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
            })
    }

    /// The value of a result, or its sentence as a problem.
    pub(super) fn take<T>(&mut self, path: impl FnOnce() -> String, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.problem(path(), message)).ok()
    }

    pub(super) fn into_problems(mut self) -> Vec<Problem> {
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
pub(super) fn by_place(a: &Problem, b: &Problem) -> Ordering {
    fn place(path: &str) -> (usize, usize) {
        let sections = ["listeners", "routes", "upstreams", "policies"];
        let section = sections.iter().position(|name| path.starts_with(name)).map_or(0, |at| at + 1);
        let element = path.split(['[', ']']).nth(1).and_then(|at| at.parse().ok()).unwrap_or(0);
        (section, element)
    }
    place(&a.path).cmp(&place(&b.path))
}
