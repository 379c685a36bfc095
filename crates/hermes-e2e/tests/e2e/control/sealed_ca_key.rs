//! The CA's key is encrypted in every store, and unusable without the seal.

use hermes_testkit::binary::hermes;
use std::process::{Command, Output};

use hermes_testkit::control::{ControllerFixture, until};

/// Whether a file of the controller's directory has a key in it that is no operator's.
fn has_key(fixture: &ControllerFixture) -> bool {
    let found = std::fs::read_dir(fixture.state("controller")).unwrap().map(|entry| entry.unwrap().path());
    let stores = found.filter(|path| path.to_string_lossy().contains("controller.db"));
    stores.into_iter().any(|path| std::fs::read(path).unwrap().windows(11).any(|window| window == b"PRIVATE KEY"))
}

/// What a controller says that cannot start.
fn started(fixture: &ControllerFixture, seal: Option<&str>) -> Output {
    let mut command = Command::new(hermes());
    command.args(["controller", "--listen", "127.0.0.1:0", "--data"]).arg(fixture.state("controller"));
    if let Some(seal) = seal {
        command.arg("--seal-file").arg(fixture.state(seal));
    }
    command.output().unwrap()
}

#[tokio::test]
async fn a_key_that_is_sealed_needs_its_seal() {
    let mut fixture = ControllerFixture::sealed("seal").await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    assert!(fixture.hermes_ok(&["ca", "show"], "").contains("its key is sealed"));
    let file = fixture.state("backup.json");
    fixture.hermes_ok(&["backup", file.to_str().unwrap()], "");
    assert!(!std::fs::read_to_string(&file).unwrap().contains("PRIVATE KEY"));
    fixture.kill_controller();
    assert!(!has_key(&fixture));
    std::fs::write(fixture.state("other"), [7; 32]).unwrap();
    for (seal, words) in [(None, "--seal-file"), (Some("other"), "another file"), (Some("absent"), "file not found")] {
        let output = started(&fixture, seal);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && text.contains(words), "{seal:?}: {text}");
    }
    assert!(!fixture.state("absent").exists());
    // A backup goes on elsewhere with the same seal.
    let operator = std::fs::read(fixture.state("controller/operator.json")).unwrap();
    std::fs::remove_dir_all(fixture.state("controller")).unwrap();
    let data = fixture.state("controller");
    let text = fixture.hermes(&["restore", file.to_str().unwrap(), "--data", data.to_str().unwrap()], "");
    assert!(text.status.success(), "{}", String::from_utf8_lossy(&text.stderr));
    std::fs::write(data.join("operator.json"), operator).unwrap();
    fixture.start_controller().await;
    until("both run it", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2).await;
    // It signs, and so does the next one.
    fixture.token("laptop");
    fixture.hermes_ok(&["ca", "rotate"], "");
    until("it is finished", || fixture.hermes(&["ca", "finish"], "").status.success()).await;
    fixture.until_answers("APP", "one").await;
    assert!(!has_key(&fixture));
}

#[tokio::test]
async fn a_store_of_before_is_sealed() {
    let mut fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    fixture.kill_controller();
    assert!(has_key(&fixture));
    fixture.seal = Some(fixture.state("seal"));
    fixture.start_controller().await;
    assert!(fixture.hermes_ok(&["ca", "show"], "").contains("its key is sealed"));
    fixture.token("laptop");
    fixture.kill_controller();
    assert!(!has_key(&fixture));
}
