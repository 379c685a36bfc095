//! The measurements of the case.
//!
//! In: the options. Out: the times of all fetches, and the number of Interests that reached the right replica. UDP
//! without an overlay takes turns with the overlay of each version of HTTP. Never: two fetches at once on the slow link.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context;
use hermes_ndn::Name;

use super::Options;
use super::consumer::{Consumer, Fetched};
use super::forwarders::Forwarders;
use super::lab::{self, Lab};
use super::nodes::{self, NAMESPACES, USERS, replica_of};
use super::producer::{self, Contents};
use super::way::Way;
use crate::program::last_words;
use crate::terminal::{Progress, bytes};

/// Everything that was measured.
#[derive(Debug, Default)]
pub(super) struct Played {
    /// By size and way.
    pub(super) fetches: BTreeMap<(usize, Way), Vec<Fetched>>,
    /// Empty files that the right replica answered, of those that were fetched.
    pub(super) landed: u32,
    pub(super) policy_fetches: u32,
    /// Why the last one did not land.
    pub(super) astray: Option<String>,
}

/// Names files so that no content is asked for twice.
#[derive(Default)]
struct Names(u64);

impl Names {
    fn next(&mut self, namespace: usize, size: usize) -> anyhow::Result<Name> {
        self.0 += 1;
        let (_, prefix) = NAMESPACES[namespace];
        format!("{prefix}/{size}/{}", self.0).parse().map_err(anyhow::Error::msg)
    }
}

/// Runs the case.
///
/// # Errors
/// A node does not start, or content does not arrive; the error has the last words of the nodes.
pub(super) async fn play(options: &Options, directory: &Path, progress: &Progress) -> anyhow::Result<Played> {
    progress.step("a device, two proxies and a server: four namespaces, with 10 Mbit/s to the device");
    let lab = Lab::new()?;
    let contents = Contents::new();
    let _producers = producer::start(&lab, &contents)?;
    nodes::issue_certificates(directory)?;
    let mut forwarders = Forwarders::new(&options.forwarder, directory);
    let mut target = lab::producer(0);
    if forwarders.is_enabled() {
        forwarders.start(lab.server(), lab::forwarder(), &format!("tcp://{target}")).await?;
        target = lab::forwarder();
    }
    let (mut played, mut names) = (Played::default(), Names::default());
    for way in Way::OVERLAYS {
        progress.step(&format!("seven nodes with {}", way.name()));
        let mut programs = nodes::start(&lab, directory, way, target).await?;
        let faces = faces(&lab, way, target, &mut forwarders).await?;
        let measured = measure(options, &lab, &contents, faces, &mut played, &mut names, progress).await;
        measured.map_err(|error| anyhow::anyhow!("{error:#}{}", last_words(&mut programs)))?;
        forwarders.truncate(1);
    }
    Ok(played)
}

/// Opens a face of the first user for each way: to the way itself, or to a forwarder before it.
async fn faces(
    lab: &Lab,
    overlay: Way,
    target: SocketAddr,
    forwarders: &mut Forwarders,
) -> anyhow::Result<Vec<(Way, Consumer)>> {
    let device = lab.device();
    let mut ways = vec![(overlay, "tcp", lab::device(0)), (Way::Udp, "udp", target)];
    if overlay == Way::OVERLAYS[0] {
        ways.push((Way::Tcp, "tcp", target));
    }
    let mut faces = Vec::new();
    for (number, (way, transport, address)) in ways.into_iter().enumerate() {
        let face = if forwarders.is_enabled() {
            let at = lab::device_forwarder(number);
            forwarders.start(device, at, &format!("{transport}://{address}")).await?;
            Consumer::tcp(device, at).await?
        } else if transport == "udp" {
            Consumer::udp(device, address).await?
        } else {
            Consumer::tcp(device, address).await?
        };
        faces.push((way, face));
    }
    Ok(faces)
}

async fn measure(
    options: &Options,
    lab: &Lab,
    contents: &Contents,
    mut faces: Vec<(Way, Consumer)>,
    played: &mut Played,
    names: &mut Names,
    progress: &Progress,
) -> anyhow::Result<()> {
    // Replica 0 serves namespace 0 of user 0.
    let (namespace, replica) = (0, 0);
    // Faces and sessions stay, as the paper's do, so that opening them is not measured.
    for (way, face) in &mut faces {
        face.fetch(&names.next(namespace, 0)?, &[]).await.with_context(|| way.name())?;
    }
    for size in options.sizes.iter().copied() {
        let expected = contents.of(replica, size);
        for repeat in 0..options.repeats {
            for (way, face) in &mut faces {
                let said = bytes(size as u64);
                progress.detail(&format!("{}: {said}, {} of {}", way.name(), repeat + 1, options.repeats));
                let fetched = face.fetch(&names.next(namespace, size)?, &expected).await;
                let fetched = fetched.with_context(|| format!("{}: {said}", way.name()))?;
                played.fetches.entry((size, *way)).or_default().push(fetched);
            }
        }
    }
    policy(options, lab, contents, played, names).await
}

/// Fetches short files for each user in each namespace. Each replica has other bytes.
async fn policy(
    options: &Options,
    lab: &Lab,
    contents: &Contents,
    played: &mut Played,
    names: &mut Names,
) -> anyhow::Result<()> {
    const SHORT: usize = 16;
    for user in 0..USERS.len() {
        let mut face = Consumer::tcp(lab.device(), lab::device(user)).await?;
        for namespace in 0..NAMESPACES.len() {
            let expected = contents.of(replica_of(user, namespace), SHORT);
            for _ in 0..options.policy_fetches.div_ceil((USERS.len() * NAMESPACES.len()) as u32) {
                played.policy_fetches += 1;
                match face.fetch(&names.next(namespace, SHORT)?, &expected).await {
                    Ok(_) => played.landed += 1,
                    Err(error) => played.astray = Some(format!("{error:#}")),
                }
            }
        }
    }
    Ok(())
}
