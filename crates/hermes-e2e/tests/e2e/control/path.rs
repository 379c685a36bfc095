//! An operator's path, and what becomes of it when processes are killed.

use hermes_testkit::control::{Bed, sigkill, until};

#[tokio::test]
async fn from_nothing_to_traffic_and_changed_while_it_runs() {
    let mut bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.origin(7002, "two");
    let said = bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    assert!(
        said.contains("Service/APP created")
            && said.contains("node server has never enrolled: `hermes token create --node server`"),
        "{said}"
    );
    let (laptop, server) = (bed.token("laptop"), bed.token("server"));
    let _laptop = bed.node("laptop", Some(&laptop));
    let server = bed.node("server", Some(&server));
    bed.until_answers("APP", "one").await;
    until("both run what they should", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;

    // What becomes of a session is told along its way, before there is one.
    let said = bed.told(&["explain", "--controller", "--node", "laptop", "--authority", "APP"], "");
    let (first, last) = said.split_once("\nserver\n").unwrap();
    assert!(first.starts_with("laptop\n") && first.contains("* routes[0] APP: matches"), "{said}");
    assert!(first.contains("next      server") && last.contains("* routes[0] APP: matches"), "{said}");
    assert!(last.contains("from node laptop of test") && last.contains("7001"), "{said}");
    let output = bed.hermes(&["explain", "--controller", "--node", "laptop", "--authority", "OTHER", "--json"], "");
    assert_eq!(output.status.code(), Some(3), "a denial has an exit status of its own");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&said[0]["node"], &said[0]["status"], said.as_array().unwrap().len()),
        (&"laptop".into(), &404.into(), 1)
    );
    let said = bed.refused(&["explain", "--controller", "--authority", "APP"], "");
    assert!(said.contains("--node NAME"), "{said}");

    // A change is there when the command is over.
    let moved = bed.documents(7002);
    let planned = bed.told(&["diff", "-f", "-"], &moved);
    assert!(planned.contains("Service/APP would be changed") && planned.contains("node server would get"), "{planned}");
    assert_eq!(bed.get("APP").unwrap().1, "one");
    let said = bed.told(&["apply", "-f", "-"], &moved);
    assert!(said.contains("Service/APP changed") && said.contains("node server runs it"), "{said}");
    assert!(!said.contains("laptop"), "it is not touched: {said}");
    assert_eq!(bed.get("APP"), Some((200, "two".to_owned())));
    let said = bed.told(&["apply", "-f", "-"], &moved);
    assert!(said.contains("nothing changes"), "{said}");

    // Without a controller all goes on, and a node starts from what it has.
    bed.kill_controller();
    assert_eq!(bed.get("APP"), Some((200, "two".to_owned())));
    sigkill(server);
    let server = bed.node("server", None);
    bed.until_answers("APP", "two").await;

    // What was applied is there when the controller is, and nodes come back to it by themselves.
    bed.start_controller().await;
    until("both are back", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
    let said = bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    assert!(said.contains("node server runs it"), "{said}");
    assert_eq!(bed.get("APP"), Some((200, "one".to_owned())));

    // A node that was away gets what is newest.
    sigkill(server);
    until("it is away", || bed.told(&["node", "list"], "").contains("unreachable")).await;
    let said = bed.told(&["apply", "-f", "-"], &bed.documents(7002));
    assert!(said.contains("node server is unreachable"), "{said}");
    let _server = bed.node("server", None);
    bed.until_answers("APP", "two").await;

    // Whose service is deleted reaches it no more.
    bed.told(&["delete", "Service/APP"], "");
    assert_eq!(bed.get("APP").map(|(status, _)| status), Some(404));
}
