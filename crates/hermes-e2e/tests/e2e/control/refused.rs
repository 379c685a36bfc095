//! What is refused, and said: wrong documents, and tokens that are none, used or another overlay's.

use hermes_testkit::binary::hermes;
use hermes_testkit::control::{Bed, until};

#[tokio::test]
async fn a_wrong_document_changes_nothing_and_all_of_it_is_told() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let wrong = "{kind: Service, name: B, at: {node: sever, http: \"127.0.0.1:1\"}, for: {users: bob}}\n---\n{kind: User, name: eve}\n";
    let said = bed.refused(&["apply", "-f", "-"], wrong);
    for words in [
        "Service/B: at[0].node: there is no node sever (did you mean \"server\"?)",
        "Service/B: for.users[0]: there is no user bob",
    ] {
        assert!(said.contains(words), "{said}");
    }
    assert!(!bed.told(&["get"], "").contains("eve"));
    let said = bed.refused(&["apply", "-f", "-"], "kind: Nodes\nname: x\nrol: standalone\n");
    assert!(said.contains("rol") && said.contains("did you mean \"role\"?"), "{said}");
    let said = bed.refused(&["delete", "User/ann"], "");
    assert!(said.contains("Service/APP: for.users[0]: there is no user ann"), "{said}");
    let said = bed.refused(&["apply", "--since", "0", "-f", "-"], &bed.documents(7002));
    assert!(said.contains("Service/APP changed in revision"), "{said}");
    // What comes out goes in again.
    let all = bed.told(&["get"], "");
    assert!(bed.told(&["apply", "-f", "-"], &all).contains("nothing changes"), "{all}");
}

#[tokio::test]
async fn a_token_that_is_none_or_used_or_anothers_makes_no_node() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let said = bed.refused(&["token", "create", "--node", "nobody"], "");
    assert!(said.contains("there is no Node/nobody"), "{said}");
    let refuses = async |name: &str, token: Option<&str>, words: &str| {
        let mut node = bed.node(name, token);
        until("it gives up", || node.exited().unwrap().is_some()).await;
        assert!(bed.log(name).contains(words), "{}", bed.log(name));
    };
    refuses("a", None, "give it --token-file").await;
    refuses("b", Some("hermes1.x.y.z"), "invalid token").await;
    let other = Bed::new().await;
    other.told(&["apply", "-f", "-"], &other.documents(7001));
    refuses("c", Some(&other.token("laptop")), "unreachable").await;
    let token = bed.token("laptop");
    let _laptop = bed.node("laptop", Some(&token));
    until("it has enrolled", || bed.log("laptop").contains("under control")).await;
    refuses("d", Some(&token), "this token is used").await;
    // Another secret for a token that is there.
    let token = bed.token("server");
    let mut parts: Vec<_> = token.split('.').map(str::to_owned).collect();
    parts[2] = parts[2].chars().rev().collect();
    refuses("e", Some(&parts.join(".")), "this token is used").await;
}

/// The first document of a node is acknowledged when it runs, and not before; one that it cannot run is not kept.
#[tokio::test]
async fn a_first_document_that_cannot_run_is_refused_and_the_next_one_runs() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let taken = std::net::TcpListener::bind(bed.socket(8080)).unwrap();
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    until("it is refused", || bed.told(&["node", "list"], "").contains("refuses its document: ")).await;
    assert!(!bed.directory.path().join("laptop/document.json").exists());
    let elsewhere = bed.documents(7001).replace(&bed.socket(8080).to_string(), &bed.socket(8081).to_string());
    let said = bed.told(&["apply", "-f", "-"], &elsewhere);
    assert!(said.contains("node laptop runs it"), "{said}");
    assert!(std::net::TcpStream::connect(bed.socket(8081)).is_ok());
    drop(taken);
}

#[tokio::test]
async fn a_program_that_the_overlay_does_not_list_gets_nothing_new() {
    let bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.origin(7002, "two");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("APP", "one").await;
    let listed = |port: u16, digest: &str| {
        bed.documents(port).replace("name: test\n", &format!("name: test\nprograms: {digest}\n"))
    };
    let said = bed.refused(&["apply", "-f", "-"], &listed(7001, "sha256"));
    assert!(said.contains("Overlay/test: programs: invalid SHA-256 \"sha256\""), "{said}");
    let other = "0".repeat(64);
    let output = bed.hermes(&["apply", "-f", "-"], &listed(7002, &format!("\"{other}\"")));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("node server refuses it: program ") && !output.status.success(), "{said}");
    assert_eq!(bed.get("APP"), Some((200, "one".to_owned())), "it goes on with what it has");
    let audit = hermes_testkit::control::audit(&bed.state("controller"));
    assert!(audit.contains("is not in the overlay's `programs`"), "{audit}");
    // What is listed gets what it has missed, at once.
    let own = sha256_of(hermes());
    bed.told(&["apply", "-f", "-"], &listed(7002, &format!("[\"{other}\", {own}]")));
    bed.until_answers("APP", "two").await;
}

fn sha256_of(program: &str) -> String {
    let output = std::process::Command::new("sha256sum").arg(program).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

/// No event repeats an order that found no descriptors: the node retries it by itself.
#[tokio::test]
async fn an_order_that_found_no_descriptors_is_retried() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let token = bed.token("server");
    let server = bed.node("server", Some(&token));
    // It is connected: without descriptors it could not connect, and would get no order.
    until("it runs", || bed.told(&["node", "list"], "").contains(" running\n")).await;
    let applied = || bed.log("server").matches("applied").count();
    let before = applied();
    let limit = |most: usize| {
        let most = format!("--nofile={most}:");
        let set = std::process::Command::new("prlimit").args(["--pid", &server.pid().to_string(), &most]).status();
        assert!(set.unwrap().success());
    };
    // None at all: the numbers of those that it has may have holes between them.
    limit(3);
    bed.told(&["apply", "-f", "-"], &bed.documents(7001).replace(":9443", ":9444"));
    until("the order fails", || bed.log("server").contains("the order failed for want of resources")).await;
    let failed = applied();
    limit(4096);
    until("the order is applied", || applied() > failed.max(before)).await;
}
