//! Documents, validation, snapshots and the decision of Hermes, as pure functions.
//!
//! In: the text of a node document, and the attributes of a session.
//! Out: every problem of the document with its path, or a `Snapshot`; and a `Decision`.
//! Never: I/O, time, randomness, async.

pub mod authority;
pub mod check;
pub mod decide;
pub mod dial_scope;
pub mod document;
pub mod explain;
pub mod facts;
pub mod field_collision;
pub mod limits;
pub mod matcher;
mod path;
pub mod pattern;
pub mod rendezvous;
pub mod rewrite;
pub mod scalar;
pub mod snapshot;
pub mod spiffe;
pub mod ssrf_guard;
#[cfg(test)]
mod test_fixtures;
pub mod trust;
pub mod via;

pub use authority::Authority;
pub use check::identity_claims::unproven;
pub use check::packets::unrouted;
pub use check::yaml_position::{Located, Position, Positions};
pub use check::{Checked, Problem, check, check_json};
pub use decide::{Decision, Deny, DenyReason, decide};
pub use explain::{Explanation, explain, explain_arrival};
pub use facts::{Facts, Kind, Peer, Trust};
pub use path::{decode_unreserved, without_single_dots};
pub use snapshot::Snapshot;
