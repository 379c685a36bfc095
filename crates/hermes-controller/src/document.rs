//! Overlay documents, which operators and providers write.
//!
//! In: a YAML stream, or JSON. Out: [`Resource`]s with their [`Key`]s, or every problem with its position.
//! Never: a resolved reference. [`crate::catalog`] resolves them.
//!
//! `docs/reference/overlay-documents.md` describes each key; a test checks that.

mod name;
mod network;
mod node;
mod overlay;
mod service;
mod user;

use std::fmt;
use std::str::FromStr;

use hermes_model::check::section::{Section, sections};
use hermes_model::check::yaml_position::top_keys;
use hermes_model::document::scalar::text_scalar;
use hermes_model::{Position, Positions, Problem};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

pub use name::{Name, Reference};
pub use network::{Gateway, Network};
pub use node::{App, AppProtocol, Node, Program};
pub use overlay::{Defaults, NeighbourHealth, Overlay, ProgramDigest, Provider, Quota, RolloutWaves};
pub use service::{Audience, Replica, Service};
pub use user::{Group, User};

/// The kind of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The overlay as a whole. There is exactly one.
    Overlay,
    /// A node.
    Node,
    /// A name, its replicas, and its audience.
    Service,
    /// Prefixes of addresses, their gateways, and their audience.
    Network,
    /// A user, and the user's nodes.
    User,
    /// A named set of users.
    Group,
}

/// Kinds that are reserved for later versions.
const LATER: [&str; 3] = ["Policy", "Objective", "Channel"];

impl Kind {
    /// All kinds, in the order in which they are listed.
    pub const ALL: [Kind; 6] = [Kind::Overlay, Kind::Node, Kind::Service, Kind::Network, Kind::User, Kind::Group];

    /// The kind as written in documents.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Overlay => "Overlay",
            Kind::Node => "Node",
            Kind::Service => "Service",
            Kind::Network => "Network",
            Kind::User => "User",
            Kind::Group => "Group",
        }
    }

    /// True if documents of this kind belong to providers, in an overlay with providers.
    pub fn is_of_providers(self) -> bool {
        matches!(self, Kind::Service | Kind::Network | Kind::User | Kind::Group)
    }

    /// True if administrators of providers may write this kind. Only operators may write a Network, because its
    /// gateways use the routes and addresses of a machine that several providers share.
    pub fn is_for_providers_to_write(self) -> bool {
        self.is_of_providers() && self != Kind::Network
    }

    /// True if routes lead to documents of this kind.
    pub fn is_offered(self) -> bool {
        matches!(self, Kind::Service | Kind::Network)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Kind {
    type Err = String;

    /// Accepts any case, singular or plural: `hermes get services` is what people write.
    fn from_str(text: &str) -> Result<Self, String> {
        let singular = |kind: &Kind| kind.word().eq_ignore_ascii_case(text);
        let plural = |kind: &Kind| text.strip_suffix('s').is_some_and(|one| kind.word().eq_ignore_ascii_case(one));
        Self::ALL.into_iter().find(|kind| singular(kind) || plural(kind)).ok_or_else(|| {
            // A reserved kind is not a typing error.
            if let Some(later) = LATER.iter().find(|later| later.eq_ignore_ascii_case(text)) {
                return format!("{later} is not in this version of Hermes; leave it out");
            }
            let words: Vec<_> = Self::ALL.iter().map(|kind| kind.word()).collect();
            format!("unknown kind of document {text:?}; expected one of {}", words.join(", "))
        })
    }
}

/// The key of a document: `Service/VIDEO`, or `Service/acme/VIDEO` for a provider's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The kind.
    pub kind: Kind,
    /// The provider; `None` if the document belongs to the operator.
    pub provider: Option<Name>,
    /// The name.
    pub name: Name,
}

impl Key {
    /// The key of a node.
    pub fn node(name: &Name) -> Self {
        Self { kind: Kind::Node, provider: None, name: name.clone() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.provider {
            Some(provider) => write!(f, "{}/{provider}/{}", self.kind, self.name),
            None => write!(f, "{}/{}", self.kind, self.name),
        }
    }
}

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<_> = text.split('/').collect();
        let (kind, provider, name) = match parts[..] {
            [kind, name] => (kind, None, name),
            [kind, provider, name] => (kind, Some(provider.parse()?), name),
            _ => return Err(format!("invalid document key {text:?}; expected KIND/NAME or KIND/PROVIDER/NAME")),
        };
        Ok(Key { kind: kind.parse()?, provider, name: name.parse()? })
    }
}

text_scalar!(Key, "a string (KIND/NAME or KIND/PROVIDER/NAME)");

/// A document.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// The key.
    pub key: Key,
    /// The content.
    pub spec: Spec,
}

/// The content of a document, by its kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Spec {
    /// The overlay as a whole.
    Overlay(Box<Overlay>),
    /// A node.
    Node(Box<Node>),
    /// A service.
    Service(Box<Service>),
    /// A network.
    Network(Box<Network>),
    /// A user.
    User(User),
    /// A group.
    Group(Group),
}

/// A fault of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The key of the document; `None` if it could not be read.
    pub key: Option<Key>,
    /// The number of the document in the stream, from 1; `None` if it is not from a stream.
    pub number: Option<usize>,
    /// The problem and its path.
    pub problem: Problem,
}

impl Fault {
    pub(crate) fn of(key: &Key, path: impl Into<String>, message: impl Into<String>) -> Self {
        let problem = Problem { path: path.into(), message: message.into() };
        Self { key: Some(key.clone()), number: None, problem }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.key, self.number) {
            (Some(key), _) => write!(f, "{key}: ")?,
            (None, Some(number)) => write!(f, "document {number}: ")?,
            (None, None) => {}
        }
        self.problem.fmt(f)
    }
}

/// True if this text has overlay documents rather than a node document: a document has a key `kind`, and no earlier one
/// has `node`.
pub fn is_overlay(text: &str) -> bool {
    // Almost all documents are in block style, where a scan of the lines is enough. In other styles the key may be
    // indented, quoted, or anywhere in a line.
    let said = text.lines().find_map(|line| match line {
        line if line.starts_with("node:") => Some(false),
        line if line.starts_with("kind:") => Some(true),
        _ => None,
    });
    let read = || {
        top_keys(text).find_map(|keys| {
            let has = |key: &str| keys.iter().any(|one| one == key);
            (has("kind") || has("node")).then(|| !has("node"))
        })
    };
    said.or_else(read).unwrap_or_default()
}

/// The position of a fault in the text that [`read`] read. `before` is the number of documents that precede this text
/// in the stream.
pub fn position(positions: &Positions, fault: &Fault, before: usize) -> Option<Position> {
    let is_it = |key: &Key, document: usize| {
        let text = |key: &str| positions.text(document, key);
        text("name") == Some(key.name.as_str())
            && text("kind").and_then(|kind| kind.parse().ok()) == Some(key.kind)
            && text("provider") == key.provider.as_ref().map(Name::as_str)
    };
    let document = match (fault.number, &fault.key) {
        (Some(number), _) => number.checked_sub(before + 1)?,
        (None, Some(key)) => (0..positions.documents()).find(|document| is_it(key, *document))?,
        (None, None) => return None,
    };
    positions.find(document, &fault.problem.path)
}

/// Reads a stream of documents.
///
/// # Errors
/// Every problem of every document.
pub fn read(text: &str) -> Result<Vec<Resource>, Vec<Fault>> {
    let whole = |problem| vec![Fault { key: None, number: None, problem }];
    let sections = sections(text).map_err(whole)?;
    let mut faults = Vec::new();
    let resources: Vec<_> = sections
        .into_iter()
        .enumerate()
        .filter_map(|(at, section)| {
            let mut problems = Vec::new();
            let (key, resource) = resource(section, &mut problems);
            let told = problems.into_iter().map(|problem| Fault { key: key.clone(), number: Some(at + 1), problem });
            faults.extend(told);
            resource.map(|resource| (at + 1, resource))
        })
        .collect();
    let mut seen = std::collections::HashSet::new();
    for (number, resource) in &resources {
        if !seen.insert(&resource.key) {
            let fault = Fault::of(&resource.key, "", "duplicate document; keep one of them");
            faults.push(Fault { number: Some(*number), ..fault });
        }
    }
    if faults.is_empty() { Ok(resources.into_iter().map(|(_, resource)| resource).collect()) } else { Err(faults) }
}

/// Parses the text at a path. A missing or invalid value becomes a problem.
fn parsed<T: FromStr<Err = String>>(path: &str, text: Option<String>, problems: &mut Vec<Problem>) -> Option<T> {
    let missing = match path {
        "kind" => "kind missing; add kind: Node, Service or another kind",
        "name" => "name missing; add name: and a unique name",
        _ => return text.and_then(|text| read_as(path, &text, problems)),
    };
    match text {
        Some(text) => read_as(path, &text, problems),
        None => {
            problems.push(Problem { path: path.to_owned(), message: missing.to_owned() });
            None
        }
    }
}

fn read_as<T: FromStr<Err = String>>(path: &str, text: &str, problems: &mut Vec<Problem>) -> Option<T> {
    text.parse().map_err(|message| problems.push(Problem { path: path.to_owned(), message })).ok()
}

fn resource(mut section: Section, problems: &mut Vec<Problem>) -> (Option<Key>, Option<Resource>) {
    let mut take = |key: &str, problems: &mut Vec<Problem>| match section.take_text(key) {
        Ok(text) => text,
        Err(problem) => {
            problems.push(problem);
            None
        }
    };
    let (kind, provider, name) = (take("kind", problems), take("provider", problems), take("name", problems));
    let kind: Option<Kind> = parsed("kind", kind, problems);
    let (name, provider): (Option<Name>, Option<Name>) =
        (parsed("name", name, problems), parsed("provider", provider, problems));
    let Some(kind) = kind else { return (None, None) };
    if provider.is_some() && !kind.is_of_providers() {
        let message = format!("a {kind} belongs to the operator; leave provider out");
        problems.push(Problem { path: "provider".to_owned(), message });
    }
    let spec = match kind {
        Kind::Overlay => section.read(problems).map(Box::new).map(Spec::Overlay),
        Kind::Node => section.read(problems).map(Box::new).map(Spec::Node),
        Kind::Service => section.read(problems).map(Box::new).map(Spec::Service),
        Kind::Network => section.read(problems).map(Box::new).map(Spec::Network),
        Kind::User => section.read(problems).map(Spec::User),
        Kind::Group => section.read(problems).map(Spec::Group),
    };
    let key = name.map(|name| Key { kind, provider, name });
    let resource = key.clone().zip(spec).map(|(key, spec)| Resource { key, spec });
    (key, resource)
}

impl Serialize for Resource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let spec = match &self.spec {
            Spec::Overlay(spec) => serde_json::to_value(spec),
            Spec::Node(spec) => serde_json::to_value(spec),
            Spec::Service(spec) => serde_json::to_value(spec),
            Spec::Network(spec) => serde_json::to_value(spec),
            Spec::User(spec) => serde_json::to_value(spec),
            Spec::Group(spec) => serde_json::to_value(spec),
        };
        let Value::Object(spec) = spec.map_err(serde::ser::Error::custom)? else {
            return Err(serde::ser::Error::custom("expected a mapping of keys"));
        };
        let mut whole = Map::new();
        whole.insert("kind".to_owned(), self.key.kind.word().into());
        whole.insert("name".to_owned(), self.key.name.as_str().into());
        if let Some(provider) = &self.key.provider {
            whole.insert("provider".to_owned(), provider.as_str().into());
        }
        whole.extend(spec);
        whole.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Resource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Value::deserialize(deserializer)?.to_string();
        let mut resources = read(&text).map_err(|faults| {
            let lines: Vec<_> = faults.iter().map(ToString::to_string).collect();
            de::Error::custom(lines.join("; "))
        })?;
        resources.pop().ok_or_else(|| de::Error::custom("no document found"))
    }
}

/// Helper for `skip_serializing_if`: the value is its type's default.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests;
