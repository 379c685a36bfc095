//! The rules of the architecture: which crate and which module may use which, how large a crate may be, which words
//! are banned, and that every file opens with its purpose.

#![allow(clippy::unwrap_used)]

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use imports::{Crate, largest_circle};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Which of our crates each of our crates may use outside of its tests.
fn allowed() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    BTreeMap::from([
        ("hermes-model", BTreeSet::new()),
        ("hermes-wire", BTreeSet::new()),
        ("hermes-net", BTreeSet::new()),
        ("hermes-lab", BTreeSet::new()),
        ("hermes-controller", BTreeSet::from(["hermes-model", "hermes-net"])),
        ("hermes-proxy", BTreeSet::from(["hermes-model", "hermes-wire", "hermes-net"])),
        ("hermes-testkit", BTreeSet::from(["hermes-lab", "hermes-model", "hermes-net"])),
        (
            "hermes",
            BTreeSet::from([
                "hermes-controller",
                "hermes-lab",
                "hermes-model",
                "hermes-wire",
                "hermes-net",
                "hermes-proxy",
            ]),
        ),
    ])
}

#[test]
fn crates_depend_only_as_drawn() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let allowed = allowed();
    let mut seen = 0;
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let allowed =
            allowed.get(name).unwrap_or_else(|| panic!("{name} is in no drawing: ARCHITECTURE.md and this test"));
        seen += 1;
        for dependency in package["dependencies"].as_array().unwrap() {
            let other = dependency["name"].as_str().unwrap();
            if dependency["kind"].as_str() == Some("dev") || !other.starts_with("hermes") {
                continue;
            }
            assert!(allowed.contains(other), "{name} must not depend on {other}");
        }
    }
    assert_eq!(seen, allowed.len());
}

#[test]
fn one_tls_stack() {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    for banned in ["openssl-sys", "native-tls", "serde_yaml"] {
        assert!(!lock.contains(&format!("name = \"{banned}\"")), "{banned} is in the tree");
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    let mut files = Vec::new();
    for crate_ in std::fs::read_dir(root().join("crates")).unwrap() {
        collect(&crate_.unwrap().path(), &mut files);
    }
    assert!(files.len() > 50, "the walk found too little");
    let silent: Vec<_> = files
        .iter()
        .filter(|file| !std::fs::read_to_string(file).unwrap().lines().take(5).any(|line| line.starts_with("//!")))
        .collect();
    assert!(silent.is_empty(), "these files do not begin with //!: {silent:#?}");
}

/// One that does not would be forgotten, and with it what a test is for.
#[test]
fn every_mutant_still_applies() {
    let patches = std::fs::read_dir(root().join("scripts/mutants")).unwrap().map(|entry| entry.unwrap().path());
    for patch in patches {
        let checked = Command::new("git").args(["apply", "--check"]).arg(&patch).current_dir(root()).output().unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    }
}

/// Crates, and the root file of each, whose modules are examined.
const ROOTS: [(&str, &str); 9] = [
    ("hermes", "src/main.rs"),
    ("hermes-controller", "src/lib.rs"),
    ("hermes-lab", "src/lib.rs"),
    ("hermes-model", "src/lib.rs"),
    ("hermes-net", "src/lib.rs"),
    ("hermes-proxy", "src/lib.rs"),
    ("hermes-testkit", "src/lib.rs"),
    ("hermes-testkit", "src/bin/hermes-bench/main.rs"),
    ("hermes-wire", "src/lib.rs"),
];

#[test]
fn modules_import_each_other_in_no_circle() {
    let mut broken = Vec::new();
    for (name, file) in ROOTS {
        let read = Crate::read(&root().join("crates").join(name).join(file));
        assert!(!read.files().is_empty());
        let circle = largest_circle(&read.top_level_imports());
        if circle.len() > 1 {
            broken.push(format!("{name}/{file}: {} modules: {}", circle.len(), circle.join(", ")));
        }
        let files = largest_circle(&read.file_imports());
        if files.len() > 20 {
            broken.push(format!("{name}/{file}: {} files", files.len()));
        }
    }
    assert!(broken.is_empty(), "modules import each other in a circle:\n{}", broken.join("\n"));
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}
