//! Drops the privileges that a process no longer needs once its device is created.
//!
//! In: the name of a user. Out: a process of that user that keeps CAP_NET_ADMIN and no other privilege of root. Never:
//! while other threads run, since these would keep their capabilities.

use std::io;

use nix::unistd::{Uid, User, setgroups, setresgid, setresuid};

/// The number of the capability (linux/capability.h).
const CAP_NET_ADMIN: u32 = 12;
/// `_LINUX_CAPABILITY_VERSION_3` (linux/capability.h): two words of 32 capabilities each.
const VERSION: u32 = 0x2008_0522;

/// linux/capability.h: `__user_cap_header_struct`.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// linux/capability.h: `__user_cap_data_struct`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Capabilities {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Drops all capabilities except CAP_NET_ADMIN, which is needed to remove a device's rules at shutdown. A process of
/// root becomes one of `user`; a process of another user keeps its user. Programs that the process starts gain no
/// privileges (PR_SET_NO_NEW_PRIVS).
///
/// # Errors
/// The user does not exist, or the kernel refuses.
pub fn keep_net_admin(user: &str) -> io::Result<()> {
    if Uid::effective().is_root() {
        become_user(user)?;
    }
    set_capabilities(1 << CAP_NET_ADMIN)?;
    Ok(nix::sys::prctl::set_no_new_privs()?)
}

fn become_user(name: &str) -> io::Result<()> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, format!("user {name} does not exist"));
    let user = User::from_name(name)?.ok_or_else(missing)?;
    nix::sys::prctl::set_keepcaps(true)?;
    setgroups(&[])?;
    setresgid(user.gid, user.gid, user.gid)?;
    setresuid(user.uid, user.uid, user.uid)?;
    Ok(())
}

#[allow(unsafe_code)] // Neither libc nor nix has a call for it.
fn set_capabilities(lower: u32) -> io::Result<()> {
    let header = Header { version: VERSION, pid: 0 };
    let kept = Capabilities { effective: lower, permitted: lower, inheritable: 0 };
    let data = [kept, Capabilities::default()];
    // SAFETY: `header` and `data` have the layout that the kernel reads for this version, and live as long as the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
