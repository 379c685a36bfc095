//! `hermes ca`: the overlay's CA, and its rotation without an outage.
//!
//! In: requests of the overlay's operator; for an imported CA, its certificates and key. Out: the trusted CAs, the
//! signing CA, and the progress of each node.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use http::Method;
use serde_json::{Value, json};

use crate::document;
use crate::operator::{Options, block_on};

/// Show and rotate the overlay's certificate authority (CA).
///
/// A rotation has two steps and causes no outage. `rotate` (or `import`) distributes the new CA beside the old one. As
/// soon as all connected nodes trust it, the new CA signs and nodes renew their certificates. `finish` ends the trust
/// in the old CA.
#[derive(Debug, Parser)]
pub(super) struct Ca {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the trusted CAs, the signing CA and the progress of each node
    Show(Options),
    /// Start a rotation to a new CA
    Rotate(Options),
    /// Start a rotation to an existing CA of your organisation
    Import(Import),
    /// Finish a rotation: end the trust in the old CA. Fails while a node still needs it
    Finish(Finish),
    /// Cancel a rotation: the old CA signs again. Certificates of the new CA stay valid until `finish`
    Cancel(Options),
}

/// Arguments of `hermes ca import`.
#[derive(Debug, Args)]
struct Import {
    /// Read the CA certificate from this file, followed by its chain up to the root that nodes will trust (PEM)
    #[arg(long, value_name = "FILE")]
    certificate: PathBuf,
    /// Read the CA key from this file, without a password (PEM). The controller signs with it
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    #[command(flatten)]
    options: Options,
}

/// Arguments of `hermes ca finish`.
#[derive(Debug, Args)]
struct Finish {
    /// Finish even if nodes have not renewed yet. Other nodes reject such a node until it reconnects to a controller,
    /// which it can do while its certificate is valid
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    options: Options,
}

impl Ca {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        const PATH: &str = "/v1/authority";
        let (method, path, body, options) = match self.command {
            Command::Show(options) => (Method::GET, PATH, Vec::new(), options),
            Command::Rotate(options) => (Method::POST, PATH, Vec::new(), options),
            Command::Import(Import { certificate, key, options }) => {
                let text = |file| document::text(file).with_context(|| "cannot import the CA");
                let asked = json!({ "certificates": text(&certificate)?, "key": text(&key)? });
                (Method::POST, PATH, asked.to_string().into_bytes(), options)
            }
            Command::Finish(Finish { force: false, options }) => {
                (Method::POST, "/v1/authority/finish", Vec::new(), options)
            }
            Command::Finish(Finish { force: true, options }) => {
                (Method::POST, "/v1/authority/finish?force=true", Vec::new(), options)
            }
            Command::Cancel(options) => (Method::DELETE, PATH, Vec::new(), options),
        };
        let Options { json, access } = options;
        let answer = block_on(access.get(method, path, body))?;
        super::print(&if json { format!("{answer}\n") } else { render(&answer) })?;
        Ok(ExitCode::SUCCESS)
    }
}

fn render(answer: &Value) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    for (key, word) in [("signs", "signs"), ("next", "is to sign"), ("leaving", "signed before")] {
        let one = &answer[key];
        let Some(subject) = one["subject"].as_str() else { continue };
        let fingerprint = one["fingerprint"].as_str().unwrap_or_default();
        let sealed = if one["sealed"] == true { "; its key is sealed" } else { "" };
        let _ = writeln!(text, "{subject} {word}, until {}{sealed}\n  SHA-256 {fingerprint}", date(&one["until"]));
        if one["root"] != one["fingerprint"] {
            let _ = writeln!(text, "  below the root with SHA-256 {}", one["root"].as_str().unwrap_or_default());
        }
    }
    for former in answer["former"].as_array().into_iter().flatten() {
        let subject = former["subject"].as_str().unwrap_or_default();
        let _ = writeln!(text, "{subject} is trusted no more");
    }
    let stage = answer["stage"].as_str().unwrap_or_default();
    if stage == "steady" {
        return text;
    }
    let mut lacking = 0;
    for node in answer["nodes"].as_array().into_iter().flatten() {
        let lacks = node["lacks"].as_str().unwrap_or_default();
        lacking += usize::from(!lacks.is_empty());
        let state = match (lacks, node["connected"] == true) {
            ("", true) => "is there".to_owned(),
            ("", false) => "is away".to_owned(),
            (lacks, _) => lacks.to_owned(),
        };
        let _ = writeln!(text, "node {} {state}", node["name"].as_str().unwrap_or_default());
    }
    text += match (stage, lacking) {
        ("leaving", 0) => "all nodes have it: `hermes ca finish` ends the trust in the old CA\n",
        ("leaving", _) => "`hermes ca finish` ends the trust in the old CA, once all nodes have the new one\n",
        _ => "it signs once all connected nodes trust it\n",
    };
    text
}

/// The last second that a certificate can express.
const MAX_UNIX_TIME: u64 = 253_402_300_799;

/// Formats a Unix time as a date.
pub(super) fn date(second: &Value) -> String {
    let second = second.as_u64().unwrap_or_default().min(MAX_UNIX_TIME);
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(second))
}
