//! Events for changes of this host's links, addresses and default routes.
//!
//! In: notifications of the kernel (rtnetlink). Out: an event for each change, so that dialers can reconnect at once.
//! Never: polling, or a decision whether a change matters.

use std::io;

use netlink_packet_route::link::LinkFlags;
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::netlink::{ADDRESSES, LINKS, Notifications, ROUTES};

/// A change of this host's links, addresses or default route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostChange {
    /// An interface gained or lost an address.
    Address {
        /// The interface index, by which the creator of a TUN device recognizes changes of its own device.
        interface: u32,
    },
    /// A link was set up or down, or deleted. The kernel removes the routes of a link that goes down, and sends
    /// notifications for few of them.
    Link {
        /// The interface index.
        interface: u32,
        /// Whether the link is up now.
        is_up: bool,
    },
    /// The default route was added, replaced or removed.
    DefaultRoute {
        /// The index of the route's interface. `None` if the kernel names none, for example for a multipath route.
        interface: Option<u32>,
    },
    /// The kernel dropped notifications, so anything may have changed.
    Much,
}

/// A subscription to changes from its creation on.
#[derive(Debug)]
pub struct HostWatch {
    notifications: Notifications,
    /// Received changes that [`HostWatch::next`] has not returned yet. The next one is the last element.
    heard: Vec<HostChange>,
}

impl HostWatch {
    /// Subscribes in the network namespace and on the runtime of the caller.
    ///
    /// # Errors
    /// No netlink socket can be opened.
    pub fn new() -> io::Result<Self> {
        Ok(Self { notifications: Notifications::of(LINKS | ADDRESSES | ROUTES)?, heard: Vec::new() })
    }

    /// Returns the next change. Cancel safe.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn next(&mut self) -> io::Result<HostChange> {
        loop {
            if let Some(change) = self.heard.pop() {
                return Ok(change);
            }
            match self.notifications.next().await? {
                Some(messages) => self.heard = messages.iter().rev().filter_map(change).collect(),
                None => return Ok(HostChange::Much),
            }
        }
    }
}

fn change(message: &RouteNetlinkMessage) -> Option<HostChange> {
    match message {
        RouteNetlinkMessage::NewAddress(address) | RouteNetlinkMessage::DelAddress(address) => {
            Some(HostChange::Address { interface: address.header.index })
        }
        // For a new interface, the kernel reports that all flags changed.
        RouteNetlinkMessage::NewLink(link)
            if link.header.change_mask.contains(LinkFlags::Up) && link.header.change_mask.bits() != u32::MAX =>
        {
            let is_up = link.header.flags.contains(LinkFlags::Up);
            Some(HostChange::Link { interface: link.header.index, is_up })
        }
        // With another family, the message reports that a port left a bridge, and the link itself still exists.
        RouteNetlinkMessage::DelLink(link) if link.header.interface_family == AddressFamily::Unspec => {
            Some(HostChange::Link { interface: link.header.index, is_up: false })
        }
        RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) => default_route(route),
        _ => None,
    }
}

fn default_route(route: &RouteMessage) -> Option<HostChange> {
    if route.header.destination_prefix_length != 0 || route.header.table != libc::RT_TABLE_MAIN {
        return None;
    }
    let interface = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(interface) => Some(*interface),
        _ => None,
    });
    Some(HostChange::DefaultRoute { interface })
}
