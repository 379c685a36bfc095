//! Third-party peers: programs that `scripts/setup.sh` installs into the target directory.
//!
//! In: a program's name. Out: its path.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// Finds a program: by a variable of the environment, then as `tools/NAME` in the target directory, then on the path.
///
/// # Errors
/// When it is nowhere; the message says what to do.
pub fn find(name: &str, variable: &str, target: &Path) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        return Ok(path.into());
    }
    let tool = target.join("tools").join(name);
    let on_path = env::var_os("PATH").unwrap_or_default();
    let mut places = [tool.clone()].into_iter().chain(env::split_paths(&on_path).map(|dir| dir.join(name)));
    places.find(|path| path.is_file()).ok_or_else(|| Error::Missing {
        program: name.into(),
        remedy: format!("run scripts/setup.sh, which puts it at {}, or set {variable} to its path", tool.display()),
    })
}

/// The first program of that name in the PATH or in the directories of system programs.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(system).map(|dir| dir.join(name)).find(|file| file.is_file())
}
