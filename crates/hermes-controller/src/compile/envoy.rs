//! Envoy as a standalone node: a node document as xDS resources of a stock Envoy.
//!
//! In: the document that a Hermes node would run instead of the Envoy. Out: the listener, the routes and the clusters
//! with which Envoy behaves in the same way.
//! Never: a part of the document left out silently. A part that Envoy does not support is a problem of the document,
//! reported before the document is applied.
//!
//! | file | contents |
//! |---|---|
//! | `listener` | the listener for other nodes, and the nodes that it admits |
//! | `route` | routes of requests, and the user claims that are accepted |
//! | `cluster` | upstream nodes and origins |
//! | `matcher` | xDS maps in a fixed order, so that the same document gives the same bytes |
//! | `bootstrap` | files that an Envoy starts with |

mod bootstrap;
mod cluster;
mod listener;
mod matcher;
mod route;

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::core::v3::{
    Address, AggregatedConfigSource, ApiVersion, ConfigSource, DataSource, PathConfigSource, SocketAddress,
    TransportSocket, WatchedDirectory, config_source::ConfigSourceSpecifier, data_source::Specifier,
    socket_address::PortSpecifier, transport_socket::ConfigType as SocketConfig,
};
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, CommonTlsContext, SdsSecretConfig, SubjectAltNameMatcher,
    common_tls_context::{CombinedCertificateValidationContext, ValidationContextType},
    subject_alt_name_matcher::SanType,
};
use envoy_types::pb::envoy::r#type::matcher::v3::{StringMatcher, string_matcher::MatchPattern};
use envoy_types::pb::google::protobuf::{Any, Duration};
use hermes_model::Problem;
use hermes_model::document::Document;
use hermes_model::snapshot::HostPort;

pub use self::bootstrap::{DIRECTORY, bootstrap, secrets};
use crate::digest::{hex, sha256};

/// The name of the listener and of its routes.
const OVERLAY: &str = "overlay";

/// The configuration of an Envoy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    /// Clusters by name.
    pub clusters: BTreeMap<String, VersionedResource>,
    /// Listeners by name.
    pub listeners: BTreeMap<String, VersionedResource>,
    /// Route configurations by name.
    pub routes: BTreeMap<String, VersionedResource>,
}

/// A resource with its version.
#[derive(Clone, Debug, PartialEq)]
pub struct VersionedResource {
    /// A digest of the resource.
    pub version: String,
    /// The resource; `None` if the Envoy reported that it has this version from an earlier connection.
    pub body: Option<Any>,
}

impl VersionedResource {
    fn new(body: Any) -> Self {
        let version = hex(&sha256(&body.value)[..8]);
        Self { version, body: Some(body) }
    }
}

/// The identity of an Envoy, which is not in its document.
#[derive(Clone, Copy, Debug)]
pub struct EnvoyIdentity<'a> {
    /// The trust domain.
    pub overlay: &'a str,
    /// The directory with the files of the Envoy's identity, as the Envoy reports it.
    pub directory: &'a str,
    /// Revocation lists (PEM) of each trusted CA. Empty: no key is revoked.
    pub revocations: &'a str,
}

/// Translates a node document to xDS resources.
///
/// # Errors
/// Everything in the document that Envoy does not support.
pub fn resources(document: &Document, identity: EnvoyIdentity<'_>) -> Result<Resources, Vec<Problem>> {
    let mut problems = Vec::new();
    let listeners = listener::listeners(document, identity, &mut problems);
    let mut clusters = cluster::hops(document, identity, &mut problems);
    let routes = route::routes(document, identity, &mut clusters, &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok(Resources {
        clusters: clusters.into_iter().map(|(name, cluster)| (name, VersionedResource::new(pack(&cluster)))).collect(),
        listeners,
        routes: BTreeMap::from([(OVERLAY.to_owned(), VersionedResource::new(routes))]),
    })
}

/// Returns resources without a listener, for a node that was removed from the overlay.
pub(crate) fn nothing() -> Resources {
    let routes = BTreeMap::from([(OVERLAY.to_owned(), VersionedResource::new(route::nothing()))]);
    Resources { routes, ..Resources::default() }
}

fn problem(path: impl Into<String>, message: impl Into<String>) -> Problem {
    Problem { path: path.into(), message: message.into() }
}

fn pack<M: prost::Message + prost::Name>(message: &M) -> Any {
    Any { type_url: M::type_url(), value: message.encode_to_vec() }
}

fn duration(of: std::time::Duration) -> Duration {
    // Envoy treats longer durations like the maximum.
    Duration { seconds: i64::try_from(of.as_secs()).unwrap_or(i64::MAX), nanos: of.subsec_nanos().cast_signed() }
}

fn address(host: &str, port: u16) -> Address {
    use envoy_types::pb::envoy::config::core::v3::address::Address as Kind;
    let at = SocketAddress {
        address: host.to_owned(),
        port_specifier: Some(PortSpecifier::PortValue(port.into())),
        ..SocketAddress::default()
    };
    Address { address: Some(Kind::SocketAddress(at)) }
}

fn address_of(at: &HostPort) -> Address {
    address(&at.host, at.port)
}

/// Returns the configuration source for resources that arrive on the same stream (ADS).
fn ads() -> ConfigSource {
    ConfigSource {
        resource_api_version: ApiVersion::V3.into(),
        config_source_specifier: Some(ConfigSourceSpecifier::Ads(AggregatedConfigSource {})),
        ..ConfigSource::default()
    }
}

fn exact(text: impl Into<String>) -> StringMatcher {
    StringMatcher { match_pattern: Some(MatchPattern::Exact(text.into())), ignore_case: false }
}

/// Returns a TLS context with the node's own certificate, which Envoy reads again when its file changes. It accepts
/// peers with one of these URIs.
fn tls(identity: EnvoyIdentity<'_>, peers: impl IntoIterator<Item = StringMatcher>) -> CommonTlsContext {
    let [certificate, authorities] = bootstrap::SECRETS.map(|(name, file)| {
        let source = PathConfigSource {
            path: format!("{}/{file}", identity.directory),
            watched_directory: Some(WatchedDirectory { path: identity.directory.to_owned(), ..Default::default() }),
            ..PathConfigSource::default()
        };
        let config = ConfigSource {
            resource_api_version: ApiVersion::V3.into(),
            config_source_specifier: Some(ConfigSourceSpecifier::PathConfigSource(source)),
            ..ConfigSource::default()
        };
        SdsSecretConfig { name: name.to_owned(), sds_config: Some(config) }
    });
    let matcher = |matcher| SubjectAltNameMatcher {
        san_type: SanType::Uri.into(),
        matcher: Some(matcher),
        ..SubjectAltNameMatcher::default()
    };
    let lists = Some(identity.revocations.to_owned()).filter(|lists| !lists.is_empty());
    let names = CertificateValidationContext {
        match_typed_subject_alt_names: peers.into_iter().map(matcher).collect(),
        // Only leaves are checked: the root may be an organisation's, and its CAs have no revocation lists here.
        only_verify_leaf_cert_crl: lists.is_some(),
        crl: lists.map(|lists| DataSource { specifier: Some(Specifier::InlineString(lists)), ..DataSource::default() }),
        ..CertificateValidationContext::default()
    };
    let combined = CombinedCertificateValidationContext {
        default_validation_context: Some(names),
        validation_context_sds_secret_config: Some(authorities),
        ..CombinedCertificateValidationContext::default()
    };
    CommonTlsContext {
        alpn_protocols: vec!["h2".to_owned()],
        tls_certificate_sds_secret_configs: vec![certificate],
        validation_context_type: Some(ValidationContextType::CombinedValidationContext(combined)),
        ..CommonTlsContext::default()
    }
}

fn transport<M: prost::Message + prost::Name>(context: &M) -> TransportSocket {
    TransportSocket {
        name: "envoy.transport_sockets.tls".to_owned(),
        config_type: Some(SocketConfig::TypedConfig(pack(context))),
    }
}

#[cfg(test)]
mod tests;
