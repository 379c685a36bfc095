//! HTTP requests for content of Named Data Networking: the path is the name.
//!
//! In: requests to a gateway, and a scripted producer that misbehaves on demand. Out: content that its signer may sign,
//! or a status with the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aws_lc_rs::encoding::{AsDer as _, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use hermes_ndn::lp::{LpPacket, NackReason};
use hermes_ndn::name::types;
use hermes_ndn::packet::{APPLICATION_NACK, DataBuilder, Interest};
use hermes_ndn::signature::{Signer, VerifyingKey};
use hermes_ndn::{Component, Name, Packet};
use hermes_testkit::binary::hermes;
use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::overlay::{Node, Overlay};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

const GATEWAY: &str = "
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: open, match: {path: '/open/*'}, terminate: {ndn: 'udp://$FORWARDER', accept-digest: true}, timeout: {progress: 3s}}
- {name: signed, match: {path: '/org/*'}, terminate: {ndn: 'udp://$FORWARDER', anchors: {/org/alice: alice.pem, /org/bob: bob.pem}}}
";
const SEGMENT: usize = 5000;
const SEGMENTS: usize = 200;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn content(number: usize) -> Vec<u8> {
    (0..SEGMENT).map(|at| u8::try_from((at * 31 + number * 7) % 251).unwrap()).collect()
}

/// A new key pair: the private key in PKCS#8 (DER), the public key in PEM, and the public key in DER.
fn new_key() -> (Vec<u8>, String, Vec<u8>) {
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new()).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, pkcs8.as_ref()).unwrap();
    let der: PublicKeyX509Der<'_> = pair.public_key().as_der().unwrap();
    (pkcs8.as_ref().to_vec(), pem("PUBLIC KEY", der.as_ref()), der.as_ref().to_vec())
}

fn pem(kind: &str, der: &[u8]) -> String {
    format!("-----BEGIN {kind}-----\n{}\n-----END {kind}-----\n", BASE64_STANDARD.encode(der))
}

/// A new key pair: the signer, and its public key in PEM.
fn key_pair(locator: &str) -> (Signer, String) {
    let (pkcs8, public, _) = new_key();
    (Signer::from_pkcs8(&pkcs8, name(locator)).unwrap(), public)
}

/// Writes a new key pair to the files NAME.key and NAME.pem.
pub(crate) fn key_pair_files(dir: &std::path::Path, name: &str) -> VerifyingKey {
    let (pkcs8, public, der) = new_key();
    std::fs::write(dir.join(format!("{name}.key")), pem("PRIVATE KEY", &pkcs8)).unwrap();
    std::fs::write(dir.join(format!("{name}.pem")), public).unwrap();
    VerifyingKey::Public(der.into())
}

/// Answers Interests; every fiftieth answer gets lost, and some names misbehave.
struct Producer {
    alice: Signer,
    bob: Signer,
    answers: AtomicUsize,
}

impl Producer {
    fn signer<'a>(&'a self, name: &Name, digest: &'a Signer) -> &'a Signer {
        let uri = name.to_string();
        match () {
            // Bob signs content of Alice.
            () if uri.starts_with("/org/alice/forged") => &self.bob,
            () if uri.starts_with("/org/alice/unsigned") || uri.starts_with("/open") => digest,
            () if uri.starts_with("/org/bob") => &self.bob,
            () => &self.alice,
        }
    }

    fn answer(&self, interest: &Interest) -> Option<Bytes> {
        let digest = Signer::digest();
        let uri = interest.name.to_string();
        if uri.starts_with("/open/dark") {
            return None;
        }
        let signer = self.signer(&interest.name, &digest);
        let sign = |builder: DataBuilder, content: &[u8]| Some(builder.sign(content, signer).unwrap());
        if uri.starts_with("/open/none") {
            return sign(
                DataBuilder { name: interest.name.clone(), content_type: APPLICATION_NACK, ..DataBuilder::default() },
                b"",
            );
        }
        if uri.starts_with("/open/page") {
            let is_asked = !uri.contains("32=metadata");
            return is_asked.then(|| {
                DataBuilder { name: name("/open/page"), ..DataBuilder::default() }
                    .sign(b"<p>named</p>", signer)
                    .unwrap()
            });
        }
        if let Some(asked) = uri.strip_suffix("/32=metadata") {
            let mut versioned = Vec::new();
            name(&format!("{asked}/v=12")).put(&mut versioned);
            let name = name(&format!("{uri}/v=1/seg=0"));
            return sign(DataBuilder { name, ..DataBuilder::default() }, &versioned);
        }
        let number = interest.name.last()?.number(types::SEGMENT)?;
        if self.answers.fetch_add(1, Ordering::Relaxed) % 50 == 49 {
            return None;
        }
        let builder = DataBuilder {
            name: interest.name.clone(),
            freshness: Some(Duration::from_secs(60)),
            final_block: Some(Component::numbered(types::SEGMENT, SEGMENTS as u64 - 1)),
            content_type: 0,
        };
        let packet = builder.sign(&content(usize::try_from(number).unwrap()), signer).unwrap();
        // The last segments of this name are changed on their way.
        if uri.starts_with("/org/alice/tampered") && number > 50 {
            let mut changed = packet.to_vec();
            let middle = changed.len() / 2;
            changed[middle] ^= 1;
            return Some(changed.into());
        }
        Some(packet)
    }
}

/// A gateway and its producer.
async fn gateway(overlay: &Overlay) -> (Node, JoinSet<()>) {
    let (alice, alice_pem) = key_pair("/org/alice/KEY/1");
    let (bob, bob_pem) = key_pair("/org/bob/KEY/1");
    for (file, pem) in [("alice.pem", alice_pem), ("bob.pem", bob_pem)] {
        std::fs::write(overlay.dir().join(file), pem).unwrap();
    }
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let forwarder = socket.local_addr().unwrap();
    let producer = Arc::new(Producer { alice, bob, answers: AtomicUsize::new(0) });
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut buffer = vec![0; 65_536];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            let packet = Bytes::copy_from_slice(&buffer[..length]);
            let Packet::Interest(interest) = Packet::decode(packet.clone()).unwrap() else { panic!() };
            let answer = if interest.name.to_string().starts_with("/open/unknown") {
                Some(LpPacket::returning(packet, NackReason::NoRoute, None).encode())
            } else {
                producer.answer(&interest)
            };
            if let Some(answer) = answer {
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
    let node = overlay.node("gateway").document(GATEWAY).with("FORWARDER", forwarder).start().await.unwrap();
    (node, tasks)
}

/// The status, the header and the content of an answer; `None` for content that broke off.
async fn get(node: &Node, target: &str) -> (u16, String, Option<Vec<u8>>) {
    let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
    http1.send(format!("GET {target} HTTP/1.1\r\nhost: gateway\r\n\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    let body = http1.body(&head).await.ok();
    (head.status(), format!("{head:?}"), body.map(|body| body.data))
}

#[tokio::test]
async fn content_arrives_whole_and_is_described() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, _producer) = gateway(&overlay).await;
    for target in ["/org/alice/file", "/org/bob/file/v=12", "http://any.example/open/file"] {
        let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
        http1.send(format!("GET {target} HTTP/1.1\r\nhost: gateway\r\n\r\n")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 200, "{target}");
        assert_eq!(head.header("etag").as_deref(), Some("\"12\""));
        assert_eq!(head.header("cache-control").as_deref(), Some("max-age=60"));
        let body = http1.body(&head).await.unwrap();
        let expected: Vec<u8> = (0..SEGMENTS).flat_map(content).collect();
        assert!(body.data == expected, "{target}: {} bytes", body.data.len());
    }
    let (status, _, body) = get(&node, "/open/page").await;
    assert_eq!((status, body.as_deref()), (200, Some(&b"<p>named</p>"[..])));
}

#[tokio::test]
async fn content_that_cannot_be_trusted_never_arrives() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, _producer) = gateway(&overlay).await;
    for target in ["/org/alice/forged/file", "/org/alice/unsigned/file", "/org/carol/file"] {
        let (status, head, _) = get(&node, target).await;
        assert_eq!(status, 502, "{target}: {head}");
    }
    // Good segments arrive, and the first changed one breaks the content off.
    let (status, _, body) = get(&node, "/org/alice/tampered/file").await;
    assert_eq!((status, body), (200, None));
    node.metric_reaches("hermes_datagrams_dropped_total", "reason=\"ndn-untrusted\"", 4.0).await;
}

#[tokio::test]
async fn a_status_says_why_there_is_no_content() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, _producer) = gateway(&overlay).await;
    for (target, status) in
        [("/open/dark", 504), ("/open/none", 404), ("/open/unknown", 502), ("/open/%zz", 400), ("/open//x", 400)]
    {
        let (found, head, _) = get(&node, target).await;
        assert_eq!(found, status, "{target}: {head}");
    }
    let long = format!("/open{}", "/x".repeat(1000));
    assert_eq!(get(&node, &long).await.0, 400);
    let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
    http1.send("POST /open/file HTTP/1.1\r\nhost: gateway\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 405);
}
