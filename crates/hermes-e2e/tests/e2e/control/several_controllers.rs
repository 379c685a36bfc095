//! Several controllers with one etcd: any of them and the store may be killed, and no applied change is lost.

use hermes_testkit::control::{ControllerFixture, until};

#[tokio::test]
async fn any_controller_may_die_and_the_store_may() {
    let mut fixture = ControllerFixture::with_etcd().await;
    fixture.origin(7001, "one");
    fixture.origin(7002, "two");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    // What nodes say to one controller the other one knows.
    let at_second = |args: &[&str], input: &str| {
        let output = fixture.hermes_at("second", args, input);
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    // The laptop's sessions failed until the server ran, so it may be reported as unhealthy for a moment.
    let both_run = || at_second(&["node", "list"], "").matches(" running\n").count() == 2;
    until("the second one knows that both run", both_run).await;
    let text = at_second(&["apply", "-f", "-"], &fixture.documents(7002));
    assert!(text.contains("node server runs it"), "{text}");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    // What one controller has written the other one gives, and nodes find it by themselves.
    fixture.kill_controller();
    until("both are at the second one", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2)
        .await;
    let text = fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7002));
    assert!(text.contains("node server runs it"), "{text}");
    assert_eq!(fixture.get("APP"), Some((200, "two".to_owned())));
    fixture.start_controller().await;
    assert!(fixture.hermes_ok(&["get", "Service/APP"], "").contains(":7002"));
    // Without its store a controller changes nothing, and says so; nodes go on.
    fixture.kill_etcd();
    let text = fixture.refused(&["apply", "-f", "-"], &fixture.documents(7001));
    assert!(text.contains("the store cannot be written"), "{text}");
    assert_eq!(fixture.get("APP"), Some((200, "two".to_owned())));
    // One that is started now waits for it.
    fixture.kill_controller();
    fixture.launch_controller();
    until("it waits", || fixture.log("controller").contains("no overlay yet")).await;
    fixture.start_etcd().await;
    let applied = || fixture.hermes(&["apply", "-f", "-"], &fixture.documents(7001)).status.success();
    until("it can be changed again", applied).await;
    fixture.until_answers("APP", "one").await;
}
