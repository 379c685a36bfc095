//! Forwards a query to another server, with only the ID changed.
//!
//! In: a client's query and its message. Out: the first usable answer. Each attempt uses a random ID and a random port,
//! and accepts only an answer to this query from this server (RFC 5452). The transport is the client's: after a
//! truncated answer over UDP, the client repeats its query over TCP. Timeouts limit the whole exchange.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use hermes_net::udp::{self, UdpSocket};
use hermes_net::{dial, host};
use hermes_wire::dns::{Question, is_failure, with_id};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::worker::Worker;

/// Timeout of one server.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Timeout of the whole query: most clients give up after five seconds.
const IN_ALL: Duration = Duration::from_millis(4500);
/// Number of attempts for each server.
const ROUNDS: usize = 2;
/// The maximum message size over TCP, which its length field sets.
const MAX_MESSAGE_BYTES: usize = u16::MAX as usize;

/// The transport of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DnsTransport {
    Udp,
    Tcp,
}

/// Queries the servers in their order. `None` if no server answers.
pub(super) async fn query(
    worker: &Worker,
    question: &Question,
    message: &Bytes,
    servers: &[SocketAddr],
    carrier: DnsTransport,
) -> Option<Bytes> {
    let room = if carrier == DnsTransport::Udp { question.room() } else { MAX_MESSAGE_BYTES };
    // A failure response, used if no other server answers.
    let mut failure = None;
    let answered = tokio::time::timeout(IN_ALL, async {
        for server in std::iter::repeat_n(servers, ROUNDS).flatten() {
            let attempt = async {
                match carrier {
                    DnsTransport::Udp => by_udp(worker, question, message, *server).await,
                    DnsTransport::Tcp => by_tcp(question, message, *server).await,
                }
            };
            match tokio::time::timeout(ATTEMPT, attempt).await {
                Ok(Ok(answer)) if is_failure(&answer) => failure = Some(answer),
                Ok(Ok(answer)) => return Some(answer),
                Ok(Err(error)) => tracing::debug!(%server, %error, "cannot send a query to a DNS server"),
                Err(_) => tracing::debug!(%server, "a DNS server did not respond"),
            }
        }
        None
    });
    let answer = answered.await.ok().flatten().or(failure)?;
    Some(question.pass(answer, room))
}

/// A copy of the message with a random, unpredictable ID.
fn dressed(message: &Bytes) -> (u16, Vec<u8>) {
    let id = rand::random();
    let mut message = message.to_vec();
    with_id(&mut message, id);
    (id, message)
}

async fn by_udp(worker: &Worker, question: &Question, message: &Bytes, server: SocketAddr) -> std::io::Result<Vec<u8>> {
    // Each query has its own socket: the kernel chooses a random port and accepts datagrams of this server only.
    let socket = udp::connect(server)?;
    host::spare(&socket)?;
    let socket = UdpSocket::from_std(socket)?;
    let (id, message) = dressed(message);
    socket.send(server, &message).await?;
    std::future::poll_fn(|cx| {
        loop {
            let mut answer = None;
            let mut others = 0;
            let received = {
                let mut buffer = worker.udp_buffer.borrow_mut();
                socket.poll_receive(cx, &mut buffer, |_, datagram| {
                    if answer.is_none() && question.is_answered_by(id, &datagram) {
                        answer = Some(datagram.to_vec());
                    } else {
                        others += 1;
                    }
                })
            };
            if others > 0 {
                worker.shared.metrics.dropped("dns-mismatch", others);
            }
            std::task::ready!(received)?;
            if let Some(answer) = answer {
                return std::task::Poll::Ready(Ok(answer));
            }
        }
    })
    .await
}

async fn by_tcp(question: &Question, message: &Bytes, server: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = dial::connect_session(&vec![server.ip()].into(), server.port()).await?;
    let (id, message) = dressed(message);
    let length = u16::try_from(message.len()).map_err(std::io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], &message].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    if question.is_answered_by(id, &answer) {
        return Ok(answer);
    }
    Err(std::io::Error::other("the response does not match the query"))
}
