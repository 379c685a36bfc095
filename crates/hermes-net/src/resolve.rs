//! Names to addresses, by DNS and the hosts file, each answer as long as its TTL.
//!
//! In: a host of a document or of a request that is terminated here. Out: addresses.
//! Never asked for overlay names: those are routed, not resolved.

mod runtime;

use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hickory_resolver::{Resolver as HickoryResolver, system_conf};

use self::runtime::Marked;

/// Why a name has no address.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The system's resolver configuration could not be read.
    #[error("the system's DNS configuration cannot be used: {0}")]
    Configuration(String),
    /// DNS said no, or nothing.
    #[error("DNS has no address for {host}: {reason}")]
    NoAddress {
        /// The name.
        host: String,
        /// What the resolver said.
        reason: String,
    },
}

/// What the system's configuration is read from.
const SOURCES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];
/// The port of DNS.
const DNS: u16 = 53;
/// Between two looks whether it changed: a laptop that moves to another network has another server.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// A caching resolver. One a worker: its tasks belong to the runtime that it was made on.
pub struct Resolver {
    state: Mutex<State>,
}

/// What the system's configuration says.
#[derive(Clone)]
struct System {
    resolver: HickoryResolver<Marked>,
    servers: Vec<SocketAddr>,
}

struct State {
    /// `Err` where the system has no usable configuration: addresses still work.
    inner: Result<System, String>,
    read_from: [Option<Stamp>; SOURCES.len()],
    looked: Instant,
}

/// What tells one state of a file from another.
type Stamp = (SystemTime, u64, u64);

/// Of each source; `None` where there is none.
fn stamps() -> [Option<Stamp>; SOURCES.len()] {
    SOURCES.map(|file| {
        let metadata = std::fs::metadata(file).ok()?;
        Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
    })
}

fn read() -> Result<System, String> {
    let (config, _) = system_conf::read_system_conf().map_err(|error| error.to_string())?;
    let built = HickoryResolver::builder(Marked::default()).and_then(hickory_resolver::ResolverBuilder::build);
    let resolver = built.map_err(|error| error.to_string())?;
    let servers = config.name_servers().iter().map(|server| SocketAddr::new(server.ip, DNS)).collect();
    Ok(System { resolver, servers })
}

impl State {
    /// Reads the configuration again where it changed. What it is now may be half of what it will be:
    /// until it can be used, the one before is.
    fn follow(&mut self) {
        if self.looked.elapsed() < LOOK_AGAIN {
            return;
        }
        self.looked = Instant::now();
        let now = stamps();
        if self.read_from == now {
            return;
        }
        self.read_from = now;
        match read() {
            Ok(resolver) => {
                tracing::info!("the system's DNS configuration was read again");
                self.inner = Ok(resolver);
            }
            Err(reason) if self.inner.is_ok() => {
                tracing::warn!(%reason, "the system's DNS configuration cannot be used; the one before is kept");
            }
            Err(reason) => self.inner = Err(reason),
        }
    }
}

impl Resolver {
    /// Reads the system's configuration (`/etc/resolv.conf`, `/etc/hosts`), and from then on whenever it
    /// changed. With that the answers of before are forgotten.
    pub fn from_system() -> Self {
        // Before it is read: what changes meanwhile is seen at the next look.
        let read_from = stamps();
        Self { state: Mutex::new(State { inner: read(), read_from, looked: Instant::now() }) }
    }

    fn current(&self) -> Result<System, ResolveError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.follow();
        state.inner.clone().map_err(ResolveError::Configuration)
    }

    /// The servers that the system asks, in its order. None where it has no usable configuration.
    pub fn servers(&self) -> Vec<SocketAddr> {
        self.current().map(|system| system.servers).unwrap_or_default()
    }

    /// The addresses of a host, in the order of the answer; an address stands for itself.
    /// Answers are cached until their TTL ends.
    ///
    /// # Errors
    /// `ResolveError`, with the name.
    pub async fn resolve(&self, host: &str) -> Result<Vec<IpAddr>, ResolveError> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![address]);
        }
        let resolver = self.current()?.resolver;
        let answer = resolver
            .lookup_ip(host)
            .await
            .map_err(|error| ResolveError::NoAddress { host: host.to_owned(), reason: error.to_string() })?;
        let addresses: Vec<IpAddr> = answer.iter().collect();
        if addresses.is_empty() {
            return Err(ResolveError::NoAddress { host: host.to_owned(), reason: "an empty answer".to_owned() });
        }
        Ok(addresses)
    }
}
