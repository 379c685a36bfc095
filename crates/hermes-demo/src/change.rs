//! A change of the overlay under load.
//!
//! In: a running overlay. Sixteen programs request `http://SHOP/whoami` continuously, one uploads and one keeps a TCP
//! connection open. Then documents are applied that map SHOP to another server. Out: the time from the command until
//! the change was in effect, and the number of failures. Exchanges in progress continue: the upload ends at the server
//! where it began.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::Request;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::client::{Client, RESPONSE_TIMEOUT};
use super::content::content;
use super::overlay::Typed;

const CLIENTS: usize = 16;
/// Duration of the load before the change, and after it took effect.
const LOAD_BEFORE_CHANGE: Duration = Duration::from_millis(400);
const LOAD_AFTER_CHANGE: Duration = Duration::from_millis(400);
/// A change that takes longer has failed.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two chunks of the upload and of the TCP connection.
const CHUNK_INTERVAL: Duration = Duration::from_millis(10);
const CHUNK_BYTES: usize = 16 << 10;
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// A program stops after this number of failures.
const MAX_FAILURES: usize = 100;

/// The effect of the change.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Changed {
    /// The command that changed it.
    pub(crate) applied: Typed,
    /// Time from the command until every request that began later was served by the new server.
    pub(crate) in_effect_ms: f64,
    /// Time from the command until the first response of the new server.
    pub(crate) first_answer_ms: f64,
    /// Requests during the whole measurement.
    pub(crate) requests: usize,
    /// Requests without the expected response.
    pub(crate) failed: usize,
    /// Requests that the new server answered.
    pub(crate) by_new_server: usize,
    /// Bytes of the upload that was in progress.
    pub(crate) upload_bytes: usize,
    /// Bytes of the TCP connection that was in progress.
    pub(crate) tcp_bytes: usize,
}

/// One request: its start, the arrival of its response, and whether the new server answered.
struct Asked {
    begun: Instant,
    done: Instant,
    green: bool,
}

/// The requests of one program, and its failures.
#[derive(Default)]
struct Asker {
    asked: Vec<Asked>,
    failures: Vec<anyhow::Error>,
}

/// Runs the load, applies the change, and waits until every program was served by the new server.
///
/// # Errors
/// Any failure during the measurement.
pub(crate) async fn under_load(
    apps: SocketAddr,
    database: SocketAddr,
    change: impl AsyncFnOnce() -> anyhow::Result<Typed>,
) -> anyhow::Result<Changed> {
    let stop = Arc::new(AtomicBool::new(false));
    let noticed = Arc::new(AtomicUsize::new(0));
    let mut askers = JoinSet::new();
    for _ in 0..CLIENTS {
        askers.spawn(ask_on(apps, stop.clone(), noticed.clone()));
    }
    let mut upload = JoinSet::new();
    upload.spawn(upload_on(apps, stop.clone()));
    let mut tcp = JoinSet::new();
    tcp.spawn(talk_on(database, stop.clone()));

    tokio::time::sleep(LOAD_BEFORE_CHANGE).await;
    let typed = Instant::now();
    let applied = change().await?;
    while noticed.load(Ordering::Relaxed) < CLIENTS && typed.elapsed() < CHANGE_TIMEOUT {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    tokio::time::sleep(LOAD_AFTER_CHANGE).await;
    stop.store(true, Ordering::Relaxed);

    let mut all = Asker::default();
    while let Some(done) = askers.join_next().await {
        let mut one = done?;
        all.asked.append(&mut one.asked);
        all.failures.append(&mut one.failures);
    }
    let upload_bytes = finished(upload).await.context("the upload that was under way")?;
    let tcp_bytes = finished(tcp).await.context("the TCP connection that was under way")?;
    evaluate(all, typed, applied, [upload_bytes, tcp_bytes])
}

fn evaluate(
    Asker { asked, failures }: Asker,
    typed: Instant,
    applied: Typed,
    [upload_bytes, tcp_bytes]: [usize; 2],
) -> anyhow::Result<Changed> {
    let (requests, failed) = (asked.len() + failures.len(), failures.len());
    if let Some(first) = failures.into_iter().next() {
        return Err(first.context(format!("{failed} of {requests} requests failed during the change; one of them")));
    }
    let ms = |at: Instant| at.saturating_duration_since(typed).as_secs_f64() * 1e3;
    let by_new_server = asked.iter().filter(|asked| asked.green).count();
    let Some(first) = asked.iter().filter(|asked| asked.green).map(|asked| asked.done).min() else {
        bail!("the change did not take effect within {CHANGE_TIMEOUT:?}");
    };
    ensure!(first > typed, "the new server answered before the overlay was changed");
    let last_of_old = asked.iter().filter(|asked| !asked.green).map(|asked| asked.begun).max();
    ensure!(
        last_of_old.is_none_or(|begun| begun < typed + CHANGE_TIMEOUT),
        "some requests still went to the old server"
    );
    Ok(Changed {
        applied,
        in_effect_ms: last_of_old.map_or(0.0, ms).max(ms(first)),
        first_answer_ms: ms(first),
        requests,
        failed,
        by_new_server,
        upload_bytes,
        tcp_bytes,
    })
}

async fn finished(mut task: JoinSet<anyhow::Result<usize>>) -> anyhow::Result<usize> {
    let done = timeout(RESPONSE_TIMEOUT, task.join_next()).await.context("did not end")?;
    done.context("did not run")??
}

/// Sends requests continuously. A failed request is counted, and repeated on another connection.
async fn ask_on(apps: SocketAddr, stop: Arc<AtomicBool>, noticed: Arc<AtomicUsize>) -> Asker {
    let mut this = Asker::default();
    let mut client = None;
    while !stop.load(Ordering::Relaxed) && this.failures.len() < MAX_FAILURES {
        match send_request(apps, &mut client).await {
            Ok(asked) => {
                if asked.green && this.asked.last().is_none_or(|last| !last.green) {
                    noticed.fetch_add(1, Ordering::Relaxed);
                }
                this.asked.push(asked);
            }
            Err(error) => {
                client = None;
                this.failures.push(error);
            }
        }
    }
    this
}

async fn send_request(apps: SocketAddr, client: &mut Option<Client>) -> anyhow::Result<Asked> {
    let begun = Instant::now();
    let client = match client {
        Some(client) => client,
        None => client.insert(Client::connect(apps).await?),
    };
    let name = client.get("http://SHOP/whoami").await?;
    ensure!(matches!(&name[..], b"blue" | b"green"), "a strange server answered: {name:?}");
    Ok(Asked { begun, done: Instant::now(), green: name[..] == *b"green" })
}

/// Sends one POST that spans the change, and checks that the whole body is echoed.
async fn upload_on(apps: SocketAddr, stop: Arc<AtomicBool>) -> anyhow::Result<usize> {
    let stream = TcpStream::connect(apps).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        let _ = connection.await;
    });
    let (pieces, body) = mpsc::channel(1);
    let request = Request::post("http://SHOP/echo").header(http::header::HOST, "SHOP").body(Pieces(body))?;
    let send = async {
        let mut sent = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let piece = content(sent.len() as u64, CHUNK_BYTES);
            sent.extend_from_slice(&piece);
            pieces.send(piece).await.context("it was cut off")?;
            tokio::time::sleep(CHUNK_INTERVAL).await;
        }
        drop(pieces);
        anyhow::Ok(sent)
    };
    let receive = async {
        let response = sender.send_request(request).await?;
        ensure!(response.status().is_success(), "it was answered {}", response.status());
        Ok(response.into_body().collect().await?.to_bytes())
    };
    let (sent, back) = tokio::try_join!(send, receive)?;
    ensure!(sent == back, "it came back changed ({} of {} bytes)", back.len(), sent.len());
    Ok(sent.len())
}

/// A body whose chunks come from a channel.
struct Pieces(mpsc::Receiver<Bytes>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// Keeps one TCP connection open across the change, and checks each echo.
async fn talk_on(database: SocketAddr, stop: Arc<AtomicBool>) -> anyhow::Result<usize> {
    let mut stream = TcpStream::connect(database).await?;
    let mut sent = 0;
    let mut back = vec![0; CHUNK_BYTES];
    while !stop.load(Ordering::Relaxed) {
        let piece = content(sent as u64, CHUNK_BYTES);
        let exchange = async {
            stream.write_all(&piece).await?;
            stream.read_exact(&mut back).await
        };
        timeout(RESPONSE_TIMEOUT, exchange).await.context("no echo came")??;
        ensure!(piece == back, "it came back changed");
        sent += CHUNK_BYTES;
        tokio::time::sleep(CHUNK_INTERVAL).await;
    }
    Ok(sent)
}
