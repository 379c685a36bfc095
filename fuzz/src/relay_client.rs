//! Properties of what a client of a relay reads from other clients.
//!
//! In: the content of publications, as anybody may write it. Out: nothing, or a panic. The tests of `hermes-relay-client`
//! include this file, too, and replay the corpus, so that the crate of the fuzz targets needs no library for encryption.

use std::sync::LazyLock;

use bytes::Bytes;
use hermes_relay_client::Secret;
use hermes_relay_client::connection::rewritten_frame;

/// A frame reads the same after it is written again, and its data stays where it is.
pub fn relay_frame(data: &[u8]) {
    let content = Bytes::copy_from_slice(data);
    let Some(written) = rewritten_frame(&content) else { return };
    assert_eq!(rewritten_frame(&written).as_ref(), Some(&written));
    let line = data.iter().position(|byte| *byte == b'\n').expect("a frame has a line");
    assert!(written.ends_with(&data[line..]));
}

static SECRETS: LazyLock<[Secret; 2]> = LazyLock::new(|| {
    ["AAECAwQFBgcICQoLDA0ODw==", "EBESExQVFhcYGRobHB0eHw=="].map(|text| Secret::parse(text).expect("a secret"))
});

/// Content that was not encrypted does not open. Encrypted content opens only unchanged, and with the same secret. The first
/// two bytes of the input select the byte to change, and how.
pub fn relay_secret(data: &[u8]) {
    let [ours, other] = &*SECRETS;
    assert_eq!(ours.open(data), None);
    let Some(([at, change], content)) = data.split_first_chunk::<2>() else { return };
    let sealed = ours.seal(content).expect("random numbers");
    assert_eq!(ours.open(&sealed).as_deref(), Some(content));
    assert_eq!(other.open(&sealed), None);
    let mut changed = sealed.to_vec();
    let at = usize::from(*at) % changed.len();
    changed[at] ^= change;
    // The size of a record may be larger than the only one.
    let is_size = (16..20).contains(&at);
    if *change != 0 && !is_size {
        assert_eq!(ours.open(&changed), None, "byte {at}");
    }
    assert_eq!(ours.open(&sealed[..sealed.len() - 1]), None);
}
