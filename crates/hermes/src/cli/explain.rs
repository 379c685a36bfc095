//! `hermes explain`: the decision for given facts, and the reason, rule by rule.
//!
//! In: a document, or those of a controller, and options that describe a session. Out: the session as the listener
//! would create it, explained. Never: a session that the listener cannot have; contradicting options are errors.

mod packet;
mod path;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use hermes_controller::client::ControllerAddr;
use hermes_model::document::scalar::Prefix;
use hermes_model::explain::Explanation;
use hermes_model::snapshot::{Capture, ClientAuth, IpListener, Listener, ListenerProtocol, Tun};
use hermes_model::trust::{HERMES_USER, listener_user, parse_spiffe, peer};
use hermes_model::{Authority, Facts, Kind, Snapshot, Trust};
use hermes_proxy::Packet;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use ipnet::IpNet;

use crate::document;
use crate::operator::{Access, OperatorFile};

/// The exit status of a denial, which is neither a failure nor misuse.
const DENIED: u8 = 3;

/// Explain the decision for a request, without sending it.
///
/// Exit status: 0 if the session is accepted, 3 if it is denied or its packet dropped, 1 if the decision is unknown.
#[derive(Debug, Parser)]
pub(super) struct Explain {
    /// Decide by this node document (YAML)
    #[arg(long, value_name = "FILE", required_unless_present = "controller")]
    config: Option<PathBuf>,
    /// Decide at every node on the path, by the controller's documents. =URL selects another controller than the
    /// operator's file
    #[arg(long, value_name = "URL", num_args = 0..=1, require_equals = true, conflicts_with_all = ["config", "packet"])]
    controller: Option<Option<ControllerAddr>>,
    /// Start at this node, with --controller [default: the only node of --user]
    #[arg(long, value_name = "NAME", requires = "controller")]
    node: Option<String>,
    #[command(flatten)]
    file: OperatorFile,
    /// Set the kind of the session [default: the listener's; http for http listeners, tcp for socks5 listeners]
    #[arg(long, value_parser = PossibleValuesParser::new(Kind::ALL.map(Kind::as_str)).map(kind_named))]
    kind: Option<Kind>,
    /// Claim this user (hermes-user). The node validates the claim by the listener, --certificate and --source. Without
    /// --listener, a listener of this user accepts the session
    #[arg(long)]
    user: Option<String>,
    /// Present a certificate with this URI, such as spiffe://OVERLAY/node/NAME, .../user/NAME or .../role/standalone.
    /// May be repeated
    #[arg(long = "certificate", value_name = "URI")]
    certificate: Vec<String>,
    /// Request this authority: a name, host or host:port. Listeners of tcp and udp have their own; socks5 listeners
    /// assume port 80
    #[arg(long)]
    authority: Option<String>,
    /// Set the method; CONNECT for tunnels
    #[arg(long)]
    method: Option<String>,
    /// Set the path and query of an http session [default: /]
    #[arg(long)]
    path: Option<String>,
    /// Add a header. May be repeated
    #[arg(long = "header", value_name = "NAME=VALUE")]
    headers: Vec<String>,
    /// Set the destination prefix or address of an ip session. Without --listener and --kind, the tun listener that
    /// captures it accepts the session
    #[arg(long)]
    network: Option<String>,
    #[allow(rustdoc::broken_intra_doc_links, reason = "brackets as usage lines have them")]
    /// Check a packet of an ip session: src=ADDRESS,dst=ADDRESS[,proto=tcp][,length=BYTES][,mtu=BYTES]. Prints whether
    /// it passes, or why it is dropped
    #[arg(long, value_name = "FIELDS")]
    packet: Option<String>,
    /// Set the source address
    #[arg(long, default_value = "127.0.0.1")]
    source: IpAddr,
    /// Accept at this listener [default: the first one]
    #[arg(long)]
    listener: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Converts a kind. `PossibleValuesParser` rejects all other values.
fn kind_named(name: String) -> Kind {
    Kind::ALL.into_iter().find(|kind| kind.as_str() == name).unwrap_or(Kind::Http)
}

impl Explain {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Some(config) = &self.config else { return self.along() };
        let snapshot = match document::read(config)? {
            Ok(checked) => checked.snapshot,
            Err(problems) => {
                let problems = super::counted(problems.len(), "problem");
                bail!("{} has {problems}; `hermes check` lists them", config.display())
            }
        };
        let packet = self.packet.as_deref().map(packet::parse).transpose()?;
        let wanted = self.wanted(packet.as_ref())?;
        let listener = self.listener(&snapshot, wanted)?;
        let facts = self.facts(&snapshot, listener, packet.as_ref())?;
        let (network, protocol) = (facts.network, facts.protocol);
        let handshake = facts.trust.peer().is_none() && requires_certificate(listener);
        let own = hermes_net::host::addresses();
        let mut explanation = hermes_model::explain_arrival(facts, listener, &snapshot, &|ip| own.contains(&ip));
        explanation.capture = wanted.and_then(|wanted| captured(&snapshot, listener, wanted));
        if let Some(reason) = explanation.reason.as_mut().filter(|_| handshake) {
            reason.push_str("; say which one by --certificate URI");
        }
        if let Some(packet) = packet {
            let acts = explanation.route.as_deref().filter(|_| explanation.decision == "act");
            let route = acts.and_then(|name| snapshot.routes.iter().find(|route| *route.name == *name));
            let action = route.map(|route| &route.action);
            explanation.packet = Some(packet.explain(listener, self.source, network, protocol, action));
        }
        let text = if self.json { serde_json::to_string_pretty(&explanation)? } else { explanation.to_string() };
        super::print(&format!("{}\n", text.trim_end()))?;
        Ok(status(&explanation))
    }

    /// The access to the controller whose documents are explained.
    fn access(&self) -> anyhow::Result<Access> {
        self.file.access(self.controller.clone().flatten())
    }

    /// Explains the decision at every node on the path.
    fn along(&self) -> anyhow::Result<ExitCode> {
        let hops = path::follow(self)?;
        let text = if self.json { serde_json::to_string_pretty(&hops)? + "\n" } else { path::render(&hops) };
        super::print(&text)?;
        Ok(hops.last().map_or(ExitCode::SUCCESS, |last| status(&last.explanation)))
    }

    /// Returns the named listener. Otherwise returns the first one, or the one that captures the wanted network if the
    /// first does not fit.
    fn listener<'s>(&self, snapshot: &'s Snapshot, wanted: Option<IpNet>) -> anyhow::Result<&'s Listener> {
        let mut listeners = snapshot.listeners.iter().map(AsRef::as_ref);
        match &self.listener {
            Some(name) => listeners
                .find(|listener: &&Listener| *listener.name == **name)
                .with_context(|| format!("the document has no listener {name}")),
            None => {
                let user = self.user.as_deref().filter(|_| self.certificate.is_empty());
                let is_users = |listener: &&Listener| user.is_some() && listener_user(listener).as_deref() == user;
                // A user may have several listeners on a device; the HTTP listener accepts every kind of session.
                let rank = |listener: &&Listener| !matches!(listener.protocol, ListenerProtocol::Http);
                let own = listeners.clone().filter(is_users).min_by_key(rank);
                let first = own.or_else(|| listeners.next());
                let first = first.context("the document has no listener, so no session begins")?;
                let fits = self.kind.is_some() && !matches!(first.protocol, ListenerProtocol::Tun(_));
                let holder = wanted.filter(|_| !fits).and_then(|wanted| holder(snapshot, wanted));
                Ok(holder.map_or(first, |(listener, _)| listener))
            }
        }
    }

    /// Returns the facts of the session before its identity is validated.
    fn facts(&self, snapshot: &Snapshot, listener: &Listener, packet: Option<&Packet>) -> anyhow::Result<Facts> {
        let trust = self.trust(listener)?;
        let (kind, authority) = match &listener.protocol {
            ListenerProtocol::Http => {
                let kind = self.kind.unwrap_or(Kind::Http);
                ensure!(
                    kind != Kind::Ip || self.network.is_some() || self.authority.is_some(),
                    "an ip session is for a prefix or a name: add --network 10.0.0.0/8, or --authority NAME"
                );
                (kind, self.named_authority(kind, is_https(listener, &trust))?)
            }
            ListenerProtocol::Tcp { authority } => (Kind::Tcp, self.fixed_authority(listener, Kind::Tcp, authority)?),
            ListenerProtocol::Ndn(ndn) => (Kind::Tcp, self.fixed_authority(listener, Kind::Tcp, &ndn.authority)?),
            ListenerProtocol::Rina(_) => (Kind::Tcp, self.named_authority(Kind::Tcp, false)?),
            ListenerProtocol::Udp { authority } => (Kind::Udp, self.fixed_authority(listener, Kind::Udp, authority)?),
            ListenerProtocol::Tun(_) | ListenerProtocol::Ip(_) => (Kind::Ip, self.named_authority(Kind::Ip, false)?),
            ListenerProtocol::Dns(_) => {
                bail!("listener {} only answers DNS queries; name another listener", listener.name)
            }
            ListenerProtocol::Transparent(transparent) => {
                let of_connections = if transparent.http { Kind::Http } else { Kind::Tcp };
                let kind = self.kind.unwrap_or(of_connections);
                let is_taken = kind == of_connections || (kind == Kind::Udp && transparent.udp);
                ensure!(is_taken, "--kind {kind}: listener {} does not intercept such sessions", listener.name);
                (kind, self.named_authority(kind, false)?)
            }
            ListenerProtocol::Socks5 => {
                let kind = self.kind.unwrap_or(Kind::Tcp);
                let (name, carried) = (&listener.name, matches!(kind, Kind::Tcp | Kind::Udp));
                ensure!(carried, "--kind {kind}: sessions of listener {name} are tcp (CONNECT) or udp (UDP ASSOCIATE)");
                self.refuse_unheard(listener, kind)?;
                // A bare name becomes a request as a browser would send it.
                let is_name = |text: &&String| {
                    self.kind.is_none() && Authority::parse(text, None).is_ok_and(|one| one.port().is_none())
                };
                match self.authority.as_ref().filter(is_name) {
                    Some(name) => (kind, Authority::parse(&format!("{name}:80"), None)?),
                    None => (kind, self.named_authority(kind, false)?),
                }
            }
        };
        let capture = match &listener.protocol {
            ListenerProtocol::Ip(carried) => Some(self.carried(listener, carried)?),
            _ => self.capture(listener, packet)?.cloned(),
        };
        ensure!(
            packet.is_none() || kind == Kind::Ip,
            "--packet is for sessions of kind ip, and this one is {kind}: add --kind ip --network PREFIX, as the session \
             asked for it, or name a listener of packets by --listener"
        );
        let capture = capture.as_ref();
        let network = capture.map(|capture| capture.network).or(self.network()?);
        let (network, authority) = match self.stands_for_a_name(snapshot, listener, packet)? {
            Some(address) => (Some(address), authority),
            // The authority of any other ip session is its network, if it has one.
            None => match network.filter(|_| self.authority.is_none()) {
                Some(of) => (network, Authority::of_address(of.addr())),
                // A session for a name carries the virtual address of that name.
                None => (network, authority),
            },
        };
        ensure!(
            self.network.is_none() || kind == Kind::Ip,
            "--network is for sessions of kind ip, and this one is {kind}"
        );
        let method = match &self.method {
            Some(method) => method.parse().with_context(|| format!("--method {method}"))?,
            None if kind == Kind::Http => Method::GET,
            None => Method::CONNECT,
        };
        Ok(Facts {
            listener: listener.name.clone(),
            kind,
            source: SocketAddr::new(self.source, 0),
            trust,
            user: None,
            method,
            path: self.path(kind, &authority)?,
            authority,
            headers: self.header_map(capture, network)?,
            network,
            announced_network: None,
            protocol: None,
        })
    }

    fn network(&self) -> anyhow::Result<Option<IpNet>> {
        let parsed = self.network.as_deref().map(|text| text.parse().map(|Prefix(network)| network)).transpose();
        parsed.map_err(|error: String| anyhow::anyhow!("--network: {error}"))
    }

    /// Returns the destination of the session's packets, as far as the options give it.
    fn wanted(&self, packet: Option<&Packet>) -> anyhow::Result<Option<IpNet>> {
        Ok(self.network()?.or(packet.map(|packet| packet.destination.into())))
    }

    /// Returns the destination of a packet if a device maps that address to a name. The options must give the name,
    /// since only a running node knows the mapping.
    fn stands_for_a_name(
        &self,
        snapshot: &Snapshot,
        listener: &Listener,
        packet: Option<&Packet>,
    ) -> anyhow::Result<Option<IpNet>> {
        let is_reserved = |address: IpAddr| {
            let mut protocols = snapshot.listeners.iter().map(|listener| &listener.protocol);
            protocols.any(|protocol| matches!(protocol, ListenerProtocol::Dns(dns) if dns.addresses.contains(address)))
        };
        let is_device = matches!(listener.protocol, ListenerProtocol::Tun(_));
        let Some(packet) = packet.filter(|packet| is_device && is_reserved(packet.destination)) else {
            return Ok(None);
        };
        ensure!(
            self.authority.is_some(),
            "--packet: {} stands for a name, and is a session for it; say which one by --authority",
            packet.destination
        );
        Ok(Some(packet.destination.into()))
    }

    /// Returns the prefix of a tun listener for `--network` [default: the first prefix].
    fn capture<'l>(&self, listener: &'l Listener, packet: Option<&Packet>) -> anyhow::Result<Option<&'l Capture>> {
        let ListenerProtocol::Tun(tun) = &listener.protocol else { return Ok(None) };
        let wanted = self.wanted(packet)?;
        let chosen = wanted.map_or(tun.captures.first(), |wanted| narrowest(tun, wanted));
        let taken = || tun.captures.iter().map(|capture| capture.network.to_string()).collect::<Vec<_>>().join(", ");
        chosen
            .map(Some)
            .with_context(|| format!("listener {} does not accept this; it accepts {}", listener.name, taken()))
    }

    /// Returns the capture of a peer's packet, if `--source` is a peer.
    fn carried(&self, listener: &Listener, carried: &IpListener) -> anyhow::Result<Capture> {
        let name = &listener.name;
        ensure!(carried.peer(self.source).is_some(), "--source {}: not a peer of listener {name}", self.source);
        let network = carried.network;
        ensure!(
            self.network()?.is_none_or(|wanted| network.contains(&wanted)),
            "--network: listener {name} only accepts packets to {network}"
        );
        Ok(Capture { network, set_headers: Vec::new() })
    }

    /// Returns the trust in the connection, as the listener determines it.
    fn trust(&self, listener: &Listener) -> anyhow::Result<Trust> {
        if self.certificate.is_empty() {
            let trusted = listener.trust.iter().any(|prefix| prefix.contains(&self.source.to_canonical()));
            return Ok(if trusted { Trust::Address } else { Trust::Anonymous });
        }
        let asks = listener.tls.as_ref().is_some_and(|tls| tls.client != ClientAuth::None);
        ensure!(asks, "--certificate: listener {} requests no client certificate", listener.name);
        let mut overlay: Arc<str> = Arc::from("");
        for uri in &self.certificate {
            let id = parse_spiffe(uri)
                .with_context(|| format!("--certificate {uri} is not spiffe://OVERLAY/node/NAME, user or role"))?;
            overlay = Arc::from(id.overlay);
        }
        let shown = peer(self.certificate.iter().map(String::as_str), &overlay);
        let shown = shown.map_err(|reason| anyhow::anyhow!("--certificate: {reason}"))?;
        Ok(Trust::Certified(Arc::new(shown)))
    }

    fn named_authority(&self, kind: Kind, https: bool) -> anyhow::Result<Authority> {
        let default_port = (kind == Kind::Http).then_some(if https { 443 } else { 80 });
        let tunnel = matches!(kind, Kind::Tcp | Kind::Udp);
        let text = match &self.authority {
            Some(text) => text,
            None if tunnel => bail!("missing --authority HOST:PORT for a {kind} session"),
            None => "localhost",
        };
        let authority = Authority::parse(text, default_port).with_context(|| format!("--authority {text}"))?;
        ensure!(
            !tunnel || authority.explicit_port().is_some(),
            "--authority {text} has no port; a {kind} session is for HOST:PORT"
        );
        Ok(authority)
    }

    /// Returns the authority of a raw connection or flow, which only the listener defines.
    fn fixed_authority(&self, listener: &Listener, kind: Kind, authority: &Authority) -> anyhow::Result<Authority> {
        let name = &listener.name;
        if let Some(other) = self.kind.filter(|other| *other != kind) {
            bail!("--kind {other}: sessions of listener {name} are {kind}");
        }
        if let Some(text) = &self.authority {
            let named = Authority::parse(text, None).with_context(|| format!("--authority {text}"))?;
            ensure!(named == *authority, "--authority {text}: sessions of listener {name} are for {authority}");
        }
        self.refuse_unheard(listener, kind)?;
        Ok(authority.clone())
    }

    /// Rejects options that only an HTTP client could express.
    fn refuse_unheard(&self, listener: &Listener, kind: Kind) -> anyhow::Result<()> {
        let name = &listener.name;
        let unheard = [
            ("--method", self.method.is_some()),
            ("--path", self.path.is_some()),
            ("--header", !self.headers.is_empty()),
            // The listener sets the user for the client.
            ("--user", self.user.is_some() && listener_user(listener).as_deref() != self.user.as_deref()),
        ];
        if let Some((option, _)) = unheard.into_iter().find(|(_, given)| *given) {
            bail!("{option} has no effect: clients of listener {name} ({kind}) cannot send it; remove the option");
        }
        Ok(())
    }

    /// Returns the path of a tunnel, which follows from its kind and target.
    fn path(&self, kind: Kind, authority: &Authority) -> anyhow::Result<PathAndQuery> {
        if let Some(path) = &self.path {
            ensure!(!matches!(kind, Kind::Tcp | Kind::Udp), "--path: a {kind} session has no path; remove the option");
            let (bare, query) = path.split_once('?').map_or((&**path, ""), |(bare, _)| (bare, &path[bare.len()..]));
            let resolved = hermes_model::without_single_dots(bare).map(|bare| format!("{bare}{query}"));
            return resolved.as_ref().unwrap_or(path).parse().with_context(|| format!("--path {path}"));
        }
        match (kind, authority.port()) {
            (Kind::Udp, Some(port)) => Ok(hermes_wire::connect_udp::path(authority.host(), port).parse()?),
            _ => Ok(PathAndQuery::from_static("/")),
        }
    }

    fn header_map(&self, capture: Option<&Capture>, network: Option<IpNet>) -> anyhow::Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        if let (Some(capture), Some(network)) = (capture, network) {
            headers.insert("hermes-network", HeaderValue::from_str(&network.to_string())?);
            headers.extend(capture.set_headers.iter().cloned());
        }
        for header in &self.headers {
            let (name, value) =
                header.split_once('=').with_context(|| format!("--header {header} is not NAME=VALUE"))?;
            let name: HeaderName = name.parse().with_context(|| format!("--header {header}"))?;
            headers.append(name, HeaderValue::from_str(value).with_context(|| format!("--header {header}"))?);
        }
        if let Some(user) = &self.user {
            headers.append(HERMES_USER, HeaderValue::from_str(user).with_context(|| format!("--user {user}"))?);
        }
        Ok(headers)
    }
}

fn status(explanation: &Explanation) -> ExitCode {
    let is_dropped = explanation.packet.as_deref().is_some_and(|packet| packet.starts_with("dropped"));
    let is_denied = explanation.decision == "deny" || is_dropped;
    if is_denied { ExitCode::from(DENIED) } else { ExitCode::SUCCESS }
}

/// Returns the narrowest prefix of a listener that contains the network.
fn narrowest(tun: &Tun, wanted: IpNet) -> Option<&Capture> {
    let holding = tun.captures.iter().filter(|capture| capture.network.contains(&wanted));
    holding.max_by_key(|capture| capture.network.prefix_len())
}

/// Returns the listener with the narrowest prefix that contains the network; it captures its packets.
fn holder(snapshot: &Snapshot, wanted: IpNet) -> Option<(&Listener, &Capture)> {
    let all = snapshot.listeners.iter().filter_map(|listener| match &listener.protocol {
        ListenerProtocol::Tun(tun) => Some((&**listener, narrowest(tun, wanted)?)),
        _ => None,
    });
    all.max_by_key(|(_, capture)| capture.network.prefix_len())
}

/// Explains how a tun listener captures the network.
fn captured(snapshot: &Snapshot, listener: &Listener, wanted: IpNet) -> Option<String> {
    let ListenerProtocol::Tun(tun) = &listener.protocol else { return None };
    let (name, own, device) = (&listener.name, narrowest(tun, wanted)?.network, &tun.device);
    let (holder, narrower) = holder(snapshot, wanted)?;
    if holder.name == *name {
        return Some(format!("listener {name} captures it with {own}, on device {device}"));
    }
    let (other, narrower) = (&holder.name, narrower.network);
    Some(format!("listener {other} captures it first, with {narrower}; listener {name} has {own}. Name the first one"))
}

fn requires_certificate(listener: &Listener) -> bool {
    listener.tls.as_ref().is_some_and(|tls| tls.client == ClientAuth::Required)
}

/// Returns true if the request's scheme is https. A client that speaks TLS itself asks for https. A node passes on the
/// scheme of its client, which is http unless that client used TLS.
fn is_https(listener: &Listener, trust: &Trust) -> bool {
    listener.tls.is_some() && trust.peer().is_none()
}
