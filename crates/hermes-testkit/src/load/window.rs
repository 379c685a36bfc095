//! The measured time: wall clock and CPU, read together at both ends.
//!
//! In: process ids. Out: seconds and CPU seconds between [`Window::open`] and [`Window::close`], put into an
//! [`Outcome`].

use std::time::{Duration, Instant};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};

use crate::{
    load::Outcome,
    process::{Usage, machine_busy},
};

/// An open measurement.
pub(super) struct Window<'a> {
    watch: &'a [u32],
    began: Instant,
    own: Duration,
    watched: Vec<Duration>,
    machine: Duration,
}

impl<'a> Window<'a> {
    pub(super) fn open(watch: &'a [u32]) -> Self {
        let (own, watched, machine) = (own_cpu(), cpu(watch), machine_busy().unwrap_or_default());
        Self { watch, began: Instant::now(), own, watched, machine }
    }

    /// Writes times and CPU seconds into `outcome`.
    pub(super) fn close(self, outcome: &mut Outcome) {
        outcome.seconds = self.began.elapsed().as_secs_f64();
        outcome.load_cpu = (own_cpu() - self.own).as_secs_f64();
        let pairs = cpu(self.watch).into_iter().zip(self.watched);
        outcome.watched_cpu = pairs.map(|(after, before)| after.saturating_sub(before).as_secs_f64()).collect();
        let machine = machine_busy().unwrap_or_default();
        outcome.machine_cpu = machine.saturating_sub(self.machine).as_secs_f64();
    }
}

/// A process that has ended has used nothing; that it has ended shows as failures.
fn cpu(watch: &[u32]) -> Vec<Duration> {
    watch.iter().map(|pid| Usage::cpu_of_tree(*pid)).collect()
}

fn own_cpu() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else {
        return Duration::ZERO;
    };
    let us = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(us.unsigned_abs())
}
