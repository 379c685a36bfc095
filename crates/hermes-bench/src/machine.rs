//! This machine, as far as results depend on it.
//!
//! In: `/proc`. Out: a description for the result files, and the assignment of processes to cores.

use std::{
    fs,
    hint::black_box,
    path::Path,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use anyhow::{Result, bail};
use hermes_testkit::{
    pattern::Digest,
    process::{Program, Running},
};
use nix::{sched::sched_getaffinity, unistd::Pid};
use serde::{Deserialize, Serialize};

/// Blocks of 4 KiB that the calibration workload hashes.
const DIGESTED: usize = 500;
/// Bytes that the calibration workload copies: more than any second-level cache.
const COPIED: usize = 16 << 20;

/// The properties of the machine that a reader needs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Model of the processor.
    pub(crate) cpu: String,
    /// The number of cores.
    pub(crate) cores: usize,
    /// Memory in MiB.
    pub(crate) memory_mib: u64,
    /// Kernel.
    pub(crate) kernel: String,
    /// Load average of the last minute when the benchmark began.
    pub(crate) load_average: f64,
}

/// Milliseconds that the calibration workload takes now on one core: half arithmetic, half memory copies. A virtual
/// machine may slow down without a sign in its own statistics; this figure shows it.
pub(crate) fn work_ms() -> f64 {
    static MEMORY: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let mut memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    // The memory is touched once, so that page faults are not measured.
    memory.resize(2 * COPIED, 1);
    let began = Instant::now();
    let mut digest = Digest::default();
    for _ in 0..DIGESTED {
        digest.update(black_box(&[0x5a; 4096]));
    }
    black_box(digest.hex());
    memory.copy_within(..COPIED, COPIED);
    black_box(&memory[COPIED..]);
    began.elapsed().as_secs_f64() * 1e3
}

/// Keeps every core from halting, by busy loops of the lowest priority. The time that a virtual machine needs to wake a
/// halted core is not caused by the proxies. Dropping the value ends the loops.
pub(crate) fn awake(dir: &Path) -> Result<Vec<Running>> {
    let awake = |core: usize| {
        let program = Program::new(&format!("awake-{core}"), "chrt", dir);
        program.args(["--idle", "0", "sh", "-c", "while :; do :; done"]).on_cpus(&[core]).start()
    };
    Ok(usable()?.into_iter().map(awake).collect::<Result<_, _>>()?)
}

fn usable() -> Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..nix::sched::CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect())
}

/// Cores for each process group; empty allows any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cores {
    /// The proxy at the client's side.
    pub(crate) near: Vec<usize>,
    /// The proxy at the origin's side.
    pub(crate) far: Vec<usize>,
    /// The load.
    pub(crate) load: Vec<usize>,
    /// The origins.
    pub(crate) origin: Vec<usize>,
}

impl Machine {
    /// Reads the properties of this machine.
    pub(crate) fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let info = text("/proc/cpuinfo");
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
            line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let memory = field(&text("/proc/meminfo"), "MemTotal");
        let load = text("/proc/loadavg");
        Self {
            cpu: field(&info, "model name"),
            cores: info.lines().filter(|line| line.starts_with("processor")).count(),
            memory_mib: memory.trim_end_matches(" kB").parse().unwrap_or(0) / 1024,
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_average: load.split(' ').next().and_then(|l| l.parse().ok()).unwrap_or(0.0),
        }
    }
}

impl Cores {
    /// Separates the proxies from load and origin. With two cores both proxies share one, load and origin the other;
    /// with four or more each has its own.
    pub(crate) fn apart() -> Result<Self> {
        let usable = usable()?;
        let one = |i: usize| vec![usable[i]];
        Ok(match usable.len() {
            0 | 1 => bail!("throughput needs at least two cores"),
            2 | 3 => Self { near: one(1), far: one(1), load: one(0), origin: one(0) },
            _ => Self { near: one(1), far: one(2), load: one(0), origin: one(3) },
        })
    }
}
