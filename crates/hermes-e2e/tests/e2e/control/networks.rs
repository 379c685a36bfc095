//! `kind: Network`: what a user's device sends to a prefix comes out where the operator says, and elsewhere when he says so.

use std::net::Ipv4Addr;

use hermes_testkit::netns::Namespace;
use hermes_testkit::poll;
use hermes_testkit::process::{Program, Running};
use hermes_testkit::skip::needs_root;
use serde_json::Value;

use hermes_testkit::control::ControllerFixture;

/// Where everybody finds the hub.
const HUB: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);

struct Places {
    laptop: Namespace,
    east: Namespace,
    west: Namespace,
}

impl Places {
    /// Each joined to the hub, where this thread is from now on.
    fn around(hub: &Namespace) -> Self {
        hub.ip(&["address", "add", "10.99.0.1/32", "dev", "lo"]).unwrap();
        let [laptop, east, west] = [1, 2, 3].map(|number| {
            let namespace = Namespace::new().unwrap();
            let near = Ipv4Addr::new(10, 77, number, 1);
            hub.join(near, &namespace, Ipv4Addr::new(10, 77, number, 2)).unwrap();
            namespace.ip(&["route", "add", "10.99.0.1/32", "via", &near.to_string()]).unwrap();
            namespace
        });
        hub.enter().unwrap();
        Self { laptop, east, west }
    }
}

fn documents(at: &str) -> String {
    format!(
        "kind: Overlay\nname: test\n---\n\
         {{kind: Node, name: laptop, links: ingress, apps: {{protocol: tun, address: 10.20.0.2}}}}\n---\n\
         {{kind: Node, name: ingress, role: standalone, address: \"10.99.0.1:9443\", http3: true, links: [east, west]}}\n---\n\
         {{kind: Node, name: east, address: \"10.77.2.2:9443\"}}\n---\n\
         {{kind: Node, name: west, address: \"10.77.3.2:9443\"}}\n---\n\
         {{kind: User, name: alice, nodes: laptop}}\n---\n{}",
        network(at)
    )
}

fn network(at: &str) -> String {
    format!(
        "{{kind: Network, name: office, prefixes: 10.0.0.1/32, at: {{node: {at}, address: 10.0.0.1, assign: 10.20.0.0/16}}, \
         for: {{users: alice}}}}\n"
    )
}

/// Packets that came out of the network's device there.
async fn came_out(namespace: &Namespace) -> u64 {
    let text = namespace.output(&["ip", "-j", "-s", "link", "show", "ip-office"]).await.unwrap_or_default();
    let text: Value = serde_json::from_str(&text).unwrap_or_default();
    text[0]["stats64"]["rx"]["packets"].as_u64().unwrap_or_default()
}

async fn answers(laptop: &Namespace) -> bool {
    laptop.output(&["ping", "-c1", "-W0.3", "10.0.0.1"]).await.is_ok()
}

/// Pings that go on, and what came of them.
struct Pings(Running);

impl Pings {
    fn start(fixture: &ControllerFixture, laptop: &Namespace) -> Self {
        let program = Program::new("pings", "ping", fixture.directory.path()).within(Some(laptop));
        Self(program.args(["-i", "0.05", "-W", "1", "10.0.0.1"]).start().unwrap())
    }

    async fn progress(&self, more: usize) {
        let count = || std::fs::read_to_string(self.0.stdout()).unwrap().matches("bytes from").count();
        let before = count();
        poll::until("pings are answered", async || count() >= before + more).await;
    }

    /// How many were sent, and how many answered.
    fn finish(self) -> (u64, u64) {
        let output = self.0.stdout().to_owned();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(self.0.pid().cast_signed()),
            nix::sys::signal::Signal::SIGINT,
        )
        .unwrap();
        drop(self.0.wait_output(hermes_testkit::control::EFFECT_TIMEOUT));
        let output = std::fs::read_to_string(output).unwrap();
        let line = output.lines().find(|line| line.contains("packets transmitted")).unwrap().to_owned();
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        (numbers[0], numbers[1])
    }
}

async fn body(namespaces: Places) {
    let fixture = ControllerFixture::at(HUB).await;
    fixture.hermes_ok(&["apply", "-f", "-"], &documents("east"));
    let own = |name, index| fixture.node_within(index, name, Some(&fixture.token(name)));
    let _nodes = [
        own("ingress", None),
        own("east", Some(&namespaces.east)),
        own("west", Some(&namespaces.west)),
        own("laptop", Some(&namespaces.laptop)),
    ];
    poll::until("alice's packets come out and back", async || answers(&namespaces.laptop).await).await;
    assert!(came_out(&namespaces.east).await > 0 && came_out(&namespaces.west).await == 0);

    // The network moves while packets are on their way; who sends them has nothing to do with it.
    let pings = Pings::start(&fixture, &namespaces.laptop);
    pings.progress(20).await;
    for at in ["west", "east", "west"] {
        fixture.hermes_ok(&["apply", "-f", "-"], &network(at));
        let gate = if at == "west" { &namespaces.west } else { &namespaces.east };
        poll::until("packets come out there", async || {
            let before = came_out(gate).await;
            pings.progress(5).await;
            came_out(gate).await > before
        })
        .await;
    }
    let (sent, answered) = pings.finish();
    // Where a session moves its packets may come too early or too late.
    assert!(sent >= 40 && answered + 3 * 3 >= sent, "{answered} of {sent} pings were answered");

    let output = fixture.hermes_ok(&["explain", "--controller", "--user", "alice", "--network", "10.0.0.1"], "");
    assert!(output.starts_with("laptop\n") && output.contains("listener app-0-tun captures it"), "{output}");
    let (_, west) = output.split_once("\nwest\n").unwrap();
    assert!(west.contains("write the packets to device ip-office"), "{output}");

    // Who may use it no more has nothing of it.
    fixture.hermes_ok(&["delete", "Network/office"], "");
    poll::until("nothing comes out", async || !answers(&namespaces.laptop).await).await;
    let before = came_out(&namespaces.west).await;
    assert!(!answers(&namespaces.laptop).await && came_out(&namespaces.west).await == before);
}

#[test]
fn a_network_comes_out_where_its_document_says_and_moves_while_it_is_used() {
    if !needs_root("a_network_comes_out_where_its_document_says") {
        return;
    }
    // A thread of its own, which stays in the hub's namespace.
    let thread = std::thread::spawn(|| {
        let hub = Namespace::new().unwrap();
        let namespaces = Places::around(&hub);
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(body(namespaces));
    });
    thread.join().unwrap();
}
