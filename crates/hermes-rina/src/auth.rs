//! Keys, tags, cookies and random numbers of a DIF, all from HMAC-SHA256.
//!
//! In: the shared key, the name of the DIF, and a seed. Out: tags of management PDUs, stateless cookies, session keys,
//! unpredictable numbers. Never: a clock or a source of entropy of its own.
//!
//! M_CONNECT and M_CONNECT_R carry tags under the key of the DIF. All other management PDUs carry tags under the key of
//! the session, which depends on the nonce of the initiator and on the cookie, which is the nonce of the responder.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use aws_lc_rs::{constant_time, hmac};
use bytes::{BufMut, Bytes, BytesMut};

use crate::message::{Cookie, Nonce, TAG_LEN};

/// Time for which a cookie is valid.
pub(crate) const COOKIE_LIFETIME: Duration = Duration::from_secs(10);

/// A key for tags.
#[derive(Clone)]
pub(crate) struct Key(hmac::Key);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

/// The side of an enrolment. It is part of each tag, so that a PDU cannot be reflected to its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The side that sent M_CONNECT.
    Initiator,
    /// The side that answered.
    Responder,
}

impl Role {
    pub(crate) fn other(self) -> Self {
        match self {
            Role::Initiator => Role::Responder,
            Role::Responder => Role::Initiator,
        }
    }
}

impl Key {
    fn new(bytes: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, bytes))
    }

    fn derive(&self, parts: &[&[u8]]) -> Self {
        Self::new(self.sign(parts).as_ref())
    }

    fn sign(&self, parts: &[&[u8]]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.0);
        parts.iter().for_each(|part| context.update(part));
        context.sign()
    }

    fn short(&self, parts: &[&[u8]]) -> [u8; TAG_LEN] {
        let mut tag = [0; TAG_LEN];
        tag.iter_mut().zip(self.sign(parts).as_ref()).for_each(|(to, from)| *to = *from);
        tag
    }

    /// Returns the key of the DIF. Without a shared key, tags only detect corruption.
    pub(crate) fn of_dif(name: &str, shared: Option<&[u8]>) -> Self {
        Self::new(shared.unwrap_or_default()).derive(&[b"hermes-rina dif", name.as_bytes()])
    }

    /// Returns the key of a session.
    pub(crate) fn of_session(&self, nonce: &Nonce, cookie: &Cookie) -> Self {
        self.derive(&[b"session", nonce, &cookie.issued.to_be_bytes(), &cookie.mac])
    }

    /// Appends the tag of everything that `out` contains from `start` on.
    pub(crate) fn seal(&self, role: Role, start: usize, out: &mut BytesMut) {
        let tag = self.short(&[&[role as u8], out.get(start..).unwrap_or_default()]);
        out.put_slice(&tag);
    }

    /// Returns the datagram without its tag. `None`: the tag is wrong.
    pub(crate) fn open(&self, role: Role, datagram: &Bytes) -> Option<Bytes> {
        let end = datagram.len().checked_sub(TAG_LEN)?;
        let (body, tag) = datagram.split_at_checked(end)?;
        let expected = self.short(&[&[role as u8], body]);
        constant_time::verify_slices_are_equal(&expected, tag).ok()?;
        Some(datagram.slice(..end))
    }
}

/// The issuer of cookies.
#[derive(Debug)]
pub(crate) struct Cookies(Key);

impl Cookies {
    /// Returns a cookie for an initiator at this address.
    pub(crate) fn issue(&self, now: Duration, peer: SocketAddr, nonce: &Nonce) -> Cookie {
        let issued = micros(now);
        Cookie { issued, mac: self.mac(issued, peer, nonce) }
    }

    /// Whether this node issued the cookie, recently, to this initiator.
    pub(crate) fn is_valid(&self, now: Duration, peer: SocketAddr, nonce: &Nonce, cookie: &Cookie) -> bool {
        let expected = self.mac(cookie.issued, peer, nonce);
        let age = micros(now).checked_sub(cookie.issued);
        constant_time::verify_slices_are_equal(&expected, &cookie.mac).is_ok()
            && age.is_some_and(|age| age <= micros(COOKIE_LIFETIME))
    }

    fn mac(&self, issued: u64, peer: SocketAddr, nonce: &Nonce) -> [u8; TAG_LEN] {
        let address = match peer.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        self.0.short(&[b"cookie", &issued.to_be_bytes(), &address, &peer.port().to_be_bytes(), nonce])
    }
}

/// A time in microseconds.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Unpredictable numbers from a seed.
#[derive(Debug)]
pub(crate) struct Random {
    key: Key,
    count: u64,
}

impl Random {
    /// Returns the numbers and the cookie issuer of this seed.
    pub(crate) fn new(seed: &[u8; 32]) -> (Self, Cookies) {
        let seed = Key::new(seed);
        (Self { key: seed.derive(&[b"random"]), count: 0 }, Cookies(seed.derive(&[b"cookies"])))
    }

    pub(crate) fn bytes(&mut self) -> [u8; 16] {
        self.count += 1;
        self.key.short(&[&self.count.to_be_bytes()])
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.bytes().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}
