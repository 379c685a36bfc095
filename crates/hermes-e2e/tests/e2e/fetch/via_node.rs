//! `hermes fetch` through a node: absolute form, CONNECT, overlay names, and an unreachable node.

use hermes_testkit::binary::hermes;
use hermes_testkit::ca::{Authority, Subject};
use hermes_testkit::origin::{self as origins, http};
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::pattern::Pattern;
use hermes_testkit::tls;

use crate::fetch::lab::{Reply, command, events, fetch, grown, named, origin, stderr};

const DOCUMENT: &str = "
listeners:
- {name: in, bind: '$BIND', protocol: http}
routes:
- {name: files, match: {kind: http, authority: FILES}, upstream: files}
- {name: web, match: {kind: http}, terminate: {http: authority, reach: any}}
- {name: tunnels, match: {kind: tcp, authority: 'localhost:*'}, terminate: {tcp: authority, reach: any}}
upstreams:
- {name: files, protocol: h1, endpoints: ['$FILES']}
";

async fn node(overlay: &Overlay, files: std::net::SocketAddr, bind: &str) -> Node {
    overlay.node("laptop").document(DOCUMENT).with("FILES", files).with("BIND", bind).start().await.unwrap()
}

fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

#[tokio::test]
async fn a_name_of_the_overlay_is_got_through_a_node_in_spite_of_breaks() {
    let content = Pattern::new(1).bytes(500_000);
    let from = content.clone();
    let (origin, seen) = origin(move |number, head| {
        let reply = Reply::of(&from, "\"a\"", head);
        if number < 4 { reply.cut(90_000) } else { reply }
    });
    let overlay = overlay();
    let node = node(&overlay, origin.address(), "127.0.0.1:0").await;
    let proxy = format!("http://{}", node.address("in"));
    let file = overlay.dir().join("object");
    let (status, events) = events("http://FILES/object", &file, &["--proxy", &proxy]).await;
    assert_eq!((status, seen.count()), (0, 5), "{events:?}");
    assert_eq!(std::fs::read(&file).unwrap(), content);
    let ranges: Vec<_> = seen.fields("range").into_iter().flatten().collect();
    assert_eq!(ranges.last().unwrap(), "bytes=360000-", "each try went on");
    let node_says = fetch(["http://NOWHERE:1/", "--proxy", &proxy, "--deadline", "1s", "-o", "-"]).await;
    assert_eq!(node_says.status.code(), Some(3), "a name that cannot be resolved may be one later");
    assert!(stderr(&node_says).contains("proxy_") || stderr(&node_says).contains("dns_"), "{}", stderr(&node_says));
}

#[tokio::test]
async fn tls_passes_through_a_nodes_tunnel_and_its_refusals_are_reported() {
    let authority = Authority::new("web").unwrap();
    let identity = authority.issue(&Subject::server("localhost")).unwrap();
    let listener = origins::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let config = tls::server(&identity, None, &["http/1.1"]).unwrap();
    let origin = http::serve_tls(listener, config, "by TLS".into()).unwrap();
    let overlay = overlay();
    let node = node(&overlay, origin.address(), "127.0.0.1:0").await;
    let ca = identity.write(overlay.dir(), "web").unwrap().ca;
    let proxy = format!("http://{}", node.address("in"));
    let file = overlay.dir().join("object");
    let port = origin.address().port();
    let args = ["--proxy", &proxy, "--ca", ca.to_str().unwrap()];
    let (status, events_) = events(&format!("https://localhost:{port}/"), &file, &args).await;
    assert_eq!(status, 0, "{events_:?}");
    assert_eq!(std::fs::read(&file).unwrap(), b"by TLS");
    node.record(|record| record["kind"] == "tcp").await;
    let (status, events_) = events("https://elsewhere.test/", &file, &args).await;
    let end = events_.last().unwrap();
    assert_eq!((status, end["attempts"].as_u64()), (1, Some(1)), "{events_:?}");
    assert!(end["error"].as_str().unwrap().contains("the proxy opens no tunnel: 404"), "{end}");
}

#[tokio::test]
async fn a_node_that_dies_and_comes_back_costs_no_byte() {
    let content = Pattern::new(2).bytes(400_000);
    let from = content.clone();
    let (origin, seen) = origin(move |number, head| {
        let reply = Reply::of(&from, "\"a\"", head);
        if number == 0 { reply.cut(150_000).stalling() } else { reply }
    });
    let overlay = overlay();
    let first = node(&overlay, origin.address(), "127.0.0.1:0").await;
    let address = first.address("in");
    let file = overlay.dir().join("object");
    let proxy = format!("http://{address}");
    let args = ["http://FILES/", "--proxy", &proxy, "--json", "-o", file.to_str().unwrap()];
    let running = command(args).spawn().unwrap();
    grown(&overlay.dir().join("object.part"), 150_000).await;
    let _ = first.end(std::time::Duration::ZERO).unwrap();
    let _second = node(&overlay, origin.address(), &address.to_string()).await;
    let output = running.wait_with_output().await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let events: Vec<serde_json::Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!named(&events, "retry").is_empty(), "{events:?}");
    assert_eq!(seen.fields("range")[1].as_deref(), Some("bytes=150000-"));
    assert_eq!(std::fs::read(&file).unwrap(), content);
}
