//! Custody in sessions: requests that a node stores and answers for, until the next node does.
//!
//! In: requests of routes with `custody:`, and channels from and to neighbours. Out: the same requests and responses,
//! byte for byte after their heads, over paths whose links are never up together.
//! Never: what is stored and for how long; that is `hermes-custody`.
//!
//! `forward` sends a session's request by custody, `arrived` serves what a neighbour sent, `channel` carries records
//! between neighbours, `keeper` dials them.

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
