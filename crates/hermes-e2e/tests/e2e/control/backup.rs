//! All that a controller has, out of it and into another one.

use std::os::unix::fs::PermissionsExt as _;

use hermes_testkit::control::{ControllerFixture, until};

#[tokio::test]
async fn a_backup_restores_a_controller_elsewhere() {
    let mut fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    let file = fixture.state("backup.json");
    let path = file.to_str().unwrap();
    let output = fixture.hermes_ok(&["backup", path], "");
    assert!(output.starts_with("revision "), "{output}");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(fixture.refused(&["backup", path], "").contains("does not exist"), "no backup is written over");
    let data = fixture.state("controller");
    let output = fixture.refused(&["restore", path, "--data", data.to_str().unwrap()], "");
    assert!(output.contains("in use by another controller"), "{output}");
    // The machine of the controller is lost; its operator's file is not.
    let operator = std::fs::read(data.join("operator.json")).unwrap();
    fixture.kill_controller();
    std::fs::remove_dir_all(&data).unwrap();
    let output = fixture.hermes(&["restore", path, "--data", data.to_str().unwrap()], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(data.join("operator.json"), operator).unwrap();
    let output = fixture.refused(&["restore", path, "--data", data.to_str().unwrap()], "");
    assert!(output.contains("the store is not empty"), "{output}");
    fixture.start_controller().await;
    // Nodes know it by its authority, and nothing else has changed for them.
    until("both run it", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2).await;
    fixture.origin(7002, "two");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7002));
    fixture.until_answers("APP", "two").await;
}
