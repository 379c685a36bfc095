//! Remedies for permanent failures.
//!
//! In: a status, or the head with which a proxy refuses a tunnel. Out: text.

use std::time::SystemTime;

use http::response::Parts;

use super::client::AttemptError;
use super::response::ResponseHead;

/// Returns the user's next step for a status.
pub(super) fn of(status: u16) -> &'static str {
    match status {
        401 => "authentication required: write --header 'authorization: ...'",
        403 => "access denied: `hermes explain` shows what a node of yours decides",
        404 | 410 => "not found: look at the URL, and whether --proxy is missing",
        407 => "proxy authentication required: write --header 'proxy-authorization: ...'",
        204 | 205 => "the response has no content: look at the URL",
        300..=399 => "the redirect has no usable location: look at the URL",
        501 | 505 => "not supported by the origin: look at the URL and at --proxy",
        _ => "a retry would get the same response: look at the URL and at --header",
    }
}

/// Formats a response as one line.
pub(super) fn said(answer: &ResponseHead) -> String {
    let status = http::StatusCode::from_u16(answer.status).unwrap_or_default();
    let mut text = format!("{} {}", answer.status, status.canonical_reason().unwrap_or_default()).trim_end().to_owned();
    if let Some(by) = &answer.proxy_status {
        text.push_str(&format!(" ({by})"));
    }
    text
}

/// Describes a proxy that refuses a tunnel.
pub(super) fn of_proxy(head: &Parts) -> AttemptError {
    let answer = ResponseHead::read(head, SystemTime::now());
    let why = format!("the proxy opens no tunnel: {}", said(&answer));
    if answer.may_pass() {
        return AttemptError::Passing { why, after: answer.retry_after };
    }
    AttemptError::Lasting { why, remedy: of(answer.status) }
}
