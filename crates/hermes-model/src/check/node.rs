//! Checks the settings of the node as a whole.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::context::Context;
use super::overload;
use super::report::Report;
use crate::document::dispatch::DispatchSection;
use crate::document::{self, AccessLog, Document, Workers};
use crate::limits::Limits;
use crate::scalar::HumanDuration;

use crate::snapshot::{self, Dispatch, IdentityFiles, RouteIndex, Snapshot};
use crate::spiffe::{KEY, is_spiffe_segment, is_user_name};

/// Builds a snapshot without listeners, routes and upstreams.
pub(super) fn build(head: &Document, context: &Context<'_>, report: &mut Report) -> Snapshot {
    let node = report.ok_or_report(|| "node".to_owned(), node_name(&head.node));
    Snapshot {
        node: node.unwrap_or_default(),
        admin: admin(head, report),
        drain: duration(
            "drain",
            head.drain,
            document::DEFAULT_DRAIN,
            Duration::ZERO..=Duration::from_secs(3600),
            report,
        ),
        draining: head.draining,
        workers: workers(head.workers, report),
        role: head.role,
        identity: head.identity.as_ref().map(|section| identity(section, context, report)),
        revoked: head.identity.iter().flat_map(|section| revoked(section, report)).collect(),
        users: users(head, report),
        limits: limits(head, report),
        dispatch: dispatch(&head.dispatch, report),
        overload: overload::build(&head.overload, report),
        access_log: access_log(&head.access_log, context),
        state: context.optional_file("state", head.state.as_ref(), report),
        listeners: Vec::new(),
        routes: Vec::new(),
        upstreams: Vec::new(),
        index: RouteIndex::build(&[]),
        redacted: String::new(),
    }
}

/// Validates a node name, which occurs in `Via`, in certificate URIs and in metrics.
pub(super) fn node_name(text: &str) -> Result<Arc<str>, String> {
    if is_spiffe_segment(text) {
        Ok(Arc::from(text))
    } else {
        Err(format!("invalid node name {text:?}; use letters, digits, `.`, `-` and `_`, such as edge-7"))
    }
}

fn admin(head: &Document, report: &mut Report) -> Option<std::net::SocketAddr> {
    let bind = head.admin?.0;
    if !bind.ip().to_canonical().is_loopback() && !head.admin_exposed {
        report.problem(
            "admin",
            format!(
                "{bind} is not a loopback address, and the admin endpoint reveals everything about this node; \
                 use 127.0.0.1:{}, or confirm with admin-exposed: true",
                bind.port()
            ),
        );
    }
    Some(bind)
}

/// The range of a percentage in `dispatch`.
const PERCENT: RangeInclusive<u16> = 0..=1000;

/// One worker of a group, of 64 at most, stays for other listeners.
const MAX_SANDBOX: u16 = 63;

fn dispatch(section: &DispatchSection, report: &mut Report) -> Dispatch {
    let locality = section.locality;
    if let Some(size) = locality.filter(|size| !(1..=64).contains(size)) {
        report.problem("dispatch.locality", format!("{size} is out of range; use 1 to 64 workers"));
    }
    let sandbox_workers = section.sandbox_workers.unwrap_or(0);
    if sandbox_workers > MAX_SANDBOX {
        let message = format!("{sandbox_workers} is out of range; use 0 to {MAX_SANDBOX} workers");
        report.problem("dispatch.sandbox-workers", message);
    }
    let sandbox_after = duration(
        "dispatch.sandbox-after",
        section.sandbox_after,
        Duration::from_secs(2),
        Duration::from_millis(100)..=Duration::from_secs(10),
        report,
    );
    if sandbox_workers > 0 && section.mode != snapshot::DispatchMode::Directed {
        report.warning("dispatch.sandbox-workers", "has no effect in this mode; set mode: directed");
    }
    let mut percent = |key: &str, value: Option<u16>, default: u16| {
        let value = value.unwrap_or(default);
        if !PERCENT.contains(&value) {
            let (least, most) = (PERCENT.start(), PERCENT.end());
            report
                .problem(format!("dispatch.{key}"), format!("{value} is out of range; use {least} to {most} percent"));
        }
        value
    };
    Dispatch {
        mode: section.mode,
        locality,
        pin: section.pin,
        sandbox_workers,
        sandbox_after,
        session_weight: percent("session-weight", section.session_weight, 100),
        connections_offset: percent("connections-offset", section.connections_offset, 20),
        pending_offset: percent("pending-offset", section.pending_offset, 50),
        hung_after: duration(
            "dispatch.hung-after",
            section.hung_after,
            Duration::from_millis(5),
            Duration::from_millis(1)..=Duration::from_secs(60),
            report,
        ),
    }
}

fn workers(workers: Workers, report: &mut Report) -> Option<usize> {
    match workers {
        Workers::Auto => None,
        Workers::Count(count @ 1..=1024) => usize::try_from(count).ok(),
        Workers::Count(count) => {
            report.problem("workers", format!("{count} is out of range; use auto or 1 to 1024"));
            None
        }
    }
}

fn identity(section: &document::Identity, context: &Context<'_>, report: &mut Report) -> IdentityFiles {
    for (key, path) in [("cert", &section.cert), ("key", &section.key), ("ca", &section.ca)] {
        if path.is_empty() {
            report.problem(format!("identity.{key}"), "empty path; add the name of a PEM file");
        }
    }
    IdentityFiles { cert: context.file(&section.cert), key: context.file(&section.key), ca: context.file(&section.ca) }
}

fn revoked(section: &document::Identity, report: &mut Report) -> Vec<Arc<str>> {
    // SHA-256 in base64url.
    let is_name = |digest: &str| {
        digest.len() == 43 && digest.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    for (at, key) in section.revoked.iter().enumerate() {
        if !key.strip_prefix(KEY).is_some_and(is_name) {
            let message = format!("invalid key name {key:?}; use {KEY} and 43 characters of base64url (RFC 6920)");
            report.problem(format!("identity.revoked[{at}]"), message);
        }
    }
    section.revoked.iter().map(|key| Arc::from(key.as_str())).collect()
}

fn users(head: &Document, report: &mut Report) -> HashMap<Arc<str>, Vec<Arc<str>>> {
    let mut bound = HashMap::new();
    for (node, users) in &head.users {
        let at = || format!("users.{node}");
        let name = report.ok_or_report(at, node_name(node));
        for user in users.iter().filter(|user| *user != "*" && !is_user_name(user)) {
            report.problem(
                at(),
                format!("invalid user name {user:?}; use visible ASCII characters without commas and quotes, or *"),
            );
        }
        bound.extend(name.map(|name| (name, users.iter().map(|user| Arc::from(user.as_str())).collect())));
    }
    bound
}

fn limits(head: &Document, report: &mut Report) -> Limits {
    let limits = head.limits.build(&mut |name, message| report.problem(format!("limits.{name}"), message));
    if limits.quic_keep_alive > limits.quic_idle / 2 {
        let max = HumanDuration(limits.quic_idle / 2);
        let message =
            format!("connections would time out before the first keep-alive; use at most {max}, half of `quic-idle`");
        report.problem("limits.quic-keep-alive".to_owned(), message);
    }
    if limits.quic_initial_mtu > limits.quic_max_mtu {
        let message = "must not exceed `quic-max-mtu`";
        report.problem("limits.quic-initial-mtu".to_owned(), message.to_owned());
    }
    limits
}

fn access_log(section: &AccessLog, context: &Context<'_>) -> snapshot::AccessLog {
    match section {
        AccessLog::Stdout => snapshot::AccessLog::Stdout,
        AccessLog::Stderr => snapshot::AccessLog::Stderr,
        AccessLog::Off => snapshot::AccessLog::Off,
        AccessLog::File(path) => snapshot::AccessLog::File(context.file(path)),
    }
}

/// Returns a duration or its default, and reports a value out of range.
pub(super) fn duration(
    at: &str,
    written: Option<HumanDuration>,
    default: Duration,
    range: RangeInclusive<Duration>,
    report: &mut Report,
) -> Duration {
    let value = written.map_or(default, |period| period.0);
    if !range.contains(&value) {
        report.problem(
            at,
            format!(
                "{} is out of range; must be {} to {}",
                HumanDuration(value),
                HumanDuration(*range.start()),
                HumanDuration(*range.end())
            ),
        );
    }
    value
}
