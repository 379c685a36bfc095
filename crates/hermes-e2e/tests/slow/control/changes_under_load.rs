//! Two hundred changes in a row under load: no request fails, and no tunnel breaks.
//!
//! In: a device, two routers, two servers, and services at these. Out: requests on persistent and on new connections,
//! and long tunnels, every byte checked, while documents are added and removed.

use std::time::Instant;

use ::http::Method;
use hermes_testkit::origin::{self, Origin, http, stream};
use hermes_testkit::process::Running;
use hermes_testkit::traffic::{Report, Traffic, TunnelTarget};

use hermes_testkit::control::OperatorClient;
use hermes_testkit::control::{ControllerFixture, until};

/// Milliseconds that nodes have to run a change.
const WAIT: u64 = 20_000;
const NODES: [&str; 5] = ["device", "left", "right", "one", "two"];

/// What is there in the beginning, and lasts.
struct Scene {
    fixture: ControllerFixture,
    operator: OperatorClient,
    traffic: Traffic,
    app: Origin,
    echo: Origin,
    _nodes: Vec<Running>,
}

impl Scene {
    async fn new() -> Self {
        let fixture = ControllerFixture::new().await;
        let listen = |port| origin::listen(fixture.socket(port)).unwrap();
        let app = http::serve(listen(7001), http::Version::H1, "one".into()).unwrap();
        let echo = stream::echo(listen(7007)).unwrap();
        let at = |port: u16| format!("address: \"{0}\", bind: \"{0}\"", fixture.socket(port));
        let base = format!(
            "kind: Overlay\nname: test\n---\n\
             {{kind: Node, name: one, {}}}\n---\n{{kind: Node, name: two, {}}}\n---\n\
             {{kind: Node, name: left, role: standalone, {}, links: [one, two]}}\n---\n{}\n---\n{}\n---\n\
             {{kind: User, name: ann, nodes: device}}\n---\n{}---\n{}",
            at(9443),
            at(9444),
            at(9445),
            right(&fixture, true),
            device(&fixture, false),
            service("APP", "", "one", &format!("http: \"{}\"", app.address()), 1),
            service("ECHO", "authority: \"ECHO:7\", ", "one", &format!("tcp: \"{}\"", echo.address()), 1),
        );
        fixture.hermes_ok(&["apply", "-f", "-"], &base);
        let nodes = NODES.map(|name| fixture.node(name, Some(&fixture.token(name))));
        fixture.until_answers("APP", "one").await;
        let running = || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count();
        until("all nodes are there", || running() == NODES.len()).await;
        let mut traffic = Traffic::default();
        let apps = fixture.socket(8080);
        traffic.one_shot(apps, "APP", "/");
        traffic.keep_alive(apps, "APP", "/");
        for seed in 1..=3 {
            traffic.tunnel(TunnelTarget::Connect(apps, "ECHO:7".to_owned()), seed);
        }
        traffic.progress(5).await;
        let operator = OperatorClient::new(&fixture.state("controller/operator.json"));
        Self { fixture, operator, traffic, app, echo, _nodes: nodes.into() }
    }

    /// One change, that all nodes which it touches run when this returns.
    async fn change(&mut self, what: &Change) {
        let (method, path, text) = match what {
            Change::Apply(text) => (Method::POST, format!("/v1/apply?wait={WAIT}"), &**text),
            Change::Delete(key) => (Method::DELETE, format!("/v1/documents/{key}?wait={WAIT}"), ""),
        };
        let (status, answer) = self.operator.ask(method, &path, text).await.unwrap();
        let is_running =
            |nodes: &serde_json::Map<_, serde_json::Value>| nodes.values().all(|fate| fate["state"] == "running");
        let is_done = status == 200 && answer["nodes"].as_object().is_some_and(is_running);
        assert!(is_done, "{what:?}: {status} {answer}");
    }

    /// Changes until so many are made, and what became of the traffic.
    async fn changed(mut self, count: usize, change: impl Fn(&Self, usize) -> Change) -> Report {
        let began = Instant::now();
        for number in 0..count {
            let next = change(&self, number);
            self.change(&next).await;
            let report = self.traffic.report();
            assert!(report.failures.is_empty(), "after change {number}, {next:?}: {report}");
        }
        println!("{count} changes in {:?}", began.elapsed());
        self.traffic.progress(5).await;
        self.traffic.finish().await
    }
}

#[derive(Debug)]
enum Change {
    Apply(String),
    Delete(String),
}

fn service(name: &str, authority: &str, node: &str, target: &str, mark: usize) -> String {
    let idle = 100_000 + mark;
    format!(
        "{{kind: Service, name: {name}, {authority}at: {{node: {node}, {target}}}, for: {{users: ann}}, timeout: {{idle: {idle}ms}}}}\n"
    )
}

fn device(fixture: &ControllerFixture, is_wide: bool) -> String {
    let links = if is_wide { "[left, right]" } else { "[left]" };
    let apps = fixture.socket(8080);
    format!("{{kind: Node, name: device, links: {links}, apps: {{bind: \"{apps}\", user: ann}}}}")
}

fn right(fixture: &ControllerFixture, is_wide: bool) -> String {
    let links = if is_wide { "[one, two]" } else { "[two]" };
    format!(
        "{{kind: Node, name: right, role: standalone, address: \"{0}\", bind: \"{0}\", links: {links}}}",
        fixture.socket(9446)
    )
}

/// What changes here neither moves a service under load nor takes a link away that its traffic goes by.
fn beside(scene: &Scene, number: usize) -> Change {
    let (app, echo) = (scene.app.address(), scene.echo.address());
    let (round, kind) = (number / 11, number % 11);
    let is_even = round.is_multiple_of(2);
    let other = |name: &str, authority: &str| service(name, authority, "two", &format!("http: \"{app}\""), number);
    match kind {
        0 => Change::Apply(service("APP", "", "one", &format!("http: \"{app}\""), number)),
        1 => Change::Apply(service("ECHO", "authority: \"ECHO:7\", ", "one", &format!("tcp: \"{echo}\""), number)),
        2 => Change::Apply(
            "{kind: User, name: bob, nodes: device}\n---\n{kind: Group, name: team, users: [ann, bob]}\n".to_owned(),
        ),
        3 => Change::Apply(format!(
            "{{kind: Service, name: APP, at: {{node: one, http: \"{app}\"}}, for: {{users: ann, groups: team}}}}\n"
        )),
        4 => Change::Apply(other("OTHER", "")),
        // A wildcard that the service under load would fit as well, and one that it would not.
        5 => Change::Apply(other("WILD", if is_even { "authority: \"*\", " } else { "authority: \"*.wild.test\", " })),
        6 => Change::Apply(right(&scene.fixture, !is_even)),
        7 => Change::Delete(if is_even { "Service/OTHER" } else { "Service/WILD" }.to_owned()),
        8 => Change::Apply(format!(
            "{{kind: Service, name: APP, at: {{node: one, http: \"{app}\"}}, for: {{users: ann}}}}\n"
        )),
        9 => Change::Delete("Group/team".to_owned()),
        _ => Change::Delete("User/bob".to_owned()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_changes_fail_no_request_and_break_no_tunnel() {
    let report = Scene::new().await.changed(200, beside).await;
    println!("{report}");
    report.assert_whole(50);
}

/// The service under load goes from one server to the other and back, and the device's way to it gets wider and narrower.
fn moving(scene: &Scene, number: usize) -> Change {
    let app = format!("http: \"{}\"", scene.app.address());
    match number % 4 {
        0 => Change::Apply(service("APP", "", "two", &app, 1)),
        1 => Change::Apply(device(&scene.fixture, true)),
        2 => Change::Apply(service("APP", "", "one", &app, 1)),
        _ => Change::Apply(device(&scene.fixture, false)),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_moves_and_a_path_that_changes_fail_no_request() {
    let report = Scene::new().await.changed(40, moving).await;
    println!("{report}");
    report.assert_whole(50);
}
