//! Layer 3: the TUN devices of this host, and the ends of CONNECT-IP tunnels at them (RFC 9484).
//!
//! In: packets of a device and of tunnels. Out: the same packets, filtered by what their session may send. A dropped
//! packet is counted, and its sender is notified if the RFCs require that. Never: a packet with another session's
//! address.

mod device;
mod explain;
mod link;
mod tunnel_end;
mod unclaimed;

pub(crate) use self::device::{Device, DeviceGuard, Devices, FAR_ENDS, LocalDevice, Share};
pub use self::explain::Packet;
pub(crate) use self::link::{Link, poll_send_into};
pub(crate) use self::tunnel_end::End;
pub(crate) use self::unclaimed::UnclaimedPackets;
pub(crate) use hermes_ip::address_owner::Owner;
pub(crate) use hermes_ip::flow_translation::{FlowKey, Outcome, Translation, Transport};
pub(crate) use hermes_ip::leases::AddressLeases;
pub(crate) use hermes_ip::mailbox::Mailbox;
pub(crate) use hermes_ip::packet_filter::{Direction, Rules, Verdict};
pub(crate) use hermes_ip::table::Table;
