//! Enrolment tokens: each allows one node to enrol once, at a controller of the overlay.
//!
//! In: randomness. Out: `hermes1.ID.SECRET.PIN`. The store has the id and a digest of the secret. The pin is the digest
//! of the CA's certificate, so that the node rejects any other controller.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;

use crate::digest::{hex, sha256};

const MARK: &str = "hermes1";
const ID: usize = 8;
const SECRET: usize = 24;

/// A complete token: its holder may enrol.
#[derive(Clone, PartialEq, Eq)]
pub struct EnrolmentToken {
    /// The id.
    pub id: String,
    /// The secret.
    secret: String,
    /// SHA-256 of the CA's certificate (DER).
    pub pin: [u8; 32],
}

impl EnrolmentToken {
    /// Generates a token with the pin of a CA's certificate.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn generate(pin: [u8; 32]) -> Result<Self, String> {
        let mut random = [0; ID + SECRET];
        aws_lc_rs::rand::fill(&mut random).map_err(|error| format!("no randomness in the system: {error}"))?;
        let (id, secret) = random.split_at(ID);
        Ok(Self { id: BASE64.encode(id), secret: BASE64.encode(secret), pin })
    }

    /// The digest of the secret, for the store.
    pub fn digest(&self) -> String {
        hex(&sha256(self.secret.as_bytes()))
    }

    /// Compares a digest with that of the secret, in constant time.
    pub fn proves(&self, digest: &str) -> bool {
        verify_slices_are_equal(self.digest().as_bytes(), digest.as_bytes()).is_ok()
    }

    /// The token as text.
    pub fn reveal(&self) -> String {
        let Self { id, secret, pin } = self;
        format!("{MARK}.{id}.{secret}.{}", BASE64.encode(pin))
    }
}

/// Leaves the secret out of logs.
impl fmt::Debug for EnrolmentToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MARK}.{}....", self.id)
    }
}

impl FromStr for EnrolmentToken {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let [mark, id, secret, pin] = text.trim().split('.').collect::<Vec<_>>()[..] else { return None };
            let length = |text: &str| BASE64.decode(text).ok().map(|bytes| bytes.len());
            let is_one = mark == MARK && length(id) == Some(ID) && length(secret) == Some(SECRET);
            let pin = BASE64.decode(pin).ok()?.try_into().ok()?;
            is_one.then(|| Self { id: id.to_owned(), secret: secret.to_owned(), pin })
        };
        // The error does not repeat the text, which may be most of a token.
        read().ok_or_else(|| {
            format!("invalid token; expected the complete output of `hermes token create`, which begins with {MARK}.")
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::EnrolmentToken;

    #[test]
    fn a_token_proves_itself_and_no_other() {
        let ticket = EnrolmentToken::generate([7; 32]).unwrap();
        let other = EnrolmentToken::generate([7; 32]).unwrap();
        let again: EnrolmentToken = format!("{}\n", ticket.reveal()).parse().unwrap();
        assert!(again == ticket && again.pin == [7; 32]);
        assert!(ticket.proves(&again.digest()) && !ticket.proves(&other.digest()) && !ticket.proves(""));
        assert!(!format!("{ticket:?}").contains(ticket.reveal().split('.').nth(2).unwrap()));
    }

    #[test]
    fn what_is_no_token_is_refused_without_being_repeated() {
        let whole = EnrolmentToken::generate([7; 32]).unwrap().reveal();
        for wrong in [&whole[1..], &whole[..whole.len() - 5], "hermes1.a.b.c", "", &whole.replace("hermes1", "hermes2")]
        {
            let error = wrong.parse::<EnrolmentToken>().unwrap_err();
            assert!(wrong.len() < 10 || !error.contains(wrong), "{error}");
        }
    }
}
