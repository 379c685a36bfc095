//! Test fixtures: facts and snapshots, built as the product builds them.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::authority::Authority;
use crate::facts::{Facts, Kind, Peer, Trust};
use crate::snapshot::Snapshot;

/// The snapshot of a valid document.
pub(crate) fn snapshot(text: &str) -> Snapshot {
    match crate::check(text, Path::new("/etc/hermes")) {
        Ok(checked) => checked.snapshot,
        Err(problems) => panic!("{}", problems.iter().map(|p| format!("{p}\n")).collect::<String>()),
    }
}

/// A session from loopback on listener `apps`.
pub(crate) fn session(kind: Kind, method: Method, authority: &str, path: &str) -> Facts {
    let default_port = (kind == Kind::Http).then_some(80);
    Facts {
        listener: Arc::from("apps"),
        kind,
        source: "127.0.0.1:40000".parse().unwrap(),
        trust: Trust::Anonymous,
        user: None,
        method,
        authority: Authority::parse(authority, default_port).unwrap(),
        path: path.parse().unwrap(),
        headers: HeaderMap::new(),
        network: None,
        announced_network: None,
        protocol: None,
    }
}

/// `GET http://AUTHORITY/PATH`
pub(crate) fn get(authority: &str, path: &str) -> Facts {
    session(Kind::Http, Method::GET, authority, path)
}

/// `CONNECT AUTHORITY`
pub(crate) fn connect(authority: &str) -> Facts {
    session(Kind::Tcp, Method::CONNECT, authority, "/")
}

/// A session of IP packets to a network.
pub(crate) fn packets(network: &str, protocol: u8) -> Facts {
    let facts = session(Kind::Ip, Method::CONNECT, "gateway", "/");
    Facts { network: Some(network.parse().unwrap()), protocol: Some(protocol), ..facts }
}

impl Facts {
    /// Adds a field line.
    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap());
        self
    }

    /// Sets the user.
    pub(crate) fn of(mut self, user: &str) -> Self {
        self.user = Some(Arc::from(user));
        self
    }

    /// Sets the listener.
    pub(crate) fn on(mut self, listener: &str) -> Self {
        self.listener = Arc::from(listener);
        self
    }

    /// Sets the source address.
    pub(crate) fn from(mut self, source: &str) -> Self {
        self.source = source.parse().unwrap();
        self
    }
}

/// An authenticated connection of a node.
pub(crate) fn certified(node: Option<&str>, users: &[&str], standalone: bool) -> Trust {
    Trust::Certified(Arc::new(Peer {
        overlay: Arc::from("test"),
        node: node.map(Arc::from),
        users: users.iter().copied().map(Arc::from).collect(),
        standalone,
        key: None,
    }))
}
