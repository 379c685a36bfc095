//! Checks the membership of a DIF (RINA), which listeners and routes share.
//!
//! In: the keys `dif` and `dif-key`. Out: the membership. Never: the content of the key.

use std::sync::Arc;

use super::context::Context;
use super::report::Report;
use crate::snapshot::DifMembership;

/// Maximum length of the name of a DIF in bytes: that of `hermes-rina`.
const MAX_NAME_BYTES: usize = 64;

/// Builds the membership; `None` if it has no name.
pub(super) fn membership(
    dif: Option<&String>,
    key: Option<&String>,
    at: &str,
    context: &Context<'_>,
    report: &mut Report,
) -> Option<DifMembership> {
    let at_dif = format!("{at}.dif");
    let Some(dif) = dif else {
        report.problem(at_dif, "missing name of the DIF; add dif: NAME, such as backbone");
        return None;
    };
    if dif.is_empty() || dif.len() > MAX_NAME_BYTES {
        report.problem(at_dif, format!("invalid name of a DIF; use 1 to {MAX_NAME_BYTES} bytes"));
    }
    let at_key = format!("{at}.dif-key");
    if key.is_none() {
        let message = "any node that knows the name may enrol; add dif-key: FILE, which all members have";
        report.warning(&at_key, message);
    }
    let key = context.optional_file(&at_key, key, report);
    Some(DifMembership { dif: Arc::from(dif.as_str()), key })
}
