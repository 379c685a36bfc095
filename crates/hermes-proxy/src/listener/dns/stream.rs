//! DNS over TCP (RFC 7766): length-prefixed messages, many at a time on one connection.
//!
//! In: a connection. Out: an answer to each message, in the order of completion. Limited: pending messages of a
//! connection, message size, and the time of a write.

use std::io;
use std::rc::Rc;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::stream::{FuturesUnordered, StreamExt};
use hermes_net::Io;
use tokio::io::AsyncWriteExt;

use super::forward::DnsTransport;
use super::{QueryOutcome, consider};
use crate::listener::Ready;
use crate::listener::http::read_first;
use crate::worker::Worker;
use hermes_transport::runtime::session::{Connection, Stage};

/// Maximum number of pending messages on one connection. Further messages wait in the socket.
const MAX_PENDING_MESSAGES: usize = 32;
/// Maximum size of a query in bytes: a name and the known extensions.
const MAX_QUERY_BYTES: usize = 4096;

/// Serves one connection until it ends.
pub(crate) async fn serve(worker: &Rc<Worker>, connection: &Rc<Connection>, ready: Ready) {
    let mut io = ready.io;
    if let Err(error) = answer_all(worker, connection, &mut io).await {
        tracing::debug!(source = %ready.source, %error, "a DNS connection ended");
    }
}

async fn answer_all(worker: &Rc<Worker>, connection: &Rc<Connection>, io: &mut Io) -> io::Result<()> {
    let mut ahead = BytesMut::new();
    let mut under_way = FuturesUnordered::new();
    let mut open = true;
    loop {
        while under_way.len() < MAX_PENDING_MESSAGES
            && let Some(message) = next_message(&mut ahead)?
        {
            connection.enter(worker);
            under_way.push(answer(worker, connection, message));
        }
        note_stage(worker, connection, !ahead.is_empty());
        if !open && under_way.is_empty() {
            return Ok(());
        }
        tokio::select! {
            Some(answer) = under_way.next(), if !under_way.is_empty() => {
                let written = write(worker, io, answer).await;
                connection.leave(worker);
                written?;
            }
            read = read_first(io, &mut ahead), if open && under_way.len() < MAX_PENDING_MESSAGES => open = read? > 0,
        }
    }
}

/// Starts or stops the timeout of a partial message, which the sweep enforces.
fn note_stage(worker: &Worker, connection: &Connection, has_begun: bool) {
    match (connection.stage(), has_begun) {
        (Stage::Idle, true) => connection.set_stage(worker, Stage::Head),
        (Stage::Head, false) => connection.set_stage(worker, Stage::Idle),
        _ => {}
    }
}

/// Takes the first message, if it is complete.
fn next_message(ahead: &mut BytesMut) -> io::Result<Option<Bytes>> {
    let Some(length) = ahead.first_chunk() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes(*length));
    if length > MAX_QUERY_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes is no question")));
    }
    if ahead.len() < 2 + length {
        return Ok(None);
    }
    ahead.advance(2);
    Ok(Some(ahead.split_to(length).freeze()))
}

async fn answer(worker: &Rc<Worker>, connection: &Rc<Connection>, message: Bytes) -> Option<Bytes> {
    let state = worker.generation().listening(&connection.listener.name).cloned()?;
    match consider(worker, &state, connection.source.get().ip(), message) {
        QueryOutcome::Answered(answer) => Some(answer),
        QueryOutcome::Forwarded(forwarded) => Some(forwarded.query(worker, DnsTransport::Tcp).await),
        QueryOutcome::Dropped => None,
    }
}

async fn write(worker: &Worker, io: &mut Io, answer: Option<Bytes>) -> io::Result<()> {
    let Some(answer) = answer else { return Ok(()) };
    let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
    let within = worker.generation().snapshot.limits.header_timeout;
    let write = async {
        io.write_all(&[&length.to_be_bytes()[..], &answer].concat()).await?;
        io.flush().await
    };
    tokio::time::timeout(within, write).await.unwrap_or_else(|_| {
        worker.shared.metrics.limit("slow-client");
        Err(io::ErrorKind::TimedOut.into())
    })
}
