//! The output of commands.
//!
//! In: the text of a command. Out: standard output, in one write. Never: a log line.

use std::io::Write as _;

use anyhow::Context as _;

/// Prints the output of a command in one write.
///
/// # Errors
/// Standard output rejects it: the disk is full, or the reader has closed.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")
}

/// `1 route`, `2 routes`: for words whose plural is an s.
pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
