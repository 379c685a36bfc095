//! aioquic and curl as they are: before a node that speaks HTTP/3, and aioquic behind one.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use hermes_testkit::{
    ca::{IdentityFiles, Subject},
    flow::FlowMode,
    listener_client::{ListenerClient, NODE_NAME, TunnelMode},
    origin::{self, Origin, http, stream},
    overlay::{Node, Overlay},
    python::{self, AIOQUIC_CLIENT, AIOQUIC_ORIGIN, CURL, Script, Server},
    skip::skip,
    transfer::{self, Version},
};
use rand::{SeedableRng as _, rngs::SmallRng};
use serde_json::{Value, json};

use crate::h3::lab::{ANY, overlay};

const MIB: usize = 1 << 20;

/// Where a script's package is; `None` where it is not, which is said loudly.
fn tools(test: &str, script: Script) -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    python::find(target, script).inspect_err(|error| skip(test, &error.to_string())).ok()
}

/// A node before origins of every kind.
struct Fixture {
    overlay: Overlay,
    node: Node,
    _origins: [Origin; 4],
}

const DOCUMENT: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: optional}}
routes:
- {name: tcp, match: {kind: tcp, authority: 'ECHO:7'}, terminate: {tcp: '$ECHO'}}
- {name: udp, match: {kind: udp, authority: 'ECHO:7'}, terminate: {udp: '$UDP'}}
- {name: alice, match: {authority: WHO, user: alice}, respond: {body: alice}}
- {name: who, match: {authority: WHO}, respond: {body: nobody}}
- {name: web-h1, match: {kind: http, authority: 'WEB-H1:*'}, upstream: web-h1}
- {name: web-h2, match: {kind: http, authority: 'WEB-H2:*'}, upstream: web-h2}
- {name: web, match: {kind: http, authority: 'node.test:*'}, upstream: web-h2}
upstreams:
- {name: web-h1, protocol: h1, overlay: false, endpoints: ['$H1']}
- {name: web-h2, protocol: h2, overlay: false, endpoints: ['$H2']}
";

impl Fixture {
    async fn start() -> Self {
        let web = |version| http::serve(origin::listen(ANY).unwrap(), version, Bytes::new()).unwrap();
        let echo = stream::echo(origin::listen(ANY).unwrap()).unwrap();
        let origins = [echo, Origin::udp_echo(ANY).unwrap(), web(http::Version::H1), web(http::Version::H2)];
        let overlay = overlay();
        let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
        let [echo, udp, h1, h2] = origins.each_ref().map(Origin::address);
        let draft = draft.document(DOCUMENT).with("ECHO", echo).with("UDP", udp).with("H1", h1).with("H2", h2);
        Self { node: draft.start().await.unwrap(), overlay, _origins: origins }
    }

    fn ca(&self) -> String {
        let ca = self.overlay.dir().join("peers-ca.pem");
        std::fs::write(&ca, self.overlay.authority().pem()).unwrap();
        ca.display().to_string()
    }

    /// What came of each question of aioquic's, on one connection.
    async fn aioquic(&self, tools: &Path, identity: Option<&IdentityFiles>, ask: Value) -> Vec<Value> {
        let address = self.node.address("door");
        let mut task = json!({
            "host": address.ip(), "port": address.port(), "name": NODE_NAME, "ca": self.ca(), "ask": ask,
        });
        if let Some(files) = identity {
            (task["cert"], task["key"]) = (json!(files.cert), json!(files.key));
        }
        let answers = python::run(AIOQUIC_CLIENT, tools, &task).await.unwrap();
        answers.as_array().unwrap().clone()
    }

    /// What came of each question of curl's.
    async fn curl(&self, tools: &Path, ask: Value) -> Vec<Value> {
        let port = self.node.address("door").port();
        let resolve = [format!("{NODE_NAME}:{port}:127.0.0.1")];
        let task = json!({"ca": self.ca(), "resolve": resolve, "ask": ask});
        python::run(CURL, tools, &task).await.unwrap().as_array().unwrap().clone()
    }

    fn url(&self, path: &str) -> String {
        format!("https://{NODE_NAME}:{}{path}", self.node.address("door").port())
    }
}

#[tokio::test]
async fn aioquic_asks() {
    let Some(tools) = tools("aioquic_asks", AIOQUIC_CLIENT) else { return };
    let fixture = Fixture::start().await;
    let sizes = [0, 1, 65_536, MIB];
    for web in ["WEB-H1", "WEB-H2"] {
        let mut ask: Vec<Value> = sizes.iter().map(|size| json!(["post", web, "/echo", size])).collect();
        ask.push(json!(["get", web, "/upload"]));
        let answers = fixture.aioquic(&tools, None, json!(ask)).await;
        for (size, answer) in sizes.iter().zip(&answers) {
            assert_eq!((&answer["status"], &answer["same"]), (&json!(200), &json!(true)), "{size} to {web}: {answer}");
            assert_eq!(answer["bytes"], *size, "{web}");
            if web == "WEB-H2" {
                assert_eq!(answer["trailers"]["x-trailer"], "yes", "{size} to {web}: {answer}");
            }
        }
        assert!(answers[4]["body"].as_str().is_some_and(|text| text.contains("digest")), "{web}: {}", answers[4]);
    }
}

#[tokio::test]
async fn aioquic_tunnels() {
    let Some(tools) = tools("aioquic_tunnels", AIOQUIC_CLIENT) else { return };
    let fixture = Fixture::start().await;
    let sizes = [0, 1, 65_536, MIB];
    let ask: Vec<Value> = sizes.iter().map(|size| json!(["tunnel", "ECHO:7", size])).collect();
    for (size, answer) in sizes.iter().zip(fixture.aioquic(&tools, None, json!(ask)).await) {
        assert_eq!(answer, json!({"status": 200, "same": true, "bytes": size}));
    }
    let refused = fixture.aioquic(&tools, None, json!([["tunnel", "NOBODY:7", 1]])).await;
    assert_eq!(refused[0], json!({"status": 404}));
}

#[tokio::test]
async fn aioquic_sends_flows_by_datagrams_and_by_capsules() {
    let Some(tools) = tools("aioquic_sends_flows", AIOQUIC_CLIENT) else { return };
    let fixture = Fixture::start().await;
    let (small, large) = ([0, 1, 500, 1100], [1, 5000, 60_000]);
    let ask = json!([["flow", "ECHO", 7, small, "datagrams"], ["flow", "ECHO", 7, large, "capsules"]]);
    let answers = fixture.aioquic(&tools, None, ask).await;
    for answer in &answers {
        let output = (&answer["status"], &answer["same"], &answer["ended"], &answer["offered"]);
        assert_eq!(output, (&json!(200), &json!(true), &json!("end"), &json!(1)), "{answer}");
        assert_eq!(answer["head"]["capsule-protocol"], "?1", "{answer}");
    }
    assert_eq!(answers[0]["came"], json!({"datagrams": 4, "capsules": 0}));
    // What fits no packet comes in a capsule.
    assert_eq!(answers[1]["came"], json!({"datagrams": 1, "capsules": 2}));
}

#[tokio::test]
async fn aioquic_is_known_by_its_certificate() {
    let Some(tools) = tools("aioquic_is_known", AIOQUIC_CLIENT) else { return };
    let fixture = Fixture::start().await;
    let identity = fixture.overlay.authority().issue(&Subject::node("laptop").with_user("alice")).unwrap();
    let files = identity.write(fixture.overlay.dir(), "laptop").unwrap();
    let ask = json!([["get", "WHO", "/"]]);
    assert_eq!(fixture.aioquic(&tools, None, ask.clone()).await[0]["body"], "nobody");
    assert_eq!(fixture.aioquic(&tools, Some(&files), ask).await[0]["body"], "alice");
}

#[tokio::test]
async fn curl_asks_over_every_version() {
    let Some(tools) = tools("curl_asks", CURL) else { return };
    let fixture = Fixture::start().await;
    for version in ["1.1", "2", "3"] {
        let ask = json!([
            {"url": fixture.url("/bytes/1000000"), "version": version},
            {"url": fixture.url("/echo"), "version": version, "body": 3 * MIB},
            {"url": fixture.url("/echo"), "version": version, "body": 0},
            {"url": fixture.url("/bytes/1000"), "version": version, "headers": ["Cookie: a=b; c=d"]},
        ]);
        let answers = fixture.curl(&tools, ask).await;
        for answer in &answers {
            assert_eq!((&answer["status"], &answer["version"]), (&json!(200), &json!(version)), "{answer}");
        }
        assert_eq!(answers[0]["bytes"], 1_000_000, "{version}");
        assert_eq!((&answers[1]["same"], &answers[1]["bytes"]), (&json!(true), &json!(3 * MIB)), "{version}");
    }
}

#[tokio::test]
async fn curl_follows_to_http_3() {
    let Some(tools) = tools("curl_follows", CURL) else { return };
    let fixture = Fixture::start().await;
    let ask = json!({"url": fixture.url("/bytes/1000"), "version": "any", "alt_svc": true});
    let answers = fixture.curl(&tools, json!([ask, ask])).await;
    let versions = answers.iter().map(|answer| (&answer["status"], &answer["version"])).collect::<Vec<_>>();
    assert_eq!(versions, [(&json!(200), &json!("2")), (&json!(200), &json!("3"))], "{answers:?}");
}

/// A node before aioquic.
struct Before {
    node: Node,
    _overlay: Overlay,
    _origin: Server,
}

const BEFORE: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, http3: true, tls: {client: none}}
- {name: raw, bind: '127.0.0.1:0', protocol: tcp, authority: 'FAR:7'}
- {name: raw-udp, bind: '127.0.0.1:0', protocol: udp, authority: 'FAR:7'}
routes:
- {name: all, upstream: far}
upstreams:
- {name: far, protocol: h3, overlay: false, endpoints: ['127.0.0.1:$PORT'], tls: {server-name: node.test, ca: $CA}}
";

impl Before {
    async fn start(test: &str, more: &[&str]) -> Option<(Self, ListenerClient)> {
        let tools = tools(test, AIOQUIC_ORIGIN)?;
        let overlay = overlay();
        let identity = overlay.authority().issue(&Subject::server(NODE_NAME)).unwrap();
        let origin = python::serve(AIOQUIC_ORIGIN, &tools, &identity, overlay.dir(), more).await.unwrap();
        let draft = overlay.node("edge").identity(&Subject::node("edge").with_dns(NODE_NAME)).unwrap();
        let draft = draft.document(BEFORE).with("PORT", origin.port);
        let ca = overlay.dir().join("ca.pem");
        let node = draft.with("CA", ca.display()).start().await.unwrap();
        let client = ListenerClient::tls(node.address("door"), overlay.authority().pem(), None);
        Some((Self { node, _overlay: overlay, _origin: origin }, client))
    }

    fn udp(&self, mode: FlowMode, client: &ListenerClient) -> ListenerClient {
        if mode == FlowMode::Raw { ListenerClient::plain(self.node.address("raw-udp")) } else { client.clone() }
    }
}

#[tokio::test]
async fn aioquic_answers() {
    let Some((_bed, client)) = Before::start("aioquic_answers", &[]).await else { return };
    let connection = client.h3().await.unwrap();
    let answer = connection.get("https://FAR/some/path?a=b").await.unwrap();
    let answer: Value = serde_json::from_str(&answer.text()).unwrap();
    assert_eq!(answer["head"][":path"], "/some/path?a=b", "{answer}");
    assert_eq!((&answer["head"][":authority"], &answer["head"]["via"]), (&json!("FAR"), &json!("3 edge")), "{answer}");
    for size in [0, 1, 65_536, MIB] {
        let sent: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
        let request = ::http::Request::post("https://FAR/echo").body(()).unwrap();
        let answer = connection.ask(&request, &sent).await.unwrap();
        assert_eq!((answer.status, answer.data == sent), (200, true), "{size} bytes over HTTP/3");
        assert_eq!(answer.trailer("x-trailer").as_deref(), Some("back"));
        let request = ::http::Request::post("https://FAR/echo").body(()).unwrap();
        let answer = client.h2().await.unwrap().ask(request, &sent).await.unwrap();
        assert_eq!((answer.status, answer.data == sent), (200, true), "{size} bytes over HTTP/2");
        assert_eq!(answer.trailer("x-trailer").as_deref(), Some("back"));
    }
    let mut http1 = client.h1().await.unwrap();
    http1.send("GET /bytes/100000 HTTP/1.1\r\nhost: FAR\r\n\r\n").await.unwrap();
    let head = http1.head().await.unwrap();
    assert_eq!(http1.body(&head).await.unwrap().data.len(), 100_000);
}

#[tokio::test]
async fn aioquic_ends_tunnels() {
    let Some((fixture, client)) = Before::start("aioquic_ends_tunnels", &[]).await else { return };
    let mut rng = SmallRng::seed_from_u64(1);
    for mode in [TunnelMode::Raw, TunnelMode::ConnectH1, TunnelMode::ConnectH2, TunnelMode::ConnectH3] {
        let client =
            if mode == TunnelMode::Raw { ListenerClient::plain(fixture.node.address("raw")) } else { client.clone() };
        for size in [0, 1, 65_536, MIB] {
            transfer::echo(&client, mode, "FAR:7", size, &mut rng)
                .await
                .unwrap_or_else(|error| panic!("{size} bytes by {mode:?}: {error}"));
        }
    }
}

#[tokio::test]
async fn aioquic_ends_flows_with_and_without_datagrams() {
    for more in [&[][..], &["--no-datagrams"]] {
        let Some((fixture, client)) = Before::start("aioquic_ends_flows", more).await else { return };
        let mut rng = SmallRng::seed_from_u64(2);
        for mode in [FlowMode::Raw, FlowMode::UpgradeH1, FlowMode::ConnectH2, FlowMode::ConnectH3] {
            if let Err(error) = transfer::datagrams(&fixture.udp(mode, &client), mode, "FAR", 60, &mut rng).await {
                let (_, metrics) = fixture.node.ask("/metrics").await.unwrap();
                let dropped: Vec<_> = metrics.lines().filter(|line| line.starts_with("hermes_datagrams")).collect();
                panic!("datagrams by {mode:?} with {more:?}: {error}; {dropped:?}");
            }
        }
    }
}

/// Bytes by every version of a client to an origin over HTTP/3 that is the testkit's own are in `bytes`; here the
/// far end is a stranger.
#[tokio::test]
async fn downloads_from_aioquic_by_every_version() {
    let Some((_bed, client)) = Before::start("downloads_from_aioquic", &[]).await else { return };
    for version in [Version::H1, Version::H2, Version::H3] {
        let text = match version {
            Version::H3 => client.h3().await.unwrap().get("https://FAR/bytes/2000000").await.unwrap().data,
            Version::H2 => client.h2().await.unwrap().get("https://FAR/bytes/2000000").await.unwrap().data,
            Version::H1 => {
                let mut http1 = client.h1().await.unwrap();
                http1.send("GET /bytes/2000000 HTTP/1.1\r\nhost: FAR\r\n\r\n").await.unwrap();
                let head = http1.head().await.unwrap();
                http1.body(&head).await.unwrap().data
            }
        };
        assert_eq!((text.len(), text.iter().all(|byte| *byte == b'x')), (2_000_000, true), "{version:?}");
    }
}
