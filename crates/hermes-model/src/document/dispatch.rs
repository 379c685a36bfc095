//! `dispatch`: how new connections come to workers.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::scalar::HumanDuration;
use crate::snapshot::DispatchMode;

/// A mode, or a mode with settings: both `dispatch: directed` and `dispatch: {mode: directed, hung-after: 50ms}` are valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatchSection {
    /// How a worker is chosen.
    pub mode: DispatchMode,
    /// Time without a turn of its loop after which a worker gets no connection.
    pub hung_after: Option<HumanDuration>,
    /// How many connections a session counts for, in percent.
    pub session_weight: Option<u16>,
    /// How far above the average of connections a worker may be, in percent of the average.
    pub connections_offset: Option<u16>,
    /// The same for pending tasks.
    pub pending_offset: Option<u16>,
    /// Number of workers that share the connections to a destination.
    pub locality: Option<u16>,
    /// Whether each worker stays on a core of its own.
    pub pin: Option<bool>,
    /// Number of workers for listeners that hold up the others.
    pub sandbox_workers: Option<u16>,
    /// Time that a listener may hold up its workers within ten seconds.
    pub sandbox_after: Option<HumanDuration>,
}

/// The section as a map.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Whole {
    #[serde(default)]
    mode: DispatchMode,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hung_after: Option<HumanDuration>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    session_weight: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    connections_offset: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pending_offset: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    locality: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pin: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sandbox_workers: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sandbox_after: Option<HumanDuration>,
}

impl Serialize for DispatchSection {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            mode,
            hung_after,
            session_weight,
            connections_offset,
            pending_offset,
            locality,
            pin,
            sandbox_workers,
            sandbox_after,
        } = *self;
        if *self == (Self { mode, ..Self::default() }) {
            return mode.serialize(serializer);
        }
        Whole {
            mode,
            hung_after,
            session_weight,
            connections_offset,
            pending_offset,
            locality,
            pin,
            sandbox_workers,
            sandbox_after,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for DispatchSection {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DispatchVisitor)
    }
}

struct DispatchVisitor;

impl<'de> Visitor<'de> for DispatchVisitor {
    type Value = DispatchSection;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mode such as directed, or {mode: directed, hung-after: 50ms}")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<DispatchSection, E> {
        let mode = text.parse().map_err(E::custom)?;
        Ok(DispatchSection { mode, ..DispatchSection::default() })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DispatchSection, A::Error> {
        let whole = Whole::deserialize(MapAccessDeserializer::new(map))?;
        let Whole {
            mode,
            hung_after,
            session_weight,
            connections_offset,
            pending_offset,
            locality,
            pin,
            sandbox_workers,
            sandbox_after,
        } = whole;
        Ok(DispatchSection {
            mode,
            hung_after,
            session_weight,
            connections_offset,
            pending_offset,
            locality,
            pin,
            sandbox_workers,
            sandbox_after,
        })
    }
}
