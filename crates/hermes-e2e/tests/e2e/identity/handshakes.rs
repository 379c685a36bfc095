//! Certificates of the wrong CA, the wrong overlay, the wrong node, and none.

use hermes_testkit::{
    ca::{Authority, Identity, Subject},
    listener_client::{ListenerClient, NODE_NAME},
    multiplex::Answer,
    overlay::{Node, Overlay},
    raw_http1::RawHttp1,
};

use crate::identity::lab::{client, identity, ingress, origin, overlay, subject};

/// Whether this client gets an answer, of whatever kind.
async fn is_heard(client: &ListenerClient) -> bool {
    // With TLS 1.3 a client learns of a refused certificate only when it reads.
    async { client.h2().await?.get("http://OPEN/").await }.await.is_ok()
}

#[tokio::test]
async fn a_listener_that_requires_a_certificate_rejects_other_clients() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let node = ingress(&overlay, "", &origin).await;
    let other = Authority::new("lab").unwrap();
    let (right, wrong) = (identity(&overlay, &Subject::node("laptop")), other.issue(&Subject::node("laptop")).unwrap());
    let at = |identity: Option<&Identity>| client(&overlay, &node, "door", identity);
    assert!(is_heard(&at(Some(&right))).await);
    // A CA of the same name is another CA.
    assert!(!is_heard(&at(Some(&wrong))).await);
    assert!(!is_heard(&at(None)).await);
    node.metric_reaches("hermes_tls_handshake_failures_total", "listener=\"door\"", 2.0).await;
    // Where a certificate is optional, a wrong one is no better than at a listener client that demands one.
    assert!(is_heard(&client(&overlay, &node, "perhaps", None)).await);
    assert!(!is_heard(&client(&overlay, &node, "perhaps", Some(&wrong))).await);
    // A certificate of the CA that names nobody of the overlay proves nothing.
    let nobody = identity(&overlay, &Subject::server("laptop.test"));
    assert!(!is_heard(&at(Some(&nobody))).await);
    drop(receiver.recv().await);
    drop(receiver.recv().await);
    assert!(receiver.try_recv().is_err());
}

#[tokio::test]
async fn tls_and_plaintext_do_not_meet() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let node = ingress(&overlay, "", &origin).await;
    let mut http1 = RawHttp1::connect(node.address("door")).await.unwrap();
    http1.send("GET / HTTP/1.1\r\nhost: OPEN\r\n\r\n").await.unwrap();
    let answer = http1.to_end().await.unwrap_or_default();
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    assert!(!is_heard(&client(&overlay, &node, "plain", None)).await);
    assert!(receiver.try_recv().is_err());
}

#[tokio::test]
async fn a_certificate_of_another_overlay_is_refused_though_its_ca_is_trusted() {
    let (origin, _tells) = origin();
    let overlay = overlay();
    let other = Authority::new("other").unwrap();
    let document = crate::identity::lab::INGRESS;
    let draft = overlay.node("ingress").document(document).with("USERS", "").with("ROLE", "dependent");
    let draft = draft.with("ORIGIN", origin.address()).identity(&subject("ingress")).unwrap();
    let node = draft.trusting(&other).unwrap().start().await.unwrap();
    assert!(is_heard(&client(&overlay, &node, "door", Some(&identity(&overlay, &Subject::node("laptop"))))).await);
    let foreign = other.issue(&Subject::node("laptop").with_user("alice")).unwrap();
    assert!(!is_heard(&client(&overlay, &node, "door", Some(&foreign))).await);
}

/// A node with these parts of `tls`, before `next`; what a client of it is told.
async fn through(overlay: &Overlay, tls: &str, next: &Node, trusting: Option<&Authority>) -> (u16, String) {
    let answer = over(overlay, "h2", tls, next, trusting).await;
    (answer.status, answer.text())
}

async fn over(overlay: &Overlay, protocol: &str, tls: &str, next: &Node, trusting: Option<&Authority>) -> Answer {
    let document = "
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: on, upstream: next}
upstreams:
- {name: next, protocol: $PROTOCOL, endpoints: ['$NEXT'], tls: {$TLS}}
";
    let draft = overlay.node("edge").document(document).with("TLS", tls).with("NEXT", next.address("door"));
    let mut draft = draft.with("PROTOCOL", protocol).identity(&subject("edge")).unwrap();
    if let Some(other) = trusting {
        draft = draft.trusting(other).unwrap();
    }
    let edge = draft.start().await.unwrap();
    ListenerClient::plain(edge.address("apps")).h2().await.unwrap().get("http://OPEN/").await.unwrap()
}

#[tokio::test]
async fn an_upstream_proves_which_node_it_is() {
    let (origin, _tells) = origin();
    let overlay = overlay();
    let next = ingress(&overlay, "", &origin).await;
    for (tls, status) in [("", 200), ("node: ingress", 200), ("node: [other, ingress]", 200), ("node: other", 502)] {
        let (got, text) = through(&overlay, tls, &next, None).await;
        assert_eq!(got, status, "tls: {{{tls}}}: {text}");
        if status == 502 {
            assert!(text.contains("the server is node ingress"), "{text}");
        }
    }
}

/// RFC 9209, section 2.3: whichever the transport is.
#[tokio::test]
async fn a_wrong_certificate_is_called_so_over_tcp_and_over_quic() {
    let (overlay, stranger) = (overlay(), Authority::new("other").unwrap());
    let document = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
";
    let draft = overlay.node("next").document(document).identity(&subject("next").with_dns(NODE_NAME));
    let next = draft.unwrap().start().await.unwrap();
    let draft = overlay.node("far").document(document);
    let draft = draft.identity_of(&stranger, &Subject::node("far").with_dns(NODE_NAME));
    let far = draft.unwrap().start().await.unwrap();
    for protocol in ["h2", "h3"] {
        for (tls, node) in [("node: other", &next), ("", &far)] {
            let answer = over(&overlay, protocol, tls, node, None).await;
            let output = answer.header("proxy-status").unwrap();
            assert!(output.starts_with("edge; error=tls_certificate_error;"), "{protocol}, {{{tls}}}: {output}");
        }
    }
}

#[tokio::test]
async fn an_upstream_of_another_overlay_or_ca_is_refused() {
    let (origin, mut receiver) = origin();
    let overlay = overlay();
    let other = Authority::new("other").unwrap();
    // A node of the other overlay that would let us in.
    let document = crate::identity::lab::INGRESS.replace("{client: required}", "{client: none}");
    let draft = overlay.node("stranger").document(&document).with("USERS", "").with("ROLE", "dependent");
    let draft =
        draft.with("ORIGIN", origin.address()).identity_of(&other, &Subject::node("stranger").with_dns(NODE_NAME));
    let stranger = draft.unwrap().start().await.unwrap();
    let (status, text) = through(&overlay, "", &stranger, None).await;
    assert_eq!(status, 502, "{text}");
    let (status, text) = through(&overlay, "", &stranger, Some(&other)).await;
    assert_eq!(status, 502, "its CA is trusted, its overlay is not ours: {text}");
    assert!(text.contains("spiffe://lab/node/"), "{text}");
    assert!(receiver.try_recv().is_err());
}

/// A node does not start with a certificate that names another.
#[tokio::test]
async fn a_node_with_somebody_else_s_certificate_does_not_start() {
    let (origin, _tells) = origin();
    let overlay = overlay();
    let draft =
        overlay.node("ingress").document(crate::identity::lab::INGRESS).with("USERS", "").with("ROLE", "dependent");
    let draft = draft.with("ORIGIN", origin.address()).identity(&subject("another")).unwrap();
    let refused = draft.start().await.expect_err("it started").to_string();
    assert!(refused.contains("identity.cert: the certificate names node another"), "{refused}");
}
