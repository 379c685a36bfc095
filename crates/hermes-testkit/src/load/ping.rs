//! ICMP echoes: the round-trip time that a path adds.
//!
//! In: the address, the number of echoes. Out: the latency of each echo as reported by the system's `ping`, and every
//! lost one as a failure. The kernel at the other end answers, so only programs on the path add wake-up latency.

use std::{process::Command, time::Duration};

use super::{
    Load, Outcome,
    outcome::{Failure, Recorder},
    window::Window,
};
use crate::{Error, Result};

/// Timeout of an echo, in seconds.
const REPLY_TIMEOUT_SECONDS: &str = "2";

pub(super) fn run(load: &Load, watch: &[u32]) -> Result<Outcome> {
    let Load::Ping { address, count, warmup, interval } = load else {
        unreachable!("dispatched by kind");
    };
    let seconds = Duration::from_millis(*interval).as_secs_f64().to_string();
    let pace: &[&str] = if *interval == 0 { &["-A"] } else { &["-i", &seconds] };
    let ping = |count: usize| {
        let (count, address) = (count.to_string(), address.to_string());
        let mut command = Command::new("ping");
        command.args(["-n", "-c", &count, "-W", REPLY_TIMEOUT_SECONDS]).args(pace).arg(&address);
        // The program fails if nothing came back, which is counted below.
        let output = command.output().map_err(Error::io("running ping"))?;
        Ok::<_, Error>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    if *warmup > 0 {
        ping(*warmup)?;
    }
    let window = Window::open(watch);
    let mut outcome = read(&ping(*count)?, *count).outcome();
    window.close(&mut outcome);
    Ok(outcome)
}

/// Every echo that is missing is one without an answer; a second answer to one is wrong.
fn read(report: &str, count: usize) -> Recorder {
    let mut recorder = Recorder::default();
    let mut received = 0;
    for line in report.lines().filter(|line| line.contains("icmp_seq=")) {
        if line.contains("(DUP!)") {
            recorder.failure(&Failure::WrongBytes);
            continue;
        }
        let time = line.split("time=").nth(1).and_then(|rest| rest.split(' ').next());
        if let Some(ms) = time.and_then(|time| time.parse::<f64>().ok()) {
            received += 1;
            recorder.success(Duration::from_secs_f64(ms / 1e3));
        }
    }
    for _ in received..count {
        recorder.failure(&Failure::Timeout);
    }
    recorder
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn echoes_that_are_missing_or_came_twice_are_failures() {
        let report = "PING 10.0.0.1 (10.0.0.1) 56(84) bytes of data.\n\
                    64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=0.250 ms\n\
                    64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=0.300 ms (DUP!)\n\
                    From 10.0.0.9 icmp_seq=2 Destination Host Unreachable\n\
                    64 bytes from 10.0.0.1: icmp_seq=3 ttl=64 time=1.75 ms\n";
        let outcome = read(report, 3).outcome();
        assert_eq!((outcome.completed, outcome.failed), (2, 2));
        assert!((outcome.latency.unwrap().mean_us - 1000.0).abs() < 1e-6);
    }
}
