//! Changes that go out in waves: to some nodes first, and back where that does not go well.

use std::net::TcpListener;

use hermes_testkit::control::{Bed, until};

/// Three servers that nothing leads to yet, and one wave for each of them.
fn documents(bed: &Bed, timeout: &str, settle: &str) -> String {
    let mut text = format!("kind: Overlay\nname: test\nrollout: {{first: 1, growth: 1, settle: {settle}}}\n");
    for (at, node) in ["a", "b", "c"].iter().enumerate() {
        let socket = bed.socket(9443 + u16::try_from(at).unwrap());
        text += &format!("---\n{{kind: Node, name: {node}, address: \"{socket}\", bind: \"{socket}\"}}\n");
    }
    let at = |node: &str| format!("{{node: {node}, http: \"{}\"}}", bed.socket(7001));
    let all = ["a", "b", "c"].map(at).join(", ");
    text + &format!("---\n{{kind: Service, name: APP, at: [{all}], for: everyone, timeout: {{idle: {timeout}}}}}\n")
}

fn timeouts(bed: &Bed) -> Vec<String> {
    let timeout = |node: &&str| {
        let text = std::fs::read_to_string(bed.state(node).join("document.json")).unwrap_or_default();
        let document: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        document["routes"][0]["timeout"]["idle"].as_str().unwrap_or_default().to_owned()
    };
    ["a", "b", "c"].iter().map(timeout).collect()
}

#[tokio::test]
async fn a_change_goes_out_in_waves_and_a_controller_may_die_meanwhile() {
    let mut bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &documents(&bed, "1s", "1h"));
    let _nodes = ["a", "b", "c"].map(|node| bed.node(node, Some(&bed.token(node))));
    until("all run it", || timeouts(&bed) == ["1s", "1s", "1s"]).await;
    let said = bed.told(&["apply", "-f", "-", "--wait", "0s"], &documents(&bed, "2s", "1h"));
    assert!(said.contains("is at step 1 of 3"), "{said}");
    until("the first one runs it", || timeouts(&bed) == ["2s", "1s", "1s"]).await;
    // One after the other, and what another controller begins with is the same.
    let said = bed.refused(&["apply", "-f", "-"], &documents(&bed, "3s", "1h"));
    assert!(said.contains("rollout of revision"), "{said}");
    bed.kill_controller();
    bed.start_controller().await;
    until("nodes are back", || bed.told(&["node", "list"], "").matches(" running\n").count() >= 1).await;
    assert_eq!(timeouts(&bed), ["2s", "1s", "1s"]);
    let said = bed.told(&["rollout", "show"], "");
    assert!(said.contains("step 1 of 3, at a"), "{said}");
    bed.told(&["rollout", "cancel"], "");
    until("all run what was", || timeouts(&bed) == ["1s", "1s", "1s"]).await;
    assert!(bed.told(&["rollout", "show"], "").contains("canceled by operator/root"));
    bed.told(&["apply", "-f", "-", "--wait", "0s"], &documents(&bed, "4s", "1h"));
    until("the first one runs it", || timeouts(&bed) == ["4s", "1s", "1s"]).await;
    bed.told(&["rollout", "finish"], "");
    until("all run it", || timeouts(&bed) == ["4s", "4s", "4s"]).await;
    let said = bed.told(&["apply", "-f", "-", "--now"], &documents(&bed, "5s", "100ms"));
    assert_eq!(said.matches("runs it").count(), 3, "{said}");
    // What nobody refuses goes through by itself.
    let said = bed.told(&["apply", "-f", "-"], &documents(&bed, "6s", "100ms"));
    assert_eq!(said.matches("runs it").count(), 3, "{said}");
    let is_over = || bed.told(&["rollout", "show"], "").contains("nothing goes out");
    until("it is over", is_over).await;
    // What only takes away goes out, too, and is over by itself; so is what changes nothing that is there.
    bed.told(&["delete", "Service/APP"], "");
    until("it is over", is_over).await;
    let more = "{kind: Node, name: d}\n---\n{kind: User, name: ann, nodes: d}\n";
    bed.told(&["apply", "-f", "-"], more);
    until("it is over", is_over).await;
}

/// Whoever waits for a change hears that another one came before nodes had it, and need not wait for ever.
#[tokio::test]
async fn what_another_change_overtakes_is_said_to_be() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &documents(&bed, "1s", "1h"));
    let _nodes = ["a", "b", "c"].map(|node| bed.node(node, Some(&bed.token(node))));
    until("all run it", || timeouts(&bed) == ["1s", "1s", "1s"]).await;
    let said = std::thread::scope(|scope| {
        let first = scope.spawn(|| bed.told(&["apply", "-f", "-", "--wait", "5m"], &documents(&bed, "2s", "1h")));
        while !bed.told(&["rollout", "show"], "").contains("step 1 of 3") && !first.is_finished() {}
        bed.told(&["apply", "-f", "-", "--now"], &documents(&bed, "3s", "1h"));
        first.join().unwrap()
    });
    // The first one may have had it in the meantime.
    for node in ["b", "c"] {
        assert!(said.contains(&format!("node {node} gets what revision ")), "{said}");
    }
    assert_eq!(timeouts(&bed), ["3s", "3s", "3s"]);
}

/// What goes to nodes beside a change that goes out is no reason to take that back; nor is a node that is sent away.
#[tokio::test]
async fn who_is_revoked_meanwhile_stops_no_change() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &documents(&bed, "1s", "2s"));
    let _nodes = ["a", "b", "c"].map(|node| bed.node(node, Some(&bed.token(node))));
    until("all run it", || timeouts(&bed) == ["1s", "1s", "1s"]).await;
    for (node, timeout) in [("c", "2s"), ("a", "3s")] {
        bed.told(&["apply", "-f", "-", "--wait", "0s"], &documents(&bed, timeout, "2s"));
        until("the first one runs it", || timeouts(&bed).contains(&timeout.to_owned())).await;
        bed.told(&["node", "revoke", node], "");
        until("it is over", || bed.told(&["rollout", "show"], "").contains("nothing goes out")).await;
        assert!(!bed.told(&["rollout", "show"], "").contains("taken back"), "{node}");
        assert_eq!(timeouts(&bed)[1], timeout);
    }
}

#[tokio::test]
async fn what_a_node_refuses_is_taken_back_before_others_have_it() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &documents(&bed, "1s", "0s"));
    let _nodes = ["a", "b", "c"].map(|node| bed.node(node, Some(&bed.token(node))));
    until("all run it", || timeouts(&bed) == ["1s", "1s", "1s"]).await;
    // The port that the second one is to listen on is somebody else's.
    let _taken = TcpListener::bind(bed.socket(9999)).unwrap();
    let wrong = documents(&bed, "2s", "0s")
        .replace(":9444\", bind", ":9999\", bind")
        .replace(&format!("bind: \"{}\"", bed.socket(9444)), &format!("bind: \"{}\"", bed.socket(9999)));
    let output = bed.hermes(&["apply", "-f", "-"], &wrong);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("taken back: node b refused it"), "{said}");
    assert_eq!(output.status.code(), Some(1));
    until("all run what was", || timeouts(&bed) == ["1s", "1s", "1s"]).await;
    let get = bed.told(&["get", "Node/b"], "");
    assert!(get.contains(":9444") && !get.contains(":9999"), "{get}");
    let audit = hermes_testkit::control::audit(&bed.state("controller"));
    assert!(audit.contains("take-back"), "{audit}");
}

/// Two servers of one service, and a device that uses it; where they find its origin.
fn served(bed: &Bed, origin: u16) -> String {
    let mut text = "kind: Overlay\nname: test\nrollout: {first: 1, growth: 1, settle: 1m}\n".to_owned();
    for (node, port) in [("a", 9443), ("b", 9444)] {
        let socket = bed.socket(port);
        text += &format!("---\n{{kind: Node, name: {node}, address: \"{socket}\", bind: \"{socket}\"}}\n");
    }
    let at = |node: &str| format!("{{node: {node}, http: \"{}\"}}", bed.socket(origin));
    let (apps, a, b) = (bed.socket(8080), at("a"), at("b"));
    text + &format!(
        "---\n{{kind: Node, name: laptop, links: [a, b], apps: {{bind: \"{apps}\"}}}}\n---\n\
         {{kind: Service, name: APP, at: [{a}, {b}], for: everyone}}\n"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_makes_sessions_fail_is_taken_back() {
    let bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &served(&bed, 7001));
    let _nodes = ["a", "b", "laptop"].map(|node| bed.node(node, Some(&bed.token(node))));
    bed.until_answers("APP", "one").await;
    until("all run it", || bed.told(&["node", "list"], "").matches(" running").count() == 3).await;
    // Nobody listens there, which no node can know before sessions come.
    bed.told(&["apply", "-f", "-", "--wait", "0s"], &served(&bed, 7999));
    let is_back = || {
        let _ = bed.get("APP");
        bed.told(&["rollout", "show"], "").contains("was taken back: node a is unhealthy: ")
    };
    until("it is taken back", is_back).await;
    let untouched = std::fs::read_to_string(bed.state("b/document.json")).unwrap();
    assert!(!untouched.contains(":7999"), "the second one has never had it");
    bed.until_answers("APP", "one").await;
}

/// A provider cancels only its own rollout; an owner who waited for it gets the next turn.
#[tokio::test]
async fn a_provider_cancels_its_own_and_others_have_their_turn() {
    let bed = Bed::new().await;
    let mut all =
        "kind: Overlay\nname: test\nproviders: {acme: {}, bella: {}}\nrollout: {first: 1, growth: 1, settle: 1h}\n"
            .to_owned();
    for (at, node) in ["a", "b", "c"].iter().enumerate() {
        let socket = bed.socket(9443 + u16::try_from(at).unwrap());
        all += &format!(
            "---\n{{kind: Node, name: {node}, address: \"{socket}\", bind: \"{socket}\", role: standalone, providers: [acme, bella]}}\n"
        );
    }
    let at = |node: &str| format!("{{node: {node}, http: \"{}\"}}", bed.socket(7001));
    let at = ["a", "b", "c"].map(at).join(", ");
    let entry = bed.socket(8080);
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
    bed.told(&["apply", "-f", "-", "--now"], &both);
    let _nodes = ["a", "b", "c"].map(|node| bed.node(node, Some(&bed.token(node))));
    until("all run it", || timeouts(&bed) == ["1s", "1s", "1s"]).await;
    let file = |provider: &str| bed.state(&format!("{provider}.json")).to_str().unwrap().to_owned();
    for provider in ["acme", "bella"] {
        bed.told(&["operator", "create", "--name", "joe", "--provider", provider, "-o", &file(provider)], "");
    }
    let as_one = |provider: &str, args: &[&str], input: &str| {
        let output = bed.hermes(&[args, &["--operator", &file(provider)]].concat(), input);
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let apply =
        |provider: &str, idle: &str| as_one(provider, &["apply", "-f", "-", "--wait", "0s"], &service(provider, idle));
    let (is_done, said) = apply("acme", "2s");
    assert!(is_done, "{said}");
    let (is_done, said) = apply("bella", "2s");
    assert!(!is_done && said.contains("rollout of revision"), "{said}");
    let (is_done, said) = as_one("bella", &["rollout", "cancel"], "");
    assert!(!is_done && said.contains("only operators of the whole overlay"), "{said}");
    let (is_done, said) = as_one("acme", &["rollout", "cancel"], "");
    assert!(is_done, "{said}");
    until("it is over", || bed.told(&["rollout", "show"], "").contains("nothing goes out")).await;
    let (is_done, said) = apply("acme", "3s");
    assert!(!is_done && said.contains("has the next turn"), "{said}");
    let (is_done, said) = apply("bella", "3s");
    assert!(is_done, "{said}");
}
