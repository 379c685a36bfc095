//! The authority and scheme of tunnel requests: those of the next proxy, by the name that TLS verifies, with `https`.

use std::{io, net::SocketAddr};

use hermes_testkit::{
    ca::{Authority, Subject},
    flow::{Flow, FlowMode},
    listener_client::ListenerClient,
    multiplex::{self, Exchange},
    origin::{self, Origin, scripted},
    raw_http1::RawHttp1,
    tls,
};
use http::{Response, StatusCode};
use tokio::net::UdpSocket;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_rustls::TlsAcceptor;

use crate::udp::lab::{ANY, overlay};

/// A TLS proxy that refuses every tunnel, and reports authority, scheme and path of each request.
fn proxy(authority: &Authority, protocol: &str) -> (Origin, UnboundedReceiver<String>) {
    let (sender, receiver) = unbounded_channel();
    let subject = Subject::server("masque.test").with_address([127, 0, 0, 1].into());
    let config =
        tls::server(&authority.issue(&subject).unwrap(), None, &[if protocol == "h1" { "http/1.1" } else { "h2" }]);
    let config = config.unwrap();
    if protocol == "h1" {
        let serve = move |mut http1: RawHttp1<_>| {
            let sender = sender.clone();
            async move {
                let head = http1.head().await?;
                let _ = sender.send(format!("https {} {}", head.header("host").unwrap_or_default(), head.target()));
                http1.send("HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").await
            }
        };
        return (scripted::h1_by_tls(config, |_| {}, serve).unwrap(), receiver);
    }
    let serve = move |exchange: Exchange| {
        let sender = sender.clone();
        async move {
            let uri = exchange.request.uri();
            let (scheme, authority) =
                (uri.scheme_str().unwrap_or("-"), uri.authority().map_or("-", |text| text.as_str()));
            let _ = sender.send(format!("{scheme} {authority} {}", uri.path()));
            let refusal = Response::builder().status(StatusCode::FORBIDDEN).body(()).map_err(io::Error::other)?;
            exchange.answer(refusal, "").await
        }
    };
    let origin = Origin::accepting(origin::listen(ANY).unwrap(), move |stream| {
        let (acceptor, serve) = (TlsAcceptor::from(config.clone()), serve.clone());
        async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                multiplex::serve_connection(stream, serve).await;
            }
        }
    });
    (origin.unwrap(), receiver)
}

async fn next(receiver: &mut UnboundedReceiver<String>) -> String {
    tokio::time::timeout(hermes_testkit::overlay::EFFECT_TIMEOUT, receiver.recv())
        .await
        .expect("the response switched to a protocol that was not requested (RFC 9110, 7.8)")
        .unwrap()
}

/// One datagram for TARGET:7 by SOCKS 5, on the association that `connection` stands for.
async fn by_socks(socks: SocketAddr) -> (RawHttp1<tokio::net::TcpStream>, UdpSocket) {
    let mut http1 = RawHttp1::connect(socks).await.unwrap();
    http1.send([5, 1, 0]).await.unwrap();
    assert_eq!(http1.exactly(2).await.unwrap(), [5, 0]);
    http1.send([5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).await.unwrap();
    let reply = http1.exactly(10).await.unwrap();
    assert_eq!(reply[..2], [5, 0], "{reply:?}");
    let port = u16::from_be_bytes([reply[8], reply[9]]);
    let socket = UdpSocket::bind(ANY).await.unwrap();
    let datagram = [&[0, 0, 0, 3, 6][..], b"TARGET", &[0, 7], b"hello"].concat();
    socket.send_to(&datagram, ("127.0.0.1", port)).await.unwrap();
    (http1, socket)
}

#[tokio::test]
async fn the_next_proxy_is_asked_by_its_name_and_by_https() {
    for protocol in ["h1", "h2"] {
        for server_name in [None, Some("masque.test")] {
            let (overlay, web) = (overlay(), Authority::new("web").unwrap());
            let (proxy, mut receiver) = proxy(&web, protocol);
            let ca = overlay.dir().join("web-ca.pem");
            std::fs::write(&ca, web.pem()).unwrap();
            let document = "
listeners:
- {name: udp, bind: '127.0.0.1:0', protocol: udp, authority: 'TARGET:7'}
- {name: socks, bind: '127.0.0.1:0', protocol: socks5}
- {name: door, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: proxy}
upstreams:
- {name: proxy, protocol: $PROTOCOL, overlay: false, tls: {ca: $CA$NAME}, endpoints: ['$PROXY']}
";
            let name = server_name.map_or_else(String::new, |name| format!(", server-name: {name}"));
            let node = overlay.node("near").document(document).with("PROTOCOL", protocol).with("CA", ca.display());
            let node = node.with("NAME", name).with("PROXY", proxy.address()).start().await.unwrap();
            let authority = format!("{}:{}", server_name.unwrap_or("127.0.0.1"), proxy.address().port());
            let wanted = format!("https {authority} /.well-known/masque/udp/TARGET/7/").to_ascii_lowercase();

            let socket = UdpSocket::bind(ANY).await.unwrap();
            socket.send_to(b"hello", node.address("udp")).await.unwrap();
            assert_eq!(next(&mut receiver).await.to_ascii_lowercase(), wanted, "{protocol}, a udp listener");
            let _association = by_socks(node.address("socks")).await;
            assert_eq!(next(&mut receiver).await.to_ascii_lowercase(), wanted, "{protocol}, a socks5 listener");
            // A tunnel that a client requested over `http` goes on with the scheme of the connection that carries it.
            let refused =
                Flow::open(&ListenerClient::plain(node.address("door")), FlowMode::UpgradeH1, "TARGET", 7).await;
            assert!(refused.is_err());
            assert_eq!(next(&mut receiver).await.to_ascii_lowercase(), wanted, "{protocol}, an http listener");
            let mut http1 = ListenerClient::plain(node.address("door")).h1().await.unwrap();
            let path = "/.well-known/masque/ip/10.0.0.1/*/";
            http1
                .send(format!(
                    "GET {path} HTTP/1.1\r\nhost: proxy.test\r\nconnection: Upgrade\r\nupgrade: connect-ip\r\n\
                     capsule-protocol: ?1\r\n\r\n"
                ))
                .await
                .unwrap();
            assert_eq!(next(&mut receiver).await, format!("https {authority} {path}"), "{protocol}, CONNECT-IP");
        }
    }
}
