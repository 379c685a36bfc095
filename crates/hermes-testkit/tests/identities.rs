//! The throw-away PKI makes certificates that TLS accepts, and only of its own CA.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use hermes_testkit::{
    ca::{Authority, Identity, Subject},
    tls,
};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector};

async fn greet(server: &Identity, server_trusts: &str, client: Option<&Identity>, client_trusts: &str) -> bool {
    let (near, far) = tokio::io::duplex(1 << 16);
    let acceptor = TlsAcceptor::from(tls::server(server, Some(server_trusts), &["h2"]).unwrap());
    let connector = TlsConnector::from(Arc::clone(&tls::client(client_trusts, client, &["h2"]).unwrap()));
    let serving = async {
        let mut stream = acceptor.accept(far).await?;
        stream.write_all(b"hello").await?;
        stream.shutdown().await
    };
    let asking = async {
        let mut stream = connector.connect(ServerName::try_from("bob.test").unwrap(), near).await?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text).await?;
        assert_eq!(text, b"hello");
        std::io::Result::Ok(())
    };
    let (served, requests) = tokio::join!(serving, asking);
    served.is_ok() && requests.is_ok()
}

#[tokio::test]
async fn mutual_tls_holds_within_an_overlay_and_not_across() {
    let (ours, other) = (Authority::new("ours").unwrap(), Authority::new("other").unwrap());
    let bob = ours.issue(&Subject::node("bob").with_dns("bob.test")).unwrap();
    let alice = ours.issue(&Subject::node("alice").with_user("alice").standalone()).unwrap();
    let mallory = other.issue(&Subject::node("alice")).unwrap();
    assert!(greet(&bob, ours.pem(), Some(&alice), ours.pem()).await);
    assert!(!greet(&bob, ours.pem(), Some(&mallory), ours.pem()).await);
    assert!(!greet(&bob, ours.pem(), None, ours.pem()).await);
    assert!(!greet(&bob, ours.pem(), Some(&alice), other.pem()).await);
}

#[test]
fn names_are_where_nodes_look_for_them() {
    let ca = Authority::new("lab").unwrap();
    let subject = Subject::node("edge").with_user("carol").standalone().with_address([127, 0, 0, 1].into());
    let pem = ca.issue(&subject).unwrap().cert_pem;
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
    let cert = pem.parse_x509().unwrap();
    let names = cert.subject_alternative_name().unwrap().unwrap();
    let uris: Vec<_> = names
        .value
        .general_names
        .iter()
        .filter_map(|n| match n {
            x509_parser::extensions::GeneralName::URI(uri) => Some(*uri),
            _ => None,
        })
        .collect();
    assert_eq!(uris, ["spiffe://lab/node/edge", "spiffe://lab/user/carol", "spiffe://lab/role/standalone"]);
}
