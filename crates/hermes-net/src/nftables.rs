//! nftables tables that the kernel removes with their process, by netlink.
//!
//! In: the name of a table of the `inet` family, with chains and rules as lists of expressions. Out: an [`OwnedTable`].
//! The table carries the flag `owner`: only its netlink socket can change it, and the kernel removes it when the socket
//! closes, even after SIGKILL. Never: a run of another program, or a change of another process's table.

mod expression;

use std::io;
use std::sync::Mutex;
use std::time::Duration;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use socket2::SockRef;

pub(crate) use self::expression::{Expression, Verdict};
use crate::netlink::attribute::{Attributes, push_header, set_length};

/// The kernel answers while it handles the batch, so an answer that takes longer than this is lost.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// linux/netfilter/nfnetlink.h: NFNL_SUBSYS_NFTABLES, NFNL_MSG_BATCH_BEGIN and NFNL_MSG_BATCH_END.
const NFTABLES: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// linux/netfilter/nf_tables.h: NFT_MSG_*.
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const DELETE_RULE: u16 = 8;
/// linux/netfilter.h: NFPROTO_UNSPEC, NFPROTO_INET.
const UNSPECIFIED: u8 = 0;
const INET: u8 = 1;
/// linux/netlink.h: NLM_F_*.
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
/// NFT_TABLE_F_OWNER.
const OWNER: u32 = 2;
/// Bytes of `struct nlmsghdr`, and the type of an answer with an error or an acknowledgement.
const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;

/// The hook of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    /// Packets that arrive at this machine, before routing.
    Prerouting = 0,
    /// Packets of this machine's own sockets.
    Output = 3,
}

/// A base chain with its rules.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    /// The name of the chain.
    pub(crate) name: &'static str,
    /// `filter` or `route`.
    pub(crate) kind: &'static str,
    /// The source of its packets.
    pub(crate) hook: Hook,
    /// The order among the chains of a hook; lower values come first.
    pub(crate) priority: i32,
    /// The rules, each a list of expressions.
    pub(crate) rules: Vec<Vec<Expression>>,
}

/// A table of this process. The kernel removes it when the value is dropped.
#[derive(Debug)]
pub(crate) struct OwnedTable {
    name: String,
    socket: Mutex<Socket>,
}

impl OwnedTable {
    /// Creates a table with these chains, in one transaction.
    ///
    /// # Errors
    /// The kernel's error: `EEXIST` or `EPERM` if another process has a table of this name, `EOPNOTSUPP` before Linux
    /// 5.12, `ENOENT` for an expression that the kernel does not have.
    pub(crate) fn create(name: String, chains: &[Chain]) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        SockRef::from(&socket).set_read_timeout(Some(REPLY_TIMEOUT))?;
        socket.bind_auto()?;
        let mut batch = Batch::new();
        batch.message(NEW_TABLE, CREATE, |attributes| {
            attributes.text(1, &name);
            attributes.be32(2, OWNER);
        });
        for chain in chains {
            batch.message(NEW_CHAIN, CREATE, |attributes| {
                attributes.text(1, &name);
                attributes.text(3, chain.name);
                attributes.nested(4, |hook| {
                    hook.be32(1, chain.hook as u32);
                    hook.be32(2, chain.priority.cast_unsigned());
                });
                attributes.text(7, chain.kind);
            });
        }
        batch.rules(&name, chains);
        batch.send(&socket)?;
        Ok(Self { name, socket: Mutex::new(socket) })
    }

    /// Replaces the rules of the table's chains, in one transaction. The chains themselves stay.
    ///
    /// # Errors
    /// The kernel's error; the old rules stay then.
    pub(crate) fn replace_rules(&self, chains: &[Chain]) -> io::Result<()> {
        let mut batch = Batch::new();
        for chain in chains {
            batch.message(DELETE_RULE, 0, |attributes| {
                attributes.text(1, &self.name);
                attributes.text(2, chain.name);
            });
        }
        batch.rules(&self.name, chains);
        let socket = self.socket.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        batch.send(&socket)
    }
}

/// Whether a table of the `inet` family exists.
///
/// # Errors
/// No netlink socket, or the kernel does not answer.
pub(crate) fn exists(name: &str) -> io::Result<bool> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    SockRef::from(&socket).set_read_timeout(Some(REPLY_TIMEOUT))?;
    socket.bind_auto()?;
    let mut bytes = Vec::new();
    push_header(&mut bytes, NFTABLES << 8 | GET_TABLE, REQUEST | ACK, 1, (INET, 0));
    Attributes::new(&mut bytes).text(1, name);
    set_length(&mut bytes, 0);
    match transact(&socket, &bytes, 1) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        // The owner is another process.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The messages of one transaction.
struct Batch {
    bytes: Vec<u8>,
    /// The offset of the last message, and its sequence number.
    last: (usize, u32),
}

impl Batch {
    fn new() -> Self {
        let mut bytes = Vec::new();
        push_header(&mut bytes, BATCH_BEGIN, REQUEST, 0, (UNSPECIFIED, NFTABLES));
        set_length(&mut bytes, 0);
        Self { bytes, last: (0, 0) }
    }

    fn message(&mut self, kind: u16, flags: u16, fill: impl FnOnce(&mut Attributes<'_>)) {
        let (start, sequence) = (self.bytes.len(), self.last.1 + 1);
        push_header(&mut self.bytes, NFTABLES << 8 | kind, REQUEST | flags, sequence, (INET, 0));
        fill(&mut Attributes::new(&mut self.bytes));
        set_length(&mut self.bytes, start);
        self.last = (start, sequence);
    }

    fn rules(&mut self, table: &str, chains: &[Chain]) {
        for chain in chains {
            for rule in &chain.rules {
                self.message(NEW_RULE, CREATE | APPEND, |attributes| {
                    attributes.text(1, table);
                    attributes.text(2, chain.name);
                    attributes.nested(4, |list| rule.iter().for_each(|expression| expression.encode(list)));
                });
            }
        }
    }

    /// Sends the transaction, and waits for the acknowledgement of its last message.
    fn send(mut self, socket: &Socket) -> io::Result<()> {
        let (start, sequence) = self.last;
        if let Some([low, high]) = self.bytes.get_mut(start + 6..).and_then(|flags| flags.first_chunk_mut()) {
            let flags = u16::from_ne_bytes([*low, *high]) | ACK;
            [*low, *high] = flags.to_ne_bytes();
        }
        let end = self.bytes.len();
        push_header(&mut self.bytes, BATCH_END, REQUEST, 0, (UNSPECIFIED, NFTABLES));
        set_length(&mut self.bytes, end);
        transact(socket, &self.bytes, sequence)
    }
}

/// Sends messages, and reads answers up to an error or the acknowledgement of message `last`.
fn transact(socket: &Socket, bytes: &[u8], last: u32) -> io::Result<()> {
    socket.send_to(bytes, &SocketAddr::new(0, 0), 0)?;
    loop {
        let (answer, from) = socket.recv_from_full()?;
        // Other processes can send messages to this socket, too. The port number of the kernel is 0.
        if from.port_number() != 0 {
            continue;
        }
        let mut rest = &answer[..];
        while let Some((message, others)) = crate::netlink::split_first(rest) {
            rest = others;
            let kind = message.get(4..6).and_then(|kind| kind.first_chunk()).map(|kind| u16::from_ne_bytes(*kind));
            let number = message.get(8..12).and_then(|number| number.first_chunk()).map(|at| u32::from_ne_bytes(*at));
            let code = message.get(HEADER..).and_then(|code| code.first_chunk()).map(|code| i32::from_ne_bytes(*code));
            match (kind, code) {
                (Some(NLMSG_ERROR), Some(0)) if number == Some(last) => return Ok(()),
                (Some(NLMSG_ERROR), Some(code)) if code != 0 => return Err(io::Error::from_raw_os_error(-code)),
                _ => {}
            }
        }
    }
}
