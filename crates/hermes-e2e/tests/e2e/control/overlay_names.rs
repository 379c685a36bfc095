//! Services by name without a proxy setting: the controller writes two users' documents, and their programs ask DNS.
//!
//! In: two laptops, each in a namespace of its own, of users of two providers whose services have the same names; a
//! server with two of each. Out: getent, redis-cli, ssh and curl of each user reach that user's service.

use std::net::Ipv4Addr;

use hermes_testkit::dns::resolving_by;
use hermes_testkit::netns::Namespace;
use hermes_testkit::origin::{self, http};
use hermes_testkit::poll;
use hermes_testkit::process::Program;
use hermes_testkit::skip::needs_root;
use hermes_testkit::sshd::Sshd;

use hermes_testkit::control::ControllerFixture;

/// The address of the controller and the ingress.
const HUB: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// The address of a laptop's DNS listener.
const RESOLVER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 53);

const DOCUMENTS: &str = "\
kind: Overlay
name: test
providers: {acme: {}, bella: {}}
---
kind: Node
name: alice-laptop
links: ingress
providers: acme
apps:
- {protocol: tun, address: [10.20.0.2, 'fd00:20::2']}
- {protocol: dns, bind: '127.0.0.53:53', addresses: [100.64.0.0/10, 'fd00:6865::/64']}
---
{kind: Node, name: bob-laptop, links: ingress, providers: bella, apps: [{protocol: tun, address: 10.20.0.3}, {protocol: dns, bind: '127.0.0.53:53'}]}
---
{kind: Node, name: ingress, role: standalone, address: '10.99.0.1:9443', http3: true, links: server, providers: [acme, bella]}
---
{kind: Node, name: server, address: '10.77.3.2:9443', providers: [acme, bella]}
---
{kind: User, provider: acme, name: alice, nodes: alice-laptop}
---
{kind: User, provider: bella, name: bob, nodes: bob-laptop}
---
{kind: Service, provider: acme, name: DB, authority: 'DB:*', at: {node: server, tcp: '127.0.0.1:6379'}, for: everyone}
---
{kind: Service, provider: bella, name: DB, authority: 'DB:*', at: {node: server, tcp: '127.0.0.1:6380'}, for: everyone}
---
{kind: Service, provider: acme, name: SHOP, at: {node: server, http: '127.0.0.1:8081'}, for: everyone}
---
{kind: Service, provider: bella, name: SHOP, at: {node: server, http: '127.0.0.1:8082'}, for: everyone}
---
{kind: Service, provider: acme, name: HOST, authority: 'HOST:22', at: {node: server, tcp: '127.0.0.1:2222'}, for: everyone}
";

/// A user's laptop, with programs that have no proxy setting.
struct Laptop<'a> {
    namespace: &'a Namespace,
    fixture: &'a ControllerFixture,
}

impl Laptop<'_> {
    async fn output(&self, program: &[&str]) -> Result<String, String> {
        let mut words = resolving_by(RESOLVER.into(), self.fixture.directory.path()).unwrap();
        words.extend(program.iter().map(|word| (*word).to_owned()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let text = self.namespace.output(&words).await;
        text.map(|text| text.trim().to_owned()).map_err(|error| error.to_string())
    }

    async fn says(&self, program: &[&str]) -> String {
        self.output(program).await.unwrap()
    }
}

async fn body(namespaces: [Namespace; 3]) {
    let fixture = ControllerFixture::at(HUB).await;
    let [alice, bob, server] = &namespaces;
    let redis = |port: &str| {
        let program = Program::new("redis", "redis-server", fixture.directory.path()).within(Some(server));
        program
            .args(["--bind", "127.0.0.1", "--save", "", "--port", port])
            .start()
            .expect("`scripts/setup.sh` installs it")
    };
    let _redis = [redis("6379"), redis("6380")];
    let _sshd = Sshd::start(fixture.directory.path(), "127.0.0.1:2222".parse().unwrap(), Some(server)).unwrap();
    let page = async |port: u16, text: &'static str| {
        let serve = async {
            http::serve(origin::listen((Ipv4Addr::LOCALHOST, port).into()).unwrap(), http::Version::H1, text.into())
        };
        server.run(serve).await.unwrap().unwrap()
    };
    let _pages = [page(8081, "of acme").await, page(8082, "of bella").await];
    fixture.hermes_ok(&["apply", "-f", "-"], DOCUMENTS);
    let node = |name: &str, index| fixture.node_within(index, name, Some(&fixture.token(name)));
    let _nodes = [
        node("ingress", None),
        node("server", Some(server)),
        node("alice-laptop", Some(alice)),
        node("bob-laptop", Some(bob)),
    ];
    let [alice, bob] = [alice, bob].map(|namespace| Laptop { namespace, fixture: &fixture });
    for (laptop, name) in [(&alice, "acme"), (&bob, "bella")] {
        poll::until("the database answers", async || {
            laptop.output(&["redis-cli", "-h", "DB", "PING"]).await.is_ok_and(|printed| printed == "PONG")
        })
        .await;
        assert_eq!(laptop.says(&["redis-cli", "-h", "DB", "SET", "whose", name]).await, "OK");
        assert_eq!(laptop.says(&["curl", "-sS", "--max-time", "20", "http://SHOP/"]).await, format!("of {name}"));
        let hosts = laptop.says(&["getent", "hosts", "SHOP"]).await;
        assert!(hosts.starts_with("100.") || hosts.starts_with("fd00:6865:"), "{hosts}");
    }
    for (laptop, name) in [(&alice, "acme"), (&bob, "bella")] {
        assert_eq!(laptop.says(&["redis-cli", "-h", "db", "GET", "whose"]).await, name);
    }
    let config = fixture.directory.path().join("ssh.conf");
    let ssh = ["ssh", "-F", config.to_str().unwrap(), "root@HOST", "echo", "over", "ssh"];
    assert_eq!(alice.says(&ssh).await, "over ssh");
    // Bob's provider has no service of that name, and the system's servers know none.
    assert!(bob.output(&["getent", "hosts", "HOST"]).await.is_err());

    // A new service resolves as soon as it exists; a deleted one no longer does.
    let later = "{kind: Service, provider: bella, name: HOST, authority: 'HOST:22', at: {node: server, tcp: '127.0.0.1:2222'}, for: everyone}";
    fixture.hermes_ok(&["apply", "-f", "-"], later);
    poll::until("bob has it too", async || bob.output(&ssh).await.is_ok_and(|printed| printed == "over ssh")).await;
    fixture.hermes_ok(&["delete", "Service/bella/HOST"], "");
    poll::until("bob has it no longer", async || bob.output(&["getent", "hosts", "HOST"]).await.is_err()).await;
}

#[test]
fn two_users_reach_services_of_the_same_names_without_a_proxy_setting() {
    let test = "two_users_reach_services_of_the_same_names_without_a_proxy_setting";
    if !needs_root(test) {
        return;
    }
    if !Sshd::is_installed() {
        return hermes_testkit::skip::skip(test, "openssh-server is not installed");
    }
    // A thread of its own, which stays in the hub's namespace.
    let thread = std::thread::spawn(|| {
        let hub = Namespace::new().unwrap();
        hub.ip(&["address", "add", "10.99.0.1/32", "dev", "lo"]).unwrap();
        let namespaces = [1, 2, 3].map(|number| {
            let namespace = Namespace::new().unwrap();
            let near = Ipv4Addr::new(10, 77, number, 1);
            hub.join(near, &namespace, Ipv4Addr::new(10, 77, number, 2)).unwrap();
            namespace.ip(&["route", "add", "10.99.0.1/32", "via", &near.to_string()]).unwrap();
            namespace
        });
        hub.enter().unwrap();
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(body(namespaces));
    });
    thread.join().unwrap();
}
