//! The sandbox: workers for listeners whose connections hold up the workers of all others (paper 003).
//!
//! In: how long a task of a listener's connection held up its worker, listeners that reached their bound of connections, and the
//! listeners of the document. Out: which listeners are confined. The kernel gives their new connections to the workers of the sandbox
//! alone, and all other connections to the other workers. Never: an open connection that moves. The other workers drain those of a
//! confined listener (`context.rs`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hermes_net::dispatch::Table;

/// The shortest poll that counts as holding up the worker: shorter ones are common on a busy machine.
pub(super) const HELD_UP: Duration = Duration::from_millis(20);
/// The time over which held-up time is added.
const WINDOW_MS: u64 = 10_000;
/// How long a listener stays confined after its last reason.
const CONFINED_MS: u64 = 300_000;
/// The most names of listeners. A node has few; those that the document no longer has are kept, since tasks refer to them.
const MAX_LISTENERS: usize = 1024;

/// How much a listener may hold up its workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The workers of the sandbox. 0: nobody is confined.
    pub workers: u16,
    /// The time within ten seconds that confines a listener.
    pub after: Duration,
}

/// The reason for which a listener is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its connections held up workers.
    HeldUp,
    /// It has as many connections as it may have.
    Full,
}

/// A listener of the sandbox, as tasks refer to it. Tasks of no listener have the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tag(pub(super) u32);

/// The listeners of a node, and which of them are confined.
#[derive(Default)]
pub struct Sandbox {
    is_on: AtomicBool,
    /// The number of changes to the set of confined listeners.
    changes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    settings: Settings,
    /// There are workers for confined listeners.
    is_on: bool,
    /// The listener with tag `n` comes at place `n - 1`.
    listeners: Vec<Known>,
}

struct Known {
    name: Arc<str>,
    /// The document has it.
    is_there: bool,
    /// The bits of its programs. 0: the kernel does not choose its workers.
    programs: u64,
    /// The start of the window in milliseconds, and the time that was held up since.
    window: (u64, Duration),
    /// The end of its confinement in milliseconds.
    confined_until: Option<u64>,
}

/// The listeners, as of some change.
#[derive(Default)]
pub(super) struct SandboxView {
    pub(super) changes: u64,
    listeners: HashMap<Arc<str>, ListenerView>,
}

/// How the sandbox sees a listener.
#[derive(Clone, Copy)]
struct ListenerView {
    tag: Tag,
    can_confine: bool,
    is_confined: bool,
}

impl SandboxView {
    /// The tag for tasks of a listener's connections. It has one without a sandbox, too: its connections may outlive the setting.
    pub(super) fn tag(&self, listener: &str) -> Tag {
        self.listeners.get(listener).map(|view| view.tag).unwrap_or_default()
    }

    /// True if there is a sandbox, and the kernel chooses the listener's workers.
    pub(super) fn can_confine(&self, listener: &str) -> bool {
        self.listeners.get(listener).is_some_and(|view| view.can_confine)
    }

    pub(super) fn is_confined(&self, listener: &str) -> bool {
        self.listeners.get(listener).is_some_and(|view| view.is_confined)
    }
}

impl Sandbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tags and the confined listeners, as of the latest change.
    pub(super) fn view(&self) -> SandboxView {
        let state = self.state();
        let listeners = state.listeners.iter().zip(1..).map(|(known, tag)| {
            let can_confine = state.is_on && known.programs != 0;
            (known.name.clone(), ListenerView { tag: Tag(tag), can_confine, is_confined: known.is_confined() })
        });
        SandboxView { changes: self.changes(), listeners: listeners.collect() }
    }

    /// Takes over the listeners of a document, with the bits of their programs in the kernel.
    pub fn follow(&self, table: &Table, settings: Settings, listeners: impl Iterator<Item = (Arc<str>, u64)>) {
        table.set_sandbox(settings.workers);
        let is_on = settings.workers > 0 && table.has_sandbox();
        if settings.workers > 0 && !is_on {
            table.set_sandbox(0);
            tracing::warn!(
                "no listener can be confined: a group has one worker alone; set `workers` or `dispatch.locality` higher"
            );
        }
        let mut state = self.state();
        state.settings = settings;
        state.is_on = is_on;
        state.listeners.iter_mut().for_each(|known| (known.is_there, known.programs) = (false, 0));
        if state.listeners.len() >= MAX_LISTENERS {
            // Tasks of removed listeners may refer to others from now on.
            state.listeners.clear();
        }
        listeners.for_each(|(name, programs)| state.know(name, programs));
        let has_free = state.listeners.iter().any(Known::is_free);
        if !is_on || !has_free {
            for known in &mut state.listeners {
                if known.confined_until.take().is_some() {
                    tracing::info!(listener = %known.name, "a listener is confined no longer");
                }
            }
        }
        self.is_on.store(is_on, Ordering::Relaxed);
        self.publish(&state, table);
    }

    /// Gives tags to these listeners of a document while another process has the kernel choose their workers.
    pub fn know(&self, listeners: impl Iterator<Item = Arc<str>>) {
        let mut state = self.state();
        listeners.for_each(|name| state.know(name, 0));
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// True if there are workers for confined listeners.
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// A task held up its worker. Returns the listener if that confines it.
    pub fn held_up(&self, table: &Table, tag: Tag, time: Duration, now: u64) -> Option<Arc<str>> {
        let place = (tag.0 as usize).checked_sub(1)?;
        let mut state = self.state();
        let after = state.settings.after;
        let known = state.listeners.get_mut(place)?;
        if now.saturating_sub(known.window.0) >= WINDOW_MS {
            known.window = (now, Duration::ZERO);
        }
        known.window.1 += time;
        if known.window.1 < after {
            return None;
        }
        let confined = state.confine(place, now)?;
        self.publish(&state, table);
        Some(confined)
    }

    /// A connection came to a listener with as many as it may have. Returns the listener if that confines it.
    pub fn found_full(&self, table: &Table, listener: &str, now: u64) -> Option<Arc<str>> {
        if !self.is_on() {
            return None;
        }
        let mut state = self.state();
        let place = state.listeners.iter().position(|known| &*known.name == listener)?;
        let confined = state.confine(place, now)?;
        self.publish(&state, table);
        Some(confined)
    }

    /// Ends the confinement of listeners that gave no reason for it in the last minutes, and returns them.
    pub fn release(&self, table: &Table, now: u64) -> Vec<Arc<str>> {
        if !self.is_on() {
            return Vec::new();
        }
        let mut state = self.state();
        let ends = |known: &&mut Known| known.confined_until.is_some_and(|until| until <= now);
        let released: Vec<_> = state.listeners.iter_mut().filter(ends).collect();
        let names = released.into_iter().map(|known| {
            known.confined_until = None;
            known.name.clone()
        });
        let names: Vec<_> = names.collect();
        if !names.is_empty() {
            self.publish(&state, table);
        }
        names
    }

    /// Changes whenever the set of confined listeners may have changed.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    fn publish(&self, state: &State, table: &Table) {
        let confined = state.listeners.iter().filter(|known| known.is_confined());
        table.confine(confined.fold(0, |bits, known| bits | known.programs));
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// The listeners of the document, and whether each is confined.
    pub fn listeners(&self) -> Vec<(Arc<str>, bool)> {
        let state = self.state();
        let listeners = state.listeners.iter().filter(|known| known.is_there);
        listeners.map(|known| (known.name.clone(), known.is_confined())).collect()
    }

    /// The confined listeners.
    pub fn confined(&self) -> Vec<Arc<str>> {
        let state = self.state();
        state.listeners.iter().filter(|known| known.is_confined()).map(|known| known.name.clone()).collect()
    }
}

impl State {
    /// Adds a listener of the document, or a program of one that is known.
    fn know(&mut self, name: Arc<str>, programs: u64) {
        let has_room = self.listeners.len() < MAX_LISTENERS;
        match self.listeners.iter_mut().find(|known| known.name == name) {
            Some(known) => (known.is_there, known.programs) = (true, known.programs | programs),
            None if has_room => {
                let window = (0, Duration::ZERO);
                self.listeners.push(Known { name, is_there: true, programs, window, confined_until: None });
            }
            None => {}
        }
    }

    /// Confines a listener. Returns it unless it is confined already, or nobody would gain by it.
    fn confine(&mut self, place: usize, now: u64) -> Option<Arc<str>> {
        let is_on = self.is_on;
        let is_free = |(other, known): (usize, &Known)| other != place && known.is_free();
        let has_others = self.listeners.iter().enumerate().any(is_free);
        let known = self.listeners.get_mut(place).filter(|known| is_on && known.programs != 0 && has_others)?;
        let was_confined = known.confined_until.replace(now + CONFINED_MS).is_some();
        (!was_confined).then(|| known.name.clone())
    }
}

impl Known {
    fn is_confined(&self) -> bool {
        self.confined_until.is_some() && self.programs != 0
    }

    fn is_free(&self) -> bool {
        self.confined_until.is_none() && self.programs != 0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use hermes_net::dispatch::Groups;

    const SECOND: Duration = Duration::from_secs(1);

    fn sandbox(listeners: &[(&str, u64)]) -> (Sandbox, Table) {
        let (sandbox, table) = (Sandbox::default(), Table::private(4, Groups::of(4)));
        let settings = Settings { workers: 1, after: 2 * SECOND };
        sandbox.follow(&table, settings, listeners.iter().map(|(name, bits)| (Arc::from(*name), *bits)));
        (sandbox, table)
    }

    fn names(confined: &[Arc<str>]) -> Vec<&str> {
        confined.iter().map(|name| &**name).collect()
    }

    #[test]
    fn a_listener_that_holds_up_workers_is_confined_for_minutes() {
        let (sandbox, table) = sandbox(&[("web", 1), ("slow", 0b110)]);
        let slow = sandbox.view().tag("slow");
        assert_eq!(sandbox.held_up(&table, slow, SECOND, 1000), None);
        assert_eq!(sandbox.held_up(&table, slow, SECOND, 1000 + WINDOW_MS), None, "that was long ago");
        assert_eq!(sandbox.held_up(&table, slow, SECOND, 2000 + WINDOW_MS).as_deref(), Some("slow"));
        assert_eq!(sandbox.held_up(&table, slow, SECOND, 3000 + WINDOW_MS), None, "it is confined already");
        assert_eq!(names(&sandbox.confined()), ["slow"]);
        let end = 3000 + WINDOW_MS + CONFINED_MS;
        assert!(sandbox.release(&table, end - 1).is_empty());
        assert_eq!(names(&sandbox.release(&table, end)), ["slow"]);
        assert!(sandbox.confined().is_empty());
    }

    #[test]
    fn nobody_is_confined_alone() {
        let (sandbox, table) = sandbox(&[("web", 1), ("udp", 0)]);
        assert_eq!(sandbox.held_up(&table, sandbox.view().tag("web"), 9 * SECOND, 0), None);
        assert_eq!(
            sandbox.held_up(&table, sandbox.view().tag("udp"), 9 * SECOND, 0),
            None,
            "the kernel does not choose"
        );
        assert_eq!(sandbox.held_up(&table, Tag::default(), 9 * SECOND, 0), None);
        let (sandbox, table) = self::sandbox(&[("web", 1), ("full", 2)]);
        assert_eq!(sandbox.found_full(&table, "full", 0).as_deref(), Some("full"));
        assert_eq!(sandbox.found_full(&table, "web", 0), None, "one must stay outside");
    }

    #[test]
    fn a_group_of_one_worker_has_no_sandbox() {
        let table = Table::private(5, Groups::by_destination(5, 2));
        let sandbox = Sandbox::default();
        let settings = Settings { workers: 1, after: SECOND };
        sandbox.follow(
            &table,
            settings,
            [("web", 1), ("slow", 2)].into_iter().map(|(name, bit)| (Arc::from(name), bit)),
        );
        assert!((0..5).all(|worker| !table.is_sandbox(worker)), "no worker is withheld");
        assert_eq!(sandbox.found_full(&table, "slow", 0), None);
    }

    #[test]
    fn tags_outlive_a_document() {
        let (sandbox, table) = sandbox(&[("web", 1), ("slow", 2)]);
        let slow = sandbox.view().tag("slow");
        let settings = Settings { workers: 1, after: SECOND };
        let listeners = [("other", 4), ("slow", 8)];
        sandbox.follow(&table, settings, listeners.iter().map(|(name, bits)| (Arc::from(*name), *bits)));
        assert_eq!(sandbox.held_up(&table, slow, SECOND, 0).as_deref(), Some("slow"));
        sandbox.follow(&table, Settings::default(), std::iter::empty());
        assert_eq!((sandbox.view().tag("slow"), sandbox.confined().len()), (slow, 0), "it is off");
        assert_eq!(sandbox.held_up(&table, slow, 9 * SECOND, WINDOW_MS), None);
        sandbox.follow(&table, settings, listeners.iter().map(|(name, bits)| (Arc::from(*name), *bits)));
        assert_eq!(
            sandbox.held_up(&table, slow, SECOND, 2 * WINDOW_MS).as_deref(),
            Some("slow"),
            "it has begun before"
        );
    }
}
