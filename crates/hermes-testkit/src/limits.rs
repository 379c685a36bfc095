//! Open files: a thousand clients and their proxies need more than the soft limit allows.
//!
//! In: nothing. Out: the soft limit raised to the hard limit, for this process and its children.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::Result;

/// Raises the soft limit of open files to the hard limit and returns it. Children inherit it.
///
/// # Errors
/// The system refuses, which does not happen to a process that stays below its hard limit.
pub fn raise_open_files() -> Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}
