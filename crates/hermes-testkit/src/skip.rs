//! Visible skipping of tests that cannot run on this machine.
//!
//! In: the missing requirement. Out: a line `SKIPPED: ...` on standard error, which bypasses the capture of the test
//! harness; a failure with `HERMES_NO_SKIP=1`, which continuous integration sets.

use std::io::Write as _;

/// Says that the calling test is skipped, and why. The caller then returns.
///
/// # Panics
/// The variable `HERMES_NO_SKIP=1` is set, which forbids skipping.
pub fn skip(test: &str, why: &str) {
    let line = format!("SKIPPED: {test}: {why}");
    // The test harness shows the output of `eprintln!` only for failed tests.
    let _ = writeln!(std::io::stderr(), "{line}");
    let forbidden = std::env::var_os("HERMES_NO_SKIP").is_some_and(|value| value == "1");
    assert!(!forbidden, "{line} (HERMES_NO_SKIP=1 forbids that)");
}

/// Whether this process is root; otherwise prints that `test` is skipped.
///
/// # Panics
/// The panics of [`skip`].
pub fn needs_root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skip(test, "it needs root (namespaces, ports below 1024)");
    }
    root
}
