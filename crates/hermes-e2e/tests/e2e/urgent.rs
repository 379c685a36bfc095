//! Urgent data of TCP (RFC 6093): it stays urgent between two TCP connections of one node, and is an ordinary byte of a
//! tunnel.
//!
//! In: streams with an urgent byte in the middle or at the end, short and long. Out: all bytes in order, and the metric.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _};

use hermes_testkit::binary::hermes;
use hermes_testkit::overlay::{EFFECT_TIMEOUT, Overlay};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::task::spawn_blocking;

const ONE_BOX: &str = "
listeners: [{name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:1'}]
routes: [{name: db, match: {kind: tcp}, terminate: {tcp: '$ORIGIN'}}]
";
const NEAR: &str = "
listeners: [{name: db, bind: '127.0.0.1:0', protocol: tcp, authority: 'DB:1'}]
routes: [{name: db, match: {kind: tcp}, upstream: far}]
upstreams: [{name: far, protocol: $HTTP, endpoints: ['$FAR'], overlay: true}]
";
const FAR: &str = "
listeners: [{name: overlay, bind: '127.0.0.1:0', protocol: http, trust: 127.0.0.0/8}]
routes: [{name: db, match: {kind: tcp}, terminate: {tcp: '$ORIGIN'}}]
";
/// Bytes before and after the urgent one. The long ones are moved by the kernel.
const CASES: [(usize, usize); 5] = [(0, 5), (6, 5), (6, 0), (4 << 20, 1 << 20), (4 << 20, 0)];
const URGENT: u8 = b'!';

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251 * 31 % 251) as u8).collect()
}

/// Sends the bytes of a case. The connection stays open afterwards, or `ends`.
fn send(mut client: &TcpStream, (before, after): (usize, usize), ends: bool) {
    client.write_all(&pattern(before)).unwrap();
    SockRef::from(client).send_out_of_band(&[URGENT]).unwrap();
    client.write_all(&pattern(after)).unwrap();
    if ends {
        client.shutdown(Shutdown::Write).unwrap();
    }
}

/// Receives a byte that the sender marked as urgent.
fn receive_urgent(server: &TcpStream) -> u8 {
    let mut waiting = [PollFd::new(server.as_fd(), PollFlags::POLLPRI)];
    assert_eq!(poll(&mut waiting, PollTimeout::try_from(EFFECT_TIMEOUT).unwrap()), Ok(1), "no urgent data");
    let mut byte = [0];
    assert_eq!(recv(server.as_raw_fd(), &mut byte, MsgFlags::MSG_OOB), Ok(1));
    byte[0]
}

fn read(mut server: &TcpStream, length: usize) -> Vec<u8> {
    server.set_read_timeout(Some(EFFECT_TIMEOUT)).unwrap();
    let mut bytes = vec![0; length];
    server.read_exact(&mut bytes).unwrap();
    bytes
}

/// Connects and sends while the other end is read, which `receive` does.
async fn exchange(to: SocketAddr, origin: &TcpListener, case: (usize, usize), receive: fn(&TcpStream, (usize, usize))) {
    for ends in [false, true] {
        let origin = origin.try_clone().unwrap();
        let sending = spawn_blocking(move || {
            let client = TcpStream::connect(to).unwrap();
            send(&client, case, ends);
            client
        });
        let receiving = spawn_blocking(move || {
            let mut server = origin.accept().unwrap().0;
            receive(&server, case);
            if ends {
                assert_eq!(server.read(&mut [0]).unwrap(), 0);
            }
        });
        receiving.await.unwrap();
        sending.await.unwrap();
    }
}

#[tokio::test]
async fn urgent_data_stays_urgent_in_one_box() {
    let origin = TcpListener::bind("127.0.0.1:0").unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let draft = overlay.node("box").document(ONE_BOX).with("ORIGIN", origin.local_addr().unwrap());
    let mut node = draft.start().await.unwrap();
    for case in CASES {
        exchange(node.address("db"), &origin, case, |server, (before, after)| {
            assert!(read(server, before) == pattern(before));
            assert_eq!(receive_urgent(server), URGENT);
            assert!(read(server, after) == pattern(after));
        })
        .await;
    }
    node.metric_reaches("hermes_tcp_urgent_total", "carried=\"urgent\"", 2.0 * CASES.len() as f64).await;
    node.assert_sound();
}

/// A tunnel has no mark. The byte is in its place, as RFC 6093 asks of programs.
#[tokio::test]
async fn urgent_data_is_an_ordinary_byte_of_a_tunnel() {
    let origin = TcpListener::bind("127.0.0.1:0").unwrap();
    for http in ["h1", "h2"] {
        let overlay = Overlay::new(hermes()).unwrap();
        let draft = overlay.node("far").document(FAR).with("ORIGIN", origin.local_addr().unwrap());
        let far = draft.start().await.unwrap();
        let draft = overlay.node("near").document(NEAR).with("HTTP", http).with("FAR", far.address("overlay"));
        let mut near = draft.start().await.unwrap();
        for case in CASES {
            exchange(near.address("db"), &origin, case, |server, (before, after)| {
                let expected = [&pattern(before)[..], &[URGENT], &pattern(after)].concat();
                assert!(read(server, expected.len()) == expected);
            })
            .await;
        }
        near.metric_reaches("hermes_tcp_urgent_total", "carried=\"in-band\"", 2.0 * CASES.len() as f64).await;
        near.assert_sound();
    }
}

/// The kernel would drop the first one, if the socket of the node learned too late that urgent data belongs to the stream.
#[tokio::test]
async fn urgent_data_at_the_very_start_is_kept() {
    let origin = TcpListener::bind("127.0.0.1:0").unwrap();
    let overlay = Overlay::new(hermes()).unwrap();
    let draft = overlay.node("box").document(ONE_BOX).with("ORIGIN", origin.local_addr().unwrap());
    let node = draft.start().await.unwrap();
    let to = node.address("db");
    let exchange = move || {
        for _ in 0..10 {
            let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            client.set_out_of_band_inline(true).unwrap();
            client.connect(&to.into()).unwrap();
            send_at_once(&client);
            let (server, _) = origin.accept().unwrap();
            SockRef::from(&server).set_out_of_band_inline(true).unwrap();
            send_at_once(&Socket::from(server.try_clone().unwrap()));
            assert_eq!(read(&TcpStream::from(client), 3), b"EFx");
            // Without the option, the kernel has removed an urgent byte that came before it was set.
            assert_eq!(read(&server, 1).len(), 1);
        }
    };
    spawn_blocking(exchange).await.unwrap();
}

fn send_at_once(socket: &Socket) {
    socket.send_out_of_band(b"E").unwrap();
    socket.send_out_of_band(b"F").unwrap();
    socket.send(b"x").unwrap();
}
