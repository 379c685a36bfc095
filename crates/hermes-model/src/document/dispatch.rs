//! `dispatch`: how new connections come to workers.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::scalar::HumanDuration;
use crate::snapshot::DispatchMode;

/// A mode, or a mode with settings: both `dispatch: directed` and `dispatch: {mode: directed, hung-after: 50ms}` are valid.
// `remote` derives functions for the map alone. The traits below call them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields, rename_all = "kebab-case")]
pub struct DispatchSection {
    /// How a worker is chosen.
    #[serde(default)]
    pub mode: DispatchMode,
    /// Time without a turn of its loop after which a worker gets no connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hung_after: Option<HumanDuration>,
    /// How many connections a session counts for, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_weight: Option<u16>,
    /// How far above the average of connections a worker may be, in percent of the average.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections_offset: Option<u16>,
    /// The same for pending tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_offset: Option<u16>,
    /// Number of workers that share the connections to a destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locality: Option<u16>,
    /// Whether each worker stays on a core of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<bool>,
    /// Number of workers for listeners that hold up the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_workers: Option<u16>,
    /// Time that a listener may hold up its workers within ten seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_after: Option<HumanDuration>,
}

impl Serialize for DispatchSection {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == (Self { mode: self.mode, ..Self::default() }) {
            return self.mode.serialize(serializer);
        }
        Self::serialize(self, serializer)
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
        DispatchSection::deserialize(MapAccessDeserializer::new(map))
    }
}
