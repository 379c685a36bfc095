//! Health checks over HTTP/3, with the same TLS configuration as sessions.
//!
//! In: an endpoint and its addresses. Out: a dedicated connection, and the status of a GET on it if a path is
//! configured. Never: a connection of a worker's pool.

use std::io;
use std::net::IpAddr;

use bytes::{Bytes, BytesMut};
use hermes_net::dial::{self, Addresses};
use hermes_net::quic;
use hermes_wire::h3::{self, Code, Frame, FrameDecoder, Settings, stream};
use hermes_wire::varint;
use http::{Request, StatusCode};

use crate::upstream::ClientTls;
use hermes_transport::h3::connection::number;
use hermes_transport::h3::fields::{self, Bounds};

/// The limits of the response head.
const BOUNDS: Bounds = Bounds { bytes: 64 << 10, lines: 100 };
/// The maximum size of a UDP payload in bytes, which every QUIC path must support (RFC 9000, section 14).
const LARGEST: u16 = 1200;
/// The maximum size of one read, in bytes.
const READ: usize = 4096;

/// The QUIC sockets for the checks of one endpoint, one for each address family.
#[derive(Default)]
pub(super) struct Sockets {
    /// The tasks that drive the sockets. They end when this value is dropped.
    tasks: quic::EndpointTasks,
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

/// A QUIC connection on which the peer has opened a stream.
pub(super) struct Connected {
    connection: quic::Connection,
    /// The first stream of the peer, which is never read. It is stored because dropping it would stop the stream, and a
    /// stopped control stream ends the connection.
    _first: quic::RecvStream,
}

/// Opens a connection, and waits for the first unidirectional stream of the peer, which shows that the peer has started
/// HTTP/3.
///
/// # Errors
/// The reason, for the log.
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
    /// Sends a GET request if `path` is set, and returns its status. Closes the connection afterwards.
    ///
    /// # Errors
    /// The reason, for the log.
    pub(super) async fn probe(self, host: &str, path: Option<&str>) -> Result<Option<StatusCode>, String> {
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
    // The control stream must stay open as long as the request.
    let mut control = connection.open_uni().await.map_err(text)?;
    control.write_chunk(begin_control()).await.map_err(text)?;
    let (mut send, mut recv) = connection.open_bi().await.map_err(text)?;
    // The request is not checked against the peer's limit of field sections, which may not have arrived yet.
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
