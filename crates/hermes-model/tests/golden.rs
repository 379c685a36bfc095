//! Golden documents: each one in `valid/` must result in a snapshot, each one in `invalid/` in exactly the problems of
//! its `.problems` file.
//!
//! `HERMES_BLESS=1 cargo test -p hermes-model --test golden` rewrites the files instead of comparing them; read the
//! diff before you commit it.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use hermes_model::{Problem, check};

/// Base directory of the golden documents; no file in it is opened.
const BASE: &str = "/etc/hermes";

fn documents(directory: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(directory);
    let mut found: Vec<PathBuf> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect();
    found.sort();
    assert!(found.len() >= 3, "golden documents are missing");
    found
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("{problem}\n")).collect()
}

/// Compares with the golden file of a document; a missing file counts as empty.
fn compare(document: &Path, extension: &str, found: &str, differing: &mut Vec<String>) {
    let golden = document.with_extension(extension);
    let wanted = fs::read_to_string(&golden).unwrap_or_default();
    if wanted == found {
        return;
    }
    if std::env::var_os("HERMES_BLESS").is_some() {
        match found {
            "" => fs::remove_file(&golden).unwrap(),
            text => fs::write(&golden, text).unwrap(),
        }
    } else {
        differing.push(format!("{}\n--- wanted\n{wanted}--- found\n{found}", golden.display()));
    }
}

#[test]
fn valid_documents_give_a_snapshot_and_the_expected_warnings() {
    let mut differing = Vec::new();
    for path in documents("valid") {
        match check(&fs::read_to_string(&path).unwrap(), Path::new(BASE)) {
            Ok(checked) => compare(&path, "warnings", &lines(&checked.warnings), &mut differing),
            Err(problems) => differing.push(format!("{}\n{}", path.display(), lines(&problems))),
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn invalid_documents_give_every_problem_with_its_place_and_remedy() {
    let mut differing = Vec::new();
    for path in documents("invalid") {
        match check(&fs::read_to_string(&path).unwrap(), Path::new(BASE)) {
            Ok(_) => differing.push(format!("{} is valid", path.display())),
            Err(problems) => compare(&path, "problems", &lines(&problems), &mut differing),
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}
