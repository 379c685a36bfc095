//! The memory and the file descriptors that this process uses, and how much of each it may use.
//!
//! In: `/proc` and the control groups. Out: numbers; `None` where the system does not tell. Never: a wait.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};

/// The time that the calling thread was ready to run and had no core, since its start.
pub fn waited_for_core() -> Option<Duration> {
    // Documentation/scheduler/sched-stats.rst: time on a core, time of waiting for one, and number of times.
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// Used and available bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that are used.
    pub used: u64,
    /// Bytes that may be used.
    pub limit: u64,
}

/// The place where the process's memory is limited.
#[derive(Debug)]
pub enum MemoryBound {
    /// The directory of a control group (cgroup v2). All of its processes, and the sockets of the kernel for them, count.
    Group(PathBuf),
    /// The machine, with this many bytes. Only this process counts, since other programs say nothing about its load.
    Machine(u64),
}

impl MemoryBound {
    /// Finds the control group with the least limit, or the machine.
    pub fn find() -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::among(&groups, Path::new("/sys/fs/cgroup")).or_else(|| {
            let machine = fs::read_to_string("/proc/meminfo").ok()?;
            field(&machine, "MemTotal:").map(|kib| Self::Machine(kib * 1024))
        })
    }

    fn among(groups: &str, root: &Path) -> Option<Self> {
        let own = root.join(groups.lines().find_map(|line| line.strip_prefix("0::/"))?);
        let all = own.ancestors().take_while(|dir| dir.starts_with(root));
        let limited = all.filter_map(|dir| Some((number(&dir.join("memory.max"))?, dir)));
        limited.min_by_key(|(limit, _)| *limit).map(|(_, dir)| Self::Group(dir.to_owned()))
    }

    /// Reads how much is used. The limit of a group may have changed.
    pub fn read(&self) -> Option<Memory> {
        match self {
            Self::Group(dir) => {
                // The kernel takes file contents that nobody uses away before anything else.
                let stat = fs::read_to_string(dir.join("memory.stat")).ok()?;
                let used = number(&dir.join("memory.current"))?.saturating_sub(field(&stat, "inactive_file")?);
                // Without a limit by now, the group may use anything.
                Some(Memory { used, limit: number(&dir.join("memory.max")).unwrap_or(u64::MAX) })
            }
            Self::Machine(limit) => Some(Memory { used: own_memory()?, limit: *limit }),
        }
    }
}

/// The number in a file. A group without a limit has the word `max` there.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The number after a name, in a file with a name in each line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Returns the bytes of this process that are in memory.
pub fn own_memory() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    let page = sysconf(SysconfVar::PAGE_SIZE).ok()??;
    Some(pages * u64::try_from(page).ok()?)
}

/// Returns the number of file descriptors that this process has open. Before Linux 6.2, it is a lower bound.
pub fn descriptors() -> Option<u64> {
    let mut statm = match File::open("/proc/self/statm") {
        Ok(statm) => statm,
        // None is left.
        Err(error) if super::is_lack(&error) => return descriptor_limit(),
        Err(_) => return None,
    };
    let open = fs::metadata("/proc/self/fd").map_or(0, |dir| dir.size());
    if open > 0 {
        return Some(open);
    }
    // The size is 0 in older kernels. To list the directory would take too long with many of them. A new file gets the
    // lowest free number.
    let _ = statm.read(&mut [0]);
    Some(u64::from(statm.as_raw_fd().unsigned_abs()))
}

/// Returns the number of file descriptors that this process may have open.
pub fn descriptor_limit() -> Option<u64> {
    getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_that_of_this_process() {
        let before = own_memory().unwrap();
        let block = vec![1_u8; 64 << 20];
        let after = own_memory().unwrap();
        assert!(after > before + (48 << 20), "{before} {after} {}", block.len());
        let all = MemoryBound::find().unwrap().read().unwrap();
        assert!(all.used > 48 << 20 && all.used < all.limit, "{all:?}");
    }

    #[test]
    fn an_open_file_is_counted() {
        let before = descriptors().unwrap();
        let files: Vec<_> = std::iter::repeat_with(|| File::open("/dev/null").unwrap()).take(50).collect();
        // Other tests open and close files meanwhile.
        assert!(descriptors().unwrap() + 20 >= before + files.len() as u64);
        assert!(descriptor_limit().unwrap() > before);
    }

    #[test]
    fn the_least_limit_of_all_control_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let (own, above) = (root.path().join("a/b"), root.path().join("a"));
        fs::create_dir_all(&own).unwrap();
        let write = |dir: &Path, file: &str, text: &str| fs::write(dir.join(file), text).unwrap();
        write(&own, "memory.max", "max\n");
        write(&above, "memory.max", "1048576\n");
        write(&above, "memory.current", "700000\n");
        write(&above, "memory.stat", "anon 5\ninactive_file 100000\nactive_file 7\n");
        let groups = "1:name=x:/z\n0::/a/b\n";
        let bound = MemoryBound::among(groups, root.path()).unwrap();
        assert_eq!(bound.read(), Some(Memory { used: 600_000, limit: 1 << 20 }));
        write(&above, "memory.max", "2097152\n");
        assert_eq!(bound.read().unwrap().limit, 2 << 20, "the limit was raised");
        write(&above, "memory.max", "max\n");
        assert_eq!(bound.read().unwrap().limit, u64::MAX);
        assert!(MemoryBound::among(groups, root.path()).is_none());
        assert_eq!(field("MemTotal:       24677160 kB\nMemFree: 1 kB\n", "MemTotal:"), Some(24_677_160));
    }
}
