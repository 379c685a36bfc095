//! What controllers and nodes say to each other: gRPC, `hermes.control.v1.Control`.
//!
//! In and out: the messages, and the paths of the methods. `docs/reference/control.proto` is the same for other programs; a
//! test compares.
//! Never: what is done about them. That is [`crate::push`] at the controller, and the node itself.

use bytes::Bytes;

/// A node with a token gets its first certificate. Asked without one.
pub const ENROL: &str = "/hermes.control.v1.Control/Enrol";
/// A node gets a certificate in the place of its own, for the same key.
pub const RENEW: &str = "/hermes.control.v1.Control/Renew";
/// A node hears what it is to run, and says what it runs, for as long as both live.
pub const FOLLOW: &str = "/hermes.control.v1.Control/Follow";

/// The largest message. A document of 100,000 routes has some 30 MB.
pub const MAX_MESSAGE: usize = 64 << 20;
/// The largest one that a controller takes from a node.
pub const MAX_REPORT: usize = 64 << 10;
/// The largest one from an Envoy, which says of which extensions it is made, and which resources it has.
pub const MAX_REQUEST: usize = 8 << 20;

/// Asks for a first certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct EnrolRequest {
    /// The token, whole.
    #[prost(string, tag = "1")]
    pub token: String,
    /// PKCS #10 (DER), signed with the node's own key.
    #[prost(bytes = "bytes", tag = "2")]
    pub request: Bytes,
}

/// Asks for the next certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RenewRequest {
    /// PKCS #10 (DER), signed with the key of the certificate that this connection shows.
    #[prost(bytes = "bytes", tag = "1")]
    pub request: Bytes,
}

/// A certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Issued {
    /// Whose it is: the node's name.
    #[prost(string, tag = "1")]
    pub node: String,
    /// The certificate, and those that go with it (PEM).
    #[prost(string, tag = "2")]
    pub certificate: String,
    /// Certificates of the authorities that the node is to trust (PEM).
    #[prost(string, tag = "3")]
    pub authorities: String,
}

/// What a node runs. The first one comes at once, the next ones whenever it has tried a document.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Report {
    /// SHA-256 of the document that it runs; empty where it runs none.
    #[prost(bytes = "bytes", tag = "1")]
    pub running: Bytes,
    /// The revision of the document that it has tried last; 0 where there was none.
    #[prost(uint64, tag = "2")]
    pub tried: u64,
    /// Why it does not run that one; empty where it does.
    #[prost(string, tag = "3")]
    pub refused: String,
    /// Its version of Hermes.
    #[prost(string, tag = "4")]
    pub version: String,
    /// SHA-256 of its program, as it says.
    #[prost(bytes = "bytes", tag = "5")]
    pub program: Bytes,
    /// How many sessions it has. Said again when that is another number: soon while it drains, else now and then.
    #[prost(uint64, tag = "6")]
    pub sessions: u64,
    /// Why it is not well, as it finds; empty where it is.
    #[prost(string, tag = "7")]
    pub unwell: String,
    /// SHA-256 of each certificate that it trusts (DER). None: it takes no orders about that.
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub authorities: Vec<Bytes>,
    /// The authority key identifier of its own certificate.
    #[prost(bytes = "bytes", tag = "9")]
    pub issuer: Bytes,
    /// Another program is the node, and follows by itself: this one has its certificate, and nothing else.
    #[prost(bool, tag = "10")]
    pub identity_only: bool,
    /// The revoked keys that the node keeps, each with a controller's proof. In the first report, and in further ones for
    /// keys that it has no room for.
    #[prost(message, repeated, tag = "11")]
    pub revoked: Vec<Revocation>,
    /// The highest revision that the node was ever given, and a controller's proof of it. Only in the first report.
    #[prost(uint64, tag = "12")]
    pub latest: u64,
    /// The proof.
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

/// What a node is to run, or to trust.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Order {
    /// The revision of the overlay's documents.
    #[prost(uint64, tag = "1")]
    pub revision: u64,
    /// The node's document (JSON). Empty where it has none any more: it is no part of the overlay.
    #[prost(bytes = "bytes", tag = "2")]
    pub document: Bytes,
    /// What it is to trust from now on (PEM). Where this or the next one says something, nothing is said of documents.
    #[prost(string, tag = "3")]
    pub authorities: String,
    /// It is to renew its certificate now.
    #[prost(bool, tag = "4")]
    pub renew: bool,
    /// Keys that the document revokes. The node keeps them as revoked until their certificates have expired.
    #[prost(message, repeated, tag = "5")]
    pub revoked: Vec<Revocation>,
    /// Keys that were revoked and have enrolled again: the node forgets what was revoked before that.
    #[prost(message, repeated, tag = "6")]
    pub readmitted: Vec<Readmission>,
    /// HMAC of the revision by a key of the overlay's authority.
    #[prost(bytes = "bytes", tag = "7")]
    pub proof: Bytes,
}

/// A key that was revoked and has enrolled again.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Readmission {
    /// SHA-256 of the key, in hex.
    #[prost(string, tag = "1")]
    pub key: String,
    /// A revocation that ends later than this is a newer one, and stays. Milliseconds since 1970.
    #[prost(uint64, tag = "2")]
    pub until: u64,
}

impl Order {
    /// Whether it is about the node's identity, and says nothing of documents.
    pub fn is_of_identity(&self) -> bool {
        self.renew || !self.authorities.is_empty()
    }
}
