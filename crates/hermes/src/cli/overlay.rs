//! `hermes apply`, `diff`, `get`, `delete` and `token`: the overlay's documents, at the controller.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hermes_controller::document::Key;
use hermes_model::document::scalar::Period;
use http::Method;
use serde_json::{Value, json};

use crate::document;
use crate::operator::{Access, block_on};

/// How long nodes are waited for.
pub(super) const WAIT: &str = "10s";

/// Puts overlay documents into the controller, and says which nodes took the change.
///
/// All of them or none: a document that is wrong, or would make a node's own document wrong, changes nothing.
#[derive(Debug, Parser)]
pub(super) struct Apply {
    #[command(flatten)]
    documents: Documents,
    /// Only says what would change.
    #[arg(long)]
    dry_run: bool,
    /// Changes nothing that somebody has changed after this revision.
    #[arg(long, value_name = "REVISION")]
    since: Option<u64>,
    /// All nodes have it at once, whatever `rollout` of the overlay says.
    #[arg(long)]
    now: bool,
    /// How long nodes are waited for.
    #[arg(long, value_name = "DURATION", default_value = WAIT)]
    wait: Period,
}

/// Says what files of overlay documents would change, and at which nodes.
#[derive(Debug, Parser)]
pub(super) struct Diff {
    #[command(flatten)]
    documents: Documents,
}

/// Which documents, and to whom.
#[derive(Debug, Parser)]
struct Documents {
    /// Files of overlay documents (YAML), or - for standard input.
    #[arg(short = 'f', long = "file", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Prints the controller's answer.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: Access,
}

/// Prints overlay documents: all, those of a kind, or one (`hermes get services`, `hermes get Service/VIDEO`).
#[derive(Debug, Parser)]
pub(super) struct Get {
    /// A kind, or KIND/NAME, or KIND/PROVIDER/NAME.
    what: Option<String>,
    /// Prints the controller's answer.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: Access,
}

/// Deletes an overlay document that no other one names.
#[derive(Debug, Parser)]
pub(super) struct Delete {
    /// KIND/NAME, or KIND/PROVIDER/NAME.
    document: Key,
    /// Only says what would change.
    #[arg(long)]
    dry_run: bool,
    /// How long nodes are waited for.
    #[arg(long, value_name = "DURATION", default_value = WAIT)]
    wait: Period,
    /// Prints the controller's answer.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: Access,
}

/// Leave for nodes to enrol.
#[derive(Debug, Parser)]
pub(super) struct Token {
    #[command(subcommand)]
    verb: TokenVerb,
}

#[derive(Debug, Subcommand)]
enum TokenVerb {
    /// Prints a token, with which a node enrols once.
    Create {
        /// Which node.
        #[arg(long, value_name = "NAME")]
        node: String,
        /// How long it may be used.
        #[arg(long, value_name = "DURATION", default_value = "1d")]
        life: Period,
        #[command(flatten)]
        access: Access,
    },
}

fn texts(files: &[PathBuf]) -> anyhow::Result<Vec<u8>> {
    let mut all = String::new();
    for file in files {
        let mut text = String::new();
        if file == Path::new("-") {
            std::io::stdin().lock().take(document::MAX_DOCUMENT).read_to_string(&mut text)?;
        } else {
            text = document::text(file)?;
        }
        // Whether or not a file ends with its last line.
        let _ = write!(all, "{text}\n---\n");
    }
    Ok(all.into_bytes())
}

impl Documents {
    fn change(&self, path: &str, is_dry: bool) -> anyhow::Result<ExitCode> {
        change(&self.access, Method::POST, path, texts(&self.files)?, is_dry, self.json)
    }
}

impl Apply {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let since = self.since.map(|since| format!("&since={since}")).unwrap_or_default();
        let Self { dry_run, now, .. } = self;
        let path = format!("/v1/apply?dry-run={dry_run}&now={now}&wait={}{since}", self.wait.0.as_millis());
        self.documents.change(&path, self.dry_run)
    }
}

impl Diff {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.documents.change("/v1/apply?dry-run=true", true)
    }
}

impl Delete {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let path = format!("/v1/documents/{}?dry-run={}&wait={}", self.document, self.dry_run, self.wait.0.as_millis());
        change(&self.access, Method::DELETE, &path, Vec::new(), self.dry_run, self.json)
    }
}

/// Asks for a change, and says what became of it. Fails where a node refuses it.
pub(super) fn change(
    access: &Access,
    method: Method,
    path: &str,
    body: Vec<u8>,
    is_dry: bool,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let answer = block_on(access.get(method, path, body))?;
    let is_refused = |node: &Value| node["state"] == "refused";
    let nodes = answer["nodes"].as_object();
    let has_refused = nodes.is_some_and(|nodes| nodes.values().any(is_refused));
    super::print(&if json { format!("{answer}\n") } else { told(&answer, is_dry) })?;
    let is_taken_back = answer["taken-back"].is_string();
    Ok(if has_refused || is_taken_back { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What a change came to, for people.
pub(super) fn told(answer: &Value, is_dry: bool) -> String {
    let mut text = String::new();
    let mut count = 0;
    // Writing to a String cannot fail.
    for (key, word) in [("created", "created"), ("changed", "changed"), ("deleted", "deleted")] {
        for document in answer[key].as_array().into_iter().flatten().filter_map(Value::as_str) {
            count += 1;
            let _ = writeln!(text, "{document} {}{word}", if is_dry { "would be " } else { "" });
        }
    }
    if count == 0 {
        let _ = writeln!(text, "nothing changes: all of it is so already (revision {})", answer["revision"]);
        return text;
    }
    for (node, fate) in answer["nodes"].as_object().into_iter().flatten() {
        let fate = match (fate["state"].as_str().unwrap_or_default(), fate["reason"].as_str()) {
            ("planned", _) => "would get another document".to_owned(),
            ("running", _) => "runs it".to_owned(),
            ("refused", reason) => format!("refuses it: {}", reason.unwrap_or_default()),
            ("waiting", _) => "has not answered yet".to_owned(),
            ("away", _) => "is away, and gets it when it comes".to_owned(),
            ("superseded", _) => format!("gets what revision {} made of it instead", fate["by"]),
            ("gone", _) => "is no part of the overlay any more".to_owned(),
            (other, _) => other.to_owned(),
        };
        let _ = writeln!(text, "node {node} {fate}");
    }
    if let Some(touched) = answer["nodes-touched"].as_u64() {
        let _ = writeln!(text, "{}", super::counted(usize::try_from(touched).unwrap_or_default(), "node"));
    }
    for warning in answer["warnings"].as_array().into_iter().flatten() {
        let part = |key: &str| warning[key].as_str().filter(|text| !text.is_empty()).map(|text| format!("{text}: "));
        let (document, path) = (part("document").unwrap_or_default(), part("path").unwrap_or_default());
        let _ = writeln!(text, "warning: {document}{path}{}", warning["message"].as_str().unwrap_or_default());
    }
    if !is_dry {
        let _ = writeln!(text, "revision {}", answer["revision"]);
    }
    if let Some(why) = answer["taken-back"].as_str() {
        let _ = writeln!(text, "taken back: {why}");
    }
    if let Some(step) = answer["rollout"]["step"].as_u64() {
        let all = step + answer["rollout"]["remaining"].as_u64().unwrap_or_default();
        let _ = writeln!(text, "goes out in waves, and is at step {step} of {all}: `hermes rollout show`");
    }
    text
}

impl Get {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let path = match &self.what {
            None => "/v1/documents".to_owned(),
            Some(key) if key.contains('/') => {
                format!("/v1/documents/{}", key.parse::<Key>().map_err(anyhow::Error::msg)?)
            }
            Some(kind) => {
                let kind: hermes_controller::document::Kind = kind.parse().map_err(anyhow::Error::msg)?;
                format!("/v1/documents?kind={kind}")
            }
        };
        let answer = block_on(self.access.get(Method::GET, &path, Vec::new()))?;
        if self.json {
            super::print(&format!("{answer}\n"))?;
            return Ok(ExitCode::SUCCESS);
        }
        let one = std::slice::from_ref(&answer);
        let listed = answer["documents"].as_array().map_or(one, Vec::as_slice);
        let mut text = String::new();
        for listed in listed {
            // One line a document, which is YAML too: what comes out can go in again.
            let _ = writeln!(text, "---\n# revision {}\n{}", listed["revision"], listed["document"]);
        }
        super::print(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Token {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let TokenVerb::Create { node, life, access } = self.verb;
        let body = json!({ "node": node, "life": life.0.as_secs() }).to_string();
        let answer = block_on(access.get(Method::POST, "/v1/tokens", body.into_bytes()))?;
        super::print(&format!("{}\n", answer["token"].as_str().unwrap_or_default()))?;
        Ok(ExitCode::SUCCESS)
    }
}
