//! Replays the committed corpus of NDN, without the fuzzing engine; `fuzz/` describes its origin.

#![allow(clippy::unwrap_used)]

use std::path::Path;

#[allow(unreachable_pub, reason = "it is a module of another crate, too")]
#[path = "../../../fuzz/src/ndn.rs"]
mod ndn;

#[test]
fn every_committed_input_passes() {
    for (name, check) in [
        ("ndn_packet", ndn::ndn_packet as fn(&[u8])),
        ("ndn_lp", ndn::ndn_lp),
        ("ndn_acks", ndn::ndn_acks),
        ("ndn_forwarder", ndn::ndn_forwarder),
        ("ndn_fetch", ndn::ndn_fetch),
    ] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 3, "{name}: hardly any corpus");
        for file in files {
            println!("{}", file.display());
            check(&std::fs::read(&file).unwrap());
        }
    }
}
