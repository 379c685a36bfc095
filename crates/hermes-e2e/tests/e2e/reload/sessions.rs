//! What becomes of live sessions: those that the new document allows live on, exactly the others end, flows move.

use std::time::Duration;

use hermes_testkit::{
    origin::{self, Origin, datagram::UdpEcho, http, stream},
    overlay::Node,
    poll::until,
    raw_http1::RawHttp1,
};
use tokio::net::UdpSocket;

use crate::reload::{connect, echoes, get, loopback, overlay};

const TUNNELS: &str = "
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
- {name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'RAW:1'}
routes:
- {name: slow, match: {authority: APP}, upstream: web}
$ROUTES
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB']}
";

struct Fixture {
    overlay: hermes_testkit::overlay::Overlay,
    echoes: [Origin; 2],
    web: Origin,
}

impl Fixture {
    fn new() -> Self {
        let echo = || stream::echo(origin::listen(loopback()).unwrap()).unwrap();
        let web = origin::listen(loopback()).unwrap();
        let web = http::serve(web, http::Version::H1, bytes::Bytes::from_static(b"web")).unwrap();
        Self { overlay: overlay(), echoes: [echo(), echo()], web }
    }

    fn values(&self, routes: &str) -> Vec<(&'static str, String)> {
        let [one, other] = [0, 1].map(|number: usize| self.echoes[number].address().to_string());
        vec![("ROUTES", routes.to_owned()), ("ECHO", one), ("OTHER", other), ("WEB", self.web.address().to_string())]
    }

    async fn start(&self, document: &str, routes: &str) -> Node {
        let mut draft = self.overlay.node("near").document(document);
        // Routes first: they name the others.
        for (name, value) in self.values(routes) {
            draft = draft.with(name, value);
        }
        draft.start().await.unwrap()
    }

    async fn reload(&self, node: &mut Node, document: &str, routes: &str) {
        node.reload(document, &self.values(routes)).await.unwrap();
    }
}

const RED: &str = "- {name: red, match: {kind: tcp, authority: 'RED:1'}, terminate: {tcp: '$ECHO'}}";
const GREEN: &str = "- {name: green, match: {kind: tcp, authority: 'GREEN:1'}, terminate: {tcp: '$ECHO'}}";
const RAW: &str = "- {name: raw, match: {kind: tcp, authority: 'RAW:1'}, terminate: {tcp: '$ECHO'}}";

fn filled(fixture: &Fixture, routes: &[&str]) -> String {
    fixture.values("").iter().fold(routes.join("\n"), |text, (name, value)| text.replace(&format!("${name}"), value))
}

#[tokio::test]
async fn exactly_the_sessions_that_are_no_longer_allowed_end() {
    let fixture = Fixture::new();
    let mut node = fixture.start(TUNNELS, &filled(&fixture, &[RED, GREEN, RAW])).await;
    let apps = node.address("apps");
    let (mut red, mut green) = (connect(apps, "RED:1").await, connect(apps, "GREEN:1").await);
    let mut raw = RawHttp1::connect(node.address("db")).await.unwrap();
    for tunnel in [&mut red, &mut green, &mut raw] {
        assert!(echoes(tunnel, b"one").await);
    }
    fixture.reload(&mut node, TUNNELS, &filled(&fixture, &[GREEN, RAW])).await;
    assert!(red.is_ended().await);
    assert!(echoes(&mut green, b"two").await && echoes(&mut raw, b"two").await);
    let record = node.record(|record| record["authority"] == "red:1").await;
    assert_eq!(record["error"], "proxy_configuration_error", "{record}");
    assert!(record["reason"].as_str().unwrap().contains("no route"), "{record}");

    // Byte streams never move: they stay with their old target.
    fixture.reload(&mut node, TUNNELS, &filled(&fixture, &[&GREEN.replace("$ECHO", "$OTHER"), RAW])).await;
    assert!(echoes(&mut green, b"three").await && echoes(&mut raw, b"three").await);
    // A route that answers refuses tunnels.
    let refuses = "- {name: green, match: {authority: 'GREEN:1'}, respond: {status: 403}}";
    fixture.reload(&mut node, TUNNELS, &filled(&fixture, &[refuses, RAW])).await;
    assert!(green.is_ended().await);
    assert!(echoes(&mut raw, b"four").await);
    // A route of another name that allows the same is as good.
    fixture.reload(&mut node, TUNNELS, &filled(&fixture, &[&RAW.replace("name: raw", "name: bare")])).await;
    assert!(echoes(&mut raw, b"five").await);
    fixture.reload(&mut node, TUNNELS, "").await;
    assert!(raw.is_ended().await);
    node.quiet().await;
}

#[tokio::test]
async fn a_reload_ends_denied_responses_but_not_rerouted_ones() {
    let fixture = Fixture::new();
    let mut node = fixture.start(TUNNELS, "").await;
    let apps = node.address("apps");
    let mut download = RawHttp1::connect(apps).await.unwrap();
    download.send("GET /drip/1000000/10/5 HTTP/1.1\r\nhost: APP\r\n\r\n").await.unwrap();
    assert_eq!(download.head().await.unwrap().status(), 200);
    assert!(download.chunk().await.unwrap().is_some());
    let elsewhere = TUNNELS.replace("upstream: web}", "respond: {body: maintenance, status: 503}}");
    fixture.reload(&mut node, &elsewhere, "").await;
    assert_eq!(get(apps, "APP", "/").await.unwrap(), (503, "maintenance".to_owned()));
    for _ in 0..5 {
        assert!(download.chunk().await.unwrap().is_some(), "what runs may finish");
    }
    fixture.reload(&mut node, &TUNNELS.replace("upstream: web}", "respond: {status: 403}}"), "").await;
    // What was sent before may still come.
    while download.chunk().await.is_ok() {}
    let record = node.record(|record| record["path"] == "/drip/1000000/10/5").await;
    assert_eq!(record["error"], "proxy_configuration_error", "{record}");
}

const FLOWS: &str = "
listeners:
- {name: video, bind: '127.0.0.1:0', protocol: udp, authority: 'VIDEO:1'}
- {name: fixed, bind: '127.0.0.1:0', protocol: udp, authority: 'FIXED:1'}
routes:
- {name: moves, match: {kind: udp, authority: 'VIDEO:1'}, on-change: move, $ACTION}
- {name: stays, match: {kind: udp, authority: 'FIXED:1'}, $ACTION}
upstreams:
- {name: far, protocol: h2, overlay: true, endpoints: ['$FAR']}
- {name: dead, protocol: h2, overlay: true, endpoints: ['127.0.0.1:9']}
- {name: closed, protocol: h2, overlay: true, endpoints: ['$CLOSED']}
";

const FAR: &str = "
listeners:
- {name: overlay, bind: '127.0.0.1:0', protocol: http, trust: 127.0.0.0/8}
- {name: closed, bind: '127.0.0.1:0', protocol: http, trust: 127.0.0.0/8}
routes:
- {name: closed, match: {listener: closed}, respond: {status: 503}}
- {name: end, match: {kind: udp}, terminate: {udp: '$FAR_END'}}
";

struct FlowClient(UdpSocket, u32);

impl FlowClient {
    async fn new(to: std::net::SocketAddr) -> Self {
        let socket = UdpSocket::bind(loopback()).await.unwrap();
        socket.connect(to).await.unwrap();
        Self(socket, 0)
    }

    /// Sends one datagram and tells whose label it came back with.
    async fn who(&mut self) -> String {
        self.1 += 1;
        let words = format!("|{}", self.1);
        self.0.send(words.as_bytes()).await.unwrap();
        let mut room = [0; 64];
        let received = tokio::time::timeout(Duration::from_secs(10), self.0.recv(&mut room));
        let length = received.await.expect("a datagram was lost").unwrap();
        let text = String::from_utf8_lossy(&room[..length]).into_owned();
        text.strip_suffix(&words).unwrap_or_else(|| panic!("{text} is no answer to {words}")).to_owned()
    }
}

#[tokio::test]
async fn flows_move_if_their_route_says_so_and_lose_nothing() {
    let overlay = overlay();
    let [one, two, three] = ["one", "two", "three"].map(|label| UdpEcho::start(loopback(), label).unwrap());
    let far = overlay.node("far").document(FAR).with("FAR_END", three.address()).start().await.unwrap();
    let terminate = |echo: &UdpEcho| format!("terminate: {{udp: '{}'}}", echo.address());
    let near = overlay.node("near").document(FLOWS).with("ACTION", terminate(&one));
    let places = [("FAR", far.address("overlay").to_string()), ("CLOSED", far.address("closed").to_string())];
    let near = places.iter().fold(near, |near, (name, address)| near.with(name, address));
    let mut near = near.start().await.unwrap();
    let values = |action: String| [&[("ACTION", action)], &places[..]].concat();
    let mut moving = FlowClient::new(near.address("video")).await;
    let mut staying = FlowClient::new(near.address("fixed")).await;
    assert_eq!((moving.who().await.as_str(), staying.who().await.as_str()), ("one", "one"));
    let modes = [(terminate(&two), "two"), ("upstream: far".to_owned(), "three"), (terminate(&one), "one")];
    for round in 0..3 {
        for (action, label) in &modes {
            near.reload(FLOWS, &values(action.clone())).await.unwrap();
            // Not one datagram is lost on the way, and in the end it has moved.
            for _ in 0..200 {
                if moving.who().await == *label {
                    break;
                }
            }
            assert_eq!(moving.who().await, *label, "round {round}");
            assert_eq!(staying.who().await, "one");
        }
    }
    // The new place cannot be had: the flow stays, and the next change finds it.
    for (nowhere, failed) in [("upstream: dead", 1), ("upstream: closed", 2)] {
        near.reload(FLOWS, &values(nowhere.to_owned())).await.unwrap();
        until("the move fails", || async { near.log().matches("cannot move a flow").count() >= failed }).await;
        assert_eq!(moving.who().await, "one");
    }
    near.reload(FLOWS, &values(terminate(&two))).await.unwrap();
    for _ in 0..200 {
        if moving.who().await == "two" {
            break;
        }
    }
    assert_eq!(moving.who().await, "two");
    // What was moved away from ends in order: it is no failure to anybody.
    let record = far.record(|record| record["kind"] == "udp" && record["listener"] == "overlay").await;
    assert!(record.get("error").is_none(), "{record}");
    // Nor does a flow end because of a place that once did not take it.
    let not_allowed = FLOWS.replace("authority: 'VIDEO:1'}, on-change", "authority: 'OTHER:1'}, on-change");
    near.reload(&not_allowed, &values(terminate(&two))).await.unwrap();
    let record = near.record(|record| record["listener"] == "video").await;
    assert_eq!(record["error"], "proxy_configuration_error", "{record}");
}

const CHECKED: &str = "
access-log: off
listeners:
- {name: apps, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: web, match: {authority: APP}, upstream: web}
- {name: number, respond: {body: '$NUMBER'}}
upstreams:
- {name: web, protocol: h1, endpoints: ['$WEB', '127.0.0.1:9'], health: {interval: 400ms, unhealthy: 2}}
";

/// Reloads that come faster than health checks must not keep them from coming to a result.
#[tokio::test]
async fn health_checks_continue_across_reloads() {
    let fixture = Fixture::new();
    let values = |number: u32| vec![("WEB", fixture.web.address().to_string()), ("NUMBER", number.to_string())];
    let draft = fixture.overlay.node("near").document(CHECKED).with("WEB", fixture.web.address()).with("NUMBER", 0);
    let node = draft.start().await.unwrap();
    let apps = node.address("apps");
    let mut number = 0;
    until("the dead endpoint is found out", || {
        number += 1;
        node.replace(CHECKED, &values(number)).unwrap();
        let node = &node;
        async move {
            until("it is applied", || async { get(apps, "N", "/").await.unwrap().1 == number.to_string() }).await;
            let of = |endpoint: &str| format!("upstream=\"web\",endpoint=\"{endpoint}\"");
            let (_, text) = node.ask("/metrics").await.unwrap();
            text.contains(&format!("hermes_upstream_healthy{{{}}} 0", of("127.0.0.1:9")))
        }
    })
    .await;
    // And nothing is told of what is gone.
    node.replace(&CHECKED.replace(", '127.0.0.1:9'", ""), &values(9999)).unwrap();
    until("the dead endpoint is forgotten", || async {
        let (_, text) = node.ask("/metrics").await.unwrap();
        let metrics: Vec<&str> = text.lines().filter(|line| line.starts_with("hermes_upstream_healthy{")).collect();
        matches!(metrics.as_slice(), [one] if one.ends_with(" 1"))
    })
    .await;
}
