//! Custody in sessions: a node stores a request or response and is responsible for it until the next node acknowledges
//! it.
//!
//! In: requests of routes with `custody:`, and channels from and to neighbours. Out: the same requests and responses,
//! byte for byte after their heads, over paths whose links are never up together. Never: the stored bytes and their
//! lifetime; that is `hermes-custody`.
//!
//! `forward` sends a session's request by custody, `arrived` serves an exchange from a neighbour, `channel` carries
//! records between neighbours, `keeper` dials them.

mod again;
mod arrived;
pub(crate) mod channel;
pub(crate) mod forward;
pub(crate) mod keeper;
mod link;
mod message;
mod tunnel;

pub(crate) use hermes_custody::service::{Failure, Office};
pub(crate) use hermes_custody::{NO_CHANNEL, OUTCOME_UNKNOWN};
pub(crate) use message::CustodyBody;
pub(crate) use tunnel::CustodyStream;
