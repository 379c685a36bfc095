//! The decision in words: which routes were considered, and why each of them was not taken.
//!
//! In: facts and a snapshot. Out: the same decision as `decide`, with its reasons, for people and
//! as JSON; what comes before it (a handshake, the identity) and after it (the reach of a route) as
//! the node would have it. Never: on the data path; it walks routes one by one. Never resolves.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use serde::Serialize;

use crate::decide::{Decision, decide};
use crate::facts::{Facts, Kind, Trust};
use crate::matcher::{Condition, Matcher, list};
use crate::path::readings;
use crate::reach::Reach;
use crate::scalar::Period;
use crate::snapshot::{
    Action, ClientAuth, Custody, Durable, Endpoint, Listener, ListenerProtocol, Route, Snapshot, Target, Terminate,
    Timeouts,
};
use crate::trust::{HERMES_USER, listener_user, settle};

/// At most this many routes are shown, the last of them before the match.
const SHOWN: usize = 50;

/// A decision with its reasons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Explanation {
    /// `act` or `deny`.
    pub decision: &'static str,
    /// The session, in a line.
    pub session: String,
    /// How far the connection is believed, and whose session it is.
    pub identity: String,
    /// What became of a claim to be a user that does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// By which of its prefixes a listener takes what it is asked about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<String>,
    /// Routes before the match that are not shown.
    pub left_out: usize,
    /// Routes in their order, up to the match.
    pub routes: Vec<Considered>,
    /// The route that acts, or would if it reached what the request names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// What it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// How long it waits for what.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeouts: Option<EffectiveTimeouts>,
    /// What the route checks before it dials the host that the request names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reach: Option<String>,
    /// The status of a denial; none where there is no request that it could answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// How nodes answer for it until it is through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custody: Option<String>,
    /// Why it is denied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What becomes of a packet that was asked about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packet: Option<String>,
}

/// A route, and what spoke against it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Considered {
    /// Its position.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// The first condition that fails; `None` for the match.
    pub failed: Option<String>,
}

/// Timeouts with their defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EffectiveTimeouts {
    /// For a connection.
    pub connect: String,
    /// For silence in both directions.
    pub idle: String,
    /// For bytes that are owed.
    pub progress: String,
}

/// The prefix of an `ip` session.
const HERMES_NETWORK: HeaderName = HeaderName::from_static("hermes-network");

/// Explains what becomes of a session that this listener accepts. `facts` are as they came in, before
/// identity was judged; `own` says whether an address is the node's.
pub fn explain_arrival(
    mut facts: Facts,
    listener: &Listener,
    snapshot: &Snapshot,
    own: &dyn Fn(IpAddr) -> bool,
) -> Explanation {
    if !shakes_hands(&facts, listener) {
        return Explanation {
            reason: Some(format!(
                "refused at the TLS handshake: listener {} requires a client certificate of the overlay, and this \
                 client shows none",
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
        // The listener says it itself, of packets that it takes.
        facts.headers.insert(HERMES_NETWORK, value);
    }
    let claim = claimed.filter(|claimed| facts.user.as_deref() != Some(claimed));
    Explanation { claim: claim.map(|claimed| unbelieved(&claimed, &facts, listener)), ..explain(&facts, snapshot, own) }
}

fn shakes_hands(facts: &Facts, listener: &Listener) -> bool {
    let required = listener.tls.as_ref().is_some_and(|tls| tls.client == ClientAuth::Required);
    !required || facts.trust.peer().is_some()
}

fn unbelieved(claimed: &str, facts: &Facts, listener: &Listener) -> String {
    if listener_user(listener).is_some() {
        format!("to be {claimed}; does not count, since listener {} sets hermes-user", listener.name)
    } else if facts.trust.is_believed() {
        format!("to be {claimed}; removed, since no user is bound to this node")
    } else {
        format!("to be {claimed}; removed, since nobody proved it: no certificate, no trusted address")
    }
}

/// Explains the decision on these facts, whose identity is judged. `own` says whether an address is
/// the node's.
pub fn explain(facts: &Facts, snapshot: &Snapshot, own: &dyn Fn(IpAddr) -> bool) -> Explanation {
    let path = readings(facts.path.path()).map_or_else(|_| facts.path.path().to_owned(), |r| r.plain.into_owned());
    let taken = snapshot.routes.iter().position(|route| route.matcher.matches(facts, &path));
    let considered = taken.map_or(snapshot.routes.len(), |at| at + 1);
    let left_out = considered.saturating_sub(SHOWN);
    let routes = snapshot.routes.iter().enumerate().take(considered).skip(left_out).map(|(index, route)| Considered {
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

/// A denial, until a route acts.
fn before_routes(facts: &Facts) -> Explanation {
    // A tunnel's path is its form, and says nothing that its authority does not.
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
    /// What the route does, if it reaches what the request names.
    fn act(&mut self, route: &Route, facts: &Facts, own: &dyn Fn(IpAddr) -> bool) {
        self.route = Some(route.name.to_string());
        self.action = Some(action(route));
        match judge_reach(route, facts, own) {
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

/// What is checked of the host that a request names; `None` where the document names the target, or
/// everything may be reached. An error says why the host is out of reach.
fn judge_reach(route: &Route, facts: &Facts, own: &dyn Fn(IpAddr) -> bool) -> Result<Option<String>, String> {
    let Action::Terminate(Terminate { target: Target::Authority, reach, .. }) = &route.action else { return Ok(None) };
    if *reach == Reach::Any {
        return Ok(None);
    }
    let host = facts.authority.host();
    let Ok(address) = host.parse::<IpAddr>() else {
        return Ok(Some(format!("{reach}: the addresses of {host} are checked when it is resolved")));
    };
    match reach.forbids(address, own) {
        Some(why) => Err(format!("{host} {why}: route {} does not go there (reach: {reach})", route.name)),
        None => Ok(Some(format!("{reach}: {host} is in reach"))),
    }
}

fn identity(facts: &Facts) -> String {
    let who = match &facts.trust {
        Trust::Anonymous => "an anonymous client".to_owned(),
        Trust::Address => "a peer believed by its address".to_owned(),
        Trust::Certified(peer) => match &peer.node {
            Some(node) => format!("node {node} of {}", peer.overlay),
            None => format!("a certificate of {}", peer.overlay),
        },
    };
    match &facts.user {
        Some(user) => format!("user {user}, brought by {who} at {}", facts.source),
        None => format!("no user, brought by {who} at {}", facts.source),
    }
}

/// A condition that failed: what the route asks for, and what the session has.
fn describe(matcher: &Matcher, failed: Condition, facts: &Facts, path: &str) -> String {
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
    let (name, wanted, has) = match failed {
        Condition::Kind => ("kind", list(&matcher.kinds), facts.kind.to_string()),
        Condition::Listener => ("listener", list(&matcher.listeners), facts.listener.to_string()),
        Condition::Authority => ("authority", list(&matcher.authorities), facts.authority.to_string()),
        Condition::Port => ("port", list(&matcher.ports), or_none(facts.authority.port().map(|port| port.to_string()))),
        Condition::Path => ("path", list(&matcher.paths), path.to_owned()),
        Condition::Method => ("method", list(&matcher.methods), facts.method.to_string()),
        Condition::User => ("user", list(&matcher.users), or_none(facts.user.as_deref().map(str::to_owned))),
        Condition::Network => ("network", list(&matcher.networks), or_none(network_of(facts))),
        Condition::Protocol => ("protocol", list(&matcher.protocols), or_none(facts.protocol.map(|p| p.to_string()))),
        Condition::Header(at) => return describe_header(matcher, at, facts),
    };
    format!("{name} must be {wanted}, and is {has}")
}

fn network_of(facts: &Facts) -> Option<String> {
    let told = || facts.told.map(|net| format!("{net} by its peer's word alone"));
    facts.network.map(|net| net.to_string()).or_else(told)
}

/// The session's values of a header are not shown: they may be secrets.
fn describe_header(matcher: &Matcher, at: usize, facts: &Facts) -> String {
    let Some((name, values)) = matcher.headers.get(at) else { return "headers".to_owned() };
    let lines = facts.headers.get_all(name).iter().count();
    let has = match lines {
        0 => "is absent".to_owned(),
        1 => "has another value".to_owned(),
        many => format!("has {many} other values"),
    };
    if crate::document::redact::is_secret(name.as_str()) {
        return format!("header {name} must have a certain value, and {has}");
    }
    format!("header {name} must be {}, and {has}", list(values))
}

fn action(route: &Route) -> String {
    match &route.action {
        Action::Upstream(upstream) => {
            let list = |all: &[Endpoint]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let backup = match &*upstream.backup {
                [] => String::new(),
                backup => format!("; while none of these is up {}", list(backup)),
            };
            format!("forward to upstream {} ({}{backup})", upstream.name, list(&upstream.endpoints))
        }
        Action::Terminate(terminate) => match &terminate.target {
            Target::Authority => format!("open {} to what the request names", terminate.kind),
            Target::Fixed(target) => format!("open {} to {target}", terminate.kind),
        },
        Action::Device(gateway) => {
            let inner = gateway.inner.map(|inner| format!(", all to {inner}")).unwrap_or_default();
            let nat = if gateway.nat { ", out with this machine's address" } else { "" };
            format!("give the packets to device {}{inner}{nat}", gateway.device)
        }
        Action::Respond(respond) => format!("answer {}", respond.status.as_u16()),
        Action::Redirect(redirect) => format!("redirect {} to {}", redirect.status.as_u16(), redirect.location),
    }
}

fn timeouts(timeouts: Timeouts, facts: &Facts) -> EffectiveTimeouts {
    let show = |duration: Duration| Period(duration).to_string();
    EffectiveTimeouts {
        connect: show(timeouts.connect),
        idle: show(timeouts.idle_of(facts.kind)),
        progress: show(timeouts.progress),
    }
}

fn custody(custody: Custody) -> String {
    let Custody { deadline, disk, durable, .. } = custody;
    let held = match durable {
        _ if disk == 0 => "in memory alone: a restart of this node loses it",
        Durable::Process => "on disk",
        Durable::Fsync => "on disk, and a loss of power is survived",
    };
    format!("for {} at most, whatever the timeouts; held {held}", Period(deadline))
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
            writeln!(f, "routes    {} before these do not match either", self.left_out)?;
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
