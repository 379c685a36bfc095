//! Continuous traffic during a change: requests, uploads, tunnels and flows, with every byte checked.
//!
//! In: the targets. Out: the amount of traffic, and each failure with its reason. Clients behave like careful real
//! ones: a request on a *new* connection without a response has failed. If the server closed an idle connection between
//! two requests, the request is repeated on another one and counted separately. Bounded: one exchange at a time for
//! each client.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    task::JoinSet,
};

use crate::{
    h3,
    listener_client::ListenerClient,
    origin::connect_udp,
    pattern::{Digest, Pattern},
    raw_http1::{Content, Head, RawHttp1, SILENCE, in_time},
};

/// Pause between two rounds of one client: this is traffic, not a benchmark.
const PAUSE: Duration = Duration::from_millis(2);
/// Time after which a datagram without an echo counts as lost.
const DATAGRAM_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of failures with a text.
const KEPT: usize = 12;
/// Bytes of one upload, sent in pieces.
const UPLOAD: usize = 192 << 10;
const CHUNK_SIZE: usize = 16 << 10;

/// Active clients.
#[derive(Debug)]
pub struct Traffic {
    clients: JoinSet<()>,
    tally: Arc<Tally>,
}

/// The way to open a byte tunnel.
#[derive(Debug, Clone)]
pub enum TunnelTarget {
    /// A bare connection to a `tcp` listener.
    Bare(SocketAddr),
    /// CONNECT over HTTP/1.1 for this authority.
    Connect(SocketAddr, String),
}

/// The counters of one kind of client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Successful rounds: a response, an upload, or an echoed chunk or datagram.
    pub rounds: u64,
    /// Bytes that were checked.
    pub bytes: u64,
    /// Requests that were repeated because the server had closed the idle connection.
    pub repeated: u64,
    /// Datagrams without an echo.
    pub lost: u64,
    /// Failed rounds and broken tunnels.
    pub failed: u64,
}

/// The counters of all clients.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Counters by kind of client.
    pub done: BTreeMap<&'static str, Done>,
    /// The texts of the first failures.
    pub failures: Vec<String>,
}

#[derive(Debug)]
struct Tally {
    stop: AtomicBool,
    began: Instant,
    report: Mutex<Report>,
}

impl Tally {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Acquire)
    }

    fn note(&self, kind: &'static str, what: impl FnOnce(&mut Done)) {
        if let Ok(mut report) = self.report.lock() {
            what(report.done.entry(kind).or_default());
        }
    }

    fn round(&self, kind: &'static str, bytes: usize) {
        self.note(kind, |done| {
            done.rounds += 1;
            done.bytes += bytes as u64;
        });
    }

    fn failed(&self, kind: &'static str, error: &io::Error) {
        let at = self.began.elapsed();
        if let Ok(mut report) = self.report.lock() {
            report.done.entry(kind).or_default().failed += 1;
            if report.failures.len() < KEPT {
                report.failures.push(format!("{kind} after {at:.3?}: {error}"));
            }
        }
    }
}

impl Default for Traffic {
    fn default() -> Self {
        let tally = Tally { stop: AtomicBool::new(false), began: Instant::now(), report: Mutex::default() };
        Self { clients: JoinSet::new(), tally: Arc::new(tally) }
    }
}

impl Traffic {
    /// Sends requests on one connection each.
    pub fn one_shot(&mut self, to: SocketAddr, host: &str, path: &str) {
        let tally = self.tally.clone();
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        self.clients.spawn(async move {
            while tally.goes_on() {
                match one_shot(to, &request).await {
                    Ok(bytes) => tally.round("one-shot", bytes),
                    Err(error) => tally.failed("one-shot", &error),
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
    }

    /// Sends requests on one connection, for as long as the server keeps it open.
    pub fn keep_alive(&mut self, to: SocketAddr, host: &str, path: &str) {
        let tally = self.tally.clone();
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n");
        self.clients.spawn(async move {
            let mut connection = None;
            while tally.goes_on() {
                keep_alive(&tally, to, &request, &mut connection).await;
                tokio::time::sleep(PAUSE).await;
            }
        });
    }

    /// Sends requests on one HTTP/2 connection, for as long as the server keeps it open.
    pub fn h2(&mut self, to: SocketAddr, host: &str, path: &str) {
        let (tally, uri) = (self.tally.clone(), format!("http://{host}{path}"));
        self.clients.spawn(async move {
            while tally.goes_on() {
                if let Err(error) = h2_connection(&tally, to, &uri).await {
                    tally.failed("h2", &error);
                }
            }
        });
    }

    /// Sends requests on one HTTP/3 connection, for as long as the server keeps it open.
    pub fn h3(&mut self, client: &ListenerClient, host: &str, path: &str) {
        let (tally, client, uri) = (self.tally.clone(), client.clone(), format!("https://{host}{path}"));
        self.clients.spawn(async move {
            while tally.goes_on() {
                if let Err(error) = h3_connection(&tally, &client, &uri).await {
                    tally.failed("h3", &error);
                }
            }
        });
    }

    /// Sends chunked uploads, one chunk every 2 ms, to a path that responds with their digest.
    pub fn uploads(&mut self, to: SocketAddr, host: &str, path: &str) {
        let tally = self.tally.clone();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
        self.clients.spawn(async move {
            let mut seed = 0;
            while tally.goes_on() {
                seed += 1;
                match upload(to, &head, Pattern::new(seed)).await {
                    Ok(()) => tally.round("upload", UPLOAD),
                    Err(error) => tally.failed("upload", &error),
                }
            }
        });
    }

    /// Keeps one tunnel to an echo server open to the end.
    pub fn tunnel(&mut self, target: TunnelTarget, seed: u64) {
        let (tally, kind) = (self.tally.clone(), target.kind());
        self.clients.spawn(async move {
            if let Err(error) = tunnel(&tally, &target, Pattern::new(seed)).await {
                tally.failed(kind, &error);
            }
        });
    }

    /// Keeps one UDP flow to an echo server, one datagram at a time from one source port.
    pub fn flow(&mut self, to: SocketAddr, seed: u64) {
        let tally = self.tally.clone();
        self.clients.spawn(async move {
            if let Err(error) = flow(&tally, to, Pattern::new(seed)).await {
                tally.failed("flow", &error);
            }
        });
    }

    /// Waits until every kind of active client has completed `rounds` more.
    ///
    /// # Panics
    /// A kind does not complete them within [`SILENCE`]; the message has the number of rounds of each.
    pub async fn progress(&self, rounds: u64) {
        let before = self.report();
        let deadline = Instant::now() + SILENCE;
        loop {
            let now = self.report();
            let of = |report: &Report, kind: &str| report.done.get(kind).copied().unwrap_or_default();
            let moved = |kind: &&'static str| of(&now, kind).rounds >= of(&before, kind).rounds + rounds;
            if !now.done.is_empty() && now.done.keys().all(moved) {
                return;
            }
            assert!(Instant::now() < deadline, "traffic stands still; before: {before}now: {now}");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The counters so far.
    pub fn report(&self) -> Report {
        self.tally.report.lock().map(|report| report.clone()).unwrap_or_default()
    }

    /// Lets all clients finish their current round, and returns the counters.
    pub async fn finish(mut self) -> Report {
        self.tally.stop.store(true, Ordering::Release);
        while self.clients.join_next().await.is_some() {}
        self.report()
    }
}

impl TunnelTarget {
    fn kind(&self) -> &'static str {
        match self {
            Self::Bare(_) => "tcp tunnel",
            Self::Connect(..) => "connect tunnel",
        }
    }

    async fn open(&self) -> io::Result<(TcpStream, Bytes)> {
        match self {
            Self::Bare(to) => Ok(RawHttp1::connect(*to).await?.into_parts()),
            Self::Connect(to, authority) => {
                let mut http1 = RawHttp1::connect(*to).await?;
                http1.send(format!("CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await?;
                let head = http1.head().await?;
                if head.status() != 200 {
                    return Err(io::Error::other(format!("CONNECT answered {}", head.first)));
                }
                Ok(http1.into_parts())
            }
        }
    }
}

impl Report {
    /// Checks that nothing failed or was lost, and that every kind completed at least `rounds`.
    ///
    /// # Panics
    /// A check fails; the message contains all counters.
    pub fn assert_whole(&self, rounds: u64) {
        let whole = |done: &Done| done.failed == 0 && done.lost == 0 && done.rounds >= rounds;
        assert!(self.failures.is_empty() && self.done.values().all(whole), "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, done) in &self.done {
            let Done { rounds, bytes, repeated, lost, failed } = done;
            writeln!(
                f,
                "{kind:15} {rounds:8} rounds {bytes:12} bytes {repeated:5} repeated {lost:4} lost {failed:4} failed"
            )?;
        }
        self.failures.iter().try_for_each(|failure| writeln!(f, "  {failure}"))
    }
}

async fn one_shot(to: SocketAddr, request: &str) -> io::Result<usize> {
    let mut http1 = RawHttp1::connect(to).await?;
    http1.send(request).await?;
    let (_, content) = response(&mut http1).await?;
    Ok(content.data.len())
}

async fn response(http1: &mut RawHttp1<TcpStream>) -> io::Result<(Head, Content)> {
    let head = http1.head().await?;
    let content = http1.body(&head).await?;
    if head.status() != 200 {
        let status = head.header("proxy-status").unwrap_or_default();
        return Err(io::Error::other(format!("{} ({status}): {}", head.first, content.text())));
    }
    Ok((head, content))
}

async fn keep_alive(tally: &Tally, to: SocketAddr, request: &str, connection: &mut Option<RawHttp1<TcpStream>>) {
    let reused = connection.is_some();
    match exchange(to, request, connection).await {
        Ok(bytes) => tally.round("keep-alive", bytes),
        Err(error) if reused && closed_before_an_answer(&error) => tally.note("keep-alive", |done| done.repeated += 1),
        Err(error) => tally.failed("keep-alive", &error),
    }
}

/// Sends one request on the connection, which is kept if the server keeps it open.
async fn exchange(to: SocketAddr, request: &str, connection: &mut Option<RawHttp1<TcpStream>>) -> io::Result<usize> {
    let mut http1 = match connection.take() {
        Some(http1) => http1,
        None => RawHttp1::connect(to).await?,
    };
    http1.send(request).await?;
    let (head, content) = response(&mut http1).await?;
    if head.header("connection").is_none_or(|value| !value.eq_ignore_ascii_case("close")) {
        *connection = Some(http1);
    }
    Ok(content.data.len())
}

fn closed_before_an_answer(error: &io::Error) -> bool {
    let broken = matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe);
    broken || (error.kind() == io::ErrorKind::UnexpectedEof && error.to_string().ends_with("unread: \"\""))
}

/// Sends requests on one connection until GOAWAY, which is not a failure between two requests.
async fn h2_connection(tally: &Tally, to: SocketAddr, uri: &str) -> io::Result<()> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) =
        in_time("an HTTP/2 handshake", async { h2::client::handshake(stream).await.map_err(io::Error::other) }).await?;
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        // Requests on the connection report its failure.
        let _ = connection.await;
    });
    let mut sender = Some(sender);
    while let (true, Some(free)) = (tally.goes_on(), sender.take()) {
        let Ok(mut free) = free.ready().await else {
            tally.note("h2", |done| done.repeated += 1);
            return Ok(());
        };
        let requests = in_time("an HTTP/2 response", async { Ok(h2_request(&mut free, uri).await) }).await?;
        match requests {
            Ok(bytes) => tally.round("h2", bytes),
            Err(error) if was_not_processed(&error) => {
                tally.note("h2", |done| done.repeated += 1);
                return Ok(());
            }
            Err(error) => return Err(io::Error::other(error)),
        }
        sender = Some(free);
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// The server sent GOAWAY and did not process this request (RFC 9113, section 6.8): it may be repeated on another
/// connection.
fn was_not_processed(error: &h2::Error) -> bool {
    error.is_remote() && error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR)
}

async fn h2_request(sender: &mut h2::client::SendRequest<Bytes>, uri: &str) -> Result<usize, h2::Error> {
    let mut request = http::Request::new(());
    *request.uri_mut() = uri.parse().unwrap_or_default();
    let (response, _) = sender.send_request(request, true)?;
    let response = response.await?;
    let (status, mut body) = (response.status(), response.into_body());
    let mut bytes = 0;
    while let Some(data) = body.data().await {
        let length = data?.len();
        bytes += length;
        body.flow_control().release_capacity(length)?;
    }
    // Our own error code stands for the server's status.
    if status == 200 { Ok(bytes) } else { Err(h2::Reason::INTERNAL_ERROR.into()) }
}

/// Works like `h2_connection`. Only a rejected request was not processed (RFC 9114, section 4.1.1).
async fn h3_connection(tally: &Tally, client: &ListenerClient, uri: &str) -> io::Result<()> {
    let mut connection = client.h3().await?;
    while tally.goes_on() {
        if connection.is_going() {
            tally.note("h3", |done| done.repeated += 1);
            return Ok(());
        }
        match connection.get(uri).await {
            Ok(answer) if answer.status == 200 => tally.round("h3", answer.data.len()),
            Ok(answer) => return Err(io::Error::other(format!("{}: {}", answer.status, answer.text()))),
            Err(error) if h3::abort_of(&error) == Some(h3::Abort::Stream(h3::wire::code::REQUEST_REJECTED)) => {
                tally.note("h3", |done| done.repeated += 1);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

async fn upload(to: SocketAddr, head: &str, pattern: Pattern) -> io::Result<()> {
    let mut http1 = RawHttp1::connect(to).await?;
    http1.send(head).await?;
    let (mut digest, mut chunk) = (Digest::default(), vec![0; CHUNK_SIZE]);
    for offset in (0..UPLOAD).step_by(CHUNK_SIZE) {
        pattern.fill(offset as u64, &mut chunk);
        digest.update(&chunk);
        http1.send_chunk(&chunk).await?;
        tokio::time::sleep(PAUSE).await;
    }
    http1.send("0\r\n\r\n").await?;
    let (_, content) = response(&mut http1).await?;
    if content.text().contains(&digest.hex()) {
        return Ok(());
    }
    Err(io::Error::other(format!("the origin got something else than {}: {}", digest.hex(), content.text())))
}

async fn tunnel(tally: &Tally, target: &TunnelTarget, pattern: Pattern) -> io::Result<()> {
    let (mut stream, early) = target.open().await?;
    if !early.is_empty() {
        return Err(io::Error::other("bytes that nobody sent"));
    }
    let mut offset = 0u64;
    while tally.goes_on() {
        // Lengths from one byte to some segments, unrelated to any buffer size.
        let length = 1 + (offset.wrapping_mul(0x9e37_79b9) >> 7) as usize % 24_000;
        let mut sent = vec![0; length];
        pattern.fill(offset, &mut sent);
        let report = |error: io::Error| io::Error::new(error.kind(), format!("broke at byte {offset}: {error}"));
        in_time("writing into a tunnel", stream.write_all(&sent)).await.map_err(report)?;
        let mut received = vec![0; length];
        in_time("reading from a tunnel", stream.read_exact(&mut received)).await.map_err(report)?;
        if let Some(at) = pattern.mismatch(offset, &received) {
            return Err(io::Error::other(format!("byte {at} of the tunnel is wrong")));
        }
        offset += length as u64;
        tally.round(target.kind(), length);
        tokio::time::sleep(PAUSE).await;
    }
    stream.shutdown().await?;
    match in_time("the end of a tunnel", stream.read(&mut [0; 1])).await? {
        0 => Ok(()),
        _ => Err(io::Error::other("the tunnel says more than was said into it")),
    }
}

async fn flow(tally: &Tally, to: SocketAddr, pattern: Pattern) -> io::Result<()> {
    let socket = UdpSocket::from_std(connect_udp(to).map_err(io::Error::other)?)?;
    let mut number = 0u64;
    let mut received = vec![0; 2048];
    while tally.goes_on() {
        let mut sent = vec![0; 8 + (number as usize * 37) % 1192];
        pattern.fill(number * 2048, &mut sent);
        sent[..8].copy_from_slice(&number.to_be_bytes());
        socket.send(&sent).await?;
        match returned(&socket, &mut received, number).await? {
            Some(length) if received[..length] == sent[..] => tally.round("flow", length),
            Some(_) => return Err(io::Error::other(format!("datagram {number} came back changed"))),
            None => tally.note("flow", |done| done.lost += 1),
        }
        number += 1;
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Receives the datagram of this number; skips earlier ones that count as lost.
async fn returned(socket: &UdpSocket, room: &mut [u8], number: u64) -> io::Result<Option<usize>> {
    loop {
        let Ok(received) = tokio::time::timeout(DATAGRAM_TIMEOUT, socket.recv(room)).await else { return Ok(None) };
        let length = received?;
        let found = room[..length].first_chunk::<8>().map(|bytes| u64::from_be_bytes(*bytes));
        match found {
            Some(found) if found == number => return Ok(Some(length)),
            Some(found) if found < number => {}
            other => return Err(io::Error::other(format!("a datagram that nobody sent: {other:?}"))),
        }
    }
}
