//! The overlay of the IP case: two users' nodes, two ingresses, and a node on each machine that serves addresses.
//!
//! In: a lab, and the HTTP version of the hops. Out: nine `hermes proxy` processes, each in its namespace with its own
//! certificate; functions that replace their documents at run time; and their current sessions. A user's node captures
//! three prefixes, each with its own CONNECT-IP session. The ingress selects the machine by user and prefix.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::Protocol;
use super::lab::Lab;
use super::ping;
use crate::ca::{Authority, Proof};
use crate::client::Client;
use crate::namespace::Namespace;
use crate::overlay::{READY, start_node, wait_ready};
use crate::program::{self, Program};

/// The address that both users use for their own server.
pub(super) const HOME: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(super) const OFFICE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// The users' source addresses.
const USERS: &str = "10.20.0.0/16";
const CAMPUS: &str = "128.252.0.0/16";
const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9900);
/// The port on which nodes accept each other.
const OVERLAY: u16 = 9443;
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// A change that takes longer has failed.
const AT_LATEST: Duration = Duration::from_secs(15);

/// The nodes; they end with this value.
pub(super) struct Nodes {
    programs: Vec<Program>,
    lab: Arc<Lab>,
    directory: PathBuf,
    protocol: Protocol,
}

/// A session, as `/sessions` lists it.
#[derive(Debug, Deserialize)]
struct Seen {
    id: u64,
    kind: String,
    user: Option<String>,
    path: String,
    received: u64,
}

/// Watches a node for the first packet of Alice to [`HOME`] on a new session.
pub(super) struct Lookout<'a> {
    place: &'a Namespace,
    /// Sessions that existed before the change.
    known: HashSet<u64>,
}

impl Nodes {
    /// Starts the nodes.
    ///
    /// # Errors
    /// A node does not start; the error contains its last lines.
    pub(super) async fn start(lab: &Arc<Lab>, protocol: Protocol, directory: &Path) -> anyhow::Result<Self> {
        let authority = Authority::new(directory, "overlay-ca")?;
        let this = Self { programs: Vec::new(), lab: lab.clone(), directory: directory.to_owned(), protocol };
        this.launch(&authority).await
    }

    async fn launch(mut self, authority: &Authority) -> anyhow::Result<Self> {
        let lab = self.lab.clone();
        let plan = [
            ("alice-pl", &lab.alice_pl, server("alice-pl", &lab.alice_pl, &home("alice"))),
            ("alice-us", &lab.alice_us, server("alice-us", &lab.alice_us, &home("alice"))),
            ("bob-pl", &lab.bob_pl, server("bob-pl", &lab.bob_pl, &home("bob"))),
            ("office", &lab.office, server("office", &lab.office, &office())),
            ("campus", &lab.campus, server("campus", &lab.campus, &campus())),
            ("ingress-pl", &lab.ingress_pl, self.ingress("ingress-pl", "alice-pl")),
            ("ingress-us", &lab.ingress_us, self.ingress("ingress-us", "alice-pl")),
            ("alice", &lab.alice, self.user("alice", "ingress-pl")),
            ("bob", &lab.bob, self.user("bob", "ingress-pl")),
        ];
        let mut admins = Vec::new();
        for (name, place, document) in plan {
            let users: &[&str] = if matches!(name, "alice" | "bob") { &[name] } else { &[] };
            let standalone = name.starts_with("ingress");
            authority.issue(name, &Proof::Node { overlay: "ip", users, standalone })?;
            let config = self.document(name);
            std::fs::write(&config, document)?;
            self.programs.push(start_node(&self.directory, name, &config, &place.prefix())?);
            admins.push(place);
        }
        for (program, place) in self.programs.iter_mut().zip(admins) {
            wait_ready(program, READY, || Client::connect_from(place, ADMIN)).await?;
        }
        Ok(self)
    }

    fn document(&self, node: &str) -> PathBuf {
        self.directory.join(format!("{node}.yaml"))
    }

    /// Moves Alice to another ingress by her own node's document. Returns the time at which it was saved.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn send_alice_to(&self, ingress: &str) -> anyhow::Result<Instant> {
        self.save("alice", &self.user("alice", ingress))
    }

    /// Assigns another machine to Alice's [`HOME`], by the document of the ingress in the United States.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn move_home_to(&self, server: &str) -> anyhow::Result<Instant> {
        self.save("ingress-us", &self.ingress("ingress-us", server))
    }

    fn save(&self, node: &str, text: &str) -> anyhow::Result<Instant> {
        let document = self.document(node);
        let fresh = document.with_extension("yaml.new");
        std::fs::write(&fresh, text).with_context(|| format!("cannot write {}", fresh.display()))?;
        let saved = Instant::now();
        std::fs::rename(&fresh, &document).with_context(|| format!("cannot write {}", document.display()))?;
        Ok(saved)
    }

    /// Datagrams that the nodes dropped, by node and reason.
    ///
    /// # Errors
    /// A node does not answer.
    pub(super) async fn dropped(&self) -> anyhow::Result<Vec<String>> {
        let lab = &self.lab;
        let places = [
            ("alice", &lab.alice),
            ("bob", &lab.bob),
            ("ingress-pl", &lab.ingress_pl),
            ("ingress-us", &lab.ingress_us),
            ("alice-pl", &lab.alice_pl),
            ("alice-us", &lab.alice_us),
            ("bob-pl", &lab.bob_pl),
            ("office", &lab.office),
            ("campus", &lab.campus),
        ];
        let mut dropped = Vec::new();
        for (name, place) in places {
            let metrics = Client::connect_from(place, ADMIN).await?.get("/metrics").await?;
            let metrics = String::from_utf8_lossy(&metrics);
            let lines = metrics.lines().filter_map(|line| line.strip_prefix("hermes_datagrams_dropped_total"));
            dropped.extend(lines.filter(|line| !line.ends_with(" 0")).map(|line| format!("{name} {line}")));
        }
        Ok(dropped)
    }

    /// Stops the nodes in order.
    pub(super) async fn stop(&mut self) {
        program::stop_all(&mut self.programs, STOP_TIMEOUT).await;
    }

    /// The last log lines of each node.
    pub(super) fn last_words(&mut self) -> String {
        program::last_words(&mut self.programs)
    }

    fn user(&self, name: &str, ingress: &str) -> String {
        let address = if name == "alice" { "10.20.0.2" } else { "10.20.0.1" };
        let protocol = self.protocol.of_users();
        format!(
            "{head}listeners:\n\
             - name: device\n  protocol: tun\n  device: hermes0\n  address: {address}\n  \
             capture: [{HOME}/32, {OFFICE}/32, {CAMPUS}]\n  set-headers: {{hermes-user: {name}}}\n\
             routes:\n- {{name: all, match: {{kind: ip}}, upstream: {ingress}}}\n\
             upstreams:\n{pl}{us}",
            head = head(name, "dependent"),
            pl = upstream("ingress-pl", &self.lab.ingress_pl, protocol),
            us = upstream("ingress-us", &self.lab.ingress_us, protocol),
        )
    }

    /// Renders an ingress document; `home` is the machine that serves [`HOME`] for Alice.
    fn ingress(&self, name: &str, home: &str) -> String {
        let lab = &self.lab;
        let servers = [
            ("alice-pl", &lab.alice_pl),
            ("alice-us", &lab.alice_us),
            ("bob-pl", &lab.bob_pl),
            ("office", &lab.office),
            ("campus", &lab.campus),
        ];
        let place = if name == "ingress-us" { &lab.ingress_us } else { &lab.ingress_pl };
        let protocol = self.protocol.of_ingresses();
        let upstreams: String = servers.into_iter().map(|(name, place)| upstream(name, place, protocol)).collect();
        format!(
            "{head}listeners:\n{listener}routes:\n\
             - {{name: alice-home, match: {{kind: ip, user: alice, network: {HOME}}}, upstream: {home}}}\n\
             - {{name: bob-home, match: {{kind: ip, user: bob, network: {HOME}}}, upstream: bob-pl}}\n\
             - {{name: office, match: {{kind: ip, user: \"*\", network: {OFFICE}}}, upstream: office}}\n\
             - {{name: campus, match: {{kind: ip, user: \"*\", network: {CAMPUS}}}, upstream: campus}}\n\
             upstreams:\n{upstreams}",
            head = head(name, "standalone"),
            listener = overlay_listener(place),
        )
    }
}

impl<'a> Lookout<'a> {
    /// Records which sessions the node at `place` has already.
    ///
    /// # Errors
    /// The node does not answer.
    pub(super) async fn at(place: &'a Namespace) -> anyhow::Result<Self> {
        let mut this = Self { place, known: HashSet::new() };
        this.known = this.sessions().await?.into_iter().map(|session| session.id).collect();
        Ok(this)
    }

    /// Waits until the first echo request of Alice for [`HOME`] arrives at this node on a new session.
    ///
    /// # Errors
    /// No request arrived in time.
    pub(super) async fn wait(self) -> anyhow::Result<Instant> {
        let until = Instant::now() + AT_LATEST;
        let is_it = |session: &Seen| {
            session.kind == "ip" && session.user.as_deref() == Some("alice") && session.path.contains(&HOME.to_string())
        };
        loop {
            let sessions = self.sessions().await?;
            let mut new = sessions.iter().filter(|session| is_it(session) && !self.known.contains(&session.id));
            // Capsules that carry addresses are shorter than a packet, so they do not match.
            if new.any(|session| session.received >= ping::PACKET as u64) {
                return Ok(Instant::now());
            }
            ensure!(Instant::now() < until, "the changed route did not take effect within {AT_LATEST:?}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn sessions(&self) -> anyhow::Result<Vec<Seen>> {
        let sessions = Client::connect_from(self.place, ADMIN).await?.get("/sessions").await?;
        serde_json::from_slice(&sessions).context("/sessions")
    }
}

/// Connections without a session stay open: a user who returns to a hop finds it warm.
fn head(name: &str, role: &str) -> String {
    format!(
        "node: {name}\nrole: {role}\nadmin: {ADMIN}\nworkers: 1\ndrain: 250ms\naccess-log: {name}.access.json\n\
         identity: {{cert: {name}.pem, key: {name}.key, ca: overlay-ca.pem}}\n\
         limits: {{upstream-idle: 1h, keep-alive: 1h}}\n"
    )
}

fn overlay_listener(place: &Namespace) -> String {
    format!(
        "- {{name: overlay, bind: \"{}:{OVERLAY}\", protocol: http, http3: true, tls: {{client: required}}}}\n",
        place.address
    )
}

fn upstream(name: &str, place: &Namespace, protocol: &str) -> String {
    format!(
        "- {{name: {name}, protocol: {protocol}, endpoints: [\"{}:{OVERLAY}\"], tls: {{node: {name}}}}}\n",
        place.address
    )
}

fn server(name: &str, place: &Namespace, route: &str) -> String {
    format!("{}listeners:\n{}routes:\n{route}", head(name, "dependent"), overlay_listener(place))
}

fn home(user: &str) -> String {
    format!(
        "- {{name: home, match: {{kind: ip, user: {user}}}, terminate: {{tun: hermes0, address: {HOME}, assign: {USERS}}}}}\n"
    )
}

fn office() -> String {
    format!(
        "- {{name: office, match: {{kind: ip, user: \"*\"}}, terminate: {{tun: hermes0, address: {OFFICE}, assign: {USERS}}}}}\n"
    )
}

/// A router: the device leads to the network behind it.
fn campus() -> String {
    format!("- {{name: campus, match: {{kind: ip, user: \"*\"}}, terminate: {{tun: hermes0, assign: {USERS}}}}}\n")
}
