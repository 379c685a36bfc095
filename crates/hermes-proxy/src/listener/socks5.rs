//! SOCKS 5 (RFC 1928), for programs that cannot use an HTTP proxy.
//!
//! In: a connection. Out: the requests that a client of an HTTP listener would send. CONNECT becomes CONNECT, and UDP
//! ASSOCIATE becomes one CONNECT-UDP for each target (`association`). BIND is refused. A host name is forwarded
//! unresolved. A failure of the session maps to the closest SOCKS reply. The sweep limits the duration of the
//! negotiation.

mod association;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use bytes::{Buf, Bytes, BytesMut};
use hermes_model::facts::Kind;
use hermes_net::Io;
use hermes_wire::socks5::{Command, Greeting, Method, Reply, Request, Socks5Error, Target};
use http::{HeaderMap, StatusCode};
use tokio::io::AsyncWriteExt;

use super::http::{Client, read_first};
use super::{Ready, note_failed_handshake, open};
use crate::request::{Origin, from_target};
use crate::session::{self, DownstreamEnd, SessionOutcome};
use crate::worker::Worker;
use hermes_transport::datagram::CLOSE_TIMEOUT;
use hermes_transport::error::Error;
use hermes_transport::headers::PROXY_STATUS;
use hermes_transport::runtime::session::Connection;
use hermes_transport::stream::ByteStream;

/// The address in a reply without one: this node does not know the address that the last node bound.
const UNKNOWN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Serves one connection until it ends.
pub(crate) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, ready: Ready) {
    let Ready { mut io, source, trust, secure } = ready;
    let client = Client { source, trust, secure, uplink: None };
    let mut ahead = BytesMut::new();
    let request = match negotiate(&mut io, &mut ahead).await {
        Ok(request) => request,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return,
        Err(error) => {
            note_failed_handshake(worker, connection, &error);
            linger(ByteStream::io(io, Bytes::new())).await;
            return;
        }
    };
    let near = ByteStream::io(io, ahead.freeze());
    match request.command {
        Command::Connect => connect(worker, connection, &client, &request.target, near).await,
        Command::UdpAssociate => association::serve(worker, connection, client, &request.target, near).await,
        Command::Bind | Command::Unknown(_) => refuse(near, Reply::CommandUnsupported).await,
    }
}

/// Reads the greeting and the request. Bytes that the client sent before the reply stay in `ahead`.
///
/// # Errors
/// `UnexpectedEof` if the client closed the connection. Any other error was reported to the client if SOCKS has a reply
/// for it.
async fn negotiate(io: &mut Io, ahead: &mut BytesMut) -> io::Result<Request> {
    let acceptable = loop {
        if let Some((greeting, length)) = Greeting::parse(ahead).map_err(invalid)? {
            let acceptable = greeting.offers(Method::None);
            ahead.advance(length);
            break acceptable;
        }
        read_more(io, ahead).await?;
    };
    let method = if acceptable { Method::None } else { Method::Unacceptable };
    io.write_all(&method.selection()).await?;
    io.flush().await?;
    if !acceptable {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the client insists on authentication, and this listener has none; set it to no authentication",
        ));
    }
    loop {
        match Request::parse(ahead) {
            Ok(Some((request, length))) => {
                ahead.advance(length);
                return Ok(request);
            }
            Ok(None) => read_more(io, ahead).await?,
            Err(error) => {
                if let Some(reply) = error.reply() {
                    io.write_all(&reply.encode(UNKNOWN)).await?;
                    io.flush().await?;
                }
                return Err(invalid(error));
            }
        }
    }
}

fn invalid(error: Socks5Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

async fn read_more(io: &mut Io, ahead: &mut BytesMut) -> io::Result<()> {
    match read_first(io, ahead).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

async fn connect(
    worker: &Rc<Worker>,
    connection: &Rc<Connection>,
    client: &Client,
    target: &Target,
    mut near: ByteStream,
) {
    let listener = connection.current_listener(worker);
    let origin =
        Origin { worker, listener: &listener, source: client.source, trust: &client.trust, secure: client.secure };
    let request = from_target(&origin, Kind::Tcp, &target.to_string());
    match open(worker, Some(connection), &mut near, request).await {
        SessionOutcome::Tunnel(tunnel) => match send_reply(&mut near, Reply::Succeeded, UNKNOWN).await {
            Ok(()) => session::relay(DownstreamEnd::Stream(near), *tunnel).await,
            Err(error) => tunnel.session.entry.fail(&Error::ClientGone(error.to_string())),
        },
        SessionOutcome::Response(response) => {
            let reply = reply_to(response.status(), response.headers());
            drop(response);
            refuse(near, reply).await;
        }
    }
}

async fn send_reply(near: &mut ByteStream, reply: Reply, bound: SocketAddr) -> io::Result<()> {
    let mut reply = reply.encode(bound);
    std::future::poll_fn(|cx| near.poll_write(cx, &mut reply)).await?;
    std::future::poll_fn(|cx| near.poll_flush(cx)).await
}

async fn refuse(mut near: ByteStream, reply: Reply) {
    if send_reply(&mut near, reply, UNKNOWN).await.is_ok() {
        linger(near).await;
    }
}

/// Closes the connection gracefully. A close with unread bytes is a reset, and a reset overtakes the reply.
async fn linger(mut near: ByteStream) {
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, std::future::poll_fn(|cx| near.poll_close(cx))).await;
}

/// The reply that best describes why a tunnel was not opened. The `Proxy-Status` error type (RFC 9209) of this node or
/// a later one takes precedence; otherwise the status decides.
pub(super) fn reply_to(status: StatusCode, headers: &HeaderMap) -> Reply {
    if status == StatusCode::NOT_FOUND {
        // No node on the path knows the name.
        return Reply::HostUnreachable;
    }
    let told = headers.get_all(PROXY_STATUS).iter().find_map(|value| error_type(value.to_str().ok()?));
    match told {
        Some("connection_refused") => Reply::Refused,
        Some("dns_error" | "dns_timeout" | "destination_not_found" | "destination_unavailable") => {
            Reply::HostUnreachable
        }
        Some("destination_ip_unroutable") => Reply::NetworkUnreachable,
        Some("http_request_denied" | "destination_ip_prohibited") => Reply::NotAllowed,
        Some("connection_timeout" | "connection_read_timeout" | "http_response_timeout" | "proxy_loop_detected") => {
            Reply::Expired
        }
        _ => match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::METHOD_NOT_ALLOWED => Reply::NotAllowed,
            StatusCode::GATEWAY_TIMEOUT | StatusCode::LOOP_DETECTED => Reply::Expired,
            StatusCode::NOT_IMPLEMENTED => Reply::CommandUnsupported,
            _ => Reply::Failed,
        },
    }
}

/// The first error type in a `Proxy-Status`: that of the proxy closest to the origin.
fn error_type(value: &str) -> Option<&str> {
    let (_, rest) = value.split_once("error=")?;
    Some(rest.split(|c: char| !c.is_ascii_lowercase() && c != '_').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_reply_says_what_failed() {
        let reply = |status: u16, told: &'static str| {
            let mut headers = HeaderMap::new();
            if !told.is_empty() {
                headers.insert(PROXY_STATUS, HeaderValue::from_static(told));
            }
            reply_to(StatusCode::from_u16(status).unwrap_or_default(), &headers)
        };
        assert_eq!(reply(502, "far; error=connection_refused; details=\"x, error=y\", near"), Reply::Refused);
        assert_eq!(reply(502, "far;error=dns_error"), Reply::HostUnreachable);
        assert_eq!(reply(502, "far; error=destination_ip_unroutable"), Reply::NetworkUnreachable);
        assert_eq!(reply(403, "far; error=destination_ip_prohibited"), Reply::NotAllowed);
        assert_eq!(reply(504, "far; error=connection_timeout"), Reply::Expired);
        assert_eq!(reply(508, "far; error=proxy_loop_detected"), Reply::Expired);
        assert_eq!(reply(404, "near; error=http_request_denied"), Reply::HostUnreachable);
        assert_eq!(reply(403, "near; error=http_request_denied"), Reply::NotAllowed);
        assert_eq!(reply(503, "near; error=connection_limit_reached"), Reply::Failed);
        assert_eq!(reply(403, ""), Reply::NotAllowed);
        assert_eq!(reply(502, "far; received-status=502"), Reply::Failed);
    }
}
