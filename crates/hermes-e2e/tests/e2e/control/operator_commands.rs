//! The commands of an operator from an empty machine to traffic, also while processes are killed.

use hermes_testkit::control::{ControllerFixture, sigkill, until};

#[tokio::test]
async fn from_nothing_to_traffic_and_changed_while_it_runs() {
    let mut fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.origin(7002, "two");
    let text = fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    assert!(
        text.contains("Service/APP created")
            && text.contains("node server has never enrolled: `hermes token create --node server`"),
        "{text}"
    );
    let (laptop, server) = (fixture.token("laptop"), fixture.token("server"));
    let _laptop = fixture.node("laptop", Some(&laptop));
    let server = fixture.node("server", Some(&server));
    fixture.until_answers("APP", "one").await;
    until("both run what they should", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2)
        .await;

    // What becomes of a session is told along its way, before there is one.
    let text = fixture.hermes_ok(&["explain", "--controller", "--node", "laptop", "--authority", "APP"], "");
    let (first, last) = text.split_once("\nserver\n").unwrap();
    assert!(first.starts_with("laptop\n") && first.contains("* routes[0] APP: matches"), "{text}");
    assert!(first.contains("next      server") && last.contains("* routes[0] APP: matches"), "{text}");
    assert!(last.contains("from node laptop of test") && last.contains("7001"), "{text}");
    let output = fixture.hermes(&["explain", "--controller", "--node", "laptop", "--authority", "OTHER", "--json"], "");
    assert_eq!(output.status.code(), Some(3), "a denial has an exit status of its own");
    let text: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&text[0]["node"], &text[0]["status"], text.as_array().unwrap().len()),
        (&"laptop".into(), &404.into(), 1)
    );
    let text = fixture.refused(&["explain", "--controller", "--authority", "APP"], "");
    assert!(text.contains("--node NAME"), "{text}");

    // A change is there when the command is over.
    let moved = fixture.documents(7002);
    let planned = fixture.hermes_ok(&["diff", "-f", "-"], &moved);
    assert!(planned.contains("Service/APP would be changed") && planned.contains("node server would get"), "{planned}");
    assert_eq!(fixture.get("APP").unwrap().1, "one");
    let text = fixture.hermes_ok(&["apply", "-f", "-"], &moved);
    assert!(text.contains("Service/APP changed") && text.contains("node server runs it"), "{text}");
    assert!(!text.contains("laptop"), "it is not touched: {text}");
    assert_eq!(fixture.get("APP"), Some((200, "two".to_owned())));
    let text = fixture.hermes_ok(&["apply", "-f", "-"], &moved);
    assert!(text.contains("no change"), "{text}");

    // Without a controller all goes on, and a node starts from what it has.
    fixture.kill_controller();
    assert_eq!(fixture.get("APP"), Some((200, "two".to_owned())));
    sigkill(server);
    let server = fixture.node("server", None);
    fixture.until_answers("APP", "two").await;

    // What was applied is there when the controller is, and nodes come back to it by themselves.
    fixture.start_controller().await;
    until("both are back", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2).await;
    let text = fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    assert!(text.contains("node server runs it"), "{text}");
    assert_eq!(fixture.get("APP"), Some((200, "one".to_owned())));

    // A node that was away gets what is newest.
    sigkill(server);
    until("it is away", || fixture.hermes_ok(&["node", "list"], "").contains("unreachable")).await;
    let text = fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7002));
    assert!(text.contains("node server is unreachable"), "{text}");
    let _server = fixture.node("server", None);
    fixture.until_answers("APP", "two").await;

    // Whose service is deleted reaches it no more.
    fixture.hermes_ok(&["delete", "Service/APP"], "");
    assert_eq!(fixture.get("APP").map(|(status, _)| status), Some(404));
}
