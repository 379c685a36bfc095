//! Providers who share an overlay: each changes what is its own, and sees nothing of the others.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use hermes_testkit::control::{ControllerFixture, EFFECT_TIMEOUT, until};

#[tokio::test]
async fn a_providers_administrator_is_limited_to_its_own_documents() {
    let fixture = ControllerFixture::new().await;
    let all = "kind: Overlay\nname: test\nproviders: {acme: {quota: {services: 1}}, bella: {}}\n---\n\
        {kind: Node, name: laptop, links: server, providers: [acme, bella]}\n---\n\
        {kind: Node, name: server, address: \"127.0.0.1:9443\", providers: [acme, bella]}\n---\n\
        {kind: User, provider: bella, name: bob, nodes: laptop}\n";
    fixture.hermes_ok(&["apply", "-f", "-"], all);
    let file = fixture.directory.path().join("acme.json");
    let file = file.to_str().unwrap();
    let create = |provider: &str, file: &str| {
        fixture.hermes(&["operator", "create", "--name", "joe", "--provider", provider, "-o", file], "")
    };
    assert!(!create("carla", "/nowhere").status.success());
    assert!(create("acme", file).status.success());
    let acme = |args: &[&str], input: &str| fixture.hermes(&[args, &["--operator", file]].concat(), input);
    let text = |output: std::process::Output| String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let own = "{kind: User, provider: acme, name: ann, nodes: laptop}\n---\n\
        {kind: Service, provider: acme, name: SHOP, at: {node: server, http: \"127.0.0.1:1\"}, for: everyone}\n";
    let printed = text(acme(&["apply", "-f", "-"], own));
    assert!(printed.contains("Service/acme/SHOP created") && !printed.contains("node server"), "{printed}");
    // It sees what is its own.
    let seen = text(acme(&["get"], ""));
    assert!(seen.contains("SHOP") && !seen.contains("bella") && !seen.contains("Overlay"), "{seen}");
    for (args, input, words) in [
        (&["get", "User/bella/bob"][..], "", "User/bella/bob not found"),
        (&["node", "list"], "", "only operators of the whole overlay"),
        (&["token", "create", "--node", "server"], "", "only operators of the whole overlay"),
        (&["delete", "User/bella/bob"], "", "belongs to another owner"),
        (&["apply", "-f", "-"], "{kind: User, provider: bella, name: eve}", "belongs to another owner"),
        (&["apply", "-f", "-"], "{kind: Node, name: mine}", "belongs to another owner"),
        (
            &["apply", "-f", "-"],
            "{kind: Network, provider: acme, name: all, prefixes: 0.0.0.0/0, at: {node: server, nat: true}, for: everyone}",
            "only the operator may write",
        ),
        (&["apply", "-f", "-"], "{kind: Overlay, name: test}", "belongs to another owner"),
        (
            &["apply", "-f", "-"],
            "{kind: Service, provider: acme, name: B, at: {node: server, http: \"127.0.0.1:1\"}, for: everyone}",
            "acme may have 1 services",
        ),
        (&["apply", "-f", "-"], "{kind: Group, provider: acme, name: all, users: [bob]}", "unknown user bob"),
        (&["operator", "create", "--name", "eve", "-o", "/nowhere"], "", "may not create operator/eve"),
        (
            &["operator", "create", "--name", "eve", "--provider", "bella", "-o", "/nowhere"],
            "",
            "may not create provider/bella/eve",
        ),
    ] {
        let output = acme(args, input);
        assert!(!output.status.success(), "{args:?} {input}");
        let printed = text(output);
        assert!(
            printed.contains(words)
                && !printed.contains("bella") | args.concat().contains("bella") | input.contains("bella"),
            "{args:?}: {printed}"
        );
    }
    let audit = std::fs::read_to_string(fixture.state("controller").join("audit-provider-acme.jsonl")).unwrap();
    assert!(audit.contains("\"by\":\"provider/acme/joe\"") && audit.contains("belongs to another owner"), "{audit}");
}

#[tokio::test]
async fn operators_are_listed_and_dismissed_and_give_nothing_that_lasts_longer() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], "{kind: Overlay, name: test, providers: {acme: {}, bella: {}}}");
    let file = fixture.directory.path().join("acme.json");
    let file = file.to_str().unwrap();
    let create = |provider: &str, file: &str| {
        fixture.hermes(&["operator", "create", "--name", "joe", "--provider", provider, "-o", file], "")
    };
    assert!(create("acme", file).status.success());
    let acme = |args: &[&str], input: &str| fixture.hermes(&[args, &["--operator", file]].concat(), input);
    let text = |output: std::process::Output| String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    // Nobody gives what lasts longer than what they have: thirty days, unless it is said.
    let longer = format!("{file}.longer");
    let made =
        acme(&["operator", "create", "--name", "jim", "--provider", "acme", "--life", "300d", "-o", &longer], "");
    assert!(made.status.success(), "{}", text(made));
    let listed: serde_json::Value = serde_json::from_slice(&acme(&["operator", "list", "--json"], "").stdout).unwrap();
    let of = |name: &str| {
        let all = listed["operators"].as_array().unwrap();
        all.iter().find(|one| one["name"] == name).unwrap()["until"].as_u64().unwrap()
    };
    assert!(of("jim") <= of("joe"), "{listed}");
    // Who may is listed, and ends; nobody ends who asks, or another provider's.
    assert!(create("bella", &format!("{file}.bella")).status.success());
    let seen = text(acme(&["operator", "list"], ""));
    assert!(seen.contains("joe") && !seen.contains("bella") && !seen.contains("root"), "{seen}");
    for (args, words) in [
        (&["operator", "remove", "joe"][..], "joe is the caller"),
        (&["operator", "remove", "joe", "--provider", "bella"], "may not dismiss provider/bella/joe"),
        (&["operator", "remove", "root"], "operator root not found"),
    ] {
        let printed = text(acme(args, ""));
        assert!(printed.contains(words), "{args:?}: {printed}");
    }
    let printed = fixture.refused(&["operator", "remove", "root"], "");
    assert!(printed.contains("root is the caller"), "{printed}");
    fixture.hermes_ok(&["operator", "remove", "joe", "--provider", "acme"], "");
    let output = acme(&["get"], "");
    assert!(!output.status.success());
    let printed = text(output);
    assert!(printed.contains("was revoked"), "{printed}");
    let listed = fixture.hermes_ok(&["operator", "list"], "");
    assert!(listed.contains("joe  those of bella") && !listed.contains("joe  those of acme"), "{listed}");
    let audit = std::fs::read_to_string(fixture.directory.path().join("controller/audit.jsonl")).unwrap();
    assert!(audit.contains("\"what\":\"dismiss\",\"by\":\"operator/root\""), "{audit}");
}

/// The status that an application gets for a tunnel to a name.
fn connect(fixture: &ControllerFixture, authority: &str) -> String {
    let mut stream = TcpStream::connect(fixture.socket(8080)).unwrap();
    stream.set_read_timeout(Some(EFFECT_TIMEOUT)).unwrap();
    write!(stream, "CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n").unwrap();
    let mut head = [0; 12];
    let _ = stream.read_exact(&mut head);
    String::from_utf8_lossy(&head[9..]).into_owned()
}

#[tokio::test]
async fn a_providers_service_never_is_the_node_itself() {
    let fixture = ControllerFixture::new().await;
    let (apps, other, overlay) = (fixture.socket(8080), fixture.socket(8081), fixture.socket(9443));
    let (ip, admin) = (fixture.address, fixture.socket(0));
    let nodes = format!(
        "kind: Overlay\nname: test\nproviders: {{acme: {{}}, bella: {{}}}}\n---\n\
         {{kind: Node, name: shared, address: \"{overlay}\", bind: \"{overlay}\", providers: [acme, bella], admin: \"{admin}\", \
          apps: [{{bind: \"{apps}\", user: acme/ann}}, {{bind: \"{other}\", user: bella/bob}}]}}\n---\n\
         {{kind: User, provider: acme, name: ann, nodes: shared}}\n---\n\
         {{kind: User, provider: bella, name: bob, nodes: shared}}\n"
    );
    fixture.hermes_ok(&["apply", "-f", "-"], &nodes);
    let service = |target: &str| {
        format!("{{kind: Service, provider: acme, name: OWN, at: {{node: shared, {target}}}, for: everyone}}")
    };
    // Targets that the documents show are refused with the service's name.
    let mapped = ip.to_ipv6_mapped();
    for target in [
        format!("tcp: \"{other}\""),
        format!("http: \"{other}\""),
        format!("udp: \"{overlay}\""),
        format!("tcp: \"[{mapped}]:8081\""),
        "http: \"169.254.169.254:80\"".to_owned(),
        "tcp: \"[fd00:ec2::254]:80\"".to_owned(),
    ] {
        let output = fixture.refused(&["apply", "-f", "-"], &service(&target));
        assert!(
            output.contains("Service/acme/OWN: at[0].") && output.contains("providers may not use"),
            "{target}: {output}"
        );
    }
    // Other targets are refused at the dial: a port that the system chose, and the controller's.
    let _shared = fixture.node("shared", Some(&fixture.token("shared")));
    let mut port = None;
    until("the node says where its admin endpoint is", || {
        let log = fixture.log("shared");
        let line = log.lines().find(|line| line.contains("admin endpoint")).unwrap_or_default().to_owned();
        let text = line.rsplit(':').next().unwrap_or_default();
        port = text.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u16>().ok();
        port.is_some()
    })
    .await;
    let port = port.unwrap();
    fixture.origin(7001, "own");
    let tcp =
        |port: u16| service(&format!("tcp: \"{ip}:{port}\"")).replace("name: OWN", "name: OWN, authority: \"OWN:443\"");
    for (port, is_own) in [(7001, true), (port, false), (9400, false), (7001, true)] {
        let (status, tunnel) = if is_own { (200, "200") } else { (403, "403") };
        fixture.hermes_ok(&["apply", "-f", "-", "--wait", "20s"], &service(&format!("http: \"{ip}:{port}\"")));
        assert_eq!(fixture.get("OWN").unwrap().0, status, "http to {port}");
        fixture.hermes_ok(&["apply", "-f", "-", "--wait", "20s"], &tcp(port));
        assert_eq!(connect(&fixture, "OWN:443"), tunnel, "tcp to {port}");
    }
    // The same holds for a name that resolves there, and for a target that the request names.
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "20s"], &service(&format!("http: \"localhost.:{port}\"")));
    assert_ne!(fixture.get("OWN").unwrap().0, 200);
    let named = "{kind: Service, provider: acme, name: ALL, authority: \"*:*\", at: {node: shared, tcp: authority, reach: any}, for: everyone}";
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "20s"], named);
    assert_eq!(connect(&fixture, &format!("{ip}:9400")), "403");
    assert_eq!(connect(&fixture, &format!("{ip}:8081")), "403");
    assert_eq!(connect(&fixture, &format!("[{mapped}]:{port}")), "403");
    assert_eq!(connect(&fixture, &format!("{ip}:7001")), "200");
}
