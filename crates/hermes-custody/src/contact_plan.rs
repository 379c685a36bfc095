//! Predicts when an intermittent link will be up again, if its contacts are periodic.
//!
//! In: times at which the link came up. Out: the next such time; `None` if no period was found. A wrong prediction
//! costs nothing, because data that is lost while the link is down is sent again. Callers pass the time.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use hermes_model::snapshot::Contact as Plan;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

/// The header in which a dialling node sends the contact plan of a link to its neighbour.
const CONTACT: HeaderName = HeaderName::from_static("hermes-contact-plan");

/// Returns the wall-clock time since 1970, from which the offset of a plan counts.
pub fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Writes a plan into the headers: its period and its offset since 1970, in milliseconds.
pub fn write_header(plan: &Plan, headers: &mut HeaderMap) {
    let value = format!("{} {}", plan.every.as_millis(), plan.from.as_millis());
    headers.extend(HeaderValue::from_str(&value).ok().map(|value| (CONTACT, value)));
}

/// Reads a plan from the headers. `None`: the headers contain no plan, or an invalid one.
pub fn read_header(headers: &HeaderMap) -> Option<Plan> {
    let (every, from) = headers.get(CONTACT)?.to_str().ok()?.split_once(' ')?;
    let [every, from] =
        [every, from].map(|millis| millis.parse::<u32>().ok().map(u64::from).map(Duration::from_millis));
    let plan = Plan { every: every?, from: from? };
    (plan.every >= Plan::MIN_PERIOD && plan.from < plan.every).then_some(plan)
}

/// Number of contacts that are remembered, and the minimum of them that must fit a period.
const MAX_CONTACTS: usize = 8;
const MIN_CONTACTS: usize = 3;
/// Maximum delay between a contact and its detection: a neighbour with data probes the link every 20 ms.
const MAX_DETECTION_DELAY: Duration = Duration::from_millis(30);
/// Minimum period; the prediction of a shorter one is useless.
const MIN_PERIOD: Duration = Duration::from_millis(300);
/// Maximum number of missed contacts in a row, after which the period is not trusted any more.
const MAX_MISSED_CONTACTS: u32 = 8;

/// Recent contacts of a link, and the period found in them.
#[derive(Debug)]
pub struct ContactPlan {
    /// Origin of the recorded times.
    epoch: Instant,
    came: VecDeque<Duration>,
    order: Option<Order>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Order {
    period: Duration,
    /// The time of the last contact that fits, moved to the earliest point of a period at which any contact was
    /// detected.
    last: Duration,
    /// Number of contacts that fit.
    fits: usize,
}

impl Default for ContactPlan {
    fn default() -> Self {
        Self { epoch: Instant::now(), came: VecDeque::new(), order: None }
    }
}

impl ContactPlan {
    /// Records a contact that was detected at `at`. If the link was not used before, it may have come up earlier.
    pub fn came(&mut self, at: Instant) {
        let at = at.saturating_duration_since(self.epoch).max(self.came.back().copied().unwrap_or_default());
        if self.came.len() == MAX_CONTACTS {
            self.came.pop_front();
        }
        self.came.push_back(at);
        self.order = self.find();
    }

    /// Returns the period that most contacts fit. Among equally good periods, the longest wins. A period counts only if
    /// two contacts were as far apart.
    fn find(&self) -> Option<Order> {
        let pairs = self.came.iter().enumerate().flat_map(|(index, one)| {
            self.came.iter().skip(index + 1).map(move |other| (*one, other.saturating_sub(*one)))
        });
        let orders = pairs.filter(|(_, period)| *period >= MIN_PERIOD).map(|(one, period)| self.order(one, period));
        let is_one = |order: &Order| order.fits >= MIN_CONTACTS && order.period >= MIN_PERIOD;
        orders.filter(is_one).max_by_key(|order| (order.fits, order.period))
    }

    /// Fits a period to the contacts from `begin` on.
    fn order(&self, begin: Duration, period: Duration) -> Order {
        let (begin, of_period, late) = (begin.as_secs_f64(), period.as_secs_f64(), MAX_DETECTION_DELAY.as_secs_f64());
        let (mut fitting, mut periods) = (Vec::with_capacity(MAX_CONTACTS), 1.0);
        for at in self.came.iter().map(Duration::as_secs_f64) {
            let count = ((at - begin) / of_period).round();
            if count >= 0.0 && (at - begin - count * of_period).abs() <= late {
                fitting.push((at, count));
                periods = count.max(1.0);
            }
        }
        // The average over all contacts is more precise than the distance of two.
        let whole = fitting.last().map_or(of_period, |(at, _)| (at - begin) / periods);
        let early = fitting.iter().map(|(at, count)| at - begin - count * whole).fold(0.0, f64::min);
        let last = Duration::from_secs_f64((begin + early + periods * whole).max(0.0));
        Order { period: Duration::from_secs_f64(whole.max(0.0)), last, fits: fitting.len() }
    }

    /// Predicts the next contact after `now`. `None`: no period was found, or it is not trusted any more.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        let Order { period, last, .. } = self.order?;
        let last = self.epoch + last;
        let Some(since) = now.checked_duration_since(last) else { return Some(last) };
        let periods = u32::try_from(since.as_nanos() / period.as_nanos()).ok()?;
        // The period of a link without contacts for long has probably changed.
        (periods < MAX_MISSED_CONTACTS).then(|| last + period * (periods + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(times: &[u64]) -> ContactPlan {
        let mut contact = ContactPlan::default();
        let epoch = contact.epoch;
        times.iter().for_each(|at| contact.came(epoch + Duration::from_millis(*at)));
        contact
    }

    fn next(times: &[u64], now: u64) -> Option<u64> {
        let contact = after(times);
        let next = contact.next(contact.epoch + Duration::from_millis(now))?;
        Some((next - contact.epoch).as_millis() as u64)
    }

    #[test]
    fn a_plan_is_told_and_only_a_plan() {
        let mut headers = HeaderMap::new();
        let plan = Plan { every: Duration::from_secs(3), from: Duration::from_millis(1500) };
        write_header(&plan, &mut headers);
        assert_eq!(read_header(&headers), Some(plan));
        assert_eq!(plan.wait(Duration::from_millis(10_000)), Duration::from_millis(500));
        assert_eq!(plan.wait(Duration::from_millis(10_500)), Duration::from_secs(3));
        for no in ["", "3000", "3000 3000", "0 0", "1 0", "3000 -1", "99999999999 1"] {
            headers.insert(CONTACT, HeaderValue::from_static(no));
            assert_eq!(read_header(&headers), None, "{no}");
        }
    }

    fn is_near(found: Option<u64>, at: u64) -> bool {
        found.is_some_and(|found| found.abs_diff(at) <= 8)
    }

    #[test]
    fn what_comes_in_order_is_expected() {
        let seen = [5, 3010, 6000, 9015];
        assert!(is_near(next(&seen, 9020), 12_003), "{:?}", next(&seen, 9020));
        assert!(is_near(next(&seen, 12_500), 15_004), "{:?}", next(&seen, 12_500));
        // The link was not observed in between.
        assert!(is_near(next(&[0, 3000, 12_000, 15_000], 15_100), 18_000));
        // The link was up already when it was used again.
        assert!(is_near(next(&[1234, 3000, 6000, 9000, 13_300, 15_010], 15_100), 18_000));
    }

    #[test]
    fn what_comes_by_chance_is_not() {
        assert_eq!(next(&[0, 3000], 3100), None, "too few");
        assert_eq!(next(&[0, 3000, 7700], 7800), None);
        assert_eq!(next(&[0, 100, 200, 290, 400], 410), None, "too often");
        assert_eq!(next(&[0, 3000, 6000, 9000], 100_000), None, "long ago");
    }

    #[test]
    fn an_order_that_changes_is_found_anew() {
        let seen = [0, 3000, 6000, 9000, 10_500, 12_500, 14_500, 16_500, 18_500, 20_500];
        assert!(is_near(next(&seen, 20_600), 22_500), "{:?}", next(&seen, 20_600));
    }
}
