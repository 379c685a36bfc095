//! A service: a name, where it lives, and for whom.

use std::collections::BTreeSet;
use std::fmt;

use hermes_model::document::policy::{Cache, Custody, Pace, Retrieve, Retry, Rewrite, Timeout};
use hermes_model::document::route::MethodName;
use hermes_model::document::scalar::Many;
use hermes_model::pattern::{AuthorityPattern, PathPattern, PortPattern};
use hermes_model::reach::Reach;
use hermes_model::snapshot::{OnChange, Target};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::is_default;
use super::name::{Name, Reference};

/// `kind: Service`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Service {
    /// What applications call it. Default: its name.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub authority: Many<AuthorityPattern>,
    /// Paths, where it is not all of them.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub path: Many<PathPattern>,
    /// Methods, where it is not all of them.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub method: Many<MethodName>,
    /// Where it lives.
    pub at: Many<Replica>,
    /// Who may use it. Nobody else does.
    #[serde(rename = "for")]
    pub audience: Audience,
    /// How often it is asked again; at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// How long is waited for it; at each node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout: Timeout,
    /// Custody between nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custody: Option<Custody>,
    /// Answers that are kept; at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// Its rate limit; at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<Pace>,
    /// Whether it is asked until there is an answer; at the node where a session begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retrieve: Option<Retrieve>,
    /// What is written anew; where it lives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewrite: Option<Rewrite>,
    /// What becomes of flows when a route changes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_change: OnChange,
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
                Target::Authority => None,
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

    /// True if one session could match both services, if their audiences are left aside.
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
                .map(|one| [one.http.is_some(), one.tcp.is_some(), one.udp.is_some()])
                .unwrap_or_default()
        };
        let is_one_kind = kinds(self).iter().zip(kinds(other)).any(|(own, other)| *own && other);
        is_one_kind
            && share(&authorities(self, name), &authorities(other, other_name))
            && share(&paths(self), &paths(other))
            && share(&methods(self), &methods(other))
    }
}

/// One place where a service lives: a node, and what that has of it. One of `http`, `tcp` and `udp`, or several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Replica {
    /// Which node.
    pub node: Name,
    /// An HTTP server that it dials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<Target>,
    /// A TCP server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<Target>,
    /// A UDP server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<Target>,
    /// Which addresses `authority` may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<Reach>,
}

/// Who may use a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Whoever is at a node that serves its provider: with a user or without.
    Everyone,
    /// These.
    Those {
        /// By their names.
        users: Many<Reference>,
        /// All of these groups.
        groups: Many<Reference>,
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
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    users: Many<Reference>,
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    groups: Many<Reference>,
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
                    _ => Err(E::custom(format!("{text:?} is nobody; write everyone, or {{users: [{text}]}}"))),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Audience, A::Error> {
                let Those { users, groups } = Those::deserialize(MapAccessDeserializer::new(map))?;
                if users.is_empty() && groups.is_empty() {
                    return Err(de::Error::custom("nobody is named; write users, groups, or everyone"));
                }
                Ok(Audience::Those { users, groups })
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
