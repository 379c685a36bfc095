//! `hermes check`: every problem of a document, with its place and the remedy.
//!
//! In: node documents, each for itself; and overlay documents, which belong together whatever files they stand in. Out: what is
//! wrong with them, and of overlay documents also what would be wrong with what nodes get of them.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use hermes_controller::catalog::Catalog;
use hermes_controller::compile;
use hermes_controller::document::{self as overlay, Fault, Key, Kind, Resource};
use hermes_model::{Checked, Problem, Snapshot};
use hermes_net::tls::{CertifiedKey, TlsError};

use crate::document;

/// Checks node documents, or overlay documents, and prints every problem with its path.
#[derive(Debug, Parser)]
pub(super) struct Check {
    /// Node documents, or the files of an overlay's documents (YAML).
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Prints one JSON object a problem.
    #[arg(long)]
    json: bool,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut text = String::new();
        let mut failed = false;
        let mut whole = Whole::default();
        for file in &self.files {
            failed |= match document::text(file) {
                Ok(document) if overlay::is_overlay(&document) => !whole.add(file, &document),
                Ok(document) => !self.check(file, &document, &mut text),
                // One file that is not there says nothing of the others.
                Err(error) => {
                    self.tell(
                        &mut text,
                        file,
                        "error",
                        &Problem { path: String::new(), message: format!("{error:#}") },
                    );
                    true
                }
            };
        }
        failed |= !self.check_overlay(whole, &mut text);
        super::print(&text)?;
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// True where the overlay can be run.
    fn check_overlay(&self, whole: Whole, text: &mut String) -> bool {
        let Whole { catalog, files, mut faults } = whole;
        let compiled =
            if faults.is_empty() && !files.is_empty() { compile::check(&catalog) } else { Ok(Default::default()) };
        let is_good = faults.is_empty() && compiled.is_ok();
        let first = self.files.first().cloned().unwrap_or_default();
        for fault in compiled.as_ref().err().into_iter().flatten() {
            let file = fault.key.as_ref().and_then(|key| files.get(key)).unwrap_or(&first);
            faults.push((file.clone(), fault.clone()));
        }
        for (file, fault) in &faults {
            let document = fault.key.as_ref().map(ToString::to_string);
            self.tell_of(text, file, document.as_deref(), "error", &said(fault));
        }
        for warning in compiled.as_ref().into_iter().flatten() {
            let file = warning.key.as_ref().and_then(|key| files.get(key)).unwrap_or(&first);
            let document = warning.key.as_ref().map(ToString::to_string);
            self.tell_of(text, file, document.as_deref(), "warning", &said(warning));
        }
        if is_good && !files.is_empty() && !self.json {
            let count = |kind: Kind| catalog.iter().filter(|resource| resource.key.kind == kind).count();
            let name = catalog.overlay().map(|(name, _)| name.to_string()).unwrap_or_default();
            let networks = Some(count(Kind::Network)).filter(|count| *count > 0);
            let networks = networks.map(|count| format!(", {}", super::counted(count, "network"))).unwrap_or_default();
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "overlay {name}: ok, {}, {}{}, {}",
                super::counted(count(Kind::Node), "node"),
                super::counted(count(Kind::Service), "service"),
                networks,
                super::counted(count(Kind::User), "user")
            );
        }
        is_good
    }

    /// True where the file can be run.
    fn check(&self, file: &Path, document: &str, text: &mut String) -> bool {
        let (problems, warnings, summary) = match document::check(file, document) {
            Err(problems) => (problems, Vec::new(), None),
            Ok(Checked { snapshot, mut warnings }) => {
                let mut problems = Vec::new();
                keys(&snapshot, &mut problems, &mut warnings);
                let summary = problems.is_empty().then(|| summary(&snapshot));
                (problems, warnings, summary)
            }
        };
        for (level, list) in [("error", &problems), ("warning", &warnings)] {
            list.iter().for_each(|problem| self.tell(text, file, level, problem));
        }
        if let Some(summary) = summary.as_ref().filter(|_| !self.json) {
            let _ = writeln!(text, "{}: ok, {summary}", file.display());
        }
        summary.is_some()
    }

    fn tell(&self, text: &mut String, file: &Path, level: &str, problem: &Problem) {
        self.tell_of(text, file, None, level, problem);
    }

    fn tell_of(&self, text: &mut String, file: &Path, document: Option<&str>, level: &str, problem: &Problem) {
        let Problem { path, message } = problem;
        // Writing to a String cannot fail.
        let _ = if self.json {
            let mut line = serde_json::json!({ "file": file, "level": level, "path": path, "message": message });
            if let Some(document) = document {
                line["document"] = document.into();
            }
            writeln!(text, "{line}")
        } else {
            let document = document.map(|document| format!("{document}: ")).unwrap_or_default();
            writeln!(text, "{}: {level}: {document}{problem}", file.display())
        };
    }
}

/// Overlay documents of all files.
#[derive(Default)]
struct Whole {
    catalog: Catalog,
    files: HashMap<Key, PathBuf>,
    faults: Vec<(PathBuf, Fault)>,
}

impl Whole {
    /// False where something is wrong with this file for itself.
    fn add(&mut self, file: &Path, text: &str) -> bool {
        let resources = match overlay::read(text) {
            Ok(resources) => resources,
            Err(faults) => {
                self.faults.extend(faults.into_iter().map(|fault| (file.to_owned(), fault)));
                return false;
            }
        };
        let before = self.faults.len();
        for resource in resources {
            self.put(file, resource);
        }
        self.faults.len() == before
    }

    fn put(&mut self, file: &Path, resource: Resource) {
        let key = resource.key.clone();
        self.catalog.put(resource);
        if let Some(other) = self.files.insert(key.clone(), file.to_owned()) {
            let message = format!("this document stands in {} too; keep one", other.display());
            let problem = Problem { path: String::new(), message };
            self.faults.push((file.to_owned(), Fault { key: Some(key), number: None, problem }));
        }
    }
}

/// The problem, with the number of a document that has no name that could be read.
fn said(fault: &Fault) -> Problem {
    match (&fault.key, fault.number) {
        (None, Some(number)) => {
            let Problem { path, message } = &fault.problem;
            let path =
                if path.is_empty() { format!("document {number}") } else { format!("document {number}: {path}") };
            Problem { path, message: message.clone() }
        }
        _ => fault.problem.clone(),
    }
}

/// Looks at certificates with their keys, as far as this machine has them: what never fits is a problem, what cannot be
/// read here is none.
fn keys(snapshot: &Snapshot, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    let here = |(_, cert, key): &(String, &Path, &Path)| cert.exists() && key.exists();
    for (path, cert, key) in document::pairs(snapshot).into_iter().filter(here) {
        match CertifiedKey::load(cert, key) {
            Ok(key) => problems.extend(document::misnamed(snapshot, &path, &key)),
            Err(error @ TlsError::Mismatch { .. }) => problems.push(Problem { path, message: error.to_string() }),
            Err(error) => {
                let message = format!("{error}; the node will not start with it");
                warnings.push(Problem { path, message });
            }
        }
    }
}

fn summary(snapshot: &Snapshot) -> String {
    format!(
        "node {}: {}, {}, {}",
        snapshot.node,
        super::counted(snapshot.listeners.len(), "listener"),
        super::counted(snapshot.routes.len(), "route"),
        super::counted(snapshot.upstreams.len(), "upstream")
    )
}
