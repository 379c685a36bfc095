//! The log of a node: its listeners, and the outcome of a changed document.

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::EFFECT_TIMEOUT;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// A node, and the lines of its log as they arrive.
struct RunningNode {
    node: Child,
    lines: mpsc::Receiver<String>,
}

impl RunningNode {
    fn start(config: &std::path::Path) -> Self {
        let mut command = Command::new(hermes());
        command.args(["proxy", "--config", config.to_str().unwrap()]).env_remove("HERMES_LOG");
        let mut node = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let stderr = BufReader::new(node.stderr.take().unwrap());
        // The thread ends with the node's stderr or with the receiver.
        thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { node, lines }
    }

    /// Waits for a line with these words, and returns the lines up to it.
    fn until(&mut self, words: &str) -> Vec<String> {
        let (mut seen, deadline) = (Vec::new(), Instant::now() + EFFECT_TIMEOUT);
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            seen.push(line);
            if seen.last().unwrap().contains(words) {
                return seen;
            }
        }
        panic!("the node never said {words:?}, but\n{}", seen.join("\n"));
    }
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        let _ = self.node.kill();
        let _ = self.node.wait();
    }
}

fn document(port: u16) -> String {
    format!("node: n\nlisteners: [{{name: apps, bind: '127.0.0.1:{port}', protocol: http}}]\n")
}

#[test]
fn a_node_logs_added_and_removed_listeners_and_rejected_documents() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let [one, two] = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let [from, to] = [&one, &two].map(|socket| socket.local_addr().unwrap().port());
    drop((one, two));
    fs::write(&config, document(from)).unwrap();
    let mut running = RunningNode::start(&config);
    let started = running.until("running");
    let line = started.iter().find(|line| line.contains("listening")).unwrap();
    assert!(line.contains("protocol=\"http\"") && line.contains(&format!("127.0.0.1:{from}")), "{line}");

    fs::write(&config, document(to)).unwrap();
    let moved = running.until("applied").join("\n");
    assert!(moved.lines().any(|line| line.contains("listening") && line.contains(&to.to_string())), "{moved}");
    let closed = moved.lines().find(|line| line.contains("closed"));
    assert!(closed.is_some_and(|line| line.contains("apps") && line.contains(&from.to_string())), "{moved}");

    fs::write(&config, "node: n\nlistener: []\n").unwrap();
    let refused = running.until("ERROR").pop().unwrap();
    assert!(refused.contains("the running configuration stays: "), "{refused}");
    let problem = running.until("did you mean").pop().unwrap();
    assert!(problem.ends_with("(did you mean \"listeners\"?)"), "{problem}");
}

/// Nothing was written, and nothing is lost: the reason is all that it says.
#[test]
fn a_node_that_cannot_start_logs_only_the_reason() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    fs::write(&config, document(held.local_addr().unwrap().port())).unwrap();
    let seen = RunningNode::start(&config).until("cannot be run").join("\n");
    assert!(!seen.contains("access log") && !seen.contains("ERROR"), "{seen}");
}

/// What a node's admin endpoint answers to a GET.
fn requests(admin: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(admin).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {admin}\r\nconnection: close\r\n\r\n").unwrap();
    let mut output = String::new();
    stream.read_to_string(&mut output).unwrap();
    output
}

/// The address at the end of the one line that has these words.
fn address<'l>(lines: &'l [String], words: &str) -> &'l str {
    let line = lines.iter().find(|line| line.contains(words)).unwrap();
    line.split("address=").nth(1).unwrap().split(' ').next().unwrap()
}

/// A node whose custody goes to this port, and where it takes requests.
fn custodian(room: &std::path::Path, port: u16) -> (RunningNode, String, String) {
    let near = room.join("near.yaml");
    let text = format!(
        "node: near\nadmin: 127.0.0.1:0\nworkers: 1\nlisteners: [{{name: apps, bind: '127.0.0.1:0', protocol: http}}]\n\
         routes: [{{name: on, upstream: far, custody: {{}}}}]\n\
         upstreams: [{{name: far, protocol: h2, endpoints: ['127.0.0.1:{port}'], overlay: true}}]\n"
    );
    fs::write(&near, text).unwrap();
    let mut near = RunningNode::start(&near);
    let lines = near.until("running");
    let (apps, admin) = (address(&lines, "listener=apps"), address(&lines, "admin endpoint"));
    let (apps, admin) = (apps.to_owned(), admin.to_owned());
    (near, apps, admin)
}

/// The other end of custody, which listens at this port.
fn taker(room: &std::path::Path, port: u16, trust: &str) -> RunningNode {
    let far = room.join(format!("far{}.yaml", trust.len()));
    let text = format!(
        "node: far\nlisteners: [{{name: door, bind: '127.0.0.1:{port}', protocol: http{trust}}}]\n\
         routes: [{{name: all, respond: {{body: taken}}}}]\n"
    );
    fs::write(&far, text).unwrap();
    let mut far = RunningNode::start(&far);
    far.until("running");
    far
}

const TRUST: &str = ", trust: 127.0.0.1";

/// A port at which nobody listens.
fn free_port() -> u16 {
    hermes_testkit::port::reserve("127.0.0.1").port()
}

fn asking(apps: String) -> TcpStream {
    let mut client = TcpStream::connect(apps).unwrap();
    write!(client, "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").unwrap();
    client
}

#[test]
fn custody_without_a_receiver_is_logged_once_and_counted() {
    let room = tempfile::tempdir().unwrap();
    let port = free_port();
    let (mut near, apps, admin) = custodian(room.path(), port);
    let mut client = asking(apps);
    let lines = near.until("custody channel refused; exchanges wait");
    let line = lines.last().unwrap();
    assert!(line.contains("WARN") && line.contains("Connection refused") && line.contains("exchanges=1"), "{line}");
    let count = format!("hermes_upstream_connect_failures_total{{upstream=\"far\",endpoint=\"127.0.0.1:{port}\"}} 1\n");
    let metrics = requests(&admin, "/metrics");
    assert!(metrics.contains(&count), "{metrics}");
    let _far = taker(room.path(), port, TRUST);
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("taken"), "{answer}");
    let lines = near.until("custody channel up; exchanges continue");
    assert_eq!(lines.len(), 1, "{lines:?}");
}

/// Whoever runs either node sees why there is no custody between them.
#[test]
fn a_listener_that_refuses_custody_logs_the_reason_once() {
    let room = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut far = taker(room.path(), port, "");
    let (mut near, apps, _) = custodian(room.path(), port);
    let _client = asking(apps);
    let line = near.until("custody channel failed; retrying").pop().unwrap();
    assert!(line.contains("403"), "{line}");
    let line = far.until("custody refused").pop().unwrap();
    assert!(line.contains("WARN") && line.contains("neighbour=127.0.0.1") && line.contains("`trust`"), "{line}");
    // It is asked again and again meanwhile.
    fs::write(room.path().join("far0.yaml"), "node: far\n").unwrap();
    let lines = far.until("applied");
    assert!(!lines.iter().any(|line| line.contains("custody refused")), "{lines:?}");
}

#[test]
fn problems_of_the_state_directory_are_logged_with_path_and_remedy() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let with = |state: &str| fs::write(&config, format!("node: n\nstate: {state}\nlisteners: []\n")).unwrap();
    for state in ["/etc/passwd", "/proc/foo"] {
        with(state);
        let line = RunningNode::start(&config).until("state").pop().unwrap();
        assert!(line.contains(&format!("{state}/custody: ")) && line.contains("name a directory"), "{line}");
    }
    let state = room.path().join("state").display().to_string();
    with(&state);
    let mut first = RunningNode::start(&config);
    first.until("running");
    let line = RunningNode::start(&config).until("another process uses the custody journal").pop().unwrap();
    assert!(line.contains("WARN") && line.contains(&format!("directory={state}/custody")), "{line}");
}
