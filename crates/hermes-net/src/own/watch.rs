//! What changes about this machine's links, its addresses and its way out, as it happens.
//!
//! In: the kernel's announcements (rtnetlink). Out: one event each, for whoever connects again at once where the network
//! is another. Never: polls; or a judgement whether a change matters.

use std::io;

use netlink_packet_route::link::LinkFlags;
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::netlink::{ADDRESSES, Announcements, LINKS, ROUTES};

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// An interface has an address more or less.
    Address {
        /// The kernel's number of the interface: who made a device knows its own.
        interface: u32,
    },
    /// Somebody has taken the link of an interface up or down, or deleted it. Down takes its routes, and says so of few.
    Link {
        /// The interface.
        interface: u32,
        /// Which of both.
        is_up: bool,
    },
    /// There is another way to everywhere else, or none.
    DefaultRoute {
        /// The interface that it leads or led to; `None`: several.
        interface: Option<u32>,
    },
    /// So much at once that the kernel lost some: anything may have changed.
    Much,
}

/// Hears of changes from when it is made.
#[derive(Debug)]
pub struct Watch {
    announcements: Announcements,
    /// Heard of and not told yet, the next last.
    heard: Vec<Change>,
}

impl Watch {
    /// Begins to listen, in the network namespace and on the runtime of the caller.
    ///
    /// # Errors
    /// No socket is to be had.
    pub fn new() -> io::Result<Self> {
        Ok(Self { announcements: Announcements::of(LINKS | ADDRESSES | ROUTES)?, heard: Vec::new() })
    }

    /// The next change. Dropping the future loses none.
    ///
    /// # Errors
    /// The socket's.
    pub async fn next(&mut self) -> io::Result<Change> {
        loop {
            if let Some(change) = self.heard.pop() {
                return Ok(change);
            }
            match self.announcements.next().await? {
                Some(messages) => self.heard = messages.iter().rev().filter_map(change).collect(),
                None => return Ok(Change::Much),
            }
        }
    }
}

fn change(message: &RouteNetlinkMessage) -> Option<Change> {
    match message {
        RouteNetlinkMessage::NewAddress(address) | RouteNetlinkMessage::DelAddress(address) => {
            Some(Change::Address { interface: address.header.index })
        }
        // Of an interface that is new the kernel says that all has changed.
        RouteNetlinkMessage::NewLink(link)
            if link.header.change_mask.contains(LinkFlags::Up) && link.header.change_mask.bits() != u32::MAX =>
        {
            let is_up = link.header.flags.contains(LinkFlags::Up);
            Some(Change::Link { interface: link.header.index, is_up })
        }
        // Others tell of bridges.
        RouteNetlinkMessage::DelLink(link) if link.header.interface_family == AddressFamily::Unspec => {
            Some(Change::Link { interface: link.header.index, is_up: false })
        }
        RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) => default_route(route),
        _ => None,
    }
}

fn default_route(route: &RouteMessage) -> Option<Change> {
    if route.header.destination_prefix_length != 0 || route.header.table != libc::RT_TABLE_MAIN {
        return None;
    }
    let interface = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(interface) => Some(*interface),
        _ => None,
    });
    Some(Change::DefaultRoute { interface })
}
