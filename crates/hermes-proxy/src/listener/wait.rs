//! What a client of HTTP/2 or HTTP/3 hears before its answer.
//!
//! In: a request that is served, and where its answer goes. Out: 100 where the client waits for it, interim responses of
//! whoever is behind, and what the request was served with. Never: the answer itself.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{HeaderMap, StatusCode};

use crate::body::{Body, Interim, RequestBody};
use crate::session::{Served, Tunnel};
use crate::stream::Receiver;

/// Interim responses that a client is sent before one answer; no window counts them, and they are only
/// hints.
const MOST_HINTS: usize = 16;

/// Where an answer goes: a stream of either version.
pub(super) trait Answers {
    /// Sends an interim response. How it fails the answer hears too.
    fn inform(&mut self, status: StatusCode, headers: HeaderMap);

    /// The client takes what it is sent, so that hints are not kept for it.
    fn takes_hints(&self) -> bool;

    /// Moves what waits to be sent. Ready where the client gave up.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()>;
}

/// Waits for the response, and meanwhile sends what comes before it.
pub(super) struct Wait<'a, T> {
    to: &'a mut T,
    interim: Arc<Interim>,
    /// Set where the client waits for 100.
    body: Option<RequestBody>,
    continued: bool,
    /// Passed on so far.
    hints: usize,
}

impl<'a, T: Answers> Wait<'a, T> {
    /// `body` where the client waits for 100 until it is asked for.
    pub(super) fn new(to: &'a mut T, interim: Arc<Interim>, body: Option<RequestBody>) -> Self {
        Self { to, interim, body, continued: false, hints: 0 }
    }

    /// `None` where the client gave up.
    pub(super) async fn for_served(mut self, mut serve: Pin<&mut impl Future<Output = Served>>) -> Option<Served> {
        std::future::poll_fn(|cx| {
            let served = serve.as_mut().poll(cx);
            self.send_interim();
            // A request that was broken off may have been answered for that very reason.
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
            crate::headers::strip_hop_by_hop(&mut parts.headers);
            crate::headers::strip_overlay(&mut parts.headers);
            // 101 has no meaning here (RFC 9113, 8.6; RFC 9114, 4.5).
            let is_hint = parts.status != StatusCode::SWITCHING_PROTOCOLS;
            if is_hint && self.hints < MOST_HINTS && self.to.takes_hints() {
                self.hints += 1;
                self.to.inform(parts.status, parts.headers);
            }
        }
    }
}

/// What a tunnel's client sends: behind its CONNECT, or in the body of its POST. `None` where that has ended with its
/// head: one direction is over already.
pub(super) fn sent_by_client(open: &mut Tunnel, tunnelled: Option<Receiver>) -> Option<Receiver> {
    let by_post = open.body.take().and_then(RequestBody::into_body);
    match (tunnelled, by_post) {
        (Some(recv), _) => Some(recv),
        (None, Some(Body::Stream(body))) => Some(body.into_stream()),
        _ => None,
    }
}
