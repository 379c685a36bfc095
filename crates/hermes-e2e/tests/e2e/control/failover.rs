//! Nodes go on by what they see: no controller is alive, and one node after the other is killed.
//!
//! In: a device, two ingresses of which one has the longer way, and a service that lives at two nodes, with kill -9. Out: requests
//! under load all the time, and new tunnels after each death. What must hold: no more fails than is under way at the node that dies,
//! and when it is back sessions go its way again.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use hermes_testkit::origin::{self, Origin, http, stream};
use hermes_testkit::process::Running;
use hermes_testkit::traffic::Traffic;

use hermes_testkit::control::{ControllerFixture, sigkill, until};

/// Clients under load, each of which has one request under way.
const CLIENTS: usize = 4;
const NODES: [&str; 6] = ["device", "in-1", "in-2", "long", "near", "far"];

struct Scene {
    fixture: ControllerFixture,
    traffic: Traffic,
    nodes: BTreeMap<&'static str, Running>,
    _origins: Vec<Origin>,
}

impl Scene {
    /// All is well, and the controller is dead.
    async fn new(links: &str) -> Self {
        let mut fixture = ControllerFixture::new().await;
        let listen = |port| origin::listen(fixture.socket(port)).unwrap();
        let app = |port, name: &str| http::serve(listen(port), http::Version::H1, name.to_owned().into()).unwrap();
        let origins = vec![
            app(7001, "near"),
            app(7002, "far"),
            stream::echo(listen(7003)).unwrap(),
            stream::echo(listen(7004)).unwrap(),
        ];
        fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, links));
        let mut nodes = BTreeMap::new();
        for name in NODES {
            nodes.insert(name, fixture.node(name, Some(&fixture.token(name))));
        }
        let running = || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count();
        until("all nodes are there", || running() == NODES.len()).await;
        fixture.until_answers("APP", "near").await;
        let mut traffic = Traffic::default();
        for _ in 0..CLIENTS / 2 {
            traffic.one_shot(fixture.socket(8080), "APP", "/");
            traffic.keep_alive(fixture.socket(8080), "APP", "/");
        }
        traffic.progress(5).await;
        let output = fixture.hermes_ok(&["explain", "--controller", "--node", "device", "--authority", "APP"], "");
        assert!(output.contains("\n  next      in-1\n  else      in-2\nin-1\n"), "{output}");
        fixture.kill_controller();
        Self { fixture, traffic, nodes, _origins: origins }
    }

    fn failed(&self) -> u64 {
        self.traffic.report().done.values().map(|done| done.failed).sum()
    }

    /// Kills it under load. From now on this one answers, and requests as well as new tunnels go on.
    async fn kill(&mut self, name: &'static str, answers: &str) {
        let before = self.failed();
        sigkill(self.nodes.remove(name).unwrap());
        self.traffic.progress(20).await;
        let failed = self.failed() - before;
        let report = self.traffic.report();
        assert!(failed <= CLIENTS as u64, "{failed} requests failed when {name} died: {report}");
        println!("{name} died: {failed} requests failed");
        self.tunnel();
        assert_eq!(self.fixture.get("APP"), Some((200, answers.to_owned())), "{name} is dead");
    }

    /// It starts from what it kept, and sessions come to it again.
    async fn restart(&mut self, name: &'static str, answers: &str) {
        let before = self.failed();
        self.nodes.insert(name, self.fixture.node(name, None));
        self.fixture.until_answers("APP", answers).await;
        self.traffic.progress(20).await;
        self.tunnel();
        assert_eq!(self.failed(), before, "nothing fails when {name} comes back: {}", self.traffic.report());
    }

    /// Bytes there and back.
    fn tunnel(&self) {
        let mut stream = TcpStream::connect(self.fixture.socket(8080)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"CONNECT ECHO:7 HTTP/1.1\r\nhost: ECHO:7\r\n\r\n").unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let head = String::from_utf8_lossy(&head);
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        stream.write_all(b"there and back").unwrap();
        let mut back = [0; 14];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"there and back");
    }
}

/// From the device by the first ingress, which has these links, to the near replica; by the second one, and one more node, to the
/// far one.
fn documents(fixture: &ControllerFixture, links: &str) -> String {
    let node = |name: &str, port: u16, more: &str| {
        format!(
            "---\n{{kind: Node, name: {name}, workers: 1, address: \"{0}\", bind: \"{0}\"{more}}}\n",
            fixture.socket(port)
        )
    };
    let at = |word: &str, near: u16, far: u16| {
        let (near, far) = (fixture.socket(near), fixture.socket(far));
        format!("at: [{{node: near, {word}: \"{near}\"}}, {{node: far, {word}: \"{far}\"}}], for: {{users: ann}}")
    };
    [
        "kind: Overlay\nname: test\nnodes: {health: {interval: 200ms, healthy: 1}}\n".to_owned(),
        format!(
            "---\n{{kind: Node, name: device, workers: 1, links: [in-1, in-2], apps: {{bind: \"{}\"}}}}\n",
            fixture.socket(8080)
        ),
        node("in-1", 9443, &format!(", role: standalone, links: {links}")),
        node("in-2", 9444, ", role: standalone, links: long"),
        node("long", 9445, ", role: standalone, links: far"),
        node("near", 9446, ""),
        node("far", 9447, ""),
        "---\n{kind: User, name: ann, nodes: device}\n".to_owned(),
        format!("---\n{{kind: Service, name: APP, {}}}\n", at("http", 7001, 7002)),
        format!("---\n{{kind: Service, name: ALL, {}}}\n", at("http", 7001, 7002).replace("{users: ann}", "everyone")),
        format!("---\n{{kind: Service, name: ECHO, authority: \"ECHO:7\", {}}}\n", at("tcp", 7003, 7004)),
    ]
    .concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_a_controller_use_alternate_paths() {
    let mut scene = Scene::new("[near, long]").await;
    // A replica that is further away.
    scene.kill("near", "far").await;
    scene.restart("near", "near").await;
    // A longer way.
    scene.kill("in-1", "far").await;
    // The near replica is on no way that is left.
    scene.kill("near", "far").await;
    scene.restart("near", "far").await;
    scene.restart("in-1", "near").await;
    // What is an alternate alone may die and come back.
    scene.kill("long", "near").await;
    scene.restart("long", "near").await;
    let report = std::mem::take(&mut scene.traffic).finish().await;
    println!("{report}");
    // The device itself starts from what it kept.
    sigkill(scene.nodes.remove("device").unwrap());
    scene.nodes.insert("device", scene.fixture.node("device", None));
    scene.fixture.until_answers("APP", "near").await;
    scene.tunnel();
    // Two nodes that stand in for each other, and the service is dead: what is said is why, and not that it came round.
    scene.fixture.until_answers("ALL", "near").await;
    for name in ["near", "far"] {
        sigkill(scene.nodes.remove(name).unwrap());
    }
    for _ in 0..10 {
        let (status, text) = scene.fixture.get("ALL").unwrap();
        assert!(matches!(status, 502 | 503), "{status}: {text}");
    }
}

/// The first ingress has no other way than the one that is dead, and says so: the device has one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_a_node_cannot_forward_use_another_node() {
    let mut scene = Scene::new("near").await;
    scene.kill("near", "far").await;
    scene.restart("near", "near").await;
    // Neither has one: what the client is told is no riddle.
    scene.kill("near", "far").await;
    sigkill(scene.nodes.remove("far").unwrap());
    until("nobody answers", || scene.fixture.get("APP").is_some_and(|(status, _)| matches!(status, 502 | 503))).await;
    let report = std::mem::take(&mut scene.traffic).finish().await;
    assert!(report.failures.iter().all(|failure| failure.contains(" 502 ") || failure.contains(" 503 ")), "{report}");
}

/// The values of a metric at a node, of all lines that have these words.
fn metric(fixture: &ControllerFixture, port: u16, words: &[&str]) -> Vec<f64> {
    let ask = || {
        let mut stream = TcpStream::connect(fixture.socket(port))?;
        write!(stream, "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text).map(|_| text)
    };
    let text = ask().unwrap_or_default();
    let lines = text.lines().filter(|line| words.iter().all(|word| line.contains(word)));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect()
}

/// A node whose process hangs takes connections all the same: the kernel does. Who asks it is not fooled, and many questions to a
/// node that lives are one connection and no handshake that fails.
#[tokio::test]
async fn a_node_that_hangs_is_found_out_and_one_that_lives_is_asked_cheaply() {
    const PROBES: usize = 20;
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "app");
    let node = |name: &str, port: u16, more: &str| {
        let (at, admin) = (fixture.socket(port), fixture.socket(port + 100));
        format!(
            "---\n{{kind: Node, name: {name}, workers: 1, address: \"{at}\", bind: \"{at}\", admin: \"{admin}\"{more}}}\n"
        )
    };
    let health = format!("{{interval: 100ms, healthy: {PROBES}, unhealthy: 2}}");
    let documents = [
        "kind: Overlay\nname: test\n".to_owned(),
        format!(
            "---\n{{kind: Node, name: device, workers: 1, links: [left, right], apps: {{bind: \"{}\"}}, admin: \"{}\", \
             health: {health}}}\n",
            fixture.socket(8080),
            fixture.socket(9500)
        ),
        node("left", 9443, ", role: standalone, links: server"),
        node("right", 9444, ", role: standalone, links: server"),
        node("server", 9445, ""),
        "---\n{kind: User, name: ann, nodes: device}\n".to_owned(),
        format!(
            "---\n{{kind: Service, name: APP, at: {{node: server, http: \"{}\"}}, for: {{users: ann}}}}\n",
            fixture.socket(7001)
        ),
    ];
    fixture.hermes_ok(&["apply", "-f", "-"], &documents.concat());
    let _others = ["device", "right", "server"].map(|name| fixture.node(name, Some(&fixture.token(name))));
    let left = fixture.socket(9443).to_string();
    let is_healthy = |wanted: f64| metric(&fixture, 9500, &["hermes_upstream_healthy", &left]) == [wanted];
    fixture.until_answers("APP", "app").await;
    until("a node that is not there is known to be away", || is_healthy(0.0)).await;
    let node = fixture.node("left", Some(&fixture.token("left")));
    until("it is asked often enough to be believed", || is_healthy(1.0)).await;
    let made = metric(&fixture, 9543, &["hermes_connections_total", "overlay"]);
    // On a loaded machine, a probe that is late costs a connection.
    assert!(made.len() == 1 && made[0] <= 6.0, "{PROBES} probes made {made:?} connections");
    let failed = metric(&fixture, 9543, &["hermes_handshake_failures_total", "overlay"]);
    assert!(failed.iter().sum::<f64>() == 0.0, "{failed:?} handshakes failed");
    let pid = Pid::from_raw(i32::try_from(node.pid()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    until("a node that hangs is found out", || is_healthy(0.0)).await;
    for _ in 0..10 {
        assert_eq!(fixture.get("APP"), Some((200, "app".to_owned())));
    }
    kill(pid, Signal::SIGCONT).unwrap();
    until("it is well again", || is_healthy(1.0)).await;
}
