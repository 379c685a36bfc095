//! Capsules that are none: the flow ends broken, at once, whoever sent them, and costs nothing.

use bytes::Bytes;
use hermes_testkit::{
    flow::{Flow, FlowMode, capsule, datagram, put_varint},
    origin::{Origin, datagram::UdpEcho, scripted},
    overlay::Node,
};

use crate::udp::lab::{ANY, Extras, Lab, echo};

/// What it is, its bytes, and whether the stream has to end behind it to be wrong.
fn mistakes() -> Vec<(&'static str, Bytes, bool)> {
    let header = |kind: u64, length: u64| {
        let mut out = bytes::BytesMut::new();
        put_varint(&mut out, kind);
        put_varint(&mut out, length);
        out.freeze()
    };
    vec![
        ("a datagram without a context", capsule(0, b""), false),
        ("a context that is cut off", capsule(0, b"\xc0\x00"), false),
        ("a payload longer than any of UDP", datagram(&vec![0; 65_528]), false),
        ("a datagram of a tebibyte", header(0, 1 << 40), false),
        ("a datagram of the largest length", header(0, (1 << 62) - 1), false),
        ("half a type", Bytes::from_static(b"\xc0\x00"), true),
        ("no length", Bytes::from_static(b"\x00\x40"), true),
        ("half a datagram", Bytes::from_static(b"\x00\x05\x00a"), true),
        ("half a stranger", capsule(0x17, &[0; 100]).slice(..50), true),
    ]
}

/// How many sessions ended at this node so, with this word in their reason.
fn malformed(node: &Node) -> usize {
    let words = ["capsule", "HTTP Datagram", "UDP payload", "exceeds the maximum"];
    let is_malformed = |record: &serde_json::Value| {
        let reason = record["reason"].as_str().unwrap_or_default();
        words.iter().any(|word| reason.contains(word))
    };
    node.records().iter().filter(|record| is_malformed(record)).count()
}

#[tokio::test]
async fn a_client_that_sends_no_capsules_is_broken_off() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    for mode in FlowMode::TUNNELS {
        for hop in ["HERE", "H1", "H2", "POST-H1"] {
            for (what, bytes, ends) in mistakes() {
                let case = format!("{what} by {mode:?} over {hop}");
                let before = malformed(lab.terminator(hop));
                let mut flow = lab.open(mode, hop).await;
                echo(&mut flow, b"good").await.unwrap();
                let Flow::Capsules(mut capsules) = flow else { unreachable!("a tunnel") };
                capsules.tunnel.writer.send(bytes).await.unwrap();
                if ends {
                    capsules.tunnel.writer.finish().await.unwrap();
                }
                let end = capsules.tunnel.reader.to_end().await;
                assert!(end.is_err(), "{case} was taken for an orderly end: {end:?}");
                hermes_testkit::poll::until(&case, || {
                    let counted = malformed(lab.terminator(hop)) > before;
                    async move { counted }
                })
                .await;
            }
        }
    }
    lab.quiet().await;
    // Nobody reserved what was merely claimed.
    for node in [Some(&lab.near), lab.far.as_ref()].into_iter().flatten() {
        assert!(node.memory().unwrap() < 256 << 20, "{}", node.name());
    }
}

#[tokio::test]
async fn a_proxy_that_sends_no_capsules_is_broken_off() {
    for (what, bytes, ends) in mistakes() {
        let answer = bytes.clone();
        let origin: Origin = scripted::h1(move |mut http1| {
            let answer = answer.clone();
            async move {
                http1.head().await?;
                let switching =
                    "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-udp\r\n\r\n";
                http1.send([switching.as_bytes(), &answer].concat()).await?;
                if ends {
                    return http1.finish().await;
                }
                http1.to_end().await.map(drop)
            }
        })
        .unwrap();
        let lab = Lab::before(origin.address(), Extras::default()).await;
        let mut flow = lab.open(FlowMode::Raw, "H1").await;
        flow.send(b"hello").await.unwrap();
        let record = lab.near.record(|record| record["kind"] == "udp").await;
        assert_eq!(record["error"], "connection_terminated", "{what}: {record}");
        assert_eq!(malformed(&lab.near), 1, "{what}: {record}");
    }
}
