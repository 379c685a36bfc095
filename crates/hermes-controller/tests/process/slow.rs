//! Who follows and never reads: a node's stream that stands still while its document changes and changes.

use std::fmt::Write as _;

use hermes_controller::client::{Client, ControllerPin};
use hermes_controller::control::Report;
use hermes_net::tls::CertifiedKey;
use http::Method;

use hermes_testkit::control::OperatorClient;
use hermes_testkit::control::{ControllerFixture, sigkill, until};

/// Users, each of whom stands in the documents of both nodes.
const USERS: usize = 5000;
/// What the controller may grow by, all told: some documents of each kind, and none for each change.
const GROWTH: u64 = 16 << 20;
const CHANGES: u64 = 120;
/// What a controller needs for its work it has by then.
const WARM: u64 = 40;

/// The figures of a debug build; the load takes a minute there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a minute"]
async fn a_node_that_never_reads_costs_a_document_and_keeps_nobody_waiting() {
    let fixture = ControllerFixture::new().await;
    let base = fixture.documents(7001).replace("{users: ann}", "{groups: all}");
    let mut base = base.replace("apps: {bind:", "apps: {user: ann, bind:");
    let name = |number: usize| format!("user-{number:05}-{}", "x".repeat(48));
    for number in 0..USERS {
        writeln!(base, "---\n{{kind: User, name: {}, nodes: laptop}}", name(number)).unwrap();
    }
    let users: Vec<_> = (0..USERS).map(name).collect();
    writeln!(base, "---\n{{kind: Group, name: all, users: [ann, {}]}}", users.join(", ")).unwrap();
    fixture.hermes_ok(&["apply", "-f", "-"], &base);
    let laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    let documents = ["laptop", "server"].map(|node| fixture.state(node).join("document.json"));
    until("both run", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2).await;
    let size = documents.each_ref().map(|file| std::fs::metadata(file).unwrap().len());
    assert!(size[0] * (CHANGES - WARM) > GROWTH * 5 / 4, "{size:?}: what is kept for each change is to be seen");
    // The node is gone, and who has what it had follows in its place.
    sigkill(laptop);
    let file = |name: &str| std::fs::read(fixture.state("laptop").join(name)).unwrap();
    let own = CertifiedKey::from_pem(&file("node.pem"), &file("node.key")).unwrap();
    let known = ControllerPin::Authorities(String::from_utf8(file("ca.pem")).unwrap());
    let place = format!("https://{}", fixture.socket(9400)).parse().unwrap();
    let client = Client::connect(&place, &known, Some(&own)).await.unwrap();
    let reports = futures_util::StreamExt::chain(
        futures_util::stream::iter([Report::default()]),
        futures_util::stream::pending::<Report>(),
    );
    let _orders = client.follow(reports).await.unwrap();
    let mut operator = OperatorClient::new(&fixture.state("controller/operator.json"));
    let mut before = 0;
    for number in 1..=CHANGES {
        let origin = fixture.socket(7001);
        let idle = 100_000 + number;
        let text = format!(
            "{{kind: Service, name: APP, at: {{node: server, http: \"{origin}\"}}, for: {{groups: all}}, timeout: {{idle: {idle}ms}}}}"
        );
        let (status, answer) = operator.ask(Method::POST, "/v1/apply", &text).await.unwrap();
        assert_eq!(status, 200, "{answer}");
        if number == WARM {
            before = fixture.weight();
        }
    }
    let last = format!("{}", 100_000 + CHANGES);
    until("the other node has the last one", || std::fs::read_to_string(&documents[1]).unwrap().contains(&last)).await;
    let after = fixture.weight();
    println!("documents of {size:?} bytes, {CHANGES} changes: {before} bytes, then {after}");
    assert!(after < before + GROWTH, "{before} bytes, then {after}");
}
