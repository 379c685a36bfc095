//! End-to-end TLS: nodes do not open what passes through CONNECT.

use std::{process::Stdio, sync::Arc};

use bytes::Bytes;
use hermes_testkit::{
    ca::{Authority, Identity, Subject},
    listener_client::ListenerClient,
    origin::{self, Origin},
    overlay::{Node, Overlay},
    skip::skip,
    tls,
};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use crate::identity::lab::{middle, overlay, subject};

const NAME: &str = "bank.test";

/// A server outside of the overlay, with a CA of its own.
struct Bank {
    origin: Origin,
    authority: Authority,
    identity: Identity,
}

fn bank() -> Bank {
    let authority = Authority::new("world").unwrap();
    let identity = authority.issue(&Subject::server(NAME)).unwrap();
    let config = tls::server(&identity, None, &["http/1.1"]).unwrap();
    let listener = origin::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let origin = origin::http::serve_tls(listener, config, Bytes::from_static(b"your money")).unwrap();
    Bank { origin, authority, identity }
}

/// laptop - (mTLS, h2) - edge - (mTLS, h2) - ingress, which knows where the bank is.
async fn chain(overlay: &Overlay, bank: &Bank) -> [Node; 3] {
    let document = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: bank, match: {kind: tcp, authority: 'bank.test:443'}, terminate: {tcp: '$BANK'}}
";
    let draft = overlay.node("ingress").document(document).with("BANK", bank.origin.address());
    let ingress = draft.identity(&subject("ingress")).unwrap().start().await.unwrap();
    let edge = middle(overlay, subject("edge").standalone(), None, &ingress).await;
    let laptop = middle(overlay, subject("laptop").with_user("alice"), Some("alice"), &edge).await;
    [laptop, edge, ingress]
}

#[tokio::test]
async fn the_client_sees_the_server_s_own_certificate() {
    let bank = bank();
    let overlay = overlay();
    let nodes = chain(&overlay, &bank).await;
    let mut http1 = ListenerClient::plain(nodes[0].address("apps")).h1().await.unwrap();
    http1.send(format!("CONNECT {NAME}:443 HTTP/1.1\r\nhost: {NAME}:443\r\n\r\n")).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
    let (stream, ahead) = http1.into_parts();
    assert!(ahead.is_empty());
    let config = tls::client(bank.authority.pem(), None, &["http/1.1"]).unwrap();
    let connector = TlsConnector::from(Arc::clone(&config));
    let mut stream = connector.connect(ServerName::try_from(NAME).unwrap(), stream).await.unwrap();
    let shown = stream.get_ref().1.peer_certificates().unwrap()[0].clone();
    assert_eq!(shown, CertificateDer::from_pem_slice(bank.identity.cert_pem.as_bytes()).unwrap());
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    stream.write_all(format!("GET / HTTP/1.1\r\nhost: {NAME}\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("your money"), "{answer}");
    drop(stream);
    // Every node knows whose it was, and nothing of what it was.
    for node in &nodes {
        let record = node.record(|record| record["authority"] == format!("{NAME}:443")).await;
        assert_eq!((&record["user"], &record["kind"]), (&"alice".into(), &"tcp".into()), "{record}");
    }
}

#[tokio::test]
async fn curl_trusts_only_the_server_through_a_tunnel() {
    let bank = bank();
    let overlay = overlay();
    let nodes = chain(&overlay, &bank).await;
    let ca = overlay.dir().join("world.pem");
    std::fs::write(&ca, bank.authority.pem()).unwrap();
    let wrong = overlay.dir().join("lab.pem");
    std::fs::write(&wrong, overlay.authority().pem()).unwrap();
    let proxy = format!("http://{}", nodes[0].address("apps"));
    for (ca, good) in [(&ca, true), (&wrong, false)] {
        let mut command = tokio::process::Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", "30", "-x", &proxy, "--cacert"]).arg(ca);
        command.arg(format!("https://{NAME}/")).stdin(Stdio::null()).kill_on_drop(true);
        command.env_remove("no_proxy").env_remove("NO_PROXY");
        let output = match command.output().await {
            Ok(output) => output,
            Err(error) => return skip("real_curl_trusts_the_server", &format!("curl does not run: {error}")),
        };
        assert_eq!(output.status.success(), good, "{output:?}");
        assert_eq!(output.stdout == b"your money", good, "{output:?}");
    }
}
