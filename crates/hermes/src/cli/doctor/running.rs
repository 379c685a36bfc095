//! The addresses that a running node of the document already uses.
//!
//! In: the admin address and the node's name. Out: the addresses of the node, if it answers there. Never: a long wait,
//! or a request other than `/config`.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use hermes_model::snapshot::PortKind;
use http::Request;
use http::header::HOST;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::task::JoinSet;

/// Timeout; a node on this machine answers at once.
const ADMIN_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of the response: that of the largest document.
const MAX_ANSWER: usize = 256 << 20;

/// The response of `/config`.
#[derive(Deserialize)]
struct Config {
    document: Running,
}

/// The document that a node runs.
#[derive(Deserialize)]
pub(super) struct Running {
    node: String,
    admin: Option<SocketAddr>,
    #[serde(default)]
    listeners: Vec<Listening>,
    #[serde(default)]
    routes: Vec<Routing>,
}

#[derive(Deserialize)]
struct Routing {
    terminate: Option<Gateway>,
}

#[derive(Deserialize)]
struct Gateway {
    tun: Option<String>,
}

#[derive(Deserialize)]
struct Listening {
    bind: Option<SocketAddr>,
    protocol: String,
    device: Option<String>,
    #[serde(default)]
    http3: bool,
}

impl Listening {
    fn has(&self, kind: PortKind) -> bool {
        match &*self.protocol {
            "udp" | "ip" => kind == PortKind::Udp,
            "dns" => true,
            _ => kind == PortKind::Tcp || self.http3,
        }
    }
}

impl Running {
    /// Returns true if the node has a device of this name.
    pub(super) fn has_device(&self, name: &str) -> bool {
        let listeners = self.listeners.iter().filter_map(|listener| listener.device.as_deref());
        let routes = self.routes.iter().filter_map(|route| route.terminate.as_ref()?.tun.as_deref());
        listeners.chain(routes).any(|device| device == name)
    }

    /// Finds the node of this name at this admin address.
    pub(super) fn find(admin: SocketAddr, node: &str) -> Option<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let asked = runtime.block_on(async { tokio::time::timeout(ADMIN_REQUEST_TIMEOUT, query(admin)).await });
        asked.ok()?.ok().filter(|running| running.node == node)
    }

    pub(super) fn has_admin(&self, address: SocketAddr) -> bool {
        self.admin == Some(address)
    }

    /// A UDP and a TCP listener may share a port.
    pub(super) fn listens(&self, address: SocketAddr, kind: PortKind) -> bool {
        self.listeners.iter().any(|listener| listener.bind == Some(address) && listener.has(kind))
    }
}

async fn query(admin: SocketAddr) -> anyhow::Result<Running> {
    let tcp = tokio::net::TcpStream::connect(admin).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tcp)).await?;
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let request = Request::get("/config").header(HOST, admin.to_string()).body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
    Ok(serde_json::from_slice::<Config>(&body).context("/config")?.document)
}
