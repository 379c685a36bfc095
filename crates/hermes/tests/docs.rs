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
/// Whatever it started has to have ended with it: the pages say how.
fn run(script: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let binary = Path::new(env!("CARGO_BIN_EXE_hermes")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let stopped = "for _ in {1..200}; do [ -z \"$(jobs -rp)\" ] && exit 0; sleep 0.05; done\n\
                   echo 'the page leaves jobs behind:' $(jobs -r) >&2; exit 1";
    let trap = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT";
    let script = format!("set -euo pipefail\n{trap}\n{script}\n{stopped}");
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
    // What the page promises of /sessions and of the records.
    assert!(printed.contains("[]") && printed.contains("\"route\":\"hello\""), "{printed}");
}

#[test]
fn the_guide_works() {
    let printed = run(&commands("docs/guide.md", "## 1. Certificates"));
    assert_eq!(printed.matches("a file of Alice's").count(), 5, "{printed}");
    assert!(printed.contains("a datagram through three nodes\n"), "{printed}");
    assert!(printed.contains("FILES is 198.18.") && printed.contains("and that is files."), "{printed}");
    assert_eq!(printed.matches("\nhello\n").count(), 2, "{printed}");
    assert!(printed.contains("\"user\":\"alice\""), "{printed}");
    assert!(printed.contains("responds"), "{printed}");
    assert!(printed.contains("hello through three nodes\n"), "{printed}");
    assert!(printed.contains("files: forward to upstream origin"), "what explain says of Alice\n{printed}");
    assert!(printed.contains("denied with 404: no route for http to files"), "and of another\n{printed}");
}
