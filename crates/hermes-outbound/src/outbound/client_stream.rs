//! Sends the head of a request on an HTTP/2 or HTTP/3 stream, and receives the heads of its responses.
//!
//! In: a lease of a shared connection, and a request head. Out: the sending half of the stream for the body, interim
//! responses, and the final response with the receiving half. Never: a body.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use hermes_wire::h3::Code;
use http::{Request, Response, Version};

use crate::outbound::Outbound;
use crate::outbound::pool::{ADDED_BYTES, ADDED_LINES, Lease, SharedProtocol};
use hermes_transport::h3::Datagrams;
use hermes_transport::h3::fields::{self, Bounds};
use hermes_transport::stream::h2::Window;
use hermes_transport::stream::{Receiver, Sender, StreamError, h2, h3};

/// The pending response to a request.
pub enum Answer {
    H2 {
        response: ::h2::client::ResponseFuture,
        worker: Rc<Outbound>,
        window: Rc<Window>,
    },
    /// The receiving half of an HTTP/3 stream; `None` once the final response head was read.
    H3(Option<Box<h3::Receiver>>),
}

/// The head of an interim or final response.
pub enum Head {
    /// An interim response, after which further heads follow.
    Interim(Response<()>),
    /// The final response, with the receiving half of the stream.
    Final(Response<Receiver>),
}

/// Opens a stream and sends a request head on it. `ends` is true if the request has no body.
///
/// # Errors
/// The connection accepts no further stream, or the head exceeds the peer's limit. Nothing was sent.
pub async fn send_request(
    worker: &Rc<Outbound>,
    lease: &Lease,
    mut request: Request<()>,
    ends: bool,
) -> Result<(Answer, Sender), StreamError> {
    match &lease.connection.speaks {
        SharedProtocol::H2 { sender, window, backlog, .. } => {
            *request.version_mut() = Version::HTTP_2;
            let mut sender = sender.clone().ready().await?;
            let (response, stream) = sender.send_request(request, ends)?;
            let answer = Answer::H2 { response, worker: worker.clone(), window: window.clone() };
            Ok((answer, Sender::H2(h2::Sender::new(stream, backlog))))
        }
        SharedProtocol::H3(link) => {
            let (send, recv) = lease.open(link).await.map_err(|error| StreamError::of_connection(error.to_string()))?;
            let limits = &worker.snapshot().limits;
            let bounds =
                Bounds { bytes: limits.header_bytes + ADDED_BYTES as usize, lines: limits.header_count + ADDED_LINES };
            let recv = h3::Receiver::new(worker, recv, link.clone(), bounds, Code::RequestCancelled);
            let mut send = h3::Sender::new(send, link.clone());
            send.send_head(fields::put_request(&request.into_parts().0), ends)?;
            match std::future::poll_fn(|cx| send.poll_settled(cx)).await {
                Err(error) if error.is_of_connection => return Err(error),
                // A peer that stops reading the request has sent a response, or resets the response stream with the
                // reason.
                Ok(()) | Err(_) => {}
            }
            Ok((Answer::H3(Some(Box::new(recv))), Sender::H3(Box::new(send))))
        }
    }
}

impl Answer {
    /// Returns the HTTP datagrams of the request, and begins to queue received ones, because they may arrive before the
    /// response. Returns `None` over HTTP/2.
    pub fn datagrams(&self) -> Option<Datagrams> {
        match self {
            Answer::H3(Some(recv)) => Some(recv.datagrams()),
            Answer::H3(None) | Answer::H2 { .. } => None,
        }
    }

    /// Returns the next head. Must not be called after the final head.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Head, StreamError>> {
        match self {
            Answer::H2 { response, worker, window } => {
                if let Poll::Ready(Some(Ok(interim))) = response.poll_informational(cx) {
                    return Poll::Ready(Ok(Head::Interim(interim)));
                }
                let response = ready!(Pin::new(response).poll(cx))?;
                let receiver = |recv| Receiver::H2(h2::Receiver::new(worker, recv, window));
                Poll::Ready(Ok(Head::Final(response.map(receiver))))
            }
            Answer::H3(recv) => {
                let Some(open) = recv else { return Poll::Ready(Err(StreamError::other("it was answered"))) };
                let Some(block) = ready!(open.poll_head(cx))? else {
                    return Poll::Ready(Err(StreamError::other("the stream ended without a response")));
                };
                let parts = match fields::read_response(block, open.bounds()) {
                    Ok(parts) => parts,
                    Err(error) => return Poll::Ready(Err(open.field_error(&error))),
                };
                if parts.status.is_informational() {
                    return Poll::Ready(Ok(Head::Interim(Response::from_parts(parts, ()))));
                }
                open.peek(cx);
                let Some(open) = recv.take() else { return Poll::Pending };
                Poll::Ready(Ok(Head::Final(Response::from_parts(parts, Receiver::H3(open)))))
            }
        }
    }
}
