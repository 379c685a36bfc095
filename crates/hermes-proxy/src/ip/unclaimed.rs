//! Packets to virtual addresses of names that have no session yet.
//!
//! In: a prefix. Out: packets of the device to that prefix, except to addresses that sessions own; the reader begins
//! such sessions. Never: a session, or the meaning of a name.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use ipnet::IpNet;

use super::device::{LocalDevice, RouteScope};
use hermes_ip::address_owner::Owner;
use hermes_ip::claims::Scope;
use hermes_ip::mailbox::Mailbox;

/// A claim of a prefix, for packets that no more specific claim takes.
pub(crate) struct UnclaimedPackets {
    pub(crate) local: Rc<LocalDevice>,
    pub(crate) prefix: IpNet,
    mailbox: Arc<Mailbox>,
    number: u64,
}

impl UnclaimedPackets {
    /// Claims the prefix, until this is dropped. `None`: another owner has it.
    pub(crate) fn of(local: &Rc<LocalDevice>, owner: &Owner, prefix: IpNet) -> Option<Self> {
        let mailbox = Arc::default();
        let number = local.device.claim(prefix, owner, &mailbox, Scope::default(), true).ok()?;
        Some(Self { local: local.clone(), prefix, mailbox, number })
    }

    /// The next batch of packets. `None`: the device was deleted.
    pub(crate) async fn next(&self) -> Option<VecDeque<Bytes>> {
        let mut batch = VecDeque::new();
        std::future::poll_fn(|cx| self.mailbox.poll_take(cx, &mut batch)).await.then_some(batch)
    }
}

impl Drop for UnclaimedPackets {
    fn drop(&mut self) {
        self.local.device.release(self.prefix, self.number, RouteScope::Captured);
    }
}
