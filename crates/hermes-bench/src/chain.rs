//! Words of the benchmark: what is measured through what.
//!
//! In: nothing. Out: the four cases of the paper, the shapes of a path, and a running [`Chain`] with its entrances.

use std::{
    fs::OpenOptions,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use hermes_testkit::{
    ca::IdentityFiles,
    load::Exchange,
    netns::Namespace,
    process::{Port, Running},
};
use serde::{Deserialize, Serialize};

use crate::settings::PAYLOAD;

/// Names by which origins are asked for through proxies; no DNS knows them.
pub(crate) const WEB: &str = "web.bench";
/// The TLS origin, as CONNECT names it.
pub(crate) const SECURE: &str = "secure.bench:443";
/// The name in the TLS origin's certificate.
pub(crate) const SECURE_NAME: &str = "secure.bench";
/// TCP echo.
pub(crate) const ECHO: &str = "echo.bench:7";
/// The sink of bulk TCP.
pub(crate) const SINK: &str = "sink.bench:9";
/// UDP echo: host and port.
pub(crate) const VOICE: (&str, u16) = ("voice.bench", 5004);
/// The sink of datagrams: host and port.
pub(crate) const FLOOD: (&str, u16) = ("flood.bench", 5005);

/// The four cases of Table IX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Case {
    /// `GET` over HTTP/1.1.
    Http,
    /// CONNECT, TLS to the origin inside, `GET` in that.
    Connect,
    /// Raw TCP.
    Tcp,
    /// A datagram and its echo.
    Udp,
}

/// How many proxies stand in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Client, proxy, origin.
    OneHop,
    /// Client, proxy, proxy, origin: the paper's.
    TwoHops,
}

/// What proxies speak to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Security {
    /// HTTP/2 by prior knowledge, as in the paper.
    Plain,
    /// HTTP/2 over mutual TLS.
    Mtls,
    /// HTTP/3. Envoy asks no client over QUIC for a certificate.
    Quic,
}

/// Where a proxy, or an origin, stands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// The namespace; `None` is the one that the benchmark was started in.
    pub(crate) namespace: Option<&'a Namespace>,
    /// Its address towards the other place.
    pub(crate) address: Ipv4Addr,
    /// Cores to run on; empty is any.
    pub(crate) cpus: &'a [usize],
}

/// Where the origins are, and where the load's process will open its sinks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origins {
    /// HTTP/1.1.
    pub(crate) http: SocketAddr,
    /// HTTP/2 by prior knowledge. `None` where there is none.
    pub(crate) http2: Option<SocketAddr>,
    /// HTTP/1.1 over TLS.
    pub(crate) secure: SocketAddr,
    /// TCP echo.
    pub(crate) tcp: SocketAddr,
    /// UDP echo.
    pub(crate) udp: SocketAddr,
    /// Sink of bulk TCP.
    pub(crate) sink: SocketAddr,
    /// Sink of datagrams.
    pub(crate) flood: SocketAddr,
}

/// Everything that a contender needs to build a path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan<'a> {
    /// How many proxies.
    pub(crate) shape: Shape,
    /// What they speak to each other.
    pub(crate) security: Security,
    /// The client's side.
    pub(crate) near: Place<'a>,
    /// The origin's side.
    pub(crate) far: Place<'a>,
    /// What is behind.
    pub(crate) origins: &'a Origins,
    /// Identities of the near and the far proxy.
    pub(crate) identities: &'a [IdentityFiles; 2],
    /// Ports that nobody else uses, for this path.
    pub(crate) ports: Ports,
    /// Directory for configurations and logs, of this path alone.
    pub(crate) dir: &'a std::path::Path,
}

/// Ports of a path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ports {
    /// HTTP/1.1, with CONNECT.
    pub(crate) http: u16,
    /// HTTP/2 in the clear, where that is another port.
    pub(crate) http2: u16,
    /// TCP to the echo.
    pub(crate) tcp: u16,
    /// TCP to the sink.
    pub(crate) sink: u16,
    /// UDP to the echo.
    pub(crate) udp: u16,
    /// UDP to the sink.
    pub(crate) flood: u16,
    /// Between the proxies.
    pub(crate) link: u16,
    /// Admin of the near and the far proxy.
    pub(crate) admin: [u16; 2],
}

/// Where clients go in. What a contender cannot carry is `None`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entrances {
    /// HTTP/1.1.
    pub(crate) http: SocketAddr,
    /// HTTP/2 in the clear.
    pub(crate) http2: Option<SocketAddr>,
    /// For TLS inside CONNECT, or TLS itself where `connect` is false.
    pub(crate) secure: Option<SocketAddr>,
    /// Whether `secure` is reached by CONNECT.
    pub(crate) connect: bool,
    /// TCP echo.
    pub(crate) tcp: Option<SocketAddr>,
    /// UDP echo.
    pub(crate) udp: Option<SocketAddr>,
    /// TCP sink.
    pub(crate) sink: Option<SocketAddr>,
    /// UDP sink.
    pub(crate) flood: Option<SocketAddr>,
}

/// A path that is up. Dropping it ends its proxies.
#[derive(Debug)]
pub(crate) struct Chain {
    /// Whose it is.
    pub(crate) contender: &'static str,
    /// Where clients go in.
    pub(crate) entrances: Entrances,
    /// The proxies, near before far. Empty for the direct way.
    pub(crate) programs: Vec<Running>,
    /// Access logs beside the programs' own output.
    pub(crate) logs: Vec<PathBuf>,
}

impl Case {
    /// All of them, in the paper's order.
    pub(crate) const ALL: [Self; 4] = [Self::Http, Self::Connect, Self::Tcp, Self::Udp];

    /// What the paper calls it.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Http => "HTTP proxying",
            Self::Connect => "CONNECT",
            Self::Tcp => "TCP over HTTP/2",
            Self::Udp => "UDP over HTTP/2",
        }
    }

    /// As in result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Connect => "connect",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl Security {
    /// Those over TCP.
    pub(crate) const BOTH: [Self; 2] = [Self::Plain, Self::Mtls];

    /// As in result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Mtls => "mtls",
            Self::Quic => "quic",
        }
    }
}

impl Plan<'_> {
    /// Where the far proxy listens for the near one.
    pub(crate) fn link(&self) -> Port {
        if self.security == Security::Quic { Port::Udp(self.ports.link) } else { Port::Tcp(self.ports.link) }
    }
}

impl Entrances {
    /// What one client of `case` does here; `None` when this way does not carry it.
    pub(crate) fn exchange(&self, case: Case, ca: &std::path::Path) -> Option<Exchange> {
        let length = PAYLOAD;
        Some(match case {
            Case::Http => Exchange::Http { address: self.http, authority: WEB.into(), length },
            Case::Connect => Exchange::Tls {
                address: self.secure?,
                connect: self.connect.then(|| SECURE.to_owned()),
                server_name: SECURE_NAME.into(),
                ca: ca.to_owned(),
                length,
            },
            Case::Tcp => Exchange::Tcp { address: self.tcp?, length },
            Case::Udp => Exchange::Udp { address: self.udp?, length },
        })
    }
}

impl Chain {
    /// Process ids of the proxies.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.programs.iter().map(Running::pid).collect()
    }

    /// Cuts the logs to nothing, so that hours of requests do not fill the disk. They are opened for appending.
    pub(crate) fn trim_logs(&self) {
        let own = self.programs.iter().flat_map(|p| [p.stdout(), p.stderr()]);
        for path in own.chain(self.logs.iter().map(PathBuf::as_path)) {
            if let Ok(file) = OpenOptions::new().write(true).open(path) {
                let _ = file.set_len(0);
            }
        }
    }
}
