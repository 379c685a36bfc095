//! A capture without a tunnel, or a name's: what the program's log says of it.
//!
//! In: how each try and each tunnel ended. Out: a warning with the reason and what to do, at once and then seldom for as
//! long as it lasts; a word when it is over. Never: a warning of what this node has ended itself.

use std::cell::RefCell;
use std::fmt::Display;
use std::io;
use std::time::Duration;

use hermes_model::snapshot::Listener;
use hermes_net::tls::Fault;
use http::Response;

use crate::body::ResponseBody;
use crate::error::Error;
use crate::headers::PROXY_STATUS;
use crate::live::Entry;
use crate::seldom::Seldom;
use crate::worker::Worker;

/// Between two warnings of one outage.
const APART: Duration = Duration::from_secs(60);
/// A tunnel that has lasted so long is one: its far end has had the time to refuse it.
pub(super) const SETTLED: Duration = Duration::from_secs(1);

/// What to do where another node says no.
const THEIRS: &str =
    "ask `hermes explain --kind ip --network` (or `--authority`) with the document of the node that says so";

/// Why there is no tunnel.
pub(super) struct Lost {
    reason: String,
    remedy: &'static str,
}

impl Lost {
    /// In words, without a remedy.
    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    /// One that was not opened, or broke, for this reason. `None` where this node wanted it so.
    pub(super) fn by(error: &Error) -> Option<Self> {
        let remedy = match error {
            Error::Idle(_) | Error::Reconfigured(_) | Error::Draining => return None,
            Error::Denied { .. } => {
                "ask `hermes explain --kind ip --network` (or `--authority`) with this node's document which route it takes"
            }
            Error::Unsuitable { .. } => "give the route an upstream, or `terminate: {tun: ...}`",
            Error::Connect { source, .. } => unconnected(source),
            Error::ConnectTimeout { .. } => {
                "nothing answers there: see whether that machine is up and the endpoint is its own; if so, a firewall \
                 between may drop what is sent to that port"
            }
            Error::Resolve(_) => {
                "see whether the name in the upstream's endpoint is right, and this machine's DNS answers"
            }
            Error::NoEndpoint { .. } => {
                "see this log, and the metric hermes_upstream_connect_failures, for what failed before"
            }
            Error::NotConnected { .. } => "see whether that node runs, and dials this one",
            Error::Incapable { .. } => "see whether that is a node, and the upstream's `protocol` is right",
            Error::Refused { .. } => THEIRS,
            Error::DeviceGone { .. } => "it is made again; see who deletes it (`ip monitor link`)",
            Error::Limit(_) => "raise that limit in `limits`",
            _ => "see the log of the next node, and whether it runs",
        };
        Some(Self { reason: error.to_string(), remedy })
    }

    /// One that was answered, but not opened.
    pub(super) fn answered(response: &Response<ResponseBody>) -> Option<Self> {
        let entry = response.body().entry();
        if let Some(error) = entry.failure() {
            return Self::by(&error);
        }
        let peer = entry.peer.borrow().clone().unwrap_or_else(|| "a route of this node".into());
        let status = response.status();
        let theirs = response.headers().get(PROXY_STATUS).and_then(|said| said.to_str().ok());
        let theirs = theirs.map(|said| format!(" ({said})")).unwrap_or_default();
        Some(Self { reason: format!("{peer} answers {status}{theirs}"), remedy: THEIRS })
    }

    /// One that was open, and is over.
    pub(super) fn over(entry: &Entry) -> Option<Self> {
        match entry.failure().or_else(|| entry.end.get()) {
            Some(error) => Self::by(&error),
            None => {
                let peer = entry.peer.borrow().clone().unwrap_or_else(|| "the far end".into());
                let remedy = "see the log of the next node, and whether it runs";
                Some(Self { reason: format!("{peer} has ended it"), remedy })
            }
        }
    }
}

/// What helps where no connection could be made.
fn unconnected(source: &io::Error) -> &'static str {
    if Fault::of(source).is_some() {
        return "see whether the upstream's `tls` names that node, and both certificates are of one overlay and not over";
    }
    match source.kind() {
        io::ErrorKind::ConnectionRefused => {
            "nothing listens there, or a firewall there refuses it: see whether that node runs, and the endpoint's port is its \
             listener's"
        }
        io::ErrorKind::NetworkUnreachable => {
            "this machine has no way there: see whether it is online, and `ip route get` with that address"
        }
        io::ErrorKind::HostUnreachable => {
            "a router, or the network there, says that nobody has that address: see whether that machine is up, and the \
             endpoint's address is right"
        }
        io::ErrorKind::PermissionDenied => "this machine forbids it: see its own firewall and routes (`prohibit`)",
        _ => "see whether the upstream's endpoint, `protocol` and `tls` are right, and that node runs",
    }
}

/// Of one capture; or of all names of one.
#[derive(Default)]
pub(super) struct Outage {
    /// What was told, while it lasts. Another reason is news: whoever mends one thing learns of the next.
    told: RefCell<Vec<(String, Seldom)>>,
}

/// Reasons of one outage that are told of each by itself. Names may have many; with more, all others are as one.
const MOST_REASONS: usize = 8;

impl Outage {
    /// It was told of.
    pub(super) fn lasts(&self) -> bool {
        !self.told.borrow().is_empty()
    }

    /// There is no tunnel, or none any more, to `whom`: a network, or a name.
    pub(super) fn goes_on(&self, worker: &Worker, listener: &Listener, whom: &dyn Display, lost: &Lost) {
        let Lost { reason, remedy } = lost;
        let mut told = self.told.borrow_mut();
        let known = told.iter().position(|(known, _)| known == reason);
        if known.is_none() && told.len() < MOST_REASONS {
            told.push((reason.clone(), Seldom::every(APART)));
        }
        let at = known.unwrap_or(told.len() - 1);
        if let Some(untold) = told[at].1.happened(worker.now()) {
            tracing::warn!(
                listener = %listener.name, network = %whom, %reason, %remedy, untold,
                "no tunnel: what the device is sent for it is dropped until there is one"
            );
        }
    }

    /// There is one again where there was none for this reason; `None`: for whichever.
    pub(super) fn ends(&self, listener: &Listener, whom: &dyn Display, reason: Option<&str>) {
        self.told.borrow_mut().retain(|(known, _)| reason.is_some_and(|reason| reason != known));
        tracing::info!(listener = %listener.name, network = %whom, "packets are captured again");
    }
}
