//! Expressions of nftables rules (linux/netfilter/nf_tables.h), as far as Hermes uses them.
//!
//! In: an [`Expression`]. Out: its netlink attributes. Rules use two registers: 1 for what is loaded, and 2 for a port.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use crate::netlink::attribute::Attributes;

/// Registers of 16 bytes: NFT_REG_1 and NFT_REG_2; and that of verdicts.
const REGISTER: u32 = 1;
const PORT_REGISTER: u32 = 2;
const VERDICT_REGISTER: u32 = 0;
/// NFT_META_*.
const META_MARK: u32 = 3;
const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;
/// NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER.
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
/// Offsets of the destination address, of the destination port, and of the flags of TCP.
const DESTINATION_V4: u32 = 16;
const DESTINATION_V6: u32 = 24;
const DESTINATION_PORT: u32 = 2;
const TCP_FLAGS: u32 = 13;
/// NFPROTO_IPV4, NFPROTO_IPV6.
const IPV4: u8 = 2;
const IPV6: u8 = 10;
/// NFT_QUEUE_FLAG_BYPASS, which is also NFQ_FLAG_BYPASS.
const QUEUE_BYPASS: u16 = 1;
/// NFT_CMP_EQ.
const EQUAL: u32 = 0;

/// The end of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The packet passes this hook function.
    Accept = 1,
    /// The evaluation of the chain ends.
    Return = -5,
}

/// A part of a rule: a condition, a statement or a verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expression {
    /// The packet mark equals this value.
    MarkIs(u32),
    /// The packet mark has these bits under the mask.
    MarkIn { bits: u32, mask: u32 },
    /// Sets the packet mark.
    SetMark(u32),
    /// The transport protocol has this number.
    Protocol(u8),
    /// A TCP segment with SYN, and without ACK, RST and FIN.
    TcpSyn,
    /// The destination address is in this prefix.
    To(IpNet),
    /// The destination port, of TCP or UDP, has this number.
    ToPort(u16),
    /// The destination address belongs to one other machine.
    ToOtherMachine,
    /// A transparent socket of this machine receives the packet.
    TransparentSocket,
    /// The mark of the socket that receives the packet equals this value.
    SocketMarkIs(u32),
    /// The packet is of this IP version.
    Version4(bool),
    /// A hash of the flow, the same in both directions, modulo `modulus` is this value.
    FlowHashIs { modulus: u32, value: u32 },
    /// Delivers the packet to the transparent socket with this address.
    TproxyTo(SocketAddr),
    /// Queues the packet to user space. Without a reader it passes this hook function.
    Queue(u16),
    /// The same, by the extension of iptables, for kernels without the expression `queue`.
    QueueByTarget(u16),
    /// Answers with a TCP reset, and drops the packet.
    RejectWithReset,
    /// Answers that the destination is unreachable, and drops the packet.
    RejectUnreachable,
    /// Keeps the packet out of connection tracking.
    NoTrack,
    /// Ends the rule.
    Verdict(Verdict),
}

impl Expression {
    /// Appends the elements of this expression to the list of a rule.
    pub(super) fn encode(&self, list: &mut Attributes<'_>) {
        match self {
            Self::MarkIs(mark) => {
                load_meta(list, META_MARK);
                compare(list, EQUAL, &mark.to_ne_bytes());
            }
            Self::MarkIn { bits, mask: under } => {
                load_meta(list, META_MARK);
                mask(list, &under.to_ne_bytes());
                compare(list, EQUAL, &bits.to_ne_bytes());
            }
            Self::Protocol(number) => {
                load_meta(list, META_L4PROTO);
                compare(list, EQUAL, &[*number]);
            }
            Self::TcpSyn => {
                payload(list, TRANSPORT_HEADER, TCP_FLAGS, 1);
                // FIN, SYN, RST and ACK.
                mask(list, &[0x17]);
                compare(list, EQUAL, &[0x02]);
            }
            Self::To(prefix) => to(list, *prefix),
            Self::ToPort(port) => {
                payload(list, TRANSPORT_HEADER, DESTINATION_PORT, 2);
                compare(list, EQUAL, &port.to_be_bytes());
            }
            Self::ToOtherMachine => {
                element(list, "fib", |data| {
                    data.be32(1, REGISTER);
                    // NFT_FIB_RESULT_ADDRTYPE of NFTA_FIB_F_DADDR.
                    data.be32(2, 3);
                    data.be32(3, 2);
                });
                compare(list, EQUAL, &u32::from(libc::RTN_UNICAST).to_ne_bytes());
            }
            Self::TransparentSocket => {
                load_socket(list, 0);
                compare(list, EQUAL, &[1]);
            }
            Self::SocketMarkIs(mark) => {
                load_socket(list, 1);
                compare(list, EQUAL, &mark.to_ne_bytes());
            }
            Self::Version4(is_v4) => {
                load_meta(list, META_NFPROTO);
                compare(list, EQUAL, &[if *is_v4 { IPV4 } else { IPV6 }]);
            }
            Self::FlowHashIs { modulus, value } => {
                element(list, "hash", |data| {
                    data.be32(2, REGISTER);
                    data.be32(4, *modulus);
                    // NFT_HASH_SYM.
                    data.be32(7, 1);
                });
                compare(list, EQUAL, &value.to_ne_bytes());
            }
            statement => statement.encode_statement(list),
        }
    }

    /// Appends the elements of a statement or a verdict.
    fn encode_statement(&self, list: &mut Attributes<'_>) {
        match self {
            Self::SetMark(mark) => {
                immediate(list, REGISTER, &mark.to_ne_bytes());
                element(list, "meta", |data| {
                    data.be32(2, META_MARK);
                    data.be32(3, REGISTER);
                });
            }
            Self::TproxyTo(to) => {
                match to.ip() {
                    IpAddr::V4(address) => immediate(list, REGISTER, &address.octets()),
                    IpAddr::V6(address) => immediate(list, REGISTER, &address.octets()),
                }
                immediate(list, PORT_REGISTER, &to.port().to_be_bytes());
                element(list, "tproxy", |data| {
                    data.be32(1, u32::from(if to.is_ipv4() { IPV4 } else { IPV6 }));
                    data.be32(2, REGISTER);
                    data.be32(3, PORT_REGISTER);
                });
            }
            Self::Queue(number) => element(list, "queue", |data| {
                data.be16(1, *number);
                data.be16(2, 1);
                data.be16(3, QUEUE_BYPASS);
            }),
            Self::QueueByTarget(number) => element(list, "target", |data| {
                data.text(1, "NFQUEUE");
                data.be32(2, 3);
                // struct xt_NFQ_info_v3, padded to eight bytes.
                let info = [*number, 1, QUEUE_BYPASS, 0].map(u16::to_ne_bytes);
                data.bytes(3, info.as_flattened());
            }),
            Self::RejectWithReset => element(list, "reject", |data| {
                // NFT_REJECT_TCP_RST.
                data.be32(1, 1);
            }),
            Self::RejectUnreachable => element(list, "reject", |data| {
                // NFT_REJECT_ICMPX_UNREACH with NFT_REJECT_ICMPX_HOST_UNREACH.
                data.be32(1, 2);
                data.bytes(2, &[2]);
            }),
            Self::NoTrack => element(list, "notrack", |_| {}),
            Self::Verdict(verdict) => element(list, "immediate", |data| {
                data.be32(1, VERDICT_REGISTER);
                data.nested(2, |value| value.nested(2, |code| code.be32(1, (*verdict as i32).cast_unsigned())));
            }),
            // `encode` has appended the conditions.
            _ => {}
        }
    }
}

/// Compares the destination address with a prefix. The version is compared first, since the table serves both.
fn to(list: &mut Attributes<'_>, prefix: IpNet) {
    Expression::Version4(prefix.addr().is_ipv4()).encode(list);
    if prefix.prefix_len() == 0 {
        return;
    }
    let (address, netmask): (Vec<u8>, Vec<u8>) = match (prefix.network(), prefix.netmask()) {
        (IpAddr::V4(address), IpAddr::V4(netmask)) => (address.octets().to_vec(), netmask.octets().to_vec()),
        (IpAddr::V6(address), IpAddr::V6(netmask)) => (address.octets().to_vec(), netmask.octets().to_vec()),
        _ => return,
    };
    let offset = if address.len() == 4 { DESTINATION_V4 } else { DESTINATION_V6 };
    payload(list, NETWORK_HEADER, offset, address.len() as u32);
    mask(list, &netmask);
    compare(list, EQUAL, &address);
}

/// Appends one element: the name of an expression and its attributes.
fn element(list: &mut Attributes<'_>, name: &str, fill: impl FnOnce(&mut Attributes<'_>)) {
    // NFTA_LIST_ELEM of NFTA_EXPR_NAME and NFTA_EXPR_DATA.
    list.nested(1, |expression| {
        expression.text(1, name);
        expression.nested(2, fill);
    });
}

fn load_meta(list: &mut Attributes<'_>, key: u32) {
    element(list, "meta", |data| {
        data.be32(1, REGISTER);
        data.be32(2, key);
    });
}

fn load_socket(list: &mut Attributes<'_>, key: u32) {
    element(list, "socket", |data| {
        data.be32(1, key);
        data.be32(2, REGISTER);
    });
}

fn payload(list: &mut Attributes<'_>, base: u32, offset: u32, length: u32) {
    element(list, "payload", |data| {
        data.be32(1, REGISTER);
        data.be32(2, base);
        data.be32(3, offset);
        data.be32(4, length);
    });
}

fn mask(list: &mut Attributes<'_>, bits: &[u8]) {
    element(list, "bitwise", |data| {
        data.be32(1, REGISTER);
        data.be32(2, REGISTER);
        data.be32(3, bits.len() as u32);
        data.nested(4, |value| value.bytes(1, bits));
        data.nested(5, |value| value.bytes(1, &vec![0; bits.len()]));
    });
}

fn compare(list: &mut Attributes<'_>, operator: u32, with: &[u8]) {
    element(list, "cmp", |data| {
        data.be32(1, REGISTER);
        data.be32(2, operator);
        data.nested(3, |value| value.bytes(1, with));
    });
}

fn immediate(list: &mut Attributes<'_>, register: u32, value: &[u8]) {
    element(list, "immediate", |data| {
        data.be32(1, register);
        data.nested(2, |data| data.bytes(1, value));
    });
}
