//! Packets of a device for addresses that stand for names, as long as no session is for theirs.
//!
//! In: a prefix. Out: what the device sends there, but for those of its addresses that sessions hold: whoever reads it
//! begins such sessions. Never: a session, or what a name is.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use ipnet::IpNet;

use super::device::{Lead, LocalDevice};
use hermes_ip::claims::Scope;
use hermes_ip::mailbox::Mailbox;
use hermes_ip::owner::Owner;

/// A hold on a prefix, for what no narrower one takes.
pub(crate) struct Newcomers {
    pub(crate) local: Rc<LocalDevice>,
    pub(crate) prefix: IpNet,
    mailbox: Arc<Mailbox>,
    number: u64,
}

impl Newcomers {
    /// Takes the prefix, until this is dropped. `None`: it is somebody else's.
    pub(crate) fn of(local: &Rc<LocalDevice>, owner: &Owner, prefix: IpNet) -> Option<Self> {
        let mailbox = Arc::default();
        let number = local.device.claim(prefix, owner, &mailbox, Scope::default(), true).ok()?;
        Some(Self { local: local.clone(), prefix, mailbox, number })
    }

    /// The next batch of packets. `None`: the device is gone.
    pub(crate) async fn next(&self) -> Option<VecDeque<Bytes>> {
        let mut batch = VecDeque::new();
        std::future::poll_fn(|cx| self.mailbox.poll_take(cx, &mut batch)).await.then_some(batch)
    }
}

impl Drop for Newcomers {
    fn drop(&mut self) {
        self.local.device.release(self.prefix, self.number, Lead::Captured);
    }
}
