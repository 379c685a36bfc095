//! Interim responses to a client of HTTP/2 or HTTP/3.
//!
//! In: a request that is being served, and the stream of its response. Out: `100 Continue` if the client waits for it,
//! interim responses from upstream, and finally the result of the request. Never: the final response itself.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{HeaderMap, StatusCode};

use crate::session::{SessionOutcome, Tunnel};
use hermes_transport::body::{Body, Interim, RequestBody};
use hermes_transport::stream::Receiver;

/// Maximum number of interim responses before one final response. Flow control does not limit them, and they are only
/// hints.
const MAX_INTERIM_RESPONSES: usize = 16;

/// The stream that receives a response, over either version.
pub(super) trait Answers {
    /// Sends an interim response. An error is not reported here: the final response meets it again.
    fn inform(&mut self, status: StatusCode, headers: HeaderMap);

    /// True if the client reads its responses, so that hints do not accumulate.
    fn takes_hints(&self) -> bool;

    /// Flushes pending output. Ready if the client has cancelled.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()>;
}

/// Waits for the final response and sends interim responses meanwhile.
pub(super) struct Wait<'a, T> {
    to: &'a mut T,
    interim: Arc<Interim>,
    /// Set if the client waits for `100 Continue`.
    body: Option<RequestBody>,
    continued: bool,
    /// The number of hints forwarded.
    hints: usize,
}

impl<'a, T: Answers> Wait<'a, T> {
    /// Creates the wait. `body` is set if the client withholds its body until `100 Continue`.
    pub(super) fn new(to: &'a mut T, interim: Arc<Interim>, body: Option<RequestBody>) -> Self {
        Self { to, interim, body, continued: false, hints: 0 }
    }

    /// Waits for the outcome of the request. `None`: the client cancelled it.
    pub(super) async fn for_served(
        mut self,
        mut serve: Pin<&mut impl Future<Output = SessionOutcome>>,
    ) -> Option<SessionOutcome> {
        std::future::poll_fn(|cx| {
            let served = serve.as_mut().poll(cx);
            self.send_interim();
            // A cancelled request may have been answered because of the cancellation, so the cancellation has priority.
            match (self.to.poll_gone(cx), served) {
                (Poll::Ready(()), _) => Poll::Ready(None),
                (Poll::Pending, served) => served.map(Some),
            }
        })
        .await
    }

    fn send_interim(&mut self) {
        if !self.continued && self.body.as_ref().is_some_and(RequestBody::is_wanted) {
            self.continued = true;
            self.to.inform(StatusCode::CONTINUE, HeaderMap::new());
        }
        for response in self.interim.take() {
            let (mut parts, ()) = response.into_parts();
            hermes_transport::headers::strip_hop_by_hop(&mut parts.headers);
            hermes_transport::headers::strip_overlay(&mut parts.headers);
            // 101 has no meaning here (RFC 9113, 8.6; RFC 9114, 4.5).
            let is_hint = parts.status != StatusCode::SWITCHING_PROTOCOLS;
            if is_hint && self.hints < MAX_INTERIM_RESPONSES && self.to.takes_hints() {
                self.hints += 1;
                self.to.inform(parts.status, parts.headers);
            }
        }
    }
}

/// The receiving stream of a tunnel: the stream of the CONNECT request, or the body of the POST. `None`: the stream
/// ended with the request head, so one direction is already closed.
pub(super) fn sent_by_client(open: &mut Tunnel, tunnelled: Option<Receiver>) -> Option<Receiver> {
    let by_post = open.body.take().and_then(RequestBody::into_body);
    match (tunnelled, by_post) {
        (Some(recv), _) => Some(recv),
        (None, Some(Body::Stream(body))) => Some(body.into_stream()),
        _ => None,
    }
}
