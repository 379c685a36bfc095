//! `hermes fetch`: downloads an object, and retries until its deadline.
//!
//! In: a URL. Out: a complete and verified file, or standard output written once. `download` holds the state and
//! interprets responses; `client` sends requests; `sink` stores content; `effort` combines them.

mod client;
mod download;
mod redirect;
mod remedy;
mod report;
mod retry;
mod sink;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Parser;
use clap::error::ErrorKind;
use hermes_model::document::scalar::HumanDuration;
use hermes_resume::digest::{self, Digests};
use hermes_resume::{backoff, response};
use http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, IF_RANGE, RANGE, TE, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use serde_json::json;
use tokio::time::Instant;

use self::client::Client;
use self::download::Download;
use self::report::{Mode, Report};
use self::retry::RetryLoop;
use self::sink::{PartFile, Pipe, Sink};

/// The exit status after the deadline: a later run may succeed. Status 1 does not promise that.
const DEADLINE: u8 = 3;
/// Header fields that fetch sets itself.
const OWN: [HeaderName; 8] =
    [RANGE, IF_RANGE, ACCEPT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION, TE, UPGRADE];

/// Download an object, and retry until the deadline.
///
/// Retries transient failures: no connection, interrupted transfers, and status 408, 425, 429, 500, 502, 503 or 504.
/// Resumes as long as the origin has the same object, and verifies its digest if there is one. FILE appears once it is
/// complete. Until then, FILE.part holds the data for a later run. Exit status: 0 for success, 1 if a retry is useless,
/// 2 for usage, 3 for the deadline.
#[derive(Debug, Parser)]
pub(super) struct Fetch {
    /// Download this http: or https: URL. The host is an overlay name or a DNS name
    #[arg(value_parser = url)]
    url: Uri,
    /// Write to this file, or - for standard output [default: last segment of the URL's path]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Connect through this node or other forward proxy
    #[arg(long, value_name = "http://HOST:PORT", value_parser = proxy)]
    proxy: Option<Uri>,
    /// Give up after this time
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = period)]
    deadline: Duration,
    /// End an attempt after this time without data. The attempt as a whole has no limit
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = period)]
    patience: Duration,
    /// Add a request header. May be repeated. A redirect to another origin keeps only accept, accept-language,
    /// cache-control, pragma and user-agent
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
    /// Verify this digest beside the origin's: sha-256=:BASE64: or sha-256=HEX, or sha-512
    #[arg(long, value_name = "DIGEST", value_parser = digests)]
    digest: Option<Digests>,
    /// Trust these CA certificates (PEM) [default: the system's]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Print one JSON object for each event; the last one is the result
    #[arg(long)]
    json: bool,
    /// Print errors only
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

impl Fetch {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        // Two threads: a disk or a pipe may block one while the other draws.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let ended = runtime.block_on(self.fetch());
        // A write to a pipe without a reader never ends.
        runtime.shutdown_background();
        ended
    }

    async fn fetch(self) -> anyhow::Result<ExitCode> {
        let output = self
            .output
            .clone()
            .or_else(|| named_by(&self.url))
            .unwrap_or_else(|| usage("the URL's path names no file; write -o FILE, or -o - for standard output"));
        let started = Instant::now();
        // A deadline that the clock cannot express counts as no deadline.
        let deadline = started.checked_add(self.deadline).unwrap_or(started + Duration::from_secs(u32::MAX.into()));
        let to_stdout = output.as_os_str() == "-";
        let (mut sink, earlier) = open(&output, &self.url).await?;
        let mode = match (self.json, self.quiet) {
            (true, _) => Mode::Json { on_stderr: to_stdout },
            (_, true) => Mode::Quiet,
            _ => Mode::for_stderr(),
        };
        let mut download = Download::new(self.digest.unwrap_or_default(), matches!(sink, Sink::Pipe(_)));
        if let Some((held, known)) = earlier {
            download.resume(held, known);
        }
        let report = Report::begin(mode, deadline);
        let headers: HeaderMap = self.headers.into_iter().collect();
        let client = Client::new(self.proxy, self.ca, headers, self.patience);
        let mut effort = RetryLoop {
            url: self.url,
            client: &client,
            download: &mut download,
            sink: &mut sink,
            report: &report,
            deadline,
        };
        let got = tokio::time::timeout_at(deadline, effort.get()).await;
        let (held, attempts, seconds) = (download.held(), report.attempts(), started.elapsed().as_secs_f64());
        let kept = sink.kept().filter(|path| path.exists());
        match got {
            Ok(Ok(found)) => {
                let verified = download.expected();
                let proof = if verified.is_empty() { "not verified: the origin offers no digest" } else { "verified" };
                let what = report::size(held);
                let tries = super::counted(attempts as usize, "request");
                let text = format!(
                    "{} is whole: {what}, {tries}, {}, {proof}",
                    output.display(),
                    report::span(started.elapsed())
                );
                let value = json!({"event": "done", "file": output, "held": held, "attempts": attempts,
                    "seconds": seconds, "digest": found.to_string(), "verified": !verified.is_empty()});
                report.end(Some(&text), &value);
                Ok(ExitCode::SUCCESS)
            }
            Ok(Err(error)) => {
                let value = json!({"event": "failed", "error": format!("{error:#}"), "held": held, "attempts": attempts,
                    "seconds": seconds, "kept": kept});
                report.end(None, &value);
                Err(error)
            }
            Err(_) => {
                // Data of the last attempt must survive, like that of all earlier attempts.
                let _ = sink.settle(download.known());
                let (kept, why) = (sink.kept(), report.reason());
                let value = json!({"event": "deadline", "held": held, "total": download.known().total,
                    "attempts": attempts, "seconds": seconds, "kept": kept, "reason": why});
                report.end(None, &value);
                drop(report);
                let tries = super::counted(attempts as usize, "request");
                let next = match kept {
                    Some(path) => format!(
                        "{} are stored in {}; the same command resumes the download",
                        report::size(held),
                        path.display()
                    ),
                    None => "try later, or with a longer --deadline".to_owned(),
                };
                let why = why.map(|why| format!(", the last time since {why}")).unwrap_or_default();
                eprintln!("hermes: the deadline passed after {tries}{why}; {next}");
                Ok(ExitCode::from(DEADLINE))
            }
        }
    }
}

/// Opens the sink. A regular file is written through its part file, anything else directly.
async fn open(output: &Path, url: &Uri) -> anyhow::Result<(Sink, Option<(u64, download::Known)>)> {
    if output.as_os_str() == "-" {
        return Ok((Sink::Pipe(Pipe::new(Box::new(tokio::io::stdout()))), None));
    }
    match std::fs::metadata(output) {
        Ok(there) if there.is_dir() => bail!("{} is a directory; write a file in it", output.display()),
        Ok(there) if !there.is_file() => {
            let file = tokio::fs::OpenOptions::new().write(true).open(output).await;
            let file = file.with_context(|| format!("{} cannot be written", output.display()))?;
            Ok((Sink::Pipe(Pipe::new(Box::new(file))), None))
        }
        _ => {
            let (part, earlier) = PartFile::open(output, &url.to_string())?;
            Ok((Sink::Part(part), earlier))
        }
    }
}

/// Returns the last segment of the path, if it is a file name.
fn named_by(url: &Uri) -> Option<PathBuf> {
    let last = url.path().rsplit('/').next()?;
    (!last.is_empty() && last != "." && last != "..").then(|| last.into())
}

fn usage(text: &str) -> ! {
    super::misuse("fetch", ErrorKind::MissingRequiredArgument, text)
}

/// Returns the host, without the brackets of an IPv6 address, and the port.
fn authority(url: &Uri) -> (&str, u16) {
    let host = url.host().unwrap_or_default();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let default = if url.scheme_str() == Some("https") { 443 } else { 80 };
    (host, url.port_u16().unwrap_or(default))
}

fn fetchable(url: &Uri) -> Result<(), String> {
    if !matches!(url.scheme_str(), Some("http" | "https")) || url.host().is_none_or(str::is_empty) {
        return Err(format!("{url} is no URL of HTTP; write http://HOST/PATH or https://HOST/PATH"));
    }
    if url.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err("a name and password in a URL end up in logs; write --header 'authorization: ...'".to_owned());
    }
    Ok(())
}

fn url(text: &str) -> Result<Uri, String> {
    let text = text.split('#').next().unwrap_or_default();
    let url: Uri = text.parse().map_err(|error| format!("{error}; write http://HOST/PATH or https://HOST/PATH"))?;
    fetchable(&url).map(|()| url)
}

fn proxy(text: &str) -> Result<Uri, String> {
    let wanted = "a proxy is spoken to by HTTP: write http://HOST:PORT, where an http listener of a node is";
    let url = text.parse::<Uri>().ok().filter(|url| url.scheme_str().is_some_and(|scheme| scheme.starts_with("http")));
    let url = url.ok_or(wanted)?;
    fetchable(&url)?;
    if url.scheme_str() != Some("http") || !matches!(url.path(), "" | "/") || url.query().is_some() {
        return Err("a proxy is spoken to in the clear and has no path; write http://HOST:PORT".to_owned());
    }
    Ok(url)
}

fn period(text: &str) -> Result<Duration, String> {
    let HumanDuration(period) = text.parse()?;
    if period.is_zero() { Err("no time at all; write more, such as 30s".to_owned()) } else { Ok(period) }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("write NAME: VALUE")?;
    let name: HeaderName = name.trim().parse().map_err(|_| format!("{name:?} is no name of a header"))?;
    if OWN.contains(&name) {
        return Err(format!("{name} is set by fetch; remove it"));
    }
    let value = value.trim().parse().map_err(|_| format!("invalid character in the value of {name}"))?;
    Ok((name, value))
}

fn digests(text: &str) -> Result<Digests, String> {
    text.parse()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_is_a_url_a_proxy_a_header() {
        assert_eq!(url("http://FILES/a%20b?c#d").unwrap().to_string(), "http://FILES/a%20b?c");
        for bad in ["FILES/a", "/a", "ftp://h/", "http://u:p@h/", "http:///a"] {
            assert!(url(bad).is_err(), "{bad}");
        }
        assert!(proxy("http://127.0.0.1:8080").is_ok() && proxy("http://[::1]:8080/").is_ok());
        assert!(proxy("https://h:1").is_err() && proxy("http://h:1/x").is_err());
        for bad in ["socks5://h:1", "h:1", "h"] {
            assert!(proxy(bad).unwrap_err().contains("write http://HOST:PORT"), "{bad}");
        }
        assert_eq!(header("X-A: b:c").unwrap(), ("x-a".parse().unwrap(), "b:c".parse().unwrap()));
        assert!(header("Range: bytes=0-").unwrap_err().contains("is set by fetch"));
        assert!(header("nothing").is_err() && period("0s").is_err() && period("5").is_err());
    }

    #[test]
    fn a_url_names_its_host_and_perhaps_a_file() {
        let url = |text: &str| text.parse::<Uri>().unwrap();
        assert_eq!(authority(&url("https://[::1]/")), ("::1", 443));
        assert_eq!(authority(&url("http://h:81/")), ("h", 81));
        assert_eq!(named_by(&url("http://h/a/b.tar?x")), Some("b.tar".into()));
        assert_eq!(named_by(&url("http://h/a/")), None);
        assert_eq!(named_by(&url("http://h/a/..")), None);
    }
}
