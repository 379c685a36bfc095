//! Names to addresses, by DNS and the hosts file, each answer as long as its TTL.
//!
//! In: a host of a document or of a request that is terminated here. Out: addresses.
//! Never asked for overlay names: those are routed, not resolved.

use std::net::IpAddr;

use hickory_resolver::TokioResolver;

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

/// A caching resolver. One a worker: its tasks belong to the runtime that it was made on.
pub struct Resolver {
    /// `None` where the system has no usable configuration: addresses still work.
    inner: Result<TokioResolver, String>,
}

impl Resolver {
    /// Reads the system's configuration (`/etc/resolv.conf`, `/etc/hosts`).
    pub fn from_system() -> Self {
        let inner = TokioResolver::builder_tokio()
            .and_then(hickory_resolver::ResolverBuilder::build)
            .map_err(|error| error.to_string());
        Self { inner }
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
        let resolver = self.inner.as_ref().map_err(|reason| ResolveError::Configuration(reason.clone()))?;
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
