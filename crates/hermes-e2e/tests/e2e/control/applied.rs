//! Documents in files: positions of problems, differences, pruning, and drains that applying a file again does not end.

use std::fs;

use serde_json::Value;

use hermes_testkit::control::{Bed, until};

/// Writes a file of documents below the fixture's directory.
fn write(bed: &Bed, file: &str, text: &str) -> String {
    let path = bed.state(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_problem_of_an_applied_file_has_file_line_and_column() {
    let bed = Bed::new().await;
    let good = write(&bed, "a.yaml", "kind: Overlay\nname: test\n");
    let wrong = "---\n\n---\nkind: Node\nname: edge\nlinks:\n- nowhere\n---\nkind: User\nname: ann\nnodse: edge\n";
    let bad = write(&bed, "b.yaml", wrong);
    for verb in ["apply", "diff"] {
        let said = bed.refused(&[verb, "-f", &good, "-f", &bad], "");
        assert!(said.contains(&format!("  {bad}:11:1: User/ann: nodse: ")), "{said}");
    }
    let bad = write(&bed, "b.yaml", &wrong.replace("nodse", "nodes"));
    let said = bed.refused(&["apply", "-f", &good, "-f", &bad], "");
    assert!(said.contains(&format!("  {bad}:7:3: Node/edge: links[0]: ")), "{said}");
    let output = bed.hermes(&["check", &good, &bad], "");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains(&format!("{bad}:7:3: error: Node/edge: links[0]: ")), "{said}");
}

#[tokio::test]
async fn a_directory_is_applied_and_what_is_not_in_it_is_pruned() {
    let bed = Bed::new().await;
    write(&bed, "overlay/1.yaml", "kind: Overlay\nname: test\n");
    write(&bed, "overlay/2.yml", "kind: Node\nname: edge\n");
    write(&bed, "overlay/3.json", "{\"kind\": \"User\", \"name\": \"ann\", \"nodes\": \"edge\"}");
    write(&bed, "overlay/notes.txt", "no document");
    let directory = bed.state("overlay").to_str().unwrap().to_owned();
    let said = bed.told(&["apply", "-f", &directory, "--wait", "0s"], "");
    for document in ["Overlay/test", "Node/edge", "User/ann"] {
        assert!(said.contains(&format!("{document} created\n")), "{said}");
    }
    // `check` accepts the output of `get`.
    let printed = bed.told(&["get", "nodes"], "") + &bed.told(&["get", "users"], "");
    let said = bed.told(&["check", "-", &directory], &printed.replace("edge", "edge2").replace("ann", "bob"));
    assert!(said.contains("overlay test: ok, 2 nodes, 0 services, 2 users"), "{said}");

    fs::remove_file(bed.state("overlay/3.json")).unwrap();
    let said = bed.told(&["apply", "-f", &directory], "");
    assert!(said.contains("nothing changes"), "{said}");
    let said = bed.told(&["diff", "-f", &directory, "--prune"], "");
    assert!(said.contains("User/ann would be deleted") && bed.told(&["get", "users"], "").contains("ann"), "{said}");
    // The overlay's own document stays, and so do nodes where the files have none.
    bed.told(&["apply", "-f", "-", "--prune"], "{kind: User, name: ann, nodes: edge}");
    assert!(bed.told(&["get", "nodes"], "").contains("edge"));
    let node = bed.state("overlay/2.yml").to_str().unwrap().to_owned();
    let said = bed.told(&["apply", "-f", &node, "--prune"], "");
    assert!(said.contains("User/ann deleted") && !said.contains("Overlay/test"), "{said}");
    assert!(!bed.told(&["get"], "").contains("ann"));
    let said = bed.refused(&["apply", "-f", "-", "--prune"], "");
    assert!(said.contains("no documents"), "{said}");
    let empty = bed.state("empty").to_str().unwrap().to_owned();
    fs::create_dir(&empty).unwrap();
    assert!(bed.refused(&["apply", "-f", &empty], "").contains("has no file *.yaml"));
}

#[tokio::test]
async fn a_file_that_is_applied_again_does_not_end_a_drain() {
    let bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _nodes = ["laptop", "server"].map(|name| bed.node(name, Some(&bed.token(name))));
    bed.until_answers("APP", "one").await;
    until("both run what they should", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
    // The node is idle, and is the only path to its service.
    let said = bed.told(&["node", "drain", "server"], "");
    assert!(said.contains("warning: node server is the only path to Service/APP"), "{said}");
    assert!(said.ends_with("node server has no sessions\n"), "{said}");

    let is_draining = || {
        let list = bed.told(&["node", "list"], "");
        list.lines().any(|line| line.starts_with("server ") && line.ends_with(" draining"))
    };
    let stays =
        "node server stays drained, since its document does not set draining; `hermes node drain server --undo`";
    let said = bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    assert!(said.contains(stays) && said.contains("nothing changes") && is_draining(), "{said}");
    let other = bed.documents(7001).replace("name: server,", "name: server, drain: 3s,");
    let said = bed.told(&["diff", "-f", "-"], &other);
    assert!(said.contains("Node/server would be changed\n  drain: (not set) -> \"3s\"\n"), "{said}");
    assert!(!said.contains("draining: "), "{said}");
    let said = bed.told(&["apply", "-f", "-"], &other);
    assert!(said.contains("Node/server changed") && said.contains(stays) && is_draining(), "{said}");
    // A document with `draining: false` ends the drain.
    let explicit = other.replace("drain: 3s", "drain: 3s, draining: false");
    let said = bed.told(&["diff", "-f", "-"], &explicit);
    assert!(said.contains("  draining: true -> "), "{said}");
    bed.told(&["apply", "-f", "-"], &explicit);
    assert!(!is_draining());
    let said = bed.told(&["apply", "-f", "-"], &other);
    assert!(!said.contains("drained") && said.contains("nothing changes"), "{said}");
}

#[tokio::test]
async fn explain_follows_a_session_of_a_user_whose_app_is_socks5() {
    let bed = Bed::new().await;
    let socks = bed.documents(7001).replace("apps: {bind", "apps: {protocol: socks5, bind");
    let socks = socks.replace("at: {node: server, http:", "authority: \"APP:80\", at: {node: server, tcp:");
    bed.told(&["apply", "-f", "-", "--wait", "0s"], &socks);
    let said = bed.told(&["explain", "--controller", "--user", "ann", "--authority", "APP"], "");
    assert!(said.contains("CONNECT app:80 on app-0") && said.contains("\nserver\n"), "{said}");
    let output = bed.hermes(&["explain", "--controller", "--user", "ann", "--authority", "OTHER"], "");
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stdout));
}

#[tokio::test]
async fn an_unreachable_controller_is_logged_once() {
    let mut bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _nodes = ["laptop", "server"].map(|name| bed.node(name, Some(&bed.token(name))));
    bed.until_answers("APP", "one").await;
    bed.kill_controller();
    let lines = || bed.log("server").matches("controller unreachable; still running the last configuration").count();
    until("it is logged", || lines() > 0).await;
    let attempts = std::sync::atomic::AtomicUsize::new(0);
    // Attempts continue: they reach a listener at the controller's address, which closes them.
    let listener = std::net::TcpListener::bind(bed.socket(9400)).unwrap();
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
    let after = bed.log("server").matches("controller unreachable").count();
    assert!(after <= before.max(1) + 4, "{}", bed.log("server"));
}

#[tokio::test]
async fn diff_names_the_fields_that_differ() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-", "--wait", "0s"], &bed.documents(7001));
    let said = bed.told(&["diff", "-f", "-"], &bed.documents(7002));
    let (old, new) = (bed.socket(7001), bed.socket(7002));
    assert!(said.contains(&format!("Service/APP would be changed\n  at.http: \"{old}\" -> \"{new}\"\n")), "{said}");
    assert!(!said.contains("links"), "{said}");
    let said: Value = serde_json::from_str(&bed.told(&["diff", "--json", "-f", "-"], &bed.documents(7002))).unwrap();
    assert_eq!(said["fields"]["Service/APP"][0]["path"], "at.http");
    let twice = bed.documents(7001).replace("links: server,", "links: server, admin: 127.0.0.1:1,");
    let said = bed.told(&["apply", "--dry-run", "-f", "-"], &twice);
    assert!(said.contains("Node/laptop would be changed\n  admin: (not set) -> \"127.0.0.1:1\"\n"), "{said}");
}

#[tokio::test]
async fn the_list_of_nodes_tells_how_each_stands() {
    let bed = Bed::new().await;
    bed.origin(7001, "one");
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let row = |name: &str| {
        let list = bed.told(&["node", "list"], "");
        let line = list.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let list = bed.told(&["node", "list"], "");
    for column in ["NODE", "VERSION", "ADDRESS", "CERTIFICATE", "LAST SEEN", "STATE"] {
        assert!(list.lines().next().unwrap().contains(column), "{list}");
    }
    assert!(list.contains("never enrolled: `hermes token create --node server`"), "{list}");
    let server = bed.node("server", Some(&bed.token("server")));
    until("it runs", || row("server").last().is_some_and(|state| state == "running")).await;
    let of = |name: &str| row(name)[2..].to_vec();
    let (version, address, seen) = (env!("CARGO_PKG_VERSION"), bed.socket(9443).to_string(), "now");
    let now = of("server");
    assert_eq!((&*now[0], &*now[1], &*now[5]), (version, &*address, seen), "{now:?}");
    assert!(now[4].ends_with(['d', 'h', 'm', 's']), "a life of the certificate: {now:?}");
    hermes_testkit::control::sigkill(server);
    until("it is unreachable", || row("server").last().is_some_and(|state| state == "unreachable")).await;
    let gone = of("server");
    assert!(gone[5].ends_with('s') && gone[6] == "ago" && gone[0] == version, "{gone:?}");
    bed.told(&["node", "revoke", "server"], "");
    assert!(bed.told(&["node", "list"], "").contains("revoked: `hermes token create --node server`"));
}

#[tokio::test]
async fn an_operators_file_names_the_controller_that_was_said_and_commands_take_another() {
    let bed = Bed::new().await;
    let file = bed.state("carol.json");
    let url = format!("https://localhost:{}", 9400);
    let create = ["operator", "create", "--name", "carol", "-o", file.to_str().unwrap()];
    // The controller listens only at its own address, which its certificate names.
    let said = bed.refused(&[&create[..], &["--controller", &url]].concat(), "");
    assert!(said.contains("localhost:9400"), "{said}");
    let said = bed.told(&create, "");
    assert!(said.contains("which only this machine reaches") && said.contains("--controller URL"), "{said}");
    let mut written: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let own = format!("https://{}", bed.socket(9400));
    assert_eq!(written["controller"], own.as_str());
    // Every command can override the file's controller.
    written["controller"] = "https://127.0.0.1:1".into();
    fs::write(&file, written.to_string()).unwrap();
    let file = file.to_str().unwrap();
    assert!(bed.refused(&["get", "--operator", file], "").contains("127.0.0.1:1"));
    for command in [
        &["get"][..],
        &["node", "list"],
        &["operator", "list"],
        &["rollout", "show"],
        &["authority", "show"],
        &["diff", "-f", "-"],
    ] {
        bed.told(&[command, &["--operator", file, "--controller", &own]].concat(), "kind: Overlay\nname: test\n");
    }
    bed.told(&["apply", "-f", "-", "--wait", "0s"], &bed.documents(7001));
    let explain = ["explain", "--node", "laptop", "--authority", "APP", "--operator", file];
    bed.told(&[&explain[..], &[&format!("--controller={own}")]].concat(), "");
    let other = bed.state("dave.json");
    let create = ["operator", "create", "--name", "dave", "-o", other.to_str().unwrap(), "--operator", file];
    bed.told(&[&create[..], &["--controller", &own]].concat(), "");
    let written: Value = serde_json::from_slice(&fs::read(&other).unwrap()).unwrap();
    assert_eq!(written["controller"], own.as_str());
}

#[tokio::test]
async fn an_operators_file_names_the_controllers_public_name() {
    let mut bed = Bed::new().await;
    bed.kill_controller();
    bed.start_controller_as("hermes.example").await;
    let file = bed.state("carol.json");
    bed.told(&["operator", "create", "--name", "carol", "-o", file.to_str().unwrap()], "");
    let written: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(written["controller"], "https://hermes.example:9400");
}
