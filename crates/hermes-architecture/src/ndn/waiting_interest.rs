//! Interests that wait for HTTP content, and the bounds of the store that has it.
//!
//! In: nothing. Out: the types of an `ndn` listener's content. Never: behaviour.

use std::rc::Rc;

use bytes::Bytes;
use hermes_ndn::content_store::StoreLimits;
use hermes_ndn::lp::LpPacket;
use hermes_ndn::packet::Interest;
use hermes_ndn::signature::Signer;
use tokio::sync::mpsc;

/// The bounds of the HTTP content that a worker stores for consumers of NDN.
pub const STORE_LIMITS: StoreLimits =
    StoreLimits { bytes: 64 << 20, overhead: 1024, waiting: 4096, requests: 256, receiving: 64 << 20 };

/// An Interest that waits for HTTP content.
#[derive(Debug)]
pub struct WaitingInterest {
    /// The queue of the face that sent it.
    pub to_face: mpsc::Sender<Bytes>,
    /// `None` if the key of the listener cannot sign.
    pub signer: Option<Rc<Signer>>,
    /// The Interest.
    pub interest: Interest,
    /// The frame of the Interest.
    pub packet: LpPacket,
}
