//! A phone that changes networks resumes its subscription, and misses nothing. Its connections go on.
//!
//! In: a relay that a phone reaches by two links, one after the other. Out: all reliable publications in their order, those
//! that were published while the phone had no network included; and a byte stream that arrives whole.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use hermes_testkit::binary::hermes;
use hermes_testkit::netns::Namespace;
use hermes_testkit::origin::{self, stream};
use hermes_testkit::overlay::{Node, Overlay};
use hermes_testkit::relay::{Subscriber, field, publish};
use hermes_testkit::skip::needs_root;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;

/// The relay has one address, whichever link leads to it.
const RELAY: Ipv4Addr = Ipv4Addr::new(10, 88, 9, 1);
/// The ends of the two links: the phone's and the relay's.
const LINKS: [[Ipv4Addr; 2]; 2] = [
    [Ipv4Addr::new(10, 88, 1, 2), Ipv4Addr::new(10, 88, 1, 1)],
    [Ipv4Addr::new(10, 88, 2, 2), Ipv4Addr::new(10, 88, 2, 1)],
];

const DOCUMENT: &str = "
listeners:
- {name: phones, bind: '10.88.9.1:8080', protocol: http}
- {name: web, bind: '127.0.0.1:0', protocol: http}
routes: [{name: all, relay: {mode: reliable, heartbeat: 1s, history: {publications: 1000}}}]
";

/// A phone, and a station with a relay.
struct Network {
    phone: Namespace,
    station: Namespace,
    /// The phone's end of the first link.
    device: String,
    _overlay: Overlay,
    node: Node,
}

impl Network {
    async fn new() -> Self {
        let (phone, station) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        let [first, _] = LINKS.map(|[near, far]| phone.join(near, &station, far).unwrap());
        station.address("lo", RELAY).unwrap();
        let overlay = Overlay::new(hermes()).unwrap();
        let node = overlay.node("relay").document(DOCUMENT).within(&station).start().await.unwrap();
        let network = Self { phone, station, device: first[0].clone(), _overlay: overlay, node };
        network.way(0);
        network
    }

    /// The phone reaches the relay by this link.
    fn way(&self, link: usize) {
        let (destination, via) = (format!("{RELAY}/32"), LINKS[link][1].to_string());
        self.phone.ip(&["route", "replace", &destination, "via", &via]).unwrap();
    }

    /// The first link and its address go, and no packet tells the relay.
    fn cut(&self) {
        self.phone.ip(&["link", "set", &self.device, "down"]).unwrap();
    }
}

#[test]
fn a_connection_goes_on_after_its_phone_changed_networks() {
    if !needs_root("a phone that changes networks") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let network = Network::new().await;
        let (phone, station) = (&network.phone, &network.station);
        let listen = async { origin::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap() };
        let server = station.run(async { stream::echo(listen.await).unwrap() }).await.unwrap();
        let url = format!("http://{RELAY}:8080/echo");
        let connect = |arguments: &[&str]| {
            let mut command = Command::new(hermes());
            command.args(["connect", &url, "--json"]).args(arguments);
            Subscriber::run(&mut command)
        };
        let address = server.address().to_string();
        let mut listener = station.run(async { connect(&["--serve", &address]) }).await.unwrap();
        listener.json().await;
        let mut caller = phone.run(async { connect(&["--bind", "127.0.0.1:0"]) }).await.unwrap();
        let local: SocketAddr = caller.json().await["bind"].as_str().unwrap().parse().unwrap();
        let mut tcp = phone.run(async { TcpStream::connect(local).await.unwrap() }).await.unwrap();
        let (mut input, mut output) = tcp.split();
        // More than all buffers on the way hold, so that bytes of both streams are under way when the link goes.
        let text: Vec<u8> = (0..8 << 20_u32).map(|at| (at * 7 / 1000) as u8).collect();
        let write = async {
            output.write_all(&text[..text.len() / 2]).await.unwrap();
            network.cut();
            let cut = Instant::now();
            tokio::time::sleep(Duration::from_secs(2)).await;
            network.way(1);
            output.write_all(&text[text.len() / 2..]).await.unwrap();
            output.shutdown().await.unwrap();
            cut
        };
        let mut received = Vec::new();
        let both = async { tokio::join!(write, input.read_to_end(&mut received)) };
        let (cut, end) = tokio::time::timeout(Duration::from_secs(120), both).await.expect("an end in time");
        end.unwrap();
        assert!(received == text, "{} of {} bytes", received.len(), text.len());
        assert!(cut.elapsed() < Duration::from_secs(40), "{:?}", cut.elapsed());
    });
}

#[test]
fn a_phone_that_changes_networks_misses_nothing() {
    if !needs_root("a phone that changes networks") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let network = Network::new().await;
        let (phone, station, node) = (&network.phone, &network.station, &network.node);
        let mut subscribing = Command::new(hermes());
        subscribing.args(["subscribe", &format!("http://{RELAY}:8080/news"), "--json", "--header", "host: relay"]);
        let mut subscriber = phone.run(async { Subscriber::run(&mut subscribing) }).await.unwrap();
        station.run(node.metric_is("hermes_relay_subscriptions", "", 1.0)).await.unwrap();
        for number in 0..60 {
            match number {
                // The old address goes, and no packet tells the relay.
                20 => network.cut(),
                40 => network.way(1),
                _ => {}
            }
            let text = number.to_string();
            let published = station.run(publish(node, "/news", &text, &["--header", "host: relay"])).await.unwrap();
            let (status, head, _) = published;
            assert_eq!(status, 204, "{number}: {head}");
            assert!(field(&head, "hermes-event-id").is_some(), "{head}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for number in 0..60 {
            let line = subscriber.json().await;
            assert_eq!(line["data"], number.to_string(), "{line}");
        }
    });
}
