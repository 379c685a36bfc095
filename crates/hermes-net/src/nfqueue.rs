//! Packets that the kernel holds until user space decides (NFQUEUE).
//!
//! In: the number of a queue, to which a rule sends packets. Out: the first bytes of each packet, and a verdict for it
//! later. If the queue is full, or no process reads it, packets pass as if there were no rule. Never: a changed payload.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use tokio::io::unix::AsyncFd;

use crate::netlink::attribute::{self, Attributes, push_header, set_length};

/// linux/netfilter/nfnetlink.h: NFNL_SUBSYS_QUEUE.
const QUEUE: u16 = 3;
/// linux/netfilter/nfnetlink_queue.h: NFQNL_MSG_*.
const PACKET: u16 = 0;
const VERDICT: u16 = 1;
const CONFIG: u16 = 2;
/// NFQNL_CFG_CMD_BIND; NFQNL_COPY_PACKET; NFQA_CFG_F_FAIL_OPEN.
const BIND: u8 = 1;
const COPY_PACKET: u8 = 2;
const FAIL_OPEN: u32 = 1;
/// NFQA_PACKET_HDR, NFQA_VERDICT_HDR, NFQA_MARK, NFQA_PAYLOAD.
const PACKET_HEADER: u16 = 1;
const VERDICT_HEADER: u16 = 2;
const MARK: u16 = 3;
const PAYLOAD: u16 = 10;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const NLMSG_ERROR: u16 = 2;
/// Copied bytes of a packet: a whole SYN, with data (TCP Fast Open).
const COPIED: u32 = 2048;
/// Receive buffer for a burst of SYNs. A netlink message about one takes about 500 bytes of it.
const RECEIVE_BUFFER: usize = 4 << 20;

/// The verdict on a held packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketVerdict {
    /// Drop the packet silently.
    Drop,
    /// Let the packet continue after the hook function that held it.
    Accept,
    /// Let the packet pass the same hook function again, with this mark.
    Repeat(u32),
}

/// A held packet.
#[derive(Clone, Debug)]
pub struct HeldPacket {
    /// The number of the packet in the queue, for the verdict.
    pub id: u32,
    /// The first bytes of the packet, from the IP header on.
    pub bytes: Vec<u8>,
}

/// A queue of held packets. The kernel lets held packets pass when the last descriptor of the queue closes.
#[derive(Debug)]
pub struct PacketQueue {
    socket: Socket,
    number: u16,
}

impl PacketQueue {
    /// Binds a queue, in the network namespace of the caller. At most `length` packets wait in it; others pass.
    ///
    /// # Errors
    /// `EBUSY`: another process reads the queue. `EPERM`: CAP_NET_ADMIN is missing.
    pub fn bind(number: u16, length: u32) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        // Without the privilege for a larger buffer, the default remains; bursts beyond it pass.
        let _ = socket.set_rx_buf_sz(RECEIVE_BUFFER);
        let this = Self { socket, number };
        this.configure(|attributes| attributes.bytes(1, &[BIND, 0, 0, 0]))?;
        this.configure(|attributes| {
            attributes.bytes(2, &[&COPIED.to_be_bytes()[..], &[COPY_PACKET]].concat());
            attributes.be32(3, length);
            attributes.be32(4, FAIL_OPEN);
            attributes.be32(5, FAIL_OPEN);
        })?;
        this.socket.set_non_blocking(true)?;
        Ok(this)
    }

    /// Duplicates the descriptor of the queue.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn duplicate(&self) -> io::Result<Self> {
        Ok(Self { socket: crate::netlink::duplicate(&self.socket)?, number: self.number })
    }

    /// Returns the number of the queue.
    pub fn number(&self) -> u16 {
        self.number
    }

    fn configure(&self, fill: impl FnOnce(&mut Attributes<'_>)) -> io::Result<()> {
        let mut bytes = Vec::new();
        push_header(&mut bytes, QUEUE << 8 | CONFIG, REQUEST | ACK, 1, (0, self.number));
        fill(&mut Attributes::new(&mut bytes));
        set_length(&mut bytes, 0);
        self.socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
        let (answer, _) = self.socket.recv_from_full()?;
        match answer.get(16..).and_then(|code| code.first_chunk()).map(|code| i32::from_ne_bytes(*code)) {
            Some(0) if kind(&answer) == Some(NLMSG_ERROR) => Ok(()),
            Some(code) if code < 0 => Err(io::Error::from_raw_os_error(-code)),
            _ => Err(io::Error::other("the kernel did not acknowledge the queue")),
        }
    }

    /// Sends the verdict on a held packet.
    ///
    /// # Errors
    /// The kernel's error. No error is returned for a packet that the kernel no longer holds.
    pub fn decide(&self, id: u32, verdict: PacketVerdict) -> io::Result<()> {
        let code: u32 = match verdict {
            PacketVerdict::Drop => 0,
            PacketVerdict::Accept => 1,
            PacketVerdict::Repeat(_) => 4,
        };
        let mut bytes = Vec::with_capacity(48);
        push_header(&mut bytes, QUEUE << 8 | VERDICT, REQUEST, 0, (0, self.number));
        let mut attributes = Attributes::new(&mut bytes);
        attributes.bytes(VERDICT_HEADER, &[code.to_be_bytes(), id.to_be_bytes()].concat());
        if let PacketVerdict::Repeat(mark) = verdict {
            attributes.be32(MARK, mark);
        }
        set_length(&mut bytes, 0);
        self.socket.send_to(&bytes, &SocketAddr::new(0, 0), 0).map(drop)
    }
}

impl std::os::fd::AsRawFd for PacketQueue {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.socket.as_raw_fd()
    }
}

/// Reads a queue on the runtime of the caller.
#[derive(Debug)]
pub struct QueueReader(AsyncFd<PacketQueue>);

impl QueueReader {
    /// Starts to read.
    ///
    /// # Errors
    /// The runtime cannot watch the descriptor.
    #[allow(unsafe_code)] // The registered descriptor must stay open and must not change.
    pub fn new(queue: PacketQueue) -> io::Result<Self> {
        // SAFETY: the queue owns one descriptor, which stays open until it is dropped; no other code uses it.
        Ok(Self(unsafe { AsyncFd::register(queue) }?))
    }

    /// The queue, for verdicts.
    pub fn queue(&self) -> &PacketQueue {
        self.0.get_ref()
    }

    /// Waits for held packets, and appends them to `into`. `false`: the kernel let some pass because the receive buffer
    /// was full. Cancel safe.
    ///
    /// # Errors
    /// The errors of the socket.
    pub async fn next(&self, into: &mut Vec<HeldPacket>) -> io::Result<bool> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|io| io.get_ref().socket.recv_from_full()) {
                // Other processes can send messages to this socket, too. The port number of the kernel is 0.
                Ok(Ok((messages, from))) if from.port_number() == 0 => {
                    read(&messages, into);
                    return Ok(true);
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(false),
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

fn kind(message: &[u8]) -> Option<u16> {
    message.get(4..)?.first_chunk().map(|kind| u16::from_ne_bytes(*kind))
}

/// Appends the packets of these messages.
fn read(mut messages: &[u8], into: &mut Vec<HeldPacket>) {
    while let Some((message, rest)) = crate::netlink::split_first(messages) {
        messages = rest;
        if kind(message) != Some(QUEUE << 8 | PACKET) {
            continue;
        }
        let (mut id, mut bytes) = (None, Vec::new());
        for (kind, value) in attribute::read(message) {
            match kind {
                PACKET_HEADER => id = value.first_chunk().map(|id| u32::from_be_bytes(*id)),
                PAYLOAD => bytes = value.to_vec(),
                _ => {}
            }
        }
        into.extend(id.map(|id| HeldPacket { id, bytes }));
    }
}
