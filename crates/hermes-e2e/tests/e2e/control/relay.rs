//! A service with `relay`: the controller makes a tree of the nodes on its paths.
//!
//! In: two laptops, an ingress and a root under a controller, and curl at the laptops' apps. Out: publications of one user at the
//! other, one subscription for each link, and refusals of who may not.

use std::process::Stdio;

use hermes_testkit::control::ControllerFixture;
use hermes_testkit::relay::{SUBSCRIBE, Subscriber};
use tokio::process::Command;

fn documents(fixture: &ControllerFixture, relay: &str) -> String {
    let [ingress, root, ann, bob] = [9443, 9444, 8080, 8081].map(|port| fixture.socket(port));
    let [at_ingress, at_root] = [9101, 9102].map(|port| fixture.socket(port));
    format!(
        "kind: Overlay\nname: test\n---\n\
         {{kind: Node, name: ann-laptop, links: ingress, apps: {{bind: \"{ann}\"}}}}\n---\n\
         {{kind: Node, name: bob-laptop, links: ingress, apps: {{bind: \"{bob}\"}}}}\n---\n\
         {{kind: Node, name: ingress, role: standalone, address: \"{ingress}\", bind: \"{ingress}\", links: root, admin: \"{at_ingress}\"}}\n---\n\
         {{kind: Node, name: root, address: \"{root}\", bind: \"{root}\", admin: \"{at_root}\"}}\n---\n\
         {{kind: User, name: ann, nodes: ann-laptop}}\n---\n{{kind: User, name: bob, nodes: bob-laptop}}\n---\n\
         {{kind: Service, name: CHAT, at: {{node: root}}, relay: {relay}, for: {{users: [ann, bob]}}}}\n"
    )
}

async fn curl(fixture: &ControllerFixture, port: u16, arguments: &[&str]) -> String {
    let url = format!("http://{}/room", fixture.socket(port));
    let words = ["--silent", "--max-time", "10", "--header", "host: chat", "--write-out", "%{http_code}"];
    let mut curl = Command::new("curl");
    let output = curl.args(words).args(arguments).arg(url).stderr(Stdio::null()).output().await.unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The subscriptions that a node has.
async fn subscriptions(fixture: &ControllerFixture, port: u16) -> Option<f64> {
    let url = format!("http://{}/metrics", fixture.socket(port));
    let output = Command::new("curl").args(["--silent", &url]).output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|line| line.strip_prefix("hermes_relay_subscriptions ")?.parse().ok())
}

#[tokio::test]
async fn the_nodes_on_the_paths_of_a_relay_are_its_tree() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, "{history: {publications: 10}}"));
    let _nodes: Vec<_> = ["root", "ingress", "ann-laptop", "bob-laptop"]
        .map(|name| fixture.node(name, Some(&fixture.token(name))))
        .into();
    hermes_testkit::poll::until("everybody may publish", || async {
        curl(&fixture, 8080, &["--data", "x"]).await == "204" && curl(&fixture, 8081, &["--data", "x"]).await == "204"
    })
    .await;
    let subscribe = |port: u16| {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--no-buffer", "--max-time", "60", "--header", "host: chat"]).args(SUBSCRIBE);
        curl.args(["--header", "accept: application/x-ndjson"]).arg(format!("http://{}/room", fixture.socket(port)));
        Subscriber::run(&mut curl)
    };
    let mut subscribers = [subscribe(8080), subscribe(8080), subscribe(8081)];
    hermes_testkit::poll::until("the tree stands", || async {
        // The ingress knows the subscriptions of both laptops, and the root knows the ingress.
        (subscriptions(&fixture, 9101).await, subscriptions(&fixture, 9102).await) == (Some(3.0), Some(1.0))
    })
    .await;
    hermes_testkit::poll::until("all are known", || async {
        let head = curl(&fixture, 8081, &["--data", "count", "--include"]).await;
        head.contains("hermes-subscribers: 3")
    })
    .await;
    assert_eq!(curl(&fixture, 8081, &["--data", "hello"]).await, "204");
    for subscriber in &mut subscribers {
        while subscriber.json().await["data"] != "hello" {}
    }
    // Another setting reaches all nodes, and what a relay cannot have is refused.
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, "{unit: 1KiB}"));
    let long = "x".repeat(2000);
    hermes_testkit::poll::until("long ones are refused", || async {
        curl(&fixture, 8080, &["--data", &long]).await.ends_with("413")
    })
    .await;
    for (relay, words) in [
        ("{upstream: other}", "remove upstream, user, peers, root and authority"),
        ("{root: first}", "remove upstream, user, peers, root and authority"),
        ("{authority: relay.example}", "remove upstream, user, peers, root and authority"),
        ("{}, cache: {}", "a relay answers requests itself"),
        ("{mode: fast}", "mode"),
    ] {
        let output = fixture.refused(&["apply", "-f", "-"], &documents(&fixture, relay));
        assert!(output.contains(words), "{relay}: {output}");
    }
}
