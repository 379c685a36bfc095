//! `hermes publish`: publishes to a channel of a relay.
//!
//! In: a URL, and content from the command line or standard input. Out: for each publication, the number of subscribers
//! that it reached. Never: a publication that is sent again after its connection broke, since it may have arrived.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use bytes::Bytes;
use clap::{Args, Parser};
use hermes_net::file;
use hermes_relay_client::{Acceptance, Client, ClientOptions, PublishOptions, Publisher, Secret};
use http::{HeaderName, HeaderValue, Uri};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};

use super::key;
use super::output::{counted, print};

/// Publish to a channel of a relay.
///
/// Publishes standard input, or each of its lines. Prints how many subscribers have each publication in their queue.
#[derive(Debug, Parser)]
pub(super) struct Publish {
    /// Publish to this http: or https: URL
    url: Uri,
    /// Publish this text instead of standard input
    #[arg(short, long, value_name = "TEXT", conflicts_with = "lines")]
    data: Option<String>,
    /// Publish each line of standard input as it arrives
    #[arg(long)]
    lines: bool,
    /// Wait for slow subscribers [default: as the route says]
    #[arg(long, conflicts_with = "realtime")]
    reliable: bool,
    /// Skip subscribers whose queue is full [default: as the route says]
    #[arg(long)]
    realtime: bool,
    /// Deliver to one subscriber of each group
    #[arg(long)]
    one: bool,
    /// Set the content type
    #[arg(long, value_name = "TYPE", default_value = "text/plain; charset=utf-8")]
    content_type: HeaderValue,
    #[command(flatten)]
    reach: Reach,
    /// Print one JSON object for each publication
    #[arg(long)]
    json: bool,
}

/// The options by which clients of a relay reach it.
#[derive(Debug, Args)]
pub(super) struct Reach {
    /// Connect through this node or other forward proxy (http: URLs only)
    #[arg(long, value_name = "http://HOST:PORT")]
    proxy: Option<Uri>,
    /// Trust these CA certificates (PEM) [default: the system's]
    #[arg(long, value_name = "FILE")]
    ca: Option<std::path::PathBuf>,
    /// Sign each request with this Ed25519 key (PEM), for self-certifying channels; `hermes key` makes one
    #[arg(long, value_name = "FILE")]
    key: Option<std::path::PathBuf>,
    /// Encrypt publications with the secret in this file, for clients that have it, too; `openssl rand -base64 32` makes one
    #[arg(long, value_name = "FILE")]
    secret: Option<std::path::PathBuf>,
    /// Add a request header. May be repeated
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Reach {
    pub(super) fn options(self) -> anyhow::Result<ClientOptions> {
        let headers = self.headers.into_iter().collect();
        let key = self.key.as_deref().map(key::read).transpose()?;
        let secret = self.secret.as_deref().map(secret).transpose()?;
        Ok(ClientOptions { proxy: self.proxy, ca: self.ca, headers, key, secret, ..ClientOptions::default() })
    }

    pub(super) fn client(self, url: Uri) -> anyhow::Result<Arc<Client>> {
        Ok(Client::new(url, self.options()?)?)
    }
}

fn secret(path: &Path) -> anyhow::Result<Secret> {
    let text = file::read(path, file::MAX_FILE_BYTES).with_context(|| format!("cannot read {}", path.display()))?;
    Secret::parse(&String::from_utf8_lossy(&text)).with_context(|| path.display().to_string())
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("write NAME: VALUE")?;
    let name: HeaderName = name.trim().parse().map_err(|_| format!("{name:?} is no name of a header"))?;
    let value = value.trim().parse().map_err(|_| format!("invalid character in the value of {name}"))?;
    Ok((name, value))
}

impl Publish {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ended = runtime.block_on(self.publish());
        // A read of a terminal never ends.
        runtime.shutdown_background();
        ended
    }

    async fn publish(self) -> anyhow::Result<ExitCode> {
        let client = self.reach.client(self.url)?;
        let is_reliable = match (self.reliable, self.realtime) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        };
        let options = PublishOptions { content_type: Some(self.content_type), is_reliable, is_for_one: self.one };
        let mut publisher = client.publisher(options);
        if let Some(text) = self.data {
            return one(&mut publisher, text.into_bytes(), self.json).await;
        }
        let mut input = BufReader::new(tokio::io::stdin());
        if !self.lines {
            let mut whole = Vec::new();
            input.read_to_end(&mut whole).await.context("standard input")?;
            return one(&mut publisher, whole, self.json).await;
        }
        let mut line = Vec::new();
        while input.read_until(b'\n', &mut line).await.context("standard input")? > 0 {
            let text = line.strip_suffix(b"\n").unwrap_or(&line);
            one(&mut publisher, text.strip_suffix(b"\r").unwrap_or(text).to_vec(), self.json).await?;
            line.clear();
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn one(publisher: &mut Publisher, content: Vec<u8>, as_json: bool) -> anyhow::Result<ExitCode> {
    let Acceptance { id, subscribers, delivered } = publisher.publish(Bytes::from(content)).await?;
    if as_json {
        print(&format!("{}\n", json!({"id": id, "subscribers": subscribers, "delivered": delivered})))?;
    } else {
        let subscribers = counted(usize::try_from(subscribers).unwrap_or(usize::MAX), "subscriber");
        print(&format!("delivered to {delivered} of {subscribers}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
