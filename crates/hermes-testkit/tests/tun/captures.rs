//! Tests of captures: they take the packets of all programs except Hermes, and always end with their device.

use std::future::poll_fn;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::thread;

use hermes_net::tun::{Device, IdleQueue, ReceiveBuffer, Route, TunError};
use hermes_net::{dial, tcp, udp};
use hermes_testkit::netns::Namespace;
use hermes_testkit::skip::needs_root;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::{Builder, Runtime};

use crate::lab::{IO_TIMEOUT, UPLINK, WORLD, alone, connect, inside, rules};

const ALL: [&str; 2] = ["0.0.0.0/0", "::/0"];

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A device with an address of each family.
fn device(name: &str) -> (Device, IdleQueue) {
    let (device, mut queues) = Device::create(name, 1, 65_535).unwrap();
    device.add_address("10.90.0.7/32".parse().unwrap()).unwrap();
    device.add_address("fd90::7/128".parse().unwrap()).unwrap();
    (device, queues.remove(0))
}

/// Echoes every connection to `address`, on a thread of the world that ends with the listener's last connection.
fn echo(listener: TcpListener, connections: usize) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let each = (0..connections).map(|_| {
            let (mut stream, _) = listener.accept().unwrap();
            thread::spawn(move || {
                let mut room = [0; 64];
                while let Ok(length @ 1..) = stream.read(&mut room) {
                    stream.write_all(&room[..length]).unwrap();
                }
            })
        });
        each.collect::<Vec<_>>().into_iter().for_each(|each| each.join().unwrap());
    })
}

async fn is_echoed(stream: &mut tokio::net::TcpStream) {
    let mut room = [0; 4];
    tokio::time::timeout(IO_TIMEOUT, async {
        stream.write_all(b"ping").await.unwrap();
        stream.read_exact(&mut room).await.unwrap();
    })
    .await
    .unwrap();
    assert_eq!(&room, b"ping");
}

/// Sends an unmarked datagram, and waits until the device has received it.
async fn is_captured(queue: &hermes_net::tun::Queue, to: SocketAddr) {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    UdpSocket::bind(any).unwrap().send_to(b"stray", to).unwrap();
    let mut buffer = ReceiveBuffer::default();
    let mut seen = false;
    while !seen {
        let mut each = |packet: bytes::Bytes| {
            let source = if to.is_ipv4() { packet[12..16] == [10, 90, 0, 7] } else { packet[8..10] == [0xfd, 0x90] };
            seen |= packet.ends_with(b"stray") && source;
        };
        let receiving = poll_fn(|cx| queue.poll_receive(cx, &mut buffer, &mut each));
        tokio::time::timeout(IO_TIMEOUT, receiving).await.unwrap().unwrap();
    }
}

#[test]
fn a_capture_of_everything_leaves_our_own_sockets_and_the_local_network_alone() {
    if !needs_root("a_capture_of_everything_leaves_our_own_sockets_and_the_local_network_alone") {
        return;
    }
    let _alone = alone();
    for (family, all) in ALL.into_iter().enumerate() {
        let (here, world) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        connect(&here, &world);
        let far = SocketAddr::new(ip(WORLD[family]), 0);
        let listener = inside(&world, || TcpListener::bind(far).unwrap());
        let far = listener.local_addr().unwrap();
        let serving = echo(listener, 2);
        inside(&here, || {
            runtime().block_on(async {
                let mut live = dial::connect(&vec![far.ip()].into(), far.port()).await.unwrap();
                is_echoed(&mut live).await;
                let (device, queue) = device("ht0");
                let queue = queue.start().unwrap();
                let default_route = Route { mtu: Some(1400), source: None };
                device.capture(all.parse().unwrap(), default_route).unwrap();
                is_captured(&queue, far).await;
                is_echoed(&mut live).await;
                is_echoed(&mut dial::connect(&vec![far.ip()].into(), far.port()).await.unwrap()).await;
                locals_are_reached(family, &world);
                listeners_are_reached(family, &world).await;
                // A capture of the network has the same prefix length as the network's own route, and wins.
                let network = if family == 0 { "10.80.0.0/24" } else { "fd80::/64" };
                device.capture(network.parse().unwrap(), default_route).unwrap();
                is_captured(&queue, SocketAddr::new(ip(UPLINK[family][1]), 9)).await;
                is_echoed(&mut live).await;
                assert_eq!(rules(&here).len(), 4);
                device.release(network.parse().unwrap()).unwrap();
                assert_eq!(rules(&here).len(), 2);
                locals_are_reached(family, &world);
                drop((device, queue));
                assert_eq!(rules(&here), [""; 0]);
            });
        });
        serving.join().unwrap();
    }
}

/// Checks unmarked sockets: they still reach the neighbour on the link, and this host.
fn locals_are_reached(family: usize, world: &Namespace) {
    let neighbour = SocketAddr::new(ip(UPLINK[family][1]), 0);
    let there = inside(world, || TcpListener::bind(neighbour).unwrap());
    TcpStream::connect_timeout(&there.local_addr().unwrap(), IO_TIMEOUT).unwrap();
    let loopback = if family == 0 { "127.0.0.1:0" } else { "[::1]:0" };
    let ours = TcpListener::bind(loopback).unwrap();
    TcpStream::connect_timeout(&ours.local_addr().unwrap(), IO_TIMEOUT).unwrap();
}

/// Checks connections from a host in the world whose address is captured.
async fn listeners_are_reached(family: usize, world: &Namespace) {
    let own = SocketAddr::new(ip(UPLINK[family][0]), 0);
    let listener = tokio::net::TcpListener::from_std(tcp::listen(own).unwrap()).unwrap();
    let datagrams = udp::UdpSocket::from_std(udp::listen(own).unwrap()).unwrap();
    let (to, datagrams_to) = (listener.local_addr().unwrap(), datagrams.local_addr().unwrap());
    let asking = inside(world, || {
        let from = SocketAddr::new(ip(WORLD[family]), 0);
        let socket = socket2::Socket::new(socket2::Domain::for_address(from), socket2::Type::STREAM, None).unwrap();
        socket.bind(&from.into()).unwrap();
        let datagram = UdpSocket::bind(from).unwrap();
        thread::spawn(move || {
            socket.connect_timeout(&to.into(), IO_TIMEOUT).unwrap();
            let mut stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(IO_TIMEOUT)).unwrap();
            stream.read_exact(&mut [0; 5]).unwrap();
            datagram.send_to(b"ask", datagrams_to).unwrap();
            datagram.set_read_timeout(Some(IO_TIMEOUT)).unwrap();
            assert_eq!(datagram.recv(&mut [0; 9]).unwrap(), 6);
        })
    });
    let (mut accepted, _) = tokio::time::timeout(IO_TIMEOUT, listener.accept()).await.unwrap().unwrap();
    accepted.write_all(b"hello").await.unwrap();
    let (mut buffer, mut source) = (udp::ReceiveBuffer::default(), None);
    poll_fn(|cx| datagrams.poll_receive(cx, &mut buffer, |from, _| source = Some(from))).await.unwrap();
    datagrams.try_send(source.unwrap(), b"answer", 6).unwrap();
    asking.join().unwrap();
}

#[test]
fn the_longest_prefix_wins_among_captures_and_routes() {
    if !needs_root("the_longest_prefix_wins_among_captures_and_routes") {
        return;
    }
    let _alone = alone();
    let namespace = Namespace::new().unwrap();
    namespace.ip(&["link", "add", "lan", "type", "veth", "peer", "name", "switch"]).unwrap();
    for end in ["lan", "switch"] {
        namespace.ip(&["link", "set", end, "up"]).unwrap();
    }
    for route in ["10.1.0.0/16", "10.1.2.0/28", "fd01::/32", "fd01::2:0:0:0/120"] {
        namespace.ip(&["route", "add", route, "dev", "lan"]).unwrap();
    }
    inside(&namespace, || {
        let (one, _queue) = device("ht0");
        let (other, _other_queue) = device("ht1");
        for (device, prefix) in
            [(&one, "10.0.0.0/8"), (&other, "10.1.2.0/24"), (&one, "fd00::/8"), (&other, "fd01::2:0:0:0/80")]
        {
            device.capture(prefix.parse().unwrap(), Route::default()).unwrap();
        }
        let leads = [
            ("10.2.0.1", "ht0"),
            ("10.1.3.1", "lan"),
            ("10.1.2.200", "ht1"),
            ("10.1.2.3", "lan"),
            ("fd02::1", "ht0"),
            ("fd01::1", "lan"),
            ("fd01::2:0:0:100", "ht1"),
            ("fd01::2:0:0:1", "lan"),
        ];
        for (to, by) in leads {
            let route = crate::lab::output(&namespace, &format!("ip route get {to}"));
            assert!(route.contains(&format!("dev {by} ")), "{to} not by {by}: {route}");
        }
        let marked =
            crate::lab::output(&namespace, &format!("ip route get 10.1.2.200 mark {}", hermes_net::socket_mark::MARK));
        assert!(marked.contains("dev lan "), "{marked}");
    });
    assert_eq!(rules(&namespace), [""; 0]);
}

/// The next test runs this one in a separate process, and kills it.
#[test]
#[ignore = "a part of the next test"]
fn captures_until_killed() {
    if std::env::var_os("HERMES_CAPTURES").is_none() {
        return;
    }
    let (device, _queue) = device("ht1");
    for all in ALL {
        device.capture(all.parse().unwrap(), Route::default()).unwrap();
    }
    device.exempt().unwrap();
    println!("\ncaptures");
    let _ = std::io::stdin().read(&mut [0]);
}

fn start_capturing(namespace: &Namespace) -> Child {
    let mut child = Command::new("ip")
        .args(["netns", "exec", namespace.name()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "captures::captures_until_killed", "--ignored", "--nocapture"])
        .env("HERMES_CAPTURES", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "captures"));
    child
}

#[test]
fn the_rules_of_a_killed_process_are_removed_and_no_others() {
    if !needs_root("the_rules_of_a_killed_process_are_removed_and_no_others") {
        return;
    }
    let _alone = alone();
    let namespace = Namespace::new().unwrap();
    inside(&namespace, || {
        let (one, _queue) = device("ht0");
        one.capture("10.0.0.0/8".parse().unwrap(), Route::default()).unwrap();
        let ours = rules(&namespace);
        assert_eq!(ours.len(), 2);
        // `ip netns exec` executes the program, so this is its process.
        let mut other = start_capturing(&namespace);
        assert_eq!(rules(&namespace).len(), 2 + 4 + 2);
        other.kill().unwrap();
        other.wait().unwrap();
        while nix::net::if_::if_nametoindex("ht1").is_ok() {
            thread::yield_now();
        }
        assert_eq!(rules(&namespace).len(), 2 + 4 + 2, "and its rules are not");
        let (third, _queue) = device("ht2");
        assert_eq!(rules(&namespace), ours);
        drop(third);
        assert_eq!(rules(&namespace), ours);
    });
}

#[test]
fn a_capture_that_would_cut_us_off_is_refused() {
    if !needs_root("a_capture_that_would_cut_us_off_is_refused") {
        return;
    }
    let _alone = alone();
    let (here, world) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    connect(&here, &world);
    here.sysctl("net/ipv4/conf/uplink/rp_filter", "1").unwrap();
    inside(&here, || {
        let (device, _queue) = device("ht0");
        let all = "0.0.0.0/0".parse().unwrap();
        let refused = device.capture(all, Route::default()).unwrap_err();
        assert!(matches!(&refused, TunError::ReversePath { interface, .. } if interface == "uplink"), "{refused}");
        assert_eq!(rules(&here), [""; 0]);
        here.sysctl("net/ipv4/conf/uplink/rp_filter", "2").unwrap();
        device.capture(all, Route::default()).unwrap();
    });
}

/// A late session changes the MTU after its listener has released the capture.
#[test]
fn released_prefixes_are_not_captured_again_by_a_change() {
    if !needs_root("released_prefixes_are_not_captured_again_by_a_change") {
        return;
    }
    let _alone = alone();
    let namespace = Namespace::new().unwrap();
    inside(&namespace, || {
        let (device, _queue) = device("ht0");
        let prefix = "10.5.0.0/16".parse().unwrap();
        let routes = || crate::lab::output(&namespace, "ip route show table all 10.5.0.0/16");
        device.capture(prefix, Route::default()).unwrap();
        device.change_capture(prefix, Route { mtu: Some(1400), source: None }).unwrap();
        assert!(routes().contains("mtu 1400"), "{}", routes());
        device.release(prefix).unwrap();
        device.change_capture(prefix, Route { mtu: Some(1300), source: None }).unwrap();
        assert_eq!((routes().trim(), rules(&namespace).len()), ("", 0));
    });
}
