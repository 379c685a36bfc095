//! Replays the committed corpus through every check, without the fuzzing engine.
//!
//! In: the files of `corpus/TARGET/`. Out: a failure that names the file with a violated property. Also checks that
//! targets, files of the engine and corpus match.

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use hermes_fuzz::{OF_NDN, OF_THE_CONTROLLER, OF_THE_RELAY_CLIENT, TARGETS};

/// Maximum size of a corpus, since each `make test` replays it; run.sh minimises it.
const MAX_FILES: usize = 600;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_committed_input_passes() {
    let mut replayed = 0;
    let mut failed = Vec::new();
    for (name, check) in TARGETS {
        for file in files(&root().join("corpus").join(name)) {
            let data = fs::read(&file).unwrap();
            replayed += 1;
            if catch_unwind(|| check(&data)).is_err() {
                failed.push(file);
            }
        }
    }
    assert!(failed.is_empty(), "of {replayed} inputs these fail: {failed:#?}");
    assert!(replayed <= MAX_FILES, "{replayed} inputs: minimise the corpus (fuzz/run.sh --merge)");
}

#[test]
fn targets_files_and_corpus_agree() {
    let names = |directory: &str| -> BTreeSet<String> {
        let stem = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
        files(&root().join(directory)).iter().map(stem).collect()
    };
    let all = TARGETS.iter().map(|(name, _)| name).chain(OF_THE_CONTROLLER).chain(OF_NDN).chain(OF_THE_RELAY_CLIENT);
    let targets: BTreeSet<String> = all.map(|name| (*name).to_owned()).collect();
    assert_eq!(targets, names("corpus"));
    assert_eq!(targets, names("fuzz_targets"));
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    for name in &targets {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}: no [[bin]]");
        assert!(files(&root().join("corpus").join(name)).len() >= 3, "{name}: hardly any corpus");
    }
}
