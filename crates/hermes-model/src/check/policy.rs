//! Checks the policies of a route: `rewrite`, `retry`, `custody`, `cache`, `upstream-rate-limit`, `resume`, `timeout`.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::context::Names;
use super::header;
use super::node::duration;
use super::report::Report;
use crate::authority::Authority;
use crate::document::policy as section;
use crate::document::policy::RetryOn;
use crate::rewrite::{PathRewrite, QueryRewrite, Rewrite, Template};
use crate::scalar::ByteSize;
use crate::snapshot::{Cache, Custody, Durable, Resume, Retry, Timeouts, UpstreamRateLimit};

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);
const MIB: u64 = 1 << 20;

pub(super) fn timeouts(section: section::Timeout, at: &str, report: &mut Report) -> Timeouts {
    let default = Timeouts::default();
    let week = 7 * 24 * HOUR;
    let tick = 100 * MS;
    Timeouts {
        connect: duration(&format!("{at}.connect"), section.connect, default.connect, MS..=HOUR / 12, report),
        idle: section.idle.map(|idle| duration(&format!("{at}.idle"), Some(idle), Duration::ZERO, tick..=week, report)),
        progress: duration(&format!("{at}.progress"), section.progress, default.progress, tick..=24 * HOUR, report),
    }
}

pub(super) fn retry(section: &section::Retry, at: &str, report: &mut Report) -> Retry {
    if !(1..=10).contains(&section.attempts) {
        let message = format!("{} is out of range; must be 1 to 10, including the first attempt", section.attempts);
        report.problem(format!("{at}.attempts"), message);
    }
    let base = duration(&format!("{at}.backoff.base"), section.backoff.base, 100 * MS, MS..=HOUR / 60, report);
    let default = Duration::from_secs(5).max(base);
    let backoff_max = duration(&format!("{at}.backoff.max"), section.backoff.max, default, MS..=HOUR / 6, report);
    if backoff_max < base {
        report.problem(format!("{at}.backoff.max"), "must not be less than backoff.base");
    }
    Retry {
        on_connect_failure: section.on.iter().any(|on| *on == RetryOn::ConnectFailure),
        on_reset: section.on.iter().any(|on| *on == RetryOn::Reset),
        on_5xx: section.on.iter().any(|on| *on == RetryOn::ServerErrors),
        on_status: section
            .on
            .iter()
            .filter_map(|on| match on {
                RetryOn::Status(status) => Some(*status),
                _ => None,
            })
            .collect(),
        attempts: section.attempts,
        backoff_base: base,
        backoff_max,
        budget: section.budget.0,
    }
}

/// Returns a size or its default, and reports a value out of range.
pub(super) fn size(
    at: String,
    written: Option<ByteSize>,
    default: u64,
    range: RangeInclusive<u64>,
    report: &mut Report,
) -> u64 {
    let size = written.map_or(default, |size| size.0);
    if !range.contains(&size) {
        let (min, max) = (ByteSize(*range.start()), ByteSize(*range.end()));
        report.problem(at, format!("{} is out of range; must be {min} to {max}", ByteSize(size)));
    }
    size
}

/// Returns a size on disk, which requires a state directory.
fn disk(written: Option<ByteSize>, at: &str, names: &Names<'_>, report: &mut Report) -> u64 {
    let default = if names.has_state { 1 << 30 } else { 0 };
    let disk = size(format!("{at}.disk"), written, default, 0..=1 << 50, report);
    if disk > 0 && !names.has_state {
        let message = "missing state directory; add `state: DIR`, or remove this key";
        report.problem(format!("{at}.disk"), message);
    }
    disk
}

pub(super) fn cache(section: section::Cache, at: &str, names: &Names<'_>, report: &mut Report) -> Cache {
    let month = 31 * 24 * HOUR;
    Cache {
        memory: size(format!("{at}.memory"), section.memory, 64 * MIB, MIB..=1 << 40, report),
        disk: disk(section.disk, at, names, report),
        shared: section.shared.unwrap_or(true),
        stale_if_error: duration(
            &format!("{at}.stale-if-error"),
            section.stale_if_error,
            HOUR,
            Duration::ZERO..=month,
            report,
        ),
    }
}

pub(super) fn custody(section: section::Custody, at: &str, names: &Names<'_>, report: &mut Report) -> Custody {
    let week = 7 * 24 * HOUR;
    let memory = size(format!("{at}.memory"), section.memory, 64 * MIB, MIB..=1 << 40, report);
    let disk = disk(section.disk, at, names, report);
    if section.durable == Durable::Fsync && disk == 0 {
        let message = "fsync requires a state directory; add `state: DIR`, or remove this key";
        report.problem(format!("{at}.durable"), message);
    }
    let deadline = duration(&format!("{at}.deadline"), section.deadline, 15 * HOUR / 60, HOUR / 3600..=week, report);
    Custody { deadline, memory, disk, durable: section.durable }
}

pub(super) fn upstream_rate_limit(
    section: section::UpstreamRateLimit,
    at: &str,
    report: &mut Report,
) -> UpstreamRateLimit {
    const QUEUE: RangeInclusive<u32> = 1..=100_000;
    let queue = section.queue.unwrap_or(1024);
    if !QUEUE.contains(&queue) {
        let (min, max) = (QUEUE.start(), QUEUE.end());
        report.problem(format!("{at}.queue"), format!("{queue} is out of range; must be {min} to {max} requests"));
    }
    let deadline = duration(&format!("{at}.deadline"), section.deadline, HOUR / 60, 100 * MS..=24 * HOUR, report);
    UpstreamRateLimit { deadline, queue: queue as usize }
}

pub(super) fn resume(section: section::Resume, at: &str, report: &mut Report) -> Resume {
    let day = 24 * HOUR;
    Resume { deadline: duration(&format!("{at}.deadline"), section.deadline, HOUR / 6, HOUR / 3600..=day, report) }
}

pub(super) fn rewrite(section: &section::Rewrite, at: &str, report: &mut Report) -> Rewrite {
    let response = &section.response;
    Rewrite {
        authority: section
            .authority
            .as_ref()
            .and_then(|template| report.ok_or_report(|| format!("{at}.authority"), authority(template))),
        path: section.path.as_ref().and_then(|path| report.ok_or_report(|| format!("{at}.path"), rewrite_path(path))),
        query: query(&section.query, &format!("{at}.query"), report),
        headers: header::rewrite(at, &section.set_headers, &section.add_headers, &section.remove_headers, report),
        response: header::rewrite(
            &format!("{at}.response"),
            &response.set_headers,
            &response.add_headers,
            &response.remove_headers,
            report,
        ),
    }
}

/// A literal authority is validated here. One with placeholders is validated with each request.
fn authority(template: &Template) -> Result<Template, String> {
    let text = template.to_string();
    if template.is_literal() {
        Authority::parse(&text, None)
            .map_err(|error| format!("invalid authority {text:?}: {error}; use HOST or HOST:PORT"))?;
    }
    Ok(template.clone())
}

fn rewrite_path(section: &section::RewritePath) -> Result<PathRewrite, String> {
    match (&section.from, &section.pattern) {
        (Some(from), None) => PathRewrite::prefix(from, &section.to),
        (None, Some(pattern)) => PathRewrite::pattern(pattern, &section.to),
        (Some(_), Some(_)) => Err("from conflicts with pattern; keep one of them".to_owned()),
        (None, None) => Err("missing from or pattern; add from: /PREFIX/ or pattern: /{name}/{rest*}".to_owned()),
    }
}

fn query(section: &section::RewriteQuery, at: &str, report: &mut Report) -> QueryRewrite {
    for (index, name) in section.remove.iter().enumerate() {
        if section.set.contains_key(name) {
            let message = format!("{name:?} is also set, which replaces the old value; remove it here");
            report.problem(format!("{at}.remove[{index}]"), message);
        }
    }
    QueryRewrite {
        set: section.set.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        remove: section.remove.iter().cloned().collect(),
    }
}
