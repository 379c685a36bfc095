//! Frames and streams where they must not be: each ends the connection with the code that RFC 9114, RFC 9204 or
//! RFC 9297 has for it, and no other connection.

use bytes::Bytes;
use hermes_testkit::{
    ca::Subject,
    h3::{
        Connection,
        relay::{Direction, Relay},
        wire::{self, H3_DATAGRAM, code, frame, get, headers, integer, kind, section, settings},
    },
    listener_client::ListenerClient,
    poll::until,
};
use http::Request;

use crate::h3::lab::NodeFixture;

/// What a client says on its control stream, and how that ends.
struct Case {
    what: &'static str,
    says: Vec<u8>,
    code: u64,
}

fn case(what: &'static str, parts: &[&[u8]], code: u64) -> Case {
    Case { what, says: parts.concat(), code }
}

/// The type of a control stream, and empty SETTINGS behind it.
const CONTROL: &[u8] = &[0x00];
const BEGUN: &[u8] = &[0x00, 0x04, 0x00];
const GREASE: u64 = 0x21;

fn control_streams() -> Vec<Case> {
    let sets = |pairs: &[(u64, u64)]| settings(pairs);
    vec![
        case("HEADERS before SETTINGS", &[CONTROL, &headers(&[("a", "b")])], code::MISSING_SETTINGS),
        case("GOAWAY before SETTINGS", &[CONTROL, &frame(kind::GOAWAY, &[0])], code::MISSING_SETTINGS),
        case("an unknown frame before SETTINGS", &[CONTROL, &frame(GREASE, b"?"), &sets(&[])], code::MISSING_SETTINGS),
        case("SETTINGS twice", &[BEGUN, &sets(&[])], code::FRAME_UNEXPECTED),
        case("DATA", &[BEGUN, &frame(kind::DATA, b"?")], code::FRAME_UNEXPECTED),
        case("HEADERS", &[BEGUN, &headers(&[("a", "b")])], code::FRAME_UNEXPECTED),
        case("PUSH_PROMISE", &[BEGUN, &frame(kind::PUSH_PROMISE, &[0, 0, 0])], code::FRAME_UNEXPECTED),
        case("PING of HTTP/2", &[BEGUN, &frame(0x06, &[0; 8])], code::FRAME_UNEXPECTED),
        case("CANCEL_PUSH of no push", &[BEGUN, &frame(kind::CANCEL_PUSH, &[0])], code::ID_ERROR),
        case("an empty CANCEL_PUSH", &[BEGUN, &frame(kind::CANCEL_PUSH, &[])], code::FRAME_ERROR),
        case("a long CANCEL_PUSH", &[BEGUN, &frame(kind::CANCEL_PUSH, &[0, 0])], code::FRAME_ERROR),
        case(
            "MAX_PUSH_ID that shrinks",
            &[BEGUN, &frame(kind::MAX_PUSH_ID, &[9]), &frame(kind::MAX_PUSH_ID, &[8])],
            code::ID_ERROR,
        ),
        case("a long MAX_PUSH_ID", &[BEGUN, &frame(kind::MAX_PUSH_ID, &[1, 1])], code::FRAME_ERROR),
        case("GOAWAY that grows", &[BEGUN, &frame(kind::GOAWAY, &[4]), &frame(kind::GOAWAY, &[8])], code::ID_ERROR),
        case("an empty GOAWAY", &[BEGUN, &frame(kind::GOAWAY, &[])], code::FRAME_ERROR),
        case("a setting twice", &[CONTROL, &sets(&[(6, 1), (6, 1)])], code::SETTINGS_ERROR),
        case("a setting of HTTP/2", &[CONTROL, &sets(&[(4, 1)])], code::SETTINGS_ERROR),
        case("a switch of 2", &[CONTROL, &sets(&[(H3_DATAGRAM, 2)])], code::SETTINGS_ERROR),
        case("half a setting", &[CONTROL, &frame(kind::SETTINGS, &[6])], code::FRAME_ERROR),
        case("SETTINGS without end", &[CONTROL, &[4], &integer(1 << 40)], code::EXCESSIVE_LOAD),
    ]
}

#[tokio::test]
async fn control_streams_against_the_rules_end_the_connection() {
    let fixture = NodeFixture::new().await;
    for Case { what, says, code } in control_streams() {
        let connection = Connection::bare(&fixture.client()).await.unwrap();
        let mut control = connection.open_uni().await.unwrap();
        control.write_all(&says).await.unwrap();
        let closed = connection.closed().await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(closed, code, "{what}: {closed:#x}, not {code:#x}");
    }
    fixture.serves_on(&fixture.connect().await, "afterwards").await;
}

/// RFC 9297, section 2.1.1.
#[tokio::test]
async fn h3_datagram_support_requires_quic_datagrams() {
    let fixture = NodeFixture::new().await;
    for (says, is_fine) in [(1, false), (0, true)] {
        let connection = Connection::without_datagrams(&fixture.client()).await.unwrap();
        let mut control = connection.open_uni().await.unwrap();
        control.write_all(&[CONTROL, &settings(&[(H3_DATAGRAM, says)])].concat()).await.unwrap();
        if is_fine {
            fixture.serves_on(&connection, "without datagrams").await;
        } else {
            assert_eq!(connection.closed().await.unwrap(), code::SETTINGS_ERROR);
        }
    }
}

#[tokio::test]
async fn a_control_stream_may_come_in_pieces_and_with_frames_of_the_future() {
    let fixture = NodeFixture::new().await;
    let connection = Connection::bare(&fixture.client()).await.unwrap();
    let mut control = connection.open_uni().await.unwrap();
    let says = [BEGUN, &frame(GREASE, b"noise"), &frame(kind::MAX_PUSH_ID, &[7]), &frame(kind::GOAWAY, &[0])].concat();
    for byte in &says {
        control.write_all(std::slice::from_ref(byte)).await.unwrap();
        tokio::task::yield_now().await;
    }
    // A stream of a type that nobody knows is stopped, and nothing else.
    let mut unknown = connection.open_uni().await.unwrap();
    unknown.write_all(&[&integer(GREASE)[..], b"noise"].concat()).await.unwrap();
    assert_eq!(unknown.stopped().await.unwrap().map(quinn_code), Some(code::STREAM_CREATION_ERROR));
    fixture.serves_on(&connection, "with noise beside").await;
}

fn quinn_code(code: impl Into<u64>) -> u64 {
    code.into()
}

/// What is said on a stream of this type beside a control stream that is right; `ends` with its end behind.
async fn other_stream(fixture: &NodeFixture, kind: u64, says: &[u8], ends: bool) -> u64 {
    let connection = fixture.connect().await;
    let mut stream = connection.open_uni().await.unwrap();
    stream.write_all(&[&integer(kind)[..], says].concat()).await.unwrap();
    if ends {
        stream.finish().unwrap();
    }
    connection.closed().await.unwrap_or_else(|error| panic!("type {kind} with {says:?}: {error}"))
}

const PUSH: u64 = 1;
const QPACK_ENCODER: u64 = 2;
const QPACK_DECODER: u64 = 3;
const ENCODER_STREAM_ERROR: u64 = 0x201;
const DECODER_STREAM_ERROR: u64 = 0x202;

#[tokio::test]
async fn streams_that_may_not_be_opened_end_the_connection() {
    let fixture = NodeFixture::new().await;
    assert_eq!(other_stream(&fixture, 0, &settings(&[]), false).await, code::STREAM_CREATION_ERROR, "a second control");
    assert_eq!(other_stream(&fixture, PUSH, &[0], false).await, code::STREAM_CREATION_ERROR, "a client's push");
    let connection = fixture.connect().await;
    let mut encoders = [connection.open_uni().await.unwrap(), connection.open_uni().await.unwrap()];
    for encoder in &mut encoders {
        encoder.write_all(&integer(QPACK_ENCODER)).await.unwrap();
    }
    assert_eq!(connection.closed().await.unwrap(), code::STREAM_CREATION_ERROR, "a second encoder");
}

#[tokio::test]
async fn critical_streams_that_end_end_the_connection() {
    let fixture = NodeFixture::new().await;
    for kind in [QPACK_ENCODER, QPACK_DECODER] {
        assert_eq!(other_stream(&fixture, kind, &[], true).await, code::CLOSED_CRITICAL_STREAM, "type {kind}");
    }
    let mut connection = fixture.connect().await;
    connection.control.as_mut().unwrap().finish().unwrap();
    assert_eq!(connection.closed().await.unwrap(), code::CLOSED_CRITICAL_STREAM, "the control stream, ended");
    let mut connection = fixture.connect().await;
    // What came before the reset has to be here first: a stream of no type yet is nobody's.
    fixture.serves_on(&connection, "before").await;
    connection.control.as_mut().unwrap().reset(0_u32.into()).unwrap();
    assert_eq!(connection.closed().await.unwrap(), code::CLOSED_CRITICAL_STREAM, "the control stream, reset");
}

#[tokio::test]
async fn qpack_that_uses_a_table_nobody_allowed_ends_the_connection() {
    let fixture = NodeFixture::new().await;
    // A capacity; an insertion.
    assert_eq!(other_stream(&fixture, QPACK_ENCODER, &[0x3f, 0x01], false).await, ENCODER_STREAM_ERROR);
    assert_eq!(other_stream(&fixture, QPACK_ENCODER, &[0xc0, 1, b'a'], false).await, ENCODER_STREAM_ERROR);
    // An acknowledgement of a section that referred to nothing; an increment.
    assert_eq!(other_stream(&fixture, QPACK_DECODER, &[0x80], false).await, DECODER_STREAM_ERROR);
    assert_eq!(other_stream(&fixture, QPACK_DECODER, &[0x01], false).await, DECODER_STREAM_ERROR);
    // Sections that cannot be read: of the table, beyond the static one, cut off.
    for block in [&[0x02, 0x00, 0x80][..], &[0x00, 0x00, 0xff, 0x7f], &[0x00, 0x00, 0x27], &[0x00]] {
        assert_eq!(
            on_request(&fixture, &frame(kind::HEADERS, block), false).await,
            code::DECOMPRESSION_FAILED,
            "{block:?}"
        );
    }
}

#[tokio::test]
async fn qpack_instructions_that_need_no_table_are_accepted() {
    let fixture = NodeFixture::new().await;
    let connection = fixture.connect().await;
    let mut kept = Vec::new();
    for (kind, says) in [(QPACK_ENCODER, &[0x20][..]), (QPACK_DECODER, &[0x44, 0x7f, 0x80, 0x01])] {
        let mut stream = connection.open_uni().await.unwrap();
        stream.write_all(&[&integer(kind)[..], says].concat()).await.unwrap();
        kept.push(stream);
    }
    fixture.serves_on(&connection, "with a capacity of nothing and cancellations").await;
}

/// The code with which a connection ends where this is said on a request's stream.
async fn on_request(fixture: &NodeFixture, says: &[u8], ends: bool) -> u64 {
    let connection = fixture.connect().await;
    let (mut send, _recv) = connection.open().await.unwrap();
    send.bytes(Bytes::copy_from_slice(says)).await.unwrap();
    if ends {
        send.finish().unwrap();
    }
    connection.closed().await.unwrap_or_else(|error| panic!("{says:?}: {error}"))
}

#[tokio::test]
async fn frames_in_the_wrong_place_of_a_request_end_the_connection() {
    let fixture = NodeFixture::new().await;
    let post = headers(&[(":method", "POST"), (":scheme", "https"), (":authority", "WEB"), (":path", "/")]);
    let data = frame(kind::DATA, b"hello");
    let trailers = headers(&[("a", "b")]);
    assert_eq!(on_request(&fixture, &data, false).await, code::FRAME_UNEXPECTED, "DATA first");
    for kind in [kind::SETTINGS, kind::CANCEL_PUSH, kind::GOAWAY, kind::MAX_PUSH_ID, kind::PUSH_PROMISE, 0x02, 0x09] {
        let stray = frame(kind, &[0]);
        assert_eq!(on_request(&fixture, &stray, false).await, code::FRAME_UNEXPECTED, "type {kind:#x} first");
        let later = [&post[..], &data, &stray].concat();
        assert_eq!(on_request(&fixture, &later, false).await, code::FRAME_UNEXPECTED, "type {kind:#x} in a body");
    }
    for behind in [&data, &trailers] {
        let says = [&post[..], &trailers, behind].concat();
        assert_eq!(on_request(&fixture, &says, true).await, code::FRAME_UNEXPECTED, "behind trailers");
    }
    let cut = &frame(kind::DATA, b"hello")[..4];
    assert_eq!(on_request(&fixture, &[&post[..], cut].concat(), true).await, code::FRAME_ERROR, "cut off in DATA");
    assert_eq!(on_request(&fixture, &post[..8], true).await, code::FRAME_ERROR, "cut off in HEADERS");
    fixture.serves_on(&fixture.connect().await, "afterwards").await;
}

#[tokio::test]
async fn a_tunnel_has_no_frames_but_data() {
    let fixture = NodeFixture::new().await;
    let connect = headers(&[(":method", "CONNECT"), (":authority", "ECHO:7")]);
    for kind in [kind::HEADERS, kind::SETTINGS, kind::PUSH_PROMISE] {
        let connection = fixture.connect().await;
        let (mut send, mut recv) = connection.open().await.unwrap();
        send.bytes(connect.clone()).await.unwrap();
        assert_eq!(recv.head().await.unwrap().0[0].1, "200");
        send.bytes(frame(kind, &section(&[("a", "b")]))).await.unwrap();
        assert_eq!(connection.closed().await.unwrap(), code::FRAME_UNEXPECTED, "type {kind:#x}");
    }
    // One of the future is passed over.
    let connection = fixture.connect().await;
    let (mut send, mut recv) = connection.open().await.unwrap();
    send.bytes(connect).await.unwrap();
    send.bytes(frame(GREASE, &[0; 3000])).await.unwrap();
    send.data(Bytes::from_static(b"hello")).await.unwrap();
    send.finish().unwrap();
    recv.head().await.unwrap();
    assert_eq!(recv.chunk().await.unwrap().unwrap(), "hello");
}

#[tokio::test]
async fn a_stream_without_a_request_is_incomplete_and_others_continue() {
    let fixture = NodeFixture::new().await;
    let connection = fixture.connect().await;
    let (mut send, mut recv) = connection.open().await.unwrap();
    send.finish().unwrap();
    let error = recv.head().await.unwrap_err();
    let wanted = hermes_testkit::h3::Abort::Stream(code::REQUEST_INCOMPLETE);
    assert_eq!(hermes_testkit::h3::abort_of(&error), Some(wanted), "{error}");
    // Only frames of the future, then a request: nothing is wrong.
    let (mut send, mut recv) = connection.open().await.unwrap();
    send.bytes(frame(GREASE, b"noise")).await.unwrap();
    send.bytes(headers(&get("HERE", "/"))).await.unwrap();
    send.finish().unwrap();
    assert_eq!(recv.answer().await.unwrap().status, 200);
    fixture.serves_on(&connection, "afterwards").await;
}

/// Who waits for them before a tunnel is asked for waits no round trip longer than for the handshake.
#[tokio::test]
async fn settings_come_with_the_handshake_s_answer() {
    let fixture = NodeFixture::of("", "required", "").await;
    let relay = Relay::before(fixture.node.address("door")).await.unwrap();
    let identity = fixture.overlay.authority().issue(&Subject::node("near")).unwrap();
    let client = ListenerClient::tls(relay.address(), fixture.overlay.authority().pem(), Some(&identity));
    // The node does not hear of the end of the handshake.
    relay.direction(Direction::OneUp);
    let mut connection = Connection::bare(&client).await.unwrap();
    connection.hear_settings().await.unwrap();
    assert_eq!(connection.setting(wire::ENABLE_CONNECT_PROTOCOL), Some(1));
    relay.direction(Direction::Both);
    fixture.serves_on(&connection, "and then").await;
}

/// QUIC follows the first packet from an address before it has proven to be the client's.
#[tokio::test]
async fn nobody_is_believed_for_an_address_that_it_moved_to() {
    let fixture = NodeFixture::of("", "none", ", trust: [127.0.0.2/32]").await;
    let connection = fixture.connect().await;
    let asks = async || {
        let ask = Request::get("https://WHO/who").header("hermes-user", "alice").body(()).unwrap();
        connection.ask(&ask, b"").await.unwrap().status
    };
    assert_eq!(asks().await, 404, "nobody from 127.0.0.1");
    connection.move_to(std::net::UdpSocket::bind("127.0.0.2:0").unwrap()).unwrap();
    until("the node has seen the move", async || {
        assert_eq!(asks().await, 404, "nobody from 127.0.0.2 that began elsewhere");
        fixture.node.metric("hermes_quic_migrations_total", "").await.unwrap() > 0.0
    })
    .await;
    assert_eq!(asks().await, 404);
}

/// One head that never ends costs its stream, and no more than the time for it.
#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let fixture = NodeFixture::with("header-timeout: 300ms").await;
    let connection = fixture.connect().await;
    let (mut send, mut recv) = connection.open().await.unwrap();
    let whole = headers(&get("HERE", "/"));
    send.bytes(whole.slice(..whole.len() - 1)).await.unwrap();
    let error = recv.answer().await.unwrap_err();
    assert!(error.to_string().contains("reset") || error.to_string().contains("270"), "{error}");
    fixture.serves_on(&connection, "behind it").await;
    assert!(fixture.node.metric("hermes_limit_hits_total", "slow-client").await.unwrap() >= 1.0);
}
