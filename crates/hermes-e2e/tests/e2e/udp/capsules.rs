//! The Capsule Protocol (RFC 9297) as the ends of flows read it, and as those between them pass it on.

use std::io;

use bytes::{Bytes, BytesMut};
use h2::ext::Protocol;
use hermes_testkit::{
    flow::{self, Flow, FlowMode, capsule, datagram, put_varint},
    multiplex::{self, Exchange},
    origin::{Origin, datagram::UdpEcho, scripted},
    pattern::Pattern,
    tunnel::Tunnel,
};
use http::Response;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::udp::lab::{ANY, Extras, HOPS, Lab, echo};

/// Types that mean nothing to anybody: GREASE of RFC 9297 (5.4), one of CONNECT-IP, and the largest there is.
const STRANGERS: [u64; 5] = [0x17, 0x17 + 0x29 * 1_000, 0x01, 0x4000_0000, (1 << 62) - 1];

/// Whoever ends a flow skips what it does not know, of any length.
#[tokio::test]
async fn unknown_capsules_are_skipped_at_the_end_of_a_tunnel() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    for mode in FlowMode::TUNNELS {
        for hop in HOPS {
            let mut flow = lab.open(mode, hop).await;
            for (number, kind) in STRANGERS.into_iter().enumerate() {
                // The longest is longer than any datagram may be.
                let length = [0, 1, 100, 70_000, 1 << 20][number];
                let stranger = capsule(kind, &Pattern::new(kind).bytes(length));
                flow.as_capsules().tunnel.writer.send(stranger).await.unwrap();
                echo(&mut flow, &number.to_be_bytes())
                    .await
                    .unwrap_or_else(|error| panic!("{mode:?} over {hop}, behind type {kind:#x}: {error}"));
            }
            assert_eq!(flow.as_capsules().close().await.unwrap(), None, "{mode:?} over {hop}");
        }
    }
    lab.quiet().await;
}

#[tokio::test]
async fn datagrams_of_unknown_contexts_are_dropped_and_counted() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    let mut strangers = 0.0;
    for mode in FlowMode::TUNNELS {
        for hop in ["HERE", "H2"] {
            let mut flow = lab.open(mode, hop).await;
            for context in [1, 2, 63, 64, 16_384, (1 << 62) - 1] {
                let mut value = BytesMut::new();
                put_varint(&mut value, context);
                value.extend_from_slice(b"whatever");
                flow.as_capsules().tunnel.writer.send(capsule(0, &value)).await.unwrap();
                echo(&mut flow, b"mine").await.unwrap();
            }
            strangers += 6.0;
            let dropped = async |node: &hermes_testkit::overlay::Node| {
                node.metric("hermes_datagrams_dropped_total", "reason=\"unknown-context\"").await.unwrap()
            };
            let far = lab.far.as_ref().unwrap();
            assert_eq!(dropped(&lab.near).await + dropped(far).await, strangers, "{mode:?} over {hop}");
        }
    }
}

/// Every capsule cut at every byte, several in one piece, and lengths that are written longer than they need be.
#[tokio::test]
async fn capsules_come_in_any_pieces() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    for mode in FlowMode::TUNNELS {
        for hop in ["HERE", "H1", "H2"] {
            let mut flow = lab.open(mode, hop).await;
            let whole = [datagram(b"one"), capsule(0x17, b"stranger"), datagram(b""), datagram(&[7; 300])].concat();
            for byte in &whole {
                flow.as_capsules().tunnel.writer.send(vec![*byte]).await.unwrap();
            }
            flow.as_capsules().tunnel.writer.send(whole).await.unwrap();
            for round in 0..2 {
                for expected in [&b"one"[..], b"", &[7; 300]] {
                    assert_eq!(flow.receive().await.unwrap(), expected, "{mode:?} over {hop}, round {round}");
                }
            }
            // RFC 9000, 16: nobody has to choose the shortest form.
            let long = b"\xc0\0\0\0\0\0\0\0\x80\0\0\x09\xc0\0\0\0\0\0\0\0!";
            flow.as_capsules().tunnel.writer.send(&long[..]).await.unwrap();
            assert_eq!(flow.receive().await.unwrap(), b"!", "{mode:?} over {hop}");
        }
    }
}

/// What a next proxy saw of a tunnel: all of its bytes.
type Seen = UnboundedReceiver<Vec<u8>>;

/// What it says in return: capsules that nobody knows, a datagram of a context that nobody agreed on, a datagram.
fn reply() -> Vec<u8> {
    [capsule(0x29, b"a stranger"), capsule(0, b"\x05of another context"), datagram(b"mine")].concat()
}

/// A proxy that answers with [`reply`] and ends when its client has.
fn proxy_h1() -> (Origin, Seen) {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            let head = http1.head().await?;
            if head.method() == "POST" {
                http1.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
                http1.send_chunk(&reply()).await?;
                let mut all = Vec::new();
                while let Some(chunk) = http1.chunk().await? {
                    all.extend_from_slice(&chunk);
                }
                http1.send("0\r\n\r\n").await?;
                drop(sender.send(all));
                return http1.to_end().await.map(drop);
            }
            let switching = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-udp\r\ncapsule-protocol: ?1\r\n\r\n";
            http1.send([switching.as_bytes(), &reply()].concat()).await?;
            drop(sender.send(http1.to_end().await?));
            http1.finish().await
        }
    });
    (origin.unwrap(), receiver)
}

fn proxy_h2() -> (Origin, Seen) {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    let origin = scripted::h2(move |Exchange { request, mut respond }| {
        let sender = sender.clone();
        async move {
            let is_flow = request.extensions().get::<Protocol>().is_some_and(|name| name.as_str() == "connect-udp");
            assert_eq!(is_flow, request.method() == http::Method::CONNECT, "{request:?}");
            let mut send = respond.send_response(Response::new(()), false).map_err(io::Error::other)?;
            multiplex::send_all(&mut send, Bytes::from(reply()), false).await?;
            let (all, _) = multiplex::receive_all(request.into_body()).await?;
            drop(sender.send(all));
            send.send_data(Bytes::new(), true).map_err(io::Error::other)
        }
    });
    (origin.unwrap(), receiver)
}

/// A node in the middle of a tunnel looks at no capsule: what goes in comes out, byte for byte, both ways.
#[tokio::test]
async fn intermediaries_forward_every_byte_of_capsules() {
    for (proxy, hops) in [(proxy_h1(), ["H1", "POST-H1"]), (proxy_h2(), ["H2", "POST-H2"])] {
        let (origin, mut receiver) = proxy;
        let lab = Lab::before(origin.address(), Extras::default()).await;
        for mode in FlowMode::TUNNELS {
            for hop in hops {
                let flow = lab.open(mode, hop).await;
                let Flow::Capsules(capsules) = flow else { unreachable!("a tunnel") };
                let Tunnel { mut reader, mut writer } = capsules.tunnel;
                let mut sent = Vec::new();
                for kind in STRANGERS {
                    sent.extend_from_slice(&capsule(kind, &Pattern::new(kind).bytes(5000)));
                    sent.extend_from_slice(&datagram(&Pattern::new(!kind).bytes(1200)));
                    sent.extend_from_slice(&capsule(0, b"\x09of another context"));
                }
                for chunk in sent.chunks(777) {
                    writer.send(chunk.to_vec()).await.unwrap();
                }
                writer.finish().await.unwrap();
                let back = reader.to_end().await.unwrap_or_else(|error| panic!("{mode:?} over {hop}: {error}"));
                assert_eq!(back, reply(), "{mode:?} over {hop}");
                let received = tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, receiver.recv()).await;
                assert!(received.unwrap().unwrap() == sent, "{mode:?} over {hop}: the proxy saw other bytes");
            }
        }
        lab.quiet().await;
    }
}

/// A UDP listener's own end of a tunnel reads what a foreign proxy says by the same rules.
#[tokio::test]
async fn a_listener_extracts_datagrams_from_capsules() {
    for ((origin, _tells), hop) in
        [(proxy_h1(), "H1"), (proxy_h1(), "POST-H1"), (proxy_h2(), "H2"), (proxy_h2(), "POST-H2")]
    {
        let lab = Lab::before(origin.address(), Extras::default()).await;
        let mut flow = lab.open(FlowMode::Raw, hop).await;
        flow.send(b"hello").await.unwrap();
        assert_eq!(flow.receive().await.unwrap(), b"mine", "over {hop}");
        lab.near.metric_reaches("hermes_datagrams_dropped_total", "reason=\"unknown-context\"", 1.0).await;
    }
}

/// What does not fit into a UDP datagram over IPv4, though CONNECT-UDP may carry it.
#[tokio::test]
async fn datagrams_that_udp_cannot_carry_are_dropped_and_counted() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    let mut sent = 0.0;
    for mode in FlowMode::TUNNELS {
        let mut flow = lab.open(mode, "HERE").await;
        for length in [flow::MAX_PAYLOAD + 1, 65_527] {
            flow.send(&vec![0; length]).await.unwrap();
            sent += 1.0;
        }
        echo(&mut flow, &vec![1; flow::MAX_PAYLOAD]).await.unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        let dropped = lab.near.metric("hermes_datagrams_dropped_total", "reason=\"too-large\"").await.unwrap();
        assert_eq!(dropped, sent, "{mode:?}");
    }
}
