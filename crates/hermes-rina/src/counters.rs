//! Counters of an IPC process.
//!
//! In: increments of the engine. Out: numbers since the start. Never: a label that a peer chooses.

/// Numbers since the start of the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams received.
    pub datagrams_in: u64,
    /// Datagrams sent.
    pub datagrams_out: u64,
    /// Dropped: malformed datagrams.
    pub malformed: u64,
    /// Dropped: management PDUs with a wrong tag.
    pub wrong_tag: u64,
    /// Dropped: enrolments in a DIF of another name.
    pub wrong_dif: u64,
    /// Dropped: PDUs of a peer that is not enrolled.
    pub not_enrolled: u64,
    /// Challenges sent to unverified addresses.
    pub challenges: u64,
    /// Dropped: enrolments with an old cookie, replayed or outrun by another one.
    pub stale_connect: u64,
    /// Dropped: management PDUs that answer nothing, or repeat something old.
    pub replayed: u64,
    /// Dropped: PDUs of no known flow, or with a wrong CEP-id or source address.
    pub unknown_flow: u64,
    /// Dropped: data PDUs received before.
    pub duplicate: u64,
    /// Dropped: data PDUs outside the window.
    pub outside_window: u64,
    /// Dropped: data PDUs that contradict earlier ones.
    pub inconsistent: u64,
    /// Dropped: PDUs that acknowledge something that was never sent.
    pub invalid_ack: u64,
    /// Limit reached: out-of-order ranges of a flow.
    pub range_limit: u64,
    /// Limit reached: unread bytes of all flows.
    pub receive_limit: u64,
    /// Limit reached: unacknowledged bytes of a flow, or of all flows.
    pub send_limit: u64,
    /// Limit reached: neighbours.
    pub neighbour_limit: u64,
    /// Limit reached: flows, of a neighbour or in total.
    pub flow_limit: u64,
    /// Limit reached: undecided requests of a neighbour.
    pub pending_limit: u64,
    /// Limit reached: the queue of management PDUs.
    pub control_limit: u64,
    /// Limit reached: hints to peers that are not enrolled.
    pub hint_limit: u64,
    /// Enrolments completed.
    pub enrolled: u64,
    /// Flows allocated.
    pub allocated: u64,
    /// Requests of this node that failed or were refused.
    pub allocation_failed: u64,
    /// Segments sent again.
    pub retransmitted: u64,
    /// Flows that ended by a timeout, a reset or a restart of the peer.
    pub aborted: u64,
}
