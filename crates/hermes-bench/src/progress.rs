//! Progress messages on standard error, each with the time since the program began.

use std::{sync::OnceLock, time::Instant};

static START: OnceLock<Instant> = OnceLock::new();

/// Starts the clock; without this call it starts at the first message.
pub(crate) fn start() {
    START.get_or_init(Instant::now);
}

/// Prints a message with the time.
pub(crate) fn print(text: &str) {
    eprintln!("[{:>7.1} s] {text}", START.get_or_init(Instant::now).elapsed().as_secs_f64());
}
