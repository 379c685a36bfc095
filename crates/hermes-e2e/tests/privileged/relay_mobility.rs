//! A phone that changes networks resumes its subscription, and misses nothing.
//!
//! In: a relay that a phone reaches by two links, one after the other. Out: all reliable publications in their order, those
//! that were published while the phone had no network included.

use std::net::Ipv4Addr;
use std::time::Duration;

use hermes_testkit::binary::hermes;
use hermes_testkit::netns::Namespace;
use hermes_testkit::overlay::Overlay;
use hermes_testkit::relay::{Subscriber, field, publish};
use hermes_testkit::skip::needs_root;
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

#[test]
fn a_phone_that_changes_networks_misses_nothing() {
    if !needs_root("a phone that changes networks") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (phone, station) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        let devices = LINKS.map(|[near, far]| phone.join(near, &station, far).unwrap());
        station.address("lo", RELAY).unwrap();
        let way = |link: usize| {
            let (destination, via) = (format!("{RELAY}/32"), LINKS[link][1].to_string());
            phone.ip(&["route", "replace", &destination, "via", &via]).unwrap();
        };
        way(0);
        let overlay = Overlay::new(hermes()).unwrap();
        let node = overlay.node("relay").document(DOCUMENT).within(&station).start().await.unwrap();
        let mut subscribing = Command::new(hermes());
        subscribing.args(["subscribe", &format!("http://{RELAY}:8080/news"), "--json", "--header", "host: relay"]);
        let mut subscriber = phone.run(async { Subscriber::run(&mut subscribing) }).await.unwrap();
        station.run(node.metric_is("hermes_relay_subscriptions", "", 1.0)).await.unwrap();
        for number in 0..60 {
            match number {
                // The old address goes, and no packet tells the relay.
                20 => phone.ip(&["link", "set", &devices[0][0], "down"]).unwrap(),
                40 => way(1),
                _ => {}
            }
            let text = number.to_string();
            let published = station.run(publish(&node, "/news", &text, &["--header", "host: relay"])).await.unwrap();
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
