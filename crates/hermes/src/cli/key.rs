//! `hermes key`: the key of self-certifying channels, and of tokens.
//!
//! In: a file. Out: the channels that its key certifies, or a URL with a token that it signs; a new key if the file does not
//! exist. Never: a private key on standard output, or a change of a file that exists.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use clap::Parser;
use hermes_model::decode_unreserved;
use hermes_model::scalar::HumanDuration;
use hermes_net::file;
use hermes_signature::{Grant, Right, SigningKey};
use http::Uri;
use serde_json::json;

use super::output::print;

/// The longest time of a token.
const MAX_LIFE: Duration = Duration::from_secs(30 * 86_400);

/// Make a key for self-certifying channels, or show the one in a file.
///
/// Only the holder of the key publishes to /pk/NAME/from/..., and only the holder subscribes to /pk/NAME/to/... of any
/// relay. NAME is the SHA-256 of the public key. `hermes publish --key` and `hermes subscribe --key` sign with it. With
/// --grant, prints a URL by which a client may use channels of a route that has the public key in `relay.tokens`.
#[derive(Debug, Parser)]
pub(super) struct Key {
    /// Write a new Ed25519 key to this file (PEM), unless it exists
    file: PathBuf,
    /// Print this http: or https: URL with a token for its channel, or for all channels below it if it ends in /*
    #[arg(long, value_name = "URL", requires = "client")]
    grant: Option<Uri>,
    /// Make the token for this client: user/NAME or address/IP
    #[arg(long, value_name = "CLIENT", value_parser = client, requires = "grant")]
    client: Option<String>,
    /// Let the client subscribe, publish or do both
    #[arg(long, value_name = "RIGHT", value_delimiter = ',', default_value = "subscribe", value_parser = right)]
    rights: Vec<Right>,
    /// Let the token end after this time, at most 30d
    #[arg(long, value_name = "TIME", default_value = "10m")]
    expires: HumanDuration,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Reads a key.
pub(super) fn read(path: &Path) -> anyhow::Result<Arc<SigningKey>> {
    let pem = file::read(path, file::MAX_FILE_BYTES).with_context(|| format!("cannot read {}", path.display()))?;
    let key = SigningKey::from_pem(&pem).with_context(|| path.display().to_string())?;
    Ok(Arc::new(key))
}

fn client(text: &str) -> Result<String, String> {
    let is_client = match text.split_once('/') {
        Some(("user", name)) => !name.is_empty(),
        Some(("address", address)) => address.parse::<IpAddr>().is_ok_and(|ip| ip.to_string() == address),
        _ => false,
    };
    if is_client { Ok(text.to_owned()) } else { Err("write user/NAME or address/IP".to_owned()) }
}

fn right(text: &str) -> Result<Right, String> {
    match text {
        "subscribe" => Ok(Right::Subscribe),
        "publish" => Ok(Right::Publish),
        _ => Err("write subscribe or publish".to_owned()),
    }
}

/// The URL with a token for its channel. For `/a/*`, it is `/a/?...`: the name of the channel comes before the query.
fn granted(key: &SigningKey, url: &Uri, client: String, rights: Vec<Right>, life: Duration) -> anyhow::Result<String> {
    let default = match url.scheme_str() {
        Some("http") => ":80",
        Some("https") => ":443",
        _ => anyhow::bail!("{url}: unknown scheme; write http://HOST/PATH or https://HOST/PATH"),
    };
    let authority = url.authority().map(|authority| authority.as_str().to_ascii_lowercase()).unwrap_or_default();
    let aud = authority.strip_suffix(default).unwrap_or(&authority).to_owned();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs();
    let path = decode_unreserved(url.path());
    ensure!(!path.trim_end_matches("/*").contains('*'), "{url}: a * stands for all channels below a path; write /*");
    ensure!(life <= MAX_LIFE, "a token is valid for at most {} days", MAX_LIFE.as_secs() / 86_400);
    let channels = vec![path.to_string()];
    let token = Grant { aud, sub: client, channels, rights, exp: now + life.as_secs(), nbf: None }.sign(key);
    let base = url.path().strip_suffix('*').unwrap_or(url.path());
    let query = url.query().map(|query| format!("{query}&")).unwrap_or_default();
    Ok(format!("{}://{authority}{base}?{query}hermes-token={token}", url.scheme_str().unwrap_or_default()))
}

impl Key {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let path = self.file.display();
        if self.grant.is_some() && !self.file.exists() {
            anyhow::bail!(
                "{path}: no such file; `hermes key {path}` makes a key, whose public key belongs into `relay.tokens`"
            );
        }
        let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.file);
        let (key, is_new) = match created {
            Ok(mut file) => {
                let (key, pem) = SigningKey::generate()?;
                file.write_all(pem.as_bytes()).with_context(|| format!("cannot write {path}"))?;
                (Arc::new(key), true)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => (read(&self.file)?, false),
            Err(error) => return Err(error).with_context(|| format!("cannot write {path}")),
        };
        if let (Some(url), Some(client)) = (&self.grant, self.client) {
            let url = granted(&key, url, client, self.rights, self.expires.0)?;
            let line = if self.json { json!({"url": url}).to_string() } else { url };
            print(&format!("{line}\n"))?;
            return Ok(ExitCode::SUCCESS);
        }
        let (name, public) = (key.public().name(), key.public().to_string());
        let [from, to] = ["from", "to"].map(|way| format!("/pk/{name}/{way}/"));
        if self.json {
            print(&format!(
                "{}\n",
                json!({"name": name, "public": public, "from": from, "to": to, "created": is_new})
            ))?;
        } else {
            let begin = if is_new { "wrote a new key to" } else { "the key is in" };
            print(&format!(
                "{begin} {path}; its holder alone publishes to the first, and subscribes to the second:\n  {from}...\n  \
                 {to}...\n"
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
