//! The outcome of a change when the store does not answer, and when it has lost writes.

use nix::sys::signal::{Signal, kill};

use hermes_testkit::control::{ControllerFixture, audit, until};

#[tokio::test]
async fn an_unknown_outcome_is_no_rejection_and_is_settled_later() {
    let fixture = ControllerFixture::with_etcd().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    kill(fixture.etcd(), Signal::SIGSTOP).unwrap();
    let output = fixture.hermes(&["apply", "-f", "-"], &fixture.documents(7002));
    let printed = String::from_utf8(output.stderr).unwrap();
    kill(fixture.etcd(), Signal::SIGCONT).unwrap();
    assert_eq!(output.status.code(), Some(3), "{printed}");
    assert!(printed.contains("outcome unknown"), "{printed}");
    let lines = || {
        let text = audit(&fixture.state("controller"));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<serde_json::Value>>()
    };
    let apply = lines().into_iter().rfind(|line| line["what"] == "apply").unwrap();
    assert!(apply["unknown"].is_string() && apply["refused"].is_null(), "{apply}");
    until("it is settled", || lines().iter().any(|line| line["what"] == "settle")).await;
    let settled = lines().into_iter().rfind(|line| line["what"] == "settle").unwrap();
    assert_eq!(settled["by"], "operator/root", "{settled}");
    // A paused store may make the change or not; the audit log has to match it.
    let listed: serde_json::Value =
        serde_json::from_str(&fixture.hermes_ok(&["get", "Service/APP", "--json"], "")).unwrap();
    let is_made = settled["refused"].is_null();
    assert_eq!(listed.to_string().contains(":7002"), is_made, "{listed} {settled}");
    assert_eq!(listed["revision"] == settled["revision"], is_made, "{listed} {settled}");
}

#[tokio::test]
async fn a_wiped_store_is_detected_and_nodes_continue() {
    let mut fixture = ControllerFixture::with_etcd().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    fixture.kill_etcd();
    std::fs::remove_dir_all(fixture.state("etcd")).unwrap();
    fixture.start_etcd().await;
    until("the controllers notice it", || {
        ["controller", "second"].iter().all(|name| fixture.log(name).contains("the store has lost revision"))
    })
    .await;
    let output = fixture.refused(&["apply", "-f", "-"], &fixture.documents(7002));
    assert!(output.contains("the store has lost revision") && output.contains("hermes backup"), "{output}");
    // The known state is still served, also to a node that reconnects.
    assert_eq!(fixture.get("APP"), Some((200, "one".to_owned())));
    assert!(fixture.hermes_ok(&["get", "Service/APP"], "").contains(":7001"));
    let log = fixture.log("controller");
    let errors = log.lines().filter(|line| line.contains("ERROR") && line.contains("the store has lost revision"));
    assert_eq!(errors.count(), 1, "it is said once: {log}");
}
