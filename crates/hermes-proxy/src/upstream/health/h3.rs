//! A health check over HTTP/3, with the node's own identity as any session has it.
//!
//! In: an endpoint and its addresses. Out: a connection of its own, and the status of a GET on it; without a path
//! there is none. Never: a shared connection, since those are the workers'.

use std::io;
use std::net::IpAddr;

use bytes::{Bytes, BytesMut};
use hermes_net::dial::{self, Addresses};
use hermes_net::quic;
use hermes_wire::h3::{self, Code, Frame, FrameDecoder, Settings, stream};
use hermes_wire::varint;
use http::{Request, StatusCode};

use crate::h3::fields::{self, Bounds};
use crate::h3::link::number;
use crate::upstream::ClientTls;

/// An answer to a check has a short head.
const BOUNDS: Bounds = Bounds { bytes: 64 << 10, lines: 100 };
/// Bytes of a datagram: an answer to a check needs no more than all paths have.
const LARGEST: u16 = 1200;
/// Read at once.
const READ: usize = 4096;

/// What the checks of one endpoint are sent from, one family each.
#[derive(Default)]
pub(super) struct Sockets {
    /// They end with the checks.
    tasks: quic::Tasks,
    open: [Option<quic::Endpoint>; 2],
}

impl Sockets {
    fn of(&mut self, ip: IpAddr) -> io::Result<quic::Endpoint> {
        let socket = &mut self.open[usize::from(ip.is_ipv4())];
        match socket {
            Some(open) => Ok(open.clone()),
            None => Ok(socket.insert(quic::client_endpoint(ip.is_ipv4(), LARGEST, &self.tasks)?).clone()),
        }
    }
}

/// A connection over which HTTP/3 has begun.
pub(super) struct Connected {
    connection: quic::Connection,
    /// A peer's stream that is never read. It lives as long as the connection, which ends with its control stream.
    _first: quic::RecvStream,
}

/// Connects, until the peer is heard over a stream of its own: then a session would go on by HTTP/3, too.
///
/// # Errors
/// What went wrong, for the log.
pub(super) async fn connect(
    sockets: &mut Sockets,
    client: &ClientTls,
    addresses: &Addresses,
    port: u16,
) -> Result<Connected, String> {
    let config = client.quic.clone().ok_or("HTTP/3 without TLS")?;
    let connected = dial::first(addresses, |ip| {
        let (ours, config, name) = (sockets.of(ip), config.clone(), client.name.clone());
        let address = (ip, port).into();
        async move { quic::connect(&ours?, config, address, &name).await }
    });
    let connection = connected.await.map_err(text)?;
    let first = connection.accept_uni().await.map_err(text)?;
    Ok(Connected { connection, _first: first })
}

impl Connected {
    /// Asks, where there is a path.
    ///
    /// # Errors
    /// What went wrong, for the log.
    pub(super) async fn ask(self, host: &str, path: Option<&str>) -> Result<Option<StatusCode>, String> {
        let status = match path {
            Some(path) => get(&self.connection, host, path).await.map(Some),
            None => Ok(None),
        };
        self.connection.close(number(Code::NoError), b"");
        status
    }
}

async fn get(connection: &quic::Connection, host: &str, path: &str) -> Result<StatusCode, String> {
    let request = Request::get(format!("https://{host}{path}")).body(()).map_err(text)?;
    // It lives as long as the exchange.
    let mut control = connection.open_uni().await.map_err(text)?;
    control.write_chunk(begin_control()).await.map_err(text)?;
    let (mut send, mut recv) = connection.open_bi().await.map_err(text)?;
    // What the peer takes it may not have said yet; a check is as small as a request can be.
    let section = fields::put_request(&request.into_parts().0).within(None).map_err(text)?;
    let mut head = BytesMut::new();
    h3::put_header(h3::HEADERS, section.len(), &mut head);
    head.extend_from_slice(&section);
    send.write_chunk(head.freeze()).await.map_err(text)?;
    send.finish().map_err(text)?;
    let mut decoder = FrameDecoder::new(BOUNDS.bytes);
    loop {
        while let Some(frame) = decoder.next().map_err(text)? {
            let Frame::Headers(section) = frame else {
                return Err("an answer that does not begin with HEADERS".into());
            };
            let status = fields::read_response(section, BOUNDS).map_err(text)?.status;
            if !status.is_informational() {
                return Ok(status);
            }
        }
        match recv.read_chunk(READ, true).await.map_err(text)? {
            Some(chunk) => decoder.push(chunk.bytes),
            None => return Err("the stream ended without an answer".to_owned()),
        }
    }
}

fn begin_control() -> Bytes {
    let ours = Settings { max_field_section: Some(BOUNDS.bytes as u64), extended_connect: false, datagrams: false };
    let mut out = BytesMut::new();
    varint::encode(stream::CONTROL, &mut out);
    ours.put(&mut out);
    out.freeze()
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
