//! A gateway: packets from a device reach the world with the gateway's address, and replies return to the device.

use std::io::Read as _;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;

use hermes_net::tun::nat::{forwards, masquerade};
use hermes_net::tun::{Device, IdleQueue, Route};
use hermes_testkit::netns::Namespace;
use hermes_testkit::skip::needs_root;

use crate::lab::{IO_TIMEOUT, UPLINK, WORLD, alone, connect, inside, joined, output};

/// The prefixes behind the gateway.
const BEHIND: [&str; 2] = ["10.90.0.0/24", "fd90::/64"];

fn device(name: &str) -> (Device, IdleQueue) {
    let (device, mut queues) = Device::create(name, 1, 65_535).unwrap();
    (device, queues.remove(0))
}

fn tables(namespace: &Namespace) -> String {
    output(namespace, "nft list tables")
}

#[test]
fn users_reach_the_world_with_the_address_of_the_gateway() {
    if !needs_root("users_reach_the_world_with_the_address_of_the_gateway") {
        return;
    }
    let _alone = alone();
    let [user, gateway, world] = [(); 3].map(|()| Namespace::new().unwrap());
    connect(&gateway, &world);
    let (users, queue) = inside(&user, || {
        let (device, queue) = device("ht0");
        for (own, all) in ["10.90.0.7/32", "fd90::7/128"].into_iter().zip(["0.0.0.0/0", "::/0"]) {
            device.add_address(own.parse().unwrap()).unwrap();
            device.capture(all.parse().unwrap(), Route { mtu: Some(1400), source: None }).unwrap();
        }
        (device, queue)
    });
    let (gateways, gateway_queue, captures, _captured, nat) = inside(&gateway, || {
        let (gateways, gateway_queue) = device("gw0");
        for behind in BEHIND {
            gateways.set_route(behind.parse().unwrap(), Route { mtu: Some(1400), source: None }).unwrap();
        }
        // Packets of the gateway's own programs are captured; those from the overlay are not.
        let (captures, captured) = device("ht0");
        for all in ["0.0.0.0/0", "::/0"] {
            captures.capture(all.parse().unwrap(), Route::default()).unwrap();
        }
        assert_eq!(forwards(), (false, false));
        let nat = masquerade(&gateways, &BEHIND.map(|behind| behind.parse().unwrap())).unwrap();
        assert_eq!(forwards(), (true, true));
        (gateways, gateway_queue, captures, captured, nat)
    });
    let (sources, _) = joined(queue, gateway_queue, || WORLD.map(|far| source_seen(&user, &world, far)));
    let expected: [IpAddr; 2] = UPLINK.map(|[own, _]| own.parse().unwrap());
    assert_eq!(sources, expected);
    inside(&gateway, || {
        assert_eq!(tables(&gateway).trim(), "table inet hermes-gw0");
        drop(nat);
        assert_eq!(tables(&gateway), "");
    });
    drop((users, gateways, captures));
}

/// Connects from the user to the world; returns the source address that the world sees.
fn source_seen(user: &Namespace, world: &Namespace, far: &str) -> IpAddr {
    let listener = inside(world, || TcpListener::bind(SocketAddr::new(far.parse().unwrap(), 0)).unwrap());
    let to = listener.local_addr().unwrap();
    let accepting = thread::spawn(move || listener.accept().unwrap().1.ip());
    inside(user, || {
        let mut stream = TcpStream::connect_timeout(&to, IO_TIMEOUT).unwrap();
        stream.set_read_timeout(Some(IO_TIMEOUT)).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    });
    accepting.join().unwrap()
}

#[test]
fn only_tables_of_removed_devices_are_deleted() {
    if !needs_root("only_tables_of_removed_devices_are_deleted") {
        return;
    }
    let _alone = alone();
    let namespace = Namespace::new().unwrap();
    inside(&namespace, || {
        output(
            &namespace,
            "nft add table inet somebody; nft add table inet hermes-else; nft add table inet hermes-gw1",
        );
        let (_living, _queue) = device("gw1");
        // The state after a killed process: its rules remain, and its device is removed with its queues.
        let (gone, queue) = device("gone");
        std::mem::forget(masquerade(&gone, &[BEHIND[0].parse().unwrap()]).unwrap());
        drop((gone, queue));
        let (gateway, _queue) = device("gw0");
        let nat = masquerade(&gateway, &[BEHIND[0].parse().unwrap()]).unwrap();
        let again = masquerade(&gateway, &[BEHIND[0].parse().unwrap()]).unwrap();
        let mut left: Vec<String> = tables(&namespace).lines().map(str::to_owned).collect();
        left.sort();
        let others = ["table inet hermes-else", "table inet hermes-gw1", "table inet somebody"];
        assert_eq!(left, [&others[..1], &["table inet hermes-gw0"], &others[1..]].concat());
        nat.replace(&[BEHIND[1].parse().unwrap()]).unwrap();
        let rules = output(&namespace, "nft list table inet hermes-gw0");
        assert!(rules.contains(BEHIND[1]) && !rules.contains(BEHIND[0]), "{rules}");
        drop((nat, again));
    });
}
