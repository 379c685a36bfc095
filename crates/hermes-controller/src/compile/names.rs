//! Names that a `dns` app answers: those of the services that its user may use.
//!
//! In: a plan, a node's `dns` app and its user. Out: the names, and their virtual addresses.
//! Never: a name of a service that the user may not use.

use std::collections::BTreeSet;

use hermes_model::document::scalar::Prefix;
use hermes_model::pattern::{AuthorityPattern, HostPattern, PortPattern};

use super::Plan;
use super::service_path::Hop;
use crate::catalog::{ServiceOrNetwork, addresses, on_the_wire, user_of_app};
use crate::document::{App, AppProtocol, Key, Name, Node};

/// Returns the prefixes of virtual addresses that a device captures. They are those of the `dns` apps of its user, if
/// the device has an address of the same IP version.
pub(super) fn captured(plan: &Plan, (name, node): (&Name, &Node), device: &App) -> Vec<Prefix> {
    let user_of = |app: &App| user_of_app(&plan.catalog, name, app).ok();
    let own = |app: &&App| app.protocol == AppProtocol::Dns && user_of(app) == user_of(device);
    let is_ours = |prefix: &Prefix| device.address.iter().any(|own| own.0.is_ipv4() == prefix.0.addr().is_ipv4());
    node.apps.iter().filter(own).flat_map(addresses).filter(is_ours).collect()
}

/// Returns the names of the services that a user may use from a node.
pub(super) fn names(plan: &Plan, node: &Name, user: Option<&str>) -> Vec<String> {
    let offered = plan.at.get(node).into_iter().flat_map(|offers| offers.iter());
    let is_for = |hop: &Hop, key: &Key| {
        let is_one = |one: &Name| user == Some(&*on_the_wire(&key.provider, one));
        hop.users.as_ref().is_none_or(|users| users.iter().any(is_one))
    };
    let services = offered.filter_map(|key| match plan.catalog.offer(key)? {
        ServiceOrNetwork::Service(service) => {
            is_for(plan.paths.get(key)?.hops.get(node)?, key).then_some((key, service))
        }
        ServiceOrNetwork::Network(_) => None,
    });
    let hosts = services.flat_map(|(key, service)| service.authorities(&key.name)).filter_map(dns_name);
    hosts.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the host of an authority in the form of `names` of a `dns` listener; `None` for an IP address or a pattern
/// for any name.
fn dns_name(authority: AuthorityPattern) -> Option<String> {
    match &authority.host {
        HostPattern::Any => None,
        HostPattern::Exact(host) if host.parse::<std::net::IpAddr>().is_ok() => None,
        HostPattern::Exact(_) | HostPattern::Suffix(_) => {
            Some(AuthorityPattern { port: PortPattern::Default, ..authority }.to_string())
        }
    }
}
