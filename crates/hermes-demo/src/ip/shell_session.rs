//! A simulated shell session: a TCP connection, one byte every twenty milliseconds, each echoed.
//!
//! In: a namespace and an address to connect to. Out: the number of echoed bytes, and the longest wait for an echo. A
//! broken connection or a wrong echo is an error. The echo server is a task of the demo, on a socket of the remote
//! machine.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, timeout};

use crate::client::RESPONSE_TIMEOUT;
use crate::namespace::Namespace;

/// The rate of a fast typist with key repeat.
const BYTE_INTERVAL: Duration = Duration::from_millis(20);
/// The port of the shell: ssh's.
pub(super) const PORT: u16 = 22;
/// The connection limit of the echo server; only the demo connects.
const CONNECTIONS: usize = 8;

/// The result of a session.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Typed {
    /// The number of echoed bytes.
    pub(super) bytes: usize,
    /// The median wait for an echo, in milliseconds.
    pub(super) median_ms: f64,
    /// The longest wait, in milliseconds.
    pub(super) longest_ms: f64,
}

/// Echoes all connections to `place`; ends when the value is dropped.
///
/// # Errors
/// The port is in use.
pub(super) fn echo(place: &Namespace) -> anyhow::Result<JoinSet<()>> {
    let listener = place.listen((Ipv4Addr::UNSPECIFIED, PORT).into())?;
    let mut tasks = JoinSet::new();
    tasks.spawn(accept(listener));
    Ok(tasks)
}

async fn accept(listener: TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        if connections.len() >= CONNECTIONS {
            connections.join_next().await;
        }
        connections.spawn(give_back(stream));
    }
}

async fn give_back(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut room = [0; 1024];
    while let Ok(length @ 1..) = stream.read(&mut room).await {
        if stream.write_all(&room[..length]).await.is_err() {
            return;
        }
    }
}

/// A client that types until it is stopped.
pub(super) struct ShellSession {
    stop: oneshot::Sender<()>,
    typing: JoinSet<anyhow::Result<Typed>>,
}

impl ShellSession {
    /// Connects and starts to type.
    ///
    /// # Errors
    /// The connection fails.
    pub(super) async fn begin(place: &Namespace, shell: SocketAddr) -> anyhow::Result<Self> {
        let stream = timeout(RESPONSE_TIMEOUT, place.tcp()?.connect(shell)).await;
        let stream = stream.context("no answer")?.with_context(|| format!("cannot connect to {shell}"))?;
        let (stop, stopped) = oneshot::channel();
        let mut typing = JoinSet::new();
        typing.spawn(type_on(stream, stopped));
        Ok(Self { stop, typing })
    }

    /// Stops, and waits for the last echo.
    ///
    /// # Errors
    /// The connection broke, or an echo was wrong or missing.
    pub(super) async fn stop(mut self) -> anyhow::Result<Typed> {
        // A client that ended already reports its error below.
        let _ = self.stop.send(());
        let typed = timeout(RESPONSE_TIMEOUT, self.typing.join_next()).await.context("an echo did not come")?;
        typed.context("nobody typed")??
    }
}

async fn type_on(stream: TcpStream, mut stopped: oneshot::Receiver<()>) -> anyhow::Result<Typed> {
    let (mut read, mut write) = stream.into_split();
    let mut ticks = tokio::time::interval(BYTE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut sent, mut waits) = (Vec::new(), Vec::new());
    let mut ending = false;
    let mut room = [0; 1024];
    while !(ending && waits.len() == sent.len()) {
        tokio::select! {
            _ = &mut stopped, if !ending => ending = true,
            _ = ticks.tick(), if !ending => {
                write.write_all(&[letter(sent.len())]).await.context("the TCP connection broke")?;
                sent.push(Instant::now());
            }
            length = read.read(&mut room) => {
                let length = length.context("the TCP connection broke")?;
                ensure!(length > 0, "the TCP connection was ended by the far end");
                for byte in &room[..length] {
                    let typed = sent.get(waits.len()).context("more came back than was typed")?;
                    ensure!(*byte == letter(waits.len()), "byte {} came back changed", waits.len());
                    waits.push(typed.elapsed().as_secs_f64() * 1e3);
                }
            }
        }
    }
    waits.sort_by(f64::total_cmp);
    let at = |index: usize| waits.get(index).copied().unwrap_or_default();
    Ok(Typed { bytes: waits.len(), median_ms: at(waits.len() / 2), longest_ms: at(waits.len().saturating_sub(1)) })
}

/// The byte that is typed at this index.
fn letter(index: usize) -> u8 {
    b'a' + (index % 26) as u8
}
