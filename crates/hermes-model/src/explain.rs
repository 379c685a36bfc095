//! Explains a decision: the routes that were considered, and the first condition of each that failed.
//!
//! In: facts and a snapshot. Out: the decision of `decide` with its reasons, as text and as JSON, plus the steps before
//! it (TLS handshake, identity) and after it (the route's reach).
//! Never: on the data path, since it tests routes one by one; name resolution.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use serde::Serialize;

use crate::decide::{Decision, decide};
use crate::dial_scope::DialScope;
use crate::facts::{Facts, Kind, Trust};
use crate::matcher::{Condition, Matcher, list};
use crate::path::readings;
use crate::scalar::HumanDuration;
use crate::snapshot::{
    Action, ClientAuth, Custody, Durable, Endpoint, Listener, ListenerProtocol, RelayMode, RelayTree, Route, Snapshot,
    Target, Terminate, Timeouts,
};
use crate::trust::{HERMES_USER, listener_user, settle};

/// Maximum number of routes shown: the last ones up to the match.
const MAX_SHOWN_ROUTES: usize = 50;

/// A decision with its reasons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Explanation {
    /// `act` or `deny`.
    pub decision: &'static str,
    /// The session in one line.
    pub session: String,
    /// Authentication of the connection, and the user.
    pub identity: String,
    /// Result of a claimed user that was not accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The captured prefix by which a listener accepts the packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<String>,
    /// Number of routes before the match that are not shown.
    pub left_out: usize,
    /// Routes in order, up to the match.
    pub routes: Vec<SkippedRoute>,
    /// The route that acts, or would act if the target were within its reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// Action of the route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// Timeouts of the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeouts: Option<EffectiveTimeouts>,
    /// Checks of the route before it dials the host that the request names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reach: Option<String>,
    /// Status of a denial; `None` if there is no request to respond to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Custody of the exchange.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custody: Option<String>,
    /// Reason for a denial.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Result for the packet in question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packet: Option<String>,
}

/// A route, and the reason why it was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SkippedRoute {
    /// Position in the document.
    pub index: usize,
    /// Name of the route.
    pub name: String,
    /// The first condition that fails; `None` for the match.
    pub failed: Option<String>,
}

/// Timeouts, with defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EffectiveTimeouts {
    /// Time for a new connection.
    pub connect: String,
    /// Time without a byte in either direction.
    pub idle: String,
    /// Time without progress while bytes are due.
    pub progress: String,
}

/// The destination network of an `ip` session.
const HERMES_NETWORK: HeaderName = HeaderName::from_static("hermes-network");

/// Explains the decision for a session that this listener accepts. `facts` are as received, before identity
/// verification; `own` tells whether an address belongs to the node.
pub fn explain_arrival(
    mut facts: Facts,
    listener: &Listener,
    snapshot: &Snapshot,
    own: &dyn Fn(IpAddr) -> bool,
) -> Explanation {
    if !passes_handshake(&facts, listener) {
        return Explanation {
            reason: Some(format!(
                "TLS handshake failure: listener {} requires a client certificate of the overlay, and this client \
                 presents none",
                listener.name
            )),
            ..before_routes(&facts)
        };
    }
    let claimed = facts.headers.get(HERMES_USER).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    if let Err(refusal) = settle(&mut facts, listener, snapshot) {
        return Explanation {
            status: Some(refusal.status().as_u16()),
            reason: Some(refusal.to_string()),
            ..before_routes(&facts)
        };
    }
    let is_captured = matches!(listener.protocol, ListenerProtocol::Tun(_) | ListenerProtocol::Ip(_));
    if let Some(value) =
        facts.network.filter(|_| is_captured).and_then(|net| HeaderValue::try_from(net.to_string()).ok())
    {
        // The listener sets the field itself for packets that it captures.
        facts.headers.insert(HERMES_NETWORK, value);
    }
    let claim = claimed.filter(|claimed| facts.user.as_deref() != Some(claimed));
    Explanation {
        claim: claim.map(|claimed| rejected_claim(&claimed, &facts, listener)),
        ..explain(&facts, snapshot, own)
    }
}

fn passes_handshake(facts: &Facts, listener: &Listener) -> bool {
    let required = listener.tls.as_ref().is_some_and(|tls| tls.client == ClientAuth::Required);
    !required || facts.trust.peer().is_some()
}

fn rejected_claim(claimed: &str, facts: &Facts, listener: &Listener) -> String {
    if listener_user(listener).is_some() {
        format!("user {claimed} ignored: listener {} sets hermes-user", listener.name)
    } else if facts.trust.is_believed() {
        format!("user {claimed} removed: no user is bound to the peer's node")
    } else {
        format!("user {claimed} removed: the client has neither a certificate nor a trusted address")
    }
}

/// Explains the decision for facts with a verified identity. `own` tells whether an address belongs to the node.
pub fn explain(facts: &Facts, snapshot: &Snapshot, own: &dyn Fn(IpAddr) -> bool) -> Explanation {
    let path = readings(facts.path.path()).map_or_else(|_| facts.path.path().to_owned(), |r| r.plain.into_owned());
    let taken = snapshot.routes.iter().position(|route| route.matcher.matches(facts, &path));
    let considered = taken.map_or(snapshot.routes.len(), |at| at + 1);
    let left_out = considered.saturating_sub(MAX_SHOWN_ROUTES);
    let routes =
        snapshot.routes.iter().enumerate().take(considered).skip(left_out).map(|(index, route)| SkippedRoute {
            index,
            name: route.name.to_string(),
            failed: route.matcher.failing(facts, &path).map(|failed| describe(&route.matcher, failed, facts, &path)),
        });
    let mut explanation = Explanation { left_out, routes: routes.collect(), ..before_routes(facts) };
    match decide(facts, snapshot) {
        Decision::Act(route) => explanation.act(&route, facts, own),
        Decision::Deny(deny) => {
            explanation.status = Some(deny.status.as_u16());
            explanation.reason = Some(deny.reason.to_string());
        }
    }
    explanation
}

/// An explanation that denies; `act` completes it.
fn before_routes(facts: &Facts) -> Explanation {
    // The path of a tunnel only repeats its authority.
    let path = if facts.kind == Kind::Http { facts.path.as_str() } else { "" };
    Explanation {
        decision: "deny",
        session: format!("{} {} {}{path} on {}", facts.kind, facts.method, facts.authority, facts.listener),
        identity: identity(facts),
        claim: None,
        capture: None,
        left_out: 0,
        routes: Vec::new(),
        route: None,
        action: None,
        timeouts: None,
        reach: None,
        custody: None,
        status: None,
        reason: None,
        packet: None,
    }
}

impl Explanation {
    /// Adds the action of the route, if the target is within its reach.
    fn act(&mut self, route: &Route, facts: &Facts, own: &dyn Fn(IpAddr) -> bool) {
        self.route = Some(route.name.to_string());
        self.action = Some(action(route));
        match check_reach(route, facts, own) {
            Ok(reach) => {
                self.decision = "act";
                self.reach = reach;
                self.timeouts = Some(timeouts(route.timeout, facts));
                self.custody = route.custody.filter(|_| matches!(facts.kind, Kind::Http | Kind::Tcp)).map(custody);
            }
            Err(reason) => {
                self.status = Some(StatusCode::FORBIDDEN.as_u16());
                self.reason = Some(reason);
            }
        }
    }
}

/// Checks the host that the request names. `None` if the document names the target or the reach is unlimited. The error
/// is the reason why the host is out of reach.
fn check_reach(route: &Route, facts: &Facts, own: &dyn Fn(IpAddr) -> bool) -> Result<Option<String>, String> {
    let Action::Terminate(Terminate { target, reach, .. }) = &route.action else { return Ok(None) };
    if matches!(target, Target::Fixed(_)) || *reach == DialScope::Any {
        return Ok(None);
    }
    let host = facts.authority.host();
    let Ok(address) = host.parse::<IpAddr>() else {
        return Ok(Some(format!("{reach}: the addresses of {host} are checked when it is resolved")));
    };
    match reach.forbids(address, own) {
        Some(why) => Err(format!("{host} {why}; out of reach of route {} (reach: {reach})", route.name)),
        None => Ok(Some(format!("{reach}: {host} is within reach"))),
    }
}

fn identity(facts: &Facts) -> String {
    let who = match &facts.trust {
        Trust::Anonymous => "an anonymous client".to_owned(),
        Trust::Address => "a peer trusted by its address".to_owned(),
        Trust::Certified(peer) => match &peer.node {
            Some(node) => format!("node {node} of {}", peer.overlay),
            None => format!("a certificate of {}", peer.overlay),
        },
    };
    match &facts.user {
        Some(user) => format!("user {user}, from {who} at {}", facts.source),
        None => format!("no user, from {who} at {}", facts.source),
    }
}

/// Describes a failed condition: the required value and the actual one.
fn describe(matcher: &Matcher, failed: Condition, facts: &Facts, path: &str) -> String {
    let or_absent = |value: Option<String>| value.unwrap_or_else(|| "absent".to_owned());
    let (name, wanted, has) = match failed {
        Condition::Kind => ("kind", list(&matcher.kinds), facts.kind.to_string()),
        Condition::Listener => ("listener", list(&matcher.listeners), facts.listener.to_string()),
        Condition::Authority => ("authority", list(&matcher.authorities), facts.authority.to_string()),
        Condition::Port => {
            ("port", list(&matcher.ports), or_absent(facts.authority.port().map(|port| port.to_string())))
        }
        Condition::Path => ("path", list(&matcher.paths), path.to_owned()),
        Condition::Method => ("method", list(&matcher.methods), facts.method.to_string()),
        Condition::User => ("user", list(&matcher.users), or_absent(facts.user.as_deref().map(str::to_owned))),
        Condition::Network => ("network", list(&matcher.networks), or_absent(network_of(facts))),
        Condition::Protocol => ("protocol", list(&matcher.protocols), or_absent(facts.protocol.map(|p| p.to_string()))),
        Condition::Header(at) => return describe_header(matcher, at, facts),
    };
    format!("{name} must be {wanted}, but is {has}")
}

fn network_of(facts: &Facts) -> Option<String> {
    let announced = || facts.announced_network.map(|net| format!("{net}, only announced by the peer"));
    facts.network.map(|net| net.to_string()).or_else(announced)
}

/// Does not show the session's values of a header, which may be secrets.
fn describe_header(matcher: &Matcher, at: usize, facts: &Facts) -> String {
    let Some((name, values)) = matcher.headers.get(at) else { return "headers".to_owned() };
    let lines = facts.headers.get_all(name).iter().count();
    let has = match lines {
        0 => "is absent".to_owned(),
        1 => "has a different value".to_owned(),
        many => format!("has {many} different values"),
    };
    if crate::document::redact::is_secret(name.as_str()) {
        return format!("header {name} must have a secret value, but {has}");
    }
    format!("header {name} must be {}, but {has}", list(values))
}

fn action(route: &Route) -> String {
    let all: Vec<String> = route.action.alternatives().iter().map(one_action).collect();
    all.join("; or ")
}

fn one_action(action: &Action) -> String {
    match action {
        Action::Upstream(upstream) => {
            let list = |all: &[Endpoint]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let backup = match &*upstream.backup {
                [] => String::new(),
                backup => format!("; backup: {}", list(backup)),
            };
            format!("forward to upstream {} ({}{backup})", upstream.name, list(&upstream.endpoints))
        }
        Action::Terminate(terminate) => match &terminate.target {
            Target::Authority => format!("open {} to the target of the request", terminate.kind),
            Target::Original => {
                let source = if terminate.from_client { ", with the client's address" } else { "" };
                format!("open {} to the address that the client dialled{source}", terminate.kind)
            }
            Target::Fixed(target) => format!("open {} to {target}", terminate.kind),
        },
        Action::Device(gateway) => {
            let dnat = gateway.dnat.map(|address| format!(", all to {address}")).unwrap_or_default();
            let nat = if gateway.nat { ", with NAT to this machine's address" } else { "" };
            format!("write the packets to device {}{dnat}{nat}", gateway.device)
        }
        Action::Face(face) => format!("exchange NDN packets with {}", face.uri),
        Action::Rina(rina) => {
            format!("request a flow of {} in DIF {}", rina.neighbour, rina.membership.dif)
        }
        // A race has no races.
        Action::Race(_) => String::new(),
        Action::Relay(relay) => {
            let mode = match relay.mode {
                RelayMode::Realtime => "realtime",
                RelayMode::Reliable => "reliable",
            };
            let place = match &relay.tree {
                RelayTree::Root => String::new(),
                RelayTree::Below(upstream) => format!(", as a part of the tree of upstream {}", upstream.name),
                RelayTree::Peers(peers) => {
                    let names: Vec<&str> = peers.all.iter().map(|peer| &*peer.node).collect();
                    format!(", with channels shared by {}", names.join(", "))
                }
            };
            format!("relay publications to subscribers ({mode}){place}")
        }
        Action::Respond(respond) => format!("respond {}", respond.status.as_u16()),
        Action::Redirect(redirect) => format!("redirect {} to {}", redirect.status.as_u16(), redirect.location),
    }
}

fn timeouts(timeouts: Timeouts, facts: &Facts) -> EffectiveTimeouts {
    let show = |duration: Duration| HumanDuration(duration).to_string();
    EffectiveTimeouts {
        connect: show(timeouts.connect),
        idle: show(timeouts.idle_of(facts.kind)),
        progress: show(timeouts.progress),
    }
}

fn custody(custody: Custody) -> String {
    let Custody { deadline, disk, durable, .. } = custody;
    let held = match durable {
        _ if disk == 0 => "in memory only, lost when this node restarts",
        Durable::Process => "on disk",
        Durable::Fsync => "on disk, synced to survive a loss of power",
    };
    format!("for at most {}, regardless of timeouts; stored {held}", HumanDuration(deadline))
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "session   {}", self.session)?;
        writeln!(f, "identity  {}", self.identity)?;
        if let Some(claim) = &self.claim {
            writeln!(f, "claim     {claim}")?;
        }
        if let Some(capture) = &self.capture {
            writeln!(f, "capture   {capture}")?;
        }
        if self.left_out > 0 {
            writeln!(f, "routes    {} earlier routes do not match", self.left_out)?;
        }
        for route in &self.routes {
            match &route.failed {
                Some(failed) => writeln!(f, "  - routes[{}] {}: {failed}", route.index, route.name)?,
                None => writeln!(f, "  * routes[{}] {}: matches", route.index, route.name)?,
            }
        }
        if let (Some(route), Some(action), None) = (&self.route, &self.action, &self.reason) {
            writeln!(f, "decision  {route}: {action}")?;
        }
        if let Some(reach) = &self.reach {
            writeln!(f, "reach     {reach}")?;
        }
        if let Some(t) = &self.timeouts {
            writeln!(f, "timeouts  connect {}, idle {}, progress {}", t.connect, t.idle, t.progress)?;
        }
        if let Some(custody) = &self.custody {
            writeln!(f, "custody   {custody}")?;
        }
        match (self.status, &self.reason) {
            (Some(status), Some(reason)) => writeln!(f, "decision  denied with {status}: {reason}")?,
            (None, Some(reason)) => writeln!(f, "decision  {reason}")?,
            _ => {}
        }
        if let Some(packet) = &self.packet {
            writeln!(f, "packet    {packet}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
