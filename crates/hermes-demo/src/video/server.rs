//! The video server: HTTP requests a file, RTP delivers it.
//!
//! In: `GET /FILE?port=PORT`. Out: status 200 at once, and the file as RTP/MPEG-TS over UDP to that port of the client.
//! Each stream has its own ffmpeg (the paper's Table XIII: 30 frames a second, libx264, rtp_mpegts, bufsize 3968k). The
//! server does not know Hermes: a request through the overlay comes from the node on its own machine, and the stream
//! goes there. A tap after ffmpeg records the sent packets.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::clip::Clip;
use super::lab::Lab;
use super::tap::{Notes, Tap};
use crate::program::Program;

/// The port of the server.
pub(super) const PORT: u16 = 8000;
/// Streams that wait to begin or to be analysed.
const STREAMS: usize = 16;
/// The maximum number of concurrent connections and streams.
const CONNECTIONS: usize = 64;
/// The time in which ffmpeg's last packets certainly reach the tap.
const SETTLE: Duration = Duration::from_millis(200);
/// The time that a stream may take beyond its file's length.
const STREAM_EXTRA_TIME: Duration = Duration::from_secs(60);

/// A stream that was sent.
pub(super) struct Sent {
    /// The destination.
    pub(super) to: SocketAddr,
    /// The packets that were sent.
    pub(super) notes: Notes,
    /// The stream as a file.
    pub(super) record: PathBuf,
}

/// A running server; ends with this value.
pub(super) struct Server {
    streams: mpsc::Receiver<anyhow::Result<Sent>>,
    _accepting: JoinSet<()>,
}

struct Shelf {
    lab: Arc<Lab>,
    clips: Vec<Clip>,
    directory: PathBuf,
    sent: mpsc::Sender<anyhow::Result<Sent>>,
}

impl Server {
    /// Serves the clips on the lab's server; streams are recorded in `directory`.
    ///
    /// # Errors
    /// The port is in use.
    pub(super) fn start(lab: &Arc<Lab>, clips: &[Clip], directory: &Path) -> anyhow::Result<Self> {
        let listener = lab.server.listen((Ipv4Addr::UNSPECIFIED, PORT).into())?;
        let (sent, streams) = mpsc::channel(STREAMS);
        let shelf = Shelf { lab: lab.clone(), clips: clips.to_vec(), directory: directory.to_owned(), sent };
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, Arc::new(shelf)));
        Ok(Self { streams, _accepting: accepting })
    }

    /// Waits for the next stream that ended.
    ///
    /// # Errors
    /// The stream failed.
    pub(super) async fn next(&mut self) -> anyhow::Result<Sent> {
        self.streams.recv().await.context("the video server ended")?
    }
}

/// A request for a file.
struct Order {
    clip: Clip,
    to: SocketAddr,
}

async fn accept(listener: TcpListener, shelf: Arc<Shelf>) {
    let (orders, mut queue) = mpsc::channel::<Order>(STREAMS);
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if tasks.len() < CONNECTIONS => {
                let Ok((stream, from)) = accepted else { continue };
                tasks.spawn(talk(stream, from, shelf.clone(), orders.clone()));
            }
            Some(order) = queue.recv() => {
                tasks.spawn(stream_and_tell(order, shelf.clone()));
            }
            Some(_) = tasks.join_next() => {}
        }
    }
}

async fn talk(stream: TcpStream, from: SocketAddr, shelf: Arc<Shelf>, orders: mpsc::Sender<Order>) {
    let service = service_fn(move |request| {
        let answer = answer(&request, from, &shelf, &orders);
        async move { Ok::<_, Infallible>(answer) }
    });
    // An error means that the client closed early; it then does not want the video.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

fn answer(
    request: &Request<Incoming>,
    from: SocketAddr,
    shelf: &Shelf,
    orders: &mpsc::Sender<Order>,
) -> Response<Full<Bytes>> {
    let say = |status, text: &str| {
        let mut response = Response::new(Full::new(Bytes::from(format!("{text}\n"))));
        *response.status_mut() = status;
        response
    };
    let asked = request.uri().path().trim_start_matches('/');
    let port = request.uri().query().and_then(|query| query.strip_prefix("port=")).map(str::parse);
    let (Some(clip), Some(Ok(port))) = (shelf.clips.iter().find(|clip| clip.name == asked), port) else {
        return say(StatusCode::NOT_FOUND, "ask for /FILE?port=PORT");
    };
    match orders.try_send(Order { clip: clip.clone(), to: SocketAddr::new(from.ip(), port) }) {
        Ok(()) => say(StatusCode::OK, "it comes by RTP"),
        Err(_) => say(StatusCode::SERVICE_UNAVAILABLE, "too many streams"),
    }
}

async fn stream_and_tell(order: Order, shelf: Arc<Shelf>) {
    let sent = stream(order, &shelf).await;
    let _ = shelf.sent.send(sent).await;
}

async fn stream(order: Order, shelf: &Shelf) -> anyhow::Result<Sent> {
    let Order { clip, to } = order;
    let name = format!("sent-{}-to-{}-{}", clip.name, to.ip(), to.port());
    let record = shelf.directory.join(format!("{name}.ts"));
    // The socket may use any address of the server's machine: packets to the user leave by the lossy link.
    let tap = Tap::open(&shelf.lab.server, (Ipv4Addr::UNSPECIFIED, 0).into(), to, Some(&record))?;
    let source = clip.path.to_string_lossy();
    let destination = format!("rtp://127.0.0.1:{}", tap.address.port());
    let command = [
        &shelf.lab.server.prefix()[..],
        &["ffmpeg", "-nostdin", "-hide_banner", "-v", "error", "-re", "-i", &source],
        // The rate is about 0.76 Mbit/s with sound and MPEG-TS headers, as in the paper's files. ffmpeg uses bufsize
        // only together with maxrate; its streaming guide sets maxrate to half of bufsize.
        &["-c:v", "libx264", "-preset", "superfast", "-b:v", "660k", "-maxrate", "1984k", "-bufsize", "3968k"],
        // With lengths in the headers a decoder knows that the last picture is complete; otherwise it would wait for
        // the next one.
        &["-c:a", "copy", "-f", "rtp_mpegts", "-mpegts_muxer_options", "omit_video_pes_length=0", &destination],
    ]
    .concat();
    let mut ffmpeg = Program::start("the server's ffmpeg", &shelf.directory.join(format!("{name}.log")), &command)?;
    let ended = ffmpeg.wait(Duration::from_secs(clip.seconds) + STREAM_EXTRA_TIME).await;
    let said = ffmpeg.last_lines(4).join("; ");
    let ended = ended.with_context(|| format!("the server's ffmpeg does not end: {said}"))?;
    ensure!(ended.success(), "the server's ffmpeg failed ({ended}): {said}");
    tokio::time::sleep(SETTLE).await;
    Ok(Sent { to, notes: tap.close().await?, record })
}
