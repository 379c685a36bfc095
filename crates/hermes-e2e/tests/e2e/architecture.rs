//! The rules of the architecture: which crate and which module may use which, how large a crate may be, which words
//! are banned, and that every file opens with its purpose.

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
    let mut all = BTreeMap::from([
        ("hermes-model", BTreeSet::new()),
        ("hermes-wire", BTreeSet::new()),
        ("hermes-ndn", BTreeSet::new()),
        ("hermes-net", BTreeSet::new()),
        ("hermes-lab", BTreeSet::new()),
        ("hermes-controller", BTreeSet::from(["hermes-model", "hermes-net"])),
        ("hermes-cache", BTreeSet::from(["hermes-model", "hermes-net"])),
        ("hermes-custody", BTreeSet::from(["hermes-model", "hermes-net", "hermes-wire"])),
        ("hermes-ip", BTreeSet::from(["hermes-model", "hermes-wire"])),
        ("hermes-rate-limit", BTreeSet::from(["hermes-net"])),
        ("hermes-resume", BTreeSet::new()),
        ("hermes-rina", BTreeSet::new()),
        (
            "hermes-transport",
            BTreeSet::from(["hermes-cache", "hermes-ip", "hermes-model", "hermes-net", "hermes-wire"]),
        ),
        (
            "hermes-outbound",
            BTreeSet::from(["hermes-model", "hermes-net", "hermes-rate-limit", "hermes-transport", "hermes-wire"]),
        ),
        (
            "hermes-architecture",
            BTreeSet::from([
                "hermes-cache",
                "hermes-model",
                "hermes-ndn",
                "hermes-net",
                "hermes-outbound",
                "hermes-rina",
                "hermes-transport",
            ]),
        ),
        (
            "hermes-proxy",
            BTreeSet::from([
                "hermes-architecture",
                "hermes-cache",
                "hermes-custody",
                "hermes-ip",
                "hermes-model",
                "hermes-ndn",
                "hermes-net",
                "hermes-outbound",
                "hermes-rate-limit",
                "hermes-relay-service",
                "hermes-resume",
                "hermes-rina",
                "hermes-transport",
                "hermes-wire",
            ]),
        ),
        ("hermes-pattern", BTreeSet::new()),
        (
            "hermes-testkit",
            BTreeSet::from(["hermes-lab", "hermes-model", "hermes-net", "hermes-pattern", "hermes-rina"]),
        ),
        ("hermes-bench", BTreeSet::from(["hermes-lab", "hermes-ndn", "hermes-relay", "hermes-testkit"])),
        ("hermes-demo", BTreeSet::from(["hermes-lab", "hermes-ndn", "hermes-net", "hermes-relay-client"])),
        ("hermes-e2e", BTreeSet::new()),
        (
            "hermes",
            BTreeSet::from([
                "hermes-controller",
                "hermes-demo",
                "hermes-model",
                "hermes-wire",
                "hermes-net",
                "hermes-proxy",
                "hermes-relay-client",
                "hermes-resume",
                "hermes-signature",
            ]),
        ),
    ]);
    all.extend(relays());
    all
}

/// The crates of the relay.
fn relays() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    BTreeMap::from([
        ("hermes-relay", BTreeSet::new()),
        ("hermes-relay-client", BTreeSet::from(["hermes-net", "hermes-relay", "hermes-signature"])),
        ("hermes-signature", BTreeSet::new()),
        (
            "hermes-relay-service",
            BTreeSet::from(["hermes-model", "hermes-net", "hermes-relay", "hermes-signature", "hermes-transport"]),
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
fn every_file_begins_with_its_purpose() {
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

/// The largest circle of files that import each other in one crate.
const MAX_FILE_CIRCLE: usize = 20;

/// The root files of all crates.
fn crate_roots() -> Vec<PathBuf> {
    let crates = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path().join("src"));
    let roots = crates.flat_map(|source| [source.join("lib.rs"), source.join("main.rs")]);
    roots.filter(|file| file.is_file()).collect()
}

#[test]
fn modules_import_each_other_in_no_circle() {
    let roots = crate_roots();
    assert!(roots.len() > 15, "the walk found too little");
    let mut wrong = Vec::new();
    for file in roots {
        let read = Crate::read(&file);
        assert!(!read.files().is_empty());
        let circle = largest_circle(&read.top_level_imports());
        if circle.len() > 1 {
            wrong.push(format!("{}: top-level modules {}", file.display(), circle.join(", ")));
        }
        let circle = largest_circle(&read.file_imports());
        if circle.len() > MAX_FILE_CIRCLE {
            wrong.push(format!("{}: {} files: {circle:#?}", file.display(), circle.len()));
        }
    }
    assert!(wrong.is_empty(), "circles of imports:\n{}", wrong.join("\n"));
}

/// The layers of the data plane. Each module imports only modules that come before it.
const LAYERS: [(&str, &[&str]); 3] = [
    (
        "hermes-transport",
        &[
            "headers",
            "metrics",
            "oneshot",
            "pinned",
            "token_bucket",
            "log_throttle",
            "dial_guard",
            "error",
            "stream_error",
            "runtime",
            "h3",
            "stream",
            "body",
            "early_payload",
            "datagram",
            "body_writer",
            "tunnel_copy",
            "lingering_close",
            "max_forwards",
        ],
    ),
    ("hermes-outbound", &["rate_limit", "virtual_ip", "reverse", "upstream", "generation", "outbound"]),
    (
        "hermes-proxy",
        &[
            "ndn",
            "ip",
            "worker",
            "request",
            "upgrade",
            "service",
            "custody",
            "filters",
            "session",
            "listener",
            "node",
            "admin",
            "embed",
            "detached_device",
        ],
    ),
];

#[test]
fn no_import_runs_up_a_layer() {
    let mut wrong = Vec::new();
    for (name, layers) in LAYERS {
        let level = |module: &str| layers.iter().position(|layer| *layer == module);
        for (module, imports) in Crate::read(&root().join("crates").join(name).join("src/lib.rs")).top_level_imports() {
            let Some(own) = level(&module) else {
                wrong.push(format!("{name}: {module} has no layer"));
                continue;
            };
            let above = imports.iter().filter(|import| level(import).is_none_or(|other| other >= own));
            wrong.extend(above.map(|import| format!("{name}: {module} imports {import}")));
        }
    }
    assert!(wrong.is_empty(), "imports that run up:\n{}", wrong.join("\n"));
}

/// Product lines that a crate may have, tests apart.
const MAX_CRATE_LINES: usize = 20_000;

#[test]
fn no_crate_is_too_large() {
    for crate_ in std::fs::read_dir(root().join("crates")).unwrap() {
        let directory = crate_.unwrap().path();
        let name = directory.file_name().unwrap().to_str().unwrap().to_owned();
        let mut files = Vec::new();
        collect(&directory.join("src"), &mut files);
        files.retain(|file| !file.ends_with("tests.rs") && !file.components().any(|part| part.as_os_str() == "tests"));
        let lines: usize = files.iter().map(|file| product_lines(&std::fs::read_to_string(file).unwrap())).sum();
        assert!(lines <= MAX_CRATE_LINES, "{name} has {lines} lines of product code, {MAX_CRATE_LINES} are allowed");
        println!("{name}: {lines}");
    }
}

/// Lines before the tests at the end of a file.
fn product_lines(text: &str) -> usize {
    text.lines().take_while(|line| *line != "#[cfg(test)]").count()
}

/// Words that name no bound and no unit.
const BANNED: [&str; 6] = ["MOST", "PATIENCE", "LOOK", "SOON", "LONGEST", "AGAIN"];

#[test]
fn constant_names_state_what_they_bound() {
    let mut files = Vec::new();
    collect(&root().join("crates"), &mut files);
    let mut wrong = Vec::new();
    for file in files {
        for line in std::fs::read_to_string(&file).unwrap().lines() {
            let Some((_, rest)) = line.split_once("const ") else { continue };
            let Some((name, _)) = rest.split_once(':') else { continue };
            if name.split('_').any(|part| BANNED.contains(&part)) {
                wrong.push(format!("{}: {name}", file.display()));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "constants with names that say neither what they bound nor the unit:\n{}",
        wrong.join("\n")
    );
}

/// A path in backticks that ends in `.rs` names a file, from the root, from `crates/`, or from the source of its crate;
/// without a crate it is one of the data plane.
#[test]
fn files_that_documents_name_exist() {
    let mut documents = vec![root().join("ARCHITECTURE.md")];
    documents.extend(std::fs::read_dir(root().join("docs/design")).unwrap().map(|entry| entry.unwrap().path()));
    let exists = |path: &str| {
        let (crate_, rest) = path.split_once('/').unwrap_or((path, ""));
        let candidates = [
            path.to_owned(),
            format!("crates/{path}"),
            format!("crates/{crate_}/src/{rest}"),
            format!("crates/hermes-proxy/src/{path}"),
            format!("crates/hermes-outbound/src/{path}"),
            format!("crates/hermes-transport/src/{path}"),
        ];
        candidates.iter().any(|candidate| root().join(candidate).is_file())
    };
    let mut missing = Vec::new();
    let mut named = 0;
    for document in documents {
        let text = std::fs::read_to_string(&document).unwrap();
        for path in text.split('`').skip(1).step_by(2).filter(|path| path.ends_with(".rs") && !path.contains(' ')) {
            named += 1;
            if !exists(path) {
                missing.push(format!("{}: {path}", document.display()));
            }
        }
    }
    assert!(named > 50, "the documents name only {named} files");
    assert!(missing.is_empty(), "documents name files that do not exist:\n{}", missing.join("\n"));
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
