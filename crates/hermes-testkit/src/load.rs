//! Clients: what is asked of a path, and what came of it.
//!
//! In: a [`Task`], which says what to load, how, and whose CPU time to watch. Out: an [`Outcome`] with every latency
//! summed up and every failure counted by its kind. Every answer is compared byte for byte with what it must be; a
//! wrong one is a failure. A load runs in a process of its own, so that its CPU time is known too.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use crate::Result;

pub mod bulk;
pub mod burst;
pub mod datagrams;
pub mod exchange;
pub mod idle;
pub mod keepalive;
pub mod multiplexed;
pub mod outcome;
pub mod ping;
mod response;
pub mod single;
mod window;

pub use outcome::{Failures, Latency, Outcome};

/// Seed of the fixed payload that origins serve and clients expect.
pub const PAYLOAD_SEED: u64 = 0x7061_796c_6f61_6421;

/// One unit of load: a request or a round trip of a client, from opening to closing.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Exchange {
    /// `GET /` over HTTP/1.1.
    Http {
        /// Whom to connect to: a proxy or the origin.
        address: SocketAddr,
        /// The `Host` to ask for.
        authority: String,
        /// Length of the payload that must come.
        length: usize,
    },
    /// TLS to an origin, `GET /` inside; through a proxy when `connect` says what to CONNECT to.
    Tls {
        /// Whom to connect to: a proxy or the origin.
        address: SocketAddr,
        /// Target of CONNECT; `None` when `address` is the origin itself.
        connect: Option<String>,
        /// Name in the origin's certificate.
        server_name: String,
        /// PEM file of the CA that must have signed it.
        ca: PathBuf,
        /// Length of the payload that must come.
        length: usize,
    },
    /// Sends bytes over TCP and waits for the same.
    Tcp {
        /// Whom to connect to.
        address: SocketAddr,
        /// Bytes to send.
        length: usize,
    },
    /// Sends a datagram and waits for the same.
    Udp {
        /// Whom to send to.
        address: SocketAddr,
        /// Bytes to send.
        length: usize,
    },
}

/// What to load a path with. Times are in milliseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "load", rename_all = "kebab-case")]
pub enum Load {
    /// Exchanges one after another, each by a new client.
    Single {
        /// What each client does.
        exchange: Exchange,
        /// How many are measured.
        count: usize,
        /// How many go before them unmeasured.
        warmup: usize,
    },
    /// Exchanges all at the same instant, each by a client of its own.
    Burst {
        /// What each client does.
        exchange: Exchange,
        /// How many clients.
        clients: usize,
    },
    /// HTTP/1.1 on lasting connections, each with one request at a time.
    KeepAlive {
        /// Proxy or origin.
        address: SocketAddr,
        /// The `Host` to ask for.
        authority: String,
        /// Length of the payload that must come.
        length: usize,
        /// How many connections.
        connections: usize,
        /// Unmeasured time before.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// HTTP/2 by prior knowledge, several requests at a time on each connection.
    Multiplexed {
        /// Proxy or origin.
        address: SocketAddr,
        /// The `:authority` to ask for.
        authority: String,
        /// Length of the payload that must come.
        length: usize,
        /// How many connections.
        connections: usize,
        /// Requests under way on each.
        streams: usize,
        /// Unmeasured time before.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// Clients that do one exchange each and then stay, idle, until standard input ends.
    Idle {
        /// What each does before it is idle: `http` or `tcp`.
        exchange: Exchange,
        /// How many clients.
        clients: usize,
    },
    /// As many bytes as go through TCP one way, into a sink that this process opens.
    Bulk {
        /// Whom to send to: a proxy or the sink.
        address: SocketAddr,
        /// Where to open the sink.
        sink: SocketAddr,
        /// In which namespace, by its name; `None` is this process's own.
        #[serde(default)]
        sink_in: Option<String>,
        /// How many connections.
        connections: usize,
        /// Unmeasured time before.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// As many datagrams as go through one way, into a sink that this process opens.
    Datagrams {
        /// Whom to send to: a proxy or the sink.
        address: SocketAddr,
        /// Where to open the sink.
        sink: SocketAddr,
        /// In which namespace, by its name; `None` is this process's own.
        #[serde(default)]
        sink_in: Option<String>,
        /// Bytes in a datagram.
        length: usize,
        /// How many flows, each from a port of its own.
        flows: usize,
        /// Datagrams that may be under way in one flow.
        in_flight: usize,
        /// Unmeasured time before.
        warmup: u64,
        /// Measured time.
        window: u64,
    },
    /// ICMP echoes, one after another, by the system's `ping`.
    Ping {
        /// Whom to ask.
        address: IpAddr,
        /// How many are measured.
        count: usize,
        /// How many go before them unmeasured.
        warmup: usize,
        /// Time between two; 0: each when the one before is answered.
        interval: u64,
    },
}

/// A load, and the processes whose CPU time is read at both ends of the measured time.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    /// What to do.
    pub load: Load,
    /// Process ids; children count with their parents.
    pub watch: Vec<u32>,
}

/// Does a task, on the calling thread (and on threads of its own for bulk and datagrams).
///
/// # Errors
/// When the load cannot even begin: a sink's port is taken, a CA file is missing. What a peer does is no error but
/// a counted failure.
pub fn run(task: &Task) -> Result<Outcome> {
    let watch = task.watch.as_slice();
    match &task.load {
        Load::Bulk { .. } => bulk::run(&task.load, watch),
        Load::Datagrams { .. } => datagrams::run(&task.load, watch),
        Load::Ping { .. } => ping::run(&task.load, watch),
        load => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(crate::Error::io("starting the runtime of a load"))?;
            // LocalSet: one thread, no locks; the generator must cost as little as it can.
            tokio::task::LocalSet::new().block_on(&runtime, on_runtime(load, watch))
        }
    }
}

async fn on_runtime(load: &Load, watch: &[u32]) -> Result<Outcome> {
    match load {
        Load::Single { exchange, count, warmup } => single::run(exchange, *count, *warmup, watch).await,
        Load::Burst { exchange, clients } => burst::run(exchange, *clients, watch).await,
        Load::Idle { exchange, clients } => idle::run(exchange, *clients).await,
        Load::KeepAlive { .. } => keepalive::run(load, watch).await,
        Load::Multiplexed { .. } => multiplexed::run(load, watch).await,
        Load::Bulk { .. } | Load::Datagrams { .. } | Load::Ping { .. } => {
            unreachable!("`run` has other ways for these")
        }
    }
}
