//! A WebSocket: a subscription, and publications of the same client (RFC 6455).
//!
//! In: the bytes of a tunnel whose request named the protocol `websocket`. Out: each delivery as a text message with the
//! JSON object of `application/x-ndjson`. Each message of the client is published to the channel, and answered by an object
//! with `published`, or with `refused` and the reason. All bytes of the client refresh the subscription, such as its answers
//! to pings. Never: more than one publication of the client at a time, the next bytes of the client while a publication
//! waits for room, or more answers than the client reads.

use std::io::{self, Read, Write};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use hermes_model::snapshot::Snapshot;
use hermes_relay::framing::Framing;
use hermes_relay::{Audience, End, NewPublication, Reserved};
use hermes_signature::Grant;
use hermes_transport::runtime::WorkerContext;
use hermes_transport::runtime::session::SessionEntry;
use hermes_transport::stream::{BoxedStream, ByteStream};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method};
use serde_json::json;
use tokio::time::{Instant, Sleep};
use tungstenite::protocol::frame::coding::CloseCode;
use tungstenite::protocol::{CloseFrame, Role, WebSocket, WebSocketConfig};
use tungstenite::{Error as SocketError, Message};

use crate::deliveries::{Deliveries, Ended, would_lead_to};
use crate::publish::{NotPublished, Outlet, Published, of_socket};
use crate::subscribe::Begun;
use crate::{RelayRequest, certified, channel, url_token};

/// Bytes of messages for the client after which no more are made until it has read some.
const MAX_OUTGOING: usize = 64 << 10;
/// Bytes that are read into memory for each socket. The default of the library is 128 KiB.
const READ_BUFFER: usize = 4 << 10;
/// Messages of the client before other tasks of the worker run.
const MESSAGES_A_TURN: usize = 32;
/// The time between two pings, as a part of the timeout, so that several pongs may be lost.
const PINGS_A_TIMEOUT: u32 = 3;

type Publishing = Pin<Box<dyn Future<Output = Result<Published, NotPublished>>>>;

/// The bytes between the WebSocket and the tunnel.
#[derive(Debug, Default)]
struct Memory {
    incoming: BytesMut,
    outgoing: Vec<u8>,
}

impl Read for Memory {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(self.incoming.len());
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.incoming.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct RelaySocket {
    socket: WebSocket<Memory>,
    /// `None` after the end of the subscription. Bytes of the client are dropped then, and its idle timeout applies.
    deliveries: Option<Deliveries>,
    timeout: Duration,
    /// The grant of the client's token. The subscription ends with it.
    grant: Option<Grant>,
    ping_interval: Duration,
    /// The next ping. Deliveries do not delay it, since only the client's answer tells that it is there.
    ping: Pin<Box<Sleep>>,
    outlet: Outlet,
    /// A publication of the client that waits for room.
    publishing: Option<Publishing>,
    /// Memory for the message that arrives.
    arriving: Reserved,
    worker: Rc<WorkerContext>,
    entry: Rc<SessionEntry>,
}

/// The stream of a tunnel that ends at the relay.
pub(crate) fn stream(request: &RelayRequest<'_>, begun: Begun) -> ByteStream {
    let Begun { deliveries, timeout, grant } = begun;
    let ping_interval = request.settings.heartbeat.min(timeout / PINGS_A_TIMEOUT);
    let most = usize::try_from(request.settings.unit).unwrap_or(usize::MAX);
    let config = WebSocketConfig::default().max_message_size(Some(most)).max_frame_size(Some(most));
    let config = config.read_buffer_size(READ_BUFFER);
    let outlet = Outlet::new(request, channel(request, None), request.settings.mode, Audience::All);
    let start = json!({
        "id": deliveries.position(),
        "subscription": deliveries.subscription.id().to_string(),
        "timeout": timeout.as_secs(),
    });
    let mut socket = RelaySocket {
        socket: WebSocket::from_raw_socket(Memory::default(), Role::Server, Some(config)),
        timeout,
        grant,
        ping_interval,
        ping: Box::pin(tokio::time::sleep(ping_interval)),
        arriving: outlet.relay().reserve(),
        outlet,
        publishing: None,
        worker: request.worker.clone(),
        entry: request.entry.clone(),
        deliveries: Some(deliveries),
    };
    socket.send(Message::text(start.to_string()));
    ByteStream::Boxed(Box::new(socket))
}

impl RelaySocket {
    fn send(&mut self, message: Message) {
        // Bytes go to memory. Only a message after the end fails, and nobody waits for it.
        let _ = self.socket.send(message);
    }

    fn end(&mut self) {
        self.deliveries = None;
        self.entry.set_held(false);
    }

    fn close(&mut self, code: CloseCode, reason: &str) {
        self.end();
        let _ = self.socket.close(Some(CloseFrame { code, reason: reason.into() }));
        let _ = self.socket.flush();
    }

    /// Takes messages of the client. Ready when all its bytes are taken.
    fn poll_messages(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        for _ in 0..MESSAGES_A_TURN {
            self.poll_publishing(cx);
            if self.publishing.is_some() {
                // Its answers to pings are not read meanwhile.
                self.refresh();
                return Poll::Pending;
            }
            if self.socket.get_ref().outgoing.len() >= MAX_OUTGOING {
                return Poll::Pending;
            }
            match self.socket.read() {
                Ok(Message::Text(text)) => self.publish("text/plain; charset=utf-8", text.into()),
                Ok(Message::Binary(bytes)) => self.publish("application/octet-stream", bytes),
                Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => {
                    let _ = self.socket.flush();
                    self.arriving = self.outlet.relay().reserve();
                }
                Ok(Message::Close(_)) => {
                    let _ = self.socket.flush();
                    self.end();
                    return Poll::Ready(());
                }
                Err(SocketError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => return Poll::Ready(()),
                Err(SocketError::ConnectionClosed | SocketError::AlreadyClosed) => {
                    self.end();
                    return Poll::Ready(());
                }
                Err(SocketError::Capacity(error)) => {
                    self.close(CloseCode::Size, &error.to_string());
                    return Poll::Ready(());
                }
                Err(error) => {
                    self.close(CloseCode::Protocol, &error.to_string());
                    return Poll::Ready(());
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Extends the subscription. If it has ended, the other direction learns of it.
    fn refresh(&self) {
        if let Some(deliveries) =
            self.deliveries.as_ref().filter(|_| !self.grant.as_ref().is_some_and(url_token::is_over))
        {
            deliveries.refresh(url_token::max_timeout(self.grant.as_ref(), self.timeout));
        }
    }

    /// Begins a publication. The request subscribed by GET, so each message is decided as the POST that it replaces.
    fn publish(&mut self, content_type: &'static str, body: Bytes) {
        let reserved = std::mem::replace(&mut self.arriving, self.outlet.relay().reserve());
        let snapshot = self.worker.snapshot();
        if !certified::takes_unsigned(&self.entry.facts) {
            let refused = json!({"refused": "only the holder of a key publishes to this channel, by signed requests"});
            return self.send(Message::text(refused.to_string()));
        }
        if !may_publish(self.outlet.route(), &self.entry, &snapshot) {
            let refused = json!({"refused": "this client may not publish to the channel"});
            return self.send(Message::text(refused.to_string()));
        }
        if self.grant.as_ref().is_some_and(|grant| !url_token::may_publish(grant)) {
            let refused = json!({"refused": "the token has expired, or does not have the right to publish"});
            return self.send(Message::text(refused.to_string()));
        }
        // A copy: the message is a part of a larger buffer.
        let mut content = NewPublication { body: Bytes::copy_from_slice(&body).into(), ..NewPublication::default() };
        content.headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        let (outlet, facts) = (self.outlet.clone(), of_socket(&self.entry.facts, &content));
        self.publishing = Some(Box::pin(async move {
            // Publications that wait for room count, too.
            let _reserved = reserved;
            outlet.publish(facts, content).await
        }));
    }

    /// Continues the publication, and sends its receipt.
    fn poll_publishing(&mut self, cx: &mut Context<'_>) {
        let Some(publishing) = &mut self.publishing else { return };
        let Poll::Ready(published) = publishing.as_mut().poll(cx) else { return };
        self.publishing = None;
        let answer = match published.map(|published| published.receipt) {
            Ok(receipt) => json!({
                "published": receipt.id.map(|id| id.to_string()),
                "subscribers": receipt.subscribers,
                "delivered": receipt.delivered,
            }),
            Err(error) => json!({"refused": error.to_string()}),
        };
        self.send(Message::text(answer.to_string()));
    }

    /// Takes deliveries until there is something to send. Ready without anything when the socket has ended.
    fn poll_outgoing(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_publishing(cx);
        if self.deliveries.is_some() && self.ping.as_mut().poll(cx).is_ready() {
            self.ping.as_mut().reset(Instant::now() + self.ping_interval);
            // Its next poll registers the waker.
            cx.waker().wake_by_ref();
            self.send(Message::Ping(Bytes::new()));
        }
        while let Some(deliveries) = &mut self.deliveries
            && self.socket.get_ref().outgoing.len() < MAX_OUTGOING
        {
            match deliveries.poll_delivery(cx) {
                Poll::Ready(Ok(delivery)) => {
                    let position = deliveries.position();
                    let mut line = Vec::new();
                    Framing::JsonLines.write(&mut line, &delivery, &position, deliveries.has_several_channels());
                    // JSON is text.
                    self.send(Message::text(String::from_utf8_lossy(line.trim_ascii_end()).into_owned()));
                }
                Poll::Ready(Err(ended)) => self.close(close_code(ended), &ended.to_string()),
                Poll::Pending if !self.socket.get_ref().outgoing.is_empty() => break,
                // Ready when the subscription expires, or at a heartbeat, which pings replace.
                Poll::Pending => ready!(deliveries.poll_idle(cx)),
            }
        }
        Poll::Ready(())
    }
}

fn may_publish(route: &Arc<str>, entry: &SessionEntry, snapshot: &Snapshot) -> bool {
    would_lead_to(route, entry, snapshot, |facts| facts.method = Method::POST)
}

fn close_code(ended: Ended) -> CloseCode {
    match ended {
        Ended::ByRelay(End::Expired) => CloseCode::Normal,
        Ended::ByRelay(End::Closed) => CloseCode::Restart,
        Ended::ByRelay(End::Stalled) | Ended::Denied => CloseCode::Policy,
    }
}

impl BoxedStream for RelaySocket {
    fn bind(&self, _: &Rc<SessionEntry>) {}

    fn poll_carrier(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        ready!(self.poll_outgoing(cx));
        let outgoing = std::mem::take(&mut self.socket.get_mut().outgoing);
        if outgoing.len() >= MAX_OUTGOING {
            // The other direction waits for this.
            cx.waker().wake_by_ref();
        }
        // Long messages count until they are sent, since each client has its own copy.
        let bytes = match outgoing.len() {
            0..MAX_OUTGOING => Bytes::from(outgoing),
            MAX_OUTGOING.. => self.outlet.relay().reserve().hold(outgoing),
        };
        Poll::Ready(Ok(Some(bytes).filter(|bytes| !bytes.is_empty())))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>> {
        ready!(self.poll_messages(cx));
        if !chunk.is_empty() && self.deliveries.is_some() {
            let bytes = std::mem::take(chunk);
            self.refresh();
            if self.outlet.relay().reserve_more(&mut self.arriving, bytes.len() as u64).is_err() {
                self.worker.shared.metrics.limit("relay-memory");
                self.close(CloseCode::Again, "the relay has no memory for the message");
            } else {
                self.socket.get_mut().incoming.extend_from_slice(&bytes);
                ready!(self.poll_messages(cx));
            }
        }
        // Bytes after the end are dropped.
        chunk.clear();
        // The other direction sends the answers.
        cx.waker().wake_by_ref();
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A publication that waits for room is completed.
        ready!(self.poll_messages(cx));
        self.end();
        cx.waker().wake_by_ref();
        Poll::Ready(Ok(()))
    }

    fn abort(&mut self) {
        self.end();
        self.publishing = None;
    }
}
