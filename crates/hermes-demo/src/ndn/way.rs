//! The ways from consumer to producer, the files, and the paper's figures.
//!
//! In: nothing. Out: names and numbers. Never: behaviour.

use serde::Serialize;

/// The files of the paper's Table VIII, in bytes.
pub(crate) const SIZES: [usize; 4] = [0, 1_090_352, 26_236_224, 50_000_000];
/// Interests under way at once: the paper's pipeline. The empty file has one.
pub(super) const PIPELINE: usize = 20;

/// A way from the consumer to the producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Way {
    /// A UDP face from end to end.
    Udp,
    /// A TCP face from end to end.
    Tcp,
    /// Through an overlay whose nodes speak HTTP/1.1, HTTP/2 or HTTP/3 with each other.
    H1,
    H2,
    H3,
}

/// The delay that the paper's overlay added to a direct fetch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Published {
    Milliseconds(f64),
    Percent(f64),
}

impl Way {
    pub(super) const DIRECT: [Self; 2] = [Self::Udp, Self::Tcp];
    pub(super) const OVERLAYS: [Self; 3] = [Self::H1, Self::H2, Self::H3];

    /// The name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Udp => "direct, UDP",
            Self::Tcp => "direct, TCP",
            Self::H1 => "overlay, HTTP/1.1",
            Self::H2 => "overlay, HTTP/2",
            Self::H3 => "overlay, HTTP/3",
        }
    }

    /// The protocol in documents; empty for direct ways.
    pub(super) fn protocol(self) -> &'static str {
        match self {
            Self::Udp | Self::Tcp => "",
            Self::H1 => "h1",
            Self::H2 => "h2",
            Self::H3 => "h3",
        }
    }

    pub(super) fn is_overlay(self) -> bool {
        Self::OVERLAYS.contains(&self)
    }
}

/// The paper's figure for a file.
pub(super) fn published(size: usize) -> Option<Published> {
    match SIZES.iter().position(|known| *known == size)? {
        0 => Some(Published::Milliseconds(2.2)),
        1 => Some(Published::Percent(14.0)),
        _ => Some(Published::Percent(11.0)),
    }
}
