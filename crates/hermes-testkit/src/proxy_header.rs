//! PROXY protocol v2 by hand, so that what a node sends and takes is held against the specification and not against
//! the node's own code.

use std::net::SocketAddr;

/// Version 2, command PROXY, TCP over IPv4 (HAProxy's `proxy-protocol.txt`, section 2.2).
///
/// # Panics
/// An address is not IPv4.
pub fn v2(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let (SocketAddr::V4(source), SocketAddr::V4(destination)) = (source, destination) else { panic!("IPv4 only") };
    let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c".to_vec();
    header.extend_from_slice(&source.ip().octets());
    header.extend_from_slice(&destination.ip().octets());
    header.extend_from_slice(&source.port().to_be_bytes());
    header.extend_from_slice(&destination.port().to_be_bytes());
    header
}
