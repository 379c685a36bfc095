//! A node is drained: what begins goes by another one, what lives lives on, and the operator sees when it is over.

use hermes_testkit::binary::hermes;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use hermes_testkit::control::{ControllerFixture, until};

/// A laptop, two routers, and a server with an echo.
fn documents(fixture: &ControllerFixture) -> String {
    let at = |port: u16| fixture.socket(port);
    let router = |name: &str, overlay: u16, admin: u16| {
        format!(
            "{{kind: Node, name: {name}, role: standalone, address: \"{0}\", bind: \"{0}\", admin: \"{1}\", links: server}}\n---\n",
            at(overlay),
            at(admin)
        )
    };
    let routers = router("one", 9441, 9901) + &router("two", 9442, 9902);
    let (apps, overlay, origin) = (at(8080), at(9443), at(7000));
    format!(
        "kind: Overlay\nname: test\n---\n\
         {{kind: Node, name: laptop, links: [one, two], apps: {{bind: \"{apps}\"}}}}\n---\n{routers}\
         {{kind: Node, name: server, address: \"{overlay}\", bind: \"{overlay}\"}}\n---\n\
         {{kind: User, name: ann, nodes: laptop}}\n---\n\
         {{kind: Service, name: ECHO, authority: \"ECHO:1\", at: {{node: server, tcp: \"{origin}\"}}, for: {{users: ann}}}}\n"
    )
}

fn echo(fixture: &ControllerFixture) {
    let listener = TcpListener::bind(fixture.socket(7000)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut other = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut stream, &mut other);
            });
        }
    });
}

/// A tunnel to the echo. `None` before the first one is made.
fn tunnel(fixture: &ControllerFixture) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(fixture.socket(8080)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"CONNECT ECHO:1 HTTP/1.1\r\nhost: ECHO:1\r\n\r\n").ok()?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    head.starts_with(b"HTTP/1.1 200").then_some(stream)
}

fn says_back(stream: &mut TcpStream) {
    stream.write_all(b"there?").unwrap();
    let mut back = [0; 6];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"there?");
}

/// How many sessions a node has, as its own admin endpoint says.
fn sessions(fixture: &ControllerFixture, admin: u16) -> usize {
    let mut stream = TcpStream::connect(fixture.socket(admin)).unwrap();
    write!(stream, "GET /sessions HTTP/1.0\r\nhost: {}\r\n\r\n", fixture.socket(admin)).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let body = text.split_once("\r\n\r\n").unwrap().1;
    serde_json::from_str::<Vec<serde_json::Value>>(body).unwrap().len()
}

#[tokio::test]
async fn a_drained_node_gets_nothing_new_and_ends_nothing() {
    let fixture = ControllerFixture::new().await;
    echo(&fixture);
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], &documents(&fixture));
    let names = ["laptop", "one", "two", "server"];
    let _nodes: Vec<_> = names.iter().map(|name| fixture.node(name, Some(&fixture.token(name)))).collect();
    until("there is a way", || tunnel(&fixture).is_some()).await;
    until("both routers are there", || fixture.hermes_ok(&["node", "list"], "").matches(" running").count() == 4).await;
    let mut live: Vec<_> = Vec::new();
    until("both routers have sessions", || {
        live.push(tunnel(&fixture).unwrap());
        sessions(&fixture, 9901) > 0 && sessions(&fixture, 9902) > 0
    })
    .await;
    let (before, other) = (sessions(&fixture, 9901), sessions(&fixture, 9902));

    // What is not over in time is told, and it drains all the same.
    let text = fixture.refused(&["node", "drain", "one", "--timeout", "0s"], "");
    assert!(text.contains("node one has ") && text.contains(" after 0ns. It continues to drain"), "{text}");
    let admin = fixture.socket(9901).to_string();
    let ready = || fixture.hermes(&["health", "--admin", &admin], "");
    assert_eq!((ready().status.code(), &*ready().stdout), (Some(1), &b"draining\n"[..]));
    let mut fresh: Vec<_> = (0..6).map(|_| tunnel(&fixture).unwrap()).collect();
    assert_eq!(
        (sessions(&fixture, 9901), sessions(&fixture, 9902)),
        (before, other + 6),
        "new ones go by the other router"
    );
    live.iter_mut().chain(&mut fresh).for_each(says_back);
    let shown = fixture.hermes_ok(&["node", "exec-config", "one"], "");
    assert!(shown.starts_with("# revision ") && shown.contains(": draining\n"), "{shown}");
    let file = fixture.directory.path().join("one.yaml");
    std::fs::write(&file, &shown).unwrap();
    assert!(fixture.hermes_ok(&["check", file.to_str().unwrap()], "").contains("ok, node one"), "{shown}");
    // What leads elsewhere goes out in steps, of which the last one is not waited for.
    until("the laptop runs it", || fixture.hermes_ok(&["node", "exec-config", "laptop"], "").contains(": running\n"))
        .await;

    let mut waiting = Command::new(hermes())
        .args(["node", "drain", "one"])
        .env("HERMES_OPERATOR", fixture.directory.path().join("controller/operator.json"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    until("it shows them", || {
        fixture
            .hermes_ok(&["node", "list"], "")
            .lines()
            .any(|line| line.starts_with("one ") && line.ends_with(" draining"))
    })
    .await;
    assert!(waiting.try_wait().unwrap().is_none(), "it waits for live sessions");
    drop(live);
    let output = tokio::task::spawn_blocking(move || waiting.wait_with_output().unwrap()).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.ends_with("node one has no sessions\n"), "{text}");
    fresh.iter_mut().for_each(says_back);

    // The last way is kept: nothing becomes unavailable by a drain.
    let text = fixture.hermes(&["node", "drain", "two", "--timeout", "0s"], "");
    let text = String::from_utf8(text.stdout).unwrap() + &String::from_utf8(text.stderr).unwrap();
    assert!(text.contains("node two is the only path to Service/ECHO"), "{text}");
    assert!(tunnel(&fixture).is_some());
    fixture.hermes_ok(&["node", "drain", "two", "--undo"], "");
    fixture.hermes_ok(&["node", "drain", "one", "--undo"], "");
    until("the first router has sessions again", || {
        fresh.push(tunnel(&fixture).unwrap());
        sessions(&fixture, 9901) > 0
    })
    .await;
}
