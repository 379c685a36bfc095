//! The authority's key is in no store in the clear, and nobody has it who lacks the seal.

use hermes_testkit::binary::hermes;
use std::process::{Command, Output};

use hermes_testkit::control::{Bed, until};

/// Whether a file of the controller's directory has a key in it that is no operator's.
fn has_key(bed: &Bed) -> bool {
    let found = std::fs::read_dir(bed.state("controller")).unwrap().map(|entry| entry.unwrap().path());
    let stores = found.filter(|path| path.to_string_lossy().contains("controller.db"));
    stores.into_iter().any(|path| std::fs::read(path).unwrap().windows(11).any(|window| window == b"PRIVATE KEY"))
}

/// What a controller says that cannot start.
fn started(bed: &Bed, seal: Option<&str>) -> Output {
    let mut command = Command::new(hermes());
    command.args(["controller", "--listen", "127.0.0.1:0", "--data"]).arg(bed.state("controller"));
    if let Some(seal) = seal {
        command.arg("--seal-file").arg(bed.state(seal));
    }
    command.output().unwrap()
}

#[tokio::test]
async fn a_key_that_is_sealed_needs_its_seal() {
    let mut bed = Bed::sealed("seal").await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("APP", "one").await;
    assert!(bed.told(&["authority", "show"], "").contains("its key is sealed"));
    let file = bed.state("backup.json");
    bed.told(&["backup", file.to_str().unwrap()], "");
    assert!(!std::fs::read_to_string(&file).unwrap().contains("PRIVATE KEY"));
    bed.kill_controller();
    assert!(!has_key(&bed));
    std::fs::write(bed.state("other"), [7; 32]).unwrap();
    for (seal, words) in [(None, "--seal-file"), (Some("other"), "another file"), (Some("absent"), "file not found")] {
        let output = started(&bed, seal);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains(words), "{seal:?}: {said}");
    }
    assert!(!bed.state("absent").exists());
    // A backup goes on elsewhere with the same seal.
    let operator = std::fs::read(bed.state("controller/operator.json")).unwrap();
    std::fs::remove_dir_all(bed.state("controller")).unwrap();
    let data = bed.state("controller");
    let said = bed.hermes(&["restore", file.to_str().unwrap(), "--data", data.to_str().unwrap()], "");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    std::fs::write(data.join("operator.json"), operator).unwrap();
    bed.start_controller().await;
    until("both run it", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
    // It signs, and so does the next one.
    bed.token("laptop");
    bed.told(&["authority", "rotate"], "");
    until("it is finished", || bed.hermes(&["authority", "finish"], "").status.success()).await;
    bed.until_answers("APP", "one").await;
    assert!(!has_key(&bed));
}

#[tokio::test]
async fn a_store_of_before_is_sealed() {
    let mut bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    bed.kill_controller();
    assert!(has_key(&bed));
    bed.seal = Some(bed.state("seal"));
    bed.start_controller().await;
    assert!(bed.told(&["authority", "show"], "").contains("its key is sealed"));
    bed.token("laptop");
    bed.kill_controller();
    assert!(!has_key(&bed));
}
