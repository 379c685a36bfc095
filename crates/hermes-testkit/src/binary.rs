//! Finds the `hermes` binary that a process test drives.
//!
//! In: `HERMES_BIN`, or the location of the running test. Out: the path of a binary that matches the sources.
//! Never: a stale binary. Cargo builds no binary of another package for a test, so the first use in a test process
//! runs `cargo build -p hermes` in the profile and target directory of the test. Cargo's own lock keeps two such
//! builds apart; one that has nothing to do takes half a second.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The path of the `hermes` binary: `HERMES_BIN` if it is set, otherwise a fresh build of this workspace.
///
/// # Panics
/// If the build fails, or if the running test lies in no target directory of Cargo.
pub fn hermes() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let path = env::var_os("HERMES_BIN").map_or_else(build, PathBuf::from);
        assert!(path.is_file(), "no hermes binary at {}", path.display());
        path.into_os_string().into_string().unwrap_or_else(|path| panic!("{} is not UTF-8", path.display()))
    })
}

/// Builds the binary beside the running test: `TARGET/debug/deps/e2e-HASH` gives `TARGET/debug/hermes`.
fn build() -> PathBuf {
    let test = env::current_exe().unwrap_or_else(|error| panic!("the path of this test is unknown: {error}"));
    let Some((profile_dir, target_dir)) = test.ancestors().nth(2).and_then(|dir| Some((dir, dir.parent()?))) else {
        panic!("{} is in no target directory; set HERMES_BIN", test.display())
    };
    let profile = match profile_dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--package", "hermes", "--bin", "hermes", "--profile", profile]);
    command.arg("--target-dir").arg(target_dir);
    command.current_dir(workspace());
    // Variables of this package, which Cargo sets for its test, are no input of the build.
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR") {
            command.env_remove(name);
        }
    }
    let status = command.status().unwrap_or_else(|error| panic!("cargo cannot be run: {error}; set HERMES_BIN"));
    assert!(status.success(), "cargo build -p hermes failed: {status}");
    profile_dir.join("hermes")
}

fn workspace() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).unwrap_or(own)
}
