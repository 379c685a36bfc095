//! Checks a relay and its bounds.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;

use super::context::Names;
use super::node::duration;
use super::policy::size;
use super::report::Report;
use super::route::upstream_named;
use crate::authority::Authority;
use crate::document::relay as section;
use crate::snapshot::{Relay, RelayPeer, RelayPeers, RelayTree, RootChoice, Upstream, UpstreamProtocol};
use crate::spiffe::is_user_name;

/// The keys that may sign tokens. A forged token costs a verification by each.
const MAX_TOKEN_KEYS: usize = 8;
/// The nodes that may share channels.
const MAX_PEERS: usize = 64;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// Whether the text is an origin as browsers send it (the Fetch Standard, section 3.2): without a path, and without the
/// default port.
fn is_origin(text: &str) -> bool {
    let Some((scheme, authority)) = text.split_once("://") else { return false };
    let default = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => return false,
    };
    let is_known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-._:[]".contains(&byte);
    !authority.is_empty() && authority.bytes().all(is_known) && !authority.ends_with(default)
}

/// Builds a relay. `None`: an upstream is invalid. Without it, the relay would be the root of a tree of its own.
pub(super) fn build(section: &section::Relay, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Relay> {
    let tree = match &section.upstream {
        Some(name) => RelayTree::Below(next_relay(name, &format!("{at}.upstream"), names, report)?),
        None if section.peers.is_empty() => RelayTree::Root,
        None => {
            let all = peers(&section.peers, &format!("{at}.peers"), names, report)?;
            let authority = section.authority.as_deref().map(Into::into);
            RelayTree::Peers(RelayPeers { all, root: section.root, authority })
        }
    };
    if section.upstream.is_some() && !section.peers.is_empty() {
        let message = "peers conflict with upstream, which has the root of all channels; keep one of them";
        report.problem(format!("{at}.peers"), message);
    }
    if section.root != RootChoice::Hash && section.peers.is_empty() {
        report.problem(format!("{at}.root"), "there is a choice among peers only; add peers, or remove it");
    }
    authority(section, at, report);
    if let Some(user) = section.user.as_ref().filter(|user| !is_user_name(user)) {
        let message =
            format!("invalid user name {user:?}; use visible ASCII characters without commas and quotes, and not *");
        report.problem(format!("{at}.user"), message);
    }
    if section.user.is_some() && section.upstream.is_none() && section.peers.is_empty() {
        report.problem(format!("{at}.user"), "this relay subscribes nowhere; add upstream or peers, or remove it");
    }
    let mut number = |key: &str, value: Option<usize>, default: usize, allowed: RangeInclusive<usize>| {
        let value = value.unwrap_or(default);
        if !allowed.contains(&value) {
            let message = format!("invalid number {value}; use {} to {}", allowed.start(), allowed.end());
            report.problem(format!("{at}.{key}"), message);
        }
        value
    };
    let million = 1_000_000;
    let queue = number("queue", section.queue, 64, 1..=65_536);
    let channels = number("channels", section.channels, 10_000, 1..=million);
    let subscriptions = number("subscriptions", section.subscriptions, 100_000, 1..=million);
    let per_client = number("per-client", section.per_client, 1000, 1..=million);
    let history = section.history.clone().unwrap_or_default();
    let kept = if section.history.is_some() {
        number("history.publications", history.publications, 100, 1..=65_536)
    } else {
        0
    };
    for (index, origin) in section.origins.iter().enumerate() {
        if origin != "*" && !is_origin(origin) {
            let message =
                format!("invalid origin {origin:?}; use a scheme, a host and a port, as in https://app.example:8443");
            report.problem(format!("{at}.origins[{index}]"), message);
        }
    }
    let tokens = keys(&section.tokens.0, &format!("{at}.tokens"), report);
    let day = 24 * HOUR;
    let relay = Relay {
        tree,
        user: section.user.as_deref().map(Arc::from),
        mode: section.mode,
        queue,
        queue_bytes: size(format!("{at}.queue-bytes"), section.queue_bytes, 4 * MIB, KIB..=1 << 40, report),
        unit: size(format!("{at}.unit"), section.unit, MIB, 1..=GIB, report),
        cut_through: section.cut_through,
        max_timeout: duration(&format!("{at}.max-timeout"), section.max_timeout, HOUR, SECOND..=30 * day, report),
        stall: duration(&format!("{at}.stall"), section.stall, 10 * SECOND, SECOND / 10..=HOUR, report),
        heartbeat: duration(&format!("{at}.heartbeat"), section.heartbeat, 15 * SECOND, SECOND / 10..=HOUR, report),
        history: kept,
        history_bytes: size(format!("{at}.history.bytes"), history.bytes, MIB, KIB..=1 << 40, report),
        history_age: duration(&format!("{at}.history.age"), history.age, HOUR / 6, SECOND..=30 * day, report),
        channels,
        subscriptions,
        per_client,
        origins: section.origins.iter().map(|origin| origin.as_str().into()).collect(),
        tokens,
        memory: size(format!("{at}.memory"), section.memory, 256 * MIB, MIB..=1 << 40, report),
    };
    // A publication counts while it arrives, and again in queues.
    if relay.unit > relay.memory / 2 {
        let message = "a publication of this size exceeds half of `memory`; reduce it, or raise memory";
        report.problem(format!("{at}.unit"), message);
    }
    Some(relay)
}

/// Checks the authority of the channels of redirected clients.
fn authority(section: &section::Relay, at: &str, report: &mut Report) {
    let has_url = section.peers.iter().any(|peer| peer.url.is_some());
    let Some(text) = &section.authority else {
        if has_url {
            let message = "a client that is redirected asks for another authority, and so for another channel, unless it \
                           keeps its `host`; add authority";
            report.warning(format!("{at}.peers"), message);
        }
        return;
    };
    if !has_url {
        report.problem(format!("{at}.authority"), "no peer has a url; add urls, or remove it");
    }
    let has_default_port = [":80", ":443"].iter().any(|port| text.ends_with(port));
    if has_default_port || Authority::parse(text, None).map(|authority| authority.to_string()).as_ref() != Ok(text) {
        let message = format!("invalid authority {text:?}; use HOST or HOST:PORT in lower case, without 80 or 443");
        report.problem(format!("{at}.authority"), message);
    }
}

/// Reads the keys of those who sign tokens.
fn keys(section: &[String], at: &str, report: &mut Report) -> Vec<[u8; 32]> {
    let mut keys = Vec::new();
    for (index, text) in section.iter().enumerate() {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok().and_then(|bytes| bytes.try_into().ok());
        match bytes {
            Some(key) => keys.push(key),
            None => {
                let message = format!(
                    "invalid key {text:?}; use 43 characters of base64url, which `hermes key FILE --json` has in `public`"
                );
                report.problem(format!("{at}[{index}]"), message);
            }
        }
    }
    if section.len() > MAX_TOKEN_KEYS {
        report.problem(at, format!("{} keys; use at most {MAX_TOKEN_KEYS}", section.len()));
    }
    keys
}

/// Builds the peers. `None`: one is invalid.
fn peers(section: &[section::RelayPeer], at: &str, names: &Names<'_>, report: &mut Report) -> Option<Vec<RelayPeer>> {
    let mut all: Vec<Option<RelayPeer>> = Vec::new();
    for (index, peer) in section.iter().enumerate() {
        let at = format!("{at}[{index}]");
        if section[..index].iter().any(|other| other.node == peer.node) {
            report.problem(format!("{at}.node"), format!("node {} is a peer already; remove one", peer.node));
        }
        let name = peer.upstream.as_ref().unwrap_or(&peer.node);
        let upstream = match peer.node == names.node {
            true if peer.upstream.is_some() => {
                report.problem(format!("{at}.upstream"), "this is the node itself; remove the upstream");
                None
            }
            true => Some(None),
            false => next_relay(name, &format!("{at}.upstream"), names, report).map(Some),
        };
        if peer.url.as_ref().is_some_and(|url| !is_origin(url)) {
            let message = "invalid origin; use a scheme, a host and a port, as in https://one.example:8443";
            report.problem(format!("{at}.url"), message);
        }
        let url = peer.url.as_deref().map(Box::from);
        all.push(upstream.map(|upstream| RelayPeer { node: peer.node.as_str().into(), upstream, url }));
    }
    if section.len() > MAX_PEERS {
        report.problem(at, format!("{} peers; use at most {MAX_PEERS}", section.len()));
    }
    all.into_iter().collect()
}

fn next_relay(name: &str, at: &str, names: &Names<'_>, report: &mut Report) -> Option<Arc<Upstream>> {
    let upstream = upstream_named(name, at, names, report)?;
    if upstream.protocol == UpstreamProtocol::Tcp {
        let message =
            format!("upstream {name} has protocol tcp, but the next relay is an HTTP server; use h1, h2 or h3");
        report.problem(at, message);
    }
    if upstream.endpoints.len() > 1 {
        let message = format!(
            "upstream {name} has several endpoints, but the next relay is one node, which has all channels; keep one \
             endpoint, and name others as its backup"
        );
        report.problem(at, message);
    }
    Some(upstream)
}
