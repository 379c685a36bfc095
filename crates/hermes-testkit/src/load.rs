//! Load generators: clients that put load on a path and measure it.
//!
//! In: a [`Task`], which defines the load and the processes whose CPU time is measured. Out: an [`Outcome`] with all
//! latencies summarised and all failures counted by kind. Every response is compared byte for byte with the expected
//! one; a wrong one is a failure. A load runs in a process of its own, so that its CPU time is known, too.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use crate::Result;

pub mod arrivals;
pub mod bulk;
pub mod burst;
pub mod datagrams;
pub mod exchange;
pub mod idle;
mod idle_streams;
pub mod keepalive;
pub mod multiplexed;
pub mod outcome;
pub mod ping;
mod response;
pub mod single;
pub mod surge;
mod window;

pub use outcome::{Failures, Latency, Outcome};

/// Seed of the fixed payload that origins serve and clients expect.
pub const PAYLOAD_SEED: u64 = 0x7061_796c_6f61_6421;

/// A unit of load: a request or a round trip of a client, from opening to closing.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Exchange {
    /// `GET /` over HTTP/1.1.
    Http {
        /// The address of a proxy or the origin.
        address: SocketAddr,
        /// The `Host` of the request.
        authority: String,
        /// Length of the expected payload.
        length: usize,
    },
    /// TLS to an origin, with `GET /` inside; through a proxy if `connect` has the target of CONNECT.
    Tls {
        /// The address of a proxy or the origin.
        address: SocketAddr,
        /// Target of CONNECT; `None` when `address` is the origin itself.
        connect: Option<String>,
        /// The name in the origin's certificate.
        server_name: String,
        /// PEM file of the CA that must have signed it.
        ca: PathBuf,
        /// Length of the expected payload.
        length: usize,
    },
    /// Sends bytes over TCP and waits for their echo.
    Tcp {
        /// The address to connect to.
        address: SocketAddr,
        /// Bytes to send.
        length: usize,
    },
    /// Sends a datagram and waits for its echo.
    Udp {
        /// The address to send to.
        address: SocketAddr,
        /// Bytes to send.
        length: usize,
    },
}

/// The load on a path. Times are in milliseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "load", rename_all = "kebab-case")]
pub enum Load {
    /// Exchanges one after another, each by a new client.
    Single {
        /// The exchange of each client.
        exchange: Exchange,
        /// Number of measured exchanges.
        count: usize,
        /// Number of unmeasured exchanges before them.
        warmup: usize,
    },
    /// Exchanges that all start at the same instant, each by its own client.
    Burst {
        /// The exchange of each client.
        exchange: Exchange,
        /// Number of clients.
        clients: usize,
    },
    /// HTTP/1.1 on persistent connections, each with one request at a time.
    KeepAlive {
        /// The address of the proxy or origin.
        address: SocketAddr,
        /// The `Host` of the requests.
        authority: String,
        /// Length of the expected payload.
        length: usize,
        /// Number of connections.
        connections: usize,
        /// Unmeasured time before the measurement.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// HTTP/2 by prior knowledge, with several concurrent requests on each connection.
    Multiplexed {
        /// The address of the proxy or origin.
        address: SocketAddr,
        /// The `:authority` of the requests.
        authority: String,
        /// Length of the expected payload.
        length: usize,
        /// Number of connections.
        connections: usize,
        /// Concurrent requests on each connection.
        streams: usize,
        /// Unmeasured time before the measurement.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// Clients that arrive at random, whether others have finished or not: see [`arrivals`].
    Arrivals {
        /// Addresses of the proxy, which clients use in turns.
        addresses: Vec<SocketAddr>,
        /// Clients a second.
        rate: f64,
        /// Requests of each client, on one connection.
        requests: usize,
        /// Mean time between a response and the next request.
        pause: u64,
        /// Values of the field `x-work`, and how often each of them comes in proportion.
        work: Vec<(String, u32)>,
        /// Time after which a response counts as delayed.
        delayed: u64,
        /// The seed of all random choices.
        seed: u64,
        /// Unmeasured time before the measurement.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// Clients that connect one after the other, stay idle, and then all send requests at once: see [`surge`].
    Surge {
        /// The address of the proxy.
        address: SocketAddr,
        /// Number of clients.
        clients: usize,
        /// Clients a second.
        rate: f64,
        /// Idle time after the last one has connected.
        idle: u64,
        /// Requests of each client in the surge, one after the other.
        requests: usize,
        /// The field `x-work` of these requests.
        work: String,
    },
    /// Clients that do one exchange each and then stay idle until standard input ends.
    Idle {
        /// The exchange before the idle time: `http` or `tcp`.
        exchange: Exchange,
        /// Number of clients.
        clients: usize,
    },
    /// Requests over HTTP/2 by prior knowledge whose responses begin and do not go on, until standard input ends.
    IdleStreams {
        /// The address of the proxy.
        address: SocketAddr,
        /// The `:authority` of the requests.
        authority: String,
        /// Their path.
        path: String,
        /// Number of connections.
        connections: usize,
        /// Requests on each connection.
        streams: usize,
    },
    /// Maximum TCP throughput in one direction, into a sink that this process opens.
    Bulk {
        /// The address of a proxy or the sink.
        address: SocketAddr,
        /// The address of the sink.
        sink: SocketAddr,
        /// The namespace of the sink; `None` is this process's own.
        #[serde(default)]
        sink_in: Option<String>,
        /// Number of connections.
        connections: usize,
        /// Unmeasured time before the measurement.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// Maximum rate of datagrams in one direction, into a sink that this process opens.
    Datagrams {
        /// The address of a proxy or the sink.
        address: SocketAddr,
        /// The address of the sink.
        sink: SocketAddr,
        /// The namespace of the sink; `None` is this process's own.
        #[serde(default)]
        sink_in: Option<String>,
        /// Bytes of a datagram.
        length: usize,
        /// Number of flows, each from its own port.
        flows: usize,
        /// Maximum number of datagrams in flight in one flow.
        in_flight: usize,
        /// Unmeasured time before the measurement.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// ICMP echoes, one after another, by the system's `ping`.
    Ping {
        /// The address to ping.
        address: IpAddr,
        /// Number of measured echoes.
        count: usize,
        /// Number of unmeasured echoes before them.
        warmup: usize,
        /// Time between two echoes; 0: each follows the previous answer.
        interval: u64,
    },
}

/// A load, and the processes whose CPU time is read at both ends of the measured time.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    /// The load.
    pub load: Load,
    /// Process ids; children count with their parents.
    pub watch: Vec<u32>,
}

/// Runs a task on the calling thread (and on further threads for bulk and datagrams).
///
/// # Errors
/// The load cannot begin, because a sink's port is in use or a CA file is missing. Errors of a peer are counted as
/// failures instead.
pub fn run(task: &Task) -> Result<Outcome> {
    let watch = task.watch.as_slice();
    match &task.load {
        Load::Bulk { .. } => bulk::run(&task.load, watch),
        Load::Datagrams { .. } => datagrams::run(&task.load, watch),
        Load::Ping { .. } => ping::run(&task.load, watch),
        load => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(crate::Error::io("starting the runtime of a load"))?;
            // A LocalSet has one thread and no locks: the generator must cost as little as possible.
            tokio::task::LocalSet::new().block_on(&runtime, on_runtime(load, watch))
        }
    }
}

async fn on_runtime(load: &Load, watch: &[u32]) -> Result<Outcome> {
    match load {
        Load::Single { exchange, count, warmup } => single::run(exchange, *count, *warmup, watch).await,
        Load::Burst { exchange, clients } => burst::run(exchange, *clients, watch).await,
        Load::Idle { exchange, clients } => idle::run(exchange, *clients).await,
        Load::IdleStreams { .. } => idle_streams::run(load).await,
        Load::KeepAlive { .. } => keepalive::run(load, watch).await,
        Load::Multiplexed { .. } => multiplexed::run(load, watch).await,
        Load::Arrivals { .. } => arrivals::run(load, watch).await,
        Load::Surge { .. } => surge::run(load, watch).await,
        Load::Bulk { .. } | Load::Datagrams { .. } | Load::Ping { .. } => {
            unreachable!("`run` has other ways for these")
        }
    }
}
