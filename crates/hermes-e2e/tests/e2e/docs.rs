//! The commands of README and guide work as they stand there.

use hermes_testkit::binary::hermes;
use std::path::Path;
use std::process::{Command, Stdio};

const GUIDE_3: &str = "docs/guide-layer3.md";
const GUIDE_UNSTABLE: &str = "docs/guide-unstable.md";

/// How long a page's commands may take, in seconds: ten times what they do.
const LIMIT: &str = "300";

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
    run_by(&["bash"], script)
}

/// The same by another program, which takes `-c SCRIPT` at its end.
fn run_by(program: &[&str], script: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let binary = Path::new(hermes()).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let stopped = "for _ in {1..200}; do [ -z \"$(jobs -rp)\" ] && exit 0; sleep 0.05; done\n\
                   echo 'the page leaves jobs behind:' $(jobs -r) >&2; exit 1";
    let trap = "trap '{ set +x; } 2>/dev/null; kill $(jobs -p) 2>/dev/null || true; wait' EXIT";
    // Pages wait until something has happened, without a limit: people see what does not. Here it is killed with all
    // that it started, and told of by the last command that it began.
    let trace = "exec {BASH_XTRACEFD}>trace.txt\nPS4='+ ${LINENO}: '\nset -x";
    let script = format!("set -euo pipefail\n{trap}\n{trace}\n{script}\n{stopped}");
    let output = Command::new("timeout")
        .args(["--kill-after=10", LIMIT])
        .args(program)
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
    let trace = std::fs::read_to_string(directory.path().join("trace.txt")).unwrap_or_default();
    // Without the trap's own line, and the waits of a loop.
    let last = trace.lines().rev().find(|line| !line.contains("sleep 0") && !line.contains("set +x"));
    let last = last.unwrap_or_default();
    assert!(
        output.status.success(),
        "{}, after {last:?}\nstdout:\n{out}\nstderr:\n{err}\nnodes:\n{logs}",
        output.status
    );
    out.into_owned()
}

#[test]
fn the_readme_works() {
    let script = commands("README.md", "## By hand");
    let printed = run(&script);
    assert!(printed.contains("hello\n"), "{printed}");
    assert!(printed.contains("node.yaml: ok"), "{printed}");
    // What the page promises of /sessions and of the records.
    assert!(printed.contains("[]") && printed.contains("\"route\":\"hello\""), "{printed}");
}

#[test]
fn the_page_on_installation_works() {
    let printed = run(&commands("docs/install.md", "## By hand"));
    assert!(printed.lines().any(|line| line == "hermes-node-list.1"), "{printed}");
}

#[test]
fn the_guide_works() {
    let printed = run(&commands("docs/guide.md", "## 1. Certificates"));
    assert!(printed.matches("a file of Alice's").count() > 5, "{printed}");
    let line =
        |name: &str| printed.lines().find(|line| line.to_ascii_lowercase().starts_with(name)).unwrap_or_default();
    assert_eq!(line("hermes_quic_fallbacks_total"), "hermes_quic_fallbacks_total 0", "{printed}");
    assert!(line("alt-svc").contains("h3=\":21443\""), "{printed}");
    assert!(printed.contains("a datagram through three nodes\n"), "{printed}");
    assert!(printed.contains("FILES is 198.18.") && printed.contains("and that is files."), "{printed}");
    assert!(printed.contains("fetched what is there\n"), "{printed}");
    assert_eq!(printed.matches("\nhello\n").count(), 2, "{printed}");
    assert!(printed.contains("\"user\":\"alice\""), "{printed}");
    assert!(printed.contains("responds"), "{printed}");
    assert!(printed.contains("hello through three nodes\n"), "{printed}");
    assert!(printed.contains("files: forward to upstream origin"), "what explain says of Alice\n{printed}");
    assert!(printed.contains("denied with 404: no route for http to files"), "and of another\n{printed}");
}

#[test]
fn the_guide_of_the_controller_works() {
    let printed = run(&commands("docs/guide-controller.md", "## 1. What the overlay is"));
    assert!(printed.contains("overlay example: ok, 2 nodes, 1 service, 1 user"), "{printed}");
    assert_eq!(printed.matches("the first place\n").count(), 1, "{printed}");
    assert_eq!(printed.matches("the second place\n").count(), 2, "{printed}");
    let planned =
        "Service/FILES would be changed\n  at.http: \"127.0.0.1:23800\" -> \"127.0.0.1:23801\"\nnode server would get";
    assert!(printed.contains(planned), "{printed}");
    assert!(printed.contains("Service/FILES changed\nnode server runs it\nrevision "), "{printed}");
    assert_eq!(printed.lines().filter(|line| line.ends_with(" running")).count(), 2, "{printed}");
}

#[test]
fn the_guide_of_the_relay_works() {
    let printed = run(&commands("docs/guide-relay.md", "## 1. A relay and a device"));
    // Without the access log of the nodes.
    let printed: String = printed
        .lines()
        .filter(|line| !line.starts_with("{\"time\""))
        .fold(String::new(), |all, line| all + line + "\n");
    for words in [
        "hermes-delivered: 1",
        "\"data\":\"hello from curl\"",
        "delivered to 0 of 0 subscribers\ndelivered to 0 of 0 subscribers\ndelivered to 0 of 0 subscribers\none\ntwo\nthree\n",
        "only the hall may\n",
        "\nopen until nine\n",
        "\npaint\nsweep\n",
        "\nhermes_relay_subscriptions 1\n",
        "\nto both\nto both\n",
        "\nnot without the key\ndelivered to 1 of 1 subscriber\nfrom the holder\n",
        "\nhermes-copies: 1",
        "\nafter\n",
        "\nonly over the relay\n",
    ] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
}

#[test]
fn the_guide_of_layer_3_works() {
    if !hermes_testkit::skip::needs_root("the guide of layer 3") {
        return;
    }
    // Namespaces have names in a directory: ours is our own.
    let own = "mkdir -p /run/netns\nmount -t tmpfs none /run/netns\n";
    let printed =
        run_by(&["unshare", "--net", "--mount", "bash"], &format!("{own}{}", commands(GUIDE_3, "## 1. Machines")));
    assert!(printed.contains("20008 bytes from 10.0.0.1"), "{printed}");
    assert!(printed.contains("pmtu 1"), "{printed}");
    assert!(printed.contains("10.1.0.0%2F16"), "of /sessions\n{printed}");
    assert!(printed.contains("reason=\"source-not-assigned\""), "{printed}");
    // The machine moves, and a new process takes over.
    let lossless = printed.matches("300 packets transmitted, 300 received, 0% packet loss").count();
    assert!(lossless == 2 && printed.contains("taking over from a running process"), "{printed}");
    // Both of a user's sessions are with one gateway.
    let endpoints: Vec<&str> =
        printed.lines().filter(|line| line.trim_start().starts_with("\"endpoint\": \"gateways/")).collect();
    assert!(matches!(endpoints[..], [one, other] if one == other), "{endpoints:?}\n{printed}");
    assert!(printed.contains("hermes_reverse_connections{listener=\"overlay\"} "), "{printed}");
    // Two lengths of captured prefixes are two pairs.
    for words in ["gone; of its rules there are 4", "there; of its rules there are 4", "rules: 0"] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
    let answered = printed.lines().find_map(|line| line.strip_prefix("the spare machine answered "));
    let answered = answered.and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    assert!(answered > Some(0), "{printed}");
}

#[test]
fn the_guide_of_custody_works() {
    if !hermes_testkit::skip::needs_root("the guide of custody") {
        return;
    }
    let own = "mkdir -p /run/netns\nmount -t tmpfs none /run/netns\n";
    let script = format!("{own}{}", commands(GUIDE_UNSTABLE, "## By hand"));
    let printed = run_by(&["unshare", "--net", "--mount", "bash"], &script);
    for words in ["one came over a link that is up", "two came when the link was back", "three came by hermes fetch"] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
    assert!(printed.contains("\"route\": \"on\""), "of /sessions\n{printed}");
    assert!(
        printed.contains("WARN") && printed.contains("Network is unreachable") && printed.contains("exchanges=1"),
        "{printed}"
    );
    let failures = "hermes_upstream_connect_failures_total{upstream=\"base\",endpoint=\"192.0.2.2:9080\"} ";
    assert!(printed.contains(failures), "{printed}");
}
