//! Netlink requests to the kernel, and its notifications, for routing (rtnetlink) and nftables tables.
//!
//! In: one message, or the groups of notifications to receive. Out: the kernel's answer, a list, or notifications. Uses
//! the network namespace of the calling thread. Never: a run of another program.

pub(crate) mod attribute;

use std::io;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd};
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::RouteProtocol;
use netlink_sys::{
    Socket, SocketAddr,
    protocols::{NETLINK_NETFILTER, NETLINK_ROUTE},
};
use socket2::SockRef;
use tokio::io::unix::AsyncFd;

/// The kernel answers while it handles the request, so an answer that takes longer than this is lost.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of attempts for a list that changes during the dump.
const MAX_DUMP_ATTEMPTS: usize = 3;
/// Bytes of a message header (`struct nlmsghdr`): length, type, flags, sequence number and sender.
const HEADER: usize = 16;

/// Groups of notifications, for both families (linux/rtnetlink.h: RTMGRP_*, and RTNLGRP_*_RULE as bits).
pub(crate) const LINKS: u32 = 0x1;
pub(crate) const ADDRESSES: u32 = 0x10 | 0x100;
pub(crate) const ROUTES: u32 = 0x40 | 0x400;
pub(crate) const RULES: u32 = 0x80 | 0x4_0000;

/// linux/netfilter/nfnetlink.h: NFNLGRP_NFTABLES, as a bit, and NFNL_SUBSYS_NFTABLES.
const NFTABLES_GROUP: u32 = 1 << 6;
const NFTABLES: u8 = 10;
/// linux/netfilter.h: NFPROTO_INET, the family of our tables.
const INET: u8 = 1;
/// linux/netfilter/nf_tables.h: NFT_MSG_NEWTABLE, and NFT_MSG_DEL* of tables, chains and rules.
const NEW_TABLE: u8 = 0;
const DELETE_KINDS: [u8; 3] = [2, 5, 8];
/// NFTA_TABLE_NAME, NFTA_CHAIN_TABLE, NFTA_RULE_TABLE.
const TABLE_NAME: u16 = 1;
/// Bytes before the attributes of an nftables message: the netlink header and `struct nfgenmsg`.
const NETFILTER_HEADER: usize = HEADER + 4;

/// The protocol number of our routes and rules: ASCII "H", which iproute2 shows as `proto 72`. No other program uses
/// it.
pub(crate) const PROTOCOL: RouteProtocol = RouteProtocol::Other(PROTOCOL_NUMBER);
pub(crate) const PROTOCOL_NUMBER: u8 = 72;

/// A change of an nftables table of the `inet` family, with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TableChange {
    /// The table was created, or an existing table was updated.
    Created(String),
    /// The table, or a chain or rule of it, was removed.
    Removed(String),
}

/// The state of a setting that a change requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The setting must not exist; otherwise the change fails with `AlreadyExists`.
    Add,
    /// The setting may exist, and is replaced then.
    Set,
    /// The setting must exist. It is changed or removed.
    Existing,
}

/// Changes one setting, and waits for the kernel's acknowledgement.
///
/// # Errors
/// The kernel's error: `EEXIST`, `ESRCH`, `EPERM`, ...
pub(crate) fn change(message: RouteNetlinkMessage, change: Change) -> io::Result<()> {
    let flags = match change {
        Change::Add => NLM_F_CREATE | NLM_F_EXCL,
        Change::Set => NLM_F_CREATE | NLM_F_REPLACE,
        Change::Existing => 0,
    };
    request(message, NLM_F_ACK | flags).map(drop)
}

/// Lists all objects of one kind that match the message. Routes are filtered by table and protocol number; before Linux
/// 4.20 the kernel lists all routes. Objects may be missing if the list keeps changing during the dump.
///
/// # Errors
/// The errors of [`change`].
pub(crate) fn list(message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    let mut answer = Answer::default();
    for _ in 0..MAX_DUMP_ATTEMPTS {
        answer = match request(message.clone(), NLM_F_DUMP) {
            // The table does not exist.
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            answer => answer?,
        };
        if !answer.is_inconsistent {
            break;
        }
    }
    Ok(answer.messages)
}

/// The messages that the kernel has sent so far in answer to a request.
#[derive(Default)]
struct Answer {
    messages: Vec<RouteNetlinkMessage>,
    /// The list changed during the dump.
    is_inconsistent: bool,
}

fn request(message: RouteNetlinkMessage, flags: u16) -> io::Result<Answer> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = 1;
    let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message.clone()));
    packet.finalize();
    let mut bytes = vec![0; packet.buffer_len()];
    packet.serialize(&mut bytes);
    let socket = Socket::new(NETLINK_ROUTE)?;
    SockRef::from(&socket).set_read_timeout(Some(REPLY_TIMEOUT))?;
    if let (RouteNetlinkMessage::GetRoute(_), NLM_F_DUMP) = (&message, flags) {
        // Filter in the kernel: a full table may have a million routes.
        let _ = socket.set_netlink_get_strict_chk(true);
    }
    socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
    let mut found = Answer::default();
    loop {
        let (answer, from) = socket.recv_from_full()?;
        // Other processes can send messages to this socket, too. The port number of the kernel is 0.
        if from.port_number() == 0 && read(&answer, &mut found)? {
            return Ok(found);
        }
    }
}

/// Adds the messages in `answer` to `found`. Returns true after the last message of the answer.
fn read(mut answer: &[u8], found: &mut Answer) -> io::Result<bool> {
    while let Some((message, rest)) = split_first(answer) {
        answer = rest;
        // Hermes uses no message that the codec does not know.
        let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) else { continue };
        found.is_inconsistent |= message.header.flags & NLM_F_DUMP_INTR != 0;
        match message.payload {
            NetlinkPayload::Done(_) => return Ok(true),
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
            NetlinkPayload::Error(_acknowledged) => return Ok(true),
            NetlinkPayload::InnerMessage(message) => found.messages.push(message),
            _ => {}
        }
    }
    Ok(false)
}

/// A subscription to notifications from its creation on.
#[derive(Debug)]
pub(crate) struct Notifications {
    socket: AsyncFd<Socket>,
    /// The receive buffer has overflowed and was not empty since. Until it is empty, the kernel drops all further
    /// notifications, and reports none of these losses (net/netlink/af_netlink.c: NETLINK_S_CONGESTED).
    is_congested: bool,
}

impl Notifications {
    /// Subscribes in the network namespace and on the runtime of the caller.
    ///
    /// # Errors
    /// No socket can be opened.
    pub(crate) fn of(groups: u32) -> io::Result<Self> {
        Self::open(NETLINK_ROUTE, groups)
    }

    /// Subscribes to changes of nftables tables. The kernel may load its module for that.
    ///
    /// # Errors
    /// The errors of [`Notifications::of`].
    pub(crate) fn of_tables() -> io::Result<Self> {
        Self::open(NETLINK_NETFILTER, NFTABLES_GROUP)
    }

    #[allow(unsafe_code)] // The registered descriptor must stay open and must not change.
    fn open(protocol: isize, groups: u32) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, groups))?;
        // SAFETY: the socket owns one descriptor, which stays open until it is dropped; no other code uses it.
        Ok(Self { socket: unsafe { AsyncFd::register(socket) }?, is_congested: false })
    }

    /// Receives the next notifications. `None`: the kernel dropped some. After an overflow it is returned twice: at
    /// once, and when the kernel delivers notifications again. Cancel safe.
    ///
    /// # Errors
    /// The errors of the socket.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Vec<RouteNetlinkMessage>>> {
        let Some(messages) = self.receive().await? else { return Ok(None) };
        let mut found = Answer::default();
        // An answer instead of a notification is ignored.
        let _ = read(&messages, &mut found);
        Ok(Some(found.messages))
    }

    /// Receives the next changes of tables, for a subscription of [`Notifications::of_tables`]. `None`: the kernel
    /// dropped some. Cancel safe.
    ///
    /// # Errors
    /// The errors of the socket.
    pub(crate) async fn next_tables(&mut self) -> io::Result<Option<Vec<TableChange>>> {
        let Some(messages) = self.receive().await? else { return Ok(None) };
        let (mut rest, mut found) = (messages.as_slice(), Vec::new());
        while let Some((message, behind)) = split_first(rest) {
            found.extend(table_change(message));
            rest = behind;
        }
        Ok(Some(found))
    }

    async fn receive(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let mut ready = self.socket.readable().await?;
            match ready.try_io(|io| io.get_ref().recv_from_full()) {
                // Other processes can send messages to this socket, too. The port number of the kernel is 0.
                Ok(Ok((messages, from))) if from.port_number() == 0 => return Ok(Some(messages)),
                Ok(Ok(_)) => {}
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    self.is_congested = true;
                    return Ok(None);
                }
                Ok(Err(error)) => return Err(error),
                Err(_would_block) if std::mem::take(&mut self.is_congested) => return Ok(None),
                Err(_would_block) => {}
            }
        }
    }
}

fn table_change(message: &[u8]) -> Option<TableChange> {
    let [kind, subsystem] = u16::from_ne_bytes(*message.get(4..)?.first_chunk()?).to_le_bytes();
    if subsystem != NFTABLES || !(kind == NEW_TABLE || DELETE_KINDS.contains(&kind)) {
        return None;
    }
    // A table of another family may have the name of one of our tables.
    if *message.get(HEADER)? != INET {
        return None;
    }
    let mut attributes = message.get(NETFILTER_HEADER..)?;
    loop {
        let length = usize::from(u16::from_ne_bytes(*attributes.first_chunk()?));
        let sort = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        if sort == TABLE_NAME {
            let name = attributes.get(4..length)?.split(|byte| *byte == 0).next()?;
            let name = String::from_utf8_lossy(name).into_owned();
            return Some(if kind == NEW_TABLE { TableChange::Created(name) } else { TableChange::Removed(name) });
        }
        attributes = attributes.get(length.max(4).next_multiple_of(4)..)?;
    }
}

/// Returns the first netlink message and the bytes after it. `None` if no complete message is left.
pub(crate) fn split_first(messages: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(*messages.first_chunk()?) as usize;
    if length < HEADER || length > messages.len() {
        return None;
    }
    let (message, rest) = messages.split_at(length);
    // Each message begins at an offset that is a multiple of four.
    Some((message, rest.get(length.next_multiple_of(4) - length..).unwrap_or_default()))
}

/// Duplicates a netlink socket.
///
/// # Errors
/// No file descriptor is left.
#[allow(unsafe_code)] // The crate's socket has no safe constructor from a descriptor.
pub(crate) fn duplicate(socket: &Socket) -> io::Result<Socket> {
    let fd = socket.as_fd().try_clone_to_owned()?;
    // SAFETY: the descriptor is open, and the new socket becomes its only owner.
    Ok(unsafe { Socket::from_raw_fd(fd.into_raw_fd()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_sys::protocols::NETLINK_USERSOCK;

    #[test]
    fn a_list_that_changed_meanwhile_is_known() {
        for (flags, is_inconsistent) in [(0, false), (NLM_F_DUMP_INTR, true)] {
            let mut header = NetlinkHeader::default();
            header.flags = flags;
            let link = RouteNetlinkMessage::NewLink(Default::default());
            let mut message = NetlinkMessage::new(header, NetlinkPayload::from(link));
            message.finalize();
            let mut bytes = vec![0; message.buffer_len()];
            message.serialize(&mut bytes);
            let mut answer = Answer::default();
            assert!(!read(&bytes, &mut answer).expect("an answer"));
            assert_eq!((answer.messages.len(), answer.is_inconsistent), (1, is_inconsistent));
        }
    }

    /// The kernel drops notifications between the overflow and the moment when the buffer is empty.
    #[tokio::test]
    async fn losses_after_an_overflow_are_reported_when_the_buffer_is_empty() {
        const GROUP: u32 = 1;
        // Each user may send to the groups of this protocol.
        let mut notifications = Notifications::open(NETLINK_USERSOCK, GROUP).expect("a subscription");
        let sender = Socket::new(NETLINK_USERSOCK).expect("a socket");
        let send = || sender.send_to(&[0; 4096], &SocketAddr::new(0, GROUP), 0);
        let buffer = SockRef::from(notifications.socket.get_ref()).recv_buffer_size().expect("a size");
        for _ in 0..buffer / 4096 + 1 {
            let _ = send();
        }
        assert_eq!(notifications.next().await.expect("a report"), None);
        // The buffer is full, so nothing tells of this one.
        let _ = send();
        let report = tokio::time::timeout(Duration::from_secs(10), notifications.next()).await;
        assert_eq!(report.expect("a report in time").expect("a report"), None);
        // Nothing was lost since.
        let report = tokio::time::timeout(Duration::from_millis(50), notifications.next()).await;
        assert!(report.is_err(), "a loss is reported without end");
    }

    /// A NFT_MSG_DELTABLE message of a family.
    fn gone(family: u8) -> Vec<u8> {
        let name = b"hermes-gw0\0\0";
        let attribute = [&(4 + 11_u16).to_ne_bytes()[..], &TABLE_NAME.to_ne_bytes(), name].concat();
        let length = (NETFILTER_HEADER + attribute.len()) as u32;
        let header = [&length.to_ne_bytes()[..], &[2, NFTABLES], &[0; 10], &[family, 0, 0, 0]].concat();
        [header, attribute].concat()
    }

    #[test]
    fn a_table_of_another_family_is_not_ours() {
        assert_eq!(table_change(&gone(INET)), Some(TableChange::Removed("hermes-gw0".to_owned())));
        // NFPROTO_IPV4.
        assert_eq!(table_change(&gone(2)), None);
    }
}
