//! A forward proxy for `https` URIs: it reaches the origin over TLS, and sends nothing before the origin has proved its
//! name.

use std::{net::SocketAddr, path::PathBuf};

use hermes_testkit::{
    ca::{Authority, Subject},
    listener_client::{ListenerClient, NODE_NAME},
    origin::{Origin, scripted},
    overlay::{Node, Overlay},
    tls,
};
use http::{Request, Version};

use crate::http::lab::{Seen, next, overlay, seen};

/// An event at the origin: a request's target and its secret, or the first byte of a connection without TLS.
#[derive(Debug, PartialEq)]
enum OriginResult {
    Request(String, Option<String>),
    InTheClear(u8),
}

/// An origin by TLS with a certificate for `subject`; it serves connection after connection.
fn origin(authority: &Authority, subject: &Subject) -> (Origin, Seen<OriginResult>) {
    let (sender, receiver) = seen();
    let identity = authority.issue(subject).unwrap();
    let config = tls::server(&identity, None, &["http/1.1"]).unwrap();
    let strangers = sender.clone();
    let stranger = move |byte| drop(strangers.send(OriginResult::InTheClear(byte)));
    let origin = scripted::h1_by_tls(config, stranger, move |mut http1| {
        let sender = sender.clone();
        async move {
            loop {
                let head = http1.head().await?;
                let secret = head.header("authorization");
                let _ = sender.send(OriginResult::Request(
                    format!("{} {}", head.target(), head.header("host").unwrap_or_default()),
                    secret,
                ));
                http1.send("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret").await?;
            }
        }
    });
    (origin.unwrap(), receiver)
}

/// A node with a plaintext and a TLS listener; `tls` goes into its terminating route.
async fn gate(overlay: &Overlay, tls: &str, wrapper: &[&str]) -> Node {
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
- {name: secure, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
routes:
- {name: web, match: {kind: http}, terminate: {http: authority, reach: any$TLS}}
";
    let draft = overlay.node("gate").document(document).with("TLS", tls).by_way_of(wrapper);
    draft.identity(&Subject::node("gate").with_dns(NODE_NAME)).unwrap().start().await.unwrap()
}

fn written(overlay: &Overlay, authority: &Authority) -> PathBuf {
    let file = overlay.dir().join("web-ca.pem");
    std::fs::write(&file, authority.pem()).unwrap();
    file
}

fn for_loopback() -> Subject {
    Subject::server("origin.test").with_address([127, 0, 0, 1].into())
}

fn secret(origin: SocketAddr) -> Request<()> {
    let request = Request::builder().uri(format!("https://{origin}/secret")).header("authorization", "Bearer s3cr3t");
    request.version(Version::HTTP_2).body(()).unwrap()
}

/// The answer to an absolute-form request.
async fn by_h1(client: &ListenerClient, origin: SocketAddr) -> (u16, String) {
    let mut http1 = client.h1().await.unwrap();
    let head =
        format!("GET https://{origin}/secret HTTP/1.1\r\nhost: {origin}\r\nauthorization: Bearer s3cr3t\r\n\r\n");
    http1.send(head).await.unwrap();
    let head = http1.head().await.unwrap();
    (head.status(), format!("{head:?} {}", http1.body(&head).await.unwrap().text()))
}

#[tokio::test]
async fn requests_for_https_reach_their_origin_by_tls_in_every_version() {
    let (overlay, web) = (overlay(), Authority::new("web").unwrap());
    let (origin, mut received) = origin(&web, &for_loopback());
    let ca = written(&overlay, &web);
    let node = gate(&overlay, &format!(", tls: {{ca: {}}}", ca.display()), &[]).await;
    let wanted = OriginResult::Request(format!("/secret {}", origin.address()), Some("Bearer s3cr3t".to_owned()));

    let plain = ListenerClient::plain(node.address("in"));
    let (status, text) = by_h1(&plain, origin.address()).await;
    assert_eq!(status, 200, "{text}");
    assert_eq!(next(&mut received).await, wanted);
    let answer = plain.h2().await.unwrap().ask(secret(origin.address()), b"").await.unwrap();
    assert_eq!((answer.status, answer.text().as_str()), (200, "secret"));
    assert_eq!(next(&mut received).await, wanted);
    let secure = ListenerClient::tls(node.address("secure"), overlay.authority().pem(), None);
    let answer = secure.h3().await.unwrap().ask(&secret(origin.address()), b"").await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(next(&mut received).await, wanted);

    let answer = secure.h2().await.unwrap().ask(secret(origin.address()), b"").await.unwrap();
    assert_eq!((answer.status, answer.header("alt-svc")), (200, None), "HTTP/3 of this node is not the origin's");
    assert_eq!(next(&mut received).await, wanted);

    // A request for `http` never uses a pooled connection of `https` to the same port.
    let mut http1 = plain.h1().await.unwrap();
    http1.send(format!("GET http://{0}/ HTTP/1.1\r\nhost: {0}\r\n\r\n", origin.address())).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 502);
    assert_eq!(next(&mut received).await, OriginResult::InTheClear(b'G'));
}

#[tokio::test]
async fn an_origin_that_does_not_prove_its_name_gets_nothing() {
    let (overlay, web) = (overlay(), Authority::new("web").unwrap());
    let ca = written(&overlay, &web);
    let by_file = gate(&overlay, &format!(", tls: {{ca: {}}}", ca.display()), &[]).await;
    let other = Authority::new("web").unwrap();
    for (what, (origin, mut received)) in [
        ("another CA", origin(&other, &for_loopback())),
        ("another name", origin(&web, &Subject::server("elsewhere.test"))),
        ("an expired certificate", origin(&web, &for_loopback().over())),
    ] {
        let (status, text) = by_h1(&ListenerClient::plain(by_file.address("in")), origin.address()).await;
        assert_eq!(status, 502, "{what}: {text}");
        assert!(text.contains("tls_certificate_error"), "{what}: {text}");
        assert!(received.try_recv().is_err(), "{what}");
    }
}

/// Without `tls` the system's CA certificates verify origins.
#[tokio::test]
async fn the_systems_ca_certificates_are_the_default() {
    let (overlay, web) = (overlay(), Authority::new("web").unwrap());
    let (origin, mut received) = origin(&web, &for_loopback());
    let ca = written(&overlay, &web);
    let variable = format!("SSL_CERT_FILE={}", ca.display());
    let trusting = gate(&overlay, "", &["env", &variable]).await;
    let (status, text) = by_h1(&ListenerClient::plain(trusting.address("in")), origin.address()).await;
    assert_eq!(status, 200, "{text}");
    assert!(matches!(next(&mut received).await, OriginResult::Request(..)));
    drop(trusting);

    // A system without CA certificates: the node runs, and reports what is missing.
    let empty = overlay.dir().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let (file, dir) = (format!("SSL_CERT_FILE={}/none", empty.display()), format!("SSL_CERT_DIR={}", empty.display()));
    let lacking = gate(&overlay, "", &["env", &file, &dir]).await;
    let (status, text) = by_h1(&ListenerClient::plain(lacking.address("in")), origin.address()).await;
    assert_eq!(status, 502, "{text}");
    assert!(received.try_recv().is_err());
    lacking.record(|record| record["reason"].as_str().is_some_and(|reason| reason.contains("CA certificates"))).await;
}
