//! A node that was removed and does not obey: what it has of the overlay is worth nothing within seconds.

use hermes_testkit::binary::hermes;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use hermes_testkit::process::Program;

use hermes_testkit::control::{ControllerFixture, until};

/// An origin that begins an answer and never ends it.
fn endless(fixture: &ControllerFixture, port: u16) {
    let listener = TcpListener::bind(fixture.socket(port)).unwrap();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nfirst");
            held.push(stream);
        }
    });
}

fn ask(fixture: &ControllerFixture, port: u16, authority: &str) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(fixture.socket(port))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    write!(stream, "GET / HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n")?;
    Ok(stream)
}

fn status(fixture: &ControllerFixture, port: u16, authority: &str) -> String {
    let mut text = String::new();
    let _ = ask(fixture, port, authority).and_then(|mut stream| stream.read_to_string(&mut text));
    text.split(' ').nth(1).unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_removed_node_that_does_not_obey_is_cut_off() {
    let fixture = ControllerFixture::new().await;
    fixture.origin(7001, "one");
    endless(&fixture, 7002);
    let endless = format!(
        "---\n{{kind: Service, name: ENDLESS, at: {{node: server, http: \"{}\"}}, for: everyone}}\n",
        fixture.socket(7002)
    );
    let documents = fixture.documents(7001) + &endless;
    fixture.hermes_ok(&["apply", "-f", "-"], &documents);
    let laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    let _server = fixture.node("server", Some(&fixture.token("server")));
    fixture.until_answers("APP", "one").await;
    // Somebody has all that the laptop has, and runs it without the controller.
    let thief = fixture.state("thief");
    std::fs::create_dir(&thief).unwrap();
    for file in ["node.pem", "node.key", "ca.pem"] {
        std::fs::copy(fixture.state("laptop").join(file), thief.join(file)).unwrap();
    }
    let document = std::fs::read_to_string(fixture.state("laptop/document.json")).unwrap();
    let (own, other) = (fixture.socket(8080).to_string(), fixture.socket(8082).to_string());
    std::fs::write(thief.join("document.json"), document.replace(&own, &other)).unwrap();
    let program = Program::new("thief", hermes(), fixture.directory.path()).args(["proxy", "--config"]);
    let _thief = program.args([thief.join("document.json")]).start().unwrap();
    until("it is taken for the laptop", || status(&fixture, 8082, "APP") == "200").await;
    let mut live = ask(&fixture, 8082, "ENDLESS").unwrap();
    let mut begun = [0; 12];
    live.read_exact(&mut begun).unwrap();
    assert_eq!(&begun, b"HTTP/1.1 200");

    fixture.hermes_ok(&["node", "revoke", "laptop"], "");
    let mut rest = Vec::new();
    // Ended, and not waited for: a timeout would be another error.
    let ended = live.read_to_end(&mut rest).err().map(|error| error.kind());
    assert!(!matches!(ended, Some(std::io::ErrorKind::WouldBlock)), "its live session goes on");
    // Each worker of the server takes up the revocation at its own next turn: the first may end the session above while
    // the second still answers.
    for service in ["APP", "ENDLESS"] {
        let refused = || !matches!(&*status(&fixture, 8082, service), "200" | "");
        until(&format!("{service} refuses the thief"), refused).await;
    }
    // One of its name that comes later is another one.
    laptop.end(Duration::from_secs(5)).unwrap();
    std::fs::remove_dir_all(fixture.state("laptop")).unwrap();
    let _laptop = fixture.node("laptop", Some(&fixture.token("laptop")));
    fixture.until_answers("APP", "one").await;
    assert_ne!(status(&fixture, 8082, "APP"), "200");
}
