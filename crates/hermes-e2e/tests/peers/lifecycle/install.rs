//! What `hermes install` prints is taken by whom it is for, and the program does what it says there.

use hermes_testkit::binary;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use hermes_testkit::process::Program;
use hermes_testkit::skip::skip;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use hermes_testkit::control::until;

const NODE: [&str; 2] = ["--controller", "https://127.0.0.1:9400"];

fn hermes(args: &[&str]) -> Output {
    Command::new(binary::hermes()).args(args).output().unwrap()
}

fn printed(args: &[&str]) -> String {
    let output = hermes(&[&["install", "--print"], args].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Values of a unit's keys, of which some come several times.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

#[test]
fn install_reports_that_it_only_prints() {
    let output = hermes(&["install", NODE[0], NODE[1]]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("missing --print") && text.contains("--print systemd"), "{text}");
    for (args, remedy) in [
        (&["systemd"][..], "--controller URL, or --config FILE"),
        (&["systemd", "--state", "/srv/hermes", NODE[0], NODE[1]], "below /var/lib"),
        (&["systemd", "--program", "hermes", NODE[0], NODE[1]], "whole path"),
        (&["systemd", "--config", "node.yaml"], "whole path"),
        (&["container", "--config", "/etc/a node.yaml"], "choose a path"),
    ] {
        let output = hermes(&[&["install", "--print"], args].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(remedy), "{args:?}: {text}");
    }
}

#[test]
fn systemd_accepts_the_printed_units() {
    let room = tempfile::tempdir().unwrap();
    let document = room.path().join("node.yaml");
    std::fs::write(&document, "node: n\ndrain: 90s\n").unwrap();
    let config = document.to_str().unwrap();
    for (name, args, wanted) in [
        ("hermes", NODE.to_vec(), ("20", "")),
        ("edge", [&NODE[..], &["--state", "/var/lib/edge", "--low-ports"]].concat(), ("20", "CAP_NET_BIND_SERVICE")),
        ("hermes", vec!["--config", config, "--devices"], ("100", "CAP_NET_ADMIN")),
        ("router", vec![NODE[0], NODE[1], "--state", "/var/lib/router", "--directed"], ("20", "CAP_BPF CAP_NET_ADMIN")),
        ("hermes-controller", vec!["controller"], ("10", "")),
    ] {
        let unit = printed(&[&["systemd", "--program", binary::hermes()], &args[..]].concat());
        let (stop, capabilities) = wanted;
        assert_eq!(values(&unit, "TimeoutStopSec"), [stop], "{unit}");
        assert_eq!(values(&unit, "CapabilityBoundingSet"), [capabilities], "{unit}");
        assert_eq!(values(&unit, "StateDirectory"), [name], "{unit}");
        assert_eq!((values(&unit, "KillSignal"), values(&unit, "Type")), (vec!["SIGTERM"], vec!["notify"]));
        assert_eq!(unit.contains("/dev/net/tun"), args.contains(&"--devices"));
        assert_eq!(values(&unit, "SystemCallFilter").contains(&"bpf"), args.contains(&"--directed"), "{unit}");
        // What it starts is a command line of this program.
        let command = values(&unit, "ExecStart")[0];
        let words: Vec<_> = command.split(' ').skip(1).map(|word| word.replace("%S", "/var/lib")).collect();
        let help = Command::new(binary::hermes()).args(&words).arg("--help").output().unwrap();
        assert!(command.starts_with(binary::hermes()) && help.status.success(), "{command}");
        // A node can be followed by a new version; the socket is in a directory of the unit's.
        let is_node = !args.contains(&"controller");
        assert_eq!(command.ends_with(&format!(" --takeover %t/{name}/takeover")), is_node, "{command}");
        assert_eq!(values(&unit, "RuntimeDirectory"), if is_node { vec![name] } else { vec![] });
        let successor = unit.lines().find(|line| line.starts_with("# systemd-run "));
        assert_eq!(successor.is_some(), is_node, "{unit}");
        let takes = format!(" --takeover /run/{name}/takeover");
        assert!(successor.is_none_or(|line| line.ends_with(&takes) && line.contains(binary::hermes())), "{unit}");
        let path = room.path().join(format!("{name}.service"));
        std::fs::write(&path, &unit).unwrap();
        verify(&path);
    }
}

fn verify(unit: &Path) {
    // Recursion into what it is after says nothing of it.
    let verified =
        Command::new("systemd-analyze").args(["verify", "--man=no", "--recursive-errors=no"]).arg(unit).output();
    match verified {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() && text.trim().is_empty(), "{text}");
        }
        Err(_) => skip("systemd_accepts_the_printed_units", "systemd-analyze is not installed"),
    }
}

#[test]
fn the_container_file_has_the_instructions_that_it_needs() {
    let file = printed(&[&["container"], &NODE[..]].concat());
    let instructions: Vec<(&str, &str)> = file
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split_once(' ').unwrap_or_else(|| panic!("{line}")))
        .collect();
    let order: Vec<_> = instructions.iter().map(|(word, _)| *word).collect();
    assert_eq!(
        order,
        [
            "FROM",
            "WORKDIR",
            "RUN",
            "COPY",
            "RUN",
            "FROM",
            "COPY",
            "RUN",
            "USER",
            "VOLUME",
            "STOPSIGNAL",
            "HEALTHCHECK",
            "ENTRYPOINT",
            "CMD"
        ]
    );
    let of = |wanted: &str| instructions.iter().rfind(|(word, _)| *word == wanted).unwrap().1;
    let stage = instructions[0].1.rsplit(' ').next().unwrap();
    assert!(of("COPY").starts_with(&format!("--from={stage} /source/target/release/hermes ")), "{file}");
    assert!(!of("USER").starts_with("root") && !of("USER").starts_with('0') && of("STOPSIGNAL") == "SIGTERM", "{file}");
    // What it starts, and what it probes with, are command lines of this program.
    let words = |text: &str| serde_json::from_str::<Vec<String>>(text).unwrap();
    let program = words(of("ENTRYPOINT"));
    let probe = words(of("HEALTHCHECK").split_once("CMD ").unwrap().1);
    assert_eq!(program, probe[..1]);
    for line in [&words(of("CMD"))[..], &probe[1..]] {
        let help = Command::new(binary::hermes()).args(line).arg("--help").output().unwrap();
        assert!(help.status.success(), "{line:?}");
    }
}

/// `Type=notify`, and the probe.
#[tokio::test]
async fn a_service_manager_hears_that_it_serves_and_that_it_ends() {
    let room = tempfile::tempdir().unwrap();
    let socket = UnixDatagram::bind(room.path().join("notify")).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let output = || {
        let mut bytes = [0; 64];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let free = hermes_testkit::port::reserve("127.0.0.1");
    let document = room.path().join("node.yaml");
    std::fs::write(&document, format!("node: n\nadmin: \"{free}\"\n")).unwrap();
    let config = document.to_str().unwrap();
    let health = |args: &[&str]| hermes(&[&["health"], args].concat());
    assert_eq!(health(&["--config", config]).status.code(), Some(1), "nothing runs yet");
    let program = Program::new("node", binary::hermes(), room.path()).args(["proxy", "--config", config]);
    let node = program.env("NOTIFY_SOCKET", room.path().join("notify")).start().unwrap();
    assert_eq!(output(), "READY=1");
    let ready = health(&["--config", config]);
    assert_eq!((ready.status.code(), &*ready.stdout), (Some(0), &b"ready\n"[..]));
    assert!(health(&["--admin", &free.to_string(), "--live"]).status.success());
    kill(Pid::from_raw(i32::try_from(node.pid()).unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(output(), "STOPPING=1");
    until("the probe fails", || health(&["--config", config]).status.code() == Some(1)).await;
    node.end(Duration::from_secs(20)).unwrap();
}

/// After a takeover the unit's process may finish its sessions: systemd is not notified of a stop.
#[tokio::test]
async fn a_service_manager_hears_nothing_of_a_takeover() {
    let room = tempfile::tempdir().unwrap();
    let notify = room.path().join("notify");
    let socket = UnixDatagram::bind(&notify).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut bytes = [0; 64];
    let document = room.path().join("node.yaml");
    std::fs::write(&document, "node: n\nlisteners: [{name: a, bind: 'localhost:0', protocol: http}]\n").unwrap();
    let takeover = room.path().join("takeover");
    let node = |name: &str| {
        let program = Program::new(name, binary::hermes(), room.path()).args(["proxy", "--config"]).args([&document]);
        program.args(["--takeover"]).args([&takeover])
    };
    let mut first = node("first").env("NOTIFY_SOCKET", &notify).start().unwrap();
    let length = socket.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"READY=1");
    let second = node("second").start().unwrap();
    let log = |name: &str| std::fs::read_to_string(room.path().join(format!("{name}.err"))).unwrap_or_default();
    until("it is taken over from", || log("first").contains("another process has the listeners")).await;
    until("it ends, since it has no sessions", || first.exited().unwrap().is_some()).await;
    socket.set_nonblocking(true).unwrap();
    assert!(socket.recv(&mut bytes).is_err(), "{}", String::from_utf8_lossy(&bytes));
    second.end(Duration::from_secs(20)).unwrap();
}
