//! `hermes demo` as people run it: it ends well, says what it did, and leaves nothing behind.

use hermes_testkit::binary::hermes;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The demo, with temporary files in a directory of this test.
fn demo(temporary: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(hermes());
    command.arg("demo").args(arguments).env("TMPDIR", temporary).stdin(Stdio::null());
    command
}

/// A running demo that a failed test does not leave running.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        self.0.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Processes that mention this directory in their command line.
fn processes_of(temporary: &Path) -> Vec<String> {
    let temporary = temporary.to_str().unwrap();
    let lines = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    lines.filter(|line| line.contains(temporary)).collect()
}

fn assert_nothing_is_left(temporary: &Path) {
    let files: Vec<_> = std::fs::read_dir(temporary).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(files.is_empty(), "left behind: {files:?}");
    assert_eq!(processes_of(temporary), Vec::<String>::new());
}

/// Says loudly that a test cannot run here; fails where nothing may be skipped.
fn skip(why: &str) {
    assert!(
        std::env::var_os("HERMES_NO_SKIP").is_none_or(|value| value.is_empty()),
        "HERMES_NO_SKIP is set, but {why}"
    );
    eprintln!("SKIPPED: {why}");
}

#[test]
fn every_kind_of_traffic_arrives_and_the_overlay_changes() {
    let temporary = tempfile::tempdir().unwrap();
    let output = demo(temporary.path(), &["--json"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let traffic = report["traffic"].as_array().unwrap();
    let kinds: Vec<_> = traffic.iter().map(|carried| carried["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["HTTP", "HTTPS", "TCP", "UDP"]);
    assert!(traffic.iter().all(|carried| carried["exchanges"].as_u64() > Some(500)), "{report:#}");
    let text = |typed: &serde_json::Value| typed["said"].as_str().unwrap().to_owned();
    assert_eq!(text(&report["listed"]).lines().filter(|line| line.ends_with(" running")).count(), 3, "{report:#}");
    let change = &report["change"];
    assert_eq!((&change["failed"], &change["applied"]["command"]), (&0.into(), &"hermes apply -f overlay.yaml".into()));
    let (planned, applied) = (text(&report["planned"]), text(&change["applied"]));
    for node in ["alice-laptop", "router", "server"] {
        assert!(planned.contains(&format!("node {node} would get another document\n")), "{planned}");
        assert!(applied.contains(&format!("node {node} runs it\n")), "{applied}");
    }
    assert!(change["by_new_server"].as_u64() > Some(16), "{change:#}");
    assert!(change["requests"].as_u64() > change["by_new_server"].as_u64(), "{change:#}");
    assert!(change["upload_bytes"].as_u64() > Some(0) && change["tcp_bytes"].as_u64() > Some(0), "{change:#}");
    assert_nothing_is_left(temporary.path());
}

#[test]
fn kept_up_it_can_be_tried_by_hand_until_ctrl_c() {
    let temporary = tempfile::tempdir().unwrap();
    let mut running = Running::start(demo(temporary.path(), &["--keep"]).stdout(Stdio::piped()).stderr(Stdio::null()));
    let mut text = String::new();
    for line in BufReader::new(running.0.stdout.take().unwrap()).lines() {
        text += &format!("{}\n", line.unwrap());
        if text.contains("Ctrl-C ends the demo") {
            break;
        }
    }
    for kind in ["HTTP ", "HTTPS ", "TCP ", "UDP ", "The overlay changed under load", "arrived intact, nothing failed"]
    {
        assert!(text.contains(kind), "{kind} is missing:\n{text}");
    }
    let mut tried = Vec::new();
    let (_, to_try) = text.split_once("in another terminal").unwrap();
    let mut lines = to_try.lines().filter_map(|line| line.strip_prefix("    "));
    let begin = lines.next().unwrap();
    for line in lines {
        let output = Command::new("bash").args(["-c", &format!("{begin}\n{line}")]).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        tried.push((line.to_owned(), String::from_utf8_lossy(&output.stdout).into_owned()));
    }
    for (command, answer) in [
        ("http://SHOP/", "hello from the green server"),
        ("https://BANK/", "hello from the bank server"),
        ("echo hello", "hello"),
        ("hermes node list", " running"),
        ("hermes get", "\"name\":\"SHOP\""),
        ("hermes node exec-config router", ": running\n"),
        ("hermes diff", "Service/SHOP would be changed"),
        ("hermes apply", "node server runs it"),
        ("http://SHOP/whoami", "blue"),
        ("explain", "forward to upstream server"),
        ("/sessions", "["),
    ] {
        // As a whole word: one address begins as another.
        let is_it = |line: &str| format!("{line} ").contains(&format!("{command} "));
        let printed: Vec<_> = tried.iter().filter(|(line, _)| is_it(line)).collect();
        assert!(
            !printed.is_empty() && printed.iter().all(|(_, printed)| printed.contains(answer)),
            "{command}: {printed:?}"
        );
    }
    running.signal(Signal::SIGINT);
    assert!(running.wait().success());
    assert_nothing_is_left(temporary.path());
}

/// Starts a demo and waits until its nodes carry traffic. What it says after that is read on.
fn started(temporary: &Path) -> (Running, impl Iterator<Item = String>) {
    let mut running = Running::start(demo(temporary, &[]).stdout(Stdio::null()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(running.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("HTTP by name")), "the traffic did not begin");
    assert_eq!(processes_of(temporary).len(), 4, "a controller and three nodes");
    (running, lines)
}

#[test]
fn a_signal_ends_it_and_cleans_up() {
    let temporary = tempfile::tempdir().unwrap();
    let (mut running, lines) = started(temporary.path());
    running.signal(Signal::SIGTERM);
    assert_eq!(running.wait().code(), Some(128 + 15));
    assert_nothing_is_left(temporary.path());
    drop(lines);
}

#[test]
fn killed_it_takes_its_nodes_with_it() {
    let temporary = tempfile::tempdir().unwrap();
    let (mut running, lines) = started(temporary.path());
    running.signal(Signal::SIGKILL);
    running.wait();
    drop(lines);
    // They drain for a quarter of a second, and nobody is told of the end of another's child.
    let until = Instant::now() + Duration::from_secs(20);
    while !processes_of(temporary.path()).is_empty() {
        assert!(Instant::now() < until, "still there: {:?}", processes_of(temporary.path()));
    }
}

#[test]
fn a_node_that_dies_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let (mut running, lines) = started(temporary.path());
    let router = std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let line = String::from_utf8_lossy(&std::fs::read(entry.path().join("cmdline")).ok()?).into_owned();
        let is_it = line.contains(temporary.path().to_str().unwrap()) && line.contains("/router\0");
        is_it.then(|| entry.file_name().to_str()?.parse::<i32>().ok())?
    });
    kill(Pid::from_raw(router.unwrap()), Signal::SIGKILL).unwrap();
    let output = lines.collect::<Vec<_>>().join("\n");
    assert_eq!(running.wait().code(), Some(1), "{output}");
    assert!(output.contains("node router ended by itself (signal: 9"), "{output}");
    assert_nothing_is_left(temporary.path());
}

/// Whether a program of this name can be run.
fn has(program: &str, argument: &str) -> bool {
    Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success())
}

#[test]
fn video_over_the_overlay_arrives_whole() {
    if !nix::unistd::geteuid().is_root() {
        return skip("the video case makes network namespaces, and that takes root");
    }
    for (program, argument) in [("ffmpeg", "-version"), ("ip", "-V"), ("tc", "-V"), ("nft", "-v")] {
        if !has(program, argument) {
            return skip(&format!("the video case needs {program}"));
        }
    }
    let temporary = tempfile::tempdir().unwrap();
    let mut command = demo(temporary.path(), &["video", "--seconds", "6", "--json"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let round = &figures["rounds"][0];
    let streams = round["streams"].as_array().unwrap();
    assert_eq!(streams.len(), 4, "{text}");
    for stream in streams {
        let number = |field: &str| stream[field].as_u64().unwrap();
        assert_eq!(number("frames_sent"), 30 * number("seconds"), "{stream:#}");
        assert!(number("packets_sent") > 50 * number("seconds"), "{stream:#}");
        assert_eq!(number("packets_sent"), number("packets_received") + number("packets_missed"), "{stream:#}");
        if stream["way"] == "overlay" {
            let lost = ["packets_missed", "packets_altered", "frames_damaged", "frames_corrupt", "macroblock_errors"];
            assert!(lost.iter().all(|field| number(field) == 0), "{stream:#}");
            assert_eq!(number("frames_processed"), number("frames_sent"), "{stream:#}");
            assert!(stream["distributor"].is_string(), "{stream:#}");
        }
    }
    // The path did lose packets: without that nothing would have been shown.
    assert!(round["link"]["down_lost"].as_u64() > Some(0), "{text}");
    let missed = |mode| {
        let of_way = streams.iter().filter(|stream| stream["way"] == mode);
        of_way.map(|stream| stream["packets_missed"].as_u64().unwrap()).sum::<u64>()
    };
    assert!(missed("direct") > 0, "{text}");
    assert_eq!(round["dropped_by_nodes"].as_u64(), Some(0), "{text}");
    assert_nothing_is_left(temporary.path());
    assert_eq!(namespaces("hermes-video-", pid), Vec::<String>::new());
}

/// Namespaces that the demo of this pid made.
fn namespaces(prefix: &str, pid: u32) -> Vec<String> {
    let begin = format!("{prefix}{pid}-");
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&begin)).collect()
}

/// Whether cases with namespaces and TUN or TAP devices can run here; says loudly where they cannot.
fn can_run_ip() -> bool {
    let missing = if !nix::unistd::geteuid().is_root() {
        "this case makes network namespaces, and that takes root"
    } else if !has("ip", "-V") {
        "this case needs ip"
    } else if !Path::new("/dev/net/tun").exists() {
        "this case needs TUN devices"
    } else {
        return true;
    };
    skip(missing);
    false
}

#[test]
fn an_ingress_and_a_server_move_and_no_ping_is_lost() {
    if !can_run_ip() {
        return;
    }
    // Between two runs everything goes back.
    for (protocol, runs, steps) in [("h3", "1", &[1, 2][..]), ("h2", "2", &[1, 2, 3, 4, 1, 2])] {
        let temporary = tempfile::tempdir().unwrap();
        let picture = tempfile::NamedTempFile::new().unwrap();
        let path = picture.path().to_str().unwrap();
        let arguments = ["ip", "--protocol", protocol, "--seconds", "1", "--runs", runs, "--json", "--picture", path];
        let child = demo(temporary.path(), &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let pairs = figures["pairs"].as_array().unwrap();
        assert!(pairs.iter().all(|pair| pair["sent"].as_u64() > Some(100) && pair["lost"] == 0), "{text}");
        let machines = |index: usize| (pairs[index]["user"].clone(), pairs[index]["machines"].clone());
        // Both call theirs 10.0.0.1.
        assert!(pairs[..2].iter().all(|pair| pair["address"] == "10.0.0.1"), "{text}");
        assert_eq!(machines(0), ("alice".into(), serde_json::json!(["alice-pl", "alice-us"])), "{text}");
        assert_eq!(machines(1), ("bob".into(), serde_json::json!(["bob-pl"])), "{text}");
        // A way over the ocean takes its time, and the last one is none.
        let fastest = |phase: usize| figures["phases"][phase]["median_ms"].as_f64().unwrap();
        assert!(fastest(0) >= 129.0 && fastest(1) >= 129.0 && fastest(2) >= 21.0, "{text}");
        assert!(fastest(2) < fastest(0), "{text}");
        let changes = figures["changes"].as_array().unwrap();
        assert_eq!(changes.iter().map(|change| change["step"].as_u64().unwrap()).collect::<Vec<_>>(), steps, "{text}");
        // Each says what it is.
        let words: HashSet<_> =
            changes.iter().map(|change| (change["run"].as_u64(), change["what"].as_str())).collect();
        assert_eq!(words.len(), steps.len(), "{text}");
        assert!(figures["typed"][0]["bytes"].as_u64() > Some(20), "{text}");
        assert!(std::fs::read_to_string(path).unwrap().ends_with("</svg>\n"));
        assert_nothing_is_left(temporary.path());
        assert_eq!(namespaces("hermes-ip-", pid), Vec::<String>::new());
    }
}

/// Only to an empty directory, before anything is made.
#[test]
fn the_ip_case_overwrites_no_file() {
    if !can_run_ip() {
        return;
    }
    let temporary = tempfile::tempdir().unwrap();
    let kept = tempfile::tempdir().unwrap();
    std::fs::write(kept.path().join("mine"), "mine").unwrap();
    let output = demo(temporary.path(), &["ip", "--files", kept.path().to_str().unwrap()]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("empty it, or name another --files"), "{text}");
    assert_eq!(std::fs::read_dir(kept.path()).unwrap().count(), 1);
}

#[test]
fn ctrl_c_takes_the_network_of_a_case_down() {
    if !can_run_ip() {
        return;
    }
    for (case, running_by, prefix, machines) in [
        (&["ip"][..], "(a) ingress and server", "hermes-ip-", 12),
        (&["unstable", "--cases", "direct,hermes"], "one link up at a time", "hermes-unstable-", 8),
        (&["pep"], "requests on each way", "hermes-pep-", 4),
        (&["ndn"], "seven nodes", "hermes-ndn-", 4),
    ] {
        let temporary = tempfile::tempdir().unwrap();
        let mut running = Running::start(demo(temporary.path(), case).stdout(Stdio::null()).stderr(Stdio::piped()));
        let pid = running.0.id();
        let mut lines = BufReader::new(running.0.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains(running_by)), "{case:?} did not begin");
        assert_eq!(namespaces(prefix, pid).len(), machines, "{case:?}");
        running.signal(Signal::SIGINT);
        assert_eq!(running.wait().code(), Some(128 + 2));
        assert_nothing_is_left(temporary.path());
        assert_eq!(namespaces(prefix, pid), Vec::<String>::new());
    }
}

/// Runs the unstable case to its end; its figures, and what it said besides.
fn unstable(arguments: &[&str]) -> (serde_json::Value, String) {
    unstable_by(arguments, &std::env::var_os("PATH").unwrap())
}

/// The same with this path of programs.
fn unstable_by(arguments: &[&str], path: &OsStr) -> (serde_json::Value, String) {
    let temporary = tempfile::tempdir().unwrap();
    let arguments = [&["unstable", "--json"], arguments].concat();
    let mut command = demo(temporary.path(), &arguments);
    let child = command.env("PATH", path).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert_nothing_is_left(temporary.path());
    assert_eq!(namespaces("hermes-unstable-", pid), Vec::<String>::new());
    (serde_json::from_slice(&output.stdout).unwrap(), text)
}

#[test]
fn over_links_in_turns_downloads_arrive_by_hermes_and_not_directly() {
    if !can_run_ip() {
        return;
    }
    if !has("curl", "-V") {
        return skip("the unstable case needs curl");
    }
    let picture = tempfile::NamedTempFile::new().unwrap();
    let path = picture.path().to_str().unwrap();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let envoy = hermes_testkit::envoy::find(target).map_err(|error| skip(&error.to_string())).unwrap_or_default();
    let mut arguments = vec!["--quick", "--picture", path];
    if envoy.is_file() {
        arguments.extend(["--envoy", envoy.to_str().unwrap()]);
    }
    let (figures, output) = unstable(&arguments);
    assert!(output.contains(&format!("The picture is {path}")), "{output}");
    let lines = figures["lines"].as_array().unwrap();
    let by = |mode: &str, again: bool| {
        lines
            .iter()
            .find(|line| line["way"] == mode && line["again"] == again)
            .unwrap_or_else(|| panic!("{mode}: {output}"))
    };
    // There is a way, but never at once: what arrives without outage does not with it.
    assert_eq!(by("direct", false)["arrived"], 0, "{output}");
    assert!(by("direct", false)["without_outage_s"].is_number(), "{output}");
    for mode in ["hermes", "hermes-cache", "hermes-connect"] {
        let line = by(mode, false);
        assert_eq!(line["arrived"], 1, "{output}");
        // Nobody is faster than physics, unless the links were up when they should not.
        assert!(line["ratio"].as_f64() > Some(0.99), "{output}");
        assert_eq!(line["runs"][0]["bytes"], 45 << 10, "{output}");
    }
    assert_eq!(by("hermes-cache", true)["arrived"], 1, "{output}");
    assert!(by("hermes-cache", true)["ratio"].as_f64() < Some(0.9), "from a cache, no link has to be up: {output}");
    assert_eq!(by("hermes", false)["published"]["seconds"], 41.0, "{output}");
    assert_eq!(figures["ndn"][0]["seconds"], 17.0, "{output}");
    if figures["missing"].as_array().unwrap().is_empty() {
        assert!(by("envoy", false)["without_outage_s"].is_number(), "{output}");
        assert!(by("envoy-tuned", false)["without_outage_s"].is_number(), "{output}");
    }
    let picture = std::fs::read_to_string(path).unwrap();
    assert!(picture.contains("Hermes, hop by hop: 45 KB, whole after") && picture.ends_with("</svg>\n"), "{picture}");
}

#[test]
fn the_unstable_case_runs_without_envoy_and_reports_it() {
    if !can_run_ip() {
        return;
    }
    if !has("curl", "-V") {
        return skip("the unstable case needs curl");
    }
    // All that the path has but that.
    let path = std::env::var_os("PATH").unwrap();
    let without = std::env::join_paths(std::env::split_paths(&path).filter(|one| !one.join("envoy").exists())).unwrap();
    let arguments = ["--quick", "--protocol", "h3", "--cases", "hermes,envoy-tuned"];
    let (figures, output) = unstable_by(&arguments, &without);
    let lines = figures["lines"].as_array().unwrap();
    assert_eq!((lines.len(), &lines[0]["way"], &lines[0]["arrived"]), (1, &"hermes".into(), &1.into()), "{output}");
    let missing = &figures["missing"];
    assert_eq!(missing[0]["way"], "envoy-tuned", "{output}");
    let why = missing[0]["why"].as_str().unwrap();
    assert!(why.contains("--envoy PATH") && why.contains("`make setup`"), "{output}");
}

#[test]
fn packets_of_ndn_reach_the_replica_of_their_user_and_namespace() {
    if !can_run_ip() {
        return;
    }
    let temporary = tempfile::tempdir().unwrap();
    let picture = tempfile::NamedTempFile::new().unwrap();
    let path = picture.path().to_str().unwrap();
    let sizes = ["--sizes", "0,200000", "--repeats", "1", "--policy-fetches", "20"];
    let arguments = [&["ndn", "--json", "--picture", path], &sizes[..]].concat();
    let child = demo(temporary.path(), &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert_nothing_is_left(temporary.path());
    assert_eq!(namespaces("hermes-ndn-", pid), Vec::<String>::new());
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // With each of three versions of HTTP.
    assert_eq!((&figures["landed"], &figures["policy_fetches"]), (&60.into(), &60.into()), "{text}");
    let lines = figures["lines"].as_array().unwrap();
    let ways: Vec<&str> = lines.iter().filter_map(|line| line["way"].as_str()).collect();
    assert_eq!(ways, ["udp", "tcp", "h1", "h2", "h3", "udp", "tcp", "h1", "h2", "h3"], "{text}");
    // 200,000 bytes take 160 ms at 10 Mbit/s, on every way.
    assert!(lines[5..].iter().all(|line| line["median_s"].as_f64() > Some(0.16)), "{text}");
    assert_eq!(lines[2]["published"]["milliseconds"], 2.2, "{text}");
    assert!(std::fs::read_to_string(path).unwrap().contains("overlay, HTTP/3"), "{text}");
}

/// Forwarders of NDNts at both ends of each way. Without NDNts, the demo names the command that cannot run.
#[test]
fn third_party_forwarders_stand_at_both_ends() {
    if !can_run_ip() {
        return;
    }
    let script = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("tools/ndnts/forwarder.mjs");
    let missing = Path::new("/no/forwarder.mjs");
    let mut scripts = vec![missing];
    if script.parent().unwrap().join("node_modules/@ndn/fw").is_dir() {
        scripts.push(&script);
    } else {
        skip("NDNts is not installed; run scripts/setup.sh");
    }
    for script in scripts {
        let temporary = tempfile::tempdir().unwrap();
        let command = format!("node {}", script.display());
        let arguments = ["ndn", "--json", "--sizes", "0,200000", "--repeats", "1", "--policy-fetches", "4"];
        let arguments = [&arguments[..], &["--forwarder", &command]].concat();
        let output = demo(temporary.path(), &arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert_nothing_is_left(temporary.path());
        if script == missing {
            assert!(!output.status.success(), "{text}");
            assert!(text.contains("the forwarder \"node /no/forwarder.mjs\" has ended"), "{text}");
            continue;
        }
        assert!(output.status.success(), "{text}");
        let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(figures["lines"].as_array().unwrap().len(), 10, "{text}");
        assert_eq!(figures["forwarder"], command.as_str(), "{text}");
    }
}

#[test]
fn connections_are_split_over_every_architecture() {
    if !can_run_ip() {
        return;
    }
    let temporary = tempfile::tempdir().unwrap();
    let picture = tempfile::NamedTempFile::new().unwrap();
    let path = picture.path().to_str().unwrap();
    let arguments = ["pep", "--json", "--requests", "3", "--pause-ms", "0", "--downloads", "1", "--picture", path];
    let child = demo(temporary.path(), &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert_nothing_is_left(temporary.path());
    assert_eq!(namespaces("hermes-pep-", pid), Vec::<String>::new());
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(figures["refusal_passed"], true, "{text}");
    for (way, sees_client, published) in [
        ("direct", true, None),
        ("split", true, Some(0.015)),
        ("overlay", true, None),
        ("rina", true, Some(0.059)),
        ("ndn", false, Some(0.075)),
    ] {
        let lines = figures["lines"].as_array().unwrap();
        let line = lines.iter().find(|line| line["way"] == way).unwrap_or_else(|| panic!("{way}: {text}"));
        assert_eq!((&line["server_sees_client"], &line["requests"]), (&sees_client.into(), &3.into()), "{text}");
        assert_eq!(line["published"]["persistent_ms"].as_f64(), published, "{text}");
        assert!(line["cable_mbit_s"].as_f64() > Some(1.0) && line["gain"].is_number(), "{text}");
    }
    assert!(std::fs::read_to_string(path).unwrap().contains("TCP - RINA - TCP"), "{text}");
}

/// Minutes later it would be too late; and that needs no root.
#[test]
fn a_case_fails_before_it_begins_if_a_named_file_is_missing() {
    let temporary = tempfile::tempdir().unwrap();
    for (arguments, words) in [
        (&["unstable", "--cases", "direct", "--envoy", "/no/envoy"][..], "--envoy /no/envoy is no file"),
        (&["unstable", "--quick", "--picture", "/no/a.svg"], "--picture: /no/a.svg cannot be written"),
        (&["ip", "--picture", "/no/a.svg"], "--picture: /no/a.svg cannot be written"),
        (&["pep", "--picture", "/no/a.svg"], "--picture: /no/a.svg cannot be written"),
        (&["ndn", "--picture", "/no/a.svg"], "--picture: /no/a.svg cannot be written"),
    ] {
        let output = demo(temporary.path(), arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{text}");
        assert!(text.contains(words) && output.stdout.is_empty(), "{text}");
        assert_nothing_is_left(temporary.path());
    }
}

#[test]
fn a_case_without_root_names_the_missing_privilege() {
    if !nix::unistd::geteuid().is_root() || !has("setpriv", "--version") {
        return skip("only root can give up being root");
    }
    let place = tempfile::tempdir_in("/tmp").unwrap();
    let binary = place.path().join("hermes");
    std::fs::copy(hermes(), &binary).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.path(), open).unwrap();
    for case in ["video", "ip", "unstable", "pep", "ndn"] {
        let output = Command::new("setpriv")
            .args(["--reuid", "65534", "--clear-groups"])
            .arg(&binary)
            .args(["demo", case])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("run it as root") && text.lines().count() == 1, "{case}: {text}");
    }
}

#[test]
fn the_relays_of_the_demo_pass_on_a_chat_and_a_voice() {
    let temporary = tempfile::tempdir().unwrap();
    let pictures = tempfile::tempdir().unwrap();
    let picture = pictures.path().join("relay.svg");
    let arguments = ["relay", "--seconds", "2", "--json", "--picture", picture.to_str().unwrap()];
    let output = demo(temporary.path(), &arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&figures["whole"], &figures["voice"]["relay"]["packets"]), (&true.into(), &100.into()), "{figures}");
    assert_eq!(figures["chat"]["hall"], figures["chat"]["yard"]);
    let svg = std::fs::read_to_string(picture).unwrap();
    assert!(svg.matches("<circle").count() >= 398, "a dot for each packet and each gap of both ways");
    assert_nothing_is_left(temporary.path());
}

#[test]
fn the_relays_of_the_demo_end_with_a_signal() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = demo(temporary.path(), &["relay", "--seconds", "1", "--keep"]);
    let mut running = Running::start(command.stdout(Stdio::piped()).stderr(Stdio::null()));
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("Ctrl-C ends the nodes")));
    running.signal(Signal::SIGTERM);
    assert!(running.wait().success());
    assert_nothing_is_left(temporary.path());
}
