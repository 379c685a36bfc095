//! The direct path without a proxy, which measures the cost of the path itself.
//!
//! In: the origins. Out: their own addresses as listeners.

use anyhow::Result;

use super::Contender;
use crate::chain::{Chain, ClientListeners, Plan};

/// The baseline.
pub(crate) struct Direct;

impl Contender for Direct {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn version(&self) -> String {
        "-".into()
    }

    fn start(&self, plan: &Plan<'_>) -> Result<Option<Chain>> {
        let origins = plan.origins;
        let listeners = ClientListeners {
            http: origins.http,
            http2: origins.http2,
            secure: Some(origins.secure),
            connect: false,
            tcp: Some(origins.tcp),
            udp: Some(origins.udp),
            sink: Some(origins.sink),
            flood: Some(origins.flood),
        };
        Ok(Some(Chain { contender: self.name(), listeners, programs: Vec::new(), logs: Vec::new() }))
    }
}
