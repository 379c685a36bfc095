//! Services that share an authority, unreachable services, and the ports of services.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use hermes_testkit::control::{Bed, PATIENCE};

/// The response to an application at a port of the laptop.
fn get(at: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "{request}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

/// Two users, each with an app of a node.
fn documents(bed: &Bed, services: &str) -> String {
    let (overlay, ann, bob) = (bed.socket(9443), bed.socket(8080), bed.socket(8081));
    format!(
        "kind: Overlay\nname: test\n---\n\
         {{kind: Node, name: laptop, links: server, apps: [{{bind: \"{ann}\", user: ann}}, {{bind: \"{bob}\", user: bob}}]}}\n---\n\
         {{kind: Node, name: server, address: \"{overlay}\", bind: \"{overlay}\"}}\n---\n\
         {{kind: User, name: ann, nodes: laptop}}\n---\n{{kind: User, name: bob, nodes: laptop}}\n---\n{services}"
    )
}

#[tokio::test]
async fn of_two_services_with_one_authority_the_narrower_audience_wins() {
    let bed = Bed::new().await;
    bed.origin(7001, "everyone");
    bed.origin(7002, "canary");
    let service = |name: &str, port: u16, audience: &str| {
        let at = bed.socket(port);
        format!(
            "{{kind: Service, name: {name}, authority: shop, at: {{node: server, http: \"{at}\"}}, for: {audience}}}\n---\n"
        )
    };
    let all = service("a-shop", 7001, "everyone") + &service("shop-canary", 7002, "{users: ann}");
    bed.told(&["apply", "-f", "-"], &documents(&bed, &all));
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("shop", "canary").await;
    let bob = get(bed.socket(8081), "GET / HTTP/1.1\r\nhost: shop");
    assert!(bob.ends_with("everyone"), "{bob}");
    // The controller and `check` refuse audiences of the same size, and name both services.
    for audience in ["everyone", "{users: [ann, bob]}"] {
        let both = service("a-shop", 7001, audience) + &service("shop-canary", 7002, audience);
        let said = bed.refused(&["apply", "-f", "-"], &documents(&bed, &both));
        assert!(
            said.contains("a-shop") && said.contains("shop-canary") && said.contains("audience of the same size"),
            "{said}"
        );
        let file = bed.state("both.yaml");
        std::fs::write(&file, documents(&bed, &both)).unwrap();
        let said = bed.hermes(&["check", file.to_str().unwrap()], "");
        assert_eq!(said.status.code(), Some(1));
        let said = String::from_utf8(said.stdout).unwrap();
        assert!(said.contains("a-shop") && said.contains("shop-canary"), "{said}");
    }
    // The audiences are disjoint: each user has one service.
    let each = service("a-shop", 7001, "{users: bob}") + &service("shop-canary", 7002, "{users: ann}");
    bed.told(&["apply", "-f", "-"], &documents(&bed, &each));
}

#[tokio::test]
async fn a_service_that_nobody_reaches_and_warnings_of_nodes_are_shown() {
    let bed = Bed::new().await;
    let at = bed.socket(7001);
    let lonely = format!("{{kind: Service, name: APP, at: {{node: server, http: \"{at}\"}}, for: {{users: ann}}}}\n");
    let text = documents(&bed, &lonely).replace("links: server, ", "");
    let words = "Service/APP: no user can reach it: no links lead from its users' nodes to its replicas";
    let said = bed.told(&["apply", "-f", "-"], &text);
    assert!(said.contains(words), "{said}");
    let file = bed.state("lonely.yaml");
    std::fs::write(&file, &text).unwrap();
    let said = bed.told(&["check", file.to_str().unwrap()], "");
    assert!(said.contains(words) && said.contains("warning"), "{said}");
    // A warning of a node's own document: its listener accepts anybody.
    let open =
        "{kind: Network, name: NET, prefixes: 10.0.0.0/8, at: {node: server, address: 10.1.0.1}, for: {users: ann}}\n";
    let text = documents(&bed, open);
    std::fs::write(&file, &text).unwrap();
    for said in [bed.told(&["check", file.to_str().unwrap()], ""), bed.told(&["apply", "-f", "-"], &text)] {
        assert!(said.contains("Node/server: its document: routes[0].terminate.assign: clients may get any"), "{said}");
    }
}

#[tokio::test]
async fn a_tcp_service_is_reached_at_its_targets_port() {
    let bed = Bed::new().await;
    bed.origin(7432, "db");
    let at = bed.socket(7432);
    let db = format!("{{kind: Service, name: DB, at: {{node: server, tcp: \"{at}\"}}, for: {{users: ann}}}}\n");
    bed.told(&["apply", "-f", "-"], &documents(&bed, &db));
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    let connect = |port: u16| get(bed.socket(8080), &format!("CONNECT DB:{port} HTTP/1.1\r\nhost: DB:{port}"));
    let is_there = || TcpStream::connect(bed.socket(8080)).is_ok() && connect(443).starts_with("HTTP/1.1 200");
    hermes_testkit::control::until("the nodes run it", is_there).await;
    assert!(connect(7432).starts_with("HTTP/1.1 200"), "{}", connect(7432));
    assert!(connect(7433).starts_with("HTTP/1.1 404"));
}

#[tokio::test]
async fn a_node_under_a_controller_and_the_controller_tell_how_they_are() {
    let bed = Bed::new().await;
    bed.told(&["apply", "-f", "-"], &bed.documents(7001));
    let _server = bed.node("server", Some(&bed.token("server")));
    let state = bed.state("server");
    let health = || bed.hermes(&["health", "--state", state.to_str().unwrap()], "").status.success();
    hermes_testkit::control::until("the node is healthy", health).await;
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&state).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o700, "nobody else reaches the socket");
    let said = get(bed.socket(9490), "GET /metrics HTTP/1.1\r\nhost: x");
    assert!(said.contains("hermes_controller_store_up 1\n") && said.contains("{state=\"enrolled\"} 1\n"), "{said}");
    let said = get(bed.socket(9490), "GET /healthz HTTP/1.1\r\nhost: x");
    assert!(said.starts_with("HTTP/1.1 200") && said.ends_with("ok\n"), "{said}");
}
