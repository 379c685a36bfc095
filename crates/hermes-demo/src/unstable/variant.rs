//! The ways of a download, and the papers' figures for each.
//!
//! In: a way and a size. Out: its name, what it needs, published figures. The papers: "Mitigating Intermittent Links With
//! Name-Based Networking" (Figure 2; 45 KB and 500 KB) and "Hermes: A General-Purpose Proxy-Enabled Networking
//! Architecture" (Table VI; 1 MB and 5 MB). Theirs are means over requests at random times.

use clap::ValueEnum;
use serde::Serialize;

/// The sizes of the papers, binary.
pub(super) const SIZES: [u64; 4] = [45 << 10, 500 << 10, 1 << 20, 5 << 20];

/// The path of a download and its protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Variant {
    /// TCP from end to end, forwarded as IP packets.
    Direct,
    /// One Envoy for each node, hop by hop over TLS, with retries, as in the papers.
    Envoy,
    /// Envoy with kernel retransmission timeouts of at most one second.
    EnvoyTuned,
    /// HTTP in custody of Hermes, hop by hop over TLS.
    Hermes,
    /// Custody with a cache at each node, and a second client that requests the same object.
    HermesCache,
    /// TLS 1.3 end to end through CONNECT, in custody of Hermes.
    HermesConnect,
}

/// A published figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Published {
    /// Mean of the complete downloads; `None` if none arrived.
    pub(super) seconds: Option<f64>,
    /// The share of complete downloads, in percent.
    pub(super) arrived: f64,
}

impl Variant {
    /// All ways, in the order of the table.
    pub(crate) const ALL: [Self; 6] =
        [Self::Direct, Self::Envoy, Self::EnvoyTuned, Self::Hermes, Self::HermesCache, Self::HermesConnect];

    /// The name in the output.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct, TCP over IP",
            Self::Envoy => "Envoy, as in the papers",
            Self::EnvoyTuned => "Envoy, tcp_rto_max_ms=1000",
            Self::Hermes => "Hermes, hop by hop",
            Self::HermesCache => "Hermes, with caches",
            Self::HermesConnect => "Hermes, CONNECT, TLS 1.3",
        }
    }

    /// The short name on the command line, in file names and in progress.
    pub(super) fn slug(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    pub(super) fn is_envoy(self) -> bool {
        matches!(self, Self::Envoy | Self::EnvoyTuned)
    }

    pub(super) fn is_hermes(self) -> bool {
        matches!(self, Self::Hermes | Self::HermesCache | Self::HermesConnect)
    }

    /// Ways on which next to nothing arrives: many repetitions would add no information.
    pub(super) fn is_hopeless(self) -> bool {
        matches!(self, Self::Direct | Self::Envoy)
    }

    /// End-to-end round trips that a download takes at least.
    pub(super) fn round_trips(self) -> u32 {
        if self == Self::HermesConnect { 2 } else { 1 }
    }

    /// The papers' figure for the same protocol; `again` is the second request for the same object.
    pub(super) fn published(self, size: u64, again: bool) -> Option<Published> {
        let (seconds, arrived) = match (self, size, again) {
            (Self::Direct, size, false) if SIZES.contains(&size) => (None, 0.0),
            (Self::Envoy | Self::Hermes | Self::HermesCache, 46_080, false) => (Some(41.0), 97.5),
            (Self::Envoy | Self::Hermes | Self::HermesCache, 512_000, false) => (Some(153.0), 85.0),
            (Self::Envoy | Self::Hermes | Self::HermesCache, 1_048_576, false) => (Some(115.82), 100.0),
            (Self::Envoy | Self::Hermes | Self::HermesCache, 5_242_880, false) => (Some(601.49), 100.0),
            (Self::HermesCache, 1_048_576, true) => (Some(133.69), 100.0),
            (Self::HermesCache, 5_242_880, true) => (Some(618.75), 100.0),
            (Self::HermesConnect, 1_048_576, false) => (Some(101.67), 80.0),
            (Self::HermesConnect, 5_242_880, false) => (Some(567.3), 32.5),
            _ => return None,
        };
        Some(Published { seconds, arrived })
    }
}

/// NDN with a reliable link protocol, as published.
pub(super) fn ndn(size: u64) -> Option<Published> {
    let seconds = match size {
        46_080 => 17.0,
        512_000 => 30.0,
        _ => return None,
    };
    Some(Published { seconds: Some(seconds), arrived: 100.0 })
}

/// Seconds of a direct download without outage, as published.
pub(super) fn published_without_outage(size: u64) -> Option<f64> {
    match size {
        512_000 => Some(0.4),
        1_048_576 => Some(1.02),
        5_242_880 => Some(4.85),
        _ => None,
    }
}

/// Reads `45K` or `5M`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let most = crate::content::MAX_BYTES as u64;
    let (number, unit) = match text.strip_suffix(['K', 'k']) {
        Some(number) => (number, 10),
        None => (text.strip_suffix(['M', 'm']).ok_or("write 45K or 1M")?, 20),
    };
    let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << unit));
    size.filter(|size| (1..=most).contains(size)).ok_or(format!("from 1K to {}M", most >> 20))
}

/// A size with its unit.
pub(super) fn said(size: u64) -> String {
    if size.is_multiple_of(1 << 20) { format!("{} MB", size >> 20) } else { format!("{} KB", size >> 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_and_bounded() {
        assert_eq!(["45K", "500K", "1M", "5m"].map(|text| parse_size(text).unwrap_or_default()), SIZES);
        assert_eq!(SIZES.map(said), ["45 KB", "500 KB", "1 MB", "5 MB"]);
        for bad in ["", "M", "0K", "9M", "45", "-1K", "99999999999999999999M", "18014398509481985K"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_papers_figures_are_found_by_their_sizes() {
        for size in SIZES {
            assert!(Variant::Hermes.published(size, false).is_some());
        }
        assert!(ndn(SIZES[0]).is_some() && ndn(SIZES[1]).is_some() && ndn(SIZES[2]).is_none());
    }
}
