//! The file of a picture: found out first whether it can be written, since it is written minutes later.
//!
//! In: its path, and the picture at the end. Out: the file, and where it is, in words. Never: a file that is left where it
//! was only looked whether it could be there.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use anyhow::Context as _;

use super::report::print;

/// Looks whether it can be written.
///
/// # Errors
/// It cannot, and why.
pub(super) fn probe(path: &Path) -> anyhow::Result<()> {
    let open = |is_new| OpenOptions::new().write(true).create_new(is_new).open(path);
    let probed = match open(true) {
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open(false).map(drop),
        Err(error) => Err(error),
    };
    probed.with_context(|| format!("--picture: {} cannot be written; name another file", path.display()))
}

/// Writes it, and says where it is. Standard output has nothing but JSON where that was asked for.
///
/// # Errors
/// It cannot be written any more.
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
