//! The cores on which threads of this process run.
//!
//! In: the number of a worker. Out: its thread stays on one core, with what is in the caches of that core. Never: a core that the
//! process was not given.

use std::io;
use std::sync::OnceLock;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The cores of the process, from before any thread was pinned. Threads inherit the cores of the thread that starts them.
static ALLOWED: OnceLock<CpuSet> = OnceLock::new();
/// A thread: the one that calls.
const THIS_THREAD: Pid = Pid::from_raw(0);

/// Returns the cores on which this process may run. The first call must come from a thread that is not pinned.
fn allowed() -> io::Result<&'static CpuSet> {
    if let Some(allowed) = ALLOWED.get() {
        return Ok(allowed);
    }
    let now = sched_getaffinity(THIS_THREAD)?;
    Ok(ALLOWED.get_or_init(|| now))
}

fn numbers(cores: &CpuSet) -> impl Iterator<Item = usize> {
    (0..CpuSet::count()).filter(|core| cores.is_set(*core).unwrap_or_default())
}

/// Returns the number of cores on which this process may run.
///
/// # Errors
/// The system does not tell.
pub fn count() -> io::Result<usize> {
    allowed().map(|cores| numbers(cores).count())
}

/// Keeps the calling thread on one of the allowed cores: that with this number among them.
///
/// # Errors
/// There are fewer, or the system refuses it.
pub fn pin(number: usize) -> io::Result<()> {
    let core = numbers(allowed()?).nth(number).ok_or(io::ErrorKind::NotFound)?;
    let mut one = CpuSet::new();
    one.set(core)?;
    Ok(sched_setaffinity(THIS_THREAD, &one)?)
}

/// Lets the calling thread run on all cores of the process. For threads that a pinned one has started.
pub fn unpin() {
    if let Some(allowed) = ALLOWED.get() {
        // It then shares the core of the thread that started it, which is slower and no failure.
        let _ = sched_setaffinity(THIS_THREAD, allowed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_pinned_and_the_threads_that_it_starts_are_not() {
        let all = count().unwrap();
        let here = || numbers(&sched_getaffinity(THIS_THREAD).unwrap()).collect::<Vec<_>>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin(all - 1).unwrap();
                let pinned = here();
                assert_eq!(pinned.len(), 1);
                scope.spawn(move || {
                    assert_eq!(here(), pinned, "inherited");
                    unpin();
                    assert_eq!(here().len(), all);
                });
            });
        });
        assert_eq!(here().len(), all, "this thread keeps its cores");
        assert_eq!(pin(all).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
