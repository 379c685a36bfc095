//! RFC 9297, 9298 and 9484 byte by byte: what a peer must not do, and what it sees when it does.
//!
//! In: heads and bodies written by hand, by section. Out: the status, the code of the broken stream or connection, or
//! that the tunnel lives on. Each case runs over HTTP/1.1, /2 and /3, where its section knows the version.

use hermes_testkit::binary::hermes;
use std::io;

use bytes::{Bytes, BytesMut};
use hermes_testkit::{
    ca::{Identity, Subject},
    dns::{Dns, Record, resolving_by},
    flow::{self, Capsule, capsule},
    frames::{END_STREAM, Frame, Frames, kind},
    h3::{self, Abort, abort_of, wire},
    ip,
    listener_client::{ListenerClient, NODE_NAME},
    netns::Namespace,
    overlay::{Node, Overlay},
    tunnel::BoxedStream,
};

use crate::ip::node_chain::as_root;

const DOCUMENT: &str = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: required}}
routes:
- {name: gateway, match: {kind: ip}, terminate: {tun: gw0, address: [10.0.0.1], assign: [10.20.0.0/24]}}
- {name: nobody, match: {kind: udp, authority: 'no.such.name.invalid:*'}, terminate: {udp: authority}}
- {name: discard, match: {kind: udp}, terminate: {udp: '127.0.0.1:9'}}
- {name: web, match: {kind: http}, respond: {status: 200}}
";

/// Where the only name leads that there is.
const WEB: [u8; 4] = [192, 0, 2, 80];
/// HTTP/2's PROTOCOL_ERROR (RFC 9113, 7).
const PROTOCOL_ERROR: u64 = 1;
/// H3_DATAGRAM_ERROR (RFC 9297, 5.2).
const DATAGRAM_ERROR: u64 = 0x33;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    H1,
    H2,
    H3,
}

const ALL: [Version; 3] = [Version::H1, Version::H2, Version::H3];
const LATER: [Version; 2] = [Version::H2, Version::H3];

/// What a client sees.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    /// The final status of an answer that is no tunnel.
    Status(u16),
    /// The stream was broken off with this code (of HTTP/1.1: the connection, without one).
    Abort(u64),
    /// The stream ended in order.
    Ended,
    /// The tunnel is open and has said this.
    Says(Capsule),
}

/// What it shall see.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Wanted {
    /// This status.
    Status(u16),
    /// The request is malformed: 400, or the stream's end with the code of a malformed message.
    Malformed,
    /// The tunnel opens, and is then broken off as a malformed message is (RFC 9297, 3.3).
    BrokenOff,
    /// The tunnel opens, and says this.
    Says(Capsule),
    /// The tunnel opens, and ends in order behind our end.
    Ends,
}

/// A case.
struct Case {
    section: &'static str,
    what: &'static str,
    versions: &'static [Version],
    head: Head,
    /// On the stream, once the tunnel is open.
    body: Vec<u8>,
    /// Our end of the stream follows.
    ends: bool,
    wanted: Wanted,
}

/// A request for a tunnel.
#[derive(Clone)]
struct Head {
    protocol: &'static str,
    path: String,
    method: &'static str,
    fields: Vec<(&'static str, &'static str)>,
    /// A pseudo-header field (or its like in HTTP/1.1) that is left out.
    without: &'static str,
}

fn udp(host: &str, port: &str) -> Head {
    let path = format!("/.well-known/masque/udp/{host}/{port}/");
    Head { protocol: "connect-udp", path, method: "", fields: vec![("capsule-protocol", "?1")], without: "" }
}

fn ip_path(path: &str) -> Head {
    Head { protocol: "connect-ip", path: path.to_owned(), ..udp("", "") }
}

fn ip(target: &str, protocol: &str) -> Head {
    ip_path(&ip::path(target, protocol))
}

impl Head {
    fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.fields.push((name, value));
        self
    }

    fn without(self, without: &'static str) -> Self {
        Self { without, ..self }
    }

    fn method(self, method: &'static str) -> Self {
        Self { method, ..self }
    }

    fn h1(&self) -> String {
        let method = if self.method.is_empty() { "GET" } else { self.method };
        let mut head = format!("{method} {} HTTP/1.1\r\n", self.path);
        let lines = [("host", "proxy.test"), ("connection", "upgrade"), ("upgrade", self.protocol)];
        for (name, value) in lines.iter().chain(&self.fields).filter(|(name, _)| *name != self.without) {
            head += &format!("{name}: {value}\r\n");
        }
        head + "\r\n"
    }

    /// The lines of HTTP/2 and HTTP/3.
    fn lines(&self) -> Vec<(&str, &str)> {
        let method = if self.method.is_empty() { "CONNECT" } else { self.method };
        let pseudo = [
            (":method", method),
            (":scheme", "https"),
            (":authority", "proxy.test"),
            (":path", &self.path),
            (":protocol", self.protocol),
        ];
        let lines = pseudo.into_iter().chain(self.fields.iter().copied());
        lines.filter(|(name, _)| *name != self.without).collect()
    }
}

/// A node with a device, and a client in its namespace.
struct Fixture {
    node: Node,
    overlay: Overlay,
    user: Identity,
    _dns: Dns,
    namespace: Namespace,
}

impl Fixture {
    async fn new() -> Self {
        let overlay = Overlay::new(hermes()).unwrap();
        let namespace = Namespace::new().unwrap();
        let answers = |name: &str| (name == "web.test").then(|| vec![Record::address(60, WEB)]);
        let dns = namespace.run(Dns::serve(([127, 0, 0, 1], 53).into(), answers)).await.unwrap().unwrap();
        let wrapper = resolving_by([127, 0, 0, 1].into(), overlay.dir()).unwrap();
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        let draft = overlay.node("gate").document(DOCUMENT).within(&namespace).by_way_of(&wrapper);
        let node = draft.identity(&Subject::node("gate").with_dns(NODE_NAME)).unwrap().start().await.unwrap();
        let user = overlay.authority().issue(&Subject::node("client").with_user("alice")).unwrap();
        Self { node, overlay, user, _dns: dns, namespace }
    }

    fn client(&self) -> ListenerClient {
        ListenerClient::tls(self.node.address("in"), self.overlay.authority().pem(), Some(&self.user))
    }

    async fn run(&self, case: &Case, version: Version) -> io::Result<Seen> {
        let client = self.client();
        let seen = async {
            match version {
                Version::H1 => by_h1(&client, case).await,
                Version::H2 => by_h2(&client, case).await,
                Version::H3 => by_h3(&client, case).await,
            }
        };
        self.namespace.run(seen).await.map_err(io::Error::other)?
    }
}

/// What ends a case that shall say something: the first capsule that is no word of the node's own.
fn output(unread: &mut BytesMut, wanted: &Wanted) -> Option<Seen> {
    let Wanted::Says(wanted) = wanted else { return None };
    while let Some(capsule) = flow::parse(unread) {
        if capsule.kind == wanted.kind {
            return Some(Seen::Says(capsule));
        }
    }
    None
}

async fn by_h1(client: &ListenerClient, case: &Case) -> io::Result<Seen> {
    let mut http1 = client.h1().await?;
    http1.send(case.head.h1()).await?;
    let head = http1.head().await?;
    if head.status() != 101 {
        return Ok(Seen::Status(head.status()));
    }
    http1.send(&case.body).await?;
    if case.ends {
        http1.finish().await?;
    }
    let mut unread = BytesMut::new();
    loop {
        match http1.some().await {
            Ok(Some(chunk)) => unread.extend_from_slice(&chunk),
            // By TLS an end that is no close_notify is an error: here both are the end of the connection.
            Ok(None) if case.ends && case.wanted == Wanted::Ends => return Ok(Seen::Ended),
            Ok(None) => return Ok(Seen::Abort(0)),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
            Err(_) => return Ok(Seen::Abort(0)),
        }
        if let Some(seen) = output(&mut unread, &case.wanted) {
            return Ok(seen);
        }
    }
}

/// The status in a header block, which begins with it: an index of HPACK's static table, or three digits in its
/// Huffman code (RFC 7541, appendices A and B).
fn status(block: &[u8]) -> u16 {
    match block {
        [index @ 0x88..=0x8e, ..] => [200, 204, 206, 304, 400, 404, 500][usize::from(index - 0x88)],
        [_, 0x82, 0x6c, 0x02, ..] => 502,
        _ => 0,
    }
}

async fn by_h2(client: &ListenerClient, case: &Case) -> io::Result<Seen> {
    let mut frames: Frames<BoxedStream> = Frames::begin(client.stream(&["h2"]).await?, &[]).await?;
    frames.send(&[Frame::headers(1, false, &case.head.lines())]).await?;
    let mut unread = BytesMut::new();
    let mut sent = false;
    loop {
        let frame = frames.until("an answer", |frame| frame.stream == 1).await?;
        match frame.kind {
            kind::RST_STREAM => return Ok(Seen::Abort(frame.reason().map_or(0, u64::from))),
            kind::HEADERS if status(&frame.payload) != 200 => return Ok(Seen::Status(status(&frame.payload))),
            kind::HEADERS if !sent => {
                sent = true;
                let flags = if case.ends { END_STREAM } else { 0 };
                for chunk in chunks(&case.body) {
                    frames.send(&[Frame::new(kind::DATA, 0, 1, chunk)]).await?;
                }
                frames.send(&[Frame::new(kind::DATA, flags, 1, "")]).await?;
            }
            kind::DATA => unread.extend_from_slice(&frame.payload),
            _ => {}
        }
        if let Some(seen) = output(&mut unread, &case.wanted) {
            return Ok(seen);
        }
        if matches!(frame.kind, kind::DATA | kind::HEADERS) && frame.flags & END_STREAM != 0 {
            return Ok(Seen::Ended);
        }
    }
}

/// Frames of at most 16 KiB; none where there is nothing.
fn chunks(body: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    body.chunks(16 << 10).map(<[u8]>::to_vec)
}

async fn by_h3(client: &ListenerClient, case: &Case) -> io::Result<Seen> {
    let connection =
        h3::Connection::connect(client, &[(wire::ENABLE_CONNECT_PROTOCOL, 1), (wire::H3_DATAGRAM, 1)]).await?;
    let (mut send, mut recv) = connection.open().await?;
    send.headers(&case.head.lines()).await?;
    let ended = |error: io::Error| match abort_of(&error) {
        Some(Abort::Stream(code)) => Ok(Seen::Abort(code)),
        _ => Err(error),
    };
    let (pseudo, _) = match recv.head().await {
        Ok(head) => head,
        Err(error) => return ended(error),
    };
    let status = pseudo.iter().find(|(name, _)| name == ":status").map(|(_, status)| status.as_str());
    if status != Some("200") {
        return Ok(Seen::Status(status.and_then(|status| status.parse().ok()).unwrap_or_default()));
    }
    // It may break off before it has read all.
    let _ = send.data(Bytes::copy_from_slice(&case.body)).await;
    if case.ends {
        let _ = send.finish();
    }
    let mut unread = BytesMut::new();
    loop {
        match recv.chunk().await {
            Ok(Some(chunk)) => unread.extend_from_slice(&chunk),
            Ok(None) => return Ok(Seen::Ended),
            Err(error) => return ended(error),
        }
        if let Some(seen) = output(&mut unread, &case.wanted) {
            return Ok(seen);
        }
    }
}

fn fits(seen: &Seen, wanted: &Wanted, version: Version) -> bool {
    let malformed = match version {
        Version::H1 => 0,
        Version::H2 => PROTOCOL_ERROR,
        Version::H3 => wire::code::MESSAGE_ERROR,
    };
    match (wanted, seen) {
        (Wanted::Status(wanted), Seen::Status(seen)) => wanted == seen,
        (Wanted::Malformed, Seen::Status(seen)) => *seen == 400,
        (Wanted::Malformed | Wanted::BrokenOff, Seen::Abort(code)) => *code == malformed,
        (Wanted::Says(wanted), Seen::Says(seen)) => wanted == seen,
        (Wanted::Ends, Seen::Ended) => true,
        _ => false,
    }
}

/// A capsule of CONNECT-IP as it would be answered: an address that is given.
fn given() -> Wanted {
    Wanted::Says(Capsule { kind: ip::ADDRESS_ASSIGN, value: entry(1, [10, 20, 0, 2], 32).into() })
}

/// The route of who asks for a name.
fn only_web() -> Wanted {
    let value = route(WEB, WEB, 0).into();
    Wanted::Says(Capsule { kind: ip::ROUTE_ADVERTISEMENT, value })
}

fn entry(request: u8, address: [u8; 4], length: u8) -> Vec<u8> {
    [&[request, 4][..], &address, &[length]].concat()
}

fn request(entries: &[u8]) -> Vec<u8> {
    capsule(ip::ADDRESS_REQUEST, entries).to_vec()
}

fn good_request() -> Vec<u8> {
    request(&entry(1, [10, 20, 0, 2], 32))
}

fn route(start: [u8; 4], end: [u8; 4], protocol: u8) -> Vec<u8> {
    [&[4][..], &start, &end, &[protocol]].concat()
}

fn routes(routes: &[Vec<u8>]) -> Vec<u8> {
    capsule(ip::ROUTE_ADVERTISEMENT, &routes.concat()).to_vec()
}

fn case(section: &'static str, what: &'static str, head: Head, wanted: Wanted) -> Case {
    Case { section, what, versions: &ALL, head, body: Vec::new(), ends: false, wanted }
}

impl Case {
    fn only(self, versions: &'static [Version]) -> Self {
        Self { versions, ..self }
    }

    fn body(self, body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..self }
    }

    fn then_ends(self) -> Self {
        Self { ends: true, ..self }
    }
}

fn rfc_9297() -> Vec<Case> {
    let open = || ip("*", "*");
    let then_good = |before: &[u8]| [before, &good_request()].concat();
    vec![
        case("3.2", "an unknown capsule is skipped", open(), given()).body(then_good(&capsule(0x2a, b"what?"))),
        case("3.2", "an empty unknown capsule is skipped", open(), given()).body(then_good(&capsule(0x2b, b""))),
        case("3.2", "one of a type of eight bytes is skipped", open(), given())
            .body(then_good(&capsule((1 << 62) - 1, &[1; 20_000]))),
        case("3.2", "content-length", open().with("content-length", "10"), Wanted::Malformed),
        case("3.2", "content-type", open().with("content-type", "text/plain"), Wanted::Malformed),
        case("3.2", "transfer-encoding", open().with("transfer-encoding", "chunked"), Wanted::Malformed)
            .only(&[Version::H1]),
        case("3.3", "the stream ends within a type", open(), Wanted::BrokenOff).body([0x40]).then_ends(),
        case("3.3", "the stream ends within a length", open(), Wanted::BrokenOff).body([0, 0x40]).then_ends(),
        case("3.3", "the stream ends within a DATAGRAM", open(), Wanted::BrokenOff).body([0, 5, 0]).then_ends(),
        case("3.3", "the stream ends within an unknown capsule", open(), Wanted::BrokenOff)
            .body([0x2a, 5, 0])
            .then_ends(),
        case("3.3", "the stream ends between capsules", open(), Wanted::Ends).body(capsule(0x2a, b"x")).then_ends(),
        case("3.4", "no capsule-protocol is no offence", open().without("capsule-protocol"), given())
            .body(good_request()),
        case("3.5", "a DATAGRAM without a context", open(), Wanted::BrokenOff).body([0, 0]),
    ]
}

fn rfc_9298() -> Vec<Case> {
    let open = || udp("192.0.2.1", "9");
    let long = capsule(0, &[&[0][..], &vec![0; 65_528]].concat());
    vec![
        case("3", "no port", udp("192.0.2.1", ""), Wanted::Malformed),
        case("3", "port 0", udp("192.0.2.1", "0"), Wanted::Malformed),
        case("3", "port 65536", udp("192.0.2.1", "65536"), Wanted::Malformed),
        case("3", "no host", udp("", "9"), Wanted::Malformed),
        case("3", "an address in brackets", udp("%5B2001%3Adb8%3A%3A1%5D", "9"), Wanted::Malformed),
        case("3", "an address with a zone", udp("fe80%3A%3A1%25eth0", "9"), Wanted::Malformed),
        case("3.1", "a name that is none", udp("no.such.name.invalid", "9"), Wanted::Status(502)),
        case("3.2", "a method that is not GET", open().method("POST"), Wanted::Malformed).only(&[Version::H1]),
        case("3.2", "no host field", open().without("host"), Wanted::Malformed).only(&[Version::H1]),
        case("3.4", "no :scheme", open().without(":scheme"), Wanted::Malformed).only(&LATER),
        case("3.4", "no :path", open().without(":path"), Wanted::Malformed).only(&LATER),
        case("3.4", "no :authority", open().without(":authority"), Wanted::Malformed).only(&LATER),
        case("3.4", ":protocol with another method", open().method("GET"), Wanted::Malformed).only(&LATER),
        case("4", "an unknown context", open(), Wanted::Ends).body(capsule(0, &[2, 1, 2, 3])).then_ends(),
        case("5", "a payload longer than UDP has", open(), Wanted::BrokenOff).body(long),
        case("5", "an empty payload", open(), Wanted::Ends).body([0, 1, 0]).then_ends(),
    ]
}

fn rfc_9484() -> Vec<Case> {
    let open = || ip("*", "*");
    let raw = |path: &str| ip_path(&format!("/.well-known/masque/ip/{path}"));
    let off = |section, what, body: Vec<u8>| case(section, what, open(), Wanted::BrokenOff).body(body);
    let declined =
        |entries: &[u8]| Wanted::Says(Capsule { kind: ip::ADDRESS_ASSIGN, value: Bytes::copy_from_slice(entries) });
    let [a, b, c, d] = [[10, 0, 0, 0], [10, 0, 0, 255], [10, 0, 1, 0], [10, 0, 1, 255]];
    vec![
        case("4.3", "a method that is not GET", open().method("POST"), Wanted::Malformed).only(&[Version::H1]),
        case("4.3", "no host field", open().without("host"), Wanted::Malformed).only(&[Version::H1]),
        case("4.5", "no :scheme", open().without(":scheme"), Wanted::Malformed).only(&LATER),
        case("4.5", "no :path", open().without(":path"), Wanted::Malformed).only(&LATER),
        case("4.5", "no :authority", open().without(":authority"), Wanted::Malformed).only(&LATER),
        case("4.6", "no protocol", raw("*/"), Wanted::Malformed),
        case("4.6", "protocol 256", raw("*/256/"), Wanted::Malformed),
        case("4.6", "a protocol by name", raw("*/udp/"), Wanted::Malformed),
        case("4.6", "a prefix with bits behind it", raw("10.0.0.1%2F24/*/"), Wanted::Malformed),
        case("4.6", "a prefix longer than its address", raw("10.0.0.1%2F33/*/"), Wanted::Malformed),
        case("4.6", "an address with a zone", raw("fe80%3A%3A1%25eth0/*/"), Wanted::Malformed),
        case("4.6", "a prefix", raw("10.0.0.0%2F24/*/"), given()).body(good_request()),
        case("4.6", "a name is the address that it leads to, and nothing else", ip("web.test", "*"), only_web()),
        case("4.6", "a name that leads nowhere", ip("no.such.name.invalid", "*"), Wanted::Status(502)),
        case("4.6", "a protocol", raw("*/17/"), given()).body(good_request()),
        off("4.7", "a prefix longer than its address", request(&entry(1, [10, 20, 0, 2], 33))),
        off("4.7", "bits behind a prefix", request(&entry(1, [10, 20, 0, 2], 24))),
        off("4.7", "IP version 5", request(&[1, 5, 10, 20, 0, 2, 32])),
        off("4.7", "half an entry", request(&[1, 4, 10, 20])),
        off("4.7.1", "an ADDRESS_ASSIGN that is half an entry", capsule(ip::ADDRESS_ASSIGN, &[1, 4, 10]).to_vec()),
        off("4.7.2", "request 0", request(&entry(0, [10, 20, 0, 2], 32))),
        off("4.7.2", "a request for nothing", request(&[])),
        case("4.7.2", "an address that is given", open(), given()).body(good_request()),
        case("4.7.2", "an address that is declined", open(), declined(&entry(1, [0; 4], 32))).body(request(&entry(
            1,
            [192, 0, 2, 1],
            32,
        ))),
        case(
            "4.7.2",
            "an answer to each of two",
            open(),
            declined(&[entry(1, [10, 20, 0, 2], 32), entry(2, [0; 4], 32)].concat()),
        )
        .body(request(&[entry(1, [10, 20, 0, 2], 32), entry(2, [192, 0, 2, 1], 32)].concat())),
        off("4.7.3", "a range that ends before it begins", routes(&[route(b, a, 0)])),
        off("4.7.3", "ranges out of order", routes(&[route(c, d, 0), route(a, b, 0)])),
        off("4.7.3", "ranges that overlap", routes(&[route(a, c, 0), route(c, d, 0)])),
        off("4.7.3", "protocols out of order", routes(&[route(a, b, 17), route(a, b, 6)])),
        off("4.7.3", "IP version 0", routes(&[vec![0; 10]])),
        off("4.7.3", "half a range", routes(&[vec![4, 10, 0]])),
        case("4.7.3", "ranges in order", open(), given())
            .body([routes(&[route(a, b, 0), route(c, d, 0), route(a, b, 17)]), good_request()].concat()),
        case("6", "an unknown context", open(), given())
            .body([&capsule(0, &[2, 1, 2, 3])[..], &good_request()].concat()),
    ]
}

async fn conforms(rfc: u32, cases: Vec<Case>) {
    let fixture = Fixture::new().await;
    let mut wrong = Vec::new();
    for case in &cases {
        for version in case.versions {
            let seen = fixture.run(case, *version).await;
            if !seen.as_ref().is_ok_and(|seen| fits(seen, &case.wanted, *version)) {
                let (section, what, wanted) = (case.section, case.what, &case.wanted);
                wrong.push(format!("RFC {rfc}, {section}, {what}, over {version:?}: wanted {wanted:?}, saw {seen:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn http_datagrams_and_capsules() {
    as_root("RFC 9297", || conforms(9297, rfc_9297()));
}

#[test]
fn connect_udp() {
    as_root("RFC 9298", || conforms(9298, rfc_9298()));
}

#[test]
fn connect_ip() {
    as_root("RFC 9484", || conforms(9484, rfc_9484()));
}

/// RFC 9297, 2.1: QUIC datagrams that belong to no stream that there can be.
#[test]
fn quic_datagrams_of_http_3() {
    as_root("RFC 9297, 2.1", || async {
        let fixture = Fixture::new().await;
        let client = fixture.client();
        let settings = [(wire::ENABLE_CONNECT_PROTOCOL, 1), (wire::H3_DATAGRAM, 1)];
        let connect =
            async || fixture.namespace.run(h3::Connection::connect(&client, &settings)).await.unwrap().unwrap();
        let connection = connect().await;
        assert_eq!(connection.setting(wire::H3_DATAGRAM), Some(1));
        // Of a stream that is not open (yet, or any more): dropped.
        for quarter in [0, 5] {
            connection.quic.send_datagram(vec![quarter, 0, 1, 2, 3].into()).unwrap();
        }
        let answer = fixture.namespace.run(connection.get("https://web.test/")).await.unwrap().unwrap();
        assert_eq!(answer.status, 200);
        connection.quic.send_datagram(vec![0, 0, 1, 2, 3].into()).unwrap();
        let answer = fixture.namespace.run(connection.get("https://web.test/")).await.unwrap().unwrap();
        assert_eq!(answer.status, 200);
        // Too short for the number of a stream; a number that no stream has.
        for malformed in [&[][..], &[0x40], &[0xd0, 0, 0, 0, 0, 0, 0, 0, 1]] {
            let connection = connect().await;
            connection.quic.send_datagram(Bytes::from_static(malformed)).unwrap();
            let closed = fixture.namespace.run(connection.closed()).await.unwrap();
            assert_eq!(closed.unwrap(), DATAGRAM_ERROR, "{malformed:?}");
        }
    });
}

/// RFC 9297, 2.1.1: the setting is 0 or 1; and who has not set it is sent none.
#[test]
fn the_setting_of_datagrams() {
    as_root("RFC 9297, 2.1.1", || async {
        let fixture = Fixture::new().await;
        let client = fixture.client();
        let ended = async {
            let connection = h3::Connection::connect(&client, &[(wire::H3_DATAGRAM, 2)]).await?;
            connection.closed().await
        };
        // It may be over before our side has begun.
        let closed = match fixture.namespace.run(ended).await.unwrap() {
            Ok(code) => Some(Abort::Connection(code)),
            Err(error) => abort_of(&error),
        };
        assert_eq!(closed, Some(Abort::Connection(wire::code::SETTINGS_ERROR)));
        let ping = ip::ping([10, 20, 0, 2].into(), [10, 0, 0, 1].into(), 1, b"abcd");
        let mode = ip::IpMode::H3Capsules;
        let mut tunnel =
            fixture.namespace.run(ip::IpTunnel::open(&client, mode, &ip::path("*", "*"))).await.unwrap().unwrap();
        tunnel.ask_for(&[[10, 20, 0, 2].into()]).await.unwrap();
        tunnel.packet(&ping).await.unwrap();
        // It reads nothing but the stream.
        assert_eq!(ip::icmp(&tunnel.next_packet().await.unwrap()), Some((0, 0)));
    });
}
