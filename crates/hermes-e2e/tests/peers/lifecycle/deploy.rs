//! `hermes node deploy`: nodes on this machine, in its network namespaces, and on a machine with a real sshd; and their
//! removal.

use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;

use hermes_testkit::netns::Namespace;
use hermes_testkit::skip::skip;
use hermes_testkit::sshd::Sshd;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use hermes_testkit::control::{ControllerFixture, origin, until};

/// Ends what a test that failed has left: placed nodes are nobody's children.
struct Left<'a>(&'a ControllerFixture);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        for node in ["server", "laptop"] {
            let directory = self.0.directory.path().join("nodes").join(node);
            let Ok(pid) = std::fs::read_to_string(directory.join("pid")) else { continue };
            let line = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.trim())).unwrap_or_default();
            if line.contains(directory.to_str().unwrap()) {
                let _ = kill(Pid::from_raw(pid.trim().parse().unwrap()), Signal::SIGKILL);
            }
        }
    }
}

/// Both nodes are placed, carry traffic, and are taken away: `on` says where, and how.
async fn come_and_go(fixture: &ControllerFixture, on: &[&str]) {
    fixture.origin(7000, "here");
    come_and_go_on(fixture, &fixture.documents(7000), |_| on.to_vec()).await;
}

/// The same of nodes that these documents describe, each at a place of its own.
async fn come_and_go_on<'a>(fixture: &ControllerFixture, documents: &str, on: impl Fn(&str) -> Vec<&'a str>) {
    let _left = Left(fixture);
    fixture.hermes_ok(&["apply", "-f", "-", "--wait", "0s"], documents);
    let verb = |verb: &'static str, node: &'static str| [vec!["node", verb, node], on(node)].concat();
    for node in ["server", "laptop"] {
        let output = fixture.hermes_ok(&verb("deploy", node), "");
        assert!(output.ends_with(&format!("node {node} connected: running\n")), "{output}");
    }
    fixture.until_answers("APP", "here").await;
    assert_eq!(fixture.hermes_ok(&verb("deploy", "server"), ""), "node server already runs there\n");
    let directory = fixture.directory.path().join("nodes/server");
    let mode = |path: &Path| std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path).unwrap().permissions());
    let token = std::fs::read_to_string(directory.join("token")).unwrap();
    assert_eq!((mode(&directory.join("token")) & 0o77, mode(&directory) & 0o77), (0, 0), "nobody else reads them");
    let pid = std::fs::read_to_string(directory.join("pid")).unwrap();
    for file in [format!("/proc/{}/cmdline", pid.trim()), directory.join("log").to_str().unwrap().to_owned()] {
        assert!(!std::fs::read_to_string(&file).unwrap().contains(token.trim()), "the token is in {file}");
    }
    let output = fixture.hermes_ok(&verb("undeploy", "server"), "");
    assert!(output.contains("node server has no sessions\nnode server stopped there"), "{output}");
    assert!(!directory.exists(), "{:?}", std::fs::read_dir(&directory).unwrap().collect::<Vec<_>>());
    // One that has ended and that nobody has waited for has no command line any more.
    let left = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.trim())).unwrap_or_default();
    assert_eq!(left, "", "it has ended");
    // Where it was, or elsewhere, it comes again with a token of its own, and takes sessions.
    fixture.hermes_ok(&verb("deploy", "server"), "");
    fixture.until_answers("APP", "here").await;
    for node in ["server", "laptop"] {
        fixture.hermes_ok(&[&verb("undeploy", node)[..], &["--now"]].concat(), "");
    }
    assert!(fixture.get("APP").is_none());
}

#[tokio::test]
async fn a_node_is_a_process_of_this_machine() {
    let fixture = ControllerFixture::new().await;
    let nodes = fixture.directory.path().join("nodes");
    come_and_go(&fixture, &["--on", "process", "--dir", nodes.to_str().unwrap()]).await;
}

/// Two machines that a cable joins. The server is reached over it alone, and what it serves is at a loopback address of its own.
#[test]
fn nodes_are_processes_of_network_namespaces() {
    if !hermes_testkit::skip::needs_root("nodes_are_processes_of_network_namespaces") {
        return;
    }
    let thread = std::thread::spawn(|| {
        let (here, there) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        here.join(HERE, &there, THERE).unwrap();
        there.enter().unwrap();
        origin((Ipv4Addr::LOCALHOST, 7000).into(), "here");
        // The controller is here, and so is who asks.
        here.enter().unwrap();
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, 7000)).is_err(), "it is not this loopback address");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(between(&here, &there));
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

const HERE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const THERE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);

async fn between(here: &Namespace, there: &Namespace) {
    let fixture = ControllerFixture::at(HERE).await;
    let documents = format!(
        "kind: Overlay\nname: test\n---\n\
         {{kind: Node, name: laptop, links: server, apps: {{bind: \"{HERE}:8080\"}}}}\n---\n\
         {{kind: Node, name: server, address: \"{THERE}:9443\", bind: \"{THERE}:9443\"}}\n---\n\
         {{kind: User, name: ann, nodes: laptop}}\n---\n\
         {{kind: Service, name: APP, at: {{node: server, http: \"127.0.0.1:7000\"}}, for: {{users: ann}}}}\n"
    );
    let nodes = fixture.directory.path().join("nodes");
    let places = [here, there].map(|place| format!("process:{}", place.name()));
    let on = |node: &str| {
        let place = &places[usize::from(node == "server")];
        vec!["--on", place, "--dir", nodes.to_str().unwrap()]
    };
    come_and_go_on(&fixture, &documents, on).await;
    // Nothing is left in the one; in the other there is the controller.
    assert_eq!(processes(there), Vec::<String>::new());
    assert!(processes(here).iter().all(|line| line.contains("\0controller\0")), "{:?}", processes(here));
    let output = fixture.refused(&["node", "deploy", "server", "--on", "process:nowhere-at-all"], "");
    assert!(output.contains("network namespace nowhere-at-all"), "{output}");
}

/// Command lines of processes in a namespace, of those that have not ended.
fn processes(place: &Namespace) -> Vec<String> {
    let output = Command::new("ip").args(["netns", "pids", place.name()]).output().unwrap();
    let own = std::process::id().to_string();
    let pids = String::from_utf8(output.stdout).unwrap();
    let pids = pids.lines().filter(|pid| *pid != own);
    let lines = pids.map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default());
    lines.filter(|line| !line.is_empty()).collect()
}

#[tokio::test]
async fn a_node_is_put_onto_another_machine_by_ssh() {
    if !Sshd::is_installed() {
        return skip("a_node_is_put_onto_another_machine_by_ssh", "openssh-server is not installed");
    }
    if !hermes_testkit::skip::needs_root("a_node_is_put_onto_another_machine_by_ssh") {
        return;
    }
    let fixture = ControllerFixture::new().await;
    let room = fixture.directory.path();
    let _sshd = Sshd::start(room, fixture.socket(2222), None).unwrap();
    until("sshd listens", || TcpStream::connect(fixture.socket(2222)).is_ok()).await;
    let (nodes, config) = (room.join("nodes"), room.join("ssh.conf"));
    let on = format!("ssh:root@{}:2222", fixture.address);
    let on = ["--on", &on, "--dir", nodes.to_str().unwrap(), "--ssh-config", config.to_str().unwrap()];
    come_and_go(&fixture, &on).await;
    // Who is not known is not believed.
    std::fs::write(room.join("known"), "").unwrap();
    let output = fixture.refused(&[&["node", "deploy", "server"], &on[..]].concat(), "");
    assert!(output.contains("Host key verification failed"), "{output}");
}
