//! Below HTTP: IPv6, both families, and the PROXY protocol.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use hermes_testkit::{
    flow::{Flow, FlowMode},
    listener_client::{ListenerClient, TunnelMode},
    origin::{Origin, scripted},
    proxy_header,
    raw_http1::RawHttp1,
};
use tokio::net::TcpStream;

use crate::http::lab::{next, overlay, seen};

#[tokio::test]
async fn ipv6_at_every_door_and_origin() {
    let origin = scripted::h1_at(IpAddr::V6(Ipv6Addr::LOCALHOST), |mut http1| async move {
        let head = http1.head().await?;
        let text = head.header("forwarded").unwrap_or_default();
        http1.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len())).await
    });
    let origin = origin.unwrap();
    let udp = Origin::udp_echo("[::1]:0".parse().unwrap()).unwrap();
    let overlay = overlay();
    let document = "
listeners:
- {name: in, bind: '[::1]:0', protocol: http}
- {name: raw, bind: '[::1]:0', protocol: tcp, authority: 'WEB:80'}
- {name: flows, bind: '[::1]:0', protocol: udp, authority: 'GAME:9'}
routes:
- {name: named, match: {kind: tcp, authority: '[::1]:*'}, terminate: {tcp: authority, reach: any}}
- {name: tcp, match: {kind: tcp}, terminate: {tcp: '$ORIGIN'}}
- {name: udp, match: {kind: udp}, terminate: {udp: '$UDP'}}
- {name: web, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin.address()).with("UDP", udp.address());
    let node = node.start().await.unwrap();
    let client = ListenerClient::plain(node.address("in"));
    assert_eq!(client.h2().await.unwrap().get("http://WEB/").await.unwrap().text(), "for=\"[::1]\"");

    let request = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    let named = origin.address().to_string();
    for (mode, client, authority) in [
        (TunnelMode::Raw, ListenerClient::plain(node.address("raw")), ""),
        (TunnelMode::ConnectH2, client.clone(), &*named),
    ] {
        let mut tunnel = client.tunnel(mode, authority).await.unwrap();
        tunnel.writer.send(request).await.unwrap();
        assert!(tunnel.reader.at_least(15).await.unwrap().starts_with(b"HTTP/1.1 200 OK"), "{mode:?}");
    }
    for mode in [FlowMode::Raw, FlowMode::UpgradeH1, FlowMode::ConnectH2] {
        let client = ListenerClient::plain(node.address(if mode == FlowMode::Raw { "flows" } else { "in" }));
        // An address with colons in the path of the URI template.
        let mut flow = Flow::open(&client, mode, "::1", udp.address().port()).await.unwrap();
        flow.send(b"hello").await.unwrap();
        assert_eq!(flow.receive().await.unwrap(), b"hello", "{mode:?}");
    }
}

const FAR_CLIENT: &str = "198.51.100.7:4321";

#[tokio::test]
async fn a_proxy_header_sets_the_source_address() {
    let overlay = overlay();
    let document = "
listeners:
- {name: behind, bind: '127.0.0.1:0', protocol: http, proxy-protocol: [127.0.0.0/8]}
- {name: front, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: hello, respond: {body: hello}}
";
    let node = overlay.node("edge").document(document).start().await.unwrap();
    let source: SocketAddr = FAR_CLIENT.parse().unwrap();
    for preface in ["GET / HTTP/1.1\r\nhost: X\r\n\r\n"] {
        let mut http1 = RawHttp1::connect(node.address("behind")).await.unwrap();
        let mut bytes = proxy_header::v2(source, node.address("behind"));
        // Byte by byte: the header may come in pieces.
        for byte in bytes.drain(..) {
            http1.send([byte]).await.unwrap();
        }
        http1.send(preface).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200);
    }
    node.record(|record| record["source"] == FAR_CLIENT).await;
    // LOCAL (a health check of the balancer itself) speaks for nobody.
    let mut http1 = RawHttp1::connect(node.address("behind")).await.unwrap();
    http1.send(b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00GET / HTTP/1.1\r\nhost: X\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    // Where a header is owed, a request without one is closed; where none is, one is garbage.
    for (listener, bytes) in
        [("behind", b"GET / HTTP/1.1\r\nhost: X\r\n\r\n".to_vec()), ("front", proxy_header::v2(source, source))]
    {
        let mut http1 = RawHttp1::connect(node.address(listener)).await.unwrap();
        http1.send(bytes).await.unwrap();
        let answer = http1.to_end().await.unwrap_or_default();
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"), "{listener}: {answer:?}");
    }
}

/// Reads a PROXY header of v2 as an origin would; returns source and destination.
async fn read_proxy_v2(http1: &mut RawHttp1<TcpStream>) -> std::io::Result<(SocketAddr, SocketAddr)> {
    let fixed = http1.exactly(16).await?;
    assert_eq!(&fixed[..12], b"\r\n\r\n\0\r\nQUIT\n");
    assert_eq!(&fixed[12..14], [0x21, 0x11], "version 2, PROXY, TCP over IPv4");
    let rest = http1.exactly(usize::from(u16::from_be_bytes([fixed[14], fixed[15]]))).await?;
    let address = |ip: usize, port: usize| {
        let octets: [u8; 4] = rest[ip..ip + 4].try_into().unwrap();
        SocketAddr::new(octets.into(), u16::from_be_bytes([rest[port], rest[port + 1]]))
    };
    Ok((address(0, 8), address(4, 10)))
}

#[tokio::test]
async fn a_proxy_header_is_sent_if_configured() {
    let (sender, mut receiver) = seen();
    let origin = scripted::h1(move |mut http1| {
        let sender = sender.clone();
        async move {
            let _ = sender.send(read_proxy_v2(&mut http1).await?);
            http1.head().await?;
            http1.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await
        }
    });
    let origin = origin.unwrap();
    let overlay = overlay();
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: behind, bind: '127.0.0.1:0', protocol: http, proxy-protocol: [127.0.0.0/8]}
routes:
- {name: here, match: {kind: tcp, authority: 'HERE:*'}, terminate: {tcp: '$ORIGIN', proxy-protocol: v2}}
- {name: tcp, match: {kind: tcp}, upstream: tcp}
- {name: web, upstream: web}
upstreams:
- {name: web, protocol: h1, proxy-protocol: v2, endpoints: ['$ORIGIN']}
- {name: tcp, protocol: tcp, proxy-protocol: v2, endpoints: ['$ORIGIN']}
";
    let node = overlay.node("edge").document(document).with("ORIGIN", origin.address()).start().await.unwrap();
    let request = "GET / HTTP/1.1\r\nhost: WEB\r\n\r\n";
    // A request, a tunnel that ends here, a tunnel to a bare upstream: each for its client.
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    let local = http1.stream().local_addr().unwrap();
    http1.send(request).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    assert_eq!(next(&mut receiver).await, (local, origin.address()));
    for authority in ["HERE:1", "THERE:1"] {
        let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
        let local = http1.stream().local_addr().unwrap();
        http1.send(format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200);
        http1.send(request).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200, "{authority}");
        assert_eq!(next(&mut receiver).await, (local, origin.address()), "{authority}");
    }
    // What came in by one PROXY header goes out by the next.
    let mut http1 = RawHttp1::connect(node.address("behind")).await.unwrap();
    http1.send(proxy_header::v2(FAR_CLIENT.parse().unwrap(), origin.address())).await.unwrap();
    http1.send(request).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    assert_eq!(next(&mut receiver).await, (FAR_CLIENT.parse().unwrap(), origin.address()));
}
