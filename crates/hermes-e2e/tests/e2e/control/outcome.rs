//! The outcome of a change when the store does not answer, and when it has lost writes.

use nix::sys::signal::{Signal, kill};

use hermes_testkit::control::{Bed, audit, until};

#[tokio::test]
async fn a_change_whose_outcome_is_unknown_is_no_refusal_and_is_settled() {
    let bed = Bed::with_etcd().await;
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    kill(bed.etcd(), Signal::SIGSTOP).unwrap();
    let output = bed.hermes(&["apply", "-f", "-"], &bed.documents(7002));
    let said = String::from_utf8(output.stderr).unwrap();
    kill(bed.etcd(), Signal::SIGCONT).unwrap();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("outcome unknown"), "{said}");
    let lines = || {
        let text = audit(&bed.state("controller"));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<serde_json::Value>>()
    };
    let apply = lines().into_iter().rfind(|line| line["what"] == "apply").unwrap();
    assert!(apply["unknown"].is_string() && apply["refused"].is_null(), "{apply}");
    until("it is settled", || lines().iter().any(|line| line["what"] == "settle")).await;
    let settled = lines().into_iter().rfind(|line| line["what"] == "settle").unwrap();
    assert_eq!(settled["by"], "operator/root", "{settled}");
    // A paused store may make the change or not; the audit log has to match it.
    let listed: serde_json::Value = serde_json::from_str(&bed.told(&["get", "Service/APP", "--json"], "")).unwrap();
    let is_made = settled["refused"].is_null();
    assert_eq!(listed.to_string().contains(":7002"), is_made, "{listed} {settled}");
    assert_eq!(listed["revision"] == settled["revision"], is_made, "{listed} {settled}");
}

#[tokio::test]
async fn a_store_that_was_wiped_is_noticed_at_once_and_nodes_go_on() {
    let mut bed = Bed::with_etcd().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("APP", "one").await;
    bed.kill_etcd();
    std::fs::remove_dir_all(bed.state("etcd")).unwrap();
    bed.start_etcd().await;
    until("the controllers notice it", || {
        ["controller", "second"].iter().all(|name| bed.log(name).contains("the store has lost revision"))
    })
    .await;
    let said = bed.refused(&["apply", "-f", "-"], &bed.documents(7002));
    assert!(said.contains("the store has lost revision") && said.contains("hermes backup"), "{said}");
    // The known state is still served, also to a node that reconnects.
    assert_eq!(bed.get("APP"), Some((200, "one".to_owned())));
    assert!(bed.told(&["get", "Service/APP"], "").contains(":7001"));
    let log = bed.log("controller");
    let errors = log.lines().filter(|line| line.contains("ERROR") && line.contains("the store has lost revision"));
    assert_eq!(errors.count(), 1, "it is said once: {log}");
}
