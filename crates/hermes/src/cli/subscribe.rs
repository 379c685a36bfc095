//! `hermes subscribe`: prints the publications of a channel of a relay.
//!
//! In: a URL. Out: each publication on standard output as it arrives, and holes on standard error. After a failure, the
//! subscription resumes after the latest publication. Never: a hole that is not reported, if the relay keeps a history.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use clap::Parser;
use hermes_model::document::scalar::HumanDuration;
use hermes_relay_client::{Event, Received, SubscribeOptions, Subscription};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Uri};
use serde_json::{Value, json};

use super::output::{counted, print};
use super::publish::Reach;

/// Print the publications of a channel of a relay.
///
/// Prints each publication and a line feed as it arrives, until the command is interrupted. Subscribes again after a failure, and resumes
/// after the latest publication as far as the relay keeps a history. Missed publications are reported on standard error.
#[derive(Debug, Parser)]
pub(super) struct Subscribe {
    /// Subscribe to this http: or https: URL
    url: Uri,
    /// Let the relay forget this subscriber after this time without a refresh [default: the relay's maximum]
    #[arg(long, value_name = "TIME", value_parser = period)]
    timeout: Option<Duration>,
    /// Begin after this publication
    #[arg(long, value_name = "ID")]
    last_event_id: Option<String>,
    /// Join this group, of which one member gets each publication for one
    #[arg(long, value_name = "NAME")]
    group: Option<HeaderValue>,
    /// End after this number of publications
    #[arg(short = 'n', long, value_name = "NUMBER")]
    count: Option<u64>,
    #[command(flatten)]
    reach: Reach,
    /// Print one JSON object for each publication and for each hole
    #[arg(long)]
    json: bool,
}

fn period(text: &str) -> Result<Duration, String> {
    let HumanDuration(period) = text.parse()?;
    if period.as_secs() == 0 { Err("too short; write at least 1s".to_owned()) } else { Ok(period) }
}

impl Subscribe {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self.subscribe())
    }

    async fn subscribe(self) -> anyhow::Result<ExitCode> {
        let options = SubscribeOptions {
            timeout: self.timeout,
            after: self.last_event_id,
            group: self.group,
            ..SubscribeOptions::default()
        };
        let mut subscription = Subscription::new(self.reach.client(self.url)?, options);
        let mut output = Output { left: self.count, as_json: self.json };
        while output.left != Some(0) {
            match subscription.next().await? {
                Received::Event(event) => output.print(event)?,
                Received::Interrupted(error) => eprintln!("hermes: {error}; subscribing again"),
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

struct Output {
    /// The publications that are still wanted; `None` means all.
    left: Option<u64>,
    as_json: bool,
}

impl Output {
    fn print(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Missed { id, count: missed } if self.as_json => {
                print(&format!("{}\n", json!({"id": id, "missed": missed})))
            }
            Event::Unreadable { id } if self.as_json => print(&format!("{}\n", json!({"id": id, "unreadable": true}))),
            Event::Unreadable { .. } => {
                eprintln!("hermes: left out a publication that is not encrypted with this secret");
                Ok(())
            }
            // The channel has another root.
            Event::Missed { count: Some(0), .. } => Ok(()),
            Event::Missed { count: missed, .. } => {
                let missed = missed.and_then(|missed| usize::try_from(missed).ok());
                let text = missed.map_or_else(|| "publications".to_owned(), |missed| counted(missed, "publication"));
                eprintln!("hermes: missed {text}");
                Ok(())
            }
            Event::Publication { id, headers, body } => {
                self.left = self.left.map(|left| left.saturating_sub(1));
                if self.as_json {
                    return print(&format!("{}\n", line(&id, &headers, &body)));
                }
                let mut out = std::io::stdout().lock();
                let end: &[u8] = if body.ends_with(b"\n") { b"" } else { b"\n" };
                let written = out.write_all(&body).and_then(|()| out.write_all(end)).and_then(|()| out.flush());
                written.context("standard output")
            }
        }
    }
}

fn line(id: &str, headers: &HeaderMap, body: &[u8]) -> Value {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    match std::str::from_utf8(body) {
        Ok(text) => json!({"id": id, "type": kind, "data": text}),
        Err(_) => json!({"id": id, "type": kind, "base64": BASE64_STANDARD.encode(body)}),
    }
}
