//! One authority follows another under traffic: no request fails, no tunnel breaks, and whoever was away comes back.

use hermes_testkit::binary::hermes;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hermes_testkit::origin::{self, Origin, stream};
use hermes_testkit::process::{Program, Running};
use hermes_testkit::traffic::{Traffic, Way};
use serde_json::Value;

use hermes_testkit::control::Steady;
use hermes_testkit::control::{Bed, sigkill, trusted, until};

const PAUSE: Duration = Duration::from_millis(5);

fn show(bed: &Bed) -> Value {
    serde_json::from_str(&bed.told(&["authority", "show", "--json"], "")).unwrap()
}

/// All nodes have what the rotation wants of them: whoever signs now has issued their certificates.
fn are_there(bed: &Bed, nodes: usize) -> bool {
    let shown = show(bed);
    let all = shown["nodes"].as_array().unwrap();
    let is_there = |node: &&Value| node["lacks"] == "" && node["connected"] == true && node["current"] == true;
    shown["stage"] == "leaving" && all.iter().filter(is_there).count() == nodes
}

/// A bed with two nodes that run, and what carries a tunnel's bytes back.
async fn running(bed: Bed, more: &str) -> (Bed, Running, Running, Origin) {
    bed.origin(7001, "one");
    let echo = stream::echo(origin::listen(bed.socket(7007)).unwrap()).unwrap();
    let tunnels = format!(
        "---\n{{kind: Service, name: ECHO, authority: \"ECHO:7\", at: {{node: server, tcp: \"{}\"}}, for: {{users: ann}}}}\n",
        echo.address()
    );
    bed.told(&["apply", "-f", "-"], &(bed.documents(7001) + &tunnels + more));
    let laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("APP", "one").await;
    until("both run it", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
    (bed, laptop, server, echo)
}

/// Asks without a pause until this holds.
async fn asking(client: &mut Steady, what: &str, mut holds: impl FnMut() -> bool) -> u32 {
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
fn thief(bed: &Bed, name: &str, from: &Path) -> Running {
    let directory = bed.state(name);
    std::fs::create_dir(&directory).unwrap();
    for file in ["node.pem", "node.key"] {
        std::fs::copy(from.join(file), directory.join(file)).unwrap();
    }
    std::fs::copy(bed.state("laptop/ca.pem"), directory.join("ca.pem")).unwrap();
    let document = std::fs::read_to_string(bed.state("laptop/document.json")).unwrap();
    let (own, other) = (bed.socket(8080).to_string(), bed.socket(8082).to_string());
    std::fs::write(directory.join("document.json"), document.replace(&own, &other)).unwrap();
    let program = Program::new(name, hermes(), bed.directory.path()).args(["proxy", "--config"]);
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
    let (bed, _laptop, _server, _echo) = running(Bed::new().await, third).await;
    let before = show(&bed);
    assert!(before["stage"] == "steady" && before["leaving"].is_null(), "{before}");
    let (token, idle) = (bed.token("third"), bed.state("idle.json"));
    std::fs::copy(bed.state("controller/operator.json"), &idle).unwrap();
    copy(&bed.state("laptop"), &bed.state("before"));
    let mut traffic = Traffic::default();
    traffic.tunnel(Way::Connect(bed.socket(8080), "ECHO:7".to_owned()), 7);
    let mut client = Steady::new(bed.socket(8080), "APP");
    let said = bed.refused(&["authority", "finish"], "");
    assert!(said.contains("no CA rotation in progress"), "{said}");

    let said = bed.told(&["authority", "rotate"], "");
    assert!(said.contains(" is to sign, until ") || said.contains(" has signed before, until "), "{said}");
    assert!(bed.refused(&["authority", "rotate"], "").contains("CA rotation in progress"));
    let mut requests = asking(&mut client, "all have the new one", || are_there(&bed, 2)).await;
    for node in ["laptop", "server"] {
        assert_eq!(trusted(&bed.state(node)), (2, true), "{node}");
    }
    let said = bed.told(&["authority", "finish"], "");
    assert!(said.contains("is trusted no more"), "{said}");
    let one = |node: &str| trusted(&bed.state(node)) == (1, true);
    requests += asking(&mut client, "the old one is trusted no more", || one("laptop") && one("server")).await;
    requests += asking(&mut client, "and all goes on", || true).await;
    let report = traffic.finish().await;
    println!("{requests} requests, {report}");
    report.assert_whole(20);

    let after = show(&bed);
    assert!(after["stage"] == "steady" && after["signs"]["fingerprint"] != before["signs"]["fingerprint"], "{after}");
    assert_eq!(after["former"][0]["fingerprint"], before["signs"]["fingerprint"], "{after}");
    // What the old one has signed is worth nothing to a node, and what the new one has is.
    let status = |authority: &str| {
        let args = ["--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--proxy"];
        let mut curl = Command::new("curl");
        curl.args(args).arg(format!("http://{}", bed.socket(8082))).arg(format!("http://{authority}/"));
        String::from_utf8(curl.output().unwrap().stdout).unwrap()
    };
    let newer = thief(&bed, "newer", &bed.state("laptop"));
    until("the new certificate is believed", || status("APP") == "200").await;
    newer.end(Duration::from_secs(5)).unwrap();
    let _older = thief(&bed, "older", &bed.state("before"));
    until("it listens", || status("APP") != "000").await;
    assert_ne!(status("APP"), "200", "a certificate of the old authority");
    // A token of before, and one of now.
    let _third = bed.node("third", Some(&token));
    let _fourth = bed.node("fourth", Some(&bed.token("fourth")));
    until("all run", || bed.told(&["node", "list"], "").matches(" running\n").count() == 4).await;
    // An operator's file that nobody has used meanwhile.
    let used = |path: &Path| std::fs::read_to_string(path).unwrap().matches("BEGIN CERTIFICATE").count();
    let list = ["node", "list", "--operator", idle.to_str().unwrap()];
    let stale = std::fs::read_to_string(&idle).unwrap();
    assert!(bed.hermes(&list, "").status.success());
    assert_ne!(std::fs::read_to_string(&idle).unwrap(), stale, "it was written anew");
    assert!(used(&idle) > 1 && bed.hermes(&list, "").status.success());
    let audit = hermes_testkit::control::audit(&bed.state("controller"));
    for what in ["authority-rotate", "authority-switch", "authority-finish", "operator-renew"] {
        assert!(audit.contains(&format!("\"what\":\"{what}\"")), "{what}: {audit}");
    }
}

#[tokio::test]
async fn who_was_away_all_the_time_comes_back() {
    let (bed, laptop, _server, _echo) = running(Bed::new().await, "").await;
    sigkill(laptop);
    bed.told(&["authority", "rotate"], "");
    until("the server is there", || are_there(&bed, 1)).await;
    let said = bed.refused(&["authority", "finish"], "");
    assert!(said.contains("node laptop is disconnected, and may have a certificate of the old CA"), "{said}");
    assert!(!said.contains("node server"), "{said}");
    let shown = bed.told(&["authority", "show"], "");
    assert!(shown.contains("node laptop is disconnected") && shown.contains("node server is there"), "{shown}");
    bed.told(&["authority", "finish", "--force"], "");
    until("the server trusts one", || trusted(&bed.state("server")) == (1, true)).await;
    let _laptop = bed.node("laptop", None);
    bed.until_answers("APP", "one").await;
    assert_eq!(trusted(&bed.state("laptop")), (1, true));
}

#[tokio::test]
async fn a_rotation_is_taken_back_under_traffic() {
    let (bed, _laptop, _server, _echo) = running(Bed::new().await, "").await;
    let before = show(&bed);
    assert!(bed.refused(&["authority", "cancel"], "").contains("no CA rotation in progress"));
    let mut client = Steady::new(bed.socket(8080), "APP");
    bed.told(&["authority", "rotate"], "");
    asking(&mut client, "all have the new one", || are_there(&bed, 2)).await;
    bed.told(&["authority", "cancel"], "");
    asking(&mut client, "all have the old one", || are_there(&bed, 2)).await;
    bed.told(&["authority", "finish"], "");
    asking(&mut client, "it is as it was", || trusted(&bed.state("laptop")) == (1, true)).await;
    let after = show(&bed);
    assert_eq!((&after["stage"], &after["signs"]), (&"steady".into(), &before["signs"]));
}

#[tokio::test]
async fn nodes_follow_at_whichever_controller_they_are() {
    let (mut bed, _laptop, _server, _echo) = running(Bed::with_etcd().await, "").await;
    let mut client = Steady::new(bed.socket(8080), "APP");
    // Nodes are at the first one.
    let at_second = |bed: &Bed, args: &[&str]| {
        let output = bed.hermes_at("second", args, "");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    at_second(&bed, &["authority", "rotate"]);
    asking(&mut client, "all have the new one", || are_there(&bed, 2)).await;
    until("the second one knows", || bed.hermes_at("second", &["authority", "finish"], "").status.success()).await;
    asking(&mut client, "the old one is gone", || trusted(&bed.state("laptop")) == (1, true)).await;
    // The second one has followed with its own certificate.
    bed.kill_controller();
    until("both are at the second one", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
    asking(&mut client, "and all goes on", || true).await;
}

#[tokio::test]
async fn an_administrator_of_a_provider_rotates_nothing() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], "kind: Overlay\nname: test\nproviders: {acme: {}}\n");
    let file = bed.state("acme.json");
    let file = file.to_str().unwrap();
    bed.told(&["operator", "create", "--name", "joe", "--provider", "acme", "-o", file], "");
    let acme = |args: &[&str]| bed.hermes(&[args, &["--operator", file]].concat(), "");
    for verb in ["show", "rotate", "finish", "cancel"] {
        let output = acme(&["authority", verb]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("only operators of the whole overlay"), "{verb}: {said}");
    }
    assert_eq!(show(&bed)["stage"], "steady");
    // Its file follows as all do.
    bed.told(&["authority", "rotate"], "");
    until("the new one signs", || show(&bed)["stage"] == "leaving").await;
    bed.told(&["authority", "finish"], "");
    assert!(acme(&["get"]).status.success() && acme(&["get"]).status.success());
    let audit = hermes_testkit::control::audit(&bed.state("controller"));
    assert!(audit.contains("\"what\":\"authority-rotate\",\"by\":\"provider/acme/joe\""), "{audit}");
}
