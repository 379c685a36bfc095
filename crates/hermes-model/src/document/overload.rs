//! `overload`: the steps of the node when memory, file descriptors or time run short.

use serde::{Deserialize, Serialize};

use super::is_default;
use crate::scalar::{ByteSize, HumanDuration};

/// The signals of an overload. Absent keys have their defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct OverloadSection {
    /// Memory of the process.
    #[serde(default, skip_serializing_if = "is_default")]
    pub memory: SignalSection<ByteSize>,
    /// Open file descriptors of the process.
    #[serde(default, skip_serializing_if = "is_default")]
    pub descriptors: SignalSection<u64>,
    /// Time that ready work of a worker waits.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delay: SignalSection<HumanDuration>,
}

/// A signal: its limit, and the percentage of the limit at which each step begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SignalSection<T> {
    /// The value that counts as 100 percent.
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub limit: Option<T>,
    /// Buffers shrink, and idle connections close.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shrink: Option<u16>,
    /// Sessions of low importance are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shed: Option<u16>,
    /// All but sessions of high importance are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuse: Option<u16>,
    /// No connection is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<u16>,
}

impl<T> Default for SignalSection<T> {
    fn default() -> Self {
        Self { limit: None, shrink: None, shed: None, refuse: None, stop: None }
    }
}

/// Unlike `default`, asks nothing of the type.
fn none<T>() -> Option<T> {
    None
}
