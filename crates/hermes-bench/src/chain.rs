//! The vocabulary of the benchmark: cases, path shapes and running chains.
//!
//! In: nothing. Out: the four cases of the paper, the shapes of a path, and a running [`Chain`] with its listeners.

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

/// The name of the HTTP origin in requests through proxies. The names below are not in any DNS.
pub(crate) const WEB: &str = "web.bench";
/// The authority of the TLS origin in CONNECT.
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

/// The number of proxies on the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Client, proxy, origin.
    OneHop,
    /// Client, proxy, proxy, origin: the paper's shape.
    TwoHops,
}

/// The protocol between proxies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Security {
    /// HTTP/2 by prior knowledge, as in the paper.
    Plain,
    /// HTTP/2 over mutual TLS.
    Mtls,
    /// HTTP/3. Envoy does not request a client certificate over QUIC.
    Quic,
}

/// The location of a proxy or an origin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location<'a> {
    /// The namespace; `None` is the one in which the benchmark was started.
    pub(crate) namespace: Option<&'a Namespace>,
    /// The address towards the other end.
    pub(crate) address: Ipv4Addr,
    /// The cores to run on; empty allows all.
    pub(crate) cpus: &'a [usize],
}

/// The addresses of the origins, and those at which the load's process opens its sinks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origins {
    /// HTTP/1.1.
    pub(crate) http: SocketAddr,
    /// HTTP/2 by prior knowledge. `None` if no such origin exists.
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
    /// The number of proxies.
    pub(crate) shape: Shape,
    /// The protocol between the proxies.
    pub(crate) security: Security,
    /// The client's side.
    pub(crate) near: Location<'a>,
    /// The origin's side.
    pub(crate) far: Location<'a>,
    /// The addresses of the origins.
    pub(crate) origins: &'a Origins,
    /// Identities of the near and the far proxy.
    pub(crate) identities: &'a [IdentityFiles; 2],
    /// Ports reserved for this path.
    pub(crate) ports: Ports,
    /// The directory for configurations and logs of this path alone.
    pub(crate) dir: &'a std::path::Path,
}

/// Ports of a path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ports {
    /// HTTP/1.1, with CONNECT.
    pub(crate) http: u16,
    /// HTTP/2 in the clear, if it uses another port.
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
    /// Admin ports of the near and the far proxy.
    pub(crate) admin: [u16; 2],
}

/// The listeners for clients; `None` if the contender does not support the protocol.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientListeners {
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

/// A running path. Dropping it ends its proxies.
#[derive(Debug)]
pub(crate) struct Chain {
    /// The name of the contender.
    pub(crate) contender: &'static str,
    /// The listeners for clients.
    pub(crate) listeners: ClientListeners,
    /// The proxies, near before far. Empty for the direct path.
    pub(crate) programs: Vec<Running>,
    /// Access logs that are separate from the programs' output.
    pub(crate) logs: Vec<PathBuf>,
}

impl Case {
    /// All cases, in the paper's order.
    pub(crate) const ALL: [Self; 4] = [Self::Http, Self::Connect, Self::Tcp, Self::Udp];

    /// The paper's name for the case.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Http => "HTTP proxying",
            Self::Connect => "CONNECT",
            Self::Tcp => "TCP over HTTP/2",
            Self::Udp => "UDP over HTTP/2",
        }
    }

    /// The name in result files.
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
    /// The variants over TCP.
    pub(crate) const BOTH: [Self; 2] = [Self::Plain, Self::Mtls];

    /// The name in result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Mtls => "mtls",
            Self::Quic => "quic",
        }
    }
}

impl Plan<'_> {
    /// The address at which the far proxy listens for the near one.
    pub(crate) fn link(&self) -> Port {
        if self.security == Security::Quic { Port::Udp(self.ports.link) } else { Port::Tcp(self.ports.link) }
    }
}

impl ClientListeners {
    /// The exchange of one client of `case`; `None` if this path does not support it.
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

    /// Truncates the logs, so that hours of requests do not fill the disk. The proxies opened them for appending.
    pub(crate) fn trim_logs(&self) {
        let own = self.programs.iter().flat_map(|p| [p.stdout(), p.stderr()]);
        for path in own.chain(self.logs.iter().map(PathBuf::as_path)) {
            if let Ok(file) = OpenOptions::new().write(true).open(path) {
                let _ = file.set_len(0);
            }
        }
    }
}
