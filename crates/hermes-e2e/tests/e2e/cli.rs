//! The command line: exit statuses, what is printed where, and that it helps.

use hermes_testkit::binary;
use std::{
    fs,
    io::{BufRead as _, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use hermes_testkit::{ca, skip::skip};
use serde_json::Value;

fn hermes(args: &[&str]) -> Output {
    let mut command = Command::new(binary::hermes());
    command.args(args).env_remove("HERMES_LOG").stdin(Stdio::null()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn golden(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hermes-model/tests/config").join(folder);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect();
    files.sort();
    assert!(files.len() > 5, "golden documents are missing");
    files
}

#[test]
fn usage_is_status_2_failure_1_success_0_and_errors_are_one_sentence() {
    for args in [
        &[][..],
        &["nonsense"],
        &["check"],
        &["explain"],
        &["proxy"],
        &["completions", "tcsh"],
        &["check", "--no"],
        &["proxy", "node.yaml"],
    ] {
        let output = hermes(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty() && stderr(&output).contains("--help"), "{args:?}: {}", stderr(&output));
    }
    for args in [&["proxy", "node.yaml"][..], &["proxy", "node.yaml", "--config", "other.yaml"]] {
        let text = stderr(&hermes(args));
        assert!(
            text.contains("name the document with --config node.yaml") && text.contains("Usage: hermes proxy"),
            "{text}"
        );
    }
    let text = stderr(&hermes(&["proxy"]));
    assert!(text.contains("--config FILE") && text.contains("--controller URL --state DIR"), "{text}");
    assert!(text.contains("hermes proxy --controller <URL> --state <DIR>"), "{text}");
    for args in [
        &["explain", "--config", "/nowhere.yaml"][..],
        &["proxy", "--config", "/nowhere.yaml"],
        &["doctor", "--config", "/nowhere.yaml"],
    ] {
        let output = hermes(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let text = stderr(&output);
        assert!(text.starts_with("hermes: ") && text.lines().count() == 1 && text.contains("/nowhere.yaml"), "{text}");
    }
    for args in [&["--help"][..], &["--version"], &["help", "proxy"], &["explain", "--help"]] {
        let output = hermes(args);
        assert_eq!((output.status.code(), output.stderr.is_empty()), (Some(0), true), "{args:?}");
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn a_former_command_is_an_error_that_names_the_new_one() {
    for (former, new) in [
        (&["authority", "rotate"][..], "hermes ca rotate"),
        (&["node", "place", "edge", "--on", "local"], "hermes node deploy edge --on local"),
        (&["node", "unplace", "--help"], "hermes node undeploy --help"),
    ] {
        let output = hermes(former);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{former:?}");
        assert!(output.stdout.is_empty() && text.contains(&format!("use `{new}`")), "{former:?}: {text}");
    }
}

#[test]
fn check_names_place_and_remedy_of_every_mistake() {
    for file in golden("invalid") {
        let output = hermes(&["check", text(&file)]);
        assert_eq!(output.status.code(), Some(1), "{}", file.display());
        let problems = fs::read_to_string(file.with_extension("problems")).unwrap();
        // A problem that has a path has a position, too.
        let printed = stdout(&output);
        let without: String = printed.lines().map(|line| without_position(line, &file) + "\n").collect();
        let wanted: String = problems.lines().map(|line| format!("{}: error: {line}\n", file.display())).collect();
        assert_eq!(without, wanted);
        assert!(output.stderr.is_empty(), "{}", stderr(&output));

        let output = hermes(&["check", "--json", text(&file)]);
        assert_eq!(output.status.code(), Some(1), "{}", file.display());
        let findings: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(findings.len(), problems.lines().count());
        for (value, line) in findings.iter().zip(problems.lines()) {
            assert_eq!((value["level"].as_str(), value["file"].as_str()), (Some("error"), file.to_str()));
            let (path, message) = (value["path"].as_str().unwrap(), value["message"].as_str().unwrap());
            let whole = if path.is_empty() { message.to_owned() } else { format!("{path}: {message}") };
            assert_eq!(whole, line);
            let position = (value["line"].as_u64(), value["column"].as_u64());
            assert_eq!(path.is_empty(), position == (None, None), "{value}");
        }
    }
}

/// A line of `check`, with `FILE` in place of `FILE:LINE:COLUMN`.
fn without_position(line: &str, file: &Path) -> String {
    let rest = line.strip_prefix(text(file)).unwrap();
    let is_number = |text: &str| text.parse::<u64>().is_ok();
    match rest.splitn(4, ':').collect::<Vec<_>>()[..] {
        ["", number, column, rest] if is_number(number) && is_number(column) => format!("{}:{rest}", file.display()),
        _ => line.to_owned(),
    }
}

#[test]
fn check_says_file_line_and_column() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let document = "node: n\nlisteners:\n- name: a\n  bind: 127.0.0.1:0\n  protocol: http\nroutes:\n- name: r\n  match:\n    \
                    path: /x\n    usre: ann\n  upstream: nowhere\n- name: s\n";
    fs::write(&config, document).unwrap();
    let printed = stdout(&hermes(&["check", text(&config)]));
    for place in
        [":10:5: error: routes[0].match.usre: ", ":11:3: error: routes[0].upstream: ", ":12:3: error: routes[1]"]
    {
        assert!(printed.contains(&format!("{}{place}", config.display())), "{place}\n{printed}");
    }
    // The node says so too.
    let output = stderr(&hermes(&["proxy", "--config", text(&config)]));
    assert!(output.contains("\n  line 10, column 5: routes[0].match.usre: "), "{output}");
    let json = stdout(&hermes(&["check", "--json", text(&config)]));
    let first: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!((first["line"].as_u64(), first["column"].as_u64()), (Some(10), Some(5)), "{json}");
    // Warnings too; and documents of an overlay.
    fs::write(&config, "node: n\nidentity:\n  cert: a.pem\n  key: a.key\n  ca: ca.pem\n").unwrap();
    let printed = stdout(&hermes(&["check", text(&config)]));
    assert!(printed.contains(":3:3: warning: identity.cert: "), "{printed}");
    fs::write(&config, "kind: Overlay\nname: o\n---\nkind: Node\nname: a\nlinks: [a,\n  b]\n---\nkind: Node\n")
        .unwrap();
    let printed = stdout(&hermes(&["check", text(&config)]));
    assert!(printed.contains(":9:1: error: document 3: name: "), "{printed}");
}

/// Overlay documents in any YAML style, and from standard input.
#[test]
fn check_distinguishes_overlay_and_node_documents() {
    let check = |document: &str| {
        let mut child = Command::new(binary::hermes())
            .args(["check", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(document.as_bytes()).unwrap();
        stdout(&child.wait_with_output().unwrap())
    };
    for document in [
        "kind: Overlay\nname: o\n",
        "---\n# revision 3\n{\"certificate-lifetime\":\"1d\",\"kind\":\"Overlay\",\"name\":\"o\"}\n",
        "name: o\nkind: Overlay\n",
        "'kind': Overlay\n\"name\": o\n",
        "  kind: Overlay\n  name: o\n",
        "{\n  \"name\": \"o\",\n  \"kind\": \"Overlay\"\n}\n",
        "{name: o, kind: Overlay}\n",
        "\n---\n---\n{name: o, kind: Overlay}\n",
    ] {
        let printed = check(document);
        assert_eq!(printed, "overlay o: ok, 0 nodes, 0 services, 0 users\n", "{document}");
    }
    for document in [
        "node: n\n",
        "{node: n, listeners: []}\n",
        "{\"listeners\": [],\n\"node\": \"n\"}\n",
        "# kind: Overlay\n'node': n\n",
    ] {
        assert!(check(document).contains("-: ok, node n: "), "{document}\n{}", check(document));
    }
    // Anything else is checked as a node document.
    assert!(check("name: n\n").contains("node: missing node name"));
}

#[test]
fn check_passes_good_documents_with_their_warnings() {
    for file in golden("valid") {
        let output = hermes(&["check", text(&file)]);
        let printed = stdout(&output);
        assert_eq!(output.status.code(), Some(0), "{printed}");
        let (last, warnings) = {
            let mut lines: Vec<&str> = printed.lines().collect();
            (lines.pop().unwrap(), lines)
        };
        assert!(last.starts_with(&format!("{}: ok, node ", file.display())), "{last}");
        assert!(warnings.iter().all(|line| line.contains(": warning: ")), "{printed}");
        let golden = fs::read_to_string(file.with_extension("warnings")).unwrap_or_default();
        for warning in golden.lines() {
            assert!(printed.contains(&format!(": warning: {warning}\n")), "{warning}\n{printed}");
        }
        let output = hermes(&["check", "--json", text(&file)]);
        assert_eq!(output.status.code(), Some(0));
        for line in stdout(&output).lines() {
            assert_eq!(serde_json::from_str::<Value>(line).unwrap()["level"], "warning");
        }
    }
}

/// Pipes, devices and directories in place of a document.
#[test]
fn check_reads_pipes_and_waits_neither_for_a_writer_nor_for_the_end_of_a_device() {
    let room = tempfile::tempdir().unwrap();
    let fifo = room.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let check = |shell: String| {
        let output = Command::new("bash").args(["-c", &shell, "bash", binary::hermes()]).output().unwrap();
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    // The limit: 200 MB of address space more than the process maps by itself.
    for device in ["/dev/zero", "/dev/urandom"] {
        let (code, text) = check(format!("ulimit -v 700000; \"$1\" check {device}"));
        assert!(code == Some(1) && text.contains("neither a regular file nor a pipe"), "{text}");
    }
    let (code, text) = check(format!("\"$1\" check {}", fifo.display()));
    assert!(code == Some(1) && text.contains("no process writes to this pipe"), "{text}");
    let large = room.path().join("large");
    fs::File::create(&large).unwrap().set_len(1 << 30).unwrap();
    let (code, text) = check(format!("ulimit -v 700000; \"$1\" check {}", large.display()));
    assert!(code == Some(1) && text.contains("bytes"), "{text}");
    for shell in [
        "\"$1\" check <(sleep 0.1; echo 'node: n')".to_owned(),
        "echo 'node: n' | \"$1\" check /dev/stdin".to_owned(),
        format!("(sleep 0.1; echo 'node: n' > {0}) & \"$1\" check {0}", fifo.display()),
    ] {
        let (code, text) = check(shell.clone());
        assert_eq!(code, Some(0), "{shell}: {text}");
    }
}

#[test]
fn check_looks_at_every_file_that_it_is_given() {
    let room = tempfile::tempdir().unwrap();
    let good = room.path().join("good.yaml");
    fs::write(
        &good,
        "node: n\nlisteners: [{name: a, bind: '127.0.0.1:0', protocol: http}]\n\
                      routes: [{name: r, respond: {body: x}}]\n",
    )
    .unwrap();
    let named = room.path().join("named.yaml");
    fs::write(&named, "node: n\nidentity: {cert: a.pem, key: a.key, ca: ca.pem}\n").unwrap();
    let binary = room.path().join("binary.yaml");
    fs::write(&binary, [0xff, 0xfe, 0, 1]).unwrap();
    let output = hermes(&["check", text(&binary), "/nowhere.yaml", text(&named), text(&good), text(room.path())]);
    let printed = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(
        printed.contains("binary.yaml: error: ") && printed.contains("/nowhere.yaml: error: cannot read"),
        "{printed}"
    );
    assert!(printed.contains("good.yaml: ok, node n: 1 listener, 1 route, 0 upstreams\n"), "{printed}");
    assert!(printed.contains("identity.cert") && printed.contains("a.pem does not exist on this machine"), "{printed}");
}

/// By `check` where both are there, and by the node; a pair that fits, and a key that is missing, are no fault.
#[test]
fn a_key_that_is_not_its_certificates_is_refused() {
    let room = tempfile::tempdir().unwrap();
    let identity = || ca::Authority::new("lab").unwrap().issue(&ca::Subject::node("n")).unwrap();
    let (files, others) =
        (identity().write(room.path(), "n").unwrap(), identity().write(room.path(), "other").unwrap());
    let config = room.path().join("n.yaml");
    let routes = "routes: [{name: r, respond: {body: x}}]\n";
    let tls =
        "listeners: [{name: a, bind: '127.0.0.1:0', protocol: http, tls: {cert: n.pem, key: n.key, client: none}}]";
    let documents = [
        ("identity", format!("node: n\nidentity: {{cert: n.pem, key: n.key, ca: ca.pem}}\n{routes}")),
        ("listeners[0].tls", format!("node: n\n{tls}\n{routes}")),
    ];
    let check = || {
        let output = hermes(&["check", text(&config)]);
        (output.status.code(), stdout(&output))
    };
    for (_, document) in &documents {
        fs::write(&config, document).unwrap();
        let (code, printed) = check();
        assert_eq!((code, printed.contains("warning")), (Some(0), false), "{printed}");
    }
    fs::copy(&others.key, &files.key).unwrap();
    for (path, document) in &documents {
        fs::write(&config, document).unwrap();
        let (code, printed) = check();
        let problem = format!("{path}: {} is not the private key of {}", files.key.display(), files.cert.display());
        assert!(code == Some(1) && printed.contains(&problem), "{printed}");
        let output = hermes(&["proxy", "--config", text(&config)]);
        assert!(!output.status.success() && stderr(&output).contains(&problem), "{}", stderr(&output));
    }
    fs::remove_file(&files.key).unwrap();
    assert_eq!(check().0, Some(0));
}

/// What the node's own certificate says is held against the document: its name by both, and the users of its sessions.
#[test]
fn check_compares_the_certificate_with_the_document() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    fs::write(
        &config,
        "node: n\nidentity: {cert: n.pem, key: n.key, ca: ca.pem}\nlisteners:\n\
         - {name: l3, protocol: tun, device: h0, address: [10.20.0.2], set-headers: {hermes-user: alice},\n\
         \x20  capture: [10.0.0.1, {network: 10.0.0.2, set-headers: {hermes-user: bob}}]}\n\
         - {name: here, bind: '127.0.0.1:0', protocol: tcp, authority: 'A:1', set-headers: {hermes-user: carol}}\n\
         routes:\n- {name: local, match: {kind: tcp}, terminate: {tcp: '127.0.0.1:9'}}\n\
         - {name: out, match: {kind: ip}, upstream: hub}\n\
         upstreams: [{name: hub, protocol: h2, endpoints: ['192.0.2.1:9443'], tls: {node: hub}}]\n",
    )
    .unwrap();
    let check = |subject: ca::Subject| {
        let identity = ca::Authority::new("lab").unwrap().issue(&subject).unwrap();
        identity.write(room.path(), "n").unwrap();
        let output = hermes(&["check", text(&config)]);
        (output.status.code(), stdout(&output))
    };
    let node = || ca::Subject::node("n");

    let (code, printed) = check(ca::Subject::node("other").with_user("alice").with_user("bob"));
    let problem =
        "error: identity.cert: the certificate names node other, but the document names n; issue one that fits";
    assert!(code == Some(1) && printed.contains(problem), "{printed}");
    let (code, printed) = check(ca::Subject::server("n.example"));
    assert!(code == Some(1) && printed.contains("has no URI spiffe://OVERLAY/node/n"), "{printed}");

    let of_alice = "warning: listeners[0].set-headers.hermes-user: the certificate does not bind user alice";
    let of_bob = "warning: listeners[0].capture[1].set-headers.hermes-user: the certificate does not bind user bob";
    let warned = |printed: &str| (printed.contains(of_alice), printed.contains(of_bob), printed.contains("carol"));
    let (code, printed) = check(node());
    assert_eq!((code, warned(&printed)), (Some(0), (true, true, false)), "{printed}");
    assert!(printed.contains("removes the user unless its document does (users: {n: [bob]})"));
    let (code, printed) = check(node().with_user("alice"));
    assert_eq!((code, warned(&printed)), (Some(0), (false, true, false)), "{printed}");
    assert!(printed.contains("(upstream hub) rejects the session unless"), "{printed}");
    for proven in [node().with_user("alice").with_user("bob"), node().standalone()] {
        let (code, printed) = check(proven);
        assert_eq!((code, printed.contains("warning")), (Some(0), false), "{printed}");
    }
}

#[test]
fn check_rejects_expired_certificates() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let document = "node: n\nidentity:\n  cert: n.pem\n  key: n.key\n  ca: ca.pem\n\
                    routes: [{name: r, respond: {body: x}}]\n";
    fs::write(&config, document).unwrap();
    let write = |subject: ca::Subject| {
        ca::Authority::new("lab").unwrap().issue(&subject).unwrap().write(room.path(), "n").unwrap()
    };
    let check = || {
        let output = hermes(&["check", text(&config)]);
        (output.status.code(), stdout(&output))
    };
    write(ca::Subject::node("n"));
    let (code, printed) = check();
    assert!(code == Some(0) && !printed.contains("expired"), "{printed}");
    let files = write(ca::Subject::node("n").over());
    let (code, printed) = check();
    let problem = format!(":3:3: error: identity.cert: certificate {} expired on ", files.cert.display());
    assert!(code == Some(1) && printed.contains(&problem), "{printed}");
    // An expired CA verifies no peer.
    let expired = fs::read(&files.cert).unwrap();
    write(ca::Subject::node("n"));
    fs::write(room.path().join("ca.pem"), expired).unwrap();
    let (code, printed) = check();
    assert!(code == Some(1) && printed.contains("error: identity.ca: all CA certificates in "), "{printed}");
}

#[test]
fn explain_takes_a_users_own_listener() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let document = "node: n\nlisteners:\n\
                    - {name: bobs, bind: '127.0.0.1:0', protocol: http, set-headers: {hermes-user: bob}}\n\
                    - {name: alices, bind: ':1080', protocol: socks5, set-headers: {hermes-user: alice}}\n\
                    routes:\n- {name: shop, match: {kind: tcp, authority: 'SHOP:80', header: {hermes-user: alice}}, respond: {body: x}}\n";
    let document = document.replace("header: {", "headers: {").replace("respond: {body: x}", "upstream: next")
        + "upstreams: [{name: next, protocol: tcp, endpoints: ['127.0.0.1:1']}]\n";
    fs::write(&config, document).unwrap();
    let explain = |args: &[&str]| {
        let output = hermes(&[&["explain", "--config", text(&config)], args].concat());
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    for args in [&["--user", "alice", "--authority", "SHOP"][..], &["--user", "alice", "--authority", "SHOP:80"]] {
        let (_, printed) = explain(args);
        assert!(printed.contains("tcp CONNECT shop:80 on alices") && printed.contains("user alice"), "{printed}");
    }
    let (code, printed) = explain(&["--user", "alice", "--listener", "bobs", "--authority", "SHOP"]);
    assert!(code == Some(3) && printed.contains("claim     user alice ignored"), "{printed}");
    let (code, printed) = explain(&["--user", "bob", "--listener", "alices", "--authority", "SHOP"]);
    assert!(code == Some(1) && printed.contains("--user has no effect: clients of listener alices (tcp)"), "{printed}");
}

#[test]
fn a_closed_pipe_is_no_failure_and_a_full_disk_is_one() {
    let file = golden("invalid").into_iter().find(|file| file.ends_with("mixed.yaml")).unwrap();
    let mut child = Command::new(binary::hermes())
        .args(["check", text(&file)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut printed = String::new();
    child.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
    assert!(child.wait().unwrap().code().is_some_and(|code| code <= 1) && printed.is_empty(), "{printed}");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(binary::hermes()).args(["completions", "bash"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "hermes: standard output: No space left on device (os error 28)\n");
}

/// The exit status that fits an explanation: a script can tell a denial from an error.
fn status_of(explanation: &str) -> i32 {
    let is_denied = |line: &str| line.starts_with("decision  denied") || line.starts_with("decision  TLS");
    if explanation.lines().any(is_denied) { 3 } else { 0 }
}

/// Where the fixed point is the contract's own document.
fn explain(args: &[&str]) -> (i32, String) {
    let file = golden("valid").into_iter().find(|file| file.ends_with("contract.yaml")).unwrap();
    let output = hermes(&[&["explain", "--config", text(&file)], args].concat());
    (output.status.code().unwrap(), stdout(&output) + &stderr(&output))
}

#[test]
fn explain_prints_the_decision_and_its_reason() {
    let cases: [(&[&str], &[&str]); 6] = [
        (
            &["--authority", "VIDEO", "--path", "/files/film", "--user", "alice"],
            &["video: matches", "upstream ingress"],
        ),
        // Names compare without regard to case; a default port is none.
        (&["--authority", "video:80", "--path", "/files/film", "--user", "bob"], &["upstream ingress"]),
        (&["--authority", "VIDEO", "--path", "/hello", "--user", "carol"], &["hello: matches", "200"]),
        (&["--authority", "OLD", "--path", "/x"], &["moved: matches", "308"]),
        (&["--kind", "tcp", "--authority", "www.example.com:443"], &["anywhere: matches"]),
        (&["--authority", "NOBODY", "--path", "/nothing"], &["404", "no route"]),
    ];
    for (args, wanted) in cases {
        let (code, printed) = explain(args);
        assert_eq!(code, status_of(&printed), "{args:?}: {printed}");
        for words in wanted {
            assert!(printed.contains(words), "{words} is not in the explanation of {args:?}:\n{printed}");
        }
        let (other, printed) = explain(&[args, &["--json"]].concat());
        let value: Value = serde_json::from_str(&printed).unwrap();
        assert!(code == other && value["decision"] == if code == 0 { "act" } else { "deny" }, "{printed}");
    }
}

const LAYER_3: &str = "
node: a
listeners:
- {name: dns, bind: '127.0.0.1:5353', protocol: dns, names: '*.corp', addresses: 198.18.0.0/16}
- {name: l3, protocol: tun, device: hermes0, address: 10.20.0.2, capture: [10.0.0.0/8, 198.18.0.0/16, 192.0.2.0/24]}
- {name: far, bind: '127.0.0.1:0', protocol: http}
routes:
- {name: none, match: {kind: ip, network: 192.0.2.0/24}, respond: {status: 403}}
- {name: files, match: {listener: l3, kind: ip, authority: files.corp}, upstream: next}
- {name: vpn, match: {listener: l3, kind: ip, network: 10.0.0.0/8}, upstream: next}
- {name: gate, match: {listener: far, kind: ip}, terminate: {tun: gw0, address: 10.0.0.1, assign: 10.20.0.0/24}}
upstreams:
- {name: next, protocol: h2, endpoints: ['127.0.0.1:1'], overlay: true}
";

#[test]
fn explain_prints_the_path_of_a_packet() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("node.yaml");
    fs::write(&config, LAYER_3).unwrap();
    let near = |packet: &str, more: &[&str]| {
        let args = ["explain", "--config", text(&config), "--listener", "l3", "--packet", packet];
        let output = hermes(&[&args[..], more].concat());
        stdout(&output) + &stderr(&output)
    };
    let far = |packet: &str, network: &str| {
        let args = ["--listener", "far", "--kind", "ip", "--network", network, "--packet", packet];
        let output = hermes(&[&["explain", "--config", text(&config)][..], &args].concat());
        stdout(&output) + &stderr(&output)
    };
    let cases = [
        (near("src=10.20.0.2,dst=10.0.0.1", &[]), "packet    passes here"),
        (near("src=10.20.0.3,dst=10.0.0.1", &[]), "dropped (source-not-assigned): listener l3"),
        (near("src=10.20.0.2,dst=203.0.113.1", &[]), "listener l3 does not accept this"),
        (near("src=10.20.0.2,dst=192.0.2.1", &[]), "dropped (no-session)"),
        (near("src=10.20.0.2,dst=198.18.0.9", &[]), "say which one by --authority"),
        (near("src=10.20.0.2,dst=198.18.0.9", &["--authority", "files.corp"]), "files: matches"),
        (near("src=10.20.0.2,dst=198.18.0.9", &["--authority", "other.corp"]), "dropped (no-session)"),
        (near("src=10.20.0.2,dst=10.0.0.1,length=1400,mtu=1300", &[]), "dropped (too-big)"),
        (near("src=10.20.0.2,dst=fd00::1", &[]), "different IP versions"),
        (near("src=10.20.0.2", &[]), "write src="),
        (far("src=10.20.0.2,dst=10.0.0.1,proto=tcp", "10.0.0.1/32"), "packet    passes into device gw0"),
        (far("src=10.20.0.2,dst=10.0.0.2", "10.0.0.1/32"), "dropped (out-of-scope)"),
        (far("src=10.30.0.2,dst=10.0.0.1", "10.0.0.1/32"), "dropped (source-not-assigned)"),
        (far("src=10.20.0.2,dst=224.0.0.1", "0.0.0.0/0"), "dropped (not-unicast)"),
    ];
    for (printed, wanted) in cases {
        assert!(printed.contains(wanted), "{wanted} is not in:\n{printed}");
    }
}

/// An address is a prefix of its own, and the narrowest capture of all listeners has it.
#[test]
fn explain_names_the_capture_of_a_network() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("node.yaml");
    let narrow = "- {name: narrow, protocol: tun, device: hermes1, address: 10.20.0.2, capture: 10.9.0.0/16}\nroutes:";
    fs::write(&config, LAYER_3.replace("routes:", narrow)).unwrap();
    let about = |args: &[&str]| {
        let output = hermes(&[&["explain", "--config", text(&config)], args].concat());
        stdout(&output) + &stderr(&output)
    };
    let cases: [(&[&str], &str); 8] = [
        (&["--network", "10.0.0.1"], "capture   listener l3 captures it with 10.0.0.0/8, on device hermes0"),
        (&["--network", "10.0.0.1"], "vpn: matches"),
        (&["--network", "10.9.1.0/24"], "capture   listener narrow captures it with 10.9.0.0/16, on device hermes1"),
        (&["--packet", "src=10.20.0.2,dst=10.9.0.1"], "listener narrow captures it with 10.9.0.0/16"),
        (
            &["--listener", "l3", "--network", "10.9.0.1"],
            "listener narrow captures it first, with 10.9.0.0/16; listener l3",
        ),
        (
            &["--network", "10.0.0.1/8"],
            "--network: invalid network \"10.0.0.1/8\": host bits are set; use 10.0.0.0/8 or 10.0.0.1/32",
        ),
        (&["--network", "ten"], "--network: invalid network \"ten\"; use an address and a prefix length"),
        // At another listener a client asks for it.
        (&["--listener", "far", "--kind", "ip", "--network", "10.0.0.1"], "gate: matches"),
    ];
    for (args, wanted) in cases {
        let printed = about(args);
        assert!(printed.contains(wanted), "{wanted} is not in what {args:?} gives:\n{printed}");
    }
    assert!(!about(&["--listener", "far", "--kind", "ip", "--network", "10.0.0.1"]).contains("capture"));
}

#[test]
fn explain_names_the_invalid_argument() {
    for (args, word) in [
        (&["--authority", "a b"][..], "--authority"),
        (&["--listener", "nowhere"], "nowhere"),
        (&["--header", "novalue"], "--header"),
        (&["--method", "G T"], "--method"),
        (&["--kind", "ip", "--network", "10.0.0.1/99"], "--network"),
        (&["--network", "10.0.0.0/8"], "--network is for sessions of kind ip"),
        (&["--kind", "ip"], "add --network 10.0.0.0/8"),
        (&["--packet", "src=10.0.0.1,dst=10.0.0.2"], "add --kind ip --network PREFIX"),
        (&["--listener", "database", "--kind", "http"], "sessions of listener database are tcp"),
        (&["--listener", "database", "--authority", "OTHER:1"], "sessions of listener database are for db:3306"),
        (&["--listener", "database", "--path", "/x"], "--path has no effect: clients of listener database (tcp)"),
        (&["--listener", "video-in", "--method", "GET"], "--method has no effect: clients of listener video-in (udp)"),
        (&["--listener", "video-in", "--header", "a=b"], "--header"),
        (&["--listener", "video-in", "--user", "bob"], "--user"),
        (&["--kind", "tcp", "--authority", "DB:1", "--path", "/x"], "--path: a tcp session has no path"),
        (&["--kind", "tcp", "--authority", "DB"], "--authority DB has no port"),
        (&["--kind", "udp"], "missing --authority HOST:PORT"),
        (&["--listener", "socks"], "missing --authority HOST:PORT for a tcp session"),
        (&["--listener", "names"], "listener names only answers DNS queries"),
        (&["--listener", "socks", "--kind", "http"], "--kind http: sessions of listener socks are tcp (CONNECT)"),
        (
            &["--listener", "socks", "--authority", "A:1", "--user", "bob"],
            "--user has no effect: clients of listener socks (tcp)",
        ),
        (&["--certificate", "spiffe://lab/node/n"], "listener apps requests no client certificate"),
        (&["--listener", "overlay", "--certificate", "node/n"], "--certificate node/n"),
        (
            &["--listener", "overlay", "--certificate", "spiffe://lab/role/standalone"],
            "--certificate: its certificate has no",
        ),
    ] {
        let (code, printed) = explain(args);
        assert!(code == 1 && printed.starts_with("hermes: ") && printed.contains(word), "{args:?}: {printed}");
    }
    let (code, printed) = explain(&["--kind", "quic"]);
    assert!(code == 2 && printed.contains("[possible values: http, tcp, udp, ip]"), "{printed}");
}

#[test]
fn explain_decides_for_whom_the_node_decides() {
    let cases: [(&[&str], &[&str]); 12] = [
        // `apps` sets hermes-user, whatever a client claims.
        (
            &["--authority", "VIDEO", "--path", "/files/film", "--user", "mallory"],
            &["user alice", "claim     user mallory ignored", "video: matches"],
        ),
        (
            &["--authority", "VIDEO", "--path", "/files/film", "--header", "hermes-user=mallory"],
            &["user alice", "video: matches"],
        ),
        // `lab` believes its own network, and nobody else.
        (
            &[
                "--listener",
                "lab",
                "--source",
                "10.9.0.7",
                "--authority",
                "VIDEO",
                "--path",
                "/files/a",
                "--user",
                "bob",
            ],
            &["user bob, from a peer trusted by its address", "video: matches"],
        ),
        (
            &[
                "--listener",
                "lab",
                "--source",
                "10.8.0.7",
                "--authority",
                "VIDEO",
                "--path",
                "/files/a",
                "--user",
                "bob",
            ],
            &["no user", "claim     user bob removed", "header hermes-user must be [alice, bob], but is absent"],
        ),
        // A raw flow is what its listener says.
        (&["--listener", "video-in"], &["session   udp CONNECT video:5004 on video-in", "video-flow: open udp"]),
        (&["--listener", "socks", "--authority", "a.example.com:443"], &["tcp CONNECT a.example.com:443 on socks"]),
        (&["--listener", "socks", "--kind", "udp", "--authority", "VIDEO:5004"], &["video-flow: open udp"]),
        (&["--listener", "database", "--kind", "tcp", "--authority", "db:3306"], &["tcp CONNECT db:3306 on database"]),
        // Without a certificate there is no session on `overlay`.
        (
            &["--listener", "overlay", "--path", "/hello"],
            &["decision  TLS handshake failure: listener overlay requires", "--certificate URI"],
        ),
        (
            &["--listener", "overlay", "--path", "/hello", "--certificate", "spiffe://lab/node/edge-7"],
            &["user carol, from node edge-7 of lab", "hello: matches"],
        ),
        (
            &["--listener", "overlay", "--certificate", "spiffe://lab/node/edge-7", "--user", "dave"],
            &["denied with 403: node edge-7 claims to be user dave, who is not bound to it"],
        ),
        (
            &[
                "--listener",
                "overlay",
                "--certificate",
                "spiffe://lab/node/x",
                "--certificate",
                "spiffe://lab/role/standalone",
                "--user",
                "bob",
                "--authority",
                "VIDEO",
                "--path",
                "/files/a",
            ],
            &["user bob", "video: matches"],
        ),
    ];
    for (args, wanted) in cases {
        let (code, printed) = explain(args);
        assert_eq!(code, status_of(&printed), "{args:?}: {printed}");
        for words in wanted {
            assert!(printed.contains(words), "{words} is not in the explanation of {args:?}:\n{printed}");
        }
    }
}

#[test]
fn explain_names_targets_outside_the_dial_scope() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let routes = "routes:\n- {name: web, match: {kind: http}, terminate: {http: authority}}\n\
                  - {name: all, match: {kind: tcp}, terminate: {tcp: authority, reach: private}}\n";
    let listeners = "node: n\nlisteners: [{name: a, bind: '127.0.0.1:0', protocol: http}]\n";
    fs::write(&config, format!("{listeners}{routes}")).unwrap();
    let cases: [(&[&str], &str); 6] = [
        (&["--authority", "169.254.169.254"], "denied with 403: 169.254.169.254 is link-local, where cloud metadata"),
        (&["--authority", "10.0.0.1"], "denied with 403: 10.0.0.1 is private"),
        // Whatever else loopback is, it is this machine's own address.
        (&["--kind", "tcp", "--authority", "127.0.0.1:22"], "denied with 403: 127.0.0.1 is this node's own address"),
        (&["--kind", "tcp", "--authority", "127.0.0.9:22"], "denied with 403: 127.0.0.9 is loopback"),
        (&["--kind", "tcp", "--authority", "[fd00:ec2::254]:80"], "denied with 403: fd00:ec2::254 is a cloud's"),
        (&["--authority", "example.com"], "reach     public: the addresses of example.com are checked when it is"),
    ];
    for (args, wanted) in cases {
        let output = hermes(&[&["explain", "--config", text(&config)], args].concat());
        let printed = stdout(&output);
        assert!(printed.contains(wanted), "{wanted}\n{printed}");
        assert_eq!(output.status.code(), Some(if wanted.starts_with("denied") { 3 } else { 0 }), "{printed}");
    }
}

#[test]
fn doctor_prints_each_problem_with_its_remedy() {
    let room = tempfile::tempdir().unwrap();
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let identity = ca::Authority::new("lab").unwrap().issue(&ca::Subject::node("n")).unwrap();
    let files = identity.write(room.path(), "n").unwrap();
    let config = room.path().join("n.yaml");
    let document = |tcp: &str, udp: &str| {
        format!(
            "node: n\nidentity: {{cert: n.pem, key: n.key, ca: ca.pem}}\nlisteners:\n\
             - {{name: a, bind: '{tcp}', protocol: http, tls: {{}}}}\n\
             - {{name: b, bind: '{udp}', protocol: udp, authority: 'X:1'}}\n"
        )
    };
    fs::write(&config, document("127.0.0.1:0", "127.0.0.1:0")).unwrap();
    let output = hermes(&["doctor", "--config", text(&config)]);
    let printed = stdout(&output);
    for line in
        ["ok    open files: ", "ok    document: node n", "listener a on 127.0.0.1:0: free", "certificates: all load"]
    {
        assert!(printed.contains(line), "{line}\n{printed}");
    }
    let faults = printed.lines().filter(|line| line.starts_with("FAIL")).count();
    assert_eq!(output.status.code(), Some(i32::from(faults > 0)), "{printed}");

    assert!(printed.contains("ok    identity.cert: good for "), "{printed}");
    let over = ca::Authority::new("lab").unwrap().issue(&ca::Subject::node("n").over()).unwrap();
    over.write(room.path(), "n").unwrap();
    let output = hermes(&["doctor", "--config", text(&config)]);
    assert!(stdout(&output).contains("FAIL  identity.cert: over for "), "{}", stdout(&output));

    fs::write(&config, document(&holder.local_addr().unwrap().to_string(), &udp.local_addr().unwrap().to_string()))
        .unwrap();
    fs::remove_file(&files.key).unwrap();
    let output = hermes(&["doctor", "--config", text(&config)]);
    let printed = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    for words in ["FAIL  listener a", "FAIL  listener b", "FAIL  identity", "n.key"] {
        assert!(printed.contains(words), "{words}\n{printed}");
    }
    let bad = golden("invalid").remove(0);
    let output = hermes(&["doctor", "--config", text(&bad)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains(&format!("Run `hermes check {}`", bad.display())), "{}", stdout(&output));
}

fn doctor(config: &Path) -> (i32, String) {
    let output = hermes(&["doctor", "--config", text(config)]);
    (output.status.code().unwrap(), stdout(&output) + &stderr(&output))
}

/// The lines of the document's own findings.
fn line<'t>(printed: &'t str, what: &str) -> &'t str {
    let mut lines = printed.lines().filter(|line| line.get(6..).is_some_and(|rest| rest.starts_with(what)));
    lines.next().unwrap_or_else(|| panic!("no line of {what} in\n{printed}"))
}

#[test]
fn doctor_looks_at_the_access_log_and_makes_none() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let with = |log: &str| fs::write(&config, format!("node: n\naccess-log: {log}\n")).unwrap();
    let log = room.path().join("n.log");
    with("n.log");
    let (_, printed) = doctor(&config);
    assert_eq!(line(&printed, "access log"), format!("ok    access log: {}: can be made", log.display()));
    assert!(!log.exists() && !printed.contains("certificates"), "{printed}");
    fs::write(&log, "kept\n").unwrap();
    assert!(line(&doctor(&config).1, "access log").ends_with("n.log: can be written"));
    assert_eq!(fs::read_to_string(&log).unwrap(), "kept\n");

    with("nowhere/n.log");
    let (code, printed) = doctor(&config);
    let found = line(&printed, "access log");
    assert!(code == 1 && found.starts_with("FAIL") && found.contains("does not exist"), "{found}");
    assert!(found.contains(text(&room.path().join("nowhere/n.log"))), "{found}");
    with(".");
    let (code, printed) = doctor(&config);
    assert!(code == 1 && line(&printed, "access log").contains("Is a directory"), "{printed}");

    // The node itself says which file it cannot open.
    with("nowhere/n.log");
    let output = stderr(&hermes(&["proxy", "--config", text(&config)]));
    let wanted = format!("access-log: {} cannot be written: No such file", room.path().join("nowhere/n.log").display());
    assert!(output.contains(&wanted), "{output}");
}

#[test]
fn doctor_recognizes_a_running_node_of_the_document() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    let held = [0; 3].map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let [admin, http, other] = held.each_ref().map(|socket| socket.local_addr().unwrap());
    let document = |node: &str| {
        format!(
            "node: {node}\nadmin: {admin}\nlisteners:\n- {{name: a, bind: '{http}', protocol: http}}\n\
             - {{name: u, bind: '{http}', protocol: udp, authority: 'X:1'}}\n"
        )
    };
    fs::write(&config, document("n")).unwrap();
    // Somebody has the addresses, and is no node.
    let (code, printed) = doctor(&config);
    assert!(code == 1 && line(&printed, "admin on").starts_with("FAIL"), "{printed}");
    assert!(line(&printed, "admin on").contains("Stop the process that uses the address"), "{printed}");
    assert!(line(&printed, "listener a").starts_with("FAIL") && line(&printed, "listener u").ends_with("free"));
    let [free_admin, free_http, other_socket] = held;
    drop((free_admin, free_http));
    let mut node = Command::new(binary::hermes())
        .args(["proxy", "--config", text(&config)])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut log = std::io::BufReader::new(node.stderr.take().unwrap()).lines();
    let up = log.any(|line| line.unwrap().contains("running"));
    let beside = doctor(&config);
    // Another address of a document that the node does not run yet; and another node's document.
    let elsewhere = room.path().join("m.yaml");
    let third = format!("- {{name: c, bind: '{other}', protocol: http}}\n");
    fs::write(&elsewhere, document("n") + &third).unwrap();
    let wider = doctor(&elsewhere);
    fs::write(&elsewhere, document("m")).unwrap();
    let stranger = doctor(&elsewhere);
    node.kill().unwrap();
    node.wait().unwrap();
    assert!(up, "the node did not start");
    for what in ["admin on", "listener a", "listener u"] {
        assert!(line(&beside.1, what).ends_with("in use by the running node"), "{}", beside.1);
        assert!(line(&stranger.1, what).starts_with("FAIL"), "{}", stranger.1);
    }
    assert!(line(&wider.1, "listener a").starts_with("ok") && line(&wider.1, "listener c").starts_with("FAIL"));
    drop(other_socket);
}

#[test]
fn doctor_has_the_remedy_that_fits_and_speaks_json() {
    let room = tempfile::tempdir().unwrap();
    let identity = ca::Authority::new("lab").unwrap().issue(&ca::Subject::node("other")).unwrap();
    let files = identity.write(room.path(), "n").unwrap();
    let config = room.path().join("n.yaml");
    fs::write(&config, "node: n\nidentity: {cert: n.pem, key: n.key, ca: ca.pem}\n").unwrap();
    let (_, printed) = doctor(&config);
    let found = line(&printed, "identity");
    assert!(found.contains("names node other") && found.contains("Issue a certificate that fits"), "{found}");
    fs::remove_file(&files.key).unwrap();
    let (_, printed) = doctor(&config);
    assert!(line(&printed, "identity").contains("Put the file in place"), "{printed}");

    let output = hermes(&["doctor", "--json", "--config", text(&config)]);
    let findings: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(findings.len(), printed.lines().count());
    let of = |check: &str| findings.iter().find(|finding| finding["check"] == check).unwrap();
    assert_eq!((of("document")["level"].as_str(), of("document")["found"].as_str()), (Some("ok"), Some("node n")));
    assert_eq!(of("identity")["level"], "error");
    assert!(of("identity")["remedy"].as_str().unwrap().contains("Put the file in place"));
}

/// A verb of the program, as a root that has no capability.
fn without_privilege(verb: &str, config: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-all", "--inh-caps", "-all"]);
    command.args([binary::hermes(), verb, "--config", text(config)]);
    command
}

fn doctor_without_privilege(config: &Path, json: bool) -> (i32, String) {
    let mut command = without_privilege("doctor", config);
    if json {
        command.arg("--json");
    }
    let output = command.output().unwrap();
    (output.status.code().unwrap(), stdout(&output) + &stderr(&output))
}

#[test]
fn an_error_for_a_privileged_port_names_the_capability() {
    if !hermes_testkit::skip::needs_root("an_error_for_a_privileged_port_names_the_capability") {
        return;
    }
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    fs::write(&config, "node: n\nlisteners:\n- {name: web, bind: '127.0.0.1:81', protocol: http}\n").unwrap();
    let output = without_privilege("proxy", &config).output().unwrap();
    let error = stderr(&output);
    assert!(
        !output.status.success() && error.contains("listening on 127.0.0.1:81 over TCP: Permission denied"),
        "{error}"
    );
    assert!(error.contains("cap_net_bind_service"), "{error}");
}

#[test]
fn doctor_reports_missing_layer_3_support_and_whether_it_is_needed() {
    if !hermes_testkit::skip::needs_root("doctor_reports_missing_layer_3_support_and_whether_it_is_needed") {
        return;
    }
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    fs::write(&config, "node: n\n").unwrap();
    let (code, printed) = doctor(&config);
    assert!(
        line(&printed, "layer 3").starts_with("ok ") && line(&printed, "/dev/net/tun").starts_with("ok "),
        "{printed}"
    );
    assert!(line(&printed, "nftables").starts_with("ok    nftables: nftables v"), "{printed}");
    assert!(line(&printed, "forwarding").contains("IPv4 is o"), "{printed}");
    let (code_without, printed) = doctor_without_privilege(&config, false);
    assert_eq!(code_without, code, "what is not needed is no fault\n{printed}");
    let found = line(&printed, "layer 3");
    assert!(found.starts_with("note ") && found.contains("CAP_NET_ADMIN") && found.contains("setcap"), "{found}");

    let devices = "node: n\nlisteners:\n\
         - {name: t, protocol: tun, device: ht0, address: 10.9.0.1, capture: [10.0.0.0/8]}\n\
         routes:\n- {name: r, terminate: {tun: gw0, nat: true}}\n";
    fs::write(&config, devices).unwrap();
    let (code, printed) = doctor_without_privilege(&config, false);
    assert!(code == 1 && line(&printed, "layer 3").starts_with("FAIL"), "{printed}");
    assert!(line(&printed, "device gw0").starts_with("ok "), "{printed}");
    let (_, printed) = doctor_without_privilege(&config, true);
    let findings: Vec<Value> = printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let found = findings.iter().find(|finding| finding["check"] == "layer 3").unwrap();
    assert!(found["level"] == "error" && found["remedy"].as_str().unwrap().contains("Run as root"), "{found}");
}

#[test]
fn doctor_reports_a_device_name_in_use() {
    let room = tempfile::tempdir().unwrap();
    let config = room.path().join("n.yaml");
    fs::write(&config, "node: n\nroutes:\n- {name: r, terminate: {tun: lo, address: 10.9.0.1}}\n").unwrap();
    let (code, printed) = doctor(&config);
    let found = line(&printed, "device lo");
    assert!(code == 1 && found.starts_with("FAIL") && found.contains("and is not this node's"), "{printed}");
}

#[test]
fn shells_accept_their_completions() {
    let room = tempfile::tempdir().unwrap();
    for (shell, check) in [("bash", &["bash", "-n"][..]), ("zsh", &["zsh", "-n"]), ("fish", &["fish", "--no-execute"])]
    {
        let output = hermes(&["completions", shell]);
        assert!(output.status.success() && stdout(&output).contains("explain"), "{shell}");
        let file = room.path().join(shell);
        fs::write(&file, &output.stdout).unwrap();
        match Command::new(check[0]).args(&check[1..]).arg(&file).output() {
            Ok(read) => assert!(read.status.success(), "{shell}: {}", stderr(&read)),
            Err(_) => skip("shells_accept_their_completions", &format!("{shell} is not installed")),
        }
    }
    for shell in ["elvish", "powershell"] {
        let output = hermes(&["completions", shell]);
        assert!(output.status.success() && stdout(&output).contains("explain"), "{shell}");
    }
    // In the shell itself: what completes after `hermes c`?
    let script = format!(
        "source {}; COMP_WORDS=(hermes c); COMP_CWORD=1; _hermes hermes c hermes; echo ${{COMPREPLY[@]}}",
        text(&room.path().join("bash"))
    );
    let mut bash = Command::new("bash").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let output = bash.wait_with_output().unwrap();
    assert_eq!(stdout(&output).trim(), "controller ca check connect completions");
    let kinds = script
        .replace("hermes c)", "hermes explain --kind '')")
        .replace("=1;", "=3;")
        .replace(" c hermes;", " '' --kind;");
    let output = Command::new("bash").args(["-c", &kinds]).output().unwrap();
    assert_eq!(stdout(&output).trim(), "http tcp udp ip", "{kinds}");
}
