//! Binary HTTP messages against another implementation: each side decodes the messages of the other.
#![allow(clippy::unwrap_used)]

use std::io::Cursor;

use bhttp::{Message, Mode, StatusCode};
use bytes::{BufMut as _, Bytes, BytesMut};
use hermes_wire::binary_http::{Control, Decoder, Field, Part, put_chunk_head, put_end, put_head};

type Plain = Vec<(Vec<u8>, Vec<u8>)>;

fn text(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn lines(fields: &[Field]) -> impl Iterator<Item = (&[u8], &[u8])> {
    fields.iter().map(|(name, value)| (&name[..], &value[..]))
}

fn content() -> Vec<u8> {
    (0..100_000_u32).map(|at| (at % 251) as u8).collect()
}

/// Encodes content in chunks of many sizes.
fn written(control: &Control, fields: &[Field], trailers: &[Field]) -> BytesMut {
    let mut out = BytesMut::new();
    put_head(control, lines(fields), &mut out);
    let content = content();
    let (mut rest, mut size) = (&content[..], 1);
    while !rest.is_empty() {
        let (chunk, behind) = rest.split_at(rest.len().min(size));
        put_chunk_head(chunk.len(), &mut out);
        out.put_slice(chunk);
        (rest, size) = (behind, size * 3);
    }
    put_end(lines(trailers), &mut out);
    out
}

fn is_same(message: &Message, fields: &[Field], trailers: &[Field]) {
    let of = |section: &bhttp::FieldSection| -> Plain {
        section.iter().map(|field| (field.name().to_vec(), field.value().to_vec())).collect()
    };
    let own =
        |fields: &[Field]| -> Plain { lines(fields).map(|(name, value)| (name.to_vec(), value.to_vec())).collect() };
    assert_eq!(of(message.header()), own(fields));
    assert_eq!(of(message.trailer()), own(trailers));
    assert_eq!(message.content(), content());
}

#[test]
fn another_one_reads_what_we_write() {
    let fields = [(text("accept"), text("*/*")), (text("hermes-user"), text("alice"))];
    let trailers = [(text("digest"), text("x"))];
    let (authority, path) = (text("SHOP"), text("/a?b"));
    let request = Control::Request { method: text("PUT"), scheme: text("https"), authority, path };
    let message = Message::read_bhttp(&mut Cursor::new(&written(&request, &fields, &trailers)[..])).unwrap();
    is_same(&message, &fields, &trailers);
    let control = message.control();
    assert_eq!((control.method(), control.scheme()), (Some(&b"PUT"[..]), Some(&b"https"[..])));
    assert_eq!((control.authority(), control.path()), (Some(&b"SHOP"[..]), Some(&b"/a?b"[..])));
    let response = Control::Response { status: 206 };
    let message = Message::read_bhttp(&mut Cursor::new(&written(&response, &fields, &[])[..])).unwrap();
    is_same(&message, &fields, &[]);
    assert_eq!(message.control().status().map(StatusCode::code), Some(206));
}

#[test]
fn we_read_what_another_one_writes() {
    let mut message = Message::response(StatusCode::try_from(404_u64).unwrap());
    message.put_header("content-type", "text/plain");
    message.put_trailer("digest", "x");
    message.write_content(content());
    let mut bytes = Vec::new();
    message.write_bhttp(Mode::IndeterminateLength, &mut bytes).unwrap();
    let (mut decoder, mut parts, mut came) = (Decoder::new(1000), Vec::new(), Vec::new());
    for piece in bytes.chunks(777) {
        decoder.push(Bytes::copy_from_slice(piece));
        while let Some(part) = decoder.next().unwrap() {
            if let Part::Content(bytes) = part {
                came.extend_from_slice(&bytes);
            } else {
                parts.push(part);
            }
        }
    }
    decoder.finish().unwrap();
    let head = Part::Head(Control::Response { status: 404 }, vec![(text("content-type"), text("text/plain"))]);
    assert_eq!(parts, [head, Part::End(vec![(text("digest"), text("x"))])]);
    assert_eq!(came, content());
}
