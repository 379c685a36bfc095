//! A captured prefix as a request: CONNECT-IP to the prefix, or to the name whose virtual address was captured.
//!
//! In: the prefix, and the name if there is one. Out: a `Request` with the prefix in `hermes-network`: the far end
//! needs the address that the packets for a name carry. Never: a packet.

use std::sync::Arc;

use hermes_model::authority::Authority;
use hermes_model::facts::{Facts, Kind};
use hermes_model::trust;
use hermes_wire::connect_ip::{self, Prefix, Scope, Target};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version};
use ipnet::IpNet;

use super::{Origin, Rejected, Request, UpgradeKind, complete, host_value};
use hermes_transport::body::RequestBody;
use hermes_transport::headers;

/// Builds a request for a prefix that a device captures, or for the name of that prefix. `set_headers` belong to the
/// capture and override those of the listener.
///
/// # Errors
/// Errors of [`from_flow`](super::from_flow).
pub(crate) fn from_capture<'a>(
    origin: &Origin<'_>,
    network: IpNet,
    name: Option<&Arc<str>>,
    set_headers: &[(HeaderName, HeaderValue)],
) -> Result<Request<'a>, Box<Rejected>> {
    let address = Authority::of_address(network.addr());
    let (target, authority) = match name {
        Some(name) => (Target::Name(name.to_string()), address.with_host(name.clone())),
        None => (Target::Prefix(prefix_of(network)), address),
    };
    let path = connect_ip::path(&Scope { target, protocol: None });
    let facts = Facts {
        listener: origin.listener.name.clone(),
        kind: Kind::Ip,
        source: origin.source,
        trust: origin.trust.clone(),
        user: None,
        method: Method::CONNECT,
        path: path.parse().unwrap_or_else(|_| PathAndQuery::from_static("/")),
        headers: HeaderMap::new(),
        network: Some(network),
        announced_network: None,
        protocol: None,
        authority,
    };
    let trace = headers::trace(&facts.headers, origin.worker.random());
    complete(origin, facts, trace)
        .map(|mut facts| {
            // Headers of the capture override those of the listener. Both come from the document, so both may set an
            // identity.
            if let Ok(network) = HeaderValue::try_from(network.to_string()) {
                facts.headers.insert(headers::NETWORK, network);
            }
            for (name, value) in set_headers {
                facts.headers.insert(name.clone(), value.clone());
            }
            facts.user = trust::user_of(set_headers).or(facts.user);
            facts
        })
        .map(|facts| Request {
            upgrade: UpgradeKind::Upgrade(Arc::from("connect-ip")),
            version: Version::HTTP_11,
            scheme: http::uri::Scheme::HTTP,
            host: host_value(&facts.authority, ""),
            facts: std::rc::Rc::new(facts),
            body: RequestBody::Empty,
            trace,
            interim: None,
            connection: None,
            early: None,
            arrived: None,
            claimed: 0,
        })
}

/// Converts to the wire type. The truncated network is always a valid prefix.
fn prefix_of(network: IpNet) -> Prefix {
    let network = network.trunc();
    Prefix::new(network.addr(), network.prefix_len()).unwrap_or_else(|_| Prefix::of(network.addr()))
}
