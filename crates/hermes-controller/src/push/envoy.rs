//! xDS for Envoys: the resources of a node, sent in an order in which no request lacks its cluster.
//!
//! In: streams of Envoys, authenticated by their certificates. Out: xDS responses, and a status report as for any other
//! node.
//! Never: another node's resources.
//!
//! | file | contents |
//! |---|---|
//! | `session` | the resources that one Envoy has, and the next response |
//! | `stream` | both variants of the protocol on the controller's port |

mod session;
mod stream;

pub(crate) use self::stream::{Delta, DeltaRequest, DeltaResponse, SotwRequest, SotwResponse, StateOfTheWorld, serve};

/// The method of delta xDS, whose responses contain only the differences.
pub(crate) const DELTA: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
/// The method of state-of-the-world xDS, whose responses contain all resources of a type.
pub(crate) const SOTW: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";

#[cfg(test)]
mod tests;
