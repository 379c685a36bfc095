//! Forwards datagrams that arrived at the wrong socket to their reader: another worker of this process, or a
//! predecessor process that still finishes its connections after a takeover.
//!
//! In: datagrams with the metadata of the receiving socket. Out: the same datagrams and metadata at the other end of a
//! pair of Unix datagram sockets. The sender drops and counts datagrams that do not fit into the socket buffer.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;

use nix::sys::socket::{MsgFlags, recvmsg, sendmsg};
use quinn_udp::{EcnCodepoint, RecvMeta};
use socket2::SockRef;

/// Size of the socket buffer, in bytes, so that a burst survives a scheduling delay.
const BUFFER: usize = 4 << 20;
/// Bytes of the metadata: source and destination with 16 bytes and an address family each; port; scope; ECN; segment
/// size.
const HEAD: usize = 17 + 17 + 2 + 4 + 1 + 2;

/// A pair of Unix datagram sockets that leads to one reader.
#[derive(Debug)]
pub(super) struct DatagramForwarder {
    pub(super) receiver: UnixDatagram,
    pub(super) sender: UnixDatagram,
}

impl DatagramForwarder {
    pub(super) fn open() -> io::Result<Self> {
        let (receiver, sender) = UnixDatagram::pair()?;
        for end in [&receiver, &sender] {
            end.set_nonblocking(true)?;
            // The kernel may grant less, which still works.
            let _ = SockRef::from(end).set_send_buffer_size(BUFFER);
        }
        Ok(Self { receiver, sender })
    }
}

/// The reason why a datagram was not forwarded.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ForwardError {
    /// The socket buffer is full.
    Full,
    /// The receiving end is closed.
    Closed,
}

/// Sends a message (one datagram, or several of one length) with its metadata.
pub(super) fn send(to: &UnixDatagram, meta: &RecvMeta, contents: &[u8]) -> Result<(), ForwardError> {
    let head = put(meta);
    let slices = [IoSlice::new(&head), IoSlice::new(contents)];
    match sendmsg::<()>(to.as_raw_fd(), &slices, &[], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL, None) {
        Ok(_) => Ok(()),
        Err(nix::Error::ECONNREFUSED | nix::Error::ECONNRESET | nix::Error::EPIPE | nix::Error::ENOTCONN) => {
            Err(ForwardError::Closed)
        }
        Err(_) => Err(ForwardError::Full),
    }
}

/// Receives a message that [`send`] sent. A malformed message is returned without contents, and the caller ignores it.
///
/// # Errors
/// `WouldBlock` if no message is waiting.
pub(super) fn receive(from: &impl AsRawFd, room: &mut IoSliceMut<'_>) -> io::Result<RecvMeta> {
    let mut head = [0; HEAD];
    let mut slices = [IoSliceMut::new(&mut head), IoSliceMut::new(room)];
    let got = recvmsg::<()>(from.as_raw_fd(), &mut slices, None, MsgFlags::MSG_DONTWAIT)?.bytes;
    let mut meta = parse(&head);
    meta.len = got.saturating_sub(HEAD);
    meta.stride = if meta.stride == 0 { meta.len } else { meta.stride };
    Ok(meta)
}

/// Wraps the sending end that another process passed to this one.
pub(super) fn adopt(fd: OwnedFd) -> UnixDatagram {
    fd.into()
}

fn put(meta: &RecvMeta) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    put_ip(Some(meta.addr.ip()), &mut head[..17]);
    put_ip(meta.dst_ip, &mut head[17..34]);
    head[34..36].copy_from_slice(&meta.addr.port().to_be_bytes());
    if let SocketAddr::V6(v6) = meta.addr {
        head[36..40].copy_from_slice(&v6.scope_id().to_be_bytes());
    }
    head[40] = meta.ecn.map_or(0, |ecn| ecn as u8);
    head[41..].copy_from_slice(&u16::try_from(meta.stride).unwrap_or(0).to_be_bytes());
    head
}

fn put_ip(ip: Option<IpAddr>, out: &mut [u8]) {
    let (kind, bits) = match ip {
        None => (0, 0),
        Some(IpAddr::V4(v4)) => (4, u128::from(v4.to_bits())),
        Some(IpAddr::V6(v6)) => (6, v6.to_bits()),
    };
    out[0] = kind;
    out[1..].copy_from_slice(&bits.to_be_bytes());
}

fn parse(head: &[u8; HEAD]) -> RecvMeta {
    let mut meta = RecvMeta::default();
    let port = u16::from_be_bytes([head[34], head[35]]);
    let scope = u32::from_be_bytes([head[36], head[37], head[38], head[39]]);
    meta.addr = match parse_ip(&head[..17]) {
        Some(IpAddr::V6(v6)) => SocketAddrV6::new(v6, port, 0, scope).into(),
        Some(v4) => (v4, port).into(),
        None => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    meta.dst_ip = parse_ip(&head[17..34]);
    meta.ecn = EcnCodepoint::from_bits(head[40]);
    meta.stride = usize::from(u16::from_be_bytes([head[41], head[42]]));
    meta
}

fn parse_ip(bytes: &[u8]) -> Option<IpAddr> {
    let bits = u128::from_be_bytes(bytes[1..].try_into().ok()?);
    match bytes[0] {
        4 => Some(IpAddr::V4((bits as u32).into())),
        6 => Some(IpAddr::V6(bits.into())),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn meta(addr: &str, dst: Option<&str>, ecn: Option<EcnCodepoint>, stride: usize) -> RecvMeta {
        let dst_ip = dst.map(|ip| ip.parse().unwrap());
        RecvMeta { addr: addr.parse().unwrap(), dst_ip, ecn, stride, ..RecvMeta::default() }
    }

    #[test]
    fn a_message_arrives_with_all_that_is_known_of_it() {
        let forwarder = DatagramForwarder::open().unwrap();
        let all = [
            meta("192.0.2.1:443", Some("192.0.2.9"), Some(EcnCodepoint::Ce), 1200),
            meta("[fe80::1%3]:65535", Some("2001:db8::1"), None, 3),
            meta("[2001:db8::2]:1", None, Some(EcnCodepoint::Ect0), 5),
        ];
        for sent in all {
            send(&forwarder.sender, &sent, b"there").unwrap();
            let mut room = [0; 64];
            let got = receive(&forwarder.receiver, &mut IoSliceMut::new(&mut room)).unwrap();
            assert_eq!((got.addr, got.dst_ip, got.ecn), (sent.addr, sent.dst_ip, sent.ecn));
            assert_eq!((got.stride, &room[..got.len]), (sent.stride, &b"there"[..]));
        }
    }

    #[test]
    fn the_largest_message_fits_and_a_flood_is_cut() {
        let forwarder = DatagramForwarder::open().unwrap();
        let meta = meta("192.0.2.1:443", None, None, 1400);
        let large = vec![7; 65_535];
        send(&forwarder.sender, &meta, &large).unwrap();
        let mut room = vec![0; 1 << 17];
        let got = receive(&forwarder.receiver, &mut IoSliceMut::new(&mut room)).unwrap();
        assert_eq!(room[..got.len], large);
        let lost = (0..100_000).map(|_| send(&forwarder.sender, &meta, &large)).find(Result::is_err);
        assert_eq!(lost, Some(Err(ForwardError::Full)));
    }

    #[test]
    fn an_end_that_is_gone_is_told() {
        let DatagramForwarder { receiver, sender } = DatagramForwarder::open().unwrap();
        drop(receiver);
        assert_eq!(send(&sender, &meta("192.0.2.1:443", None, None, 1), b"x"), Err(ForwardError::Closed));
    }
}
