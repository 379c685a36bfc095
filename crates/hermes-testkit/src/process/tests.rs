//! Programs are detected when they listen, measured with their children, and ended when dropped.
#![allow(clippy::disallowed_methods, reason = "a process of others gives no event to await but its end")]
#![allow(clippy::unwrap_used)]

use super::*;

const PROCESS_TIMEOUT: Duration = Duration::from_secs(10);

#[test]
fn a_port_is_seen_open_and_the_program_ends_with_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let script = "import socket,time\ns=socket.socket(); s.bind(('127.0.0.1',0)); s.listen()\n\
                  print(s.getsockname()[1],flush=True)\ntime.sleep(60)";
    let mut running = Program::new("listener", "python3", dir.path()).args(["-c", script]).start().unwrap();
    let port = running.wait_first_line(PROCESS_TIMEOUT).unwrap().parse().unwrap();
    running.wait_listening(&[Port::Tcp(port)], PROCESS_TIMEOUT).unwrap();
    assert!(running.wait_listening(&[Port::Udp(port)], Duration::from_millis(20)).is_err());
    let pid = running.pid();
    drop(running);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn cpu_time_of_children_counts_and_they_are_ended_too() {
    let dir = tempfile::tempdir().unwrap();
    let script = "trap '' TERM; (while :; do :; done) & echo $!; wait";
    let mut running = Program::new("parent", "sh", dir.path()).args(["-c", script]).start().unwrap();
    let child = running.wait_first_line(PROCESS_TIMEOUT).unwrap();
    let deadline = Instant::now() + PROCESS_TIMEOUT;
    while running.usage().unwrap().cpu < Duration::from_millis(100) {
        assert!(Instant::now() < deadline, "the busy child's time was never seen");
        thread::sleep(POLL_INTERVAL);
    }
    assert!(running.usage().unwrap().memory.rss > 100_000);
    drop(running);
    // The orphan is reaped by init; a zombie has no command line.
    let deadline = Instant::now() + PROCESS_TIMEOUT;
    let line = format!("/proc/{}/cmdline", child.trim());
    while fs::read(&line).is_ok_and(|l| !l.is_empty()) {
        assert!(Instant::now() < deadline, "the child outlived its parent");
        thread::sleep(POLL_INTERVAL);
    }
}

#[test]
fn an_early_exit_is_reported_with_its_last_output() {
    let dir = tempfile::tempdir().unwrap();
    let mut running =
        Program::new("failing", "sh", dir.path()).args(["-c", "echo no such port >&2; exit 3"]).start().unwrap();
    let error = running.wait_listening(&[Port::Tcp(1)], PROCESS_TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("no such port") && error.contains('3'), "{error}");
}
