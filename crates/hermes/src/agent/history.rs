//! Keeps revocations and the highest revision on the node, because a controller may lose them.
//!
//! In: orders. Out: a file in the node's directory, the report of its content, and documents in which revoked keys stay
//! revoked until their certificates have expired. A key that a document no longer names stays revoked; only a
//! controller's order (`readmitted`) removes it.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Context as _;
use bytes::Bytes;
use hermes_controller::control::{Order, Report, Revocation};
use hermes_controller::digest::key_name;
use serde::{Deserialize, Serialize};

/// The file's name, beside the node's document.
pub(crate) const FILE: &str = "history.json";
/// The maximum number of kept keys. Those whose certificates live longest stay. One order names at most as many.
const MAX_KEPT: usize = 10_000;
/// The maximum number of keys in one report; further reports have the rest.
const MAX_REPORTED: usize = 300;

/// The kept history.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct History {
    /// The highest revision of an order, and its proof.
    latest: u64,
    proof: Vec<u8>,
    revoked: Vec<KeptKey>,
    /// The file could not be read. It is not overwritten, because the new content would lack its keys.
    #[serde(skip)]
    is_unreadable: bool,
    /// The first key that this conversation has not reported yet. `None`: all are reported.
    #[serde(skip)]
    rest: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct KeptKey {
    node: String,
    /// SHA-256 in hex.
    key: String,
    /// Milliseconds since 1970.
    until: u64,
    proof: Vec<u8>,
}

impl History {
    /// Loads the history from a node's directory. Empty if the file does not exist.
    ///
    /// # Errors
    /// The file cannot be read or is damaged, so the revoked keys are unknown.
    pub(super) fn load(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join(FILE);
        let remedy = || format!("cannot read revoked keys from {}; restore the file, or delete it", path.display());
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).with_context(remedy),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(remedy),
        }
    }

    /// Creates the history of a node whose file cannot be read. It records in memory and writes nothing.
    pub(super) fn unreadable() -> Self {
        Self { is_unreadable: true, ..Self::default() }
    }

    /// Records the revision and the revocations of an order. Returns true if anything changed.
    pub(super) fn record(&mut self, order: &Order) -> bool {
        let before = self.clone();
        if order.revision > self.latest && !order.proof.is_empty() {
            (self.latest, self.proof) = (order.revision, order.proof.to_vec());
        }
        let now = u64::try_from(super::seconds_now()).unwrap_or_default() * 1000;
        let is_readmitted = |kept: &KeptKey| {
            order.readmitted.iter().any(|readmitted| readmitted.key == kept.key && kept.until <= readmitted.until)
        };
        let is_over = |kept: &KeptKey| kept.until < now || is_readmitted(kept);
        self.revoked.retain(|kept| !is_over(kept));
        for Revocation { node, key, until, proof } in &order.revoked {
            let kept = KeptKey { node: node.clone(), key: key.clone(), until: *until, proof: proof.to_vec() };
            match self.revoked.iter_mut().find(|one| one.key == *key) {
                Some(one) => *one = kept,
                None => self.revoked.push(kept),
            }
        }
        self.revoked.sort_by_key(|kept| std::cmp::Reverse(kept.until));
        self.revoked.truncate(MAX_KEPT);
        *self != before && !self.is_unreadable
    }

    /// The content of the file.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Adds the history to the first report of a conversation.
    pub(super) fn fill_report(&mut self, report: &mut Report) {
        (report.latest, report.proof) = (self.latest, Bytes::copy_from_slice(&self.proof));
        self.rest = Some(0);
        self.fill_further_report(report);
    }

    /// Adds the next keys to a report.
    pub(super) fn fill_further_report(&mut self, report: &mut Report) {
        let Some(from) = self.rest.take() else { return };
        let told = self.revoked.iter().skip(from).take(MAX_REPORTED).map(|kept| Revocation {
            node: kept.node.clone(),
            key: kept.key.clone(),
            until: kept.until,
            proof: Bytes::copy_from_slice(&kept.proof),
        });
        report.revoked = told.collect();
        let to = from + MAX_REPORTED;
        self.rest = (to < self.revoked.len()).then_some(to);
        report.more = self.rest.is_some();
    }

    /// True while the controller lacks some of the keys.
    pub(super) fn has_rest(&self) -> bool {
        self.rest.is_some()
    }
}

/// Adds the keys that this node keeps as revoked to a controller's document. `config` is the path of the document.
///
/// # Errors
/// The same as for [`History::load`].
pub(crate) fn with_revoked<'a>(config: &Path, document: &'a [u8]) -> anyhow::Result<Cow<'a, [u8]>> {
    let directory = config.parent().unwrap_or(Path::new("."));
    let kept = History::load(directory)?.revoked;
    if kept.is_empty() {
        return Ok(Cow::Borrowed(document));
    }
    let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(document) else {
        return Ok(Cow::Borrowed(document));
    };
    let Some(identity) = value.get_mut("identity").and_then(serde_json::Value::as_object_mut) else {
        return Ok(Cow::Borrowed(document));
    };
    let mut names: Vec<serde_json::Value> = match identity.remove("revoked") {
        Some(serde_json::Value::Array(names)) => names,
        Some(name) => vec![name],
        None => Vec::new(),
    };
    let now = u64::try_from(super::seconds_now()).unwrap_or_default() * 1000;
    for kept in kept.iter().filter(|kept| kept.until >= now) {
        let name = serde_json::Value::from(key_name(&kept.key));
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if !names.is_empty() {
        identity.insert("revoked".to_owned(), names.into());
    }
    Ok(serde_json::to_vec(&value).map_or(Cow::Borrowed(document), Cow::Owned))
}

#[cfg(test)]
mod tests {
    use super::{History, KeptKey, MAX_REPORTED, Report};

    #[test]
    fn reports_have_all_keys_in_parts() {
        let kept = |number: usize| KeptKey {
            node: format!("n{number}"),
            key: format!("{number:064}"),
            until: u64::MAX,
            proof: vec![0; 32],
        };
        let count = 2 * MAX_REPORTED + 1;
        let mut history = History { revoked: (0..count).map(kept).collect(), ..History::default() };
        // A second conversation begins anew.
        for _ in 0..2 {
            let mut report = Report::default();
            history.fill_report(&mut report);
            let mut told = report.revoked;
            let mut more = report.more;
            while more {
                assert!(history.has_rest());
                let mut report = Report::default();
                history.fill_further_report(&mut report);
                assert!(report.revoked.len() <= MAX_REPORTED);
                told.extend(report.revoked);
                more = report.more;
            }
            assert!(!history.has_rest());
            let told: Vec<_> = told.into_iter().map(|one| one.node).collect();
            assert_eq!(told, (0..count).map(|number| format!("n{number}")).collect::<Vec<_>>());
        }
    }
}
