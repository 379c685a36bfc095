//! Resolves names to addresses, by DNS and the hosts file, and caches answers for their TTL.
//!
//! In: a host from a document, or from a request that this node terminates. Out: addresses. Never: overlay names, which
//! are routed instead of resolved.

mod runtime;

use std::collections::HashMap;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::NetError;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{Resolver as HickoryResolver, system_conf};

use self::runtime::MarkedRuntime;
use crate::dial::Addresses;

/// The reason why a name has no address.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The system's resolver configuration could not be read.
    #[error("cannot use the system's DNS configuration: {0}")]
    Configuration(String),
    /// DNS returned an error, or no answer.
    #[error("DNS has no address for {host}: {reason}")]
    NoAddress {
        /// The name.
        host: String,
        /// The resolver's error.
        reason: String,
    },
}

/// The files of the system's resolver configuration.
const CONFIG_FILES: [&str; 2] = ["/etc/resolv.conf", HOSTS];
const HOSTS: &str = "/etc/hosts";
/// The port of DNS.
const DNS: u16 = 53;
/// Interval of checks for a changed configuration: a laptop that moves to another network gets another DNS server.
const CONFIG_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The time that the answer for one address family waits for that of the other (RFC 8305, section 3).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);

/// A caching resolver, one per worker: its tasks belong to the runtime on which it was created.
pub struct Resolver {
    state: Mutex<State>,
}

/// The system's resolver configuration.
#[derive(Clone)]
struct System {
    resolver: HickoryResolver<MarkedRuntime>,
    hosts: Arc<Hosts>,
    servers: Vec<SocketAddr>,
    search: Arc<Search>,
}

/// The search list of resolv.conf(5), for names with fewer than `ndots` dots.
struct Search {
    domains: Vec<Name>,
    ndots: usize,
}

/// The addresses of the hosts file. Keys are names in lower case without a trailing dot.
type Hosts = HashMap<String, Vec<IpAddr>>;

struct State {
    /// `Err` with the reason if the system has no usable configuration. Address literals still resolve.
    inner: Result<System, String>,
    read_from: [Option<Stamp>; CONFIG_FILES.len()],
    checked: Instant,
}

/// Identifies the state of a file: time of modification, length, inode.
type Stamp = (SystemTime, u64, u64);

/// Returns the stamp of each configuration file; `None` for a file that does not exist.
fn stamps() -> [Option<Stamp>; CONFIG_FILES.len()] {
    CONFIG_FILES.map(|file| {
        let metadata = std::fs::metadata(file).ok()?;
        Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
    })
}

fn read() -> Result<System, String> {
    let (config, options) = system_conf::read_system_conf().map_err(|error| error.to_string())?;
    let built = HickoryResolver::builder(MarkedRuntime::default()).and_then(hickory_resolver::ResolverBuilder::build);
    let resolver = built.map_err(|error| error.to_string())?;
    let servers = config.name_servers().iter().map(|server| SocketAddr::new(server.ip, DNS)).collect();
    let hosts = Arc::new(std::fs::read_to_string(HOSTS).map(|text| read_hosts(&text)).unwrap_or_default());
    let domains = config.domain().into_iter().chain(config.search()).cloned().collect();
    Ok(System { resolver, hosts, servers, search: Arc::new(Search { domains, ndots: options.ndots }) })
}

/// Parses a hosts file. Its names may have any form, since they never reach DNS.
fn read_hosts(text: &str) -> Hosts {
    let mut hosts = Hosts::new();
    for line in text.trim_start_matches('\u{feff}').lines() {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(address) = words.next().and_then(|word| word.parse::<IpAddr>().ok()) else { continue };
        for name in words {
            let addresses = hosts.entry(canonical(name)).or_default();
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
    }
    // IPv4 addresses first, in the file's order.
    hosts.values_mut().for_each(|addresses| addresses.sort_by_key(IpAddr::is_ipv6));
    hosts
}

fn canonical(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

impl Search {
    /// The candidate names for a host, in query order, by the rules of resolv.conf(5).
    fn names(&self, host: &str) -> Result<Vec<Name>, String> {
        // `from_ascii`, since the rules for Unicode names refuse underscores, and DNS carries any character (RFC 2181,
        // section 11).
        let name = if host.is_ascii() { Name::from_ascii(host) } else { Name::from_utf8(host) };
        let mut name = name.map_err(|error| error.to_string())?;
        if name.is_fqdn() {
            return Ok(vec![name]);
        }
        let mut names: Vec<Name> =
            self.domains.iter().filter_map(|domain| name.clone().append_domain(domain).ok()).collect();
        let is_whole = usize::from(name.num_labels()) > self.ndots || name.is_localhost();
        name.set_fqdn(true);
        names.insert(if is_whole { 0 } else { names.len() }, name);
        let mut seen = Vec::new();
        names.retain(|name| {
            let is_new = !seen.contains(name);
            seen.push(name.clone());
            is_new
        });
        Ok(names)
    }
}

impl State {
    /// Rereads the configuration if its files changed. A file may be half written, so the previous configuration stays
    /// until the new one is usable.
    fn follow(&mut self) {
        if self.checked.elapsed() < CONFIG_POLL_INTERVAL {
            return;
        }
        self.checked = Instant::now();
        let now = stamps();
        if self.read_from == now {
            return;
        }
        self.read_from = now;
        match read() {
            Ok(resolver) => {
                tracing::info!("reloaded the system's DNS configuration");
                self.inner = Ok(resolver);
            }
            Err(reason) if self.inner.is_ok() => {
                tracing::warn!(%reason, "cannot use the system's DNS configuration; keeping the previous one");
            }
            Err(reason) => self.inner = Err(reason),
        }
    }
}

impl Resolver {
    /// Reads the system's configuration (`/etc/resolv.conf`, `/etc/hosts`), and again after each change, which clears
    /// the cache.
    pub fn from_system() -> Self {
        // Taken before the files are read, so that the next check detects a change in between.
        let read_from = stamps();
        Self { state: Mutex::new(State { inner: read(), read_from, checked: Instant::now() }) }
    }

    fn current(&self) -> Result<System, ResolveError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.follow();
        state.inner.clone().map_err(ResolveError::Configuration)
    }

    /// Returns the system's DNS servers, in the order of the configuration. Empty without a usable configuration.
    pub fn servers(&self) -> Vec<SocketAddr> {
        self.current().map(|system| system.servers).unwrap_or_default()
    }

    /// Resolves a host; an address literal resolves to itself. If DNS has not answered for one family
    /// `RESOLUTION_DELAY` after the other, its addresses follow later. Answers are cached until their TTL ends.
    ///
    /// # Errors
    /// `ResolveError` with the host.
    pub async fn resolve(&self, host: &str) -> Result<Addresses, ResolveError> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![address].into());
        }
        let System { resolver, hosts, search, .. } = self.current()?;
        // If the hosts file has an address of one family, DNS is not queried for the other family: DNS may be
        // unreachable, and the file takes precedence.
        if let Some(known) = hosts.get(&canonical(host)) {
            return Ok(known.clone().into());
        }
        let no_address = |reason| ResolveError::NoAddress { host: host.to_owned(), reason };
        let mut first_error = None;
        for name in search.names(host).map_err(no_address)? {
            match query(&resolver, &name).await {
                Ok(addresses) => return Ok(addresses),
                Err(error) => _ = first_error.get_or_insert(error),
            }
        }
        Err(no_address(first_error.map_or_else(|| "an empty answer".to_owned(), |error| describe(&error))))
    }
}

/// Queries both families of a name at once, and returns when one has addresses, by the rules of RFC 8305.
async fn query(resolver: &HickoryResolver<MarkedRuntime>, name: &Name) -> Result<Addresses, NetError> {
    let mut v6 = Box::pin(family(resolver.clone(), name.clone(), RecordType::AAAA));
    let mut v4 = Box::pin(family(resolver.clone(), name.clone(), RecordType::A));
    let (answer, (v6_is_left, v4_is_left)) = tokio::select! {
        biased;
        answer = &mut v6 => (answer, (false, true)),
        answer = &mut v4 => (answer, (true, false)),
    };
    let other = if v6_is_left { &mut v6 } else { &mut v4 };
    let found = match answer {
        Ok(found) if !found.is_empty() => found,
        Ok(_) => return Ok(other.await?.into()),
        // Also for NXDOMAIN: some servers answer so for the family that they do not know (RFC 4074).
        Err(error) => return other.await.map(Addresses::from).map_err(|_| error),
    };
    tokio::select! {
        biased;
        answer = other => {
            let others = answer.unwrap_or_default();
            let all = if v4_is_left { [found, others] } else { [others, found] };
            Ok(all.concat().into())
        }
        () = tokio::time::sleep(RESOLUTION_DELAY) => {
            let late = async move { if v6_is_left { v6.await } else { v4.await }.unwrap_or_default() };
            Ok(Addresses::followed_by(found, late))
        }
    }
}

/// Queries the addresses of one family. Empty if the name exists but has none.
fn family(
    resolver: HickoryResolver<MarkedRuntime>,
    name: Name,
    kind: RecordType,
) -> impl Future<Output = Result<Vec<IpAddr>, NetError>> + Send + 'static {
    let addresses = |lookup: &Lookup| lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect();
    async move { resolver.lookup(name, kind).await.map(|lookup| addresses(&lookup)) }
}

/// Returns a readable text, because the resolver's own text contains the query in Rust's debug form.
fn describe(error: &NetError) -> String {
    match error {
        _ if error.is_nx_domain() => "no such name (NXDOMAIN)".to_owned(),
        _ if error.is_no_records_found() => "the name exists but has no address".to_owned(),
        NetError::Timeout => "the DNS servers do not answer".to_owned(),
        NetError::NoConnections => "no DNS server is reachable; see /etc/resolv.conf".to_owned(),
        NetError::Io(error) => format!("cannot reach the DNS servers: {error}"),
        other => other.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_has_any_name() {
        let text = "2001:db8::7 six both\n192.0.2.7 four Both x_y.example # and no more\n192.0.2.7 four\nnobody here\n";
        let hosts = read_hosts(text);
        let of =
            |name: &str| hosts.get(&canonical(name)).into_iter().flatten().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!([of("four"), of("FOUR."), of("six")], [["192.0.2.7"], ["192.0.2.7"], ["2001:db8::7"]]);
        assert_eq!(of("both"), ["192.0.2.7", "2001:db8::7"]);
        assert_eq!(of("x_y.example"), ["192.0.2.7"]);
        assert!(of("other").is_empty() && of("more").is_empty() && of("here").is_empty());
    }

    #[test]
    fn names_are_looked_for_as_resolv_conf_says() {
        let domains = ["corp.example", "example"].map(|domain| Name::from_ascii(domain).unwrap()).to_vec();
        let search = Search { domains, ndots: 2 };
        let names = |host: &str| search.names(host).unwrap().iter().map(Name::to_ascii).collect::<Vec<_>>();
        assert_eq!(names("x_y"), ["x_y.corp.example.", "x_y.example.", "x_y."]);
        assert_eq!(names("a.b.c"), ["a.b.c.", "a.b.c.corp.example.", "a.b.c.example."]);
        assert_eq!(names("a."), ["a."]);
        assert!(search.names("a b").is_err());
    }

    #[test]
    fn what_dns_says_is_said_in_words() {
        use hickory_resolver::net::{DnsError, NoRecords};
        use hickory_resolver::proto::op::{Query, ResponseCode};
        let said = |code| describe(&DnsError::NoRecordsFound(NoRecords::new(Query::default(), code)).into());
        assert_eq!(said(ResponseCode::NXDomain), "no such name (NXDOMAIN)");
        assert_eq!(said(ResponseCode::NoError), "the name exists but has no address");
        assert_eq!(describe(&NetError::Timeout), "the DNS servers do not answer");
    }
}
