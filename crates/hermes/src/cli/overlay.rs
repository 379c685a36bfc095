//! `hermes apply`, `diff`, `get`, `delete` and `token`: the overlay's documents at the controller.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hermes_controller::document::{self as overlay, Fault, Key};
use hermes_model::document::scalar::HumanDuration;
use hermes_model::{Positions, Problem};
use http::Method;
use serde_json::{Value, json};

use crate::document;
use crate::operator::{Access, block_on};

/// Maximum length of a value that is printed completely.
const MAX_SHOWN: usize = 200;
/// The default time to wait for nodes.
pub(super) const WAIT: &str = "10s";

/// Apply overlay documents, and report which nodes accepted the change.
///
/// All documents apply, or none. An invalid document, or one that makes a node's document invalid, changes nothing.
#[derive(Debug, Parser)]
pub(super) struct Apply {
    #[command(flatten)]
    documents: Documents,
    /// Only print what would change
    #[arg(long)]
    dry_run: bool,
    /// Fail if a document was changed after this revision
    #[arg(long, value_name = "REVISION")]
    since: Option<u64>,
    /// Send the change to all nodes at once, regardless of the overlay's `rollout`
    #[arg(long)]
    now: bool,
    /// Wait this long for the nodes
    #[arg(long, value_name = "DURATION", default_value = WAIT)]
    wait: HumanDuration,
}

/// Show what files of overlay documents would change, and on which nodes
#[derive(Debug, Parser)]
pub(super) struct Diff {
    #[command(flatten)]
    documents: Documents,
}

/// Documents, and the controller that receives them.
#[derive(Debug, Parser)]
struct Documents {
    /// Read overlay documents (YAML) from this file or directory, or - for standard input
    #[arg(short = 'f', long = "file", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Delete documents that are not in these files: a provider's own, otherwise all but the Overlay document
    #[arg(long)]
    prune: bool,
    /// Print the controller's response as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: Access,
}

/// Print overlay documents: all, those of a kind, or one (`hermes get services`, `hermes get Service/VIDEO`)
#[derive(Debug, Parser)]
pub(super) struct Get {
    /// A kind, KIND/NAME or KIND/PROVIDER/NAME [default: all]
    what: Option<String>,
    /// Print the controller's response as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: Access,
}

/// Delete an overlay document to which no other document refers
#[derive(Debug, Parser)]
pub(super) struct Delete {
    /// KIND/NAME or KIND/PROVIDER/NAME
    document: Key,
    /// Only print what would change
    #[arg(long)]
    dry_run: bool,
    /// Wait this long for the nodes
    #[arg(long, value_name = "DURATION", default_value = WAIT)]
    wait: HumanDuration,
    /// Print the controller's response as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: Access,
}

/// Manage enrolment tokens
#[derive(Debug, Parser)]
pub(super) struct Token {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Create a token with which a node enrols once
    Create {
        /// Name of the node
        #[arg(long, value_name = "NAME")]
        node: String,
        /// Set the lifetime of the token
        #[arg(long, value_name = "DURATION", default_value = "1d")]
        life: HumanDuration,
        #[command(flatten)]
        access: Access,
    },
}

/// Texts of overlay documents, each with its file.
struct Texts(Vec<(PathBuf, String)>);

impl Texts {
    fn read(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let files = document::listed(paths)?.into_iter();
        let read = files.map(|file| document::text(&file).map(|text| (file, text)));
        read.collect::<anyhow::Result<Vec<_>>>().map(Self)
    }

    /// Joins all texts to one stream.
    fn joined(&self) -> String {
        // The separator works whether or not a file ends with a newline.
        self.0.iter().map(|(_, text)| format!("{text}\n---\n")).collect()
    }

    /// Maps a problem of the stream to its position: `FILE:LINE:COLUMN: `.
    fn place<'t>(&'t self) -> impl Fn(&Value) -> String + 't {
        let all: Vec<_> = self.0.iter().map(|(file, text)| (file, Positions::read(text))).collect();
        move |problem| {
            let text = |key: &str| problem[key].as_str().unwrap_or_default().to_owned();
            let number = problem["number"].as_u64().and_then(|number| usize::try_from(number).ok());
            let key = text("document").parse().ok();
            let fault = Fault { key, number, problem: Problem { path: text("path"), message: String::new() } };
            let mut before = 0;
            for (file, positions) in &all {
                if let Some(position) = overlay::position(positions, &fault, before) {
                    return format!("{}:{position}: ", file.display());
                }
                before += positions.documents();
            }
            String::new()
        }
    }
}

impl Documents {
    fn change(&self, path: &str, is_dry: bool) -> anyhow::Result<ExitCode> {
        let texts = Texts::read(&self.files)?;
        let stream = texts.joined();
        let path = if self.prune { format!("{path}&prune=true") } else { path.to_owned() };
        let answer = block_on(self.access.send_request(Method::POST, &path, stream.clone().into_bytes()))?;
        let mut answer = answer.or_refused_at(texts.place())?;
        if is_dry && answer["changed"].as_array().is_some_and(|changed| !changed.is_empty()) {
            answer["fields"] = fields(&self.access, &answer, &stream)?;
        }
        outcome(&answer, is_dry, self.json)
    }
}

/// Returns the fields in which changed documents differ from the controller's.
fn fields(access: &Access, answer: &Value, stream: &str) -> anyhow::Result<Value> {
    let new = overlay::read(stream).unwrap_or_default();
    let old = block_on(access.get(Method::GET, "/v1/documents", Vec::new()))?;
    let old = old["documents"].as_array().into_iter().flatten().map(|listed| &listed["document"]);
    let old: std::collections::HashMap<_, _> = old.filter_map(|document| Some((key_of(document)?, document))).collect();
    let still: Vec<_> = answer["still-draining"].as_array().into_iter().flatten().collect();
    let changed = answer["changed"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut fields = serde_json::Map::new();
    for key in changed {
        let document = new.iter().find(|resource| resource.key.to_string() == key);
        let (Some(document), Some(old)) = (document, old.get(key)) else { continue };
        let mut document = serde_json::to_value(document)?;
        if document["kind"] == "Node" && still.contains(&&document["name"]) {
            document["draining"] = true.into();
        }
        let mut differences = Vec::new();
        differ("", Some(old), Some(&document), &mut differences);
        fields.insert(key.to_owned(), differences.into());
    }
    Ok(fields.into())
}

/// Returns `KIND/NAME`, or `KIND/PROVIDER/NAME`.
fn key_of(document: &Value) -> Option<String> {
    let text = |key: &str| document[key].as_str();
    let provider = text("provider").map(|provider| format!("{provider}/")).unwrap_or_default();
    Some(format!("{}/{provider}{}", text("kind")?, text("name")?))
}

/// Collects the differences between two values, each with its path.
fn differ(path: &str, old: Option<&Value>, new: Option<&Value>, found: &mut Vec<Value>) {
    let is_section = |value: &Value| value.is_object();
    let is_list = |value: &Value| value.as_array().is_some_and(|items| items.iter().all(Value::is_object));
    match (old, new) {
        (old, new) if old == new => {}
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let keys: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                differ(&path, old.get(key), new.get(key), found);
            }
        }
        (Some(old), Some(new)) if is_list(old) && is_list(new) => {
            let items = |list: &Value| list.as_array().cloned().unwrap_or_default();
            let (old, new) = (items(old), items(new));
            for at in 0..old.len().max(new.len()) {
                differ(&format!("{path}[{at}]"), old.get(at), new.get(at), found);
            }
        }
        // A single element may be written without a list.
        (Some(old), Some(new)) if is_section(old) && is_list(new) => {
            differ(path, Some(&json!([old])), Some(new), found);
        }
        (Some(old), Some(new)) if is_list(old) && is_section(new) => {
            differ(path, Some(old), Some(&json!([new])), found);
        }
        (old, new) => found.push(json!({ "path": path, "old": old, "new": new })),
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

/// Requests a change, and reports the outcome. Fails if a node rejects it.
pub(super) fn change(
    access: &Access,
    method: Method,
    path: &str,
    body: Vec<u8>,
    is_dry: bool,
    json: bool,
) -> anyhow::Result<ExitCode> {
    outcome(&block_on(access.get(method, path, body))?, is_dry, json)
}

fn outcome(answer: &Value, is_dry: bool, json: bool) -> anyhow::Result<ExitCode> {
    let is_refused = |node: &Value| node["state"] == "refused";
    let nodes = answer["nodes"].as_object();
    let has_refused = nodes.is_some_and(|nodes| nodes.values().any(is_refused));
    super::print(&if json { format!("{answer}\n") } else { render_outcome(answer, is_dry) })?;
    let is_rolled_back = answer["rolled-back"].is_string();
    Ok(if has_refused || is_rolled_back { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Formats the outcome of a change.
pub(super) fn render_outcome(answer: &Value, is_dry: bool) -> String {
    let mut text = String::new();
    let mut count = 0;
    // Writing to a String cannot fail.
    for (key, word) in [("created", "created"), ("changed", "changed"), ("deleted", "deleted")] {
        for document in answer[key].as_array().into_iter().flatten().filter_map(Value::as_str) {
            count += 1;
            let _ = writeln!(text, "{document} {}{word}", if is_dry { "would be " } else { "" });
            for field in answer["fields"][document].as_array().into_iter().flatten().filter(|_| key == "changed") {
                let path = field["path"].as_str().unwrap_or_default();
                let _ = writeln!(text, "  {path}: {} -> {}", shown(&field["old"]), shown(&field["new"]));
            }
        }
    }
    for node in answer["still-draining"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let _ = writeln!(
            text,
            "node {node} stays drained, since its document does not set draining; `hermes node drain {node} --undo` ends the drain"
        );
    }
    if count == 0 {
        let _ = writeln!(text, "no change: the overlay already has these documents (revision {})", answer["revision"]);
        return text;
    }
    for (node, fate) in answer["nodes"].as_object().into_iter().flatten() {
        let fate = match (fate["state"].as_str().unwrap_or_default(), fate["reason"].as_str()) {
            ("planned", _) => "would get another document".to_owned(),
            ("running", _) => "runs it".to_owned(),
            ("refused", reason) => format!("refuses it: {}", reason.unwrap_or_default()),
            ("waiting", _) => "has not answered yet".to_owned(),
            ("away", _) => "is unreachable; it receives the change when it reconnects".to_owned(),
            ("unenrolled", _) => format!("has never enrolled: `hermes token create --node {node}`"),
            ("superseded", _) => format!("receives revision {} instead", fate["by"]),
            ("gone", _) => "was removed from the overlay".to_owned(),
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
    if let Some(why) = answer["rolled-back"].as_str() {
        let _ = writeln!(text, "rolled back: {why}");
    }
    if let Some(step) = answer["rollout"]["step"].as_u64() {
        let all = step + answer["rollout"]["remaining"].as_u64().unwrap_or_default();
        let _ = writeln!(text, "rollout in progress, step {step} of {all}; see `hermes rollout show`");
    }
    text
}

/// Formats a value of a document on one line.
fn shown(value: &Value) -> String {
    if value.is_null() {
        return "(not set)".to_owned();
    }
    let text = value.to_string();
    let end = text.floor_char_boundary(MAX_SHOWN);
    if end < text.len() { format!("{}...", &text[..end]) } else { text }
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
            // One JSON document on each line is valid YAML, so the output can be applied again.
            let _ = writeln!(text, "---\n# revision {}\n{}", listed["revision"], listed["document"]);
        }
        super::print(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Token {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let TokenCommand::Create { node, life, access } = self.command;
        let body = json!({ "node": node, "life": life.0.as_secs() }).to_string();
        let answer = block_on(access.get(Method::POST, "/v1/tokens", body.into_bytes()))?;
        super::print(&format!("{}\n", answer["token"].as_str().unwrap_or_default()))?;
        Ok(ExitCode::SUCCESS)
    }
}
