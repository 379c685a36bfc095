//! One authority follows another under traffic: no request fails, no tunnel breaks, and whoever was away comes back.

use hermes_testkit::binary::hermes;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hermes_testkit::origin::{self, Origin, stream};
use hermes_testkit::process::{Program, Running};
use hermes_testkit::traffic::{Traffic, TunnelTarget};
use serde_json::Value;

use hermes_testkit::control::PersistentClient;
use hermes_testkit::control::{ControllerFixture, sigkill, trusted, until};

const PAUSE: Duration = Duration::from_millis(5);

fn show(fixture: &ControllerFixture) -> Value {
    serde_json::from_str(&fixture.hermes_ok(&["ca", "show", "--json"], "")).unwrap()
}

/// All nodes have what the rotation wants of them: whoever signs now has issued their certificates.
fn are_there(fixture: &ControllerFixture, nodes: usize) -> bool {
    let shown = show(fixture);
    let all = shown["nodes"].as_array().unwrap();
    let is_there = |node: &&Value| node["lacks"] == "" && node["connected"] == true && node["current"] == true;
    shown["stage"] == "leaving" && all.iter().filter(is_there).count() == nodes
}

/// A fixture with two nodes that run, and what carries a tunnel's bytes back.
async fn running(fixture: ControllerFixture, more: &str) -> (ControllerFixture, Running, Running, Origin) {
    fixture.origin(7001, "one");
    let echo = stream::echo(origin::listen(fixture.socket(7007)).unwrap()).unwrap();
    let tunnels = format!(
        "---\n{{kind: Service, name: ECHO, authority: \"ECHO:7\", at: {{node: server, tcp: \"{}\"}}, for: {{users: ann}}}}\n",
        echo.address()
    );
    fixture.hermes_ok(&["apply", "-f", "-"], &(fixture.documents(7001) + &tunnels + more));
    let laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    until("both run it", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2).await;
    (fixture, laptop, server, echo)
}

/// Asks without a pause until this holds.
async fn asking(client: &mut PersistentClient, what: &str, mut holds: impl FnMut() -> bool) -> u32 {
    let mut requests = 0;
    loop {
        for _ in 0..20 {
            let answered = client.ask().await;
            assert!(answered.is_ok(), "{what}, request {requests}: {answered:?}");
            requests += 1;
            tokio::time::sleep(PAUSE).await;
        }
        if holds() {
            return requests;
        }
        assert!(requests < 8000, "{what}");
    }
}

/// Somebody has this directory's identity and document, and runs it at another port without the controller.
fn thief(fixture: &ControllerFixture, name: &str, from: &Path) -> Running {
    let directory = fixture.state(name);
    std::fs::create_dir(&directory).unwrap();
    for file in ["node.pem", "node.key"] {
        std::fs::copy(from.join(file), directory.join(file)).unwrap();
    }
    std::fs::copy(fixture.state("laptop/ca.pem"), directory.join("ca.pem")).unwrap();
    let document = std::fs::read_to_string(fixture.state("laptop/document.json")).unwrap();
    let (own, other) = (fixture.socket(8080).to_string(), fixture.socket(8082).to_string());
    std::fs::write(directory.join("document.json"), document.replace(&own, &other)).unwrap();
    let program = Program::new(name, hermes(), fixture.directory.path()).args(["proxy", "--config"]);
    program.args([directory.join("document.json")]).start().unwrap()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for file in ["node.pem", "node.key", "ca.pem"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

#[tokio::test]
async fn an_authority_is_rotated_under_traffic() {
    let third = "---\n{kind: Node, name: third, links: server}\n---\n{kind: Node, name: fourth, links: server}\n";
    let (fixture, _laptop, _server, _echo) = running(ControllerFixture::new().await, third).await;
    let before = show(&fixture);
    assert!(before["stage"] == "steady" && before["leaving"].is_null(), "{before}");
    let (token, idle) = (fixture.token("third"), fixture.state("idle.json"));
    std::fs::copy(fixture.state("controller/operator.json"), &idle).unwrap();
    copy(&fixture.state("laptop"), &fixture.state("before"));
    let mut traffic = Traffic::default();
    traffic.tunnel(TunnelTarget::Connect(fixture.socket(8080), "ECHO:7".to_owned()), 7);
    let mut client = PersistentClient::new(fixture.socket(8080), "APP");
    let text = fixture.refused(&["ca", "finish"], "");
    assert!(text.contains("no CA rotation in progress"), "{text}");

    let text = fixture.hermes_ok(&["ca", "rotate"], "");
    assert!(text.contains(" is to sign, until ") || text.contains(" signed before, until "), "{text}");
    assert!(fixture.refused(&["ca", "rotate"], "").contains("CA rotation in progress"));
    let mut requests = asking(&mut client, "all have the new one", || are_there(&fixture, 2)).await;
    for node in ["laptop", "server"] {
        assert_eq!(trusted(&fixture.state(node)), (2, true), "{node}");
    }
    let text = fixture.hermes_ok(&["ca", "finish"], "");
    assert!(text.contains("is trusted no more"), "{text}");
    let one = |node: &str| trusted(&fixture.state(node)) == (1, true);
    requests += asking(&mut client, "the old one is trusted no more", || one("laptop") && one("server")).await;
    requests += asking(&mut client, "and all goes on", || true).await;
    let report = traffic.finish().await;
    println!("{requests} requests, {report}");
    report.assert_whole(20);

    let after = show(&fixture);
    assert!(after["stage"] == "steady" && after["signs"]["fingerprint"] != before["signs"]["fingerprint"], "{after}");
    assert_eq!(after["former"][0]["fingerprint"], before["signs"]["fingerprint"], "{after}");
    // What the old one has signed is worth nothing to a node, and what the new one has is.
    let status = |authority: &str| {
        let args = ["--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--proxy"];
        let mut curl = Command::new("curl");
        curl.args(args).arg(format!("http://{}", fixture.socket(8082))).arg(format!("http://{authority}/"));
        String::from_utf8(curl.output().unwrap().stdout).unwrap()
    };
    let newer = thief(&fixture, "newer", &fixture.state("laptop"));
    until("the new certificate is believed", || status("APP") == "200").await;
    newer.end(Duration::from_secs(5)).unwrap();
    let _older = thief(&fixture, "older", &fixture.state("before"));
    until("it listens", || status("APP") != "000").await;
    assert_ne!(status("APP"), "200", "a certificate of the old authority");
    // A token of before, and one of now.
    let _third = fixture.node("third", Some(&token));
    let _fourth = fixture.node("fourth", Some(&fixture.token("fourth")));
    until("all run", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 4).await;
    // An operator's file that nobody has used meanwhile.
    let used = |path: &Path| std::fs::read_to_string(path).unwrap().matches("BEGIN CERTIFICATE").count();
    let list = ["node", "list", "--operator", idle.to_str().unwrap()];
    let stale = std::fs::read_to_string(&idle).unwrap();
    assert!(fixture.hermes(&list, "").status.success());
    assert_ne!(std::fs::read_to_string(&idle).unwrap(), stale, "it was written anew");
    assert!(used(&idle) > 1 && fixture.hermes(&list, "").status.success());
    let audit = hermes_testkit::control::audit(&fixture.state("controller"));
    for what in ["ca-rotate", "ca-switch", "ca-finish", "operator-renew"] {
        assert!(audit.contains(&format!("\"what\":\"{what}\"")), "{what}: {audit}");
    }
}

#[tokio::test]
async fn a_node_that_was_offline_during_a_rotation_returns() {
    let (fixture, laptop, _server, _echo) = running(ControllerFixture::new().await, "").await;
    sigkill(laptop);
    fixture.hermes_ok(&["ca", "rotate"], "");
    until("the server is there", || are_there(&fixture, 1)).await;
    let output = fixture.refused(&["ca", "finish"], "");
    assert!(output.contains("node laptop is disconnected, and may have a certificate of the old CA"), "{output}");
    assert!(!output.contains("node server is there"), "{output}");
    let shown = fixture.hermes_ok(&["ca", "show"], "");
    assert!(shown.contains("node laptop is disconnected") && shown.contains("node server is there"), "{shown}");
    fixture.hermes_ok(&["ca", "finish", "--force"], "");
    until("the server trusts one", || trusted(&fixture.state("server")) == (1, true)).await;
    let _laptop = fixture.node("laptop", None);
    fixture.until_answers("APP", "one").await;
    assert_eq!(trusted(&fixture.state("laptop")), (1, true));
}

#[tokio::test]
async fn a_rotation_is_taken_back_under_traffic() {
    let (fixture, _laptop, _server, _echo) = running(ControllerFixture::new().await, "").await;
    let before = show(&fixture);
    assert!(fixture.refused(&["ca", "cancel"], "").contains("no CA rotation in progress"));
    let mut client = PersistentClient::new(fixture.socket(8080), "APP");
    fixture.hermes_ok(&["ca", "rotate"], "");
    asking(&mut client, "all have the new one", || are_there(&fixture, 2)).await;
    fixture.hermes_ok(&["ca", "cancel"], "");
    asking(&mut client, "all have the old one", || are_there(&fixture, 2)).await;
    fixture.hermes_ok(&["ca", "finish"], "");
    asking(&mut client, "it is as it was", || trusted(&fixture.state("laptop")) == (1, true)).await;
    let after = show(&fixture);
    assert_eq!((&after["stage"], &after["signs"]), (&"steady".into(), &before["signs"]));
}

#[tokio::test]
async fn nodes_follow_at_whichever_controller_they_are() {
    let (mut fixture, _laptop, _server, _echo) = running(ControllerFixture::with_etcd().await, "").await;
    let mut client = PersistentClient::new(fixture.socket(8080), "APP");
    // Nodes are at the first one.
    let at_second = |fixture: &ControllerFixture, args: &[&str]| {
        let output = fixture.hermes_at("second", args, "");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    at_second(&fixture, &["ca", "rotate"]);
    asking(&mut client, "all have the new one", || are_there(&fixture, 2)).await;
    until("the second one knows", || fixture.hermes_at("second", &["ca", "finish"], "").status.success()).await;
    asking(&mut client, "the old one is gone", || trusted(&fixture.state("laptop")) == (1, true)).await;
    // The second one has followed with its own certificate.
    fixture.kill_controller();
    until("both are at the second one", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2)
        .await;
    asking(&mut client, "and all goes on", || true).await;
}

#[tokio::test]
async fn an_administrator_of_a_provider_rotates_nothing() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], "kind: Overlay\nname: test\nproviders: {acme: {}}\n");
    let file = fixture.state("acme.json");
    let file = file.to_str().unwrap();
    fixture.hermes_ok(&["operator", "create", "--name", "joe", "--provider", "acme", "-o", file], "");
    let acme = |args: &[&str]| fixture.hermes(&[args, &["--operator", file]].concat(), "");
    for verb in ["show", "rotate", "finish", "cancel"] {
        let output = acme(&["ca", verb]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains("only operators of the whole overlay"), "{verb}: {text}");
    }
    assert_eq!(show(&fixture)["stage"], "steady");
    // Its file follows as all do.
    fixture.hermes_ok(&["ca", "rotate"], "");
    until("the new one signs", || show(&fixture)["stage"] == "leaving").await;
    fixture.hermes_ok(&["ca", "finish"], "");
    assert!(acme(&["get"]).status.success() && acme(&["get"]).status.success());
    let audit = hermes_testkit::control::audit(&fixture.state("controller"));
    assert!(audit.contains("\"what\":\"ca-rotate\",\"by\":\"provider/acme/joe\""), "{audit}");
}
