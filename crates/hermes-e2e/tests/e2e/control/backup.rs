//! All that a controller has, out of it and into another one.

use std::os::unix::fs::PermissionsExt as _;

use hermes_testkit::control::{Bed, until};

#[tokio::test]
async fn what_was_backed_up_goes_on_elsewhere() {
    let mut bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("APP", "one").await;
    let file = bed.state("backup.json");
    let path = file.to_str().unwrap();
    let said = bed.told(&["backup", path], "");
    assert!(said.starts_with("revision "), "{said}");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(bed.refused(&["backup", path], "").contains("does not exist"), "no backup is written over");
    let data = bed.state("controller");
    let said = bed.refused(&["restore", path, "--data", data.to_str().unwrap()], "");
    assert!(said.contains("in use by another controller"), "{said}");
    // The machine of the controller is lost; its operator's file is not.
    let operator = std::fs::read(data.join("operator.json")).unwrap();
    bed.kill_controller();
    std::fs::remove_dir_all(&data).unwrap();
    let said = bed.hermes(&["restore", path, "--data", data.to_str().unwrap()], "");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    std::fs::write(data.join("operator.json"), operator).unwrap();
    let said = bed.refused(&["restore", path, "--data", data.to_str().unwrap()], "");
    assert!(said.contains("the store is not empty"), "{said}");
    bed.start_controller().await;
    // Nodes know it by its authority, and nothing else has changed for them.
    until("both run it", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
    bed.origin(7002, "two");
    bed.told(&["apply", "-f", "-"], &bed.documents(7002));
    bed.until_answers("APP", "two").await;
}
