//! Services that share an authority, unreachable services, and the ports of services.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use hermes_testkit::control::{ControllerFixture, EFFECT_TIMEOUT};

/// The response to an application at a port of the laptop.
fn get(at: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(EFFECT_TIMEOUT)).unwrap();
    write!(stream, "{request}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

/// Two users, each with an app of a node.
fn documents(fixture: &ControllerFixture, services: &str) -> String {
    let (overlay, ann, bob) = (fixture.socket(9443), fixture.socket(8080), fixture.socket(8081));
    format!(
        "kind: Overlay\nname: test\n---\n\
         {{kind: Node, name: laptop, links: server, apps: [{{bind: \"{ann}\", user: ann}}, {{bind: \"{bob}\", user: bob}}]}}\n---\n\
         {{kind: Node, name: server, address: \"{overlay}\", bind: \"{overlay}\"}}\n---\n\
         {{kind: User, name: ann, nodes: laptop}}\n---\n{{kind: User, name: bob, nodes: laptop}}\n---\n{services}"
    )
}

#[tokio::test]
async fn the_service_with_the_narrower_audience_wins() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "everyone");
    fixture.origin(7002, "canary");
    let service = |name: &str, port: u16, audience: &str| {
        let at = fixture.socket(port);
        format!(
            "{{kind: Service, name: {name}, authority: shop, at: {{node: server, http: \"{at}\"}}, for: {audience}}}\n---\n"
        )
    };
    let all = service("a-shop", 7001, "everyone") + &service("shop-canary", 7002, "{users: ann}");
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, &all));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("shop", "canary").await;
    let bob = get(fixture.socket(8081), "GET / HTTP/1.1\r\nhost: shop");
    assert!(bob.ends_with("everyone"), "{bob}");
    // The controller and `check` refuse audiences of the same size, and name both services.
    for audience in ["everyone", "{users: [ann, bob]}"] {
        let both = service("a-shop", 7001, audience) + &service("shop-canary", 7002, audience);
        let output = fixture.refused(&["apply", "-f", "-"], &documents(&fixture, &both));
        assert!(
            output.contains("a-shop") && output.contains("shop-canary") && output.contains("audience of the same size"),
            "{output}"
        );
        let file = fixture.state("both.yaml");
        std::fs::write(&file, documents(&fixture, &both)).unwrap();
        let output = fixture.hermes(&["check", file.to_str().unwrap()], "");
        assert_eq!(output.status.code(), Some(1));
        let output = String::from_utf8(output.stdout).unwrap();
        assert!(output.contains("a-shop") && output.contains("shop-canary"), "{output}");
    }
    // The audiences are disjoint: each user has one service.
    let each = service("a-shop", 7001, "{users: bob}") + &service("shop-canary", 7002, "{users: ann}");
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, &each));
}

#[tokio::test]
async fn unreachable_services_and_warnings_of_nodes_are_listed() {
    let fixture = ControllerFixture::new().await;
    let at = fixture.socket(7001);
    let lonely = format!("{{kind: Service, name: APP, at: {{node: server, http: \"{at}\"}}, for: {{users: ann}}}}\n");
    let text = documents(&fixture, &lonely).replace("links: server, ", "");
    let words = "Service/APP: no user can reach it: no links lead from its users' nodes to its replicas";
    let output = fixture.hermes_ok(&["apply", "-f", "-"], &text);
    assert!(output.contains(words), "{output}");
    let file = fixture.state("lonely.yaml");
    std::fs::write(&file, &text).unwrap();
    let output = fixture.hermes_ok(&["check", file.to_str().unwrap()], "");
    assert!(output.contains(words) && output.contains("warning"), "{output}");
    // A warning of a node's own document: its listener accepts anybody.
    let open =
        "{kind: Network, name: NET, prefixes: 10.0.0.0/8, at: {node: server, address: 10.1.0.1}, for: {users: ann}}\n";
    let text = documents(&fixture, open);
    std::fs::write(&file, &text).unwrap();
    for output in
        [fixture.hermes_ok(&["check", file.to_str().unwrap()], ""), fixture.hermes_ok(&["apply", "-f", "-"], &text)]
    {
        assert!(
            output.contains("Node/server: its document: routes[0].terminate.assign: clients may get any"),
            "{output}"
        );
    }
}

#[tokio::test]
async fn a_tcp_service_is_reached_at_its_targets_port() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7432, "db");
    let at = fixture.socket(7432);
    let db = format!("{{kind: Service, name: DB, at: {{node: server, tcp: \"{at}\"}}, for: {{users: ann}}}}\n");
    fixture.hermes_ok(&["apply", "-f", "-"], &documents(&fixture, &db));
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    let connect = |port: u16| get(fixture.socket(8080), &format!("CONNECT DB:{port} HTTP/1.1\r\nhost: DB:{port}"));
    let is_there = || TcpStream::connect(fixture.socket(8080)).is_ok() && connect(443).starts_with("HTTP/1.1 200");
    hermes_testkit::control::until("the nodes run it", is_there).await;
    assert!(connect(7432).starts_with("HTTP/1.1 200"), "{}", connect(7432));
    assert!(connect(7433).starts_with("HTTP/1.1 404"));
}

#[tokio::test]
async fn a_node_under_a_controller_and_the_controller_tell_how_they_are() {
    let fixture = ControllerFixture::new().await;
    fixture.hermes_ok(&["apply", "-f", "-"], &fixture.documents(7001));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    let state = fixture.state("server");
    let health = || fixture.hermes(&["health", "--state", state.to_str().unwrap()], "").status.success();
    hermes_testkit::control::until("the node is healthy", health).await;
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&state).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o700, "nobody else reaches the socket");
    let output = get(fixture.socket(9490), "GET /metrics HTTP/1.1\r\nhost: x");
    assert!(
        output.contains("hermes_controller_store_up 1\n") && output.contains("{state=\"enrolled\"} 1\n"),
        "{output}"
    );
    let output = get(fixture.socket(9490), "GET /healthz HTTP/1.1\r\nhost: x");
    assert!(output.starts_with("HTTP/1.1 200") && output.ends_with("ok\n"), "{output}");
}
