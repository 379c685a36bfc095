//! The identifier of a publication in its channel, as a client sends it in `Last-Event-ID`.
//!
//! In: text of a client. Out: an epoch and a sequence number. A relay begins a channel with a new epoch, so an identifier
//! of an earlier life of the channel never passes for one of this life. Never: a position without its epoch.

use std::fmt;
use std::str::FromStr;

/// The identifier of a publication: `EPOCH-SEQUENCE`, 16 hexadecimal digits and a decimal number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId {
    /// A random number of the channel's life at its relay.
    pub epoch: u64,
    /// 1 for the first publication of the channel. A new root counts on, in an epoch of its own.
    pub sequence: u64,
}

impl EventId {
    /// The position before the oldest publication that the channel keeps. No channel has the epoch 0.
    pub const OLDEST: Self = Self { epoch: 0, sequence: 0 };
}

/// The text is not an event identifier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed event identifier; expected EPOCH-SEQUENCE as in the `id` of a publication")]
pub struct MalformedEventId;

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.epoch, self.sequence)
    }
}

impl FromStr for EventId {
    type Err = MalformedEventId;

    fn from_str(text: &str) -> Result<Self, MalformedEventId> {
        let (epoch, sequence) = text.trim().split_once('-').ok_or(MalformedEventId)?;
        // The parsers of the standard library accept a sign.
        let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if epoch.len() != 16 || !is_digits(epoch) || !is_digits(sequence) {
            return Err(MalformedEventId);
        }
        let epoch = u64::from_str_radix(epoch, 16).map_err(|_| MalformedEventId)?;
        Ok(Self { epoch, sequence: sequence.parse().map_err(|_| MalformedEventId)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_reads_as_it_was_written() {
        let id = EventId { epoch: 0xab, sequence: 17 };
        assert_eq!(id.to_string(), "00000000000000ab-17");
        assert_eq!(id.to_string().parse(), Ok(id));
        for malformed in ["", "1", "-", "00000000000000ab", "00000000000000ab-+1", "00000000000000ab-", "ab-1"] {
            assert_eq!(malformed.parse::<EventId>(), Err(MalformedEventId), "{malformed}");
        }
    }
}
