//! Rejections with reasons: invalid documents, and tokens that are malformed, used or of another overlay.

use hermes_testkit::binary::hermes;
use hermes_testkit::control::{ControllerFixture, until};

#[tokio::test]
async fn an_invalid_document_changes_nothing_and_all_problems_are_listed() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let wrong = "{kind: Service, name: B, at: {node: sever, http: \"127.0.0.1:1\"}, for: {users: bob}}\n---\n{kind: User, name: eve}\n";
    let output = fixture.refused(&["apply", "-f", "-"], wrong);
    for words in [
        "Service/B: at[0].node: unknown node sever (did you mean \"server\"?)",
        "Service/B: for.users[0]: unknown user bob",
    ] {
        assert!(output.contains(words), "{output}");
    }
    assert!(!fixture.hermes_ok(&["get"], "").contains("eve"));
    let output = fixture.refused(&["apply", "-f", "-"], "kind: Nodes\nname: x\nrol: standalone\n");
    assert!(output.contains("rol") && output.contains("did you mean \"role\"?"), "{output}");
    let output = fixture.refused(&["delete", "User/ann"], "");
    assert!(output.contains("Service/APP: for.users[0]: unknown user ann"), "{output}");
    let output = fixture.refused(&["apply", "--since", "0", "-f", "-"], &fixture.documents(7002));
    assert!(output.contains("Service/APP changed in revision"), "{output}");
    // What comes out goes in again.
    let all = fixture.hermes_ok(&["get"], "");
    assert!(fixture.hermes_ok(&["apply", "-f", "-"], &all).contains("no change"), "{all}");
}

#[tokio::test]
async fn a_token_that_is_none_or_used_or_anothers_makes_no_node() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let output = fixture.refused(&["token", "create", "--node", "nobody"], "");
    assert!(output.contains("Node/nobody not found"), "{output}");
    let refuses = async |name: &str, token: Option<&str>, words: &str| {
        let mut node = fixture.node(name, token);
        until("it gives up", || node.exited().unwrap().is_some()).await;
        assert!(fixture.log(name).contains(words), "{}", fixture.log(name));
    };
    refuses("a", None, "give it --token-file").await;
    refuses("b", Some("hermes1.x.y.z"), "invalid token").await;
    let other = ControllerFixture::new().await;
    other.hermes_ok(&["apply", "-f", "-"], &other.documents(7001));
    refuses("c", Some(&other.token("laptop")), "unreachable").await;
    let token = fixture.token("laptop");
    let _laptop = fixture.node("laptop", Some(&token));
    until("it has enrolled", || fixture.log("laptop").contains("under control")).await;
    refuses("d", Some(&token), "this token is used").await;
    // Another secret for a token that is there.
    let token = fixture.token("server");
    let mut parts: Vec<_> = token.split('.').map(str::to_owned).collect();
    parts[2] = parts[2].chars().rev().collect();
    refuses("e", Some(&parts.join(".")), "this token is used").await;
}

/// The first document of a node is acknowledged when it runs, and not before; one that it cannot run is not kept.
#[tokio::test]
async fn a_first_document_that_cannot_run_is_refused_and_the_next_one_runs() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let taken = std::net::TcpListener::bind(fixture.socket(8080)).unwrap();
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    until("it is refused", || fixture.hermes_ok(&["node", "list"], "").contains("refuses its document: ")).await;
    assert!(!fixture.directory.path().join("laptop/document.json").exists());
    let elsewhere =
        fixture.documents(7001).replace(&fixture.socket(8080).to_string(), &fixture.socket(8081).to_string());
    let output = fixture.hermes_ok(&["apply", "-f", "-"], &elsewhere);
    assert!(output.contains("node laptop runs it"), "{output}");
    assert!(std::net::TcpStream::connect(fixture.socket(8081)).is_ok());
    drop(taken);
}

#[tokio::test]
async fn a_program_that_the_overlay_does_not_list_gets_nothing_new() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.origin(7002, "two");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    let listed = |port: u16, digest: &str| {
        fixture.documents(port).replace("name: test\n", &format!("name: test\nprograms: {digest}\n"))
    };
    let text = fixture.refused(&["apply", "-f", "-"], &listed(7001, "sha256"));
    assert!(text.contains("Overlay/test: programs: invalid SHA-256 \"sha256\""), "{text}");
    let other = "0".repeat(64);
    let output = fixture.hermes(&["apply", "-f", "-"], &listed(7002, &format!("\"{other}\"")));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("node server refuses it: program ") && !output.status.success(), "{text}");
    assert_eq!(fixture.get("APP"), Some((200, "one".to_owned())), "it goes on with what it has");
    let audit = hermes_testkit::control::audit(&fixture.state("controller"));
    assert!(audit.contains("is not in the overlay's `programs`"), "{audit}");
    // What is listed gets what it has missed, at once.
    let own = sha256_of(hermes());
    fixture.hermes_ok(&["apply", "-f", "-"], &listed(7002, &format!("[\"{other}\", {own}]")));
    fixture.until_answers("APP", "two").await;
}

fn sha256_of(program: &str) -> String {
    let output = std::process::Command::new("sha256sum").arg(program).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

/// No event repeats an order that found no descriptors: the node retries it by itself.
#[tokio::test]
async fn an_order_that_found_no_descriptors_is_retried() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let token = fixture.token("server");
    let server = fixture.node("server", Some(&token));
    // It is connected: without descriptors it could not connect, and would get no order.
    until("it runs", || fixture.hermes_ok(&["node", "list"], "").contains(" running\n")).await;
    let applied = || fixture.log("server").matches("applied").count();
    let before = applied();
    let limit = |most: usize| {
        let most = format!("--nofile={most}:");
        let set = std::process::Command::new("prlimit").args(["--pid", &server.pid().to_string(), &most]).status();
        assert!(set.unwrap().success());
    };
    // None at all: the numbers of those that it has may have holes between them.
    limit(3);
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001).replace(":9443", ":9444"));
    until("the order fails", || fixture.log("server").contains("the order failed for want of resources")).await;
    let failed = applied();
    limit(4096);
    until("the order is applied", || applied() > failed.max(before)).await;
}
