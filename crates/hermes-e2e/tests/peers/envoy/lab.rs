//! A running Envoy beside running nodes, and origins of every kind.

use hermes_testkit::binary::hermes;
use std::{collections::HashMap, net::SocketAddr, path::PathBuf, time::Duration};

use bytes::Bytes;
use hermes_testkit::{
    envoy,
    listener_client::ListenerClient,
    origin::{self, Origin, http},
    overlay::{EFFECT_TIMEOUT, Overlay},
    process::{Program, Running},
    raw_http1::RawHttp1,
    skip::skip,
};
use serde_json::Value;

pub(crate) const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// An overlay of the binary under test.
pub(crate) fn overlay() -> Overlay {
    Overlay::new(hermes()).unwrap()
}

/// Envoy's binary; `None` where there is none, which is said loudly.
pub(crate) fn envoy_binary(test: &str) -> Option<PathBuf> {
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    match envoy::find(target) {
        Ok(binary) => Some(binary),
        Err(error) => {
            skip(test, &error.to_string());
            None
        }
    }
}

/// A running Envoy.
pub(crate) struct Envoy {
    running: Option<Running>,
    admin: Option<SocketAddr>,
    addresses: HashMap<String, SocketAddr>,
    log: PathBuf,
}

impl Envoy {
    /// Where an Envoy of this name writes what it was asked.
    pub(crate) fn log(overlay: &Overlay, name: &str) -> PathBuf {
        overlay.dir().join(format!("{name}.access"))
    }

    /// Runs it and waits until it serves.
    pub(crate) async fn start(overlay: &Overlay, binary: &PathBuf, name: &str, document: &Value) -> Self {
        let config = overlay.dir().join(format!("{name}.json"));
        let admin = overlay.dir().join(format!("{name}.admin"));
        std::fs::write(&config, document.to_string()).unwrap();
        // Without hot restart, so that any number of them run at once.
        let words = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning", "--admin-address-path"];
        let program = Program::new(name, binary, overlay.dir()).args(words).args([&admin]).args(["-c"]).args([&config]);
        let running = program.start().unwrap();
        let mut this =
            Self { running: Some(running), admin: None, addresses: HashMap::new(), log: Self::log(overlay, name) };
        let deadline = tokio::time::Instant::now() + EFFECT_TIMEOUT;
        while !this.is_ready(&admin).await {
            let ended = this.running.as_mut().and_then(|running| running.exited().unwrap());
            assert!(ended.is_none() && tokio::time::Instant::now() < deadline, "Envoy does not start: {ended:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        this
    }

    async fn is_ready(&mut self, admin: &PathBuf) -> bool {
        let Some(admin) = std::fs::read_to_string(admin).ok().and_then(|text| text.trim().parse().ok()) else {
            return false;
        };
        if !matches!(ask(admin, "/ready").await, Ok((200, _))) {
            return false;
        }
        let (_, text) = ask(admin, "/listeners?format=json").await.unwrap();
        let all: Value = serde_json::from_str(&text).unwrap();
        for status in all["listener_statuses"].as_array().into_iter().flatten() {
            let socket = &status["local_address"]["socket_address"];
            let ip: std::net::IpAddr = socket["address"].as_str().unwrap().parse().unwrap();
            let address = SocketAddr::new(ip, socket["port_value"].as_u64().unwrap() as u16);
            self.addresses.insert(status["name"].as_str().unwrap().to_owned(), address);
        }
        self.admin = Some(admin);
        true
    }

    /// One of its counters.
    pub(crate) async fn counter(&self, name: &str) -> u64 {
        let (_, text) = ask(self.admin.unwrap(), "/stats").await.unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("Envoy has no counter {name}"))
    }

    /// Where a listener listens.
    pub(crate) fn address(&self, listener: &str) -> SocketAddr {
        self.addresses[listener]
    }

    /// A listener, for clients.
    pub(crate) fn client(&self, listener: &str) -> ListenerClient {
        ListenerClient::plain(self.address(listener))
    }
}

async fn ask(admin: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    let mut http1 = RawHttp1::connect(admin).await?;
    http1.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await?;
    let head = http1.head().await?;
    let body = http1.body(&head).await?;
    Ok((head.status(), body.text()))
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        if std::thread::panicking() {
            let output = std::fs::read_to_string(running.stderr()).unwrap_or_default();
            let requests = std::fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("--- Envoy's log ---\n{output}\n--- what Envoy was asked ---\n{requests}");
        }
        let _ = running.end(Duration::ZERO);
    }
}

/// An origin of each kind.
pub(crate) struct Origins {
    pub(crate) echo: Origin,
    pub(crate) udp: Origin,
    pub(crate) h1: Origin,
    pub(crate) h2: Origin,
}

impl Origins {
    pub(crate) fn start() -> Self {
        let web = |version| http::serve(origin::listen(ANY).unwrap(), version, Bytes::new()).unwrap();
        Self {
            echo: origin::stream::echo(origin::listen(ANY).unwrap()).unwrap(),
            udp: Origin::udp_echo(ANY).unwrap(),
            h1: web(http::Version::H1),
            h2: web(http::Version::H2),
        }
    }
}
