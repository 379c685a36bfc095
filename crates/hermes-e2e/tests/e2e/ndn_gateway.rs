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
use hermes_ndn::framing::PacketSplitter;
use hermes_ndn::lp::{LpPacket, NackReason};
use hermes_ndn::name::types;
use hermes_ndn::packet::{APPLICATION_NACK, CERTIFICATE, DataBuilder, Interest};
use hermes_ndn::signature::{Signer, VerifyingKey};
use hermes_ndn::{Component, MAX_FRAME, Name, Packet};
use hermes_testkit::binary::hermes;
use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::overlay::{Node, Overlay};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

/// Requests share Interests, Data and certificates with those of the same worker.
const GATEWAY: &str = "
workers: 1
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: open, match: {path: '/open/*'}, terminate: {ndn: 'udp://$FORWARDER', accept-digest: true}, timeout: {progress: 3s}}
- {name: signed, match: {path: '/org/*'}, terminate: {ndn: 'udp://$FORWARDER', anchors: {/org/alice: alice.pem, /org/bob: bob.pem}}}
- {name: certified, match: {path: '/lab/*'}, terminate: {ndn: 'udp://$FORWARDER', anchors: {/lab: lab.pem}}, timeout: {progress: 9s}}
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

/// An identity below the anchor `/lab`, and the certificate of its key.
struct Certified {
    signer: Signer,
    certificate: Bytes,
}

impl Certified {
    /// An identity whose certificate is valid until a timestamp, and the PEM file of the anchor.
    fn new(anchor: &[u8], identity: &str, end: &str) -> Self {
        let issuer = Signer::from_pkcs8(anchor, name("/lab/KEY/1")).unwrap().for_certificates("20200101T000000", end);
        let (pkcs8, _, public) = new_key();
        let key = name(identity).join(&name("/KEY/1"));
        let certificate = DataBuilder {
            name: key.join(&name("/lab/v=1")),
            content_type: CERTIFICATE,
            freshness: Some(Duration::from_secs(3600)),
            ..DataBuilder::default()
        };
        let certificate = certificate.sign(&public, &issuer).unwrap();
        Self { signer: Signer::from_pkcs8(&pkcs8, key).unwrap(), certificate }
    }
}

/// Answers Interests; every fiftieth answer gets lost, and some names misbehave.
struct Producer {
    alice: Signer,
    bob: Signer,
    /// By the beginning of the names that each signs.
    certified: Vec<(&'static str, Certified)>,
    segment_interests: AtomicUsize,
}

impl Producer {
    fn signer<'a>(&'a self, name: &Name, digest: &'a Signer) -> &'a Signer {
        let uri = name.to_string();
        if let Some((_, certified)) = self.certified.iter().find(|(prefix, _)| uri.starts_with(prefix)) {
            return &certified.signer;
        }
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
        if uri.contains("/KEY/") {
            let by_identity = |(prefix, _): &&(&str, _)| uri.starts_with(&format!("{prefix}/KEY/"));
            let (_, certified) = self.certified.iter().find(by_identity)?;
            return (!uri.starts_with("/lab/lost")).then(|| certified.certificate.clone());
        }
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
        if self.segment_interests.fetch_add(1, Ordering::Relaxed) % 50 == 49 {
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
async fn gateway(overlay: &Overlay) -> (Node, Arc<Producer>, JoinSet<()>) {
    let (alice, alice_pem) = key_pair("/org/alice/KEY/1");
    let (bob, bob_pem) = key_pair("/org/bob/KEY/1");
    for (file, pem) in [("alice.pem", alice_pem), ("bob.pem", bob_pem)] {
        std::fs::write(overlay.dir().join(file), pem).unwrap();
    }
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let forwarder = socket.local_addr().unwrap();
    let (lab, lab_pem, _) = new_key();
    std::fs::write(overlay.dir().join("lab.pem"), lab_pem).unwrap();
    let valid = "29991231T235959";
    let certified = vec![
        ("/lab/room", Certified::new(&lab, "/lab/room", valid)),
        ("/lab/expired", Certified::new(&lab, "/lab/expired", "20251231T235959")),
        ("/lab/lost", Certified::new(&lab, "/lab/lost", valid)),
        // The key of another identity, with a valid certificate for that.
        ("/lab/thief", Certified::new(&lab, "/lab/guest", valid)),
        // A key that the anchor has not certified.
        ("/lab/stranger", Certified::new(&new_key().0, "/lab/stranger", valid)),
    ];
    let producer = Arc::new(Producer { alice, bob, certified, segment_interests: AtomicUsize::new(0) });
    let answering = producer.clone();
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
                answering.answer(&interest)
            };
            if let Some(answer) = answer {
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
    let node = overlay.node("gateway").document(GATEWAY).with("FORWARDER", forwarder).start().await.unwrap();
    (node, producer, tasks)
}

/// The status, the header and the content of an answer; `None` for content that broke off.
async fn get(node: &Node, target: &str) -> (u16, String, Option<Vec<u8>>) {
    get_with(node, target, "").await
}

/// The same with further header lines in the request.
async fn get_with(node: &Node, target: &str, lines: &str) -> (u16, String, Option<Vec<u8>>) {
    let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
    http1.send(format!("GET {target} HTTP/1.1\r\nhost: gateway\r\n{lines}\r\n")).await.unwrap();
    let head = http1.head().await.unwrap();
    let body = http1.body(&head).await.ok();
    (head.status(), format!("{head:?}"), body.map(|body| body.data))
}

#[tokio::test]
async fn content_arrives_whole_and_is_described() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, _producer, _tasks) = gateway(&overlay).await;
    for target in ["/org/alice/file", "/org/bob/file/v=12", "http://any.example/open/file"] {
        let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
        http1.send(format!("GET {target} HTTP/1.1\r\nhost: gateway\r\n\r\n")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.status(), 200, "{target}");
        assert_eq!(head.header("etag").as_deref(), Some("\"ndn:v=12\""));
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
    let (node, _producer, _tasks) = gateway(&overlay).await;
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
    let (node, _producer, _tasks) = gateway(&overlay).await;
    for (target, status) in
        [("/open/dark", 504), ("/open/none", 404), ("/open/unknown", 502), ("/open/%zz", 400), ("/open//x", 400)]
    {
        let (found, head, _) = get(&node, target).await;
        assert_eq!(found, status, "{target}: {head}");
    }
    // Other spellings of names would pass the routes of the first one; a segment has a number, and not any.
    for target in ["/open/8=page", "/open/+8=page", "/open/08=page", "/open/page/", "/open/p%61ge", "/open/page/54=%01"]
    {
        let (found, head, _) = get(&node, target).await;
        assert_eq!(found, 400, "{target}: {head}");
    }
    for target in ["/open/50=abc", "/open/seg=18446744073709551615", "/open/v=1/seg=1099511627777"] {
        let (found, head, _) = get(&node, target).await;
        assert_eq!(found, 400, "{target}: {head}");
    }
    let long = format!("/open{}", "/x".repeat(1000));
    assert_eq!(get(&node, &long).await.0, 400);
    let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
    http1.send("POST /open/file HTTP/1.1\r\nhost: gateway\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 405);
}

#[tokio::test]
async fn parts_of_the_content_arrive_on_request() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, producer, _tasks) = gateway(&overlay).await;
    let whole: Vec<u8> = (0..SEGMENTS).flat_map(content).collect();
    let total = whole.len();
    let target = "/org/alice/file";
    for (range, from, end) in [
        ("0-0", 0, 1),
        ("0-4999", 0, 5000),
        ("4999-5000", 4999, 5001),
        ("12345-678901", 12_345, 678_902),
        ("-1", total - 1, total),
        ("999999-", 999_999, total),
        ("990000-99999999", 990_000, total),
        ("10-20,15-30", 10, 31),
    ] {
        let (status, head, body) = get_with(&node, target, &format!("range: bytes={range}\r\n")).await;
        assert_eq!(status, 206, "{range}: {head}");
        assert!(head.contains(&format!("bytes {from}-{}/{total}", end - 1)), "{range}: {head}");
        assert!(body.as_deref() == Some(&whole[from..end]), "{range}: {head}");
    }
    let (status, head, _) = get_with(&node, target, "range: bytes=1000000-\r\n").await;
    assert_eq!(status, 416);
    assert!(head.contains("bytes */1000000"), "{head}");
    // Parts that are apart, an unknown unit, and a validator of another version.
    for lines in ["range: bytes=0-1,9-10\r\n", "range: pages=1-2\r\n", "range: bytes=0-1\r\nif-range: \"12\"\r\n"] {
        let (status, head, body) = get_with(&node, target, lines).await;
        assert!(status == 200 && body.as_ref() == Some(&whole), "{lines}: {head}");
    }
    let (status, _, body) = get_with(&node, target, "range: bytes=0-1\r\nif-range: \"ndn:v=12\"\r\n").await;
    assert_eq!((status, body.as_deref()), (206, Some(&whole[..2])));
    let (status, head, body) = get_with(&node, target, "if-none-match: \"12\", \"ndn:v=12\"\r\n").await;
    assert_eq!((status, body.as_deref()), (304, Some(&b""[..])), "{head}");
    // A part of content that nobody has read costs the discovery, the last segment and those of the part.
    let before = producer.segment_interests.load(Ordering::Relaxed);
    let (status, ..) = get_with(&node, "/org/bob/new", "range: bytes=500000-500001\r\n").await;
    assert_eq!(status, 206);
    let asked = producer.segment_interests.load(Ordering::Relaxed) - before;
    assert!(asked < 20, "{asked} Interests for one part");
}

#[tokio::test]
async fn requests_for_the_same_content_share_its_interests() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, producer, _tasks) = gateway(&overlay).await;
    let whole: Vec<u8> = (0..SEGMENTS).flat_map(content).collect();
    let all = futures_util::future::join_all((0..20).map(|_| get(&node, "/org/alice/file"))).await;
    for (status, head, body) in all {
        assert!(status == 200 && body.as_ref() == Some(&whole), "{head}");
    }
    // One each, and repetitions of what is lost or late; alone, each request would ask for all segments.
    let asked = producer.segment_interests.load(Ordering::Relaxed);
    assert!((SEGMENTS..SEGMENTS * 2).contains(&asked), "{asked} Interests for {SEGMENTS} segments");
    // The stored Data is fresh for a minute.
    get(&node, "/org/alice/file/v=12").await;
    assert_eq!(producer.segment_interests.load(Ordering::Relaxed), asked);
    // Refused Data is not stored.
    for _ in 0..2 {
        assert_eq!(get(&node, "/org/alice/forged/file/v=12").await.0, 502);
    }
}

#[tokio::test]
async fn certificates_of_the_signers_decide() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, _producer, _tasks) = gateway(&overlay).await;
    let whole: Vec<u8> = (0..SEGMENTS).flat_map(content).collect();
    let (status, head, body) = get(&node, "/lab/room/file").await;
    assert!(status == 200 && body.as_ref() == Some(&whole), "{head}");
    for (target, reason) in [
        ("/lab/expired/file", "is not valid now"),
        ("/lab/lost/file", "did not arrive"),
        ("/lab/thief/file", "has no valid signature"),
        ("/lab/stranger/file", "has no valid signature"),
    ] {
        let (status, head, _) = get(&node, target).await;
        assert_eq!(status, 502, "{target}: {head}");
        let path = |record: &serde_json::Value| record["path"] == target;
        let record = node.record(path).await;
        assert!(record["reason"].as_str().unwrap_or_default().contains(reason), "{target}: {record}");
    }
}

#[tokio::test]
async fn the_ending_of_a_name_tells_its_media_type() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, _producer, _tasks) = gateway(&overlay).await;
    for (target, kind) in [
        ("/open/a/index.html", "text/html; charset=utf-8"),
        ("/open/a/page.css", "text/css; charset=utf-8"),
        ("/open/a/picture.PNG", "image/png"),
        ("/open/a/video.mp4/v=12", "video/mp4"),
    ] {
        let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
        http1.send(format!("HEAD {target} HTTP/1.1\r\nhost: gateway\r\n\r\n")).await.unwrap();
        let head = http1.head().await.unwrap();
        assert_eq!(head.header("content-type").as_deref(), Some(kind), "{target}: {head:?}");
        assert_eq!(head.header("accept-ranges").as_deref(), Some("bytes"), "{target}");
    }
    assert!(!get(&node, "/open/page").await.1.contains("content-type"));
}

#[tokio::test]
async fn a_head_request_asks_for_one_segment() {
    let overlay = Overlay::new(hermes()).unwrap();
    let (node, producer, _tasks) = gateway(&overlay).await;
    let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
    for file in 1..=3 {
        http1.send(format!("HEAD /open/{file}/v=12 HTTP/1.1\r\nhost: gateway\r\n\r\n")).await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 200);
        // Interests for more segments would arrive before that of the next file.
        assert_eq!(producer.segment_interests.load(Ordering::Relaxed), file);
    }
}

const OVER_TCP: &str = "
workers: 1
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, match: {kind: http}, terminate: {ndn: 'tcp://$FORWARDER', accept-digest: true}, timeout: {progress: 3s}}
";

#[tokio::test]
async fn a_silent_face_is_replaced() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        // The first face is accepted, and nobody reads from it.
        let (_silent, _) = listener.accept().await.unwrap();
        let (mut face, _) = listener.accept().await.unwrap();
        let answer = DataBuilder { name: name("/page/v=1/seg=0"), ..DataBuilder::default() };
        face.write_all(&answer.sign(b"<p>named</p>", &Signer::digest()).unwrap()).await.unwrap();
        let mut buffer = [0; 1024];
        while face.read(&mut buffer).await.unwrap() > 0 {
            face.write_all(&answer.sign(b"<p>named</p>", &Signer::digest()).unwrap()).await.unwrap();
        }
    });
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("gateway").document(OVER_TCP).with("FORWARDER", address).start().await.unwrap();
    assert_eq!(get(&node, "/page/v=1/seg=0").await.0, 504);
    let (status, head, body) = get(&node, "/page/v=1/seg=0").await;
    assert_eq!((status, body.as_deref()), (200, Some(&b"<p>named</p>"[..])), "{head}");
}

/// One of the requests connects the face, and all others wait for it.
#[tokio::test]
async fn requests_that_begin_together_share_one_face() {
    const DOCUMENT: &str = "
workers: 1
listeners: [{name: web, bind: '127.0.0.1:0', protocol: http}]
routes: [{name: open, match: {path: '/open/*'}, terminate: {ndn: 'tcp://$FORWARDER', accept-digest: true}}]
";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let forwarder = listener.local_addr().unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("gateway").document(DOCUMENT).with("FORWARDER", forwarder).start().await.unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let counted = accepted.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            counted.fetch_add(1, Ordering::Relaxed);
            connections.spawn(async move {
                let (mut splitter, mut buffer) = (PacketSplitter::new(MAX_FRAME), vec![0; 65_536]);
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    splitter.push(&buffer[..read]);
                    while let Some(packet) = splitter.next_packet().unwrap() {
                        let packet = LpPacket::decode(packet).unwrap().fragment.unwrap();
                        let Packet::Interest(interest) = Packet::decode(packet).unwrap() else { panic!() };
                        let data = DataBuilder { name: interest.name, ..DataBuilder::default() };
                        stream.write_all(&data.sign(b"page", &Signer::digest()).unwrap()).await.unwrap();
                    }
                }
            });
        }
    });
    let mut requests = JoinSet::new();
    for number in 0..40 {
        let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
        requests.spawn(async move {
            http1.send(format!("GET /open/{number}/v=1/seg=0 HTTP/1.1\r\nhost: gateway\r\n\r\n")).await.unwrap();
            http1.head().await.unwrap().status()
        });
    }
    assert!(requests.join_all().await.iter().all(|status| *status == 200));
    assert_eq!(accepted.load(Ordering::Relaxed), 1);
}
