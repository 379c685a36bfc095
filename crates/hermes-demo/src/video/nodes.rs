//! The overlay of the video case: user's node, ingress, two distributors, server's node.
//!
//! In: a lab and the clips. Out: five `hermes proxy` processes, each in its namespace with its own certificate. A
//! request for `http://VIDEO/FILE` goes from the user's node through the ingress and one distributor to the server's
//! node. The RTP stream enters there as UDP and returns on the same path as CONNECT-UDP to `ALICE-VIDEO:PORT`. Both
//! carry the header `video-stream`. Each end selects a distributor by its hash, so both select the same one.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use super::clip::Clip;
use super::lab::Lab;
use super::server;
use crate::ca::{Authority, Proof};
use crate::client::Client;
use crate::namespace::Namespace;
use crate::overlay::{READY, start_node, wait_ready};
use crate::program::{self, Program};

/// The address at which the user's node accepts requests, on the user's own loopback.
pub(super) const APPS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// The header by which both ends select a distributor.
pub(super) const STREAM: &str = "video-stream";
const ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9900);
/// The port on which nodes accept each other.
const OVERLAY: u16 = 9443;
const DISTRIBUTORS: [&str; 2] = ["dist-1", "dist-2"];
const STOP: Duration = Duration::from_secs(3);

/// A clip's ports. They are even: the next one is for RTCP.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ports {
    /// The port that the client requests for RTP, in either way.
    pub(super) rtp: u16,
    /// The port to which the user's node delivers the stream from the overlay.
    pub(super) delivery: u16,
}

impl Ports {
    /// The ports of the clip with this index.
    pub(super) fn of(index: usize) -> Self {
        let offset = 2 * u16::try_from(index).unwrap_or_default();
        Self { rtp: 5004 + offset, delivery: 7004 + offset }
    }
}

/// Five nodes; they end with this value.
pub(super) struct Nodes {
    programs: Vec<Program>,
    lab: Arc<Lab>,
    directory: PathBuf,
}

impl Nodes {
    /// Starts the nodes. `streams` has the header's value for each clip.
    ///
    /// # Errors
    /// A node does not start; the error contains its last lines.
    pub(super) async fn start(lab: &Arc<Lab>, streams: &[String], directory: &Path) -> anyhow::Result<Self> {
        let authority = Authority::new(directory, "overlay-ca")?;
        let mut this = Self { programs: Vec::new(), lab: lab.clone(), directory: directory.to_owned() };
        let plan = [
            ("alice", user(lab, streams)),
            ("ingress", ingress(lab)),
            (DISTRIBUTORS[0], distributor(lab, 0)),
            (DISTRIBUTORS[1], distributor(lab, 1)),
            ("server", server_node(lab, streams)),
        ];
        for ((name, document), place) in plan.into_iter().zip(places(lab)) {
            let standalone = !matches!(name, "alice" | "server");
            let users: &[&str] = if name == "alice" { &["alice"] } else { &[] };
            authority.issue(name, &Proof::Node { overlay: "video", users, standalone })?;
            let config = directory.join(format!("{name}.yaml"));
            std::fs::write(&config, head(name, standalone) + &document)?;
            this.programs.push(start_node(directory, name, &config, &place.prefix())?);
        }
        for (program, place) in this.programs.iter_mut().zip(places(lab)) {
            wait_ready(program, READY, || Client::connect_from(place, ADMIN)).await?;
        }
        Ok(this)
    }

    /// Datagrams that the nodes dropped in total.
    ///
    /// # Errors
    /// A node does not answer.
    pub(super) async fn dropped(&self) -> anyhow::Result<u64> {
        let mut dropped = 0;
        for place in places(&self.lab) {
            let metrics = Client::connect_from(place, ADMIN).await?.get("/metrics").await?;
            let metrics = String::from_utf8_lossy(&metrics);
            let lines = metrics.lines().filter(|line| line.starts_with("hermes_datagrams_dropped_total"));
            dropped += lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum::<u64>();
        }
        Ok(dropped)
    }

    /// Stops the nodes in order, which completes their logs.
    pub(super) async fn stop(&mut self) {
        program::stop_all(&mut self.programs, STOP).await;
    }

    /// The last log lines of each node.
    pub(super) fn last_words(&mut self) -> String {
        program::last_words(&mut self.programs)
    }

    /// The distributor that forwarded a clip's request and its RTP. Requires [`Nodes::stop`] first.
    ///
    /// # Errors
    /// The request and the stream used different distributors, or more than one.
    pub(super) fn distributor(&self, clip: &Clip, ports: Ports) -> anyhow::Result<&'static str> {
        let mut found = None;
        for name in DISTRIBUTORS {
            let log = std::fs::read_to_string(self.directory.join(format!("{name}.access.json")))?;
            let (mut requests, mut flows) = (0, 0);
            for line in log.lines() {
                let record: serde_json::Value = serde_json::from_str(line).context("an access log")?;
                let text = |field: &str| record[field].as_str().unwrap_or_default();
                requests += usize::from(text("kind") == "http" && text("path").trim_start_matches('/') == clip.name);
                flows += usize::from(text("kind") == "udp" && text("authority").ends_with(&format!(":{}", ports.rtp)));
            }
            match (requests, flows) {
                (0, 0) => {}
                (1, 1) if found.is_none() => found = Some(name),
                _ => bail!("{name} carried {requests} requests for {} and {flows} flows of it", clip.name),
            }
        }
        ensure!(found.is_some(), "no distributor carried {}", clip.name);
        Ok(found.unwrap_or_default())
    }
}

fn places(lab: &Lab) -> [&Namespace; 5] {
    [&lab.user, &lab.ingress, &lab.distributors[0], &lab.distributors[1], &lab.server]
}

fn head(name: &str, standalone: bool) -> String {
    let role = if standalone { "standalone" } else { "dependent" };
    format!(
        "node: {name}\nrole: {role}\nadmin: {ADMIN}\nworkers: 1\ndrain: 250ms\naccess-log: {name}.access.json\n\
         identity: {{cert: {name}.pem, key: {name}.key, ca: overlay-ca.pem}}\n"
    )
}

fn overlay_listener(place: &Namespace) -> String {
    format!("- {{name: overlay, bind: \"{}:{OVERLAY}\", protocol: http, tls: {{client: required}}}}\n", place.address)
}

fn upstream(name: &str, place: &Namespace) -> String {
    format!("- {{name: {name}, protocol: h2, endpoints: [\"{}:{OVERLAY}\"], tls: {{node: {name}}}}}\n", place.address)
}

fn distributors(lab: &Lab) -> String {
    let [one, two] = &lab.distributors;
    format!(
        "- name: distributors\n  protocol: h2\n  endpoints: [\"{}:{OVERLAY}\", \"{}:{OVERLAY}\"]\n  \
         balance: {{hash: {{header: {STREAM}}}}}\n  tls: {{node: [dist-1, dist-2]}}\n",
        one.address, two.address
    )
}

const VIDEO: &str = "match: {kind: http, authority: VIDEO}";
const RTP: &str = "match: {kind: udp, authority: \"ALICE-VIDEO:*\"}";

fn user(lab: &Lab, streams: &[String]) -> String {
    let mut text = format!(
        "listeners:\n- {{name: apps, bind: \"{APPS}\", protocol: http, set-headers: {{hermes-user: alice}}}}\n\
         {overlay}routes:\n- {{name: video, {VIDEO}, upstream: ingress}}\n",
        overlay = overlay_listener(&lab.user),
    );
    for index in 0..streams.len() {
        let Ports { rtp, delivery } = Ports::of(index);
        text += &format!(
            "- {{name: rtp-{rtp}, match: {{kind: udp, authority: \"ALICE-VIDEO:{rtp}\"}}, \
             terminate: {{udp: \"127.0.0.1:{delivery}\"}}}}\n"
        );
    }
    text + "upstreams:\n" + &upstream("ingress", &lab.ingress)
}

fn ingress(lab: &Lab) -> String {
    format!(
        "listeners:\n{}routes:\n- {{name: video, {VIDEO}, upstream: distributors}}\n\
         - {{name: rtp, {RTP}, upstream: alice}}\nupstreams:\n{}{}",
        overlay_listener(&lab.ingress),
        distributors(lab),
        upstream("alice", &lab.user),
    )
}

fn distributor(lab: &Lab, index: usize) -> String {
    format!(
        "listeners:\n{}routes:\n- {{name: video, {VIDEO}, upstream: server}}\n\
         - {{name: rtp, {RTP}, upstream: ingress}}\nupstreams:\n{}{}",
        overlay_listener(&lab.distributors[index]),
        upstream("server", &lab.server),
        upstream("ingress", &lab.ingress),
    )
}

fn server_node(lab: &Lab, streams: &[String]) -> String {
    let mut text = format!("listeners:\n{}", overlay_listener(&lab.server));
    for (index, stream) in streams.iter().enumerate() {
        let Ports { rtp, .. } = Ports::of(index);
        text += &format!(
            "- {{name: rtp-{rtp}, bind: \"127.0.0.1:{rtp}\", protocol: udp, authority: \"ALICE-VIDEO:{rtp}\", \
             set-headers: {{{STREAM}: {stream}}}}}\n"
        );
    }
    text + &format!(
        "routes:\n- {{name: video, {VIDEO}, terminate: {{http: \"127.0.0.1:{}\"}}}}\n\
         - {{name: rtp, {RTP}, upstream: distributors}}\nupstreams:\n{}",
        server::PORT,
        distributors(lab)
    )
}
