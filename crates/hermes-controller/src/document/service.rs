//! A service: its authorities, its replicas, and its audience.

use std::collections::BTreeSet;
use std::fmt;

use hermes_model::dial_scope::DialScope;
use hermes_model::document::policy::{Cache, Custody, Resume, Retry, Rewrite, Timeout, UpstreamRateLimit};
use hermes_model::document::relay::Relay;
use hermes_model::document::route::MethodName;
use hermes_model::document::scalar::OneOrMany;
use hermes_model::pattern::{AuthorityPattern, PathPattern, PortPattern};
use hermes_model::snapshot::{Importance, OnChange, Target};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::is_default;
use super::name::{Name, Reference};

/// The content of a document of `kind: Service`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Service {
    /// The authorities that applications use. Default: the service's name.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub authority: OneOrMany<AuthorityPattern>,
    /// The paths of the service. Default: all.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub path: OneOrMany<PathPattern>,
    /// The methods of the service. Default: all.
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    pub method: OneOrMany<MethodName>,
    /// The replicas.
    pub at: OneOrMany<Replica>,
    /// The relay, if the URIs of the service are channels. The nodes on its paths form the tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<Relay>,
    /// The users who may use the service.
    #[serde(rename = "for")]
    pub audience: Audience,
    /// Retries, at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Timeouts, at each node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout: Timeout,
    /// Custody between nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custody: Option<Custody>,
    /// Caching, at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// Rate limiting, at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_rate_limit: Option<UpstreamRateLimit>,
    /// Resumable downloads, at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<Resume>,
    /// Rewriting, at the replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewrite: Option<Rewrite>,
    /// The effect of a route change on flows.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_change: OnChange,
    /// How late its sessions are refused by a node that is overloaded.
    #[serde(default, skip_serializing_if = "is_default")]
    pub importance: Importance,
}

impl Service {
    /// The authorities of the service: `authority`, or its name. An authority without a port also stands for the ports
    /// of the tcp and udp targets.
    pub fn authorities(&self, name: &Name) -> Vec<AuthorityPattern> {
        let mut all = match self.authority.is_empty() {
            true => AuthorityPattern::parse(name.as_str()).into_iter().collect(),
            false => self.authority.0.clone(),
        };
        let targets = self.at.iter().flat_map(|replica| [&replica.tcp, &replica.udp]).flatten();
        let ports: BTreeSet<u16> = targets
            .filter_map(|target| match target {
                Target::Fixed(target) => Some(target.port),
                Target::Authority | Target::Original => None,
            })
            .collect();
        let without: Vec<_> = all.iter().filter(|one| one.port == PortPattern::Default).cloned().collect();
        for one in without {
            let at = |port| AuthorityPattern { host: one.host.clone(), port: PortPattern::Exact(port) };
            let more = ports.iter().map(|port| at(*port));
            let more: Vec<_> = more.filter(|pattern| !all.contains(pattern)).collect();
            all.extend(more);
        }
        all
    }

    /// True if a session could match both services, apart from their audiences: they have a protocol, an authority, a
    /// path and a method in common.
    pub fn meets(&self, name: &Name, (other, other_name): (&Service, &Name)) -> bool {
        let share = |own: &[String], others: &[String]| {
            (own.is_empty() && others.is_empty()) || own.iter().any(|one| others.contains(one))
        };
        let texts = |all: &mut dyn Iterator<Item = String>| all.collect::<Vec<_>>();
        let paths = |service: &Service| texts(&mut service.path.iter().map(ToString::to_string));
        let methods = |service: &Service| texts(&mut service.method.iter().map(|method| format!("{method:?}")));
        let authorities =
            |service: &Service, name| texts(&mut service.authorities(name).iter().map(ToString::to_string));
        let kinds = |service: &Service| {
            service
                .at
                .0
                .first()
                .map(|one| [service.relay.is_some() || one.http.is_some(), one.tcp.is_some(), one.udp.is_some()])
                .unwrap_or_default()
        };
        let is_one_kind = kinds(self).iter().zip(kinds(other)).any(|(own, other)| *own && other);
        is_one_kind
            && share(&authorities(self, name), &authorities(other, other_name))
            && share(&paths(self), &paths(other))
            && share(&methods(self), &methods(other))
    }
}

/// A replica: a node, and the origin that it dials, by one or several of `http`, `tcp` and `udp`. With `relay` it has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Replica {
    /// The name of the node.
    pub node: Name,
    /// The HTTP origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<Target>,
    /// The TCP origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<Target>,
    /// The UDP origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<Target>,
    /// The address ranges that the node may dial for the target `authority`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<DialScope>,
}

/// The audience of a service or network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Everyone at a node that serves its provider, with a user or without.
    Everyone,
    /// Named users and groups.
    Those {
        /// Users by name.
        users: OneOrMany<Reference>,
        /// All users of these groups.
        groups: OneOrMany<Reference>,
    },
}

const EVERYONE: &str = "everyone";

impl Serialize for Audience {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Audience::Everyone => serializer.serialize_str(EVERYONE),
            Audience::Those { users, groups } => {
                Those { users: users.clone(), groups: groups.clone() }.serialize(serializer)
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Those {
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    users: OneOrMany<Reference>,
    #[serde(default, skip_serializing_if = "OneOrMany::is_empty")]
    groups: OneOrMany<Reference>,
}

impl<'de> Deserialize<'de> for Audience {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Audience;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("everyone, or {users: [NAME], groups: [NAME]}")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Audience, E> {
                match text {
                    EVERYONE => Ok(Audience::Everyone),
                    _ => {
                        Err(E::custom(format!("unknown audience {text:?}; expected everyone, or {{users: [{text}]}}")))
                    }
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Audience, A::Error> {
                let Those { users, groups } = Those::deserialize(MapAccessDeserializer::new(map))?;
                if users.is_empty() && groups.is_empty() {
                    return Err(de::Error::custom("empty audience; add users or groups, or write everyone"));
                }
                Ok(Audience::Those { users, groups })
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
