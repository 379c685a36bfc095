//! Decides which log lines are due while there is no channel to a neighbour.
//!
//! In: reasons of failed attempts, the number of waiting exchanges, the return of a channel, time. Out: log lines, each
//! once. Custody exists for links with outages of seconds, so those are not logged. Pure, and bounded: the reasons are
//! few.

use std::time::Duration;

use tokio::time::Instant;

/// The wait of exchanges after which a refusal is logged.
const FIRST_LOG_AFTER: Duration = Duration::from_secs(5);
/// The wait after which plain silence is logged.
const SILENCE_LOG_AFTER: Duration = Duration::from_secs(30);
/// The interval between two equal lines, however often the link changes.
const EQUAL_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// The limit of different reasons.
const MAX_REASONS: usize = 16;

/// The log state of one neighbour.
#[derive(Debug, Default)]
pub struct Wait {
    /// The time since which exchanges wait without a channel.
    since: Option<Instant>,
    reasons: Vec<Reason>,
    silence: ReportState,
}

#[derive(Debug)]
struct Reason {
    why: Box<str>,
    /// An attempt failed for this reason since the last channel.
    is_current: bool,
    told: ReportState,
}

/// The log state of one line.
#[derive(Debug, Default, Clone, Copy)]
struct ReportState {
    /// Logged since the last channel.
    is_told: bool,
    at: Option<Instant>,
}

/// A log line that is due.
#[derive(Debug, PartialEq, Eq)]
pub enum LogEvent {
    /// Attempts fail for this reason.
    No(Box<str>),
    /// Attempts get no answer.
    Silence,
}

impl ReportState {
    fn may_be(self, now: Instant) -> bool {
        !self.is_told && self.at.is_none_or(|at| now.saturating_duration_since(at) >= EQUAL_LOG_INTERVAL)
    }

    fn record(&mut self, now: Instant) {
        *self = Self { is_told: true, at: Some(now) };
    }
}

impl Wait {
    /// Notes a failed attempt. True if it is the first one for this reason since the last channel.
    pub fn failed(&mut self, why: &str) -> bool {
        if let Some(reason) = self.reasons.iter_mut().find(|reason| *reason.why == *why) {
            return !std::mem::replace(&mut reason.is_current, true);
        }
        let is_room = self.reasons.len() < MAX_REASONS;
        if is_room {
            self.reasons.push(Reason { why: why.into(), is_current: true, told: ReportState::default() });
        }
        is_room
    }

    /// Notes a refusal by a neighbour that answered, which may be temporary. True if a line is due.
    pub fn refused(&mut self, why: &str, now: Instant) -> bool {
        self.failed(why);
        let reason = self.reasons.iter_mut().find(|reason| *reason.why == *why);
        let due = reason.filter(|reason| reason.told.may_be(now));
        due.map(|reason| reason.told.record(now)).is_some()
    }

    /// The line that is due now, for this number of waiting exchanges.
    pub fn due(&mut self, now: Instant, exchanges: usize) -> Option<LogEvent> {
        let waited = now.saturating_duration_since(*self.since.get_or_insert(now));
        if exchanges == 0 || waited < FIRST_LOG_AFTER {
            return None;
        }
        if let Some(reason) = self.reasons.iter_mut().find(|reason| reason.is_current && reason.told.may_be(now)) {
            reason.told.record(now);
            return Some(LogEvent::No(reason.why.clone()));
        }
        let is_silent = !self.reasons.iter().any(|reason| reason.is_current);
        if waited < SILENCE_LOG_AFTER || !is_silent || !self.silence.may_be(now) {
            return None;
        }
        self.silence.record(now);
        Some(LogEvent::Silence)
    }

    /// Notes that no exchange waits.
    pub fn unwanted(&mut self) {
        self.since = None;
    }

    /// Notes that there is a channel. True if its absence was logged.
    pub fn up(&mut self) -> bool {
        self.since = None;
        let mut was_told = std::mem::take(&mut self.silence.is_told);
        for reason in &mut self.reasons {
            reason.is_current = false;
            was_told |= std::mem::take(&mut reason.told.is_told);
        }
        was_told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: &str = "Connection refused";

    /// The lines that are due in these seconds, each with its second.
    fn said(wait: &mut Wait, from: Instant, seconds: std::ops::Range<u64>, why: Option<&str>) -> Vec<(u64, LogEvent)> {
        let look = |second| {
            why.map(|why| wait.failed(why));
            wait.due(from + Duration::from_secs(second), 1).map(|line| (second, line))
        };
        seconds.filter_map(look).collect()
    }

    #[test]
    fn who_says_no_is_told_of_once_until_there_was_a_channel() {
        let (mut wait, begin) = (Wait::default(), Instant::now());
        assert!(wait.failed(NO) && !wait.failed(NO));
        assert_eq!(said(&mut wait, begin, 0..500, Some(NO)), [(5, LogEvent::No(NO.into()))]);
        assert_eq!(said(&mut wait, begin, 500..510, Some("No route to host")).len(), 1);
        assert!(wait.up() && !wait.up());
        assert!(wait.failed(NO), "it is counted again");
        assert_eq!(said(&mut wait, begin, 600..700, Some(NO)), [(605, LogEvent::No(NO.into()))]);
    }

    #[test]
    fn a_link_that_is_dark_for_long_is_told_of_and_one_that_comes_and_goes_is_not() {
        let (mut wait, begin) = (Wait::default(), Instant::now());
        assert_eq!(said(&mut wait, begin, 0..300, None), [(30, LogEvent::Silence)]);
        assert!(wait.up());
        for turn in 100..200 {
            assert_eq!(said(&mut wait, begin, turn * 4..turn * 4 + 3, Some(NO)), []);
            assert!(!wait.up());
        }
        let lines: usize = (0..100)
            .map(|turn| {
                let lines = said(&mut wait, begin, 1000 + turn * 12..1010 + turn * 12, Some(NO));
                assert_eq!(wait.up(), !lines.is_empty());
                lines.len()
            })
            .sum();
        assert!((2..=20).contains(&lines), "one a minute at the most: {lines}");
    }

    #[test]
    fn where_nobody_waits_nothing_is_said() {
        let (mut wait, begin) = (Wait::default(), Instant::now());
        for second in 0..100 {
            assert_eq!(wait.due(begin + Duration::from_secs(second), 0), None);
        }
        wait.unwanted();
        assert_eq!(said(&mut wait, begin, 100..129, None), [], "who comes now has not waited yet");
    }

    #[test]
    fn who_answers_and_refuses_is_told_of_at_once() {
        let (mut wait, now) = (Wait::default(), Instant::now());
        assert!(wait.refused("403", now) && !wait.refused("403", now) && wait.refused("501", now));
        assert!(wait.up() && !wait.refused("403", now));
        assert!(wait.refused("403", now + EQUAL_LOG_INTERVAL));
    }
}
