//! What this process uses of its host: memory and file descriptors, and how much of each it may use.
//!
//! In: `/proc` and the control group. Out: numbers; `None` where the system does not tell. Never: a wait.

use std::fs;
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};

/// Returns the bytes of this process that are in memory.
pub fn memory() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    let page = sysconf(SysconfVar::PAGE_SIZE).ok()??;
    Some(pages * u64::try_from(page).ok()?)
}

/// Returns the bytes of memory that this process may use: the least limit of its control groups, or what the machine has.
pub fn memory_limit() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| total(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    group_limits(&groups, Path::new("/sys/fs/cgroup")).chain(machine).min()
}

fn total(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = rest.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

/// The limits of the process's control group and of all groups that contain it (cgroup v2).
fn group_limits(groups: &str, root: &Path) -> impl Iterator<Item = u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let own = root.join(own);
    let dirs: Vec<_> = own.ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_owned).collect();
    // The text is `max` if the group has no limit.
    dirs.into_iter().filter_map(|dir| fs::read_to_string(dir.join("memory.max")).ok()?.trim().parse().ok())
}

/// Returns the number of file descriptors that this process has open.
pub fn descriptors() -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    // Since Linux 6.2 the size of the directory is their number; before, it is 0.
    match fs::metadata("/proc/self/fd").ok()?.size() {
        0 => fs::read_dir("/proc/self/fd").ok().map(|open| open.count() as u64),
        open => Some(open),
    }
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
        let before = memory().unwrap();
        let block = vec![1_u8; 64 << 20];
        let after = memory().unwrap();
        assert!(after > before + (48 << 20), "{before} {after} {}", block.len());
        assert!(memory_limit().unwrap() > after);
    }

    #[test]
    fn an_open_file_is_counted() {
        let before = descriptors().unwrap();
        let files: Vec<_> = std::iter::repeat_with(|| fs::File::open("/dev/null").unwrap()).take(50).collect();
        // Other tests open and close files meanwhile.
        assert!(descriptors().unwrap() + 20 >= before + files.len() as u64);
        assert!(descriptor_limit().unwrap() > before);
    }

    #[test]
    fn the_least_limit_of_all_control_groups_counts() {
        let root = std::env::temp_dir().join(format!("hermes-usage-{}", std::process::id()));
        let own = root.join("a/b");
        fs::create_dir_all(&own).unwrap();
        fs::write(own.join("memory.max"), "max\n").unwrap();
        fs::write(root.join("a/memory.max"), "1048576\n").unwrap();
        let limits: Vec<_> = group_limits("1:name=x:/z\n0::/a/b\n", &root).collect();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(limits, [1 << 20]);
        assert_eq!(total("MemTotal:       24677160 kB\nMemFree: 1 kB\n"), Some(24_677_160 * 1024));
    }
}
