//! Two nodes, the near one with SOCKS listeners, and a client that speaks SOCKS by hand.

use hermes_testkit::binary::hermes;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use hermes_testkit::{
    origin::services::Services,
    overlay::{Node, Overlay},
    raw_http1::{RawHttp1, in_time},
};
use tokio::net::{TcpStream, UdpSocket};

pub(crate) const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// An overlay of the binary under test.
pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

const FAR: &str = "
listeners:
- {name: door, bind: '127.0.0.1:0', protocol: http, trust: [127.0.0.0/8]}
routes:
- {name: web, match: {kind: tcp, authority: 'VIDEO:80'}, terminate: {tcp: '$WEB'}}
- {name: echo, match: {kind: tcp, authority: 'ECHO:7'}, terminate: {tcp: '$ECHO'}}
- {name: nobody, match: {kind: tcp, authority: 'NOBODY:7'}, terminate: {tcp: '127.0.0.1:1'}}
- {name: udp, match: {kind: udp, authority: ['ECHO:7', 'OTHER:7', '192.0.2.7:7', '[2001:db8::7]:7']}, terminate: {udp: '$UDP'}}
";

const NEAR: &str = "
workers: 1
$LIMITS
listeners:
- {name: socks, bind: '127.0.0.1:0', protocol: socks5, set-headers: {hermes-user: alice}}
- {name: socks-6, bind: '[::1]:0', protocol: socks5}
routes:
- {name: denied, match: {authority: 'DENIED:*'}, respond: {status: 403}}
- {name: nowhere, match: {authority: 'NOWHERE:*'}, upstream: nowhere}
- {name: here, match: {kind: tcp, authority: '127.0.0.1:*'}, terminate: {tcp: authority, reach: any}}
- {name: private, match: {kind: tcp, authority: '10.0.0.1:*'}, terminate: {tcp: authority}}
- {name: away, match: {kind: [tcp, udp], authority: ['*:7', '*:80']}, upstream: far $ROUTE}
upstreams:
- {name: far, protocol: h2, overlay: true, endpoints: ['$FAR']}
- {name: nowhere, protocol: h2, overlay: true, endpoints: ['127.0.0.1:1']}
";

/// A near node with SOCKS, and a far one with services.
pub(crate) struct Lab {
    pub(crate) near: Node,
    pub(crate) far: Node,
    pub(crate) services: Services,
    overlay: Overlay,
}

impl Lab {
    pub(crate) async fn new() -> Self {
        Self::with("", "").await
    }

    /// With top-level lines of the near node, and what its route has beside its action (with a comma in front).
    pub(crate) async fn with(limits: &str, route: &str) -> Self {
        let (overlay, services) = (overlay(), Services::start().unwrap());
        let far = services.fill(overlay.node("far").document(FAR)).start().await.unwrap();
        let near = overlay.node("near").document(NEAR).with("LIMITS", limits).with("ROUTE", route);
        let near = near.with("FAR", far.address("door")).start().await.unwrap();
        Self { near, far, services, overlay }
    }

    pub(crate) fn socks(&self) -> SocketAddr {
        self.near.address("socks")
    }

    /// The near node follows a document with other lines.
    pub(crate) async fn reload(&mut self, document: impl FnOnce(&str) -> String) {
        let values =
            [("LIMITS", String::new()), ("ROUTE", String::new()), ("FAR", self.far.address("door").to_string())];
        self.near.reload(&document(NEAR), &values).await.unwrap();
        let _ = &self.overlay;
    }

    /// Nothing is left behind, anywhere.
    pub(crate) async fn quiet(&self) {
        self.near.quiet().await;
        self.far.quiet().await;
    }
}

pub(crate) const CONNECT: u8 = 1;
pub(crate) const BIND: u8 = 2;
pub(crate) const ASSOCIATE: u8 = 3;

/// A target as SOCKS writes it: addresses as such, anything else as a name.
pub(crate) fn target(host: &str, port: u16) -> Vec<u8> {
    let address = match host.parse() {
        Ok(IpAddr::V4(ip)) => [&[1][..], &ip.octets()].concat(),
        Ok(IpAddr::V6(ip)) => [&[4][..], &ip.octets()].concat(),
        Err(_) => [&[3, host.len() as u8][..], host.as_bytes()].concat(),
    };
    [address, port.to_be_bytes().to_vec()].concat()
}

/// A client's connection, after its greeting.
pub(crate) async fn greeted(socks: SocketAddr) -> RawHttp1<TcpStream> {
    let mut http1 = RawHttp1::connect(socks).await.unwrap();
    http1.send([5, 1, 0]).await.unwrap();
    assert_eq!(http1.exactly(2).await.unwrap(), [5, 0]);
    http1
}

/// Asks for something: the reply's code, and the address in it.
pub(crate) async fn ask(
    http1: &mut RawHttp1<TcpStream>,
    command: u8,
    host: &str,
    port: u16,
) -> io::Result<(u8, SocketAddr)> {
    http1.send([&[5, command, 0][..], &target(host, port)].concat()).await?;
    reply(http1).await
}

pub(crate) async fn reply(http1: &mut RawHttp1<TcpStream>) -> io::Result<(u8, SocketAddr)> {
    let head = http1.exactly(4).await?;
    assert_eq!((head[0], head[2]), (5, 0), "{head:?}");
    let ip: IpAddr = match head[3] {
        1 => <[u8; 4]>::try_from(http1.exactly(4).await?).unwrap().into(),
        4 => <[u8; 16]>::try_from(http1.exactly(16).await?).unwrap().into(),
        other => panic!("address type {other}"),
    };
    let port = u16::from_be_bytes(http1.exactly(2).await?.try_into().unwrap());
    Ok((head[1], SocketAddr::new(ip, port)))
}

/// A tunnel by CONNECT.
pub(crate) async fn connected(socks: SocketAddr, host: &str, port: u16) -> RawHttp1<TcpStream> {
    let mut http1 = greeted(socks).await;
    assert_eq!(ask(&mut http1, CONNECT, host, port).await.unwrap().0, 0, "{host}:{port}");
    http1
}

/// An association: its connection, and a socket of the client's.
pub(crate) struct Association {
    pub(crate) http1: RawHttp1<TcpStream>,
    pub(crate) socket: UdpSocket,
    pub(crate) relay: SocketAddr,
}

impl Association {
    pub(crate) async fn open(socks: SocketAddr) -> Self {
        let mut http1 = greeted(socks).await;
        let unspecified = if socks.is_ipv4() { "0.0.0.0" } else { "::" };
        let (code, relay) = ask(&mut http1, ASSOCIATE, unspecified, 0).await.unwrap();
        assert_eq!(code, 0);
        assert_eq!(relay.ip(), socks.ip(), "the relay is where the client reached us");
        let socket = UdpSocket::bind(SocketAddr::new(socks.ip(), 0)).await.unwrap();
        Self { http1, socket, relay }
    }

    pub(crate) async fn send(&self, host: &str, port: u16, payload: &[u8]) {
        self.send_raw(&[&[0, 0, 0][..], &target(host, port), payload].concat()).await;
    }

    pub(crate) async fn send_raw(&self, datagram: &[u8]) {
        self.socket.send_to(datagram, self.relay).await.unwrap();
    }

    /// The next datagram, header and all.
    pub(crate) async fn receive(&self) -> io::Result<Vec<u8>> {
        let mut room = vec![0; 65_536];
        let (length, from) = in_time("waiting for a datagram", self.socket.recv_from(&mut room)).await?;
        assert_eq!(from, self.relay);
        room.truncate(length);
        Ok(room)
    }

    /// Sends, and demands that it comes back with the same header.
    pub(crate) async fn echo(&self, host: &str, port: u16, payload: &[u8]) {
        self.send(host, port, payload).await;
        let wanted = [&[0, 0, 0][..], &target(host, port), payload].concat();
        let got = self.receive().await.unwrap_or_else(|error| panic!("{host}:{port}: {error}"));
        assert!(got == wanted, "{host}:{port}: {} bytes came back, {} were wanted", got.len(), wanted.len());
    }
}
