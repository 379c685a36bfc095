//! Loads against real origins: right answers count, wrong ones and missing ones are failures.
#![allow(clippy::unwrap_used)]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, UdpSocket},
    path::Path,
    sync::mpsc,
    thread,
};

use bytes::Bytes;
use hermes_testkit::{
    ca::{Authority, Subject},
    load::{self, Exchange, Load, Outcome, Task, exchange::payload},
    origin::{Origin, http, listen, stream},
    tls,
};

const LENGTH: usize = 200;
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

struct Origins {
    h1: SocketAddr,
    h2: SocketAddr,
    secure: SocketAddr,
    tcp: SocketAddr,
    udp: SocketAddr,
}

/// Origins on a thread of their own that lives as long as the test process.
fn origins(dir: &Path) -> Origins {
    let ca = Authority::new("lab").unwrap();
    std::fs::write(dir.join("ca.pem"), ca.pem()).unwrap();
    let identity = ca.issue(&Subject::server("secure")).unwrap();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let body = Bytes::from(payload(LENGTH));
            let config = tls::server(&identity, None, &["h2", "http/1.1"]).unwrap();
            let servers: Vec<Origin> = vec![
                http::serve(listen(ANY).unwrap(), http::Version::H1, body.clone()).unwrap(),
                http::serve(listen(ANY).unwrap(), http::Version::H2, body.clone()).unwrap(),
                http::serve_tls(listen(ANY).unwrap(), config, body).unwrap(),
                stream::echo(listen(ANY).unwrap()).unwrap(),
                Origin::udp_echo(ANY).unwrap(),
            ];
            let addresses: Vec<_> = servers.iter().map(Origin::address).collect();
            sender.send(addresses).unwrap();
            std::future::pending::<()>().await;
        });
    });
    let [h1, h2, secure, tcp, udp] = receiver.recv().unwrap().try_into().unwrap();
    Origins { h1, h2, secure, tcp, udp }
}

fn run(load: Load) -> Outcome {
    load::run(&Task { load, watch: vec![std::process::id()] }).unwrap()
}

fn exchanges(origins: &Origins, dir: &Path) -> [Exchange; 4] {
    [
        Exchange::Http { address: origins.h1, authority: "WEB".into(), length: LENGTH },
        Exchange::Tls {
            address: origins.secure,
            connect: None,
            server_name: "secure".into(),
            ca: dir.join("ca.pem"),
            length: LENGTH,
        },
        Exchange::Tcp { address: origins.tcp, length: LENGTH },
        Exchange::Udp { address: origins.udp, length: LENGTH },
    ]
}

#[test]
fn every_exchange_succeeds_alone_and_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let origins = origins(dir.path());
    for exchange in exchanges(&origins, dir.path()) {
        let single = run(Load::Single { exchange: exchange.clone(), count: 20, warmup: 2 });
        assert_eq!((single.completed, single.failed), (20, 0), "{exchange:?} {:?}", single.failures);
        assert!(single.latency.unwrap().mean_us > 0.0);
        let burst = run(Load::Burst { exchange: exchange.clone(), clients: 100 });
        assert_eq!((burst.completed, burst.failed), (100, 0), "{exchange:?} {:?}", burst.failures);
        let (common, own) = (burst.latency.unwrap(), burst.own_latency.unwrap());
        assert!(common.mean_us >= own.mean_us, "a client begins at the instant or after it");
    }
}

#[test]
fn lasting_connections_carry_many_requests() {
    let dir = tempfile::tempdir().unwrap();
    let origins = origins(dir.path());
    let authority = String::from("WEB");
    let h1 = run(Load::KeepAlive {
        address: origins.h1,
        authority: authority.clone(),
        length: LENGTH,
        connections: 4,
        warmup: 50,
        window: 200,
    });
    let h2 = run(Load::Multiplexed {
        address: origins.h2,
        authority,
        length: LENGTH,
        connections: 2,
        streams: 8,
        warmup: 50,
        window: 200,
    });
    for outcome in [h1, h2] {
        assert_eq!(outcome.failed, 0, "{:?}", outcome.failures);
        assert!(outcome.completed > 100, "{outcome:?}");
        assert!(outcome.load_cpu > 0.0 && outcome.seconds > 0.1);
    }
}

#[test]
fn wrong_responses_and_refused_connections_are_counted_by_kind() {
    let dir = tempfile::tempdir().unwrap();
    let origins = origins(dir.path());
    // The origin's payload has another length than the client expects.
    let exchange = Exchange::Http { address: origins.h1, authority: "WEB".into(), length: LENGTH + 1 };
    let outcome = run(Load::Burst { exchange, clients: 5 });
    assert_eq!((outcome.completed, outcome.failures["wrong bytes"]), (0, 5));
    let closed = TcpListener::bind(ANY).unwrap().local_addr().unwrap();
    let outcome = run(Load::Single { exchange: Exchange::Tcp { address: closed, length: 5 }, count: 3, warmup: 0 });
    assert_eq!((outcome.completed, outcome.failed), (0, 3));
    assert!(outcome.failures.contains_key("connect: connection refused"), "{:?}", outcome.failures);
    // A certificate for another name.
    let exchange = Exchange::Tls {
        address: origins.secure,
        connect: None,
        server_name: "other".into(),
        ca: dir.path().join("ca.pem"),
        length: LENGTH,
    };
    let outcome = run(Load::Burst { exchange, clients: 2 });
    assert_eq!((outcome.completed, outcome.failed), (0, 2));
}

#[test]
fn bulk_bytes_are_checked_at_the_sink() {
    let sink = free();
    let load = |address| Load::Bulk { address, sink, sink_in: None, connections: 2, warmup: 20, window: 100 };
    let outcome = run(load(sink));
    assert_eq!((outcome.completed, outcome.failed), (2, 0), "{:?}", outcome.failures);
    assert!(outcome.bytes > 1 << 20);
    let spoiler = spoil_tcp(sink);
    let outcome = run(load(spoiler));
    assert!(outcome.failures.contains_key("wrong bytes"), "{:?}", outcome.failures);
}

#[test]
fn lost_datagrams_are_counted_to_the_last() {
    let sink = free();
    let load = |address| Load::Datagrams {
        address,
        sink,
        sink_in: None,
        length: 1200,
        flows: 2,
        in_flight: 16,
        warmup: 20,
        window: 1000,
    };
    let outcome = run(load(sink));
    assert_eq!(outcome.failed, 0, "{:?}", outcome.failures);
    assert!(outcome.completed > 100, "{outcome:?}");
    let outcome = run(load(lossy_udp(sink)));
    assert!(outcome.failures.get("lost").is_some_and(|lost| *lost > 0), "{outcome:?}");
    assert!(!outcome.failures.contains_key("wrong bytes"), "{outcome:?}");
}

fn free() -> SocketAddr {
    TcpListener::bind(ANY).unwrap().local_addr().unwrap()
}

/// A relay that turns over one bit far into the stream.
fn spoil_tcp(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind(ANY).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut server = std::net::TcpStream::connect(to).unwrap();
                let mut buffer = vec![0; 1000];
                for turn in 0.. {
                    let Ok(length @ 1..) = client.read(&mut buffer) else {
                        return;
                    };
                    // The 101st piece lies well inside a chunk that is compared whole.
                    buffer[0] ^= u8::from(turn == 100);
                    if server.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A relay that drops every 50th datagram.
fn lossy_udp(to: SocketAddr) -> SocketAddr {
    let socket = UdpSocket::bind(ANY).unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        for turn in 1u64.. {
            let Ok((length, _)) = socket.recv_from(&mut buffer) else {
                return;
            };
            if !turn.is_multiple_of(50) {
                socket.send_to(&buffer[..length], to).unwrap();
            }
        }
    });
    address
}
