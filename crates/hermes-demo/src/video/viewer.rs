//! The user's side: requests a video and receives it with ffmpeg.
//!
//! In: a URL and the server to request it from; the address that receives RTP.
//! Out: the file that ffmpeg wrote, and the packets that a tap in front of it recorded.
//!
//! ffmpeg gets an SDP file, because its `rtp://` input reads one packet to detect the format and then reopens its
//! socket. Packets in between would be missing from every stream, overlay or not.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use http::Method;
use nix::sys::signal::Signal;
use tokio::time::{Instant, timeout};

use super::nodes::STREAM;
use super::tap::{Notes, Tap};
use crate::client::Client;
use crate::namespace::Namespace;
use crate::program::Program;

/// The receive buffer that ffmpeg requests (Table XIII). Table XIII also sets `fifo_size` to 500000, an option of plain
/// UDP that has no effect on RTP.
const BUFFER_SIZE: &str = "26214400";
/// The time that ffmpeg may take to listen, and to finish its file, on a busy machine.
const FFMPEG_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The silence after which a completely sent stream has ended. It allows for some TCP retransmissions.
const STREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// ffmpeg delays packets for half a second to wait for a missing one.
const REORDERING: Duration = Duration::from_secs(1);
/// The timeout of a request, which may have to outlive some lost SYNs.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// The request of a video and the addresses that receive it.
pub(super) struct Seat<'a> {
    /// The user's machine.
    pub(super) place: &'a Namespace,
    /// The prefix of file names: `overlay-60s`.
    pub(super) name: String,
    /// The address that receives RTP.
    pub(super) listen: SocketAddr,
    /// The port of the user's ffmpeg, after the tap.
    pub(super) screen: u16,
}

/// The received stream.
pub(super) struct Received {
    /// The packets that the tap recorded.
    pub(super) notes: Notes,
    /// The file that ffmpeg wrote.
    pub(super) file: PathBuf,
    /// The log of ffmpeg.
    pub(super) log: PathBuf,
    /// The last error lines of ffmpeg, if it exited before the stream ended.
    pub(super) gave_up: Option<String>,
}

/// A viewer who waits for a stream.
pub(super) struct Viewer {
    ffmpeg: Program,
    /// The tap that records the received packets.
    pub(super) tap: Tap,
    file: PathBuf,
    log: PathBuf,
}

impl Viewer {
    /// Starts ffmpeg and the tap in front of it.
    ///
    /// # Errors
    /// ffmpeg does not start to listen.
    pub(super) async fn sit_down(seat: &Seat<'_>, directory: &Path) -> anyhow::Result<Self> {
        let sdp = directory.join(format!("{}.sdp", seat.name));
        let file = directory.join(format!("got-{}.ts", seat.name));
        let log = directory.join(format!("got-{}.log", seat.name));
        std::fs::write(&sdp, session_description(seat.screen))?;
        let (description, retrieved) = (sdp.to_string_lossy(), file.to_string_lossy());
        let command = [
            &seat.place.prefix()[..],
            &["ffmpeg", "-nostdin", "-hide_banner", "-v", "repeat+verbose", "-y"],
            &["-protocol_whitelist", "file,udp,rtp", "-buffer_size", BUFFER_SIZE, "-i", &description],
            &["-c", "copy", &retrieved],
        ]
        .concat();
        let mut ffmpeg = Program::start("the user's ffmpeg", &log, &command)?;
        let screen = SocketAddr::from((Ipv4Addr::LOCALHOST, seat.screen));
        let until = Instant::now() + FFMPEG_TIMEOUT;
        while !seat.place.has_udp(seat.screen) {
            let alive = ffmpeg.ended().is_none() && Instant::now() < until;
            ensure!(alive, "the user's ffmpeg does not listen: {}", ffmpeg.last_lines(4).join("; "));
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let tap = Tap::open(seat.place, seat.listen, screen, None)?;
        Ok(Self { ffmpeg, tap, file, log })
    }

    /// Waits until no more packets of a stream of `sent` packets can arrive, and stops ffmpeg.
    ///
    /// # Errors
    /// ffmpeg does not exit.
    pub(super) async fn finish(mut self, sent: usize) -> anyhow::Result<Received> {
        let from = Instant::now();
        loop {
            let (count, last) = self.tap.so_far();
            if count >= sent || last.map_or(from, |last| last.max(from)).elapsed() > STREAM_IDLE_TIMEOUT {
                break;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        tokio::time::sleep(REORDERING).await;
        let gave_up = self.ffmpeg.ended().map(|_| self.complaints());
        if gave_up.is_none() {
            // ffmpeg cannot detect the end of an RTP stream. On SIGINT it completes the file and exits with 255.
            self.ffmpeg.signal(Signal::SIGINT);
            let ended = self.ffmpeg.wait(FFMPEG_TIMEOUT).await;
            ensure!(ended.is_some(), "the user's ffmpeg does not end: {}", self.ffmpeg.last_lines(4).join("; "));
        }
        Ok(Received { notes: self.tap.close().await?, file: self.file, log: self.log, gave_up })
    }

    fn complaints(&self) -> String {
        let words = ["error", "invalid", "monoton", "failed"];
        let mut lines = self.ffmpeg.last_lines(40);
        lines.retain(|line| words.iter().any(|word| line.to_lowercase().contains(word)));
        lines[lines.len().saturating_sub(4)..].join("; ")
    }
}

/// Requests a video; `stream` is the header by which distributors are selected.
///
/// # Errors
/// The response's status is not 200.
pub(super) async fn request_video(place: &Namespace, of: SocketAddr, url: &str, stream: &str) -> anyhow::Result<()> {
    let asked = async {
        let tcp = place.tcp()?.connect(of).await.with_context(|| format!("cannot connect to {of}"))?;
        Client::over(tcp).await?.ask_with(Method::GET, url, &[(STREAM, stream)], Bytes::new()).await
    };
    timeout(REQUEST_TIMEOUT, asked)
        .await
        .with_context(|| format!("{url} was not answered within {REQUEST_TIMEOUT:?}"))??;
    Ok(())
}

fn session_description(port: u16) -> String {
    format!(
        "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=video\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video {port} RTP/AVP 33\r\n"
    )
}
