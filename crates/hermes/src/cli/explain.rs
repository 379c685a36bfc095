//! `hermes explain`: what would be decided for these facts, and why, rule by rule.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Parser;
use hermes_model::{Authority, Facts, Kind, Snapshot, Trust};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::document;

/// Explains the decision for a request, without sending it.
#[derive(Debug, Parser)]
pub(super) struct Explain {
    /// The node document (YAML).
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// What the session carries: http, tcp, udp or ip.
    #[arg(long, default_value = "http")]
    kind: String,
    /// The proven user.
    #[arg(long)]
    user: Option<String>,
    /// Whom the request is for: a name, host or host:port.
    #[arg(long, default_value = "")]
    authority: String,
    /// Method; CONNECT for tunnels.
    #[arg(long)]
    method: Option<String>,
    /// Path with query.
    #[arg(long, default_value = "/")]
    path: String,
    /// A header, NAME=VALUE. May be repeated.
    #[arg(long = "header", value_name = "NAME=VALUE")]
    headers: Vec<String>,
    /// Destination prefix of an ip session.
    #[arg(long)]
    network: Option<String>,
    /// Source address.
    #[arg(long, default_value = "127.0.0.1")]
    source: IpAddr,
    /// The listener that accepts it; the first one by default.
    #[arg(long)]
    listener: Option<String>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

impl Explain {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let checked = match document::read(&self.config)? {
            Ok(checked) => checked,
            Err(problems) => {
                bail!("{} has {} problems; `hermes check` lists them", self.config.display(), problems.len())
            }
        };
        let facts = self.facts(&checked.snapshot)?;
        let explanation = hermes_model::explain(&facts, &checked.snapshot);
        let text = if self.json { serde_json::to_string_pretty(&explanation)? } else { explanation.to_string() };
        super::print(&format!("{text}\n"))?;
        Ok(ExitCode::SUCCESS)
    }

    fn facts(&self, snapshot: &Snapshot) -> anyhow::Result<Facts> {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| kind.as_str() == self.kind)
            .with_context(|| format!("--kind {} is none of http, tcp, udp, ip", self.kind))?;
        let listener = match &self.listener {
            Some(name) => snapshot
                .listeners
                .iter()
                .find(|listener| *listener.name == **name)
                .with_context(|| format!("the document has no listener {name}"))?,
            None => snapshot.listeners.first().context("the document has no listener")?,
        };
        let default_port = (kind == Kind::Http).then_some(80);
        let text = if self.authority.is_empty() { "localhost" } else { &self.authority };
        let authority = Authority::parse(text, default_port).with_context(|| format!("--authority {text}"))?;
        let method = match (&self.method, kind) {
            (Some(method), _) => method.parse().with_context(|| format!("--method {method}"))?,
            (None, Kind::Http) => Method::GET,
            (None, _) => Method::CONNECT,
        };
        let mut headers = self.header_map()?;
        for (name, value) in &listener.set_headers {
            headers.insert(name.clone(), value.clone());
        }
        let user: Option<Arc<str>> =
            self.user.as_deref().map(Arc::from).or_else(|| hermes_model::trust::listener_user(listener));
        if let Some(user) = &user {
            headers.insert(hermes_model::trust::HERMES_USER, HeaderValue::from_str(user).context("--user")?);
        }
        Ok(Facts {
            listener: listener.name.clone(),
            kind,
            source: SocketAddr::new(self.source, 0),
            trust: Trust::Anonymous,
            user,
            method,
            authority,
            path: self.path.parse().with_context(|| format!("--path {}", self.path))?,
            headers,
            network: self.network.as_deref().map(str::parse).transpose().context("--network")?,
            protocol: None,
        })
    }

    fn header_map(&self) -> anyhow::Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        for header in &self.headers {
            let (name, value) =
                header.split_once('=').with_context(|| format!("--header {header} is not NAME=VALUE"))?;
            let name: HeaderName = name.parse().with_context(|| format!("--header {header}"))?;
            headers.append(name, HeaderValue::from_str(value).with_context(|| format!("--header {header}"))?);
        }
        Ok(headers)
    }
}
