//! A property of the responses of a relay, as its clients read them.
//!
//! In: bytes of a relay. Out: nothing, or a panic.

use hermes_relay::framing::multipart::{MalformedPart, Parser, Part};

/// The longest content that the parser keeps.
const MAX_BODY: usize = 64;

/// The first byte is the length of pieces. A response in pieces has the parts of the whole response, and none is longer
/// than allowed.
pub fn relay_parts(data: &[u8]) {
    let Some((step, bytes)) = data.split_first() else { return };
    let whole = parts(bytes, bytes.len().max(1));
    assert_eq!(parts(bytes, usize::from(*step).max(1)), whole);
    assert!(whole.0.iter().all(|part| part.body.len() <= MAX_BODY));
}

fn parts(bytes: &[u8], step: usize) -> (Vec<Part>, Option<MalformedPart>) {
    let mut parser = Parser::new("multipart/mixed; boundary=x", MAX_BODY).expect("a boundary");
    let mut parts = Vec::new();
    for piece in bytes.chunks(step) {
        parser.push(piece);
        loop {
            match parser.next_part() {
                Ok(Some(part)) => parts.push(part),
                Ok(None) => break,
                Err(error) => return (parts, Some(error)),
            }
        }
    }
    (parts, None)
}
