//! Loops end with 508, which names both nodes, for requests, tunnels and flows alike.

use hermes_testkit::{
    flow::{Flow, FlowMode},
    listener_client::{ListenerClient, TunnelMode},
    overlay::{Node, Overlay},
};
use http::{Request, StatusCode};

use crate::http::lab::overlay;

const DOCUMENT: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
- {name: raw, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:5432'}
routes:
- {name: round, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, overlay: true, endpoints: ['$NEXT']}
";

/// Two nodes that send everything to each other.
async fn circle(overlay: &Overlay, protocol: &str) -> (Node, Node) {
    let first = overlay.node("ping").document(DOCUMENT).with("PROTOCOL", protocol).with("NEXT", "127.0.0.1:1");
    let mut first = first.start().await.unwrap();
    let second = overlay.node("pong").document(DOCUMENT).with("PROTOCOL", protocol).with("NEXT", first.address("door"));
    let second = second.start().await.unwrap();
    let values = [("PROTOCOL", protocol.to_owned()), ("NEXT", second.address("door").to_string())];
    first.reload(DOCUMENT, &values).await.unwrap();
    (first, second)
}

#[tokio::test]
async fn a_request_that_comes_round_is_ended() {
    for protocol in ["h1", "h2"] {
        let overlay = overlay();
        let (first, second) = circle(&overlay, protocol).await;
        let mut connection = ListenerClient::plain(first.address("door")).h2().await.unwrap();
        let answer = connection.get("http://NOWHERE/").await.unwrap();
        assert_eq!(answer.status, StatusCode::LOOP_DETECTED, "{protocol}: {answer:?}");
        let text = answer.text();
        assert!(text.contains("ping") && text.contains("pong"), "{protocol}: {text}");
        assert!(answer.header("proxy-status").unwrap().contains("proxy_loop_detected"), "{protocol}: {answer:?}");
        first.record(|record| record["error"] == "proxy_loop_detected").await;
        second.quiet().await;
    }
}

#[tokio::test]
async fn tunnels_and_flows_that_come_round_are_ended() {
    for protocol in ["h1", "h2"] {
        let overlay = overlay();
        let (first, _second) = circle(&overlay, protocol).await;
        let client = ListenerClient::plain(first.address("door"));
        for mode in [TunnelMode::ConnectH1, TunnelMode::ConnectH2] {
            let output = client.tunnel(mode, "DB:5432").await.err().expect("a circle became a tunnel").to_string();
            assert!(
                output.contains("508") && output.contains("ping") && output.contains("pong"),
                "{mode:?} {protocol}: {output}"
            );
        }
        for mode in [FlowMode::UpgradeH1, FlowMode::ConnectH2] {
            let output = Flow::open(&client, mode, "GAME", 9).await.err().expect("a circle became a flow").to_string();
            assert!(
                output.contains("508") && output.contains("ping") && output.contains("pong"),
                "{mode:?} {protocol}: {output}"
            );
        }
        let raw = ListenerClient::plain(first.address("raw"));
        let end = async { raw.tunnel(TunnelMode::Raw, "").await?.reader.to_end().await };
        assert!(end.await.is_err(), "{protocol}");
    }
}

#[tokio::test]
async fn more_than_sixteen_hops_are_taken_for_a_circle() {
    let overlay = overlay();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: hello, respond: {body: hello}}
";
    let node = overlay.node("edge").document(document).start().await.unwrap();
    let mut connection = ListenerClient::plain(node.address("in")).h2().await.unwrap();
    for (hops, status) in [(16, 200), (17, 508)] {
        let via: Vec<String> = (0..hops).map(|hop| format!("1.1 hop-{hop}")).collect();
        let request = Request::get("http://ANY/").header("via", via.join(", ")).body(()).unwrap();
        let answer = connection.ask(request, b"").await.unwrap();
        assert_eq!(answer.status, status, "{hops} hops: {answer:?}");
        if status == 508 {
            assert!(answer.text().contains("edge") && answer.text().contains("hop-16"), "{}", answer.text());
        }
    }
}
