//! The protocol between controllers and nodes: gRPC, `hermes.control.v1.Control`.
//!
//! In and out: the messages, and the paths of the methods. `docs/reference/control.proto` describes the same for other
//! programs; a test compares both.
//! Never: behaviour. [`crate::push`] implements the controller's side, and the node its own.

use bytes::Bytes;

/// Issues a node's first certificate for a token. Called without a client certificate.
pub const ENROL: &str = "/hermes.control.v1.Control/Enrol";
/// Renews a node's certificate for the same key.
pub const RENEW: &str = "/hermes.control.v1.Control/Renew";
/// Streams orders to a node and its reports back, as long as the connection lasts.
pub const FOLLOW: &str = "/hermes.control.v1.Control/Follow";

/// The maximum size of a message. A document of 100,000 routes has about 30 MB.
pub const MAX_MESSAGE: usize = 64 << 20;
/// The maximum size of a message from a node.
pub const MAX_REPORT: usize = 64 << 10;
/// The maximum size of a message from an Envoy, which lists its extensions and resources.
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
    /// PKCS #10 (DER), signed with the key of the certificate that this connection shows.
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

/// A status report of a node. The first one comes at once, later ones after each document that the node has tried.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Report {
    /// SHA-256 of the document that the node runs; empty if it runs none.
    #[prost(bytes = "bytes", tag = "1")]
    pub running: Bytes,
    /// The revision of the document that the node tried last; 0 if there was none.
    #[prost(uint64, tag = "2")]
    pub tried: u64,
    /// The reason why the node does not run that document; empty if it does.
    #[prost(string, tag = "3")]
    pub refused: String,
    /// The node's version of Hermes.
    #[prost(string, tag = "4")]
    pub version: String,
    /// SHA-256 of the node's program, as the node reports it.
    #[prost(bytes = "bytes", tag = "5")]
    pub program: Bytes,
    /// The number of sessions. Repeated when it changes: soon while the node drains, otherwise now and then.
    #[prost(uint64, tag = "6")]
    pub sessions: u64,
    /// The reason why the node reports itself unhealthy; empty if it is healthy.
    #[prost(string, tag = "7")]
    pub unhealthy: String,
    /// SHA-256 of each trusted CA certificate (DER). None: the node takes no orders about CAs.
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub authorities: Vec<Bytes>,
    /// The authority key identifier of the node's certificate.
    #[prost(bytes = "bytes", tag = "9")]
    pub issuer: Bytes,
    /// The sender only keeps the node's certificate renewed. Another program is the node and follows by itself.
    #[prost(bool, tag = "10")]
    pub identity_only: bool,
    /// The revoked keys that the node keeps, each with a controller's proof. Further reports carry the keys that do not
    /// fit the first one.
    #[prost(message, repeated, tag = "11")]
    pub revoked: Vec<Revocation>,
    /// The highest revision that the node ever got. Only in the first report.
    #[prost(uint64, tag = "12")]
    pub latest: u64,
    /// A controller's proof of that revision.
    #[prost(bytes = "bytes", tag = "13")]
    pub proof: Bytes,
    /// Further reports follow with more revoked keys.
    #[prost(bool, tag = "14")]
    pub more: bool,
}

/// A revoked key. Nodes keep it with the proof, so that a controller recognises a revocation that its store has lost.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Revocation {
    /// The node that the key belonged to.
    #[prost(string, tag = "1")]
    pub node: String,
    /// SHA-256 of the public key, in hex.
    #[prost(string, tag = "2")]
    pub key: String,
    /// When the last certificate for it expires, in milliseconds since 1970.
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
    /// The node's document (JSON). Empty: the node is no longer part of the overlay.
    #[prost(bytes = "bytes", tag = "2")]
    pub document: Bytes,
    /// The CA certificates that the node must trust from now on (PEM). If this or `renew` is set, the order has no
    /// document.
    #[prost(string, tag = "3")]
    pub authorities: String,
    /// The node must renew its certificate now.
    #[prost(bool, tag = "4")]
    pub renew: bool,
    /// Revoked keys in the document. The node keeps them until their certificates have expired.
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
    /// Revocations that end later than this are newer and stay. Milliseconds since 1970.
    #[prost(uint64, tag = "2")]
    pub until: u64,
}

impl Order {
    /// True if the order concerns the node's identity, not its document.
    pub fn is_of_identity(&self) -> bool {
        self.renew || !self.authorities.is_empty()
    }
}
