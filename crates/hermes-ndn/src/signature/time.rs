//! Timestamps of a ValidityPeriod (Certificate Format 2): `YYYYMMDDThhmmss` in UTC.
//!
//! In: fifteen bytes, or seconds since the Unix epoch. Out: the other form. Dates before 1970 are not supported: a
//! certificate with such a start is valid from the epoch. No leap seconds exist here.

const DAY: u64 = 86_400;

/// Seconds since the Unix epoch of a timestamp; `None` if it is malformed.
pub(super) fn parse(text: &[u8]) -> Option<u64> {
    let (date, time) = match text {
        [date @ .., b'T', hour1, hour2, minute1, minute2, second1, second2] if date.len() == 8 => {
            (date, [*hour1, *hour2, *minute1, *minute2, *second1, *second2])
        }
        _ => return None,
    };
    let (year, month, day) = (number(&date[..4])?, number(&date[4..6])?, number(&date[6..])?);
    let (hour, minute, second) = (number(&time[..2])?, number(&time[2..4])?, number(&time[4..])?);
    let valid = (1..=12).contains(&month) && (1..=days_in(year, month)).contains(&day);
    if !valid || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    Some(match days_before(year, month) {
        Some(days) => (days + day - 1) * DAY + hour * 3600 + minute * 60 + second,
        None => 0,
    })
}

/// The timestamp of these seconds since the Unix epoch; the year 9999 ends the range.
pub(super) fn format(seconds: u64) -> [u8; 15] {
    let mut days = seconds / DAY;
    let mut year = 1970;
    while days >= days_in_year(year) && year < 9999 {
        days -= days_in_year(year);
        year += 1;
    }
    if days >= days_in_year(year) {
        return *b"99991231T235959";
    }
    let mut month = 1;
    while days >= days_in(year, month) {
        days -= days_in(year, month);
        month += 1;
    }
    let mut out = *b"00000000T000000";
    let second = seconds % DAY;
    put(&mut out[..4], year);
    put(&mut out[4..6], month);
    put(&mut out[6..8], days + 1);
    put(&mut out[9..11], second / 3600);
    put(&mut out[11..13], second / 60 % 60);
    put(&mut out[13..], second % 60);
    out
}

fn number(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0, |value, digit| digit.is_ascii_digit().then(|| value * 10 + u64::from(digit - b'0')))
}

fn put(out: &mut [u8], mut number: u64) {
    for digit in out.iter_mut().rev() {
        // The cast is lossless: a digit is less than ten.
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

/// Days from the epoch to the first day of a month; `None` before 1970.
fn days_before(year: u64, month: u64) -> Option<u64> {
    let years = year.checked_sub(1970)?;
    let leap_days = leap_years_before(year) - leap_years_before(1970);
    Some(years * 365 + leap_days + (1..month).map(|month| days_in(year, month)).sum::<u64>())
}

/// The number of leap years from year 1 up to the year before this one.
fn leap_years_before(year: u64) -> u64 {
    let last = year - 1;
    last / 4 - last / 100 + last / 400
}

fn days_in_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}
