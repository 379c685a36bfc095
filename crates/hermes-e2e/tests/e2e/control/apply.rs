//! Documents in files: positions of problems, differences, pruning, and drains that applying a file again does not end.

use std::fs;

use serde_json::Value;

use hermes_testkit::control::{ControllerFixture, until};

/// Writes a file of documents below the fixture's directory.
fn write(fixture: &ControllerFixture, file: &str, text: &str) -> String {
    let path = fixture.state(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_problem_of_an_applied_file_has_file_line_and_column() {
    let fixture = ControllerFixture::new().await;
    let good = write(&fixture, "a.yaml", "kind: Overlay\nname: test\n");
    let wrong = "---\n\n---\nkind: Node\nname: edge\nlinks:\n- nowhere\n---\nkind: User\nname: ann\nnodse: edge\n";
    let bad = write(&fixture, "b.yaml", wrong);
    for verb in ["apply", "diff"] {
        let text = fixture.refused(&[verb, "-f", &good, "-f", &bad], "");
        assert!(text.contains(&format!("  {bad}:11:1: User/ann: nodse: ")), "{text}");
    }
    let bad = write(&fixture, "b.yaml", &wrong.replace("nodse", "nodes"));
    let text = fixture.refused(&["apply", "-f", &good, "-f", &bad], "");
    assert!(text.contains(&format!("  {bad}:7:3: Node/edge: links[0]: ")), "{text}");
    let output = fixture.hermes(&["check", &good, &bad], "");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(&format!("{bad}:7:3: error: Node/edge: links[0]: ")), "{text}");
}

#[tokio::test]
async fn a_directory_is_applied_and_absent_documents_are_pruned() {
    let fixture = ControllerFixture::new().await;
    write(&fixture, "overlay/1.yaml", "kind: Overlay\nname: test\n");
    write(&fixture, "overlay/2.yml", "kind: Node\nname: edge\n");
    write(&fixture, "overlay/3.json", "{\"kind\": \"User\", \"name\": \"ann\", \"nodes\": \"edge\"}");
    write(&fixture, "overlay/notes.txt", "no document");
    let directory = fixture.state("overlay").to_str().unwrap().to_owned();
    let output = fixture.hermes_ok(&["apply", "-f", &directory, "--wait", "0s"], "");
    for document in ["Overlay/test", "Node/edge", "User/ann"] {
        assert!(output.contains(&format!("{document} created\n")), "{output}");
    }
    // `check` accepts the output of `get`.
    let printed = fixture.hermes_ok(&["get", "nodes"], "") + &fixture.hermes_ok(&["get", "users"], "");
    let output =
        fixture.hermes_ok(&["check", "-", &directory], &printed.replace("edge", "edge2").replace("ann", "bob"));
    assert!(output.contains("overlay test: ok, 2 nodes, 0 services, 2 users"), "{output}");

    fs::remove_file(fixture.state("overlay/3.json")).unwrap();
    let output = fixture.hermes_ok(&["apply", "-f", &directory], "");
    assert!(output.contains("no change"), "{output}");
    let output = fixture.hermes_ok(&["diff", "-f", &directory, "--prune"], "");
    assert!(
        output.contains("User/ann would be deleted") && fixture.hermes_ok(&["get", "users"], "").contains("ann"),
        "{output}"
    );
    // The overlay's own document stays, and so do nodes where the files have none.
    fixture.hermes_ok(&["apply", "-f", "-", "--prune"], "{kind: User, name: ann, nodes: edge}");
    assert!(fixture.hermes_ok(&["get", "nodes"], "").contains("edge"));
    let node = fixture.state("overlay/2.yml").to_str().unwrap().to_owned();
    let output = fixture.hermes_ok(&["apply", "-f", &node, "--prune"], "");
    assert!(output.contains("User/ann deleted") && !output.contains("Overlay/test"), "{output}");
    assert!(!fixture.hermes_ok(&["get"], "").contains("ann"));
    let output = fixture.refused(&["apply", "-f", "-", "--prune"], "");
    assert!(output.contains("no documents"), "{output}");
    let empty = fixture.state("empty").to_str().unwrap().to_owned();
    fs::create_dir(&empty).unwrap();
    assert!(fixture.refused(&["apply", "-f", &empty], "").contains("has no file *.yaml"));
}

#[tokio::test]
async fn a_file_that_is_applied_again_does_not_end_a_drain() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _nodes = ["laptop", "server"].map(|name| fixture.node(name, Some(&fixture.token(name))));
    fixture.until_answers("APP", "one").await;
    until("both run what they should", || fixture.hermes_ok(&["node", "list"], "").matches(" running\n").count() == 2)
        .await;
    // The node is idle, and is the only path to its service.
    let output = fixture.hermes_ok(&["node", "drain", "server"], "");
    assert!(output.contains("warning: node server is the only path to Service/APP"), "{output}");
    assert!(output.ends_with("node server has no sessions\n"), "{output}");

    let is_draining = || {
        let list = fixture.hermes_ok(&["node", "list"], "");
        list.lines().any(|line| line.starts_with("server ") && line.ends_with(" draining"))
    };
    let stays =
        "node server stays drained, since its document does not set draining; `hermes node drain server --undo`";
    let output = fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    assert!(output.contains(stays) && output.contains("no change") && is_draining(), "{output}");
    let other = fixture.documents(7001).replace("name: server,", "name: server, drain: 3s,");
    let output = fixture.hermes_ok(&["diff", "-f", "-"], &other);
    assert!(output.contains("Node/server would be changed\n  drain: (not set) -> \"3s\"\n"), "{output}");
    assert!(!output.contains("draining: "), "{output}");
    let output = fixture.hermes_ok(&["apply", "-f", "-"], &other);
    assert!(output.contains("Node/server changed") && output.contains(stays) && is_draining(), "{output}");
    // A document with `draining: false` ends the drain.
    let explicit = other.replace("drain: 3s", "drain: 3s, draining: false");
    let output = fixture.hermes_ok(&["diff", "-f", "-"], &explicit);
    assert!(output.contains("  draining: true -> "), "{output}");
    fixture.hermes_ok(&["apply", "-f", "-"], &explicit);
    assert!(!is_draining());
    let output = fixture.hermes_ok(&["apply", "-f", "-"], &other);
    assert!(!output.contains("drained") && output.contains("no change"), "{output}");
}

#[tokio::test]
async fn explain_follows_a_session_of_a_user_whose_app_is_socks5() {
    let fixture = ControllerFixture::new().await;
    let socks = fixture.documents(7001).replace("apps: {bind", "apps: {protocol: socks5, bind");
    let socks = socks.replace("at: {node: server, http:", "authority: \"APP:80\", at: {node: server, tcp:");
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &socks);
    let text = fixture.hermes_ok(&["explain", "--controller", "--user", "ann", "--authority", "APP"], "");
    assert!(text.contains("CONNECT app:80 on app-0") && text.contains("\nserver\n"), "{text}");
    let output = fixture.hermes(&["explain", "--controller", "--user", "ann", "--authority", "OTHER"], "");
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stdout));
}

#[tokio::test]
async fn an_unreachable_controller_is_logged_once() {
    let mut fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _nodes = ["laptop", "server"].map(|name| fixture.node(name, Some(&fixture.token(name))));
    fixture.until_answers("APP", "one").await;
    fixture.kill_controller();
    let lines =
        || fixture.log("server").matches("controller unreachable; still running the last configuration").count();
    until("it is logged", || lines() > 0).await;
    let attempts = std::sync::atomic::AtomicUsize::new(0);
    // Attempts continue: they reach a listener at the controller's address, which closes them.
    let listener = std::net::TcpListener::bind(fixture.socket(9400)).unwrap();
    let seen = &attempts;
    let before = std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..12 {
                drop(listener.accept());
                seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        });
        lines()
    });
    assert_eq!(attempts.into_inner(), 12);
    // One line for each reason: closed, refused, and closed in the handshake.
    let after = fixture.log("server").matches("controller unreachable").count();
    assert!(after <= before.max(1) + 4, "{}", fixture.log("server"));
}

#[tokio::test]
async fn diff_names_the_fields_that_differ() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &fixture.documents(7001));
    let output = fixture.hermes_ok(&["diff", "-f", "-"], &fixture.documents(7002));
    let (old, new) = (fixture.socket(7001), fixture.socket(7002));
    assert!(output.contains(&format!("Service/APP would be changed\n  at.http: \"{old}\" -> \"{new}\"\n")), "{output}");
    assert!(!output.contains("links"), "{output}");
    let output: Value =
        serde_json::from_str(&fixture.hermes_ok(&["diff", "--json", "-f", "-"], &fixture.documents(7002))).unwrap();
    assert_eq!(output["fields"]["Service/APP"][0]["path"], "at.http");
    let twice = fixture.documents(7001).replace("links: server,", "links: server, admin: 127.0.0.1:1,");
    let output = fixture.hermes_ok(&["apply", "--dry-run", "-f", "-"], &twice);
    assert!(output.contains("Node/laptop would be changed\n  admin: (not set) -> \"127.0.0.1:1\"\n"), "{output}");
}

#[tokio::test]
async fn the_node_list_shows_each_status() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let row = |name: &str| {
        let list = fixture.hermes_ok(&["node", "list"], "");
        let line = list.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let list = fixture.hermes_ok(&["node", "list"], "");
    for column in ["NODE", "VERSION", "ADDRESS", "CERTIFICATE", "LAST SEEN", "STATE"] {
        assert!(list.lines().next().unwrap().contains(column), "{list}");
    }
    assert!(list.contains("never enrolled: `hermes token create --node server`"), "{list}");
    let server = fixture.node("server", Some(&fixture.token("server")));
    until("it runs", || row("server").last().is_some_and(|state| state == "running")).await;
    let of = |name: &str| row(name)[2..].to_vec();
    let (version, address, seen) = (env!("CARGO_PKG_VERSION"), fixture.socket(9443).to_string(), "now");
    let now = of("server");
    assert_eq!((&*now[0], &*now[1], &*now[5]), (version, &*address, seen), "{now:?}");
    assert!(now[4].ends_with(['d', 'h', 'm', 's']), "a life of the certificate: {now:?}");
    hermes_testkit::control::sigkill(server);
    until("it is unreachable", || row("server").last().is_some_and(|state| state == "unreachable")).await;
    let gone = of("server");
    assert!(gone[5].ends_with('s') && gone[6] == "ago" && gone[0] == version, "{gone:?}");
    fixture.hermes_ok(&["node", "revoke", "server"], "");
    assert!(fixture.hermes_ok(&["node", "list"], "").contains("revoked: `hermes token create --node server`"));
}

#[tokio::test]
async fn an_operators_file_names_its_controller_and_commands_override_it() {
    let fixture = ControllerFixture::new().await;
    let file = fixture.state("carol.json");
    let url = format!("https://localhost:{}", 9400);
    let create = ["operator", "create", "--name", "carol", "-o", file.to_str().unwrap()];
    // The controller listens only at its own address, which its certificate names.
    let output = fixture.refused(&[&create[..], &["--controller", &url]].concat(), "");
    assert!(output.contains("localhost:9400"), "{output}");
    let output = fixture.hermes_ok(&create, "");
    assert!(output.contains("which only this machine reaches") && output.contains("--controller URL"), "{output}");
    let mut written: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let own = format!("https://{}", fixture.socket(9400));
    assert_eq!(written["controller"], own.as_str());
    // Every command can override the file's controller.
    written["controller"] = "https://127.0.0.1:1".into();
    fs::write(&file, written.to_string()).unwrap();
    let file = file.to_str().unwrap();
    assert!(fixture.refused(&["get", "--operator", file], "").contains("127.0.0.1:1"));
    for command in [
        &["get"][..],
        &["node", "list"],
        &["operator", "list"],
        &["rollout", "show"],
        &["ca", "show"],
        &["diff", "-f", "-"],
    ] {
        fixture
            .hermes_ok(&[command, &["--operator", file, "--controller", &own]].concat(), "kind: Overlay\nname: test\n");
    }
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &fixture.documents(7001));
    let explain = ["explain", "--node", "laptop", "--authority", "APP", "--operator", file];
    fixture.hermes_ok(&[&explain[..], &[&format!("--controller={own}")]].concat(), "");
    let other = fixture.state("dave.json");
    let create = ["operator", "create", "--name", "dave", "-o", other.to_str().unwrap(), "--operator", file];
    fixture.hermes_ok(&[&create[..], &["--controller", &own]].concat(), "");
    let written: Value = serde_json::from_slice(&fs::read(&other).unwrap()).unwrap();
    assert_eq!(written["controller"], own.as_str());
}

#[tokio::test]
async fn an_operators_file_names_the_controllers_public_name() {
    let mut fixture = ControllerFixture::new().await;
    fixture.kill_controller();
    fixture.start_controller_as("hermes.example").await;
    let file = fixture.state("carol.json");
    fixture.hermes_ok(&["operator", "create", "--name", "carol", "-o", file.to_str().unwrap()], "");
    let written: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(written["controller"], "https://hermes.example:9400");
}
