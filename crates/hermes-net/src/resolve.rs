//! Names to addresses, by DNS and the hosts file, each answer as long as its TTL.
//!
//! In: a host of a document or of a request that is terminated here. Out: addresses.
//! Never asked for overlay names: those are routed, not resolved.

mod runtime;

use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hickory_resolver::net::NetError;
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{Hosts, Resolver as HickoryResolver, system_conf};

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
    hosts: Arc<Hosts>,
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
    let hosts = Arc::new(Hosts::from_system().unwrap_or_default());
    Ok(System { resolver, hosts, servers })
}

/// What the hosts file says of a name. Where that has an address of one version of IP, DNS is not asked for the other: it
/// may be out of reach, and whoever writes the file means it.
fn in_hosts(hosts: &Hosts, host: &str) -> Vec<IpAddr> {
    let Ok(name) = Name::from_utf8(host) else { return Vec::new() };
    let of = |kind| hosts.lookup_static_host(&Query::query(name.clone(), kind));
    let found = [RecordType::A, RecordType::AAAA].into_iter().filter_map(of);
    found
        .flat_map(|lookup| lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect::<Vec<_>>())
        .collect()
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
        let System { resolver, hosts, .. } = self.current()?;
        let known = in_hosts(&hosts, host);
        if !known.is_empty() {
            return Ok(known);
        }
        let answer = resolver
            .lookup_ip(host)
            .await
            .map_err(|error| ResolveError::NoAddress { host: host.to_owned(), reason: words(&error) })?;
        let addresses: Vec<IpAddr> = answer.iter().collect();
        if addresses.is_empty() {
            return Err(ResolveError::NoAddress { host: host.to_owned(), reason: "an empty answer".to_owned() });
        }
        Ok(addresses)
    }
}

/// The resolver's own words show the question as a programmer's dump.
fn words(error: &NetError) -> String {
    match error {
        _ if error.is_nx_domain() => "there is no such name".to_owned(),
        _ if error.is_no_records_found() => "the name is there, and has none".to_owned(),
        NetError::Timeout => "its servers do not answer".to_owned(),
        NetError::NoConnections => "no server of it can be reached; see /etc/resolv.conf".to_owned(),
        NetError::Io(error) => format!("its servers cannot be reached: {error}"),
        other => other.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_has_the_last_word_on_what_it_names() {
        let mut hosts = Hosts::default();
        hosts.read_hosts_conf(&b"192.0.2.7 four both\n2001:db8::7 six both # and no more\n"[..]).unwrap();
        let of = |name: &str| in_hosts(&hosts, name).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!([of("four"), of("FOUR."), of("six")], [["192.0.2.7"], ["192.0.2.7"], ["2001:db8::7"]]);
        assert_eq!(of("both"), ["192.0.2.7", "2001:db8::7"]);
        assert!(of("other").is_empty());
    }

    #[test]
    fn what_dns_says_is_said_in_words() {
        use hickory_resolver::net::{DnsError, NoRecords};
        use hickory_resolver::proto::op::{Query, ResponseCode};
        let said = |code| words(&DnsError::NoRecordsFound(NoRecords::new(Query::default(), code)).into());
        assert_eq!(said(ResponseCode::NXDomain), "there is no such name");
        assert_eq!(said(ResponseCode::NoError), "the name is there, and has none");
        assert_eq!(words(&NetError::Timeout), "its servers do not answer");
    }
}
