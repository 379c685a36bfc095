//! `hermes check`: every problem of a document, with its position and the remedy.
//!
//! In: node documents, each on its own; overlay documents, which form one set whatever their files. Out: their
//! problems, with file, line and column; for overlay documents also the problems of the compiled node documents.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use hermes_controller::catalog::Catalog;
use hermes_controller::compile;
use hermes_controller::document::{self as overlay, Fault, Key, Kind, Resource};
use hermes_model::check::yaml_position::locate;
use hermes_model::{Checked, Located, Position, Positions, Problem, Snapshot};
use hermes_net::tls::{CertifiedKey, TlsError};

use crate::document;

/// Validate node documents or overlay documents, and print every problem with its path
#[derive(Debug, Parser)]
pub(super) struct Check {
    /// Validate these files or directories (YAML), or - for standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print one JSON object for each problem
    #[arg(long)]
    json: bool,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut text = String::new();
        let mut failed = false;
        let mut whole = Whole::default();
        for named in &self.files {
            // An unreadable file must not hide the problems of the others.
            let files = match document::listed(std::slice::from_ref(named)) {
                Ok(files) => files,
                Err(error) => {
                    self.write_fault(&mut text, named, "error", &unreadable(&error));
                    failed = true;
                    continue;
                }
            };
            for file in &files {
                failed |= match document::text(file) {
                    Ok(document) if overlay::is_overlay(&document) => !whole.add(file, document),
                    Ok(document) => !self.check(file, &document, &mut text),
                    Err(error) => {
                        self.write_fault(&mut text, file, "error", &unreadable(&error));
                        true
                    }
                };
            }
        }
        failed |= !self.check_overlay(whole, &mut text);
        super::print(&text)?;
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// Returns true if the overlay is valid.
    fn check_overlay(&self, whole: Whole, text: &mut String) -> bool {
        let Whole { catalog, files, mut faults, texts } = whole;
        let mut positions: HashMap<&Path, Positions> = HashMap::new();
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
            let read = || Positions::read(texts.get(file).map(String::as_str).unwrap_or_default());
            let position = overlay::position(positions.entry(file).or_insert_with(read), fault, 0);
            self.write_fault_of(text, file, document.as_deref(), "error", &Located { position, problem: said(fault) });
        }
        for warning in compiled.as_ref().into_iter().flatten() {
            let file = warning.key.as_ref().and_then(|key| files.get(key)).unwrap_or(&first);
            let document = warning.key.as_ref().map(ToString::to_string);
            let read = || Positions::read(texts.get(file).map(String::as_str).unwrap_or_default());
            let position = overlay::position(positions.entry(file).or_insert_with(read), warning, 0);
            self.write_fault_of(
                text,
                file,
                document.as_deref(),
                "warning",
                &Located { position, problem: said(warning) },
            );
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

    /// Returns true if the file is valid.
    fn check(&self, file: &Path, document: &str, text: &mut String) -> bool {
        let (problems, warnings, summary) = match document::check(file, document) {
            Err(problems) => (problems, Vec::new(), None),
            Ok(Checked { snapshot, mut warnings }) => {
                let mut problems = Vec::new();
                keys(&snapshot, &mut problems, &mut warnings);
                problems.extend(expired_authorities(&snapshot));
                let summary = problems.is_empty().then(|| summary(&snapshot));
                (locate(document, problems), locate(document, warnings), summary)
            }
        };
        for (level, list) in [("error", &problems), ("warning", &warnings)] {
            list.iter().for_each(|problem| self.write_fault(text, file, level, problem));
        }
        if let Some(summary) = summary.as_ref().filter(|_| !self.json) {
            let _ = writeln!(text, "{}: ok, {summary}", file.display());
        }
        summary.is_some()
    }

    fn write_fault(&self, text: &mut String, file: &Path, level: &str, located: &Located) {
        self.write_fault_of(text, file, None, level, located);
    }

    fn write_fault_of(&self, text: &mut String, file: &Path, document: Option<&str>, level: &str, located: &Located) {
        let Located { position, problem } = located;
        let Problem { path, message } = problem;
        // Writing to a String cannot fail.
        let _ = if self.json {
            let mut line = serde_json::json!({ "file": file, "level": level, "path": path, "message": message });
            if let Some(document) = document {
                line["document"] = document.into();
            }
            if let Some(Position { line: number, column }) = position {
                (line["line"], line["column"]) = ((*number).into(), (*column).into());
            }
            writeln!(text, "{line}")
        } else {
            let document = document.map(|document| format!("{document}: ")).unwrap_or_default();
            // Compilers print this form, and editors jump to it.
            let position = position.map(|position| format!(":{position}")).unwrap_or_default();
            writeln!(text, "{}{position}: {level}: {document}{problem}", file.display())
        };
    }
}

/// The overlay documents of all files.
#[derive(Default)]
struct Whole {
    catalog: Catalog,
    files: HashMap<Key, PathBuf>,
    faults: Vec<(PathBuf, Fault)>,
    texts: HashMap<PathBuf, String>,
}

impl Whole {
    /// Returns false if the file is invalid on its own.
    fn add(&mut self, file: &Path, text: String) -> bool {
        let read = overlay::read(&text);
        self.texts.insert(file.to_owned(), text);
        let resources = match read {
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
            let message = format!("duplicate document, also in {}; keep one of them", other.display());
            let problem = Problem { path: String::new(), message };
            self.faults.push((file.to_owned(), Fault { key: Some(key), number: None, problem }));
        }
    }
}

fn unreadable(error: &anyhow::Error) -> Located {
    Located { position: None, problem: Problem { path: String::new(), message: format!("{error:#}") } }
}

/// Converts a fault to a problem. A document without a readable name is identified by its number.
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

/// Checks certificates and their keys, as far as this machine has them: a mismatch or an expired certificate is a
/// problem, an unreadable file is not.
fn keys(snapshot: &Snapshot, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    let here = |(_, cert, key): &(String, &Path, &Path)| cert.exists() && key.exists();
    for (path, cert, key) in document::pairs(snapshot).into_iter().filter(here) {
        match CertifiedKey::load(cert, key) {
            Ok(key) => {
                problems.extend(document::misnamed(snapshot, &path, &key));
                validity(&format!("{path}.cert"), cert, &key, problems, warnings);
            }
            Err(error @ TlsError::Mismatch { .. }) => problems.push(Problem { path, message: error.to_string() }),
            Err(error) => {
                let message = format!("{error}; the node will not start with it");
                warnings.push(Problem { path, message });
            }
        }
    }
}

/// Checks the validity of a certificate by this machine's clock: every peer refuses an expired one.
fn validity(path: &str, file: &Path, key: &CertifiedKey, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) {
    let (now, file) = (now(), file.display());
    let of = |message: String| Problem { path: path.to_owned(), message };
    match (key.leaf_not_after(), key.not_after(), key.not_before()) {
        (Some(end), ..) if end <= now => {
            let message = format!("certificate {file} expired on {}; renew it, or set this machine's clock", date(end));
            problems.push(of(message));
        }
        (_, Some(end), _) if end <= now => {
            let message = format!(
                "a CA certificate in the chain of {file} expired on {}; peers that need it refuse the node, so replace the chain",
                date(end)
            );
            warnings.push(of(message));
        }
        (_, _, Some(begin)) if begin > now => {
            let message = format!("certificate {file} is not valid before {}; peers refuse it until then", date(begin));
            warnings.push(of(message));
        }
        _ => {}
    }
}

/// Reports files whose CA certificates have all expired: they verify no peer.
fn expired_authorities(snapshot: &Snapshot) -> Vec<Problem> {
    let is_authority = |(path, _): &(String, &Path)| path.ends_with(".ca");
    let of = |(path, file): (String, &Path)| {
        let end = hermes_net::tls::last_not_after(file).filter(|end| *end <= now())?;
        let (file, end) = (file.display(), date(end));
        let message = format!("all CA certificates in {file} have expired, the last on {end}; replace the file");
        Some(Problem { path, message })
    };
    document::files(snapshot).into_iter().filter(is_authority).filter_map(of).collect()
}

fn now() -> i64 {
    std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs().cast_signed()
}

fn date(second: i64) -> String {
    super::ca::date(&second.max(0).into())
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
