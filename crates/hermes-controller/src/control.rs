//! The protocol between controllers and nodes: gRPC, `hermes.control.v1.Control`.
//!
//! In and out: the messages, and the paths of the methods. `docs/reference/control.proto` describes the same for other
//! programs; a test compares both.
//! Never: behaviour. [`crate::push`] implements the controller's side, and the node its own.

use bytes::Bytes;

/// The method that issues a node's first certificate for a token. The node calls it without a client certificate.
pub const ENROL: &str = "/hermes.control.v1.Control/Enrol";
/// The method that renews a node's certificate for the same key.
pub const RENEW: &str = "/hermes.control.v1.Control/Renew";
/// The method that streams orders to a node, and the node's reports to the controller, as long as the connection lasts.
pub const FOLLOW: &str = "/hermes.control.v1.Control/Follow";

/// The maximum size of a message, in bytes. A document of 100,000 routes has about 30 MB.
pub const MAX_MESSAGE: usize = 64 << 20;
/// The maximum size of a message from a node, in bytes.
pub const MAX_REPORT: usize = 64 << 10;
/// The maximum size of a message from an Envoy, in bytes. Such a message lists the Envoy's extensions and resources.
pub const MAX_REQUEST: usize = 8 << 20;

/// Request for a first certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct EnrolRequest {
    /// The complete token.
    #[prost(string, tag = "1")]
    pub token: String,
    /// PKCS #10 (DER), signed with the node's own key.
    #[prost(bytes = "bytes", tag = "2")]
    pub request: Bytes,
}

/// Request for the next certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RenewRequest {
    /// PKCS #10 (DER), signed with the key of the client certificate of this connection.
    #[prost(bytes = "bytes", tag = "1")]
    pub request: Bytes,
}

/// An issued certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Issued {
    /// The name of the node.
    #[prost(string, tag = "1")]
    pub node: String,
    /// The certificate and its intermediates (PEM).
    #[prost(string, tag = "2")]
    pub certificate: String,
    /// The CA certificates that the node must trust (PEM).
    #[prost(string, tag = "3")]
    pub authorities: String,
}

/// A status report of a node. The node sends the first report at once, and another after each document that it has
/// tried.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Report {
    /// SHA-256 of the document that the node runs; empty if it runs none.
    #[prost(bytes = "bytes", tag = "1")]
    pub running: Bytes,
    /// The revision of the document that the node tried last; 0 if there was none.
    #[prost(uint64, tag = "2")]
    pub tried: u64,
    /// The reason why the node does not run the document of the revision `tried`; empty if it does.
    #[prost(string, tag = "3")]
    pub refused: String,
    /// The node's version of Hermes.
    #[prost(string, tag = "4")]
    pub version: String,
    /// SHA-256 of the node's program, as the node reports it.
    #[prost(bytes = "bytes", tag = "5")]
    pub program: Bytes,
    /// The number of sessions. The node reports a change soon while it drains, and otherwise at longer intervals.
    #[prost(uint64, tag = "6")]
    pub sessions: u64,
    /// The reason why the node reports itself unhealthy; empty if it is healthy.
    #[prost(string, tag = "7")]
    pub unhealthy: String,
    /// SHA-256 of each trusted CA certificate (DER). Empty if the node does not support orders about CAs.
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub authorities: Vec<Bytes>,
    /// The authority key identifier of the node's certificate.
    #[prost(bytes = "bytes", tag = "9")]
    pub issuer: Bytes,
    /// True if the sender only renews the node's certificate. Another program, such as Envoy, is the node, and receives
    /// its configuration on a stream of its own.
    #[prost(bool, tag = "10")]
    pub identity_only: bool,
    /// The revoked keys that the node stores, each with a controller's proof. Further reports carry the keys that do
    /// not fit in the first report.
    #[prost(message, repeated, tag = "11")]
    pub revoked: Vec<Revocation>,
    /// The highest revision that the node ever received. The node sends it only in the first report.
    #[prost(uint64, tag = "12")]
    pub latest: u64,
    /// A controller's proof of the revision `latest`.
    #[prost(bytes = "bytes", tag = "13")]
    pub proof: Bytes,
    /// True if further reports with more revoked keys follow.
    #[prost(bool, tag = "14")]
    pub more: bool,
}

/// A revoked key. Nodes store it with the proof, so that a controller can recover a revocation that its store has lost.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Revocation {
    /// The node to which the key belonged.
    #[prost(string, tag = "1")]
    pub node: String,
    /// SHA-256 of the public key, in hex.
    #[prost(string, tag = "2")]
    pub key: String,
    /// When the last certificate for the key expires, in milliseconds since 1970.
    #[prost(uint64, tag = "3")]
    pub until: u64,
    /// HMAC of these fields, under a key derived from that of the overlay's CA.
    #[prost(bytes = "bytes", tag = "4")]
    pub proof: Bytes,
}

/// An order: a document to run, or CAs to trust.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Order {
    /// The revision of the overlay's documents.
    #[prost(uint64, tag = "1")]
    pub revision: u64,
    /// The node's document (JSON); empty if the node is no longer part of the overlay.
    #[prost(bytes = "bytes", tag = "2")]
    pub document: Bytes,
    /// The CA certificates that the node must trust from now on (PEM). If this or `renew` is set, the order has no
    /// document.
    #[prost(string, tag = "3")]
    pub authorities: String,
    /// True if the node must renew its certificate now.
    #[prost(bool, tag = "4")]
    pub renew: bool,
    /// Revoked keys in the document. The node stores them until their certificates have expired.
    #[prost(message, repeated, tag = "5")]
    pub revoked: Vec<Revocation>,
    /// Readmitted keys: the node forgets their earlier revocations.
    #[prost(message, repeated, tag = "6")]
    pub readmitted: Vec<Readmission>,
    /// HMAC of the revision, under a key derived from that of the overlay's CA.
    #[prost(bytes = "bytes", tag = "7")]
    pub proof: Bytes,
}

/// A readmitted key: it was revoked and has enrolled again.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Readmission {
    /// SHA-256 of the key, in hex.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The node retains revocations whose `until` is later than this, because they are newer. In milliseconds since
    /// 1970.
    #[prost(uint64, tag = "2")]
    pub until: u64,
}

impl Order {
    /// True if the order concerns the node's identity, not its document.
    pub fn is_of_identity(&self) -> bool {
        self.renew || !self.authorities.is_empty()
    }
}
