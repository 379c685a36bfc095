//! Replays the committed corpus of the controller's parsers, without the fuzzing engine; `fuzz/` describes its origin.

#![allow(clippy::unwrap_used)]

use std::path::Path;

#[allow(unreachable_pub, reason = "it is a module of another crate, too")]
#[path = "../../../fuzz/src/overlay.rs"]
mod overlay;

#[test]
fn every_committed_input_passes() {
    for (name, check) in [("overlay_document", overlay::overlay_document as fn(&[u8])), ("token", overlay::token)] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 3, "{name}: hardly any corpus");
        for file in files {
            println!("{}", file.display());
            check(&std::fs::read(&file).unwrap());
        }
    }
}
