//! Resource usage of a program, read from `/proc`.
//!
//! In: a pid. Out: CPU time of all its threads and children, resident and proportional memory. The clock tick of
//! 10 ms bounds the precision of CPU time: measure for seconds.

use std::{fs, io, time::Duration};

use serde::Serialize;

/// Linux reports CPU time to userspace in hundredths of a second on every architecture it is built for here.
const TICK: Duration = Duration::from_millis(10);

/// CPU time and memory of a program with its children.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// User and system time of all threads.
    pub cpu: Duration,
    /// Memory.
    pub memory: Memory,
}

/// Memory in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Resident set size (RSS of `ps`).
    pub rss: u64,
    /// Proportional set size: shared pages are divided among their users.
    pub pss: u64,
}

impl Usage {
    /// Sums over `pid` and its descendants.
    ///
    /// # Errors
    /// The process has ended.
    pub fn of_tree(pid: u32) -> io::Result<Self> {
        let mut sum = Self { cpu: cpu_of(pid)?, memory: memory_of(pid)? };
        for member in family(pid).into_iter().skip(1) {
            // A child that ended between the two reads uses nothing.
            sum.cpu += cpu_of(member).unwrap_or_default();
            let memory = memory_of(member).unwrap_or_default();
            sum.memory.rss += memory.rss;
            sum.memory.pss += memory.pss;
        }
        Ok(sum)
    }

    /// CPU time alone of `pid` and its descendants; zero when it has ended.
    pub(crate) fn cpu_of_tree(pid: u32) -> Duration {
        family(pid).into_iter().map(|member| cpu_of(member).unwrap_or_default()).sum()
    }
}

/// Busy time of all cores of this machine. Time beyond that of our own programs belongs to others, and makes a
/// measurement noisy.
///
/// # Errors
/// The file `/proc/stat` cannot be read.
pub fn machine_busy() -> io::Result<Duration> {
    let text = fs::read_to_string("/proc/stat")?;
    let fields = text.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1);
    let ticks: Vec<u32> = fields.map(|f| f.parse().unwrap_or(0)).collect();
    // user nice system idle iowait irq softirq steal; guest time is already part of user.
    let busy: u32 = [0, 1, 2, 5, 6, 7].into_iter().filter_map(|i| ticks.get(i)).sum();
    Ok(TICK * busy)
}

/// CPU time of one process, all threads.
fn cpu_of(pid: u32) -> io::Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command's name is in parentheses and may contain anything; count fields from its end.
    let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace();
    let ticks: u32 = fields.skip(11).take(2).filter_map(|f| f.parse::<u32>().ok()).sum();
    Ok(TICK * ticks)
}

fn memory_of(pid: u32) -> io::Result<Memory> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    Ok(Memory { rss: field("Rss:"), pss: field("Pss:") })
}

/// `pid` and its descendants, parents before children.
pub(super) fn family(pid: u32) -> Vec<u32> {
    let mut members = vec![pid];
    let mut next = 0;
    while let Some(parent) = members.get(next).copied() {
        members.extend(children(parent));
        next += 1;
    }
    members
}

/// Each thread lists the children that it has started.
fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let lists = threads.flatten().filter_map(|t| fs::read_to_string(t.path().join("children")).ok());
    lists.flat_map(|list| list.split_ascii_whitespace().filter_map(|c| c.parse().ok()).collect::<Vec<_>>()).collect()
}
