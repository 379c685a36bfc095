//! Seeing a node: its admin endpoint, its metrics, its records, as the reference describes them.

mod log;
mod openmetrics;

use hermes_testkit::binary::hermes;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::Duration,
};

use hermes_testkit::{
    ca::Subject,
    origin::services::Services,
    overlay::{Node, Overlay},
    poll::until,
    raw_http1::RawHttp1,
};
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpStream, UdpSocket};

const DOCUMENT: &str = "
limits: {udp-flows: 1}
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http, set-headers: {x-api-key: 'a-listener-s3cret'}}
- {name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:1'}
- {name: video, bind: '127.0.0.1:0', protocol: udp, authority: 'VIDEO:1'}
- {name: secure, bind: '127.0.0.1:0', protocol: http, tls: {client: required}}
routes:
- {name: dead, match: {authority: DEAD}, upstream: dead, retry: {on: connect-failure, attempts: 2, backoff: {base: 1ms}}}
- {name: db, match: {kind: tcp}, terminate: {tcp: '$ECHO'}}
- {name: video, match: {kind: udp}, terminate: {udp: '$UDP'}, timeout: {idle: 500ms}}
- {name: hello, match: {authority: HELLO}, respond: {body: hello, headers: {set-cookie: 'an-answer-s3cret'}}}
- name: web
  match: {authority: APP, path: '/*'}
  upstream: web
  rewrite: {set-headers: {authorization: 'Bearer a-route-s3cret'}, query: {set: {token: 'a-query-s3cret'}}}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB'], health: {path: /health, interval: 100ms}}
- {name: dead, protocol: h1, endpoints: ['127.0.0.1:9']}
";

struct Fixture {
    overlay: Overlay,
    services: Services,
}

impl Fixture {
    fn new() -> Self {
        Self { overlay: Overlay::new(hermes()).unwrap(), services: Services::start().unwrap() }
    }

    async fn start(&self) -> Node {
        let draft = self.overlay.node("near").document(DOCUMENT).identity(&Subject::node("near")).unwrap();
        self.services.fill(draft).start().await.unwrap()
    }
}

/// One request on a connection of its own.
async fn ask(to: SocketAddr, request: &str) -> (u16, String) {
    let mut http1 = RawHttp1::connect(to).await.unwrap();
    http1.send(request).await.unwrap();
    let head = http1.head().await.unwrap();
    let body = if request.starts_with("HEAD") { String::new() } else { http1.body(&head).await.unwrap().text() };
    (head.status(), body)
}

async fn flow(to: SocketAddr, words: &[u8]) -> UdpSocket {
    let flow = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    flow.connect(to).await.unwrap();
    flow.send(words).await.unwrap();
    flow
}

/// A session of every kind, and how it ends in the records: by authority and path.
async fn sessions_of_all_kinds(node: &Node) -> usize {
    let apps = node.address("apps");
    let trace = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
    let get = format!("GET /traced?token=a-clients-s3cret HTTP/1.1\r\nhost: app\r\n{trace}connection: close\r\n\r\n");
    assert_eq!(ask(apps, &get).await, (200, "web".to_owned()));
    let post = "POST /upload HTTP/1.1\r\nhost: app\r\ncontent-length: 12\r\nconnection: close\r\n\r\ntwelve bytes";
    assert_eq!(ask(apps, post).await.0, 200);
    assert_eq!(ask(apps, "HEAD /head HTTP/1.1\r\nhost: app\r\nconnection: close\r\n\r\n").await.0, 200);
    assert_eq!(ask(apps, "GET / HTTP/1.1\r\nhost: hello\r\nconnection: close\r\n\r\n").await.1, "hello");
    assert_eq!(ask(apps, "GET / HTTP/1.1\r\nhost: nobody\r\nconnection: close\r\n\r\n").await.0, 404);
    assert_eq!(ask(apps, "GET / HTTP/1.1\r\nhost: dead\r\nconnection: close\r\n\r\n").await.0, 502);
    let mut tunnel = RawHttp1::connect(apps).await.unwrap();
    tunnel.send("CONNECT DB:2 HTTP/1.1\r\nhost: DB:2\r\n\r\n").await.unwrap();
    assert_eq!(tunnel.head().await.unwrap().status(), 200);
    let mut raw = RawHttp1::connect(node.address("db")).await.unwrap();
    for stream in [&mut tunnel, &mut raw] {
        stream.send("four").await.unwrap();
        assert_eq!(stream.exactly(4).await.unwrap(), b"four");
    }
    drop((tunnel, raw));
    let first = flow(node.address("video"), b"seven b").await;
    assert_eq!(first.recv(&mut [0; 16]).await.unwrap(), 7);
    // The listener has room for one flow.
    let _second = flow(node.address("video"), b"dropped").await;
    node.metric_reaches("hermes_datagrams_dropped_total", "reason=\"udp-flows\"", 1.0).await;
    // No handshake, so no session.
    let mut garbage = RawHttp1::connect(node.address("secure")).await.unwrap();
    garbage.send("GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _ = garbage.to_end().await;
    let (sender, connection) = h2::client::handshake(TcpStream::connect(apps).await.unwrap()).await.unwrap();
    let mut driver = tokio::task::JoinSet::new();
    driver.spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let request = ::http::Request::get("http://app/h2").body(()).unwrap();
    assert_eq!(sender.send_request(request, true).unwrap().0.await.unwrap().status(), 200);
    drop(sender);
    node.quiet().await;
    10
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_session_has_one_record_with_the_fields_of_the_reference() {
    let fixture = Fixture::new();
    let node = fixture.start().await;
    let sessions = sessions_of_all_kinds(&node).await;
    until("the records", || async { node.records().len() >= sessions }).await;
    let total = node.metric("hermes_sessions_total", "").await.unwrap();
    let records = node.records();
    assert_eq!((records.len(), total), (sessions, sessions as f64), "{records:#?}");
    let ids: BTreeSet<u64> = records.iter().map(|record| record["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), sessions);

    let documented: BTreeSet<String> = reference_table("Records").into_iter().flat_map(|row| words(&row[0])).collect();
    let optional = ["peer", "user", "endpoint", "attempts", "error", "reason"];
    for record in &records {
        let keys: BTreeSet<String> = record.as_object().unwrap().keys().cloned().collect();
        assert!(keys.is_subset(&documented), "{record}");
        for field in documented.iter().filter(|field| !optional.contains(&field.as_str())) {
            assert!(keys.contains(field), "{field} is missing: {record}");
        }
        assert_eq!((record["node"].as_str(), record["trace"].as_str().map(str::len)), (Some("near"), Some(32)));
        assert!(record["source"].as_str().unwrap().parse::<SocketAddr>().is_ok());
        assert!(record["time"].as_str().unwrap().ends_with('Z') && record["duration_ms"].as_f64().unwrap() > 0.0);
        assert!(!record.to_string().contains("s3cret"), "{record}");
    }
    let of = |authority: &str, path: &str| {
        let fits = |record: &&Value| record["authority"] == authority && record["path"] == path;
        records.iter().find(fits).unwrap_or_else(|| panic!("no record of {authority} {path}: {records:#?}")).clone()
    };
    let looks = |record: Value, fields: &[(&str, Value)]| {
        for (field, value) in fields {
            assert_eq!(&record[*field], value, "{field} of {record}");
        }
    };
    let traced = of("app", "/traced");
    looks(traced, &[("trace", "0af7651916cd43dd8448eb211c80319c".into()), ("status", 200.into()), ("sent", 3.into())]);
    let endpoint = format!("web/{}", fixture.services.web.address());
    looks(of("app", "/upload"), &[("received", 12.into()), ("endpoint", endpoint.into()), ("route", "web".into())]);
    looks(of("app", "/head"), &[("method", "HEAD".into()), ("sent", 0.into()), ("error", Value::Null)]);
    looks(of("hello", "/"), &[("route", "hello".into()), ("sent", 5.into()), ("endpoint", Value::Null)]);
    looks(
        of("nobody", "/"),
        &[("route", Value::Null), ("status", 404.into()), ("error", "http_request_denied".into())],
    );
    looks(of("dead", "/"), &[("attempts", 2.into()), ("status", 502.into()), ("error", "connection_refused".into())]);
    looks(of("app", "/h2"), &[("kind", "http".into()), ("status", 200.into())]);
    for authority in ["db:1", "db:2"] {
        looks(of(authority, "/"), &[("kind", "tcp".into()), ("received", 4.into()), ("sent", 4.into())]);
    }
    let flow = records.iter().find(|record| record["kind"] == "udp").unwrap().clone();
    looks(flow, &[("listener", "video".into()), ("received", 7.into()), ("sent", 7.into())]);
}

/// Families that have a line only where their listeners, routes or upstreams are: the tests of these read them.
const OF_OTHER_NODES: [&str; 13] = [
    "hermes_relay_publications_total",
    "hermes_relay_deliveries_total",
    "hermes_cache_bytes",
    "hermes_cache_evictions_total",
    "hermes_cache_requests_total",
    "hermes_dns_questions_total",
    "hermes_reverse_connections",
    "hermes_upstream_rate_limit_requests_total",
    "hermes_resume_requests_total",
    "hermes_upstream_rate_limit_wait_seconds",
    "hermes_upstream_rate_limit_per_second",
    "hermes_upstream_backups_total",
    "hermes_tcp_urgent_total",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_strict_openmetrics_and_exactly_those_of_the_reference() {
    let fixture = Fixture::new();
    let node = fixture.start().await;
    let sessions = sessions_of_all_kinds(&node).await;
    let before = node.generation().await.unwrap();
    node.replace("listeners: nonsense\n", &[]).unwrap();
    node.metric_reaches("hermes_reloads_total", "result=\"refused\"", 1.0).await;
    assert_eq!(node.generation().await.unwrap(), before);
    let (_, text) = node.ask("/metrics").await.unwrap();
    let families = openmetrics::parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"));
    let mut documented: BTreeMap<String, BTreeSet<String>> = documented_metrics();
    let mut found = BTreeMap::new();
    for (name, family) in &families {
        let name = if family.kind == "counter" { format!("{name}_total") } else { name.clone() };
        let labels = family.samples.iter().flat_map(|sample| sample.labels.keys()).filter(|label| *label != "le");
        found.insert(name, labels.cloned().collect::<BTreeSet<String>>());
    }
    for family in OF_OTHER_NODES {
        assert!(documented.remove(family).is_some(), "docs/reference/observing.md lacks {family}");
    }
    assert_eq!(found, documented, "what there is, and what docs/reference/observing.md says");
    let sum = |family: &str, suffix: &str, label: (&str, &str)| -> f64 {
        let samples = families[family].samples.iter().filter(|sample| sample.name == format!("{family}{suffix}"));
        samples.filter(|sample| sample.labels.get(label.0).is_none_or(|value| value == label.1)).map(|s| s.value).sum()
    };
    assert_eq!(sum("hermes_sessions", "_total", ("", "")), sessions as f64);
    assert_eq!(sum("hermes_session_duration_seconds", "_count", ("", "")), sessions as f64);
    assert_eq!(sum("hermes_sessions", "_total", ("route", "none")), 1.0);
    assert_eq!(sum("hermes_session_errors", "_total", ("error", "connection_refused")), 1.0);
    assert_eq!(sum("hermes_session_received_bytes", "_total", ("", "")), 12.0 + 4.0 + 4.0 + 7.0);
    assert_eq!(sum("hermes_sessions_open", "", ("", "")), 0.0);
    assert_eq!(sum("hermes_tls_handshake_failures", "_total", ("listener", "secure")), 1.0);
    assert_eq!(sum("hermes_retries", "_total", ("", "")), 1.0);
    assert_eq!(sum("hermes_limit_hits", "_total", ("limit", "udp-flows")), 1.0);
    assert_eq!(sum("hermes_upstream_healthy", "", ("upstream", "web")), 1.0);
    assert_eq!(sum("hermes_generation", "", ("", "")), 1.0);
    assert_eq!(sum("hermes_access_log_entries_lost", "_total", ("", "")), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_configuration_is_shown_without_secrets_and_sessions_while_they_last() {
    let fixture = Fixture::new();
    let node = fixture.start().await;
    let (status, text) = node.ask("/config").await.unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &config["generation"]), (200, &Value::from(1)));
    assert!(!text.contains("s3cret") && !text.contains("PRIVATE KEY"), "{text}");
    assert_eq!(text.matches("(left out)").count(), 4, "{text}");
    assert_eq!(config["document"]["listeners"][0]["name"], "apps");
    assert_eq!(config["document"]["node"], "near");

    let mut tunnel = RawHttp1::connect(node.address("db")).await.unwrap();
    tunnel.send("four").await.unwrap();
    assert_eq!(tunnel.exactly(4).await.unwrap(), b"four");
    let (_, text) = node.ask("/sessions").await.unwrap();
    let sessions: Vec<Value> = serde_json::from_str(&text).unwrap();
    let [session] = sessions.as_slice() else { panic!("{text}") };
    let endpoint = format!("db/{}", fixture.services.echo.address());
    let wanted: [(&str, Value); 7] = [
        ("listener", "db".into()),
        ("kind", "tcp".into()),
        ("authority", "db:1".into()),
        ("route", "db".into()),
        ("endpoint", endpoint.into()),
        ("phase", "open".into()),
        ("received", 4.into()),
    ];
    for (field, value) in wanted {
        assert_eq!(session[field], value, "{field} of {session}");
    }
    drop(tunnel);
    node.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_endpoint_reads_only_and_answers_to_this_machine_only() {
    let fixture = Fixture::new();
    let node = fixture.start().await;
    let (admin, port) = (node.admin(), node.admin().port());
    let requests = |method: &'static str, path: &'static str, host: String| {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        async move { ask(admin, &request).await }
    };
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/config", 200), ("/sessions", 200)]
    {
        assert_eq!(requests("GET", path, "localhost".to_owned()).await.0, status, "{path}");
        assert_eq!(requests("HEAD", path, "localhost".to_owned()).await.0, status, "{path}");
        assert_eq!(requests("POST", path, "localhost".to_owned()).await.0, 405, "{path}");
        // A page of somebody else whose name leads here.
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b"] {
            let (status, text) = requests("GET", path, host.to_owned()).await;
            assert!(matches!(status, 400 | 403) && !text.contains("hermes_"), "{path} as {host:?}: {status} {text}");
        }
    }
    for host in ["localhost", "LOCALHOST", "127.0.0.1", "[::1]"] {
        assert_eq!(requests("GET", "/healthz", format!("{host}:{port}")).await.0, 200, "{host}");
    }
    let (status, text) = requests("GET", "/nothing", "localhost".to_owned()).await;
    assert!(status == 404 && text.contains("/metrics"), "{text}");
    // Whoever connects and says nothing keeps nobody out.
    let mut silent = Vec::new();
    for _ in 0..63 {
        silent.push(TcpStream::connect(node.admin()).await.unwrap());
    }
    let requests = tokio::time::timeout(Duration::from_secs(30), node.ask("/healthz")).await;
    assert_eq!(requests.unwrap().unwrap().0, 200);
}

/// The rows of the table below this heading of the reference, as cells.
fn reference_table(heading: &str) -> Vec<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/observing.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, section) = text.split_once(&format!("## {heading}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// What stands in backquotes.
fn words(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn documented_metrics() -> BTreeMap<String, BTreeSet<String>> {
    let mut last = BTreeSet::new();
    let rows = reference_table("Metrics").into_iter().map(|row| {
        let name = words(&row[0]).remove(0);
        let labels = if row[1] == "as above" { last.clone() } else { words(&row[1]).into_iter().collect() };
        last = labels.clone();
        (name, labels)
    });
    rows.collect()
}

/// Whoever started the node, and with whatever mask.
#[tokio::test]
async fn a_log_file_that_the_node_creates_is_private() {
    let overlay = Overlay::new(hermes()).unwrap();
    let log = overlay.dir().join("access.log");
    let document = "
access-log: $LOG
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, respond: {status: 404}}
";
    let draft = overlay.node("edge").document(document).with("LOG", log.display());
    let node = draft.by_way_of(&["sh", "-c", "umask 0 && exec \"$@\"", "sh"]).start().await.unwrap();
    let mode = || std::fs::metadata(&log).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o640, "{:o}", mode());
    // Rotated: it is made anew.
    std::fs::remove_file(&log).unwrap();
    node.signal(Signal::SIGHUP).unwrap();
    until("the log is opened again", || async { log.exists() }).await;
    assert_eq!(mode(), 0o640, "{:o}", mode());
}

/// As many connections as the endpoint takes, none of which reads a byte.
#[tokio::test]
async fn clients_that_read_nothing_do_not_keep_the_others_out() {
    let overlay = Overlay::new(hermes()).unwrap();
    // `/config` of so many bytes, asked for so often, fits into no buffer on the way.
    let document = "
listeners:
- {name: in, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: all, respond: {body: $LONG}}
";
    let node = overlay.node("edge").document(document).with("LONG", "x".repeat(1 << 18)).start().await.unwrap();
    let requests = "GET /config HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(60);
    let mut deaf = Vec::new();
    for _ in 0..64 {
        let mut stream = TcpStream::connect(node.admin()).await.unwrap();
        stream.write_all(requests.as_bytes()).await.unwrap();
        deaf.push(stream);
    }
    // For as long as the test is patient, which is three times what a client may take.
    assert_eq!(node.ask("/healthz").await.unwrap().0, 200);
    drop(deaf);
}
