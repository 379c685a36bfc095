//! Nonces of Interests.
//!
//! In: a random start. Out: numbers that differ from each other. Never: a secret, since nonces only tell a repeated
//! Interest from one that loops.

/// Nonces after a random start.
pub(crate) struct NonceSequence(u32);

impl NonceSequence {
    pub(crate) fn new(start: u32) -> Self {
        Self(start)
    }

    /// The next nonce.
    pub(crate) fn next_nonce(&mut self) -> [u8; 4] {
        self.0 = self.0.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        self.0.to_be_bytes()
    }
}
