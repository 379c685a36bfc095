//! What changes about this machine's links, its addresses and its way out, as it happens.
//!
//! In: the kernel's announcements (rtnetlink). Out: one event each, for whoever connects again at once where the network
//! is another. Never: polls; or a judgement whether a change matters.

use std::io;

use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkFlags;
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tokio::io::unix::AsyncFd;

use crate::netlink::split_first;

/// Links, and addresses and routes of both families (linux/rtnetlink.h: RTMGRP_*).
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// An interface has an address more or less.
    Address {
        /// The kernel's number of the interface: who made a device knows its own.
        interface: u32,
    },
    /// Somebody has taken the link of an interface up or down. Down takes its routes, and says so of few.
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
    io: AsyncFd<Socket>,
    /// Heard of and not told yet, the next last.
    heard: Vec<Change>,
}

impl Watch {
    /// Begins to listen, in the network namespace and on the runtime of the caller.
    ///
    /// # Errors
    /// No socket is to be had.
    #[allow(unsafe_code)] // What is registered must stay the same open descriptor.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, GROUPS))?;
        // SAFETY: the socket owns one descriptor, which stays open until it is dropped; nobody else gets at it.
        let io = unsafe { AsyncFd::register(socket) }?;
        Ok(Self { io, heard: Vec::new() })
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
            let mut ready = self.io.readable().await?;
            match ready.try_io(|io| io.get_ref().recv_from_full()) {
                // Programs may send such messages too; the kernel's number is 0.
                Ok(Ok((messages, from))) if from.port_number() == 0 => self.heard = changes(&messages),
                Ok(Ok(_)) => {}
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Change::Much),
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

fn changes(mut messages: &[u8]) -> Vec<Change> {
    let mut found = Vec::new();
    while let Some((message, rest)) = split_first(messages) {
        messages = rest;
        // What is newer than the codec is not what we look for.
        let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) else { continue };
        if let NetlinkPayload::InnerMessage(message) = message.payload {
            found.extend(change(&message));
        }
    }
    found.reverse();
    found
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
