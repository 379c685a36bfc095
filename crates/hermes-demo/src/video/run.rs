//! One run of the video case: every clip over the overlay and directly, all in parallel.
//!
//! In: the clips. Out: for each stream the sent packets, the received packets, and ffmpeg's result.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::clip::Clip;
use super::comparison::{Complaints, Decoded, missed_by_ffmpeg};
use super::lab::{Lab, Link};
use super::nodes::{APPS, Nodes, Ports};
use super::server::{self, Sent, Server};
use super::viewer::{Received, Seat, Viewer, request_video};

/// The time that a viewer waits beyond the clip's length: Table XIII has 90 s for one minute and 150 s for two.
const VIEWER_EXTRA_TIME: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The path of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Variant {
    /// Through five nodes.
    Overlay,
    /// By RTP straight to the user.
    Direct,
}

/// The results of one stream.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Stream {
    pub(super) way: Variant,
    pub(super) seconds: u64,
    /// The distributor that forwarded both the request and the stream.
    pub(super) distributor: Option<&'static str>,
    pub(super) packets_sent: u64,
    pub(super) packets_received: u64,
    pub(super) packets_missed: u64,
    pub(super) packets_altered: u64,
    pub(super) frames_sent: u64,
    /// Frames that ffmpeg decoded from the received stream.
    pub(super) frames_processed: u64,
    /// Frames that are missing, or differ in any pixel from the sent ones.
    pub(super) frames_damaged: u64,
    /// Frames that ffmpeg reports as corrupt.
    pub(super) frames_corrupt: u64,
    pub(super) macroblock_errors: u64,
    pub(super) macroblocks_concealed: u64,
    /// Packets that ffmpeg reports as missed.
    pub(super) missed_by_ffmpeg: u64,
    pub(super) file_bytes: u64,
    /// The reason why the user's ffmpeg exited before the stream ended: damaged input broke its muxer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gave_up: Option<String>,
}

/// The results of one run.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Round {
    pub(super) streams: Vec<Stream>,
    /// Counters of the lossy link.
    pub(super) link: Link,
    /// Datagrams that the five nodes dropped.
    pub(super) dropped_by_nodes: u64,
}

/// The progress of rounds, for the terminal.
#[derive(Debug, Default)]
pub(super) struct Board {
    /// Packets received over the overlay, and directly.
    pub(super) packets: [AtomicUsize; 2],
}

/// A stream that is expected.
struct Expected {
    clip: Clip,
    way: Variant,
    ports: Ports,
    /// The destination to which the video server sends the stream.
    to: SocketAddr,
    viewer: Viewer,
    since: Instant,
    /// The number of packets that the board already counts.
    shown: usize,
}

/// Plays one round.
///
/// # Errors
/// A stream was not sent or not received to its end.
pub(super) async fn play(number: usize, clips: &[Clip], directory: &Path, board: &Board) -> anyhow::Result<Round> {
    let lab = Arc::new(Lab::new(number)?);
    let streams: Vec<String> =
        clips.iter().map(|clip| format!("{:08x}-{}s", rand::random::<u32>(), clip.seconds)).collect();
    let mut nodes = Nodes::start(&lab, &streams, directory).await?;
    let mut server = Server::start(&lab, clips, directory)?;
    match stream_all(&lab, clips, &streams, &mut server, directory, board).await {
        Ok(streams) => conclude(&lab, nodes, clips, streams).await,
        Err(error) => Err(error.context(format!("the nodes' last lines:{}", nodes.last_words()))),
    }
}

async fn stream_all(
    lab: &Lab,
    clips: &[Clip],
    streams: &[String],
    server: &mut Server,
    directory: &Path,
    board: &Board,
) -> anyhow::Result<Vec<Stream>> {
    let mut expected = Vec::new();
    for (index, clip) in clips.iter().enumerate() {
        for way in [Variant::Overlay, Variant::Direct] {
            expected.push(expect(lab, clip, way, Ports::of(index), directory).await?);
        }
    }
    for Expected { clip, way, ports, .. } in &expected {
        let stream = &streams[clips.iter().position(|other| other.name == clip.name).unwrap_or_default()];
        let (of, name) = match way {
            Variant::Overlay => (APPS, "VIDEO".to_owned()),
            Variant::Direct => {
                ((lab.server.address, server::PORT).into(), format!("{}:{}", lab.server.address, server::PORT))
            }
        };
        let url = format!("http://{name}/{}?port={}", clip.name, ports.rtp);
        request_video(&lab.user, of, &url, stream).await?;
    }
    receive_all(expected, server, board).await
}

async fn expect(lab: &Lab, clip: &Clip, way: Variant, ports: Ports, directory: &Path) -> anyhow::Result<Expected> {
    let (name, listen, screen, to) = match way {
        Variant::Overlay => {
            ("overlay", (Ipv4Addr::LOCALHOST, ports.delivery).into(), 2000, (Ipv4Addr::LOCALHOST, ports.rtp).into())
        }
        Variant::Direct => {
            let address: SocketAddr = (lab.user.address, ports.rtp).into();
            ("direct", address, 3000, address)
        }
    };
    let seat =
        Seat { place: &lab.user, name: format!("{name}-{}s", clip.seconds), listen, screen: ports.delivery + screen };
    let viewer = Viewer::sit_down(&seat, directory).await?;
    Ok(Expected { clip: clip.clone(), way, ports, to, viewer, since: Instant::now(), shown: 0 })
}

/// Takes each stream when the server has sent it, waits for its viewer, and analyses the received file.
async fn receive_all(mut expected: Vec<Expected>, server: &mut Server, board: &Board) -> anyhow::Result<Vec<Stream>> {
    let mut judging = JoinSet::new();
    let mut ticks = tokio::time::interval(POLL_INTERVAL);
    while !expected.is_empty() {
        tokio::select! {
            sent = server.next() => {
                let sent = sent?;
                let index = expected.iter().position(|expected| expected.to == sent.to);
                let index = index.with_context(|| format!("the server sent to {}, where nobody waits", sent.to))?;
                judging.spawn(compare(expected.swap_remove(index), sent));
            }
            _ = ticks.tick() => expected.iter_mut().try_for_each(|expected| expected.update_progress(board))?,
        }
    }
    let mut streams = Vec::new();
    while let Some(judged) = judging.join_next().await {
        streams.push(judged??);
    }
    streams.sort_by_key(|stream| (stream.seconds, stream.way));
    Ok(streams)
}

impl Expected {
    /// Updates the progress.
    ///
    /// # Errors
    /// The viewer's wait timed out.
    fn update_progress(&mut self, board: &Board) -> anyhow::Result<()> {
        let (count, _) = self.viewer.tap.so_far();
        let column = usize::from(self.way == Variant::Direct);
        board.packets[column].fetch_add(count.saturating_sub(self.shown), Ordering::Relaxed);
        self.shown = count;
        let patience = Duration::from_secs(self.clip.seconds) + VIEWER_EXTRA_TIME;
        ensure!(
            self.since.elapsed() < patience,
            "{} did not end within {patience:?} ({:?}, {count} packets so far)",
            self.clip.name,
            self.way
        );
        Ok(())
    }
}

async fn compare(expected: Expected, sent: Sent) -> anyhow::Result<Stream> {
    let Expected { clip, way, viewer, .. } = expected;
    let Received { notes, file, log, gave_up } = viewer.finish(sent.notes.len()).await?;
    let difference = sent.notes.compare(&notes);
    let before = Decoded::of(&sent.record).await?;
    let after = Decoded::of(&file).await?;
    let whole = before.frames() > 0 && before.complaints == Complaints::default();
    ensure!(whole, "the video was broken before it was sent: {}", sent.record.display());
    Ok(Stream {
        way,
        seconds: clip.seconds,
        distributor: None,
        packets_sent: difference.sent,
        packets_received: difference.received,
        packets_missed: difference.sent - difference.received,
        packets_altered: difference.altered,
        frames_sent: before.frames(),
        frames_processed: after.frames(),
        frames_damaged: before.frames() - before.also_in(&after),
        frames_corrupt: after.complaints.corrupt_frames,
        macroblock_errors: after.complaints.macroblock_errors,
        macroblocks_concealed: after.complaints.concealed,
        missed_by_ffmpeg: missed_by_ffmpeg(&String::from_utf8_lossy(&std::fs::read(&log)?)),
        file_bytes: std::fs::metadata(&file)?.len(),
        gave_up,
    })
}

/// Reads the counters of the nodes and the link, and stops the nodes.
async fn conclude(lab: &Lab, mut nodes: Nodes, clips: &[Clip], mut streams: Vec<Stream>) -> anyhow::Result<Round> {
    let dropped_by_nodes = nodes.dropped().await?;
    nodes.stop().await;
    for stream in streams.iter_mut().filter(|stream| stream.way == Variant::Overlay) {
        let index = clips.iter().position(|clip| clip.seconds == stream.seconds).unwrap_or_default();
        stream.distributor = Some(nodes.distributor(&clips[index], Ports::of(index))?);
    }
    Ok(Round { streams, link: lab.link()?, dropped_by_nodes })
}
