//! The file of a picture. The path is checked at the start, since the picture is written minutes later.
//!
//! In: the path, and later the picture. Out: the file, and a message with its path. Never: an empty file left by the
//! check.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use anyhow::Context as _;

use super::report::print;

/// Checks whether the file can be written.
///
/// # Errors
/// The file cannot be written; the error says why.
pub(super) fn probe(path: &Path) -> anyhow::Result<()> {
    let open = |is_new| OpenOptions::new().write(true).create_new(is_new).open(path);
    let probed = match open(true) {
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open(false).map(drop),
        Err(error) => Err(error),
    };
    probed.with_context(|| format!("--picture: {} cannot be written; name another file", path.display()))
}

/// Writes the file and prints its path. With JSON output the message goes to standard error.
///
/// # Errors
/// The file can no longer be written.
pub(super) fn write(path: &Path, picture: &str, is_json: bool) -> anyhow::Result<()> {
    fs::write(path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    let said = format!("  The picture is {}\n", path.display());
    if is_json {
        eprint!("{said}")
    } else {
        print(&said)
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_stays_and_what_is_not_is_not_made() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("a.svg");
        probe(&path).unwrap();
        assert!(!path.exists());
        fs::write(&path, "before").unwrap();
        probe(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        let why = format!("{:#}", probe(&room.path().join("no/a.svg")).unwrap_err());
        assert!(why.contains("no/a.svg cannot be written; name another file: No such file"), "{why}");
        assert!(probe(room.path()).is_err(), "a directory");
    }
}
