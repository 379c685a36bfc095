//! Events of directories: files that come, go or are closed by their writer (inotify).
//!
//! In: paths of directories. Out: an event for each entry that may have changed, or for a directory whose path leads elsewhere. Never:
//! an event for a single write, since a log may lie in a watched directory.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The events after which nobody writes to a new file any more.
const ENDED: AddWatchFlags =
    AddWatchFlags::IN_CLOSE_WRITE.union(AddWatchFlags::IN_MOVE).union(AddWatchFlags::IN_DELETE);
/// The events after which the path of a directory leads elsewhere. The kernel reports the last two without being asked.
const GONE: AddWatchFlags = AddWatchFlags::IN_DELETE_SELF
    .union(AddWatchFlags::IN_MOVE_SELF)
    .union(AddWatchFlags::IN_UNMOUNT)
    .union(AddWatchFlags::IN_IGNORED);
/// The events that a watch asks for.
const WATCHED: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_MOVE_SELF)
    .union(AddWatchFlags::IN_ONLYDIR)
    .union(ENDED);

/// The watch of a directory. Two paths of one directory have the same watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Watched(WatchDescriptor);

/// An event of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An entry is new. Somebody may be writing to it.
    Created(Watched, OsString),
    /// An entry was closed by a writer, moved or removed.
    Ended(Watched, OsString),
    /// The attributes of an entry have changed, such as who may read it.
    Attributes(Watched, OsString),
    /// The path of the directory leads elsewhere.
    Gone(Watched),
    /// Events were lost: there were more than the kernel keeps.
    Lost,
}

/// The watched directories of one owner.
#[derive(Debug)]
pub struct DirectoryEvents(AsyncFd<Descriptor>);

#[derive(Debug)]
struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl DirectoryEvents {
    /// Watches no directory yet.
    ///
    /// # Errors
    /// No descriptor is left, or the user has as many watchers as the system allows (`fs.inotify.max_user_instances`).
    #[allow(unsafe_code)] // The registered descriptor must stay open and must not change.
    pub fn new() -> io::Result<Self> {
        let descriptor = Descriptor(Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?);
        // SAFETY: `Descriptor` owns its descriptor, and returns the same one each time. It is closed only when it is dropped.
        Ok(Self(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?))
    }

    /// Watches a directory.
    ///
    /// # Errors
    /// It is missing, no directory or not readable, or the user watches as many as the system allows.
    pub fn watch(&self, directory: &Path) -> io::Result<Watched> {
        Ok(Watched(self.0.get_ref().0.add_watch(directory, WATCHED)?))
    }

    /// Ends a watch. One that the kernel has ended is ignored.
    pub fn unwatch(&self, watched: Watched) {
        let _ = self.0.get_ref().0.rm_watch(watched.0);
    }

    /// Waits for events. Cancel-safe.
    ///
    /// # Errors
    /// The kernel cannot report them.
    pub async fn next(&self) -> io::Result<Vec<Event>> {
        let read = |descriptor: &Descriptor| Ok(descriptor.0.read_events()?);
        let events = self.0.async_io(Interest::READABLE, read).await?;
        Ok(events.into_iter().filter_map(event).collect())
    }
}

/// Translates an event of the kernel. Returns `None` for one that changes no entry.
fn event(event: InotifyEvent) -> Option<Event> {
    let watched = Watched(event.wd);
    match event.name {
        _ if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) => Some(Event::Lost),
        None if event.mask.intersects(GONE) => Some(Event::Gone(watched)),
        // The attributes of the directory itself.
        None => None,
        Some(name) if event.mask.contains(AddWatchFlags::IN_CREATE) => Some(Event::Created(watched, name)),
        Some(name) if event.mask.intersects(ENDED) => Some(Event::Ended(watched, name)),
        Some(name) => Some(Event::Attributes(watched, name)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn a_write_is_no_event_and_its_end_is_one() {
        let room = tempfile::tempdir().unwrap();
        let directories = DirectoryEvents::new().unwrap();
        let watched = directories.watch(room.path()).unwrap();
        let (one, two) = (OsString::from("one"), OsString::from("two"));
        let mut file = fs::File::create(room.path().join(&one)).unwrap();
        assert_eq!(directories.next().await.unwrap(), [Event::Created(watched, one.clone())]);
        file.write_all(b"a line").unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(directories.next().await.unwrap(), [Event::Attributes(watched, one.clone())]);
        drop(file);
        assert_eq!(directories.next().await.unwrap(), [Event::Ended(watched, one.clone())]);
        fs::rename(room.path().join(&one), room.path().join(&two)).unwrap();
        assert_eq!(directories.next().await.unwrap(), [Event::Ended(watched, one), Event::Ended(watched, two)]);
        directories.unwatch(watched);
        assert_eq!(directories.next().await.unwrap(), [Event::Gone(watched)]);
    }

    #[tokio::test]
    async fn a_directory_that_is_moved_is_gone() {
        let room = tempfile::tempdir().unwrap();
        let (old, new) = (room.path().join("old"), room.path().join("new"));
        fs::create_dir(&old).unwrap();
        let directories = DirectoryEvents::new().unwrap();
        let watched = directories.watch(&old).unwrap();
        fs::rename(&old, &new).unwrap();
        assert_eq!(directories.next().await.unwrap(), [Event::Gone(watched)]);
        fs::write(room.path().join("file"), "").unwrap();
        for path in ["file", "old"] {
            assert!(directories.watch(&room.path().join(path)).is_err());
        }
    }
}
