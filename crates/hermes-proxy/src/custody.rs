//! Custody in sessions: a node stores a request or response and is responsible for it until the next node acknowledges
//! it.
//!
//! In: requests of routes with `custody:`, and channels from and to neighbours. Out: the same requests and responses,
//! byte for byte after their heads, over paths whose links are never up together. Never: the stored bytes and their
//! lifetime; that is `hermes-custody`.
//!
//! `forward` sends a session's request by custody, `channel` carries records between neighbours, `dialer` dials them.
//! `session/custody_channel.rs` accepts channels, and `session/custody_exchange.rs` serves exchanges of neighbours.

pub(crate) mod channel;
pub(crate) mod dialer;
pub(crate) mod forward;
pub(crate) mod link;
pub(crate) mod message;
pub(crate) mod tunnel;

use std::sync::Arc;

use hermes_custody::NO_CHANNEL;
pub(crate) use hermes_custody::OUTCOME_UNKNOWN;
pub(crate) use hermes_custody::service::Failure;
use http::StatusCode;

use hermes_transport::error::Error;

/// The error for a failure that a node with custody reports.
pub(crate) fn error_of(peer: &Arc<str>, failure: &Failure) -> Error {
    let status = StatusCode::from_u16(failure.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let public = if failure.reason.starts_with(OUTCOME_UNKNOWN) {
        Some(
            "outcome unknown: the request was sent to its origin, and the last node was restarted before it had the response; check whether it took effect before you repeat it",
        )
    } else if failure.reason.starts_with(NO_CHANNEL) {
        Some("custody deadline exceeded: the next node was unreachable or refused the exchange")
    } else if status == StatusCode::GATEWAY_TIMEOUT {
        Some("custody deadline exceeded: no path was up for long enough")
    } else {
        None
    };
    Error::Custody { peer: peer.clone(), status, reason: failure.reason.clone(), public }
}
