//! Fields that describe the client and its request: `X-Forwarded-*`, `X-Real-IP`, and the document's template.

use std::io;

use hermes_testkit::{
    ca::Subject,
    listener_client::{ListenerClient, NODE_NAME},
    origin::{
        Origin,
        scripted::{self, Heads},
    },
    overlay::{Node, Overlay},
    raw_http1::{Head, RawHttp1},
};
use http::Request;
use tokio::net::{TcpSocket, TcpStream};

use crate::http::lab::{next, overlay};

fn origin() -> (Origin, Heads) {
    scripted::recording(|_| "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_owned()).unwrap()
}

const FAR: &str = "
listeners:
- {name: nodes, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.1, 127.0.0.3]}
- {name: mtls, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: required}}
- {name: tls, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
routes:
- {name: all, rewrite: {set-headers: {x-client: '{client-address}'}}, upstream: origin}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ['$ORIGIN']}
";

const NEAR: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: h2, overlay: true, endpoints: ['$FAR']}
";

async fn far(overlay: &Overlay, origin: &Origin) -> Node {
    let draft = overlay.node("far").identity(&Subject::node("far").with_dns(NODE_NAME)).unwrap();
    draft.document(FAR).with("ORIGIN", origin.address()).start().await.unwrap()
}

async fn from(address: &str, to: std::net::SocketAddr) -> io::Result<RawHttp1<TcpStream>> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(format!("{address}:0").parse().map_err(io::Error::other)?)?;
    Ok(RawHttp1::new(socket.connect(to).await?))
}

const CLAIMS: [(&str, &str); 6] = [
    ("x-forwarded-for", "192.0.2.7"),
    ("x-forwarded-host", "evil.example"),
    ("x-forwarded-proto", "gopher"),
    ("x-forwarded-prefix", "/evil"),
    ("x-real-ip", "192.0.2.7"),
    ("forwarded", "for=192.0.2.7"),
];

fn claims() -> String {
    CLAIMS.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect()
}

/// The fields that an origin gets: for, host, proto, prefix, real address, and the template's.
fn output(head: &Head) -> [Option<String>; 6] {
    let names =
        ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-prefix", "x-real-ip", "x-client"];
    names.map(|name| head.header(name))
}

fn some<const N: usize>(values: [&str; N]) -> [Option<String>; N] {
    values.map(|value| (!value.is_empty()).then(|| value.to_owned()))
}

#[tokio::test]
async fn claims_of_an_untrusted_client_are_replaced_by_observations() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let far = far(&overlay, &origin).await;
    let near = overlay.node("near").document(NEAR).with("FAR", far.address("nodes")).start().await.unwrap();
    // Over two nodes: the second one passes on what the first one saw.
    for (claims, host, real_ip) in [(claims(), "WEB:80", "127.0.0.2"), (String::new(), "", "")] {
        let mut client = from("127.0.0.2", near.address("in")).await.unwrap();
        client.send(format!("GET / HTTP/1.1\r\nHost: WEB:80\r\n{claims}\r\n")).await.unwrap();
        assert_eq!(client.head().await.unwrap().status(), 200);
        let want = some(["127.0.0.2", host, "http", "", real_ip, "127.0.0.2"]);
        assert_eq!(output(&next(&mut received).await), want, "{claims}");
    }
    // Over TLS, by each version.
    let listener = ListenerClient::tls(far.address("tls"), overlay.authority().pem(), None);
    let request = || {
        let request = Request::get("https://WEB/");
        CLAIMS.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(()).unwrap()
    };
    let want = some(["127.0.0.1", "WEB", "https", "", "127.0.0.1", "127.0.0.1"]);
    listener.h2().await.unwrap().ask(request(), b"").await.unwrap();
    assert_eq!(output(&next(&mut received).await), want);
    listener.h3().await.unwrap().ask(&request(), b"").await.unwrap();
    assert_eq!(output(&next(&mut received).await), want);
}

#[tokio::test]
async fn claims_of_a_trusted_peer_are_forwarded() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let far = far(&overlay, &origin).await;
    let mut balancer = from("127.0.0.3", far.address("nodes")).await.unwrap();
    balancer.send(format!("GET / HTTP/1.1\r\nHost: WEB\r\n{}\r\n", claims())).await.unwrap();
    let want = some(["192.0.2.7", "evil.example", "gopher", "/evil", "192.0.2.7", "192.0.2.7"]);
    assert_eq!(output(&next(&mut received).await), want);
    balancer.head().await.unwrap();
    // It appends the client's address to what the client sent: the last one is what it saw.
    let appended = "X-Forwarded-For: 10.9.9.9, 2001:db8::7\r\n";
    balancer.send(format!("GET / HTTP/1.1\r\nHost: WEB\r\n{appended}\r\n")).await.unwrap();
    let want = some(["10.9.9.9, 2001:db8::7", "", "http", "", "", "2001:db8::7"]);
    assert_eq!(output(&next(&mut received).await), want);
    // No other client is trusted.
    let mut stranger = from("127.0.0.2", far.address("nodes")).await.unwrap();
    stranger.send(format!("GET / HTTP/1.1\r\nHost: WEB\r\n{}\r\n", claims())).await.unwrap();
    let want = some(["127.0.0.2", "WEB", "http", "", "127.0.0.2", "127.0.0.2"]);
    assert_eq!(output(&next(&mut received).await), want);
}

/// A certificate proves who the peer is. Only a standalone node's makes it a proxy.
#[tokio::test]
async fn a_certificate_makes_no_proxy_and_no_client_chooses_its_scheme() {
    let overlay = overlay();
    let (origin, mut received) = origin();
    let far = far(&overlay, &origin).await;
    let mut stranger = from("127.0.0.2", far.address("nodes")).await.unwrap();
    stranger.send("GET https://WEB/ HTTP/1.1\r\nHost: WEB\r\n\r\n").await.unwrap();
    assert_eq!(next(&mut received).await.header("x-forwarded-proto").as_deref(), Some("http"));
    let device = Subject::node("laptop").with_user("ann");
    let standalone = Subject::node("edge").standalone();
    // The device's own client asked for `https` without TLS, and the device says so.
    for (subject, sent, client, protocol) in [
        (&device, "http", "127.0.0.1", "http"),
        (&device, "gopher", "127.0.0.1", "https"),
        (&standalone, "http", "192.0.2.7", "http"),
    ] {
        let identity = overlay.authority().issue(subject).unwrap();
        let listener = ListenerClient::tls(far.address("mtls"), overlay.authority().pem(), Some(&identity));
        let request = || Request::get("https://WEB/").header("x-forwarded-for", "192.0.2.7");
        let request = || request().header("x-forwarded-proto", sent).body(()).unwrap();
        listener.h2().await.unwrap().ask(request(), b"").await.unwrap();
        let head = next(&mut received).await;
        let got = ["x-forwarded-for", "x-forwarded-proto"].map(|name| head.header(name));
        assert_eq!(got, some([client, protocol]), "h2, {subject:?}");
        listener.h3().await.unwrap().ask(&request(), b"").await.unwrap();
        let head = next(&mut received).await;
        let got = ["x-forwarded-for", "x-forwarded-proto"].map(|name| head.header(name));
        assert_eq!(got, some([client, protocol]), "h3, {subject:?}");
    }
}
