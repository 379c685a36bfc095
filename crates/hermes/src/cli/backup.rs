//! `hermes backup` and `hermes restore`: the state of a controller as one file.

use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use hermes_controller::controller::Controller;
use http::Method;

use super::controller::Place;
use crate::document;
use crate::operator::{Access, block_on};

/// Write a backup of the controller's state to a file.
///
/// The backup contains documents, enrolled nodes, and the CA with its key. Anyone with the file controls the overlay,
/// unless the key is sealed (`hermes controller --seal-file`).
#[derive(Debug, Parser)]
pub(super) struct Backup {
    /// Write the backup to this file, readable only by you
    file: PathBuf,
    #[command(flatten)]
    access: Access,
}

impl Backup {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let file = self.file.display();
        let answer = block_on(self.access.get(Method::GET, "/v1/backup", Vec::new()))?;
        let written = || {
            let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.file)?;
            file.write_all(answer.to_string().as_bytes())?;
            file.sync_all()
        };
        written().with_context(|| format!("cannot write {file}; name a file that does not exist"))?;
        super::print(&format!("revision {} is in {file}\n", answer["revision"]))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Restore a backup into an empty store.
///
/// Start a controller with that store afterwards. Nodes receive nothing until all of them have connected, or until you
/// confirm.
#[derive(Debug, Parser)]
pub(super) struct Restore {
    /// Restore this backup file
    #[arg(required_unless_present_any = ["confirm", "status"])]
    file: Option<PathBuf>,
    /// Confirm the restored state at a running controller. Missing nodes may know of revocations after the backup:
    /// repeat those first
    #[arg(long, conflicts_with = "file")]
    confirm: bool,
    /// Confirm even if nodes are missing
    #[arg(long, requires = "confirm")]
    yes: bool,
    /// Show whether a running controller withholds documents, and which nodes are missing
    #[arg(long, conflicts_with_all = ["file", "confirm"])]
    status: bool,
    /// Print the controller's response as JSON
    #[arg(long, requires = "status")]
    json: bool,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    access: Access,
}

impl Restore {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if self.status {
            return status(&self.access, self.json);
        }
        let Some(file) = self.file else { return confirm(&self.access, self.yes) };
        let text = document::text(&file)?;
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.place.data);
        made.with_context(|| format!("--data {} cannot be made", self.place.data.display()))?;
        let revision = block_on(async {
            let store = self.place.store()?;
            Ok(Controller::restore(&*store, text.as_bytes()).await?)
        })?;
        super::print(&format!(
            "revision {revision} is restored; start `hermes controller` with the same --data and --store. Nodes keep what they run \
             until all that have enrolled are back, with what was revoked since the backup, or you say `hermes restore --confirm`. \
             Tokens of before are void. Operators who were removed since may ask again: see `hermes operator list`\n"
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Formats the missing nodes of the controller's response.
fn missing(answer: &serde_json::Value) -> String {
    let named = answer["missing"].as_array().into_iter().flatten().filter_map(|one| one.as_str());
    named.collect::<Vec<_>>().join(", ")
}

fn status(access: &Access, is_json: bool) -> anyhow::Result<ExitCode> {
    let answer = block_on(access.get(Method::GET, "/v1/restored", Vec::new()))?;
    let (revision, missing) = (&answer["revision"], missing(&answer));
    super::print(&match (is_json, answer["unconfirmed"] == true) {
        (true, _) => format!("{answer}\n"),
        (_, false) => format!("revision {revision}: nodes get what the store has\n"),
        (_, true) => format!("revision {revision}: not confirmed; nodes keep what they run. Missing: {missing}\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn confirm(access: &Access, is_certain: bool) -> anyhow::Result<ExitCode> {
    let before = block_on(access.get(Method::GET, "/v1/restored", Vec::new()))?;
    if before["unconfirmed"] != true {
        super::print("nothing to confirm\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    let missing = missing(&before);
    anyhow::ensure!(
        is_certain || missing.is_empty(),
        "these nodes have not reconnected and may have revocations that the store has lost: {missing}. Wait for them, or revoke those keys again and add --yes"
    );
    let answer = block_on(access.get(Method::POST, "/v1/restored", Vec::new()))?;
    let missing = if missing.is_empty() { String::new() } else { format!(", without {missing}") };
    super::print(&format!("revision {}: confirmed{missing}\n", answer["revision"]))?;
    Ok(ExitCode::SUCCESS)
}
