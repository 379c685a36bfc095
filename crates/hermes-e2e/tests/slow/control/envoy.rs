//! A real Envoy as the standalone node between a device and a server: what passes, what does not, and what changes.

use hermes_testkit::binary::hermes;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use bytes::Bytes;
use hermes_testkit::ca::{Authority, Subject};
use hermes_testkit::flow::FlowMode;
use hermes_testkit::listener_client::{ListenerClient, TunnelMode};
use hermes_testkit::origin::{self, Origin, http};
use hermes_testkit::process::{Program, Running};
use hermes_testkit::skip::skip;
use hermes_testkit::traffic::{self, Traffic};
use hermes_testkit::transfer;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

use hermes_testkit::control::{ControllerFixture, sigkill, until};

const MIB: usize = 1 << 20;

/// How Envoy asks for its configuration.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Delta,
    Whole,
}

/// A controller, a device, an Envoy and a server, and origins of each kind behind it.
struct Mixed {
    fixture: ControllerFixture,
    binary: PathBuf,
    laptop: Option<Running>,
    server: Option<Running>,
    envoy: Option<Running>,
    _companion: Running,
    _echo: Origin,
    _udp: Origin,
    _web: Origin,
}

impl Mixed {
    async fn start(test: &str, form: Form, life: &str) -> Option<Self> {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        let binary = hermes_testkit::envoy::find(target).map_err(|error| skip(test, &error.to_string())).ok()?;
        let fixture = ControllerFixture::new().await;
        let echo = origin::stream::echo(origin::listen(fixture.socket(7002)).unwrap()).unwrap();
        let udp = Origin::udp_echo(fixture.socket(7003)).unwrap();
        let web = http::serve(origin::listen(fixture.socket(7004)).unwrap(), http::Version::H1, Bytes::new()).unwrap();
        fixture.origin(7001, "one");
        fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, life));
        let laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
        let server = fixture.node("server", Some(&fixture.token("server")));
        let companion = companion(&fixture);
        until("it is ready", || fixture.log("companion").contains("ready: envoy -c")).await;
        if form == Form::Whole {
            let path = fixture.directory.path().join("ingress/envoy.json");
            let bootstrap = std::fs::read_to_string(&path).unwrap().replace("DELTA_GRPC", "GRPC");
            std::fs::write(path, bootstrap).unwrap();
        }
        let mut this = Self {
            fixture,
            binary,
            laptop: Some(laptop),
            server: Some(server),
            envoy: None,
            _companion: companion,
            _echo: echo,
            _udp: udp,
            _web: web,
        };
        this.start_envoy().await;
        Some(this)
    }

    async fn start_envoy(&mut self) {
        let directory = self.fixture.directory.path();
        let words = ["--concurrency", "2", "--disable-hot-restart", "--log-level", "warning", "-c"];
        let program =
            Program::new("envoy", &self.binary, directory).args(words).args([directory.join("ingress/envoy.json")]);
        self.envoy = Some(program.start().unwrap());
        self.fixture.until_answers("APP", "one").await;
        until("all run what they should", || self.running() == 3).await;
    }

    fn running(&self) -> usize {
        self.fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count()
    }

    fn client(&self) -> ListenerClient {
        ListenerClient::plain(self.fixture.socket(8080))
    }

    /// What somebody gets at Envoy itself, with this certificate: the status, or curl's own.
    fn ask(&self, identity: Option<(&Path, &Path)>, user: Option<&str>, authority: &str) -> Result<u16, i32> {
        let mut command = Command::new("curl");
        command.args(["--silent", "--insecure", "--http2", "--max-time", "20", "--output", "/dev/null"]);
        command.args(["--write-out", "%{http_code}", "--header", &format!("host: {authority}")]);
        if let Some((cert, key)) = identity {
            command.arg("--cert").arg(cert).arg("--key").arg(key);
        }
        for user in user.into_iter().flat_map(|users| users.split(' ')) {
            command.args(["--header", &format!("hermes-user: {user}")]);
        }
        let output = command.arg(format!("https://{}/", self.fixture.socket(9443))).output().unwrap();
        let status = String::from_utf8(output.stdout).unwrap();
        if output.status.success() { Ok(status.parse().unwrap()) } else { Err(output.status.code().unwrap()) }
    }

    fn identity(&self, node: &str) -> (PathBuf, PathBuf) {
        let directory = self.fixture.directory.path().join(node);
        (directory.join("node.pem"), directory.join("node.key"))
    }
}

impl Drop for Mixed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["controller", "companion", "envoy", "laptop", "server"] {
                eprintln!("--- {name} ---\n{}", self.fixture.log(name));
            }
        }
    }
}

fn companion(fixture: &ControllerFixture) -> Running {
    let url = format!("https://{}", fixture.socket(9400));
    let program = Program::new("companion", hermes(), fixture.directory.path());
    let program =
        program.args(["envoy", "--controller", &url, "--state"]).args([fixture.directory.path().join("ingress")]);
    program.env("HERMES_TOKEN", fixture.token("ingress")).start().unwrap()
}

fn documents(fixture: &ControllerFixture, life: &str) -> String {
    let at = |port: u16| fixture.socket(port).to_string();
    let service = |name: &str, target: &str, users: &str| {
        format!("{{kind: Service, name: {name}, at: {{node: server, {target}}}, for: {{users: {users}}}}}\n---\n")
    };
    let service_at = |name: &str, kind: &str, port| {
        format!(
            "{{kind: Service, name: {name}, authority: \"ECHO:7\", at: {{node: server, {kind}: \"{}\"}}, for: {{users: ann}}}}\n---\n",
            at(port)
        )
    };
    let http = |port| format!("http: \"{}\"", at(port));
    let apps = format!(
        "[{{user: ann, bind: \"{}\"}}, {{user: ann, bind: \"{}\", protocol: tcp, authority: \"ECHO:7\"}}, {{user: ann, bind: \"{}\", protocol: udp, authority: \"ECHO:7\"}}]",
        at(8080),
        at(8081),
        at(8082)
    );
    format!(
        "kind: Overlay\nname: test\ncertificate-lifetime: {life}\n---\n\
         {{kind: Node, name: laptop, links: ingress, apps: {apps}}}\n---\n\
         {{kind: Node, name: desk, links: ingress}}\n---\n\
         {{kind: Node, name: ingress, role: standalone, runs: envoy, address: \"{envoy}\", bind: \"{envoy}\", links: server}}\n---\n\
         {{kind: Node, name: server, address: \"{server}\", bind: \"{server}\"}}\n---\n\
         {{kind: User, name: ann, nodes: laptop}}\n---\n\
         {{kind: User, name: bob, nodes: desk}}\n---\n{}{}{}{}{}",
        service("APP", &http(7001), "ann"),
        service("WEB", &http(7004), "ann"),
        service("SECRET", &http(7001), "bob"),
        service_at("echo-tcp", "tcp", 7002),
        service_at("echo-udp", "udp", 7003),
        envoy = at(9443),
        server = at(9444),
    )
}

/// The server dies, and a replica that is further away goes on; without a controller.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envoy_goes_by_an_alternate_and_comes_back() {
    let Some(mut mixed) = Mixed::start("an_envoy_goes_by_an_alternate", Form::Delta, "1d").await else { return };
    mixed.fixture.origin(7005, "two");
    let at = |port: u16| mixed.fixture.socket(port).to_string();
    let node = |name: &str, port, more: &str| {
        format!("{{kind: Node, name: {name}, address: \"{0}\", bind: \"{0}\"{more}}}\n---\n", at(port))
    };
    let more = [
        "kind: Overlay\nname: test\ncertificate-lifetime: 1d\nnodes: {health: {interval: 200ms, healthy: 1}}\n---\n"
            .to_owned(),
        node("other", 9446, ""),
        node("side", 9445, ", role: standalone, links: other"),
        node("ingress", 9443, ", role: standalone, runs: envoy, links: [server, side]"),
        format!(
            "{{kind: Service, name: APP, at: [{{node: server, http: \"{}\"}}, {{node: other, http: \"{}\"}}], for: {{users: ann}}}}\n",
            at(7001),
            at(7005)
        ),
    ];
    mixed.fixture.hermes_ok(&["apply", "-f", "-"], &more.concat());
    let _others = ["other", "side"].map(|name| mixed.fixture.node(name, Some(&mixed.fixture.token(name))));
    until("all run what they should", || mixed.running() == 5).await;
    mixed.fixture.kill_controller();
    mixed.fixture.until_answers("APP", "one").await;
    let mut traffic = Traffic::default();
    traffic.one_shot(mixed.fixture.socket(8080), "APP", "/");
    traffic.one_shot(mixed.fixture.socket(8080), "APP", "/");
    traffic.progress(5).await;
    sigkill(mixed.server.take().unwrap());
    traffic.progress(50).await;
    mixed.fixture.until_answers("APP", "two").await;
    let report = traffic.finish().await;
    println!("{report}");
    // What was under way, of two clients: and an Envoy has a connection for each of its workers, each of which finds out by itself.
    assert!(report.done.values().map(|done| done.failed).sum::<u64>() <= 6, "{report}");
    mixed.server = Some(mixed.fixture.node("server", None));
    mixed.fixture.until_answers("APP", "one").await;
}

async fn passes(form: Form) {
    let Some(mixed) = Mixed::start("an_envoy_between_nodes", form, "1d").await else { return };
    let (client, mut rng) = (mixed.client(), SmallRng::seed_from_u64(1));
    for version in [transfer::Version::H1, transfer::Version::H2] {
        transfer::upload(&client, version, "WEB", MIB, &mut rng).await.unwrap();
        transfer::download(&client, version, "WEB", MIB).await.unwrap();
    }
    let raw = |port| ListenerClient::plain(mixed.fixture.socket(port));
    for (client, target) in
        [(&raw(8081), TunnelMode::Raw), (&client, TunnelMode::ConnectH1), (&client, TunnelMode::ConnectH2)]
    {
        // With the end of one half, while the other goes on.
        transfer::echo_whole(client, target, "ECHO:7", MIB, &mut rng)
            .await
            .unwrap_or_else(|error| panic!("{target:?}: {error}"));
    }
    for (client, target) in
        [(&raw(8082), FlowMode::Raw), (&client, FlowMode::UpgradeH1), (&client, FlowMode::ConnectH2)]
    {
        transfer::datagrams(client, target, "ECHO", 40, &mut rng)
            .await
            .unwrap_or_else(|error| panic!("{target:?}: {error}"));
    }
    let output = mixed.fixture.hermes_ok(&["node", "list"], "");
    assert!(output.contains("ingress"), "{output}");

    // What changes while it goes on costs nobody anything.
    let mut traffic = Traffic::default();
    traffic.one_shot(mixed.fixture.socket(8080), "WEB", "/bytes/2000");
    traffic.keep_alive(mixed.fixture.socket(8080), "WEB", "/bytes/2000");
    traffic.h2(mixed.fixture.socket(8080), "WEB", "/bytes/2000");
    traffic.uploads(mixed.fixture.socket(8080), "WEB", "/upload");
    traffic.tunnel(traffic::TunnelTarget::Bare(mixed.fixture.socket(8081)), 1);
    traffic.tunnel(traffic::TunnelTarget::Connect(mixed.fixture.socket(8080), "ECHO:7".to_owned()), 2);
    traffic.flow(mixed.fixture.socket(8082), 3);
    traffic.progress(1).await;
    let same = documents(&mixed.fixture, "1d");
    let another = format!(
        "{}{{kind: Node, name: second, address: \"{}\"}}\n---\n{{kind: User, name: cid, nodes: [laptop, desk]}}\n---\n\
         {{kind: Service, name: NEW, at: {{node: second, http: \"127.0.0.1:1\"}}, for: {{users: [ann, cid]}}}}\n",
        same.replace("links: server", "links: [server, second]")
            // Clusters, routes and users change.
            .replace("for: {users: ann}}", "for: {users: ann}, timeout: {connect: 7s, idle: 90s}}"),
        mixed.fixture.socket(9445),
    );
    for round in 0..20 {
        if round % 2 == 0 {
            let output = mixed.fixture.hermes_ok(&["apply", "-f", "-"], &another);
            assert!(output.contains("node ingress runs it"), "{output}");
        } else {
            let output = mixed.fixture.hermes_ok(&["apply", "-f", "-"], &same);
            assert!(output.contains("node ingress runs it"), "{output}");
            for key in ["Service/NEW", "User/cid", "Node/second"] {
                mixed.fixture.hermes_ok(&["delete", key], "");
            }
        }
        traffic.progress(3).await;
    }
    // A datagram may be lost where its flow moves; nothing else is, and nothing ends.
    let report = traffic.finish().await;
    let is_whole = |(kind, done): (&&str, &traffic::Done)| {
        done.failed == 0 && done.rounds >= 20 && (done.lost == 0 || *kind == "flow" && done.lost * 20 < done.rounds)
    };
    assert!(report.failures.is_empty() && report.done.iter().all(is_whole), "{report}");
    until("all run what they should", || mixed.running() == 3).await;
}

#[tokio::test]
async fn an_envoy_carries_what_hermes_nodes_send_and_is_changed_under_load() {
    passes(Form::Delta).await;
}

#[tokio::test]
async fn the_same_where_envoy_asks_for_all_of_it_each_time() {
    passes(Form::Whole).await;
}

#[tokio::test]
async fn an_envoy_rejects_unauthorized_clients() {
    let Some(mixed) = Mixed::start("an_envoy_lets_nobody_pass", Form::Delta, "1d").await else { return };
    let (cert, key) = mixed.identity("laptop");
    let laptop = Some((&*cert, &*key));
    assert_eq!(mixed.ask(laptop, Some("ann"), "APP"), Ok(200));
    assert_eq!(mixed.ask(laptop, Some("ann"), "app:443"), Ok(200));
    for (user, authority) in [
        // Of another device; for another user; nobody, and who it is cannot be told.
        (Some("bob"), "SECRET"),
        (Some("bob"), "APP"),
        (Some("ann"), "SECRET"),
        (None, "APP"),
        (None, "SECRET"),
        (Some("ann bob"), "SECRET"),
        (Some("bob ann"), "APP"),
        (Some("ann"), "APP:81"),
        (Some("ann"), "OTHER"),
    ] {
        assert_eq!(mixed.ask(laptop, user, authority), Ok(403), "{user:?} {authority}");
    }
    // A node that sends nothing by this one has no users here.
    let (cert, key) = mixed.identity("server");
    assert_eq!(mixed.ask(Some((&cert, &key)), Some("ann"), "APP"), Ok(403));
    // Who is no node of this overlay does not even come so far: nobody, one of another authority, an operator.
    let foreign = Authority::new("test").unwrap();
    let foreign = foreign.issue(&Subject::node("laptop").standalone()).unwrap();
    let foreign = foreign.write(mixed.fixture.directory.path(), "foreign").unwrap();
    let text = std::fs::read_to_string(mixed.fixture.directory.path().join("controller/operator.json")).unwrap();
    let operator: serde_json::Value = serde_json::from_str(&text).unwrap();
    let file = |name: &str, key: &str| {
        let path = mixed.fixture.directory.path().join(name);
        std::fs::write(&path, operator[key].as_str().unwrap()).unwrap();
        path
    };
    let (cert, key) = (file("operator.pem", "certificate"), file("operator.key", "key"));
    for identity in [None, Some((&*foreign.cert, &*foreign.key)), Some((&*cert, &*key))] {
        let ended = mixed.ask(identity, Some("ann"), "APP");
        assert!(ended.is_err(), "{identity:?}: {ended:?}");
    }
    // Nor does a node whose key is revoked, and others go on; also while another authority takes over.
    mixed.fixture.hermes_ok(&["node", "revoke", "laptop"], "");
    until("it is told", || mixed.ask(laptop, Some("ann"), "APP").is_err()).await;
    let (cert, key) = mixed.identity("server");
    let server = Some((&*cert, &*key));
    assert_eq!(mixed.ask(server, Some("ann"), "APP"), Ok(403));
    mixed.fixture.hermes_ok(&["ca", "rotate"], "");
    let finished = || mixed.fixture.hermes(&["ca", "finish"], "").status.success();
    until("it is finished", || {
        assert!(mixed.ask(laptop, Some("ann"), "APP").is_err());
        finished()
    })
    .await;
    until("the server has its new certificate", || mixed.ask(server, Some("ann"), "APP") == Ok(403)).await;
    assert!(mixed.ask(laptop, Some("ann"), "APP").is_err());
}

#[tokio::test]
async fn an_envoy_reports_a_rejected_change_and_applies_the_next_one() {
    let Some(mut mixed) = Mixed::start("an_envoy_says_why", Form::Delta, "1d").await else { return };
    // It cannot listen there.
    let taken = TcpListener::bind(mixed.fixture.socket(9500)).unwrap();
    let (here, there) = (mixed.fixture.socket(9443).to_string(), mixed.fixture.socket(9500).to_string());
    let good = documents(&mixed.fixture, "1d");
    let wrong = good.replace(&format!("bind: \"{here}\""), &format!("bind: \"{there}\""));
    let output = mixed.fixture.hermes(&["apply", "-f", "-"], &wrong);
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    assert!(text.contains("ingress") && text.contains("refuses") && text.contains("9500"), "{text}");
    assert_eq!(mixed.fixture.get("APP"), Some((200, "one".to_owned())), "it goes on with what it had");
    let text = mixed.fixture.hermes_ok(&["apply", "-f", "-"], &good);
    assert!(text.contains("node ingress runs it"), "{text}");
    drop(taken);

    // What it cannot do is not even applied.
    let has = |from: &str, to: &str| good.replace(from, to);
    for (documents, words) in [
        (has("runs: envoy,", "runs: envoy, http3: true,"), "Node/ingress: http3: this node runs Envoy"),
        (has("runs: envoy,", "runs: envoy, workers: 2,"), "Node/ingress: workers: this node runs Envoy"),
        (has("role: standalone, runs: envoy", "runs: envoy"), "Node/ingress: role: this node runs Envoy"),
        (has("for: {users: bob}}", "for: {users: bob}, custody: {}}"), "SECRET: an Envoy does not support custody"),
        (
            good.replace(&format!(", address: \"{}\"", mixed.fixture.socket(9444)), ", links: ingress")
                .replace(&format!("bind: \"{here}\", links: server"), &format!("bind: \"{here}\"")),
            "give server an address, and ingress a link to it",
        ),
    ] {
        let text = mixed.fixture.refused(&["apply", "-f", "-"], &documents);
        assert!(text.contains(words), "{text}");
    }

    // Without a controller all goes on; an Envoy that starts again waits for one.
    mixed.fixture.kill_controller();
    assert_eq!(mixed.fixture.get("APP"), Some((200, "one".to_owned())));
    mixed.fixture.start_controller().await;
    until("all are back", || mixed.running() == 3).await;
    sigkill(mixed.envoy.take().unwrap());
    until("it is away", || mixed.fixture.hermes_ok(&["node", "list"], "").contains("unreachable")).await;
    mixed.start_envoy().await;

    // A node that is removed serves nobody.
    let direct = good.replace("name: laptop, links: ingress", "name: laptop, links: server");
    let direct = direct.replace("name: desk, links: ingress", "name: desk, links: server");
    mixed.fixture.hermes_ok(&["apply", "-f", "-"], &direct);
    assert_eq!(mixed.fixture.get("APP"), Some((200, "one".to_owned())));
    mixed.fixture.hermes_ok(&["delete", "Node/ingress"], "");
    let (cert, key) = mixed.identity("laptop");
    until("it serves nobody", || mixed.ask(Some((&cert, &key)), Some("ann"), "APP") != Ok(200)).await;
}

#[tokio::test]
async fn certificates_of_an_envoy_are_renewed_and_taken_over() {
    let Some(mut mixed) = Mixed::start("certificates_of_an_envoy", Form::Delta, "15s").await else { return };
    let mut requests = 0;
    let renewals = |mixed: &Mixed| mixed.fixture.log("companion").matches("certificate renewed").count();
    while renewals(&mixed) < 3 {
        assert_eq!(mixed.fixture.get("APP"), Some((200, "one".to_owned())), "request {requests}");
        requests += 1;
        assert!(requests < 100_000, "nothing is renewed");
    }
    // Who connects anew sees what is valid now: the laptop to Envoy, and Envoy to the server.
    for name in ["laptop", "server"] {
        let node = if name == "laptop" { &mut mixed.laptop } else { &mut mixed.server };
        sigkill(node.take().unwrap());
        *node = Some(mixed.fixture.node(name, None));
        mixed.fixture.until_answers("APP", "one").await;
    }
    until("all run what they should", || mixed.running() == 3).await;
}

#[tokio::test]
async fn an_envoy_follows_another_authority() {
    let Some(mut mixed) = Mixed::start("an_envoy_follows_another_authority", Form::Delta, "1h").await else { return };
    let (cert, key) = mixed.identity("laptop");
    for (path, kept) in [(&cert, "before.pem"), (&key, "before.key")] {
        std::fs::copy(path, mixed.fixture.state(kept)).unwrap();
    }
    mixed.fixture.hermes_ok(&["ca", "rotate"], "");
    let mut requests = 0;
    let finished = |mixed: &Mixed| mixed.fixture.hermes(&["ca", "finish"], "").status.success();
    while !finished(&mixed) {
        assert_eq!(mixed.fixture.get("APP"), Some((200, "one".to_owned())), "request {requests}");
        requests += 1;
        assert!(requests < 1000, "{}", mixed.fixture.hermes_ok(&["ca", "show"], ""));
    }
    let ingress = mixed.fixture.state("ingress");
    until("it trusts one", || hermes_testkit::control::trusted(&ingress) == (1, true)).await;
    mixed.fixture.until_answers("APP", "one").await;
    // Who connects anew finds what is valid now.
    for name in ["laptop", "server"] {
        let node = if name == "laptop" { &mut mixed.laptop } else { &mut mixed.server };
        sigkill(node.take().unwrap());
        *node = Some(mixed.fixture.node(name, None));
        mixed.fixture.until_answers("APP", "one").await;
    }
    let before = (mixed.fixture.state("before.pem"), mixed.fixture.state("before.key"));
    let ask = |cert: &Path, key: &Path| mixed.ask(Some((cert, key)), Some("ann"), "APP");
    assert_eq!(ask(&cert, &key), Ok(200));
    until("Envoy does not believe the old authority", || ask(&before.0, &before.1) != Ok(200)).await;
    until("all run what they should", || mixed.running() == 3).await;
}
