//! `hermes check`: every problem of a document, with its place and the remedy.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use hermes_model::{Checked, Problem, Snapshot};
use hermes_net::tls::{CertifiedKey, TlsError};

use crate::document;

/// Checks node documents and prints every problem with its path.
#[derive(Debug, Parser)]
pub(super) struct Check {
    /// Node documents (YAML).
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
        for file in &self.files {
            failed |= !self.check(file, &mut text);
        }
        super::print(&text)?;
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// True where the file can be run.
    fn check(&self, file: &Path, text: &mut String) -> bool {
        let (problems, warnings, summary) = match document::read(file) {
            // One file that is not there says nothing of the others.
            Err(error) => {
                self.tell(text, file, "error", &Problem { path: String::new(), message: format!("{error:#}") });
                return false;
            }
            Ok(Err(problems)) => (problems, Vec::new(), None),
            Ok(Ok(Checked { snapshot, mut warnings })) => {
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
        let Problem { path, message } = problem;
        // Writing to a String cannot fail.
        let _ = if self.json {
            let line = serde_json::json!({ "file": file, "level": level, "path": path, "message": message });
            writeln!(text, "{line}")
        } else {
            writeln!(text, "{}: {level}: {problem}", file.display())
        };
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
