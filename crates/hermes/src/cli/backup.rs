//! `hermes backup` and `hermes restore`: all that a controller has, as one file.

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

/// Writes all that the controller has to a file: documents, who has enrolled, and the authority with its key. Who has that file has
/// the overlay; unless the key is sealed (`hermes controller --seal-file`), which needs that file too.
#[derive(Debug, Parser)]
pub(super) struct Backup {
    /// Where to; nobody else may read it.
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
        written().with_context(|| format!("cannot write {file}; name a file that is not there yet"))?;
        super::print(&format!("revision {} is in {file}\n", answer["revision"]))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Puts a backup into a store that has nothing yet: a controller that is started with that store goes on from there.
#[derive(Debug, Parser)]
pub(super) struct Restore {
    /// The backup.
    file: PathBuf,
    #[command(flatten)]
    place: Place,
}

impl Restore {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let text = document::text(&self.file)?;
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.place.data);
        made.with_context(|| format!("--data {} cannot be made", self.place.data.display()))?;
        let revision = block_on(async {
            let store = self.place.store()?;
            Ok(Controller::restore(&*store, text.as_bytes()).await?)
        })?;
        super::print(&format!(
            "revision {revision} is restored; start `hermes controller` with the same --data and --store\n"
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}
