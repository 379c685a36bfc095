//! Changes of links, addresses and the default route are told as they happen.

use hermes_net::host::watch::{HostChange, HostWatch};
use hermes_testkit::netns::Namespace;
use hermes_testkit::skip::needs_root;

use crate::lab::{IO_TIMEOUT, alone, connect, inside};

async fn comes(watch: &mut HostWatch, wanted: HostChange) {
    let seen = async { while watch.next().await.unwrap() != wanted {} };
    tokio::time::timeout(IO_TIMEOUT, seen).await.unwrap_or_else(|_| panic!("{wanted:?} does not come"));
}

#[test]
fn changes_of_links_addresses_and_default_routes_are_reported() {
    if !needs_root("changes_of_links_addresses_and_default_routes_are_reported") {
        return;
    }
    let _alone = alone();
    let (here, world) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    connect(&here, &world);
    inside(&here, || {
        let interface = nix::net::if_::if_nametoindex("uplink").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut watch = HostWatch::new().unwrap();
            let route = HostChange::DefaultRoute { interface: Some(interface) };
            for (address, family, gateway) in [("10.80.0.3/24", "-4", "10.80.0.2"), ("fd80::3/64", "-6", "fd80::2")] {
                for what in ["add", "del"] {
                    here.ip(&["addr", what, address, "dev", "uplink"]).unwrap();
                    comes(&mut watch, HostChange::Address { interface }).await;
                }
                for what in ["del", "add"] {
                    here.ip(&[family, "route", what, "default", "via", gateway]).unwrap();
                    comes(&mut watch, route).await;
                }
                // Other routes than the default are not reported.
                let other = if family == "-4" { "10.81.0.0/24" } else { "fd81::/64" };
                here.ip(&[family, "route", "add", other, "dev", "uplink"]).unwrap();
                assert!(tokio::time::timeout(std::time::Duration::ZERO, watch.next()).await.is_err(), "{family}");
            }
            here.ip(&["link", "add", "one", "type", "veth", "peer", "name", "other"]).unwrap();
            let interface = nix::net::if_::if_nametoindex("one").unwrap();
            for (what, is_up) in [("up", true), ("down", false)] {
                here.ip(&["link", "set", "one", what]).unwrap();
                comes(&mut watch, HostChange::Link { interface, is_up }).await;
            }
            here.ip(&["link", "del", "one"]).unwrap();
            comes(&mut watch, HostChange::Link { interface, is_up: false }).await;
        });
    });
}
