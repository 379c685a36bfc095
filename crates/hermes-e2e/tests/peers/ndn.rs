//! Peers of Named Data Networking that others wrote: python-ndn at both ends of an overlay, behind the gateway, and as a
//! consumer of content of an HTTP origin. Forwarders of NDNts at both ends. Chromium behind the gateway.
//!
//! In: the consumer of python-ndn over TCP and UDP, its producer over UDP. Out: each Interest answered, files intact, a page shown.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use hermes_ndn::publish::{PublishedContent, content_name};
use hermes_ndn::signature::Signer;
use hermes_ndn::{Name, Packet};
use hermes_testkit::binary::hermes;
use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::ndnts;
use hermes_testkit::origin;
use hermes_testkit::overlay::Overlay;
use hermes_testkit::python::{self, NDN_CONSUMER, NDN_PRODUCER};
use hermes_testkit::skip::skip;
use serde_json::json;
use tokio::net::UdpSocket;
use tokio::process::Command;
use tokio::task::JoinSet;

const FAR: &str = "
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, trust: 127.0.0.0/8}
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: packets, match: {headers: {hermes-namespace: ORG}}, terminate: {ndn: 'udp://127.0.0.1:$PRODUCER'}}
- {name: gateway, match: {path: '/org/*'}, terminate: {ndn: 'udp://127.0.0.1:$PRODUCER', accept-digest: true}}
";
const NEAR: &str = "
listeners:
- {name: face, bind: '127.0.0.1:0', protocol: ndn, namespaces: {ORG: /org}}
routes:
- {name: all, match: {kind: tcp}, upstream: far}
upstreams:
- {name: far, protocol: h2, endpoints: ['$FAR'], overlay: true}
";
const BYTES: usize = 3_000_000;

#[tokio::test]
async fn python_ndn_speaks_through_an_overlay_and_to_the_gateway() {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let tools = match python::find(target, NDN_PRODUCER) {
        Ok(tools) => tools,
        Err(error) => return skip("ndn::python_ndn", &error.to_string()),
    };
    let producer = python::start(NDN_PRODUCER, &tools, &[&BYTES.to_string()]).await.unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let far = overlay.node("far").document(FAR).with("PRODUCER", producer.port).start().await.unwrap();
    let draft = overlay.node("near").document(NEAR).with("FAR", far.address("overlay"));
    let near = draft.start().await.unwrap();
    for transport in ["tcp", "udp"] {
        let task = json!({
            "port": near.address("face").port(), "transport": transport, "prefix": "/org/file/v=7", "count": 300
        });
        let found = python::run(NDN_CONSUMER, &tools, &task).await.unwrap();
        assert_eq!(found, json!({"answered": 300, "late": 0, "returned": 0, "bytes": 300 * 8000}), "{transport}");
    }
    let mut http1 = ListenerClient::plain(far.address("web")).h1().await.unwrap();
    http1.send("GET /org/file HTTP/1.1\r\nhost: gateway\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!((head.status(), head.header("etag").as_deref()), (200, Some("\"ndn:v=7\"")));
    let body = http1.body(&head).await.unwrap();
    let expected: Vec<u8> = (0..BYTES).map(|at| u8::try_from(at % 251 * 31 % 251).unwrap()).collect();
    assert!(body.data == expected, "{} bytes", body.data.len());
}

const NEAR_UNIX: &str = "
listeners:
- {name: face, unix: $FACE, protocol: ndn, namespaces: {ORG: /org}}
routes:
- {name: all, match: {kind: tcp}, upstream: far}
upstreams:
- {name: far, protocol: h2, endpoints: ['$FAR'], overlay: true}
";
const FAR_TCP: &str = "
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, trust: 127.0.0.0/8}
routes:
- {name: packets, match: {headers: {hermes-namespace: ORG}}, terminate: {ndn: 'tcp://127.0.0.1:$FORWARDER'}}
";

/// The consumer and the producer of python-ndn, each with a forwarder of NDNts, which knows PIT tokens. Between the
/// forwarders is the overlay, with a Unix socket at one end and TCP at the other.
#[tokio::test]
async fn forwarders_of_ndnts_lose_no_interest_to_an_overlay() {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let tools = match python::find(target, NDN_PRODUCER) {
        Ok(tools) => tools,
        Err(error) => return skip("ndn::forwarders_of_ndnts", &error.to_string()),
    };
    let producer = python::start(NDN_PRODUCER, &tools, &[&BYTES.to_string()]).await.unwrap();
    let server = match ndnts::start(target, &format!("udp://127.0.0.1:{}", producer.port)).await {
        Ok(server) => server,
        Err(error) => return skip("ndn::forwarders_of_ndnts", &error.to_string()),
    };
    let overlay = Overlay::new(hermes()).unwrap();
    let far = overlay.node("far").document(FAR_TCP).with("FORWARDER", server.port).start().await.unwrap();
    let face = overlay.dir().join("face.sock");
    let draft = overlay.node("near").document(NEAR_UNIX).with("FACE", face.display());
    let mut near = draft.with("FAR", far.address("overlay")).start().await.unwrap();
    let device = ndnts::start(target, &format!("unix://{}", face.display())).await.unwrap();
    let task = json!({"port": device.port, "transport": "tcp", "prefix": "/org/file/v=7", "count": 2000});
    let found = python::run(NDN_CONSUMER, &tools, &task).await.unwrap();
    // Segments beyond the file are empty.
    assert_eq!(found, json!({"answered": 2000, "late": 0, "returned": 0, "bytes": BYTES}));
    near.assert_sound();
}

const PUBLISHER: &str = "
listeners:
- {name: face, bind: '127.0.0.1:0', protocol: ndn, content: {/org/web: www.example}}
routes:
- {name: web, match: {authority: www.example}, upstream: origin}
upstreams:
- {name: origin, protocol: h1, endpoints: ['$ORIGIN']}
";

#[tokio::test]
async fn python_ndn_reads_a_file_of_an_http_origin() {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let tools = match python::find(target, NDN_CONSUMER) {
        Ok(tools) => tools,
        Err(error) => return skip("ndn::python_ndn_http", &error.to_string()),
    };
    let file: Bytes = (0..BYTES).map(|at| u8::try_from(at % 251 * 31 % 251).unwrap()).collect::<Vec<_>>().into();
    let listener = origin::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let server = origin::http::serve(listener, origin::http::Version::H1, file.clone()).unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("publisher").document(PUBLISHER).with("ORIGIN", server.address()).start().await.unwrap();
    for transport in ["tcp", "udp"] {
        let task = json!({"port": node.address("face").port(), "transport": transport, "prefix": "/org/web/payload"});
        let found = python::run(NDN_CONSUMER, &tools, &task).await.unwrap();
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &file);
        let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, json!({"bytes": BYTES, "sha256": digest}), "{transport}");
    }
}

const CERTIFIED: &str = "
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: gateway, match: {path: '/org/*'}, terminate: {ndn: 'udp://127.0.0.1:$PRODUCER', anchors: {/org: anchor.pem}}}
";

#[tokio::test]
async fn certificates_of_python_ndn_lead_to_an_anchor() {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let tools = match python::find(target, NDN_PRODUCER) {
        Ok(tools) => tools,
        Err(error) => return skip("ndn::python_ndn_certificates", &error.to_string()),
    };
    for (algorithm, seconds, status) in [
        ("ecdsa", "3600", 200),
        ("rsa", "3600", 200),
        ("ed25519", "3600", 200),
        // It has expired a minute ago.
        ("ecdsa", "-60", 502),
    ] {
        let overlay = Overlay::new(hermes()).unwrap();
        let anchor = overlay.dir().join("anchor.pem");
        let arguments = ["100000", algorithm, anchor.to_str().unwrap(), seconds];
        let producer = python::start(NDN_PRODUCER, &tools, &arguments).await.unwrap();
        let draft = overlay.node("gateway").document(CERTIFIED).with("PRODUCER", producer.port);
        let node = draft.start().await.unwrap();
        let mut http1 = ListenerClient::plain(node.address("web")).h1().await.unwrap();
        http1.send("GET /org/file HTTP/1.1\r\nhost: gateway\r\n\r\n").await.unwrap();
        let head = http1.head().await.unwrap();
        let case = format!("{algorithm}, valid for {seconds} s");
        assert_eq!(head.status(), status, "{case}: {:?}", node.records());
        let body = http1.body(&head).await.unwrap();
        if status == 200 {
            let expected: Vec<u8> = (0..100_000).map(|at| u8::try_from(at % 251 * 31 % 251).unwrap()).collect();
            assert!(body.data == expected, "{case}: {} bytes", body.data.len());
        } else {
            let record = node.record(|record| record["status"] == status).await;
            let reason = record["reason"].as_str().unwrap_or_default();
            assert!(reason.contains("is not valid now"), "{case}: {record}");
        }
    }
}

const SITE: &str = "
listeners:
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: site, match: {path: '/site/*'}, terminate: {ndn: 'udp://$PRODUCER', accept-digest: true}}
";
/// The files of an NDN-named page. The script writes what it has fetched, and how the style sheet is applied.
const FILES: [(&str, &str); 4] = [
    (
        "/site/index.html",
        "<!doctype html><title>named</title><link rel=stylesheet href=page.css><h1 id=head>Named data</h1>\
         <img id=picture src=picture.svg><p id=said></p><script src=app.js></script>",
    ),
    ("/site/page.css", "#head { color: rgb(1, 2, 3) }"),
    (
        "/site/picture.svg",
        "<svg xmlns='http://www.w3.org/2000/svg' width='70' height='30'><rect width='70' height='30'/></svg>",
    ),
    (
        "/site/app.js",
        "addEventListener('load', async () => {
           const text = await (await fetch('page.css', {headers: {range: 'bytes=0-4'}})).text();
           const color = getComputedStyle(document.getElementById('head')).color;
           const width = document.getElementById('picture').naturalWidth;
           document.getElementById('said').textContent = `${text} is ${color}, ${width} wide`;
         });",
    ),
];

/// Publishes files over UDP.
async fn publish(files: &[(&str, &str)], tasks: &mut JoinSet<()>) -> SocketAddr {
    let content = |(name, text): &(&str, &str)| {
        let name: Name = name.parse().unwrap();
        (name.clone(), PublishedContent::new(name, 1, Bytes::copy_from_slice(text.as_bytes())).unwrap())
    };
    let all: HashMap<Name, PublishedContent> = files.iter().map(content).collect();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tasks.spawn(async move {
        let mut buffer = vec![0; 65_536];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            let Packet::Interest(interest) = Packet::decode(Bytes::copy_from_slice(&buffer[..length])).unwrap() else {
                panic!("no Interest")
            };
            let Some(content) = all.get(&content_name(&interest.name)) else { continue };
            let data = content.answer(&interest, Duration::from_secs(60), &Signer::digest()).unwrap();
            if let Some(data) = data {
                socket.send_to(&data, from).await.unwrap();
            }
        }
    });
    address
}

#[tokio::test]
async fn a_browser_shows_a_page_of_named_data() {
    let browser = Command::new("chromium").arg("--version").output().await;
    if !browser.is_ok_and(|output| output.status.success()) {
        return skip("ndn::browser", "it needs chromium, which scripts/setup.sh installs");
    }
    let mut tasks = JoinSet::new();
    let producer = publish(&FILES, &mut tasks).await;
    let overlay = Overlay::new(hermes()).unwrap();
    let node = overlay.node("gateway").document(SITE).with("PRODUCER", producer).start().await.unwrap();
    let profile = tempfile::tempdir().unwrap();
    let mut command = Command::new("chromium");
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--no-proxy-server",
    ]);
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
    command.args(["--virtual-time-budget=5000", "--window-size=500,300"]);
    command.arg(format!("--user-data-dir={}", profile.path().display()));
    if let Some(path) = std::env::var_os("HERMES_SCREENSHOT") {
        command.arg(format!("--screenshot={}", std::path::Path::new(&path).display()));
    }
    command.arg("--dump-dom").arg(format!("http://{}/site/index.html", node.address("web")));
    let output = tokio::time::timeout(Duration::from_secs(60), command.kill_on_drop(true).output()).await;
    let output = output.expect("the browser hangs").unwrap();
    let page = String::from_utf8_lossy(&output.stdout);
    let said = "#head is rgb(1, 2, 3), 70 wide";
    assert!(page.contains(said), "{page}\n{}", String::from_utf8_lossy(&output.stderr));
}
