//! Rollouts in steps: some nodes first, and a rollback if sessions fail.

use std::net::TcpListener;

use hermes_testkit::control::{ControllerFixture, until};

/// Three servers that nothing leads to yet, and one wave for each of them.
fn documents(fixture: &ControllerFixture, timeout: &str, settle: &str) -> String {
    let mut text = format!("kind: Overlay\nname: test\nrollout: {{first: 1, growth: 1, settle: {settle}}}\n");
    for (at, node) in ["a", "b", "c"].iter().enumerate() {
        let socket = fixture.socket(9443 + u16::try_from(at).unwrap());
        text += &format!("---\n{{kind: Node, name: {node}, address: \"{socket}\", bind: \"{socket}\"}}\n");
    }
    let at = |node: &str| format!("{{node: {node}, http: \"{}\"}}", fixture.socket(7001));
    let all = ["a", "b", "c"].map(at).join(", ");
    text + &format!("---\n{{kind: Service, name: APP, at: [{all}], for: everyone, timeout: {{idle: {timeout}}}}}\n")
}

fn timeouts(fixture: &ControllerFixture) -> Vec<String> {
    let timeout = |node: &&str| {
        let text = std::fs::read_to_string(fixture.state(node).join("document.json")).unwrap_or_default();
        let document: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        document["routes"][0]["timeout"]["idle"].as_str().unwrap_or_default().to_owned()
    };
    ["a", "b", "c"].iter().map(timeout).collect()
}

#[tokio::test]
async fn a_change_goes_out_in_waves_and_a_controller_may_die_meanwhile() {
    let mut fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, "1s", "1h"));
    let _nodes = ["a", "b", "c"].map(|node| fixture.node(node, Some(&fixture.token(node))));
    until("all run it", || timeouts(&fixture) == ["1s", "1s", "1s"]).await;
    let output = fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &documents(&fixture, "2s", "1h"));
    assert!(output.contains("is at step 1 of 3"), "{output}");
    until("the first one runs it", || timeouts(&fixture) == ["2s", "1s", "1s"]).await;
    // One after the other, and what another controller begins with is the same.
    let output = fixture.refused(&["apply", "-f", "-"], &documents(&fixture, "3s", "1h"));
    assert!(output.contains("rollout of revision"), "{output}");
    fixture.kill_controller();
    fixture.start_controller().await;
    until("nodes are back", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() >= 1).await;
    assert_eq!(timeouts(&fixture), ["2s", "1s", "1s"]);
    let output = fixture.hermes_ok(&["rollout", "show"], "");
    assert!(output.contains("step 1 of 3, at a"), "{output}");
    fixture.hermes_ok(&["rollout", "cancel"], "");
    until("all run what was", || timeouts(&fixture) == ["1s", "1s", "1s"]).await;
    assert!(fixture.hermes_ok(&["rollout", "show"], "").contains("canceled by operator/root"));
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &documents(&fixture, "4s", "1h"));
    until("the first one runs it", || timeouts(&fixture) == ["4s", "1s", "1s"]).await;
    fixture.hermes_ok(&["rollout", "finish"], "");
    until("all run it", || timeouts(&fixture) == ["4s", "4s", "4s"]).await;
    let output = fixture.hermes_ok(&["apply", "-f", "-", "--now"], &documents(&fixture, "5s", "100ms"));
    assert_eq!(output.matches("runs it").count(), 3, "{output}");
    // What nobody refuses goes through by itself.
    let output = fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, "6s", "100ms"));
    assert_eq!(output.matches("runs it").count(), 3, "{output}");
    let is_over = || fixture.hermes_ok(&["rollout", "show"], "").contains("nothing goes out");
    until("it is over", is_over).await;
    // What only takes away goes out, too, and is over by itself; so is what changes nothing that is there.
    fixture.hermes_ok(&["delete", "Service/APP"], "");
    until("it is over", is_over).await;
    let more = "{kind: Node, name: d}\n---\n{kind: User, name: ann, nodes: d}\n";
    fixture.hermes_ok(&["apply", "-f", "-"], more);
    until("it is over", is_over).await;
}

/// Whoever waits for a change hears that another one came before nodes had it, and need not wait for ever.
#[tokio::test]
async fn a_superseded_change_is_reported() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, "1s", "1h"));
    let _nodes = ["a", "b", "c"].map(|node| fixture.node(node, Some(&fixture.token(node))));
    until("all run it", || timeouts(&fixture) == ["1s", "1s", "1s"]).await;
    let output = std::thread::scope(|scope| {
        let first =
            scope.spawn(|| fixture.hermes_ok(&["apply", "-f", "-", "--wait", "5m"], &documents(&fixture, "2s", "1h")));
        while !fixture.hermes_ok(&["rollout", "show"], "").contains("step 1 of 3") && !first.is_finished() {}
        fixture.hermes_ok(&["apply", "-f", "-", "--now"], &documents(&fixture, "3s", "1h"));
        first.join().unwrap()
    });
    // The first one may have had it in the meantime.
    for node in ["b", "c"] {
        assert!(output.contains(&format!("node {node} gets what revision ")), "{output}");
    }
    assert_eq!(timeouts(&fixture), ["3s", "3s", "3s"]);
}

/// What goes to nodes beside a change that goes out is no reason to take that back; nor is a node that is sent away.
#[tokio::test]
async fn a_node_revoked_during_a_rollout_does_not_block_it() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, "1s", "2s"));
    let _nodes = ["a", "b", "c"].map(|node| fixture.node(node, Some(&fixture.token(node))));
    until("all run it", || timeouts(&fixture) == ["1s", "1s", "1s"]).await;
    for (node, timeout) in [("c", "2s"), ("a", "3s")] {
        fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &documents(&fixture, timeout, "2s"));
        until("the first one runs it", || timeouts(&fixture).contains(&timeout.to_owned())).await;
        fixture.hermes_ok(&["node", "revoke", node], "");
        until("it is over", || fixture.hermes_ok(&["rollout", "show"], "").contains("nothing goes out")).await;
        assert!(!fixture.hermes_ok(&["rollout", "show"], "").contains("taken back"), "{node}");
        assert_eq!(timeouts(&fixture)[1], timeout);
    }
}

#[tokio::test]
async fn a_change_that_a_node_rejects_is_rolled_back_before_other_nodes() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, "1s", "0s"));
    let _nodes = ["a", "b", "c"].map(|node| fixture.node(node, Some(&fixture.token(node))));
    until("all run it", || timeouts(&fixture) == ["1s", "1s", "1s"]).await;
    // The port that the second one is to listen on is somebody else's.
    let _taken = TcpListener::bind(fixture.socket(9999)).unwrap();
    let wrong = documents(&fixture, "2s", "0s")
        .replace(":9444\", bind", ":9999\", bind")
        .replace(&format!("bind: \"{}\"", fixture.socket(9444)), &format!("bind: \"{}\"", fixture.socket(9999)));
    let output = fixture.hermes(&["apply", "-f", "-"], &wrong);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("taken back: node b refused the change"), "{text}");
    assert_eq!(output.status.code(), Some(1));
    until("all run what was", || timeouts(&fixture) == ["1s", "1s", "1s"]).await;
    let get = fixture.hermes_ok(&["get", "Node/b"], "");
    assert!(get.contains(":9444") && !get.contains(":9999"), "{get}");
    let audit = hermes_testkit::control::audit(&fixture.state("controller"));
    assert!(audit.contains("take-back"), "{audit}");
}

/// Two servers of one service, and a device that uses it; where they find its origin.
fn served(fixture: &ControllerFixture, origin: u16) -> String {
    let mut text = "kind: Overlay\nname: test\nrollout: {first: 1, growth: 1, settle: 1m}\n".to_owned();
    for (node, port) in [("a", 9443), ("b", 9444)] {
        let socket = fixture.socket(port);
        text += &format!("---\n{{kind: Node, name: {node}, address: \"{socket}\", bind: \"{socket}\"}}\n");
    }
    let at = |node: &str| format!("{{node: {node}, http: \"{}\"}}", fixture.socket(origin));
    let (apps, a, b) = (fixture.socket(8080), at("a"), at("b"));
    text + &format!(
        "---\n{{kind: Node, name: laptop, links: [a, b], apps: {{bind: \"{apps}\"}}}}\n---\n\
         {{kind: Service, name: APP, at: [{a}, {b}], for: everyone}}\n"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_fails_sessions_is_rolled_back() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &served(&fixture, 7001));
    let _nodes = ["a", "b", "laptop"].map(|node| fixture.node(node, Some(&fixture.token(node))));
    fixture.until_answers("APP", "one").await;
    until("all run it", || fixture.hermes_ok(&["node", "list"], "").matches(" running").count() == 3).await;
    // Nobody listens there, which no node can know before sessions come.
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &served(&fixture, 7999));
    let is_back = || {
        let _ = fixture.get("APP");
        fixture.hermes_ok(&["rollout", "show"], "").contains("was taken back: node a is unhealthy: ")
    };
    until("it is taken back", is_back).await;
    let untouched = std::fs::read_to_string(fixture.state("b/document.json")).unwrap();
    assert!(!untouched.contains(":7999"), "the second one has never had it");
    fixture.until_answers("APP", "one").await;
}

/// A provider cancels only its own rollout; an owner who waited for it gets the next turn.
#[tokio::test]
async fn a_provider_cancels_its_own_and_others_have_their_turn() {
    let fixture = ControllerFixture::new().await;
    let mut all =
        "kind: Overlay\nname: test\nproviders: {acme: {}, bella: {}}\nrollout: {first: 1, growth: 1, settle: 1h}\n"
            .to_owned();
    for (at, node) in ["a", "b", "c"].iter().enumerate() {
        let socket = fixture.socket(9443 + u16::try_from(at).unwrap());
        all += &format!(
            "---\n{{kind: Node, name: {node}, address: \"{socket}\", bind: \"{socket}\", role: standalone, providers: [acme, bella]}}\n"
        );
    }
    let at = |node: &str| format!("{{node: {node}, http: \"{}\"}}", fixture.socket(7001));
    let at = ["a", "b", "c"].map(at).join(", ");
    let entry = fixture.socket(8080);
    let entry = format!(
        "---\n{{kind: Node, name: d, links: [a, b, c], providers: [acme, bella], apps: {{bind: \"{entry}\", user: acme/u}}}}\n"
    );
    let service = |provider: &str, idle: &str| {
        format!(
            "{{kind: User, provider: {provider}, name: u, nodes: d}}\n---\n\
             {{kind: Service, provider: {provider}, name: APP, at: [{at}], for: everyone, timeout: {{idle: {idle}}}}}\n"
        )
    };
    let both = format!("{all}{entry}---\n{}---\n{}", service("acme", "1s"), service("bella", "1s"));
    fixture.hermes_ok(&["apply", "-f", "-", "--now"], &both);
    let _nodes = ["a", "b", "c"].map(|node| fixture.node(node, Some(&fixture.token(node))));
    until("all run it", || timeouts(&fixture) == ["1s", "1s", "1s"]).await;
    let file = |provider: &str| fixture.state(&format!("{provider}.json")).to_str().unwrap().to_owned();
    for provider in ["acme", "bella"] {
        fixture.hermes_ok(&["operator", "create", "--name", "joe", "--provider", provider, "-o", &file(provider)], "");
    }
    let as_one = |provider: &str, args: &[&str], input: &str| {
        let output = fixture.hermes(&[args, &["--operator", &file(provider)]].concat(), input);
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let apply =
        |provider: &str, idle: &str| as_one(provider, &["apply", "-f", "-", "--wait", "0s"], &service(provider, idle));
    let (is_done, text) = apply("acme", "2s");
    assert!(is_done, "{text}");
    let (is_done, text) = apply("bella", "2s");
    assert!(!is_done && text.contains("rollout of revision"), "{text}");
    let (is_done, text) = as_one("bella", &["rollout", "cancel"], "");
    assert!(!is_done && text.contains("only operators of the whole overlay"), "{text}");
    let (is_done, text) = as_one("acme", &["rollout", "cancel"], "");
    assert!(is_done, "{text}");
    until("it is over", || fixture.hermes_ok(&["rollout", "show"], "").contains("nothing goes out")).await;
    let (is_done, text) = apply("acme", "3s");
    assert!(!is_done && text.contains("has the next turn"), "{text}");
    let (is_done, text) = apply("bella", "3s");
    assert!(is_done, "{text}");
}
