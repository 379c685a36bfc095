//! Tests of TUN devices in namespaces: the kernel's own TCP and UDP, through two connected devices.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use hermes_net::tun::{Device, IdleQueue, QueueResult, Route, TunError};
use hermes_testkit::netns::Namespace;
use hermes_testkit::skip::needs_root;
use nix::sys::socket::{setsockopt, sockopt};

use crate::lab::{DirectionCounters, IO_TIMEOUT, alone, inside, is_local, joined};

const MTU: usize = 1400;
/// The addresses of both ends.
const ENDS: [[&str; 2]; 2] = [["10.50.0.1", "fd50::1"], ["10.51.0.1", "fd51::1"]];

/// Two namespaces. Each family has its own: a closed device may still exist while a program that another test starts
/// has its descriptor.
fn two_namespaces() -> [Namespace; 2] {
    [Namespace::new().unwrap(), Namespace::new().unwrap()]
}

/// A device with the addresses of one end, and routes to those of the other.
fn device(namespace: &Namespace, end: usize) -> (Device, IdleQueue) {
    inside(namespace, || {
        let (device, mut queues) = Device::create("ht0", 1, 65_535).unwrap();
        let whole = |address: &str| address.parse::<IpAddr>().unwrap().into();
        for (own, other) in ENDS[end].iter().zip(ENDS[1 - end]) {
            device.add_address(whole(own)).unwrap();
            let route = Route { mtu: Some(MTU as u32), source: Some(own.parse().unwrap()) };
            device.set_route(whole(other), route).unwrap();
            is_local(namespace, own);
        }
        (device, queues.remove(0))
    })
}

/// Sends bytes from one namespace to the other over TCP; returns the digest of the received bytes, and the duration.
fn transfer(from: &Namespace, to: &Namespace, address: &str, bytes: usize) -> ((usize, u64), Duration) {
    let address = SocketAddr::new(address.parse().unwrap(), 0);
    let listener = inside(to, || TcpListener::bind(address).unwrap());
    let address = listener.local_addr().unwrap();
    let started = Instant::now();
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(IO_TIMEOUT)).unwrap();
            let (mut total, mut sum, mut room) = (0, 0, vec![0; 1 << 18]);
            loop {
                let length = stream.read(&mut room).unwrap();
                if length == 0 {
                    return ((total, sum), started.elapsed());
                }
                sum = summed(sum, total, &room[..length]);
                total += length;
            }
        });
        inside(from, || {
            let mut stream = TcpStream::connect_timeout(&address, IO_TIMEOUT).unwrap();
            stream.set_write_timeout(Some(IO_TIMEOUT)).unwrap();
            pattern(bytes).chunks(1 << 17).for_each(|chunk| stream.write_all(chunk).unwrap());
        });
        reading.join().unwrap()
    })
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|byte| (byte.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// A digest that depends on the bytes and their positions.
fn summed(sum: u64, at: usize, bytes: &[u8]) -> u64 {
    let each = |(index, byte): (usize, &u8)| u64::from(*byte).wrapping_mul((at + index) as u64 | 1);
    bytes.iter().enumerate().map(each).fold(sum, u64::wrapping_add)
}

#[test]
fn bulk_tcp_goes_through_two_devices_in_super_packets() {
    if !needs_root("bulk_tcp_goes_through_two_devices_in_super_packets") {
        return;
    }
    let _alone = alone();
    let bytes = 64 << 20;
    let expected = summed(0, 0, &pattern(bytes));
    for address in ENDS[1] {
        let [here, there] = two_namespaces();
        let ((_one, queue), (_other, other)) = (device(&here, 0), device(&there, 1));
        let ((arrived, took), counters) = joined(queue, other, || transfer(&here, &there, address, bytes));
        assert_eq!(arrived, (bytes, expected), "{address}");
        let (received, sent) = (counters.received.get(), counters.sent.get());
        println!("{address}: {:.1} Gbit/s, {counters:?}", bytes as f64 * 8e-9 / took.as_secs_f64());
        assert_eq!((received.refused, sent.refused), (0, 0));
        assert_eq!(received.packets, sent.packets);
        assert!(counters.longest.get() <= MTU, "packets of {} bytes", counters.longest.get());
        assert!(received.packets >= bytes / MTU);
        // A GSO packet has up to 48 segments.
        assert!(received.packets > 10 * received.calls, "the packets of the kernel are not split: {received:?}");
        assert!(sent.packets > 10 * sent.calls, "the kernel gets them one by one: {sent:?}");
    }
}

/// Sends from one end to the other with `send` and `receive`, in each family.
fn datagrams(send: impl Fn(&UdpSocket, SocketAddr), receive: impl Fn(&UdpSocket), check: impl Fn(DirectionCounters)) {
    for (own, other) in ENDS[0].into_iter().zip(ENDS[1]) {
        let [here, there] = two_namespaces();
        let ((_one, queue), (_other, other_queue)) = (device(&here, 0), device(&there, 1));
        let bind = |address: &str| UdpSocket::bind(SocketAddr::new(address.parse().unwrap(), 0)).unwrap();
        let (sender, receiver) = (inside(&here, || bind(own)), inside(&there, || bind(other)));
        receiver.set_read_timeout(Some(IO_TIMEOUT)).unwrap();
        let ((), counters) = joined(queue, other_queue, || {
            send(&sender, receiver.local_addr().unwrap());
            receive(&receiver);
        });
        check(counters);
    }
}

#[test]
fn a_run_of_datagrams_is_one_super_packet() {
    if !needs_root("a_run_of_datagrams_is_one_super_packet") {
        return;
    }
    let _alone = alone();
    let contents = pattern(12_000);
    let send = |socket: &UdpSocket, to| {
        setsockopt(socket, sockopt::UdpGsoSegment, &1200).unwrap();
        socket.send_to(&contents, to).unwrap();
    };
    let receive = |socket: &UdpSocket| {
        for segment in contents.chunks(1200) {
            let mut room = [0; 2000];
            assert_eq!(socket.recv(&mut room).unwrap(), 1200);
            assert_eq!(&room[..1200], segment);
        }
    };
    let one_call = QueueResult { packets: 10, refused: 0, calls: 1 };
    datagrams(send, receive, |counters| {
        assert_eq!((counters.received.get(), counters.sent.get()), (one_call, one_call))
    });
}

#[test]
fn a_long_datagram_is_fragments_of_the_size_of_the_route() {
    if !needs_root("a_long_datagram_is_fragments_of_the_size_of_the_route") {
        return;
    }
    let _alone = alone();
    let contents = pattern(60_000);
    let send = |socket: &UdpSocket, to| assert_eq!(socket.send_to(&contents, to).unwrap(), contents.len());
    let receive = |socket: &UdpSocket| {
        let mut room = vec![0; 1 << 16];
        assert_eq!(socket.recv(&mut room).unwrap(), contents.len());
        assert_eq!(&room[..contents.len()], contents);
    };
    datagrams(send, receive, |counters| {
        assert!(counters.longest.get() <= MTU && counters.sent.get().packets >= contents.len() / MTU, "{counters:?}");
    });
}

#[test]
fn a_device_ends_with_its_queues_and_a_name_is_had_once() {
    if !needs_root("a_device_ends_with_its_queues_and_a_name_is_had_once") {
        return;
    }
    let _alone = alone();
    let namespace = Namespace::new().unwrap();
    inside(&namespace, || {
        let (_device, queues) = Device::create("ht0", 3, 65_535).unwrap();
        assert_eq!(queues.len(), 3);
        for count in [1, 3] {
            assert!(matches!(Device::create("ht0", count, 1500), Err(TunError::NameTaken { .. })));
        }
        assert!(matches!(Device::create("lo", 1, 1500), Err(TunError::NameTaken { .. })));
        drop(queues);
        // Another test's thread may be starting a program, which briefly has our descriptors, too.
        let mut again = Device::create("ht0", 1, 1500);
        while matches!(again, Err(TunError::NameTaken { .. })) {
            thread::yield_now();
            again = Device::create("ht0", 1, 1500);
        }
        again.unwrap();
    });
}

#[test]
fn a_route_of_somebody_else_is_left_alone() {
    if !needs_root("a_route_of_somebody_else_is_left_alone") {
        return;
    }
    let _alone = alone();
    let namespace = Namespace::new().unwrap();
    let (device, _queue) = device(&namespace, 0);
    for prefix in ["10.60.0.0/16", "fd60::/32", "0.0.0.0/0", "::/0"] {
        namespace.ip(&["route", "add", prefix, "dev", "lo"]).unwrap();
        inside(&namespace, || {
            let prefix = prefix.parse().unwrap();
            let taken = device.set_route(prefix, Route::default()).unwrap_err();
            assert!(matches!(&taken, TunError::Route { .. }) && taken.remedy().contains("ip route"), "{taken}");
            device.remove_route(prefix).unwrap();
        });
        namespace.ip(&["route", "del", prefix, "dev", "lo"]).unwrap();
        inside(&namespace, || {
            let prefix = prefix.parse().unwrap();
            for mtu in [Some(1300), Some(1200), None] {
                device.set_route(prefix, Route { mtu, source: None }).unwrap();
            }
            device.remove_route(prefix).unwrap();
            device.remove_route(prefix).unwrap();
        });
    }
}
