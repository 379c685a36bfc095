//! Replays the committed corpus of what clients read from each other, without the fuzzing engine; `fuzz/` describes its origin.

#![allow(clippy::unwrap_used)]

use std::path::Path;

#[allow(unreachable_pub, reason = "it is a module of another crate, too")]
#[path = "../../../fuzz/src/relay_client.rs"]
mod relay_client;

#[test]
fn every_committed_input_passes() {
    for (name, check) in
        [("relay_frame", relay_client::relay_frame as fn(&[u8])), ("relay_secret", relay_client::relay_secret)]
    {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 3, "{name}: hardly any corpus");
        for file in files {
            println!("{}", file.display());
            check(&std::fs::read(&file).unwrap());
        }
    }
}
