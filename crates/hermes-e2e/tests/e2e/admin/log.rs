//! The program's own log, and readers that stall.

use hermes_testkit::binary::hermes;
use hermes_testkit::{
    ca::Subject, listener_client::ListenerClient, overlay::Overlay, poll::until, raw_http1::RawHttp1,
};
use nix::sys::signal::Signal;

/// Passes stderr on until the node runs; then nobody reads it, for as long as the node lives.
const STALLS: &str = r#"exec 3>&2; exec "$@" 2> >(sed '/ running node=/q' >&3; exec tail --pid=$$ -f /dev/null)"#;

/// More than the queue takes (4,096) and the pipe.
const LINES: usize = 6_000;

#[tokio::test]
async fn traffic_continues_while_the_log_is_not_read() {
    let overlay = Overlay::new(hermes()).unwrap();
    let document = "
workers: 1
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: here, respond: {body: here}}
";
    let draft = overlay.node("edge").document(document).by_way_of(&["bash", "-c", STALLS, "bash"]);
    let node = draft.args(&["--log", "debug"]).start().await.unwrap();
    // Each of these has a line of some hundred bytes: a pipe of 64 KiB and the queue are full before the last.
    for _ in 0..LINES {
        let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
        http1.send("no request\r\n\r\n").await.unwrap();
        assert_eq!(http1.head().await.unwrap().status(), 400);
    }
    assert!(node.metric("hermes_log_lines_lost_total", "").await.unwrap() > 0.0);
}

const BY_TLS: &str = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: here, respond: {body: here}}
";

/// 2020-01-01T00:00:00Z
const OVER: f64 = 1_577_836_800.0;

#[tokio::test]
async fn an_expired_certificate_is_logged() {
    let overlay = Overlay::new(hermes()).unwrap();
    let draft = overlay.node("edge").identity(&Subject::node("edge").over()).unwrap();
    let node = draft.document(BY_TLS).start().await.unwrap();
    node.says("WARN identity.cert: the certificate expired ").await;
    let until = node.metric("hermes_certificate_not_after_seconds", r#"path="identity.cert""#).await.unwrap();
    assert_eq!(until, OVER);
    let draft = overlay.node("good").identity(&Subject::node("good")).unwrap();
    let node = draft.document(BY_TLS).start().await.unwrap();
    assert!(node.metric("hermes_certificate_not_after_seconds", "").await.unwrap() > OVER);
    assert!(!node.log().contains("WARN"), "{}", node.log());
}

#[tokio::test]
async fn failed_handshakes_are_logged_at_a_limited_rate() {
    let overlay = Overlay::new(hermes()).unwrap();
    let subject = Subject::node("edge").with_dns(hermes_testkit::listener_client::NODE_NAME);
    let node = overlay.node("edge").identity(&subject).unwrap().document(BY_TLS).start().await.unwrap();
    let client = ListenerClient::tls(node.address("in"), overlay.authority().pem(), None);
    for _ in 0..50 {
        if let Ok(mut http1) = client.h1().await {
            let _ = http1.head().await;
        }
    }
    node.says("handshake failed listener=in").await;
    node.metric_reaches("hermes_tls_handshake_failures_total", "", 50.0).await;
    let logged = node.log().matches("handshake failed").count();
    assert!(logged <= 10, "{logged} were told");
}

#[test]
fn a_missing_identity_is_reported_once() {
    let overlay = Overlay::new(hermes()).unwrap();
    let files = overlay.authority().issue(&Subject::node("edge")).unwrap().write(overlay.dir(), "edge").unwrap();
    std::fs::write(&files.key, "no key").unwrap();
    let (cert, key, ca) = (files.cert.display(), files.key.display(), files.ca.display());
    let document = format!(
        "node: edge
identity: {{cert: {cert}, key: {key}, ca: {ca}}}
listeners:
- {{name: in, bind: '127.0.0.1:0', protocol: http, tls: {{client: required}}}}
routes:
- {{name: all, upstream: next}}
upstreams:
- {{name: next, protocol: h2, endpoints: ['127.0.0.1:9'], tls: {{}}}}
"
    );
    let path = overlay.dir().join("edge.yaml");
    std::fs::write(&path, document).unwrap();
    let mut proxy = std::process::Command::new(hermes());
    let output = proxy.args(["proxy", "--config"]).arg(&path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("no readable private key"), "{text}");
    assert!(!text.contains("no CA") && !text.contains("listeners[0]"), "{text}");
}

const RECORDED: &str = "
workers: 1
access-log: $LOG
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: here, respond: {body: here}}
";

/// Files of this process end at 32 KiB, as on a disk that is full.
const FULL: &[&str] = &["bash", "-c", "trap '' XFSZ; ulimit -S -f 32; exec \"$@\"", "bash"];

async fn asks(node: &hermes_testkit::overlay::Node, path: &str) {
    let mut http1 = RawHttp1::connect(node.address("in")).await.unwrap();
    http1.send(format!("GET /{path} HTTP/1.1\r\nHost: HERE\r\nConnection: close\r\n\r\n")).await.unwrap();
    assert_eq!(http1.head().await.unwrap().status(), 200);
}

#[tokio::test]
async fn records_of_a_full_disk_are_counted_and_the_next_have_lines_of_their_own() {
    let overlay = Overlay::new(hermes()).unwrap();
    let log = overlay.dir().join("access.log");
    let draft = overlay.node("edge").document(RECORDED).with("LOG", log.display());
    let node = draft.by_way_of(FULL).start().await.unwrap();
    let mut requests = 0;
    while node.metric("hermes_access_log_entries_lost_total", "").await.unwrap() < 20.0 {
        asks(&node, &"x".repeat(1000)).await;
        requests += 1;
        assert!(requests < 1000);
    }
    node.says("cannot write the access log").await;
    let pid = node.pid().to_string();
    let freed = std::process::Command::new("prlimit").args(["--pid", &pid, "--fsize=1000000:"]).status();
    assert!(freed.unwrap().success());
    for _ in 0..20 {
        asks(&node, "after").await;
        requests += 1;
    }
    let lines = || std::fs::read_to_string(&log).unwrap();
    until("the last records", async || lines().lines().filter(|line| line.contains("/after")).count() == 20).await;
    let whole = lines().lines().filter(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()).count();
    let broken = lines().lines().count() - whole;
    let lost = node.metric("hermes_access_log_entries_lost_total", "").await.unwrap();
    assert!(broken <= 1, "{broken} lines are no records");
    assert_eq!(whole as f64 + lost, f64::from(requests), "each record is written or counted");
}

#[tokio::test]
async fn a_rotated_log_is_opened_again_for_either_signal() {
    let overlay = Overlay::new(hermes()).unwrap();
    let log = overlay.dir().join("access.log");
    let node = overlay.node("edge").document(RECORDED).with("LOG", log.display()).start().await.unwrap();
    for (number, signal) in [Signal::SIGUSR1, Signal::SIGHUP, Signal::SIGUSR1].into_iter().enumerate() {
        asks(&node, &format!("before{number}")).await;
        let rotated = overlay.dir().join(format!("access.log.{number}"));
        let has =
            |path: &std::path::Path, word: &str| std::fs::read_to_string(path).is_ok_and(|text| text.contains(word));
        until("a record", async || has(&log, &format!("/before{number}"))).await;
        std::fs::rename(&log, &rotated).unwrap();
        node.signal(signal).unwrap();
        until("the new file", async || log.exists()).await;
        asks(&node, &format!("after{number}")).await;
        until("a record in the new file", async || has(&log, &format!("/after{number}"))).await;
        assert!(!has(&rotated, &format!("/after{number}")));
    }
    // A document that cannot be applied does not keep the log from being opened again.
    node.replace("nonsense: true\n", &[]).unwrap();
    node.says("the running configuration stays").await;
    std::fs::remove_file(&log).unwrap();
    node.signal(Signal::SIGHUP).unwrap();
    until("the new file", async || log.exists()).await;
}
