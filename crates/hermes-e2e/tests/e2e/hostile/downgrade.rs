//! HTTP/2 requests that would be something else in HTTP/1.1: bytes that end lines, lengths that lie, framing that
//! belongs to the other version.
//!
//! Every field is sent as a plain literal, so that nothing on our side cleans it. What is refused reaches no origin;
//! what is passed on is one request with one body.

use hermes_testkit::frames::{END_HEADERS, END_STREAM, Frame, Frames, block, kind};

use crate::hostile::lab::{BOTH, NodeFixture, SMUGGLED};

type Field<'a> = (&'a [u8], &'a [u8]);

/// A request with a field replaced, left out or added.
fn request<'a>(method: &'a str, changes: &[(&'a str, Option<&'a str>)], more: &[Field<'a>]) -> Vec<u8> {
    let parts = [(":method", method), (":scheme", "http"), (":authority", "WEB"), (":path", "/attack")];
    let mut fields: Vec<Field<'_>> = Vec::new();
    for (name, value) in parts {
        match changes.iter().find(|(changed, _)| *changed == name) {
            Some((_, Some(new))) => fields.push((name.as_bytes(), new.as_bytes())),
            Some((_, None)) => {}
            None => fields.push((name.as_bytes(), value.as_bytes())),
        }
    }
    fields.extend_from_slice(more);
    block(&fields)
}

/// A request as frames of stream 1.
struct Attack {
    what: String,
    block: Vec<u8>,
    /// `None` where the head ends the stream.
    body: Option<&'static str>,
    trailers: Option<Vec<u8>>,
}

impl Attack {
    fn new(what: &str, block: Vec<u8>, body: Option<&'static str>) -> Self {
        Self { what: what.to_owned(), block, body, trailers: None }
    }

    fn frames(&self) -> Vec<Frame> {
        let ends = |yes: bool| if yes { END_STREAM } else { 0 };
        let mut frames =
            vec![Frame::new(kind::HEADERS, END_HEADERS | ends(self.body.is_none()), 1, self.block.clone())];
        if let Some(body) = self.body {
            frames.push(Frame::new(kind::DATA, ends(self.trailers.is_none()), 1, body));
        }
        let trailers =
            self.trailers.iter().map(|block| Frame::new(kind::HEADERS, END_HEADERS | END_STREAM, 1, block.clone()));
        frames.extend(trailers);
        frames
    }
}

/// `:status: 200` of the static table, which h2 uses wherever it can (RFC 7541, 6.1).
const OK: u8 = 0x88;

/// Runs attacks that must be refused: by a status, by a reset, or by the end of the connection.
async fn refused(attacks: &[Attack]) {
    let mut fixture = NodeFixture::new().await;
    for listener in BOTH {
        for attack in attacks {
            let what = format!("{listener}: {}", attack.what);
            let mut frames = Frames::connect(fixture.address(listener), &[]).await.unwrap();
            frames.send(&attack.frames()).await.unwrap();
            let answers = |frame: &Frame| matches!(frame.kind, kind::HEADERS | kind::RST_STREAM | kind::GOAWAY);
            let answer = frames.until(&what, answers).await.unwrap();
            assert!(answer.kind != kind::HEADERS || answer.payload.first() != Some(&OK), "{what}: {answer:?}");
            let seen = fixture.still_serves(listener).await;
            // A body that turns out to be a lie is cut off on its way.
            assert!(seen.iter().all(|seen| seen.target == "/attack" && seen.body.is_none()), "{what}: {seen:?}");
        }
    }
}

#[tokio::test]
async fn no_byte_of_a_field_ends_its_line() {
    let path = format!("/attack HTTP/1.1\r\nHost: WEB\r\n\r\n{SMUGGLED}");
    let method = format!("GET /attack HTTP/1.1\r\nHost: WEB\r\n\r\n{SMUGGLED}GET");
    let value = format!("y\r\n\r\n{SMUGGLED}");
    let get = |changes: &[(&'static str, Option<&str>)]| {
        let owned: Vec<_> = changes.iter().map(|(name, value)| (*name, value.map(str::to_owned))).collect();
        let changes: Vec<_> = owned.iter().map(|(name, value)| (*name, value.as_deref())).collect();
        request("GET", &changes, &[])
    };
    let mut attacks = Vec::new();
    for (name, value) in [
        (":path", &*path),
        (":path", "/attack\n"),
        (":path", "/attack\0"),
        (":path", "/attack /smuggled"),
        (":path", "/attack\t"),
        (":path", "attack"),
        (":path", ""),
        (":path", "*"),
        (":method", &*method),
        (":method", "GET\r\n"),
        (":method", "G T"),
        (":method", ""),
        (":authority", "WEB\r\nX: y"),
        (":authority", "WEB\n"),
        (":authority", "WEB WEB"),
        (":authority", "WEB/smuggled"),
        (":authority", "user@WEB"),
        (":authority", "WEB:99999"),
        (":authority", ""),
        (":scheme", "http\r\nX: y"),
        (":scheme", "http://WEB/smuggled?"),
        (":scheme", "ftp"),
        (":scheme", ""),
    ] {
        attacks.push(Attack::new(&format!("{name} is {value:?}"), get(&[(name, Some(value))]), None));
    }
    let fields: &[Field<'_>] = &[
        (b"x", value.as_bytes()),
        (b"x", b"y\r\nTransfer-Encoding: chunked"),
        (b"x", b"y\nz: a"),
        (b"x", b"y\rz"),
        (b"x", b"y\0"),
        (b"x\r\ny", b"z"),
        (b"x: y\r\nz", b"z"),
        (b"x y", b"z"),
        (b"x:", b"z"),
        (b"x\0", b"z"),
        (b"X", b"z"),
        (b"x\xe9", b"z"),
        (b"", b"z"),
        (b":x", b"z"),
        (b":path", b"/smuggled"),
        (b":status", b"200"),
    ];
    for field in fields {
        let what = format!("{:?}", (String::from_utf8_lossy(field.0), String::from_utf8_lossy(field.1)));
        attacks.push(Attack::new(&what, request("GET", &[], &[*field]), None));
    }
    refused(&attacks).await;
}

#[tokio::test]
async fn fields_of_the_other_version_are_refused() {
    let fields: &[&[Field<'_>]] = &[
        &[(b"transfer-encoding", b"chunked")],
        &[(b"transfer-encoding", b"identity")],
        &[(b"content-length", b"37"), (b"transfer-encoding", b"chunked")],
        &[(b"connection", b"close")],
        &[(b"connection", b"transfer-encoding"), (b"transfer-encoding", b"chunked")],
        &[(b"keep-alive", b"300")],
        &[(b"proxy-connection", b"keep-alive")],
        &[(b"upgrade", b"websocket")],
        &[(b"te", b"chunked")],
        &[(b"te", b"trailers, chunked")],
        &[(b"host", b"EVIL")],
        &[(b"host", b"WEB"), (b"host", b"EVIL")],
    ];
    let attack = |fields: &&[Field<'_>]| {
        let what = fields.iter().map(|(name, value)| [name, &b": "[..], value, b"; "].concat()).collect::<Vec<_>>();
        Attack::new(&String::from_utf8_lossy(&what.concat()), request("POST", &[], fields), Some(SMUGGLED))
    };
    let mut attacks: Vec<Attack> = fields.iter().map(attack).collect();
    let twice: Field<'_> = (b"host", b"WEB");
    attacks.push(Attack::new("Host twice", request("POST", &[(":authority", None)], &[twice, twice]), Some(SMUGGLED)));
    attacks.push(Attack::new("nobody", request("POST", &[(":authority", None)], &[]), Some(SMUGGLED)));
    refused(&attacks).await;
}

#[tokio::test]
async fn a_length_that_lies_is_refused() {
    let attack = |lengths: &[&'static str], body: Option<&'static str>| {
        let fields: Vec<Field<'_>> = lengths.iter().map(|length| (&b"content-length"[..], length.as_bytes())).collect();
        Attack::new(&format!("{lengths:?} before {body:?}"), request("POST", &[], &fields), body)
    };
    refused(&[
        attack(&["0"], Some(SMUGGLED)),
        attack(&["4"], Some(SMUGGLED)),
        attack(&["38"], Some(SMUGGLED)),
        attack(&["37"], None),
        attack(&["1"], Some("")),
        attack(&["5", "37"], Some(SMUGGLED)),
        attack(&["37", "5"], Some(SMUGGLED)),
        attack(&["5, 37"], Some(SMUGGLED)),
        attack(&["+37"], Some(SMUGGLED)),
        attack(&["-1"], Some(SMUGGLED)),
        attack(&["0x25"], Some(SMUGGLED)),
        attack(&["18446744073709551653"], Some(SMUGGLED)),
        attack(&[""], Some(SMUGGLED)),
    ])
    .await;
}

#[tokio::test]
async fn one_request_stays_one_request_across_versions() {
    let mut fixture = NodeFixture::new().await;
    let length: Field<'_> = (b"content-length", b"37");
    let mut trailing =
        Attack::new("with trailers", request("POST", &[], &[(b"trailer", b"content-length, host")]), Some(SMUGGLED));
    trailing.trailers = Some(block(&[
        (b"content-length", b"0"),
        (b"host", b"EVIL"),
        (b"authorization", b"x"),
        (b"hermes-user", b"eve"),
    ]));
    let attacks = [
        Attack::new("with a length", request("POST", &[], &[length]), Some(SMUGGLED)),
        Attack::new("with the length twice", request("POST", &[], &[length, length]), Some(SMUGGLED)),
        Attack::new("without a length", request("POST", &[], &[]), Some(SMUGGLED)),
        Attack::new("by Host alone", request("POST", &[(":authority", None)], &[(b"host", b"WEB")]), Some(SMUGGLED)),
        Attack::new("for a body that waits", request("POST", &[], &[(b"expect", b"100-continue")]), Some(SMUGGLED)),
        trailing,
    ];
    assert_eq!(SMUGGLED.len(), 37);
    for listener in BOTH {
        for attack in &attacks {
            let mut frames = Frames::connect(fixture.address(listener), &[]).await.unwrap();
            frames.send(&attack.frames()).await.unwrap();
            let answer =
                frames.until(&attack.what, |frame| frame.kind == kind::DATA && !frame.payload.is_empty()).await;
            assert_eq!(answer.unwrap().payload, "POST /attack 37", "{listener}: {}", attack.what);
            let [seen] = <[_; 1]>::try_from(fixture.still_serves(listener).await).unwrap();
            assert_eq!(
                (&*seen.target, seen.body.as_deref()),
                ("/attack", Some(SMUGGLED)),
                "{listener}: {}",
                attack.what
            );
            assert!(seen.values("authorization").is_empty(), "{seen:?}");
        }
    }
}
