//! The user's side: asks for a video and receives it, by ffmpeg.
//!
//! In: a URL and the address to ask it of; the address where RTP will come. Out: the file that
//! ffmpeg retrieved, and what a tap in front of it noted. ffmpeg gets an SDP, since its `rtp://`
//! input reads one packet to learn the format and then opens its socket anew: what comes in between
//! would be missing from every stream, overlay or not.

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
use crate::place::Place;
use crate::program::Program;

/// Receive buffer that ffmpeg asks for (Table XIII). Its `fifo_size` of 500000 is an option of bare
/// UDP and has no meaning for RTP.
const BUFFER_SIZE: &str = "26214400";
/// How long ffmpeg may take to listen, and to finish its file, on a machine that has much else to do.
const FFMPEG: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);
/// A stream that was sent whole and is silent for so long is over: TCP may take some retries.
const SILENCE: Duration = Duration::from_secs(3);
/// ffmpeg holds packets back for half a second while it waits for one that is missing.
const REORDERING: Duration = Duration::from_secs(1);
/// Asking may have to outlive some lost SYNs.
const ASKING: Duration = Duration::from_secs(15);

/// How a video is asked for and where it is received.
pub(super) struct Seat<'a> {
    /// The user's machine.
    pub(super) place: &'a Place,
    /// For files: `overlay-60s`.
    pub(super) name: String,
    /// Where RTP comes to.
    pub(super) listen: SocketAddr,
    /// Where the user's ffmpeg listens, behind the tap.
    pub(super) screen: u16,
}

/// What came.
pub(super) struct Received {
    /// At the tap.
    pub(super) notes: Notes,
    /// What ffmpeg made of it.
    pub(super) file: PathBuf,
    /// What ffmpeg said.
    pub(super) log: PathBuf,
    /// Its last complaints, where it ended before the stream did.
    pub(super) gave_up: Option<String>,
}

/// A viewer who waits for a stream.
pub(super) struct Viewer {
    ffmpeg: Program,
    /// What comes by.
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
        let until = Instant::now() + FFMPEG;
        while !seat.place.has_udp(seat.screen) {
            let alive = ffmpeg.ended().is_none() && Instant::now() < until;
            ensure!(alive, "the user's ffmpeg does not listen: {}", ffmpeg.last_lines(4).join("; "));
            tokio::time::sleep(LOOK).await;
        }
        let tap = Tap::open(seat.place, seat.listen, screen, None)?;
        Ok(Self { ffmpeg, tap, file, log })
    }

    /// Waits until nothing more can come of a stream of `sent` packets, and ends ffmpeg.
    ///
    /// # Errors
    /// ffmpeg does not end.
    pub(super) async fn finish(mut self, sent: usize) -> anyhow::Result<Received> {
        let from = Instant::now();
        loop {
            let (count, last) = self.tap.so_far();
            if count >= sent || last.map_or(from, |last| last.max(from)).elapsed() > SILENCE {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        tokio::time::sleep(REORDERING).await;
        let gave_up = self.ffmpeg.ended().map(|_| self.complaints());
        if gave_up.is_none() {
            // It has no other way to learn that a stream is over; it writes the file's end and says 255.
            self.ffmpeg.signal(Signal::SIGINT);
            let ended = self.ffmpeg.wait(FFMPEG).await;
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

/// Asks for a video; `stream` is the header by which distributors are chosen.
///
/// # Errors
/// It was not answered with 200.
pub(super) async fn ask(place: &Place, of: SocketAddr, url: &str, stream: &str) -> anyhow::Result<()> {
    let asked = async {
        let tcp = place.tcp()?.connect(of).await.with_context(|| format!("cannot connect to {of}"))?;
        Client::over(tcp).await?.ask_with(Method::GET, url, &[(STREAM, stream)], Bytes::new()).await
    };
    timeout(ASKING, asked).await.with_context(|| format!("{url} was not answered within {ASKING:?}"))??;
    Ok(())
}

fn session_description(port: u16) -> String {
    format!(
        "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=video\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video {port} RTP/AVP 33\r\n"
    )
}
