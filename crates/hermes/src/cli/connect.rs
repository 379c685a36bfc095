//! `hermes connect`: carries TCP connections over the channels of relays.
//!
//! In: a URL, and a local port, a TCP server or standard input and output. Out: connections between a caller and a listener,
//! each behind any NAT. A connection that fails ends with a reset, so that no application takes a part of a stream for the whole.
//! Never: more connections at once than the limit.

use std::future::Future;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use hermes_model::scalar::ByteSize;
use hermes_net::tcp::{end_on_close, reset_on_close};
use hermes_relay_client::ClientOptions;
use hermes_relay_client::connection::{
    Call, ConnectionError, ConnectionOptions, Listener, ReceiveBase, Totals, connect,
};
use http::Uri;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::output::print;
use super::publish::Reach;
use crate::signals::Signals;

/// The wait for a TCP server.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// The wait for connections to tell their other ends that they are stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(4);
/// Calls that are being refused. More of them get no answer.
const MAX_REFUSALS: usize = 32;
/// The minimum interval between two reports of rejected connections.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// The pause after the system has no file descriptor left for a TCP connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The smallest window in bytes.
const MIN_WINDOW: u64 = 64 << 10;

/// Carry TCP connections over a channel of a relay.
///
/// With --serve, accepts connections that others open at the URL, and forwards each to a TCP server. With --bind, opens a
/// connection for each TCP connection at a local port. With neither, opens one for standard input and output, such as for the
/// ProxyCommand of ssh. Both ends need only to reach their relays. A connection survives changes of the network at either end.
#[derive(Debug, Parser)]
pub(super) struct Connect {
    /// Meet at this http: or https: URL
    url: Uri,
    /// Accept connections, and forward them to this TCP server
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "bind")]
    serve: Option<String>,
    /// Open a connection for each TCP connection at this local address
    #[arg(long, value_name = "ADDRESS:PORT")]
    bind: Option<SocketAddr>,
    /// Receive below this URL, from this local address. May be repeated, to use several relays or networks at once [default:
    /// below the URL]
    #[arg(long = "receive", value_name = "[ADDRESS@]URL")]
    receive: Vec<ReceiveBase>,
    /// Let the other end receive below this URL, too. May be repeated
    #[arg(long = "peer-receives", value_name = "URL")]
    peer_receives: Vec<Uri>,
    /// Send everything on all paths, instead of each part on one
    #[arg(long)]
    redundant: bool,
    /// Give the server the first bytes of a call before the caller has confirmed it. Saves a round trip, but a call may then
    /// reach the servers of two listeners
    #[arg(long, requires = "serve")]
    early: bool,
    /// Let at most this much of each stream be under way
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = window)]
    window: usize,
    /// Carry at most this many connections at once
    #[arg(long, value_name = "NUMBER", default_value = "256")]
    max_connections: NonZeroUsize,
    #[command(flatten)]
    reach: Reach,
    /// Print one JSON object for the beginning, and for each connection that has ended; not with standard input
    #[arg(long)]
    json: bool,
}

fn window(text: &str) -> Result<usize, String> {
    let ByteSize(window) = text.parse()?;
    let fits = usize::try_from(window).ok().filter(|_| (MIN_WINDOW..=1 << 30).contains(&window));
    fits.ok_or_else(|| "write 64KiB to 1GiB".to_owned())
}

impl Connect {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ended = runtime.block_on(self.connect());
        // A read of a terminal never ends.
        runtime.shutdown_background();
        ended
    }

    async fn connect(self) -> anyhow::Result<ExitCode> {
        let options = ConnectionOptions {
            receive: self.receive,
            peer_receives: self.peer_receives,
            window: self.window,
            is_redundant: self.redundant,
            takes_early: self.early,
            ..ConnectionOptions::default()
        };
        let end = Target { url: self.url, client: self.reach.options()?, options };
        let stop = end.options.stop.clone();
        let mut connections = Connections {
            running: JoinSet::new(),
            refusals: JoinSet::new(),
            max: self.max_connections.get(),
            count: 0,
            as_json: self.json,
            rejected: 0,
            next_report: Instant::now(),
        };
        let mut signals = Signals::new()?;
        let mut work = pin!(async {
            match (self.serve, self.bind) {
                (Some(server), _) => connections.serve(end, server).await,
                (None, Some(address)) => connections.bind(end, address).await,
                (None, None) => pipe(end).await,
            }
        });
        tokio::select! {
            ended = &mut work => return ended,
            _ = signals.next() => stop.cancel(),
        }
        let stopped = tokio::time::timeout(STOP_TIMEOUT, work).await;
        stopped.unwrap_or_else(|_| anyhow::bail!("the other ends of connections were not told that they are stopped"))
    }
}

#[derive(Clone)]
struct Target {
    url: Uri,
    client: ClientOptions,
    options: ConnectionOptions,
}

impl Target {
    async fn call(self, mut tcp: TcpStream) -> Result<Totals, ConnectionError> {
        let totals = connect(self.url, self.client, self.options, &mut tcp).await?;
        end_on_close(&tcp);
        Ok(totals)
    }
}

/// Opens a connection for standard input and output.
async fn pipe(end: Target) -> anyhow::Result<ExitCode> {
    let io = tokio::io::join(tokio::io::stdin(), tokio::io::stdout());
    connect(end.url, end.client, end.options, io).await?;
    Ok(ExitCode::SUCCESS)
}

/// Forwards a call to a TCP server.
async fn answer(call: Call, server: &str) -> Result<Totals, ConnectionError> {
    let dialled = tokio::time::timeout(DIAL_TIMEOUT, TcpStream::connect(server)).await;
    let mut tcp = match dialled.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
        Ok(tcp) => tcp,
        Err(error) => {
            call.refuse("the listener cannot reach its server").await?;
            return Err(ConnectionError::Application(error));
        }
    };
    prepare(&tcp);
    let totals = call.run(&mut tcp).await?;
    end_on_close(&tcp);
    Ok(totals)
}

/// Sets the options of a TCP connection. Until it is known to be whole, its end is a reset, even if this process is killed.
fn prepare(tcp: &TcpStream) {
    // Without it, the connection works, too.
    drop(tcp.set_nodelay(true));
    reset_on_close(tcp);
}

/// The connections of this process.
struct Connections {
    running: JoinSet<()>,
    refusals: JoinSet<()>,
    max: usize,
    count: u64,
    as_json: bool,
    /// Connections rejected since the last report.
    rejected: u64,
    next_report: Instant,
}

impl Connections {
    async fn serve(&mut self, end: Target, server: String) -> anyhow::Result<ExitCode> {
        let stop = end.options.stop.clone();
        let mut listener = Listener::new(end.url.clone(), end.client, end.options).await?;
        self.begin(&end.url, "serve", &server)?;
        loop {
            let call = tokio::select! {
                call = listener.accept() => call,
                () = stop.cancelled() => return self.finish().await,
            };
            let call = match call {
                Ok(call) => call,
                Err(error) => {
                    // No new ones come, and the present ones are told.
                    stop.cancel();
                    self.finish().await?;
                    return Err(error.into());
                }
            };
            self.forget_ended();
            if self.running.len() < self.max {
                let server = server.clone();
                self.start(async move { answer(call, &server).await });
                continue;
            }
            self.report_limit();
            if self.refusals.len() < MAX_REFUSALS {
                self.refusals.spawn(async move { drop(call.refuse("the listener has too many connections").await) });
            }
        }
    }

    async fn bind(&mut self, end: Target, address: SocketAddr) -> anyhow::Result<ExitCode> {
        let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        self.begin(&end.url, "bind", &listener.local_addr()?.to_string())?;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = end.options.stop.cancelled() => return self.finish().await,
            };
            let Ok((tcp, _)) = accepted else {
                // The client left, or no descriptor is free.
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            prepare(&tcp);
            self.forget_ended();
            if self.running.len() < self.max {
                self.start(end.clone().call(tcp));
            } else {
                self.report_limit();
            }
        }
    }

    /// Waits for connections that are stopped.
    async fn finish(&mut self) -> anyhow::Result<ExitCode> {
        while self.running.join_next().await.is_some() {}
        Ok(ExitCode::SUCCESS)
    }

    fn begin(&self, url: &Uri, key: &str, address: &str) -> anyhow::Result<()> {
        if self.as_json {
            return print(&format!("{}\n", json!({"url": url.to_string(), key: address})));
        }
        match key {
            "serve" => eprintln!("hermes: connections at {url} go to {address}"),
            _ => eprintln!("hermes: connections at {address} go to {url}"),
        }
        Ok(())
    }

    /// Reports a rejected connection, and those since the last report. Strangers can cause many.
    fn report_limit(&mut self) {
        self.rejected += 1;
        let now = Instant::now();
        if now < self.next_report {
            return;
        }
        self.next_report = now + REPORT_INTERVAL;
        let (rejected, max) = (std::mem::take(&mut self.rejected), self.max);
        eprintln!(
            "hermes: --max-connections is reached ({max} are open); rejected {rejected}; raise it to accept more"
        );
    }

    fn forget_ended(&mut self) {
        while self.running.try_join_next().is_some() {}
        while self.refusals.try_join_next().is_some() {}
    }

    fn start(&mut self, connection: impl Future<Output = Result<Totals, ConnectionError>> + Send + 'static) {
        self.count += 1;
        let (number, as_json) = (self.count, self.as_json);
        self.running.spawn(async move {
            let carried = connection.await;
            if as_json {
                let Totals { sent, received, repeated } = *carried.as_ref().unwrap_or(&Totals::default());
                let error = carried.err().map(|error| error.to_string());
                let line = match error {
                    Some(error) => json!({"connection": number, "error": error}),
                    None => json!({"connection": number, "sent": sent, "received": received, "repeated": repeated}),
                };
                // Nobody reads any more; the connections go on.
                drop(print(&format!("{line}\n")));
            } else if let Err(error) = carried {
                eprintln!("hermes: connection {number}: {error}");
            }
        });
    }
}
