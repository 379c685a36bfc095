//! Errors of the data plane: the side at fault, whether a retry is safe, and the response to the client.
//!
//! In: a failure of a session, with the peer, route or name that it concerns. Out: `side`, `retry`, `status` and a
//! label. `service::respond::failure` renders them as status, `Proxy-Status` (RFC 9209), log line and metric label.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hermes_net::host;
use hermes_net::tls::HandshakeFault;
use http::StatusCode;

use crate::metrics::Metrics;

/// The side that caused a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The client that sent the request.
    Client,
    /// The next hop, or the lookup of its name.
    Upstream,
    /// A rule of the configuration denied the request.
    Policy,
    /// This node: a limit, a bug, or exhausted resources.
    Local,
}

/// Whether a failed request may be sent again, to the same or another endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// A retry would fail again or do harm.
    Never,
    /// A retry is safe only if no byte was sent.
    IfNothingWasSent,
    /// A retry is always safe, because nothing was sent, or the peer processed nothing of it.
    Always,
}

/// A field section that exceeds the limit in the peer's SETTINGS (RFC 9114, section 4.2.2; RFC 9113, section 6.5.2).
/// Both values are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{size} bytes, including 32 for each line; the limit is {most}")]
pub struct Oversize {
    pub size: u64,
    pub most: u64,
}

/// What a client and the log read of overload.
const OVERLOADED: &str = "this node is overloaded; try again later";

/// The reason why a session failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The decision about the session was a denial.
    #[error("{reason}")]
    Denied {
        /// The status for the client.
        status: StatusCode,
        /// The reason for the denial, for logs and responses.
        reason: String,
        /// The error type of RFC 9209.
        label: &'static str,
    },
    /// The request is malformed.
    #[error("malformed request: {0}")]
    Malformed(String),
    /// The body has a transfer coding that this node cannot decode.
    #[error("transfer coding {0} is not understood; send chunked alone")]
    Coding(String),
    /// The head has more header lines than the limit, which is the value.
    #[error("more than {0} header lines; `limits.header-count` of this node allows no more")]
    TooManyLines(usize),
    /// The request's head or trailers exceed the limit that the next hop announced.
    #[error("the request's head or trailers are too large for the next hop: {0}")]
    TooLarge(Oversize),
    /// The response's head or trailers exceed the limit that the client announced.
    #[error("the head or trailers of the response are too large for the client: {0}")]
    AnswerTooLarge(Oversize),
    /// The action of the route cannot serve this kind of session.
    #[error("route {route} cannot serve a {kind} session")]
    Unsuitable {
        /// The route's name.
        route: Arc<str>,
        /// The session's kind.
        kind: &'static str,
    },
    /// Every endpoint of the upstream is unhealthy or ejected.
    #[error("upstream {upstream} has no healthy endpoint")]
    NoEndpoint {
        /// The upstream's name.
        upstream: Arc<str>,
    },
    /// A node that only dials out has no reverse connection to this node.
    #[error("no reverse connection from node {node}")]
    NotConnected {
        /// The node's name.
        node: Arc<str>,
    },
    /// A name does not resolve.
    #[error("{0}")]
    Resolve(String),
    /// The addresses of the name are outside the route's `reach`.
    #[error("{host} {why}: this route may not dial it")]
    Unreachable {
        /// The name or address.
        host: String,
        /// The reason why the address must not be dialled, as a predicate of `host`.
        why: &'static str,
    },
    /// The connection to the endpoint failed.
    #[error("cannot connect to {peer}: {source}")]
    Connect {
        /// The endpoint, with its upstream.
        peer: Arc<str>,
        /// The error of the operating system or of TLS.
        source: Arc<io::Error>,
    },
    /// The endpoint did not complete a step of the connection setup in time.
    #[error("{peer} did not {missing} within {after:?}")]
    ConnectTimeout {
        /// The endpoint, with its upstream.
        peer: Arc<str>,
        /// The step that was not completed: [`NO_CONNECTION`] or [`NO_SETTINGS`].
        missing: &'static str,
        /// The route's `timeout.connect`.
        after: Duration,
    },
    /// The endpoint does not support the request (no extended CONNECT, or not this version).
    #[error("{peer} {reason}")]
    Incapable {
        /// The endpoint, with its upstream.
        peer: Arc<str>,
        /// The feature that the endpoint lacks, as a predicate of `peer`.
        reason: &'static str,
    },
    /// The connection or stream to the endpoint failed during the session.
    #[error("connection to {peer} failed: {reason}")]
    Broken {
        /// The endpoint, with its upstream.
        peer: Arc<str>,
        /// The reason, in the terms of the protocol.
        reason: String,
        /// The peer rejected the stream before processing it (HTTP/2 REFUSED_STREAM, GOAWAY).
        unprocessed: bool,
    },
    /// The next proxy refused a tunnel.
    #[error("{peer} refused the tunnel with status {status}")]
    Refused {
        /// The endpoint, with its upstream.
        peer: Arc<str>,
        /// The status of its response.
        status: StatusCode,
    },
    /// No expected byte arrived, or none could be sent, for this time.
    #[error("no progress for {0:?}")]
    NoProgress(Duration),
    /// The client sent no byte of its request body for this time.
    #[error("the client sent nothing more of its request for {0:?}")]
    ClientStalled(Duration),
    /// No byte was transferred in either direction for this time.
    #[error("idle for {0:?}")]
    Idle(Duration),
    /// The rate limit towards the route's upstream does not admit the request.
    #[error("rate limit of route {route}: {why}")]
    RateLimited {
        /// The route's name.
        route: Arc<str>,
        /// The limit that was reached.
        why: &'static str,
    },
    /// A request or response in custody failed.
    #[error("in custody of {peer}: {reason}")]
    Custody {
        /// The next node, with its upstream.
        peer: Arc<str>,
        /// The status for the client.
        status: StatusCode,
        /// The reason that the failing node reported.
        reason: Arc<str>,
        /// The text that [`Error::public`] returns.
        public: Option<&'static str>,
    },
    /// The client closed the connection or reset its stream.
    #[error("the client ended the stream early: {0}")]
    ClientGone(String),
    /// A limit of this node was reached. The value names it.
    #[error("limit reached: {0}")]
    Limit(&'static str),
    /// This node is overloaded, and refused the session before it did anything for it.
    #[error("{OVERLOADED}")]
    Overloaded,
    /// The configuration changed, and no longer permits the session.
    #[error("ended by reconfiguration: {0}")]
    Reconfigured(String),
    /// The node is shutting down and the drain timeout has passed.
    #[error("this node is shutting down")]
    Draining,
    /// A device of this node was deleted while sessions used it.
    #[error("device {device} was deleted by another program")]
    DeviceGone {
        /// The device's name.
        device: Arc<str>,
    },
    /// A bug, or a failure of the operating system.
    #[error("internal error: {0}")]
    Internal(String),
}

/// The RFC 9209 error type of a request that this node has forwarded and received again.
pub const LOOP: &str = "proxy_loop_detected";

/// A value of `missing` in [`Error::ConnectTimeout`]: the connection, with its TLS or QUIC handshake, was not
/// completed.
pub const NO_CONNECTION: &str = "accept a connection";
/// A value of `missing` in [`Error::ConnectTimeout`]: the peer of an HTTP/2 or HTTP/3 connection sent no SETTINGS.
pub const NO_SETTINGS: &str = "send its SETTINGS";

impl Error {
    /// Returns the error for a connection that could not be opened. The peer is at fault, unless this node has no file
    /// descriptor left.
    pub fn no_connection(metrics: &Metrics, peer: &Arc<str>, source: io::Error) -> Self {
        if host::is_lack(&source) {
            metrics.limit("descriptors");
            return Error::Limit("open files: `ulimit -n`, LimitNOFILE= of systemd");
        }
        Error::Connect { peer: peer.clone(), source: Arc::new(source) }
    }

    /// Returns a text that any client may see: it names the remedy and reveals nothing about the network. Returns
    /// `None` if the error has no such text.
    pub fn public(&self) -> Option<&'static str> {
        match self {
            Error::Custody { public, .. } => *public,
            Error::Overloaded => Some(OVERLOADED),
            _ => None,
        }
    }

    /// Returns the side that caused the failure.
    pub fn side(&self) -> Side {
        match self {
            Error::Malformed(_)
            | Error::Coding(_)
            | Error::TooManyLines(_)
            | Error::TooLarge(_)
            | Error::AnswerTooLarge(_)
            | Error::ClientStalled(_)
            | Error::ClientGone(_) => Side::Client,
            Error::Denied { .. } | Error::Unreachable { .. } | Error::Reconfigured(_) | Error::Unsuitable { .. } => {
                Side::Policy
            }
            Error::Limit(_)
            | Error::Overloaded
            | Error::RateLimited { .. }
            | Error::DeviceGone { .. }
            | Error::Internal(_)
            | Error::Draining => Side::Local,
            _ => Side::Upstream,
        }
    }

    /// Returns whether the request may be sent again.
    pub fn retry(&self) -> Retry {
        match self {
            Error::Connect { .. }
            | Error::ConnectTimeout { .. }
            | Error::NotConnected { .. }
            | Error::Broken { unprocessed: true, .. } => Retry::Always,
            Error::Broken { .. } => Retry::IfNothingWasSent,
            _ => Retry::Never,
        }
    }

    /// True if no peer received the request in this attempt, or none processed it, so that another path may be tried.
    pub fn is_unsent(&self) -> bool {
        match self {
            Error::NoEndpoint { .. } | Error::Resolve(_) | Error::Overloaded => true,
            Error::Denied { label, .. } => *label == LOOP,
            _ => self.retry() == Retry::Always,
        }
    }

    /// Returns the status of the response that reports this error, if no response head was sent yet.
    pub fn status(&self) -> StatusCode {
        match self {
            Error::Denied { status, .. } | Error::Custody { status, .. } => *status,
            Error::Malformed(_) | Error::ClientGone(_) => StatusCode::BAD_REQUEST,
            Error::ClientStalled(_) => StatusCode::REQUEST_TIMEOUT,
            Error::Unreachable { .. } => StatusCode::FORBIDDEN,
            Error::ConnectTimeout { .. } | Error::NoProgress(_) | Error::Idle(_) => StatusCode::GATEWAY_TIMEOUT,
            Error::NoEndpoint { .. }
            | Error::NotConnected { .. }
            | Error::Limit(_)
            | Error::Overloaded
            | Error::RateLimited { .. }
            | Error::Draining
            | Error::Reconfigured(_) => StatusCode::SERVICE_UNAVAILABLE,
            Error::Unsuitable { .. } | Error::Coding(_) => StatusCode::NOT_IMPLEMENTED,
            Error::TooManyLines(_) | Error::TooLarge(_) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Error::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Error::Refused { status, .. } if status.is_client_error() || status.is_server_error() => *status,
            _ => StatusCode::BAD_GATEWAY,
        }
    }

    /// Returns the error type of RFC 9209, section 2.3. It is also the label in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Error::Denied { label, .. } => label,
            Error::Malformed(_)
            | Error::Coding(_)
            | Error::TooManyLines(_)
            | Error::TooLarge(_)
            | Error::ClientStalled(_)
            | Error::ClientGone(_) => "http_request_error",
            Error::AnswerTooLarge(_) => "http_response_header_section_size",
            Error::Unsuitable { .. } => "http_protocol_error",
            Error::NoEndpoint { .. } | Error::NotConnected { .. } | Error::DeviceGone { .. } => {
                "destination_unavailable"
            }
            Error::Resolve(_) => "dns_error",
            Error::Unreachable { .. } => "destination_ip_prohibited",
            Error::Connect { source, .. } => connect_label(source),
            Error::ConnectTimeout { .. } => "connection_timeout",
            Error::Incapable { .. } => "http_protocol_error",
            Error::Broken { .. } => "connection_terminated",
            Error::Refused { .. } => "http_upgrade_failed",
            Error::Custody { status: StatusCode::GATEWAY_TIMEOUT, .. } => "http_response_timeout",
            Error::Custody { .. } => "destination_unavailable",
            Error::NoProgress(_) => "http_response_timeout",
            Error::Idle(_) => "connection_read_timeout",
            Error::Limit(_) | Error::Overloaded | Error::RateLimited { .. } => "connection_limit_reached",
            Error::Reconfigured(_) => "proxy_configuration_error",
            Error::Draining => "proxy_internal_response",
            Error::Internal(_) => "proxy_internal_error",
        }
    }
}

fn connect_label(source: &io::Error) -> &'static str {
    match HandshakeFault::of(source) {
        Some(HandshakeFault::Certificate) => return "tls_certificate_error",
        Some(HandshakeFault::Protocol) => return "tls_protocol_error",
        None => {}
    }
    match source.kind() {
        io::ErrorKind::ConnectionRefused => "connection_refused",
        io::ErrorKind::TimedOut => "connection_timeout",
        _ => "destination_ip_unroutable",
    }
}
