//! `hermes check`: every problem of a document, with its place and the remedy.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

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
        let mut code = ExitCode::SUCCESS;
        for file in &self.files {
            let (problems, warnings, summary) = match document::read(file)? {
                Ok(checked) => {
                    let snapshot = &checked.snapshot;
                    let summary = format!(
                        "node {}: {} listeners, {} routes, {} upstreams",
                        snapshot.node,
                        snapshot.listeners.len(),
                        snapshot.routes.len(),
                        snapshot.upstreams.len()
                    );
                    (Vec::new(), checked.warnings, summary)
                }
                Err(problems) => (problems, Vec::new(), String::new()),
            };
            for (level, list) in [("error", &problems), ("warning", &warnings)] {
                for problem in list {
                    self.print(file, level, problem);
                }
            }
            if problems.is_empty() {
                if !self.json {
                    println!("{}: ok, {summary}", file.display());
                }
            } else {
                code = ExitCode::FAILURE;
            }
        }
        Ok(code)
    }

    fn print(&self, file: &std::path::Path, level: &str, problem: &hermes_model::Problem) {
        if self.json {
            let line = serde_json::json!({
                "file": file, "level": level, "path": problem.path, "message": problem.message,
            });
            println!("{line}");
        } else {
            println!("{}: {level}: {problem}", file.display());
        }
    }
}
