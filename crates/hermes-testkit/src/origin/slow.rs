//! The paper's server: "a simple Python echo server", slow at accepting.
//!
//! In: nothing. Out: the script, written to a file for Python. It is the threading server of the standard library as
//! documented, without any deliberate sleep. Python itself is slow: it creates a thread for each connection, under one
//! lock. The accept queue is a parameter, and the UDP buffer is large enough for a burst.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// Source of the server. It prints one JSON line with its ports when it listens.
pub const SCRIPT: &str = include_str!("slow_echo.py");

/// Writes the script into `dir` and returns its path.
///
/// # Errors
/// When the file cannot be written.
pub fn write(dir: &Path) -> Result<PathBuf> {
    let path = dir.join("slow_echo.py");
    fs::write(&path, SCRIPT).map_err(Error::io(format!("writing {}", path.display())))?;
    Ok(path)
}
