//! How flows are asked for and granted: the heads of RFC 9298 in both versions, and of POST, byte by byte.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::ext::Protocol;
use hermes_testkit::{
    flow::{Flow, FlowMode, datagram, path},
    listener_client::{ListenerClient, TunnelMode},
    multiplex::joined,
    origin::{datagram::UdpEcho, scripted},
    overlay::Node,
    proxy_header,
    tunnel::Tunnel,
};
use http::{Method, Request};

use crate::udp::lab::{ANY, Extras, Lab, echo, overlay};

async fn ask(node: &Node, request: &str) -> (hermes_testkit::raw_http1::Head, Tunnel) {
    let mut http1 = ListenerClient::plain(node.address("door")).h1().await.unwrap();
    http1.send(request).await.unwrap();
    let head = http1.head().await.unwrap();
    let (stream, ahead) = http1.into_parts();
    (head, Tunnel::io(stream, ahead))
}

#[tokio::test]
async fn an_upgrade_is_granted_as_rfc_9298_has_it() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    for hop in ["HERE", "H1", "H2", "POST-H1", "POST-H2"] {
        // In another case, with other fields, and a datagram that does not wait for the answer.
        let request = format!(
            "GET /.well-known/masque/udp/{hop}/7/ HTTP/1.1\r\nHost: proxy.test\r\nConnection: keep-alive, UPGRADE\r\n\
             Upgrade: Connect-UDP\r\n\r\n\x00\x06\x00early"
        );
        let (head, tunnel) = ask(&lab.near, &request).await;
        assert_eq!(head.status(), 101, "{hop}: {head:?}");
        for (name, value) in [
            ("connection", Some("upgrade")),
            ("upgrade", Some("connect-udp")),
            ("capsule-protocol", Some("?1")),
            ("content-length", None),
            ("transfer-encoding", None),
        ] {
            assert_eq!(head.header(name).as_deref(), value, "{hop}: {head:?}");
        }
        let mut flow = Flow::capsules(tunnel);
        assert_eq!(flow.receive().await.unwrap(), b"early", "{hop}");
    }
}

#[tokio::test]
async fn an_extended_connect_is_granted_as_rfc_9298_has_it() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    for (hop, method) in [("HERE", Method::CONNECT), ("H1", Method::CONNECT), ("H2", Method::POST)] {
        let mut connection = lab.client(FlowMode::ConnectH2, hop).h2().await.unwrap();
        assert!(connection.takes_extended_connect());
        let mut request = Request::builder().method(method.clone()).uri(format!("http://proxy.test{}", path(hop, 7)));
        if method == Method::CONNECT {
            request = request.extension(Protocol::from_static("connect-udp"));
        }
        let (response, mut send) = connection.open(request.body(()).unwrap(), false).await.unwrap();
        // Before the answer is there.
        send.send_data(datagram(b"early"), false).unwrap();
        let (parts, body) = response.await.unwrap().into_parts();
        assert_eq!(parts.status, 200, "{hop}");
        assert_eq!(joined(&parts.headers, "capsule-protocol").as_deref(), Some("?1"), "{hop}: {parts:?}");
        for absent in ["content-length", "upgrade", "connection", "transfer-encoding"] {
            assert!(!parts.headers.contains_key(absent), "{hop}: {parts:?}");
        }
        let mut flow = Flow::capsules(Tunnel::h2(connection, body, send));
        assert_eq!(flow.receive().await.unwrap(), b"early", "{hop}");
    }
}

/// Many flows on one connection are as many flows.
#[tokio::test]
async fn flows_share_a_connection() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    let mut connection = lab.client(FlowMode::ConnectH2, "H2").h2().await.unwrap();
    let mut streams = Vec::new();
    for number in 0..50u8 {
        let request = Request::builder().method(Method::CONNECT).uri(format!("http://proxy.test{}", path("H2", 7)));
        let request = request.extension(Protocol::from_static("connect-udp")).body(()).unwrap();
        let (recv, send) = hermes_testkit::listener_client::open_h2(&mut connection, request).await.unwrap();
        streams.push((number, recv, send));
    }
    for (number, _, send) in &mut streams {
        send.send_data(datagram(&[*number]), false).unwrap();
    }
    for (number, recv, _) in &mut streams {
        let got = hermes_testkit::multiplex::receive(recv).await.unwrap().unwrap();
        assert_eq!(got, datagram(&[*number]));
    }
    assert_eq!(origin.sources(), 50);
    // One that breaks leaves the others alone.
    streams[0].2.send_reset(h2::Reason::CANCEL);
    lab.far.as_ref().unwrap().record(|record| record["kind"] == "udp").await;
    for (number, recv, send) in &mut streams[1..] {
        send.send_data(datagram(&[*number]), false).unwrap();
        assert_eq!(hermes_testkit::multiplex::receive(recv).await.unwrap().unwrap(), datagram(&[*number]));
    }
}

#[tokio::test]
async fn malformed_connect_udp_requests_are_answered_400() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let lab = Lab::to(origin.address()).await;
    let long = "a".repeat(300);
    for path in [
        "/",
        "/.well-known/masque/udp/HERE/7",
        "/.well-known/masque/udp/HERE/7/more",
        "/.well-known/masque/udp/HERE/",
        "/.well-known/masque/udp//7/",
        "/.well-known/masque/udp/HERE/0/",
        "/.well-known/masque/udp/HERE/65536/",
        "/.well-known/masque/udp/HERE/+7/",
        "/.well-known/masque/udp/HERE/x/",
        "/.well-known/masque/udp/HE%2FRE/7/",
        "/.well-known/masque/udp/HE%0d%0aRE/7/",
        "/.well-known/masque/udp/HERE%/7/",
        "/.well-known/masque/udp/%2e%2e/7/",
        "/.well-known/masque/udp/%5B%3A%3A1%5D/7/",
        "/.well-known/masque/udp/fe80%3A%3A1%25eth0/7/",
        &format!("/.well-known/masque/udp/{long}/7/"),
    ] {
        let upgrade = "connection: upgrade\r\nupgrade: connect-udp\r\n";
        let (head, _) = ask(&lab.near, &format!("GET {path} HTTP/1.1\r\nhost: proxy.test\r\n{upgrade}\r\n")).await;
        assert_eq!(head.status(), 400, "{path}: {head:?}");
        let request = Request::builder().method(Method::CONNECT).uri(format!("http://proxy.test{path}"));
        let request = request.extension(Protocol::from_static("connect-udp")).body(()).unwrap();
        let answer = lab.client(FlowMode::ConnectH2, "HERE").h2().await.unwrap().ask(request, b"").await.unwrap();
        assert_eq!(answer.status, 400, "{path}: {answer:?}");
    }
    // RFC 9298, 3.2: by Upgrade it is a GET, and has no body.
    for (method, body) in
        [("POST", ""), ("HEAD", ""), ("GET", "content-length: 3\r\n"), ("GET", "transfer-encoding: chunked\r\n")]
    {
        let request = format!(
            "{method} /.well-known/masque/udp/HERE/7/ HTTP/1.1\r\nhost: proxy.test\r\nconnection: upgrade\r\n\
             upgrade: connect-udp\r\n{body}\r\n"
        );
        let (head, _) = ask(&lab.near, &request).await;
        assert_eq!(head.status(), 400, "{method} {body}: {head:?}");
    }
    assert_eq!(origin.sources(), 0);
}

/// A proxy that answers an upgrade with something else has not opened a tunnel.
#[tokio::test]
async fn an_answer_that_switches_to_something_else_is_a_failure() {
    for answer in [
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n\r\n",
    ] {
        let origin = scripted::h1(move |mut http1| async move {
            http1.head().await?;
            http1.send(answer).await?;
            http1.to_end().await.map(drop)
        });
        let origin = origin.unwrap();
        let lab = Lab::before(origin.address(), Extras::default()).await;
        for mode in FlowMode::TUNNELS {
            let refused = lab.try_open(mode, "H1").await.err().expect("it is no tunnel").to_string();
            assert!(refused.contains("502") && refused.contains("connection_terminated"), "{mode:?}: {refused}");
        }
        // Nor has one that switches for a CONNECT.
        let overlay = overlay();
        let document = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: next}
upstreams:
- {name: next, protocol: h1, overlay: false, endpoints: ['$NEXT']}
";
        let node = overlay.node("edge").document(document).with("NEXT", origin.address()).start().await.unwrap();
        let client = ListenerClient::plain(node.address("door"));
        let refused = client.tunnel(TunnelMode::ConnectH1, "DB:5432").await.err().expect("it is no tunnel").to_string();
        assert!(refused.contains("502"), "{refused}");
    }
}

/// RFC 9298, 3.3: an upgrade that is answered with anything but 101 has failed, also where that sounds like success.
#[tokio::test]
async fn a_proxy_that_does_not_switch_has_not_opened_a_flow() {
    let origin = scripted::h1(|mut http1| async move {
        http1.head().await?;
        http1.send("HTTP/1.1 200 OK\r\ncapsule-protocol: ?1\r\n\r\n").await?;
        http1.to_end().await.map(drop)
    });
    let origin = origin.unwrap();
    let lab = Lab::before(origin.address(), Extras::default()).await;
    for mode in FlowMode::TUNNELS {
        let refused = lab.try_open(mode, "H1").await.err().expect("it is no tunnel").to_string();
        assert!(refused.contains("502") && refused.contains("http_upgrade_failed"), "{mode:?}: {refused}");
    }
    let mut flow = lab.open(FlowMode::Raw, "H1").await;
    flow.send(b"hello").await.unwrap();
    let record = lab.near.record(|record| record["listener"] == "raw-H1").await;
    assert_eq!(record["error"], "http_upgrade_failed", "{record}");
}

#[tokio::test]
async fn a_post_is_a_flow_only_where_it_is_believed_and_named() {
    let origin = UdpEcho::start(ANY, "").unwrap();
    let overlay = overlay();
    let document = "
listeners:
- {name: trusted, bind: '127.0.0.1:0', protocol: http, accept-post: true, trust: [127.0.0.0/8]}
- {name: strangers, bind: '127.0.0.1:0', protocol: http, accept-post: true}
- {name: without, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: flow, match: {kind: udp, authority: 'GAME:7'}, terminate: {udp: '$ORIGIN'}}
- {name: any, match: {authority: 'ANY:7'}, respond: {status: 418}}
- {name: web, match: {kind: http}, respond: {body: 'just a POST'}}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let client = |listener: &str| ListenerClient::plain(node.address(listener));
    for mode in [FlowMode::PostH1, FlowMode::PostH2] {
        let mut flow = Flow::open(&client("trusted"), mode, "GAME", 7).await.unwrap();
        echo(&mut flow, b"hello").await.unwrap();
        // Another name, or a route that does not say `kind: udp`: a POST is what it looks like.
        for (listener, name) in [("strangers", "GAME"), ("without", "GAME"), ("trusted", "OTHER"), ("trusted", "ANY")] {
            let answer = posted(&client(listener), &path(name, 7)).await;
            assert_eq!(answer, "just a POST", "{mode:?} at {listener} for {name}");
        }
        for other in ["/.well-known/masque/udp/GAME/0/", "/.well-known/masque/udp/GAME/7/more"] {
            assert_eq!(posted(&client("trusted"), other).await, "just a POST");
        }
    }
    // One that says what it brings is no tunnel either.
    let mut connection = client("trusted").h2().await.unwrap();
    let request = Request::post(format!("http://proxy.test{}", path("GAME", 7))).header("content-type", "text/plain");
    assert_eq!(connection.ask(request.body(()).unwrap(), b"x").await.unwrap().text(), "just a POST");
}

/// The answer to a POST with a body of unknown length.
async fn posted(client: &ListenerClient, path: &str) -> String {
    let mut connection = client.h2().await.unwrap();
    let request = Request::post(format!("http://proxy.test{path}")).body(()).unwrap();
    let (response, mut send) = connection.open(request, false).await.unwrap();
    send.send_data(Bytes::from_static(b"x"), true).unwrap();
    hermes_testkit::multiplex::answer(response).await.unwrap().text()
}

/// Flows have sources too: those that a PROXY header told, and those that one is told of.
#[tokio::test]
async fn proxy_headers_speak_for_flows() {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let next = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            let _ = sender.send(http1.exactly(28).await?);
            http1.head().await?;
            let switching = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: connect-udp\r\n\r\n";
            http1.send(switching).await?;
            while let Some(capsules) = http1.some().await? {
                http1.send(capsules).await?;
            }
            http1.finish().await
        }
    });
    let next = next.unwrap();
    let overlay = overlay();
    let document = "
listeners:
- {name: behind, bind: '127.0.0.1:0', protocol: http, proxy-protocol: [127.0.0.0/8]}
- {name: raw, bind: '127.0.0.1:0', protocol: udp, authority: 'GAME:7'}
routes:
- {name: on, match: {kind: udp}, upstream: next}
upstreams:
- {name: next, protocol: h1, overlay: true, proxy-protocol: v2, endpoints: ['$NEXT']}
";
    let node = overlay.node("edge").document(document).with("NEXT", next.address()).start().await.unwrap();
    let far_client: SocketAddr = "198.51.100.7:4321".parse().unwrap();
    let mut http1 = ListenerClient::plain(node.address("behind")).h1().await.unwrap();
    http1.send(proxy_header::v2(far_client, node.address("behind"))).await.unwrap();
    http1
        .send("GET /.well-known/masque/udp/GAME/7/ HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: connect-udp\r\n\r\n")
        .await
        .unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 101);
    assert_eq!(receiver.recv().await.unwrap(), proxy_header::v2(far_client, next.address()));
    let (stream, ahead) = http1.into_parts();
    let mut flow = Flow::capsules(Tunnel::io(stream, ahead));
    echo(&mut flow, b"hello").await.unwrap();
    drop(flow);
    node.record(|record| record["source"] == far_client.to_string()).await;

    let mut flow = Flow::open(&ListenerClient::plain(node.address("raw")), FlowMode::Raw, "", 0).await.unwrap();
    echo(&mut flow, b"hello").await.unwrap();
    let Flow::Socket(socket) = &flow else { unreachable!("a raw flow") };
    let source = SocketAddr::new([127, 0, 0, 1].into(), socket.local_addr().unwrap().port());
    assert_eq!(receiver.recv().await.unwrap(), proxy_header::v2(source, next.address()));
}
