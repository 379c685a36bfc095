//! A request on an HTTP/2 or HTTP/3 stream: its head is sent, its response is awaited.
//!
//! In: a lease of a shared connection, and a head. Out: the sending half for the body, and the response: interim
//! responses, then the final one with the receiving half. Never: a body.

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

/// A response that is awaited.
pub enum Answer {
    H2 {
        response: ::h2::client::ResponseFuture,
        worker: Rc<Outbound>,
        window: Rc<Window>,
    },
    /// An HTTP/3 stream. `None` once the final head was read.
    H3(Option<Box<h3::Receiver>>),
}

/// A head of the response.
pub enum Head {
    /// An interim response; more heads follow.
    Interim(Response<()>),
    Final(Response<Receiver>),
}

/// Sends a head on a new stream; `ends` if there is no body.
///
/// # Errors
/// The connection takes no further stream, or its peer no head of this size. Nothing was sent.
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
                // A peer that stops reading the request has answered, or the end of its response says why.
                Ok(()) | Err(_) => {}
            }
            Ok((Answer::H3(Some(Box::new(recv))), Sender::H3(Box::new(send))))
        }
    }
}

impl Answer {
    /// The HTTP datagrams of the request, if its protocol has them; they are queued from now on. They may overtake the
    /// response.
    pub fn datagrams(&self) -> Option<Datagrams> {
        match self {
            Answer::H3(Some(recv)) => Some(recv.datagrams()),
            Answer::H3(None) | Answer::H2 { .. } => None,
        }
    }

    /// The next head. Must not be polled after the final one.
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
