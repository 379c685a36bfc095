//! The data plane's error: whose side failed, may it be tried again, what is said to the client.
//!
//! In: whatever went wrong with a session, with *which* peer, route or name it went wrong.
//! Out: `side`, `retry`, `status` and a label; `service::respond::failure` renders them as status,
//! `Proxy-Status` (RFC 9209), log line and metric label. `Display` prints one level; the record
//! prints the chain.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hermes_net::host;
use hermes_net::tls::Fault;
use http::StatusCode;

use crate::custody::{Failure, NO_CHANNEL, OUTCOME_UNKNOWN};
use crate::h3::fields::Oversize;
use crate::worker::Worker;

/// Who is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The one who sent us the request.
    Client,
    /// The one to whom we forward.
    Upstream,
    /// A rule said no.
    Policy,
    /// This node: a limit, a bug, no resources.
    Local,
}

/// May the request be tried again, elsewhere or at the same place?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// It would fail again, or do harm.
    Never,
    /// Only where not one byte of it was sent.
    IfNothingWasSent,
    /// Nothing was sent for sure.
    Always,
}

/// Why a session failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    /// `decide` said no.
    #[error("{reason}")]
    Denied {
        /// What the client gets.
        status: StatusCode,
        /// In words.
        reason: String,
        /// RFC 9209 error type.
        label: &'static str,
    },
    /// The request itself is wrong.
    #[error("malformed request: {0}")]
    Malformed(String),
    /// The body comes in a coding that cannot be taken off.
    #[error("transfer coding {0} is not understood; send chunked alone")]
    Coding(String),
    /// The head has more lines than are taken.
    #[error("more than {0} header lines; `limits.header-count` of this node allows no more")]
    TooManyLines(usize),
    /// The next hop says that it takes no head, or trailers, as large as the request's.
    #[error("the request's head or trailers are too large for the next hop: {0}")]
    TooLarge(Oversize),
    /// The client says that it takes no head, or trailers, as large as its answer's.
    #[error("the answer's head or trailers are too large for the client: {0}")]
    AnswerTooLarge(Oversize),
    /// The action of the route cannot serve this kind of session.
    #[error("route {route} cannot serve a {kind} session")]
    Unsuitable {
        /// The route's name.
        route: Arc<str>,
        /// The session's kind.
        kind: &'static str,
    },
    /// Every endpoint is unhealthy or resting.
    #[error("upstream {upstream} has no healthy endpoint")]
    NoEndpoint {
        /// The upstream's name.
        upstream: Arc<str>,
    },
    /// A node that nobody can dial has not dialled us, or is gone.
    #[error("node {node} keeps no connection to us")]
    NotConnected {
        /// The node's name.
        node: Arc<str>,
    },
    /// A name has no address.
    #[error("{0}")]
    Resolve(String),
    /// The addresses of the name are out of the route's reach.
    #[error("{host} {why}: this route does not go there")]
    Unreachable {
        /// The name or address.
        host: String,
        /// What is wrong with its address.
        why: &'static str,
    },
    /// No connection to the endpoint.
    #[error("cannot connect to {peer}: {source}")]
    Connect {
        /// Endpoint, with its upstream.
        peer: Arc<str>,
        /// The system's or TLS's reason.
        source: Arc<io::Error>,
    },
    /// The endpoint did not answer in time.
    #[error("{peer} did not {missing} within {after:?}")]
    ConnectTimeout {
        /// Endpoint, with its upstream.
        peer: Arc<str>,
        /// What was waited for.
        missing: &'static str,
        /// The route's `timeout.connect`.
        after: Duration,
    },
    /// The endpoint cannot carry what was asked (no extended CONNECT, no such version).
    #[error("{peer} {reason}")]
    Incapable {
        /// Endpoint, with its upstream.
        peer: Arc<str>,
        /// What it lacks.
        reason: &'static str,
    },
    /// The connection broke while the session was on it.
    #[error("connection to {peer} failed: {reason}")]
    Broken {
        /// Endpoint, with its upstream.
        peer: Arc<str>,
        /// In the protocol's words.
        reason: String,
        /// The peer had refused the stream before it looked at it (h2 REFUSED_STREAM, GOAWAY).
        unprocessed: bool,
    },
    /// The next proxy said no to a tunnel.
    #[error("{peer} refused the tunnel with status {status}")]
    Refused {
        /// Endpoint, with its upstream.
        peer: Arc<str>,
        /// Its answer.
        status: StatusCode,
    },
    /// Bytes were owed and none came.
    #[error("no progress for {0:?}")]
    NoProgress(Duration),
    /// The client owes bytes: the body of its request has stalled.
    #[error("the client sent nothing more of its request for {0:?}")]
    ClientStalled(Duration),
    /// No byte in either direction.
    #[error("idle for {0:?}")]
    Idle(Duration),
    /// The rate that its service allows lets it not through.
    #[error("the rate that the service of route {route} allows: {why}")]
    Paced {
        /// The route.
        route: Arc<str>,
        /// What it met.
        why: &'static str,
    },
    /// What others had in custody has come to nothing.
    #[error("in custody of {peer}: {reason}")]
    Custody {
        /// The next one, with its upstream.
        peer: Arc<str>,
        /// As it was said.
        status: StatusCode,
        /// By whoever it ended with.
        reason: Arc<str>,
    },
    /// The client went away or broke its stream.
    #[error("the client ended the stream early: {0}")]
    ClientGone(String),
    /// A bound of this node was hit.
    #[error("limit reached: {0}")]
    Limit(&'static str),
    /// The snapshot changed and the session is no longer allowed.
    #[error("ended by reconfiguration: {0}")]
    Reconfigured(String),
    /// The node stops and the drain time is over.
    #[error("this node is shutting down")]
    Draining,
    /// A device of this node was deleted under its sessions.
    #[error("device {device} is gone: somebody has deleted it")]
    DeviceGone {
        /// Its name.
        device: Arc<str>,
    },
    /// A bug or the system's fault.
    #[error("internal error: {0}")]
    Internal(String),
}

/// The label of what came round.
pub(crate) const LOOP: &str = "proxy_loop_detected";

/// What [`Error::ConnectTimeout`] misses.
pub(crate) const NO_CONNECTION: &str = "accept a connection";
pub(crate) const NO_SETTINGS: &str = "send its SETTINGS";

impl Error {
    /// There is no connection to a peer: its fault, or that of no descriptor being left here.
    pub(crate) fn no_connection(worker: &Worker, peer: &Arc<str>, source: io::Error) -> Self {
        if host::is_lack(&source) {
            worker.shared.metrics.limit("descriptors");
            return Error::Limit("open files: `ulimit -n`, LimitNOFILE= of systemd");
        }
        Error::Connect { peer: peer.clone(), source: Arc::new(source) }
    }

    /// What a node that has it in custody says of its end.
    pub(crate) fn custody(peer: &Arc<str>, failure: &Failure) -> Self {
        let status = StatusCode::from_u16(failure.status).unwrap_or(StatusCode::BAD_GATEWAY);
        Error::Custody { peer: peer.clone(), status, reason: failure.reason.clone() }
    }

    /// What everybody may know of it, beside its kind: it says what to do, and nothing of the network.
    pub(crate) fn public(&self) -> Option<&'static str> {
        match self {
            Error::Custody { reason, .. } if reason.starts_with(OUTCOME_UNKNOWN) => Some(
                "outcome unknown: the request went to its origin, and the node that asked was restarted before it had the \
                 answer; see whether it was done before you send it again",
            ),
            Error::Custody { reason, .. } if reason.starts_with(NO_CHANNEL) => {
                Some("its time in custody is over: the next node could not be reached, or refused it")
            }
            Error::Custody { status: StatusCode::GATEWAY_TIMEOUT, .. } => {
                Some("its time in custody is over: no path was there for long enough")
            }
            _ => None,
        }
    }

    /// Who is at fault.
    pub(crate) fn side(&self) -> Side {
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
            Error::Limit(_) | Error::Paced { .. } | Error::DeviceGone { .. } | Error::Internal(_) | Error::Draining => {
                Side::Local
            }
            _ => Side::Upstream,
        }
    }

    /// May it be tried again?
    pub(crate) fn retry(&self) -> Retry {
        match self {
            Error::Connect { .. }
            | Error::ConnectTimeout { .. }
            | Error::NotConnected { .. }
            | Error::Broken { unprocessed: true, .. } => Retry::Always,
            Error::Broken { .. } => Retry::IfNothingWasSent,
            _ => Retry::Never,
        }
    }

    /// Whether nothing of this attempt went to anybody: it may be made elsewhere.
    pub(crate) fn is_unsent(&self) -> bool {
        match self {
            Error::NoEndpoint { .. } | Error::Resolve(_) => true,
            Error::Denied { label, .. } => *label == LOOP,
            _ => self.retry() == Retry::Always,
        }
    }

    /// What the client gets while no response head was sent.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Error::Denied { status, .. } | Error::Custody { status, .. } => *status,
            Error::Malformed(_) | Error::ClientGone(_) => StatusCode::BAD_REQUEST,
            Error::ClientStalled(_) => StatusCode::REQUEST_TIMEOUT,
            Error::Unreachable { .. } => StatusCode::FORBIDDEN,
            Error::ConnectTimeout { .. } | Error::NoProgress(_) | Error::Idle(_) => StatusCode::GATEWAY_TIMEOUT,
            Error::NoEndpoint { .. }
            | Error::NotConnected { .. }
            | Error::Limit(_)
            | Error::Paced { .. }
            | Error::Draining
            | Error::Reconfigured(_) => StatusCode::SERVICE_UNAVAILABLE,
            Error::Unsuitable { .. } | Error::Coding(_) => StatusCode::NOT_IMPLEMENTED,
            Error::TooManyLines(_) | Error::TooLarge(_) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Error::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Error::Refused { status, .. } if status.is_client_error() || status.is_server_error() => *status,
            _ => StatusCode::BAD_GATEWAY,
        }
    }

    /// The error type of RFC 9209, section 2.3; also the metric's label.
    pub(crate) fn label(&self) -> &'static str {
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
            Error::Limit(_) | Error::Paced { .. } => "connection_limit_reached",
            Error::Reconfigured(_) => "proxy_configuration_error",
            Error::Draining => "proxy_internal_response",
            Error::Internal(_) => "proxy_internal_error",
        }
    }
}

fn connect_label(source: &io::Error) -> &'static str {
    match Fault::of(source) {
        Some(Fault::Certificate) => return "tls_certificate_error",
        Some(Fault::Protocol) => return "tls_protocol_error",
        None => {}
    }
    match source.kind() {
        io::ErrorKind::ConnectionRefused => "connection_refused",
        io::ErrorKind::TimedOut => "connection_timeout",
        _ => "destination_ip_unroutable",
    }
}
