//! Peers of Named Data Networking that others wrote: python-ndn at both ends of an overlay, behind the gateway, and as a
//! consumer of content of an HTTP origin.
//!
//! In: its consumer over TCP and UDP, its producer over UDP. Out: each Interest answered, and files intact.

use bytes::Bytes;
use hermes_testkit::binary::hermes;
use hermes_testkit::listener_client::ListenerClient;
use hermes_testkit::origin;
use hermes_testkit::overlay::Overlay;
use hermes_testkit::python::{self, NDN_CONSUMER, NDN_PRODUCER};
use hermes_testkit::skip::skip;
use serde_json::json;

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
    assert_eq!((head.status(), head.header("etag").as_deref()), (200, Some("\"7\"")));
    let body = http1.body(&head).await.unwrap();
    let expected: Vec<u8> = (0..BYTES).map(|at| u8::try_from(at % 251 * 31 % 251).unwrap()).collect();
    assert!(body.data == expected, "{} bytes", body.data.len());
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
