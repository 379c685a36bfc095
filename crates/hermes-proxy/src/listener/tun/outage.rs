//! Log messages about captures without a tunnel.
//!
//! In: the outcome of each attempt and each tunnel. Out: a warning with reason and remedy, at once and then at a low
//! rate while the outage lasts; a message when it ends. Never: a warning about a tunnel that this node ended itself.

use std::cell::RefCell;
use std::fmt::Display;
use std::io;
use std::time::Duration;

use hermes_model::snapshot::Listener;
use hermes_net::tls::HandshakeFault;
use http::Response;

use crate::worker::Worker;
use hermes_transport::body::ResponseBody;
use hermes_transport::error::Error;
use hermes_transport::headers::PROXY_STATUS;
use hermes_transport::log_throttle::LogThrottle;
use hermes_transport::runtime::session::SessionEntry;

/// Minimum interval between two warnings about one outage.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// A tunnel that lasts this long counts as established, since its far end had time to refuse it.
pub(super) const SETTLED: Duration = Duration::from_secs(1);

/// The remedy for a refusal by another node.
const THEIRS: &str =
    "run `hermes explain --kind ip --network` (or `--authority`) with the document of the node that refused";

/// The reason for a missing tunnel, with its remedy.
pub(super) struct Lost {
    reason: String,
    remedy: &'static str,
}

impl Lost {
    /// The reason without the remedy.
    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    /// The reason for a tunnel that failed to open or broke. `None` if this node intended it.
    pub(super) fn by(error: &Error) -> Option<Self> {
        let remedy = match error {
            Error::Idle(_) | Error::Reconfigured(_) | Error::Draining => return None,
            Error::Denied { .. } => {
                "run `hermes explain --kind ip --network` (or `--authority`) with this node's document to see the route"
            }
            Error::Unsuitable { .. } => "give the route an upstream, or `terminate: {tun: ...}`",
            Error::Connect { source, .. } => unconnected(source),
            Error::ConnectTimeout { .. } => {
                "no response: check that the machine is up and has this address; if so, a firewall may drop packets to that port"
            }
            Error::Resolve(_) => "check the name in the upstream's endpoint, and that DNS works on this machine",
            Error::NoEndpoint { .. } => "see earlier lines of this log and the metric hermes_upstream_connect_failures",
            Error::NotConnected { .. } => "check that the node runs and dials this one",
            Error::Incapable { .. } => "check that the endpoint is a node, and the `protocol` of the upstream",
            Error::Refused { .. } => THEIRS,
            Error::DeviceGone { .. } => "the node recreates it; find the program that deletes it (`ip monitor link`)",
            Error::Limit(_) => "raise that limit in `limits`",
            _ => "check that the next node runs, and see its log",
        };
        Some(Self { reason: error.to_string(), remedy })
    }

    /// The reason for a tunnel whose request received a response other than success.
    pub(super) fn answered(response: &Response<ResponseBody>) -> Option<Self> {
        let entry = response.body().entry();
        if let Some(error) = entry.failure() {
            return Self::by(&error);
        }
        let peer = entry.peer.borrow().clone().unwrap_or_else(|| "a route of this node".into());
        let status = response.status();
        let theirs = response.headers().get(PROXY_STATUS).and_then(|said| said.to_str().ok());
        let theirs = theirs.map(|said| format!(" ({said})")).unwrap_or_default();
        Some(Self { reason: format!("{peer} responded with {status}{theirs}"), remedy: THEIRS })
    }

    /// The reason for the end of an open tunnel. `None` if this node intended it.
    pub(super) fn over(entry: &SessionEntry) -> Option<Self> {
        match entry.failure().or_else(|| entry.end.get()) {
            Some(error) => Self::by(&error),
            None => {
                let peer = entry.peer.borrow().clone().unwrap_or_else(|| "the far end".into());
                let remedy = "check that the next node runs, and see its log";
                Some(Self { reason: format!("{peer} closed the tunnel"), remedy })
            }
        }
    }
}

/// The remedy for a failed connection.
fn unconnected(source: &io::Error) -> &'static str {
    if HandshakeFault::of(source).is_some() {
        return "check that the upstream's `tls` names that node, and that both certificates belong to one overlay and have not expired";
    }
    match source.kind() {
        io::ErrorKind::ConnectionRefused => {
            "connection refused: check that the node runs and listens at that port; a firewall may also refuse connections"
        }
        io::ErrorKind::NetworkUnreachable => {
            "no route to that address: check that this machine is online, and `ip route get` with that address"
        }
        io::ErrorKind::HostUnreachable => {
            "host unreachable: check that the machine is up, and the address of the endpoint"
        }
        io::ErrorKind::PermissionDenied => {
            "this machine forbids the connection: check its firewall and routes (`prohibit`)"
        }
        _ => "check the endpoint, `protocol` and `tls` of the upstream, and that the node runs",
    }
}

/// The outage of one capture, or of all names of one capture.
#[derive(Default)]
pub(super) struct Outage {
    /// The reported reasons while the outage lasts. A new reason is reported at once: after fixing one problem, the
    /// operator sees the next.
    told: RefCell<Vec<(String, LogThrottle)>>,
}

/// Maximum number of reasons that are logged separately. Names can have many reasons; all further ones share an entry.
const MAX_LOGGED_REASONS: usize = 8;

impl Outage {
    /// True if an outage was reported and has not ended.
    pub(super) fn lasts(&self) -> bool {
        !self.told.borrow().is_empty()
    }

    /// Reports that a tunnel is still missing. `whom`: the network or the name that it leads to.
    pub(super) fn goes_on(&self, worker: &Worker, listener: &Listener, whom: &dyn Display, lost: &Lost) {
        let Lost { reason, remedy } = lost;
        let mut told = self.told.borrow_mut();
        let known = told.iter().position(|(known, _)| known == reason);
        if known.is_none() && told.len() < MAX_LOGGED_REASONS {
            told.push((reason.clone(), LogThrottle::every(WARNING_INTERVAL)));
        }
        let at = known.unwrap_or(told.len() - 1);
        if let Some(untold) = told[at].1.happened(worker.now()) {
            tracing::warn!(
                listener = %listener.name, network = %whom, %reason, %remedy, untold,
                "no tunnel; packets for it are dropped until one is open"
            );
        }
    }

    /// Reports a tunnel that is open again. `reason` is the cause that ended; `None` means all causes.
    pub(super) fn ends(&self, listener: &Listener, whom: &dyn Display, reason: Option<&str>) {
        self.told.borrow_mut().retain(|(known, _)| reason.is_some_and(|reason| reason != known));
        tracing::info!(listener = %listener.name, network = %whom, "packets are captured again");
    }
}
