//! Flows that others request of this node, before it accepts or refuses them.
//!
//! In: a requested flow, whichever architecture it has. Out: its bytes, or a refusal that its requester understands.
//! Never: an acceptance before the far end of the session has accepted.

use std::future::Future;

use hermes_transport::headers;
use hermes_transport::stream::ByteStream;
use http::HeaderMap;

/// A flow that was requested, and neither accepted nor refused. Dropping it refuses it without a reason.
pub trait RequestedFlow {
    /// Waits until the requester withdraws its request. Never ready where an architecture does not tell.
    fn gone(&self) -> impl Future<Output = ()> {
        std::future::pending()
    }

    /// Accepts the flow. `None`: the requester no longer waits.
    fn accept(self) -> impl Future<Output = Option<ByteStream>>;

    /// Refuses the flow.
    fn refuse(self, refusal: Refusal);
}

/// The reason for a refusal, as far as architectures can express it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The destination, or a node on the way, refused.
    Refused,
    /// The destination is unreachable.
    Unreachable,
    /// The destination did not answer.
    Silent,
}

impl Refusal {
    /// Reads the reason from the response to a tunnel request: the error type of RFC 9209. Each node appends
    /// its own, so the first one is that of the node next to the destination.
    pub fn of(response: &HeaderMap) -> Self {
        let status = response.get(headers::PROXY_STATUS).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let cause = status.split("error=").nth(1).and_then(|rest| rest.split([';', ',', ' ']).next());
        match cause {
            Some("connection_timeout" | "http_response_timeout") => Refusal::Silent,
            Some("destination_ip_unroutable" | "destination_unavailable" | "dns_error") => Refusal::Unreachable,
            _ => Refusal::Refused,
        }
    }
}
