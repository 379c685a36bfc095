//! Several controllers at one etcd, of which any may be killed, and the store too: nothing that was applied is lost.

use hermes_testkit::control::{Bed, until};

#[tokio::test]
async fn any_controller_may_die_and_the_store_may() {
    let mut bed = Bed::with_etcd().await;
    bed.origin(7001, "one");
    bed.origin(7002, "two");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("APP", "one").await;
    // What nodes say to one controller the other one knows.
    let at_second = |args: &[&str], input: &str| {
        let output = bed.hermes_at("second", args, input);
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    // The laptop's sessions failed until the server ran, so it may be reported as unwell for a moment.
    let both_run = || at_second(&["node", "list"], "").matches(" running\n").count() == 2;
    until("the second one knows that both run", both_run).await;
    let said = at_second(&["apply", "-f", "-"], &bed.documents(7002));
    assert!(said.contains("node server runs it"), "{said}");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    // What one controller has written the other one gives, and nodes find it by themselves.
    bed.kill_controller();
    until("both are at the second one", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
    let said = bed.told(&["apply", "-f", "-"], &bed.documents(7002));
    assert!(said.contains("node server runs it"), "{said}");
    assert_eq!(bed.get("APP"), Some((200, "two".to_owned())));
    bed.start_controller().await;
    assert!(bed.told(&["get", "Service/APP"], "").contains(":7002"));
    // Without its store a controller changes nothing, and says so; nodes go on.
    bed.kill_etcd();
    let said = bed.refused(&["apply", "-f", "-"], &bed.documents(7001));
    assert!(said.contains("the store cannot be written"), "{said}");
    assert_eq!(bed.get("APP"), Some((200, "two".to_owned())));
    // One that is started now waits for it.
    bed.kill_controller();
    bed.launch_controller();
    until("it waits", || bed.log("controller").contains("no overlay yet")).await;
    bed.start_etcd().await;
    let applied = || bed.hermes(&["apply", "-f", "-"], &bed.documents(7001)).status.success();
    until("it can be changed again", applied).await;
    bed.until_answers("APP", "one").await;
}
