//! The commands of README and guide work as they stand there.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Stdio};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// The shell blocks of a page, from the heading on.
fn commands(page: &str, heading: &str) -> String {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    let from = text.find(heading).unwrap_or_else(|| panic!("{page} has no {heading}"));
    let mut script = String::new();
    let mut inside = false;
    for line in text[from..].lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if inside => {
                script.push_str(line);
                script.push('\n');
            }
            _ => {}
        }
    }
    assert!(script.lines().count() > 3, "{page} has no commands after {heading}");
    script
}

/// Runs a script in an empty directory with `hermes` on its path, and returns what it printed.
/// Whatever it started ends with it.
fn run(script: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let binary = Path::new(env!("CARGO_BIN_EXE_hermes")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let script = format!("set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{script}");
    let output = Command::new("bash")
        .args(["-c", &script])
        .current_dir(directory.path())
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let mut logs = String::new();
    for entry in std::fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "err") {
            logs.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
    assert!(output.status.success(), "{}\nstdout:\n{out}\nstderr:\n{err}\nnodes:\n{logs}", output.status);
    out.into_owned()
}

#[test]
fn the_readme_works() {
    let script = commands("README.md", "## By hand");
    // The page is for people, who see when the node is up.
    let script =
        script.replace("curl ", "curl -sf --retry 50 --retry-connrefused --retry-delay 0 --retry-max-time 20 ");
    let printed = run(&script);
    assert!(printed.contains("hello\n"), "{printed}");
    assert!(printed.contains("node.yaml: ok"), "{printed}");
}

#[test]
fn the_guide_works() {
    let printed = run(&commands("docs/guide.md", "## 1. Certificates"));
    assert_eq!(printed.matches("a file of Alice's").count(), 2, "{printed}");
    assert_eq!(printed.matches("\nhello\n").count(), 2, "{printed}");
    assert!(printed.contains("\"user\":\"alice\""), "{printed}");
    assert!(printed.contains("responds"), "{printed}");
}
